"""Polynomial hashes of token ranges at two secret points.

The hash of tokens ``t[a:b]`` at a point ``x`` is ``sum((t[a + i] + 1) * x**i) mod P`` with a prime ``P`` below 2**32.
Two prefix sums give the hash of any range of a prompt. Both points together give 64 bits. A client that does not know
the points cannot construct two texts with the same hash.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

PRIME = 4294967291
_P = np.uint64(PRIME)
_MIN_POINT = 1 << 16
_FIRST_POWERS = 1 << 12

Tokens = NDArray[np.int32]
Sums = tuple[NDArray[np.uint64], NDArray[np.uint64]]
"""Prefix sums of a prompt at both points, each of shape ``(num_tokens + 1,)``."""


class PolynomialHash:
    """Hashes token ranges at two points.

    Args:
        points: two numbers from 65,536 to ``PRIME - 1``.
    """

    def __init__(self, points: tuple[int, int]) -> None:
        if not all(_MIN_POINT <= point < PRIME for point in points):
            raise ValueError(f"points are {points}: both must lie between {_MIN_POINT} and {PRIME - 1}")
        self.points = points
        self._powers: list[NDArray[np.uint64]] = []
        self._inverses: list[NDArray[np.uint64]] = []
        self._grow(_FIRST_POWERS)

    @classmethod
    def random(cls) -> Self:
        """Return a hash with random points of this process."""
        one, other = (_MIN_POINT + secrets.randbelow(PRIME - _MIN_POINT) for _ in range(2))
        return cls((one, other))

    def prefix_sums(self, tokens: Tokens) -> Sums:
        """Return the prefix sums of a prompt."""
        num_tokens = len(tokens)
        if num_tokens > len(self._powers[0]):
            self._grow(2 * num_tokens)
        shifted = tokens.astype(np.uint64) + np.uint64(1)
        one, other = (_sums_of(shifted * powers[:num_tokens] % _P) for powers in self._powers)
        return one, other

    def window_keys(self, sums: Sums, size: int) -> NDArray[np.uint32]:
        """Return the 32-bit hash of each window of ``size`` tokens, at the first point."""
        num_windows = len(sums[0]) - size
        if num_windows <= 0:
            return np.zeros(0, np.uint32)
        ranges = (sums[0][size:] - sums[0][:num_windows]) % _P
        return (ranges * self._inverses[0][:num_windows] % _P).astype(np.uint32)

    def range_hashes(self, sums: Sums, starts: NDArray[Any], ends: NDArray[Any]) -> NDArray[np.uint64]:
        """Return the 64-bit hash of each range ``[start, end)``."""
        one, other = (
            (own[ends] - own[starts]) % _P * inverses[starts] % _P
            for own, inverses in zip(sums, self._inverses, strict=True)
        )
        hashes: NDArray[np.uint64] = (one << np.uint64(32)) | other
        return hashes

    def range_hash(self, sums: Sums, start: int, end: int) -> int:
        """Return the 64-bit hash of one range."""
        return int(self.range_hashes(sums, np.array([start]), np.array([end]))[0])

    def _grow(self, num_powers: int) -> None:
        self._powers = [_geometric(point, num_powers) for point in self.points]
        self._inverses = [_geometric(pow(point, -1, PRIME), num_powers) for point in self.points]


def as_tokens(token_ids: Sequence[int] | Tokens) -> Tokens:
    """Return token ids as an array of 32-bit integers, shape ``(num_tokens,)``."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype(np.int32, copy=False)
    return np.frombuffer(array("i", token_ids), np.int32)


def _sums_of(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values, out=sums[1:])
    return sums


def _geometric(base: int, num: int) -> NDArray[np.uint64]:
    values = np.ones(1, np.uint64)
    while len(values) < num:  # base**(k + n) = base**k * base**n
        values = np.concatenate([values, values * np.uint64(pow(base, len(values), PRIME)) % _P])
    return values[:num]
