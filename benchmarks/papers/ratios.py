"""Ratios of two systems on the same traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from ragcache_core.config import CacheConfig

Summary = Mapping[str, Any]
DEFAULT_POLICY = str(CacheConfig().policy)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Pairs of two systems, seed by seed: the mean of their ratios and its spread, a standard deviation."""

    pairs: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.pairs)

    @property
    def spread(self) -> float:
        return stdev(self.pairs) if len(self.pairs) > 1 else 0.0

    @classmethod
    def of(cls, key: str, over: Sequence[Summary], under: Sequence[Summary]) -> Ratio:
        """Return what ``over`` has of ``key`` for each of what ``under`` has."""
        return cls(tuple(a[key] / b[key] for a, b in zip(over, under, strict=True)))
