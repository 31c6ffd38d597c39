"""Approximate KV in 8 bits a number: 64 neighbouring numbers share a scale.

It is opt-in (``CacheConfig.compression="int8"``). What is read differs from what was written by about 1/254 of the
largest of 64 numbers at most, and by the rounding of scale and result. So an answer may differ from the one that is
computed without a cache.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import numpy as np

NumberType = Literal["float32", "float16", "bfloat16"]
"""KV dtypes that have an 8-bit form."""
NUMBER_TYPES: Final = get_args(NumberType)
_PER_SCALE: Final = 64
"""Numbers with one scale: a head's vector, or half of one."""
_LARGEST: Final = 127
_LARGEST_FLOAT16: Final = float(np.finfo(np.float16).max)


def quantise(payload: Any, number_type: NumberType) -> bytes | None:
    """Return the scales (float16) and 8-bit numbers of a chunk, with the index of its number type behind them.

    Args:
        payload: numbers of ``number_type``, as an object with their bytes.
        number_type: the KV dtype.

    Returns:
        ``None`` for a chunk with a number that is not finite, or whose size is no multiple of 64 numbers.
    """
    if memoryview(payload).nbytes % (_PER_SCALE * _item_bytes(number_type)):
        return None
    rows = _floats(payload, number_type).reshape(-1, _PER_SCALE)
    with np.errstate(over="ignore", invalid="ignore"):
        scales = (np.abs(rows).max(axis=1, keepdims=True) / _LARGEST).astype(np.float16)
        if not np.isfinite(scales).all():
            return None
        divisors = scales.astype(np.float32)
        divisors[divisors == 0.0] = np.inf  # of numbers too small for a scale nothing is left
        numbers = np.clip(np.rint(rows / divisors), -_LARGEST, _LARGEST).astype(np.int8)
    return b"".join((scales.tobytes(), numbers.tobytes(), bytes([NUMBER_TYPES.index(number_type)])))


def quantised_sizes(num_bytes: int) -> set[int]:
    """Return the sizes in bytes that :func:`quantise` gives chunks of ``num_bytes``, by their number types."""
    return {_size(num_bytes, each) for each in NUMBER_TYPES}


def dequantise(data: Any, target: memoryview) -> bool:
    """Write the numbers of a quantised chunk to ``target``, and return ``True``; ``False`` if it has another form."""
    stored = np.frombuffer(data, np.uint8)
    if not len(stored) or stored[-1] >= len(NUMBER_TYPES):
        return False
    number_type: NumberType = NUMBER_TYPES[int(stored[-1])]
    if len(stored) != _size(target.nbytes, number_type):
        return False
    num_numbers = target.nbytes // _item_bytes(number_type)
    scales = stored[: -1 - num_numbers].view(np.float16).astype(np.float32)
    rows = stored[-1 - num_numbers : -1].view(np.int8).astype(np.float32).reshape(-1, _PER_SCALE)
    rows *= scales[:, np.newaxis]
    np.frombuffer(target, np.uint8)[:] = _bytes_of(rows, number_type)
    return True


def _size(num_bytes: int, number_type: NumberType) -> int:
    num_numbers = num_bytes // _item_bytes(number_type)
    return num_numbers + 2 * (num_numbers // _PER_SCALE) + 1


def _item_bytes(number_type: NumberType) -> int:
    return 4 if number_type == "float32" else 2


def _floats(payload: Any, number_type: NumberType) -> np.ndarray:
    if number_type == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(payload, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(payload, np.float32 if number_type == "float32" else np.float16).astype(np.float32)


def _bytes_of(rows: np.ndarray, number_type: NumberType) -> np.ndarray:
    if number_type == "bfloat16":
        bits = rows.view(np.uint32)
        halves = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to the nearest, ties to even
        return halves.astype(np.uint16).reshape(-1).view(np.uint8)
    if number_type == "float16":
        rows = rows.clip(-_LARGEST_FLOAT16, _LARGEST_FLOAT16)  # a scale that was rounded up leads beyond
    return rows.astype(np.float32 if number_type == "float32" else np.float16).reshape(-1).view(np.uint8)
