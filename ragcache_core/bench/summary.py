"""Means of runs over seeds with their confidence intervals, and ratios between engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from ragcache_core.bench.results import TimedRun

SLO_FACTOR = 5.0
"""The TTFT limit of a throughput, over the first engine's mean TTFT at the lowest rate."""
# Student's t for a two-sided 95 % interval, by degrees of freedom from 1 on.
_STUDENT_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_NORMAL = 1.95996


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and its 95 % confidence interval, which one seed does not have."""

    mean: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], *, is_ratio: bool = False) -> Estimate:
        """Return the mean of ``values`` (Student's t); of ratios the geometric mean."""
        sample = np.log(values) if is_ratio else np.asarray(values, float)
        back: Callable[[float], float] = math.exp if is_ratio else float
        mean = float(sample.mean())
        if len(sample) < 2:
            return cls(back(mean))
        reach = _student_t(len(sample) - 1) * float(sample.std(ddof=1)) / math.sqrt(len(sample))
        return cls(back(mean), back(mean - reach), back(mean + reach))


@dataclass(frozen=True, slots=True)
class Point:
    """One engine with one size of host memory at one rate, over all seeds.

    Attributes:
        ttft_ratio: the first engine's mean TTFT over this engine's, seed by seed.
        tier_shares: the share of prompt tokens that each tier served.
    """

    engine: str
    host_bytes: int
    rate: int
    requests_per_s: float
    num_seeds: int
    ttft_mean_s: Estimate
    ttft_p50_s: Estimate
    ttft_p99_s: Estimate
    ttft_ratio: Estimate | None
    tpot_s: Estimate | None
    completed_rps: Estimate
    cached_share: Estimate
    tier_shares: dict[str, float]
    reordered_share: float
    cpu_s_per_request: Estimate | None


class ComparisonSummary:
    """Points of a comparison, by rate and in the order of its engines; ratios are to the first engine."""

    def __init__(self, runs: Iterable[TimedRun], engines: Sequence[str]) -> None:
        places: dict[tuple[str, int, int], list[TimedRun]] = {}
        for run in sorted(runs, key=lambda run: (run.rate, engines.index(run.engine), run.host_bytes, run.seed)):
            places.setdefault((run.engine, run.host_bytes, run.rate), []).append(run)
        first: dict[tuple[int, int], TimedRun] = {}
        for (name, _, rate), of in places.items():
            for run in of if name == engines[0] else ():
                first.setdefault((rate, run.seed), run)
        self.points = [_point(of, first) for of in places.values()]
        base = next((point.ttft_mean_s.mean for point in self.points if point.engine == engines[0]), math.inf)
        self.slo_s = SLO_FACTOR * base

    def point(self, engine: str, rate: int) -> Point | None:
        """Return an engine's point with the least host memory; ``None`` without a run."""
        return next((point for point in self.points if (point.engine, point.rate) == (engine, rate)), None)

    def curves(self) -> dict[str, list[Point]]:
        """Return the points of each engine and size of host memory in the order of rates, by a name for both."""
        sizes = {point.host_bytes for point in self.points if point.host_bytes}
        curves: dict[str, list[Point]] = {}
        for point in self.points:
            size = f", {point.host_bytes / 2**20:,.0f} MiB" if point.host_bytes and len(sizes) > 1 else ""
            curves.setdefault(f"{point.engine}{size}", []).append(point)
        return curves

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {"points": [asdict(point) for point in self.points]}


def highest_rate(curve: Iterable[tuple[float, float]], slo_s: float) -> float:
    """Return the rate at which the line through (rate, TTFT) first exceeds ``slo_s``; 0 if it always does."""
    rate, ttft_s = 0.0, 0.0
    for next_rate, next_ttft_s in curve:
        if next_ttft_s > slo_s:
            if not rate:
                return 0.0
            return rate + (next_rate - rate) * (slo_s - ttft_s) / (next_ttft_s - ttft_s)
        rate, ttft_s = next_rate, next_ttft_s
    return rate


def _student_t(degrees: int) -> float:
    """Return the quantile; beyond the table by an expansion around the normal quantile, accurate to 0.002."""
    if degrees <= len(_STUDENT_T):
        return _STUDENT_T[degrees - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def _point(runs: Sequence[TimedRun], first: dict[tuple[int, int], TimedRun]) -> Point:
    run = runs[0]
    tpot = [fmean(run.tpot_s) for run in runs if run.tpot_s]
    cpu = [run.cpu_s / len(run.ttft_s) for run in runs if run.cpu_s is not None]
    pairs = [(first[run.rate, run.seed], run) for run in runs if (run.rate, run.seed) in first]
    ratios = [fmean(theirs.ttft_s) / fmean(ours.ttft_s) for theirs, ours in pairs if theirs.engine != ours.engine]
    tiers = dict.fromkeys(tier for run in runs for tier in run.tokens_by_tier)
    return Point(
        run.engine,
        run.host_bytes,
        run.rate,
        run.requests_per_s,
        len(runs),
        Estimate.of([fmean(run.ttft_s) for run in runs]),
        Estimate.of([float(np.percentile(run.ttft_s, 50)) for run in runs]),
        Estimate.of([float(np.percentile(run.ttft_s, 99)) for run in runs]),
        Estimate.of(ratios, is_ratio=True) if ratios else None,
        Estimate.of(tpot) if tpot else None,
        Estimate.of([run.completed_rps for run in runs]),
        Estimate.of([run.cached_share for run in runs]),
        {tier: fmean(run.tokens_by_tier.get(tier, 0) / run.num_prompt_tokens for run in runs) for tier in tiers},
        fmean(run.num_reordered / len(run.ttft_s) for run in runs),
        Estimate.of(cpu) if cpu else None,
    )
