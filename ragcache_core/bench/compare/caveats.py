"""Why the figures of a comparison may mean little: too few seeds or requests, intervals wider than differences."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache_core.bench.compare.summary import Estimate, Summary

FEW_REQUESTS = 100
WIDE = 0.25


def beforehand(num_seeds: int, num_requests: int) -> list[str]:
    """Return what can be said before anything is measured, a sentence each."""
    found = []
    if num_seeds == 1:
        found.append(
            "one seed: there is no interval, and a difference between two engines may be chance: --seeds 3 or more"
        )
    if num_requests < FEW_REQUESTS:
        found.append(
            f"{num_requests} requests at each rate: a mean is that of one burst or another, and p99 is the slowest "
            f"request: --requests {FEW_REQUESTS} or more"
        )
    return found


def afterwards(summary: Summary, rates_rps: Sequence[float]) -> list[str]:
    """Return what the intervals over seeds say of the figures, a sentence each."""
    found = []
    known = [(p, reach) for p in summary.points if (reach := _reach(p.ttft_mean_s)) is not None]
    wide = [(point, reach) for point, reach in known if reach > WIDE]
    if wide:
        point, reach = max(wide, key=lambda each: each[1])
        found.append(
            f"{len(wide)} of {len(known)} mean TTFTs are known no better than to {WIDE:.0%} (95 % intervals over "
            f"seeds), {point.peer} at {rates_rps[point.rate]:.3g} requests/s to {reach:.0%}: more --seeds, or more "
            "--requests"
        )
    if summary.peers:
        ratios = [r.ttft for r in summary.ratios(summary.peers[0], summary.main_host) if r.ttft.low is not None]
        alike = sum((ratio.low or 0.0) <= 1.0 <= (ratio.high or 0.0) for ratio in ratios)
        if alike:
            found.append(
                f"{alike} of {len(ratios)} comparisons with {summary.peers[0]} have 1 in their interval: there, "
                "neither engine is faster for all that was measured"
            )
    return found


def _reach(estimate: Estimate) -> float | None:
    """Return half the width of the interval, as a share of the mean."""
    if estimate.low is None or estimate.high is None or not estimate.mean:
        return None
    return (estimate.high - estimate.low) / 2 / estimate.mean
