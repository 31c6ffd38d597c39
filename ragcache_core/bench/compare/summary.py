"""What runs add up to: means over seeds with their confidence, engines against one another seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from ragcache_core.bench.compare.search.question import SearchRun
from ragcache_core.bench.compare.sessions import Run, middle

SLO_FACTOR = 5.0
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and its 95 % interval; of one seed there is no interval, ``low`` and ``high`` are ``None``."""

    mean: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], *, is_ratio: bool = False) -> Estimate:
        """Return the estimate of the mean of ``values`` (Student's t); the geometric one of ratios."""
        sample = np.log(values) if is_ratio else np.asarray(values, float)
        back: Callable[[float], float] = math.exp if is_ratio else float
        mean = float(sample.mean())
        if len(sample) < 2:
            return cls(back(mean))
        from scipy.stats import t

        reach = float(t.ppf((1 + _CONFIDENCE) / 2, len(sample) - 1) * sample.std(ddof=1) / math.sqrt(len(sample)))
        return cls(back(mean), back(mean - reach), back(mean + reach))


@dataclass(frozen=True, slots=True)
class SearchPoint:
    """The searches in front of the requests of a :class:`Point`: seconds, all of them and what answers waited for.

    Of all requests ``speculated_share`` had anything sent ahead, and ``right_share`` got their answer from it.
    """

    search_s: Estimate
    search_p99_s: Estimate
    unhidden_s: Estimate
    num_stages: float
    speculated_share: float
    right_share: float
    num_speculations: float


@dataclass(frozen=True, slots=True)
class Point:
    """One engine with one size of host memory at one rate, over all seeds. Times in seconds."""

    peer: str
    host_bytes: int
    rate: int
    requests_per_s: float
    num_seeds: int
    ttft_mean_s: Estimate
    ttft_p50_s: Estimate
    ttft_p99_s: Estimate
    tpot_s: Estimate | None
    completed_rps: Estimate
    cached_share: Estimate
    tier_shares: Mapping[str, float]
    reordered_share: float
    cpu_s_per_request: Estimate | None
    memory_bytes: int | None
    search: SearchPoint | None = None


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times lower the mean TTFT of ``peer`` is than that of ``baseline``, with the same requests."""

    peer: str
    baseline: str
    host_bytes: int
    rate: int
    ttft: Estimate


@dataclass(frozen=True, slots=True)
class Throughput:
    """The highest rate at which an engine keeps the mean TTFT within ``slo_s``.

    ``is_bound``: with some seed it kept it at all rates, so that the mean is a lower bound. ``ratio`` is to that of the
    baseline, seed by seed.
    """

    peer: str
    host_bytes: int
    slo_s: float
    requests_per_s: Estimate
    is_bound: bool
    ratio: Estimate | None


class Summary:
    """Runs by engine, host memory and rate. ``host_bytes`` are all sizes that were asked for."""

    def __init__(self, runs: Sequence[Run], peers: Sequence[str], host_bytes: Sequence[int], num_rates: int) -> None:
        self.peers = [name for name in peers if any(run.peer == name for run in runs)]
        self.host_bytes = tuple(host_bytes)
        self.main_host = middle(host_bytes)
        self.main_rate = middle(range(num_rates))
        self._runs = {run.key: run for run in runs}
        places = sorted({(run.peer, run.host_bytes, run.rate) for run in runs}, key=self._place)
        self.points = [_point(self._of(*place)) for place in places]

    def at(self, peer: str, host_bytes: int, rate: int) -> list[Run]:
        """Return the runs of an engine seed by seed; one without host memory has the same ones for every size."""
        return self._of(peer, host_bytes, rate) or self._of(peer, 0, rate)

    def point(self, peer: str, host_bytes: int, rate: int) -> Point | None:
        """Return what the runs of :meth:`at` add up to; ``None`` without any."""
        runs = self.at(peer, host_bytes, rate)
        return _point(runs) if runs else None

    def ratios(self, baseline: str, host_bytes: int) -> list[Ratio]:
        """Return how every other engine compares with ``baseline``, seed by seed, with that much host memory."""
        found = []
        for peer in self.peers:
            for rate in sorted({run.rate for run in self._runs.values()}):
                theirs = {run.seed: run for run in self.at(baseline, host_bytes, rate)}
                pairs = [
                    fmean(theirs[run.seed].ttft_s) / fmean(run.ttft_s)
                    for run in self.at(peer, host_bytes, rate)
                    if run.seed in theirs
                ]
                if pairs and peer != baseline:
                    found.append(Ratio(peer, baseline, host_bytes, rate, Estimate.of(pairs, is_ratio=True)))
        return found

    def throughputs(self) -> list[Throughput]:
        """Return what each engine can serve within the SLO: five times the first engine's TTFT at the lowest rate."""
        lowest = [fmean(run.ttft_s) for run in self.at(self.peers[0], self.main_host, 0)] if self.peers else []
        if not lowest:
            return []
        slo_s = SLO_FACTOR * fmean(lowest)
        base: dict[int, float] = {}
        found = []
        for peer in self.peers:
            curves = self._curves(peer)
            best = {seed: highest_rate(curve, slo_s) for seed, curve in curves.items()}
            if not best:
                continue
            base = base or best
            ratios = [rate / base[seed] for seed, rate in best.items() if rate > 0 < base.get(seed, 0)]
            found.append(
                Throughput(
                    peer,
                    self.main_host,
                    slo_s,
                    Estimate.of(list(best.values())),
                    any(rate == curves[seed][-1][0] for seed, rate in best.items()),
                    Estimate.of(ratios, is_ratio=True) if ratios else None,
                )
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "points": [asdict(point) for point in self.points],
            "ratios": [
                asdict(ratio) for size in self.host_bytes for peer in self.peers for ratio in self.ratios(peer, size)
            ],
            "throughput_at_slo": [asdict(throughput) for throughput in self.throughputs()],
        }

    def _of(self, peer: str, host_bytes: int, rate: int) -> list[Run]:
        place = (peer, host_bytes, rate)
        found = [run for run in self._runs.values() if (run.peer, run.host_bytes, run.rate) == place]
        return sorted(found, key=lambda run: run.seed)

    def _curves(self, peer: str) -> dict[int, list[tuple[float, float]]]:
        """Return (rate, mean TTFT) in the order of rates, for each seed."""
        curves: dict[int, list[tuple[float, float]]] = {}
        for run in sorted(self._runs.values(), key=lambda run: run.requests_per_s):
            if run.peer == peer and run.host_bytes in (0, self.main_host):
                curves.setdefault(run.seed, []).append((run.requests_per_s, fmean(run.ttft_s)))
        return curves

    def _place(self, place: tuple[str, int, int]) -> tuple[int, int, int]:
        return place[2], place[1], self.peers.index(place[0])


