"""Compression of chunks: shuffled numbers, then LZ4 or ZSTD, by Blosc2. Lossless but for ``int8``.

The numbers of a chunk differ least in their sign and exponent. A shuffle places these bits next to each other. On bf16
KV of the 12-layer demo model, in GB per second of processor time for chunks of 192 KiB:

    ==========================  ==========  ========  ==========
    method                      share kept  compress  decompress
    ==========================  ==========  ========  ==========
    LZ4, bits shuffled                0.74      1.52        2.42
    ZSTD, bytes shuffled              0.64      0.47        1.61
    ``zstandard``, NumPy shuffle      0.67      0.35        0.38
    8-bit numbers, ZSTD               0.46      0.36        0.65
    ==========================  ==========  ========  ==========

A packed chunk is a Blosc2 frame, which names its method. So any packed chunk is read whatever the setting is now.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ragcache_core.chunkstore.quantization import NumberType, dequantise, quantise, quantised_sizes
from ragcache_core.config import CompressionName, check_compression
from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logger_of(__name__)

CODEC = "blosc2"
"""Name of the codec in the record of a compressed chunk."""
HINT = "pip install 'ragcache[compression]'"
_CHUNKS_PER_SLOT = 2
_CHUNKS_PER_SLOT_INT8 = 5
_LARGEST_SHARE = 0.95
_SLOWEST_LOAD = 1.5
_LINK_BYTES = 8 << 20
_SAMPLE_BYTES = 2 << 20
_ITEM_BYTES = (1, 2, 4)


class Packing(NamedTuple):
    """A compression method. ``item_bytes`` is the size of a number, ``number_type`` is for ``int8``."""

    name: str
    item_bytes: int
    number_type: NumberType | None = None


@dataclass(frozen=True, slots=True)
class PackingSpeed:
    """The effect of a method on a sample: share of bytes kept, and decompressed bytes per second of a core."""

    method: Packing
    share: float
    unpack_bytes_per_s: float

    def load_s(self, link_bytes_per_s: float, num_cores: int) -> float:
        """Return the seconds per byte for a link and ``num_cores`` cores."""
        return self.share / link_bytes_per_s + 1.0 / (self.unpack_bytes_per_s * num_cores)


def is_installed() -> bool:
    """Return whether compression is available."""
    return find_spec("blosc2") is not None


def pack(method: Packing, payload: Buffer) -> memoryview:
    """Return the compressed frame of a chunk; without loss where ``int8`` cannot represent it."""
    library, codecs = _library()
    codec, shuffle = codecs[method.name]
    if method.number_type is not None:
        payload = quantise(payload, method.number_type) or payload
    packed = library.compress2(
        payload, codec=codec, clevel=1, typesize=method.item_bytes, filters=[shuffle], nthreads=1
    )
    return memoryview(packed)


def unpack(packed: Buffer, target: memoryview, *, is_approximate: bool = False) -> bool:
    """Decompress a frame into ``target`` and return ``True``; ``False`` if it is not a frame of this size.

    A frame of 8-bit numbers is none, unless ``is_approximate``: exact KV never comes from one.
    """
    library, _ = _library()
    try:
        num_bytes, num_packed, _ = library.get_cbuffer_sizes(packed)
        if num_packed != memoryview(packed).nbytes:
            return False
        if num_bytes == target.nbytes:
            library.decompress2(packed, dst=np.frombuffer(target, np.uint8), nthreads=1)
        elif is_approximate and num_bytes in quantised_sizes(target.nbytes):
            quantised = np.empty(num_bytes, np.uint8)
            library.decompress2(packed, dst=quantised, nthreads=1)
            return dequantise(quantised, target)
        else:
            return False
    except (ValueError, RuntimeError, TypeError):
        return False
    return True


def choose(speeds: Sequence[PackingSpeed], link_bytes_per_s: float, num_cores: int) -> PackingSpeed | None:
    """Return the method with the fewest bytes that is fast enough for a tier.

    A load with it takes at most 1.5 times as long as without: the tier holds more for that. Return None where no
    method keeps at most 95 % of the bytes in that time.
    """
    limit_s = _SLOWEST_LOAD / link_bytes_per_s
    good = [s for s in speeds if s.share <= _LARGEST_SHARE and s.load_s(link_bytes_per_s, num_cores) <= limit_s]
    return min(good, key=lambda speed: speed.share, default=None)


def measure(names: Sequence[str], sample: Sequence[memoryview]) -> list[PackingSpeed]:
    """Return the effect of each method on a sample, with its best number size."""
    return [
        min((_measure(Packing(name, size), sample) for size in _ITEM_BYTES), key=lambda speed: speed.share)
        for name in names
    ]


class Compression:
    """Compresses the chunks of one tier, by a method chosen at the first ones.

    One thread at a time may call :meth:`pack` and :meth:`record_write`.

    Attributes:
        is_on: whether chunks may be packed.
        is_approximate: whether frames of 8-bit numbers are read, as ``int8`` writes them.
        chunks_per_slot: how many times the chunks that fit uncompressed a tier may hold.
    """

    def __init__(
        self, setting: CompressionName, what: str, *, num_readers: int = 1, number_type: NumberType | None = None
    ) -> None:
        """Start without a method.

        Args:
            setting: ``CacheConfig.compression``.
            what: the tier, for the log.
            num_readers: threads that load.
            number_type: the chunks' dtype, for ``int8``.

        Raises:
            ConfigError: the setting names a method, and Blosc2 is not installed or cannot be imported.
        """
        check_compression(setting)
        self.is_on = setting != "off" and is_installed()
        self._what = what
        self._method: Packing | None = None
        self._is_decided = not self.is_on
        if self.is_on:
            try:
                _library()  # not when the first blocks come
            except ImportError as error:
                if setting != "auto":
                    raise ConfigError(f"compression is {setting!r}, but blosc2 cannot be imported: {error}") from error
                self.stop(f"blosc2 cannot be imported ({error})")
        elif setting == "auto":
            self.stop(f"to compress it, {HINT}")
        self.is_approximate = setting == "int8"
        self._names = ("lz4", "zstd") if setting == "auto" else (setting,)
        self._is_auto = setting == "auto"
        self.chunks_per_slot = _CHUNKS_PER_SLOT_INT8 if setting == "int8" else _CHUNKS_PER_SLOT
        if setting == "int8":
            self._method, self._is_decided = Packing(setting, 1, number_type), True
        self._num_cores = min(num_readers, max((os.cpu_count() or 1) // 2, 1))
        self._written_bytes = self._write_s = 0.0

    def stop(self, why: str) -> None:
        """Store this tier's chunks uncompressed from now on."""
        logger.info("%s stores KV uncompressed: %s", self._what, why)
        self.is_on, self._method, self._is_decided = False, None, True

    def record_write(self, num_bytes: int, seconds: float) -> None:
        """Record the duration of a write, from which ``auto`` estimates the tier's speed."""
        self._written_bytes += num_bytes
        self._write_s += seconds

    def pack(self, payloads: Sequence[memoryview]) -> list[memoryview]:
        """Return the stored form of chunks: frames, or the chunks if compression saves too little."""
        if not self._is_decided and payloads:
            self._decide(payloads)
        method = self._method
        if method is None:
            return list(payloads)
        packed = [pack(method, payload) for payload in payloads]
        return [
            frame if frame.nbytes <= _LARGEST_SHARE * payload.nbytes else payload
            for frame, payload in zip(packed, payloads, strict=True)
        ]

    def _decide(self, payloads: Sequence[memoryview]) -> None:
        """Choose the method; ``auto`` does so after enough writes."""
        if self._is_auto and (self._written_bytes < _LINK_BYTES or not self._write_s):
            return
        self._is_decided = True
        speeds = measure(self._names, payloads[: max(_SAMPLE_BYTES // payloads[0].nbytes, 1)])
        if not self._is_auto:
            self._method = speeds[0].method
            return
        link = self._written_bytes / self._write_s
        chosen = choose(speeds, link, self._num_cores)
        self._method = None if chosen is None else chosen.method
        measured = ", ".join(
            f"{s.method.name} keeps {s.share:.2f} of the bytes at {s.unpack_bytes_per_s / 1e9:.2f} GB/s" for s in speeds
        )
        name = "no compression" if chosen is None else chosen.method.name
        logger.info("%s uses %s: it writes %.2f GB/s; on this machine %s", self._what, name, link / 1e9, measured)


class FrameBuffers:
    """A thread's memory for frames until they are decompressed."""

    def __init__(self, chunk_bytes: int, *, is_approximate: bool) -> None:
        self._chunk_bytes = chunk_bytes
        self._is_approximate = is_approximate
        self._own = threading.local()

    def records(self, lengths: Sequence[int], targets: Sequence[memoryview]) -> list[memoryview]:
        """Return read targets for records of these lengths: chunks directly, frames into this memory."""
        memory: bytearray = getattr(self._own, "memory", bytearray())
        num_bytes = sum(length for length in lengths if length < self._chunk_bytes)
        if len(memory) < num_bytes:
            memory = self._own.memory = bytearray(num_bytes)
        records, rest = [], memoryview(memory)
        for length, target in zip(lengths, targets, strict=True):
            is_frame = length < self._chunk_bytes
            records.append(rest[:length] if is_frame else target)
            rest = rest[length:] if is_frame else rest
        return records

    def unpack(self, record: memoryview, target: memoryview) -> bool:
        """Return whether ``target`` has the chunk of a record, after decompressing a frame into it."""
        return len(record) == self._chunk_bytes or unpack(record, target, is_approximate=self._is_approximate)


def _measure(method: Packing, sample: Sequence[memoryview]) -> PackingSpeed:
    num_bytes = sum(payload.nbytes for payload in sample)
    packed = [pack(method, payload) for payload in sample]
    target = memoryview(bytearray(sample[0].nbytes))
    begun_s = time.thread_time()
    for frame in packed:
        unpack(frame, target)
    unpack_s = max(time.thread_time() - begun_s, 1e-9)
    return PackingSpeed(method, sum(f.nbytes for f in packed) / num_bytes, num_bytes / unpack_s)


@cache
def _library() -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """Return Blosc2, imported at first use: a second, and some 70 MB."""
    import blosc2

    return blosc2, {
        "lz4": (blosc2.Codec.LZ4, blosc2.Filter.BITSHUFFLE),
        "zstd": (blosc2.Codec.ZSTD, blosc2.Filter.SHUFFLE),
        "int8": (blosc2.Codec.ZSTD, blosc2.Filter.SHUFFLE),
    }
