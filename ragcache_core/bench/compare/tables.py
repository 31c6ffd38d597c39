"""The tables of a comparison, for a page and for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ragcache_core.bench.compare.summary import SLO_FACTOR, Estimate, Point, Summary
from ragcache_core.reports.page import MIB, Table


def engines_table(summary: Summary, rates_rps: Sequence[float], rate: int) -> Table:
    """Return what every engine did at one rate, a row for each size of host memory."""
    points = [point for point in summary.points if point.rate == rate]
    tiers = list(dict.fromkeys(tier for point in points for tier in point.tier_shares))
    heads = (
        "engine", "host MiB", "TTFT ms", "p50", "p99", "TPOT ms", "served/s", "cached", *tiers, "reordered",
        "CPU ms/req", "MiB", "seeds",
    )  # fmt: skip
    return Table(f"At {rates_rps[rate]:.3g} requests/s", heads, [_row(point, tiers) for point in points])


def search_table(summary: Summary, rates_rps: Sequence[float], rate: int) -> Table:
    """Return what became of the searches at one rate: their time, and how often what was sent ahead was right."""
    heads = ("engine", "host MiB", "search ms", "p99", "not hidden ms", "stages", "sent ahead", "right", "sent/request")
    rows = [
        [
            point.peer,
            f"{point.host_bytes / MIB:,.0f}" if point.host_bytes else "-",
            *(_shown(e, "{:,.1f}", 1000) for e in (found.search_s, found.search_p99_s, found.unhidden_s)),
            f"{found.num_stages:.1f}",
            f"{found.speculated_share:.0%}",
            f"{found.right_share:.0%}",
            f"{found.num_speculations:.2f}",
        ]
        for point in summary.points
        if point.rate == rate and (found := point.search) is not None
    ]
    return Table(f"The search at {rates_rps[rate]:.3g} requests/s", heads, rows)


def ratios_table(summary: Summary, rates_rps: Sequence[float], host_bytes: int, rate: int) -> Table:
    """Return how many times lower each engine's mean TTFT is than each other's."""
    ratios = {
        (ratio.peer, ratio.baseline): ratio.ttft
        for baseline in summary.peers
        for ratio in summary.ratios(baseline, host_bytes)
        if ratio.rate == rate
    }
    rows = [[peer, *(_shown(ratios.get((peer, other)), "{:.2f}") for other in summary.peers)] for peer in summary.peers]
    title = f"Times lower mean TTFT, at {rates_rps[rate]:.3g} requests/s with {host_bytes / MIB:,.0f} MiB"
    return Table(title, ("engine", *(f"than {peer}" for peer in summary.peers)), rows)


def throughput_table(summary: Summary) -> Table:
    """Return what each engine serves within the SLO, beside the first one's."""
    throughputs = summary.throughputs()
    rows = []
    for found in throughputs:
        requests_per_s, ratio = _shown(found.requests_per_s, "{:.3g}"), _shown(found.ratio, "{:.2f}")
        if found.is_bound:
            requests_per_s = f">= {requests_per_s}"
        if found.is_bound != throughputs[0].is_bound and found.ratio is not None:
            ratio = f">= {ratio}" if found.is_bound else f"<= {ratio}"
        elif found.is_bound:
            ratio = "-"  # two bounds have no ratio
        rows.append([found.peer, requests_per_s, ratio])
    slo = f"{throughputs[0].slo_s * 1000:,.0f} ms" if throughputs else "?"
    title = f"Throughput with a mean TTFT within {slo}, {SLO_FACTOR:g} times the lowest rate's"
    return Table(title, ("engine", "requests/s", f"times {summary.peers[0]}" if summary.peers else ""), rows)


def tables(summary: Summary, rates_rps: Sequence[float]) -> list[Table]:
    """Return all tables: throughput, what every engine did, and the ratios wherever engines were measured alike."""
    rates = range(len(rates_rps))
    places = [(size, summary.main_rate) for size in summary.host_bytes]
    places += [(summary.main_host, rate) for rate in rates if rate != summary.main_rate]
    made = [
        throughput_table(summary),
        *(ratios_table(summary, rates_rps, size, rate) for size, rate in places),
        *(engines_table(summary, rates_rps, rate) for rate in rates),
        *(search_table(summary, rates_rps, rate) for rate in rates),
    ]
    return [table for table in made if any(set(row[1:]) != {"-"} for row in table.rows)]


def _row(point: Point, tiers: Iterable[str]) -> list[str]:
    return [
        point.peer,
        f"{point.host_bytes / MIB:,.0f}" if point.host_bytes else "-",
        *(_shown(e, "{:,.0f}", 1000) for e in (point.ttft_mean_s, point.ttft_p50_s, point.ttft_p99_s)),
        _shown(point.tpot_s, "{:.1f}", 1000),
        _shown(point.completed_rps, "{:.3g}"),
        _shown(point.cached_share, "{:.1f} %", 100),
        *(f"{point.tier_shares[tier]:.1%}" if tier in point.tier_shares else "-" for tier in tiers),
        f"{point.reordered_share:.0%}",
        _shown(point.cpu_s_per_request, "{:,.0f}", 1000),
        f"{point.memory_bytes / MIB:,.0f}" if point.memory_bytes else "-",
        str(point.num_seeds),
    ]


def _shown(estimate: Estimate | None, form: str, factor: float = 1.0) -> str:
    if estimate is None:
        return "-"
    shown = form.format(estimate.mean * factor)
    if estimate.low is None or estimate.high is None:
        return shown
    return f"{shown} [{form.format(estimate.low * factor)}, {form.format(estimate.high * factor)}]"