def highest_rate(curve: Iterable[tuple[float, float]], slo_s: float) -> float:
    """Return where the line through (rate, TTFT) first leaves the SLO; 0 if it is never within."""
    rate, ttft_s = 0.0, 0.0
    for next_rate, next_ttft_s in curve:
        if next_ttft_s > slo_s:
            if not rate:
                return 0.0
            return rate + (next_rate - rate) * (slo_s - ttft_s) / (next_ttft_s - ttft_s)
        rate, ttft_s = next_rate, next_ttft_s
    return rate


def _point(runs: Sequence[Run]) -> Point:
    first = runs[0]
    tpot = [fmean(run.tpot_s) for run in runs if run.tpot_s]
    cpu = [run.cpu_s / len(run.ttft_s) for run in runs if run.cpu_s is not None]
    tiers = dict.fromkeys(tier for run in runs for tier in run.tokens_by_tier)
    return Point(
        first.peer,
        first.host_bytes,
        first.rate,
        first.requests_per_s,
        len(runs),
        Estimate.of([fmean(run.ttft_s) for run in runs]),
        Estimate.of([float(np.percentile(run.ttft_s, 50)) for run in runs]),
        Estimate.of([float(np.percentile(run.ttft_s, 99)) for run in runs]),
        Estimate.of(tpot) if tpot else None,
        Estimate.of([run.completed_rps for run in runs]),
        Estimate.of([run.cached_share for run in runs]),
        {t: fmean(run.tokens_by_tier.get(t, 0) / run.num_prompt_tokens for run in runs) for t in tiers},
        fmean(run.num_reordered / len(run.ttft_s) for run in runs),
        Estimate.of(cpu) if cpu else None,
        max((run.memory_bytes for run in runs if run.memory_bytes is not None), default=None),
        _search_point([run.search for run in runs if run.search is not None]),
    )


def _search_point(runs: Sequence[SearchRun]) -> SearchPoint | None:
    if not runs:
        return None
    return SearchPoint(
        Estimate.of([fmean(run.search_s) for run in runs]),
        Estimate.of([float(np.percentile(run.search_s, 99)) for run in runs]),
        Estimate.of([fmean(run.unhidden_s) for run in runs]),
        fmean(run.num_stages / len(run.search_s) for run in runs),
        fmean(run.num_speculated / len(run.search_s) for run in runs),
        fmean(run.num_right / len(run.search_s) for run in runs),
        fmean(run.num_speculations / len(run.search_s) for run in runs),
    )
