"""Cache-Craft's Figures 22 to 24: reuse at any position against prefix caching, under load and one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from benchmarks.papers.figure import PaperFigure, Row
from benchmarks.papers.published import CACHE_CRAFT
from benchmarks.papers.ratios import Ratio
from benchmarks.papers.runs import PaperCase, PaperRuns, Summaries
from benchmarks.simulated.laboratory import LabOptions
from ragcache_core.reports.page import Table
from ragcache_core.sim.traces.workload import WORKLOADS

_SHARES = (0.5, 0.8, 1.0, 1.2, 1.6)
_LOW_RPS = 0.05
_NUM_REQUESTS, _WARM_UP = 2_000, 500
_RECOMPUTED = {"none recomputed": 0.0, "30 % recomputed": 0.3}
_OF_ALL = 0.39

_PREFIX = LabOptions(
    policy="lru",
    gpu_tokens=200_000,
    host_tokens=262_144,
    cost_model="h100-llama3-8b",
    max_batch=32,
    retrieval_s=0.0,
)
_SETTING = (
    "the workload sysx (drawn from the published statistics of Sys-X), 2,000 requests, 500 of them warm-up; one NVIDIA "
    "H100 with LLaMA-3-8B's shape, measured prefill times, where the paper has an A100 and others' 150,000 tokens in a "
    "batch, here 32 requests of some 4,000; 200,000 tokens of KV on the GPU and 262,144 in host memory (assumed), of "
    "which reuse gives half to chunks. How answers suffer is not simulated."
)
_WHY_WORKLOAD = (
    "sysx has the statistics that the paper gives of Sys-X, and its documents come again in many orders; the trace "
    "itself is not public. How much is found is what decides every row"
)
_WHY_COST = (
    "a prefill of scattered tokens is charged as one of as many tokens behind all the others; the measured profile "
    "ends at 32,768 cached and 8,192 new tokens, and other processors give other shares of attention in it"
)


def figure_22(runs: PaperRuns) -> PaperFigure:
    """Return throughput and response time against load."""
    from ragcache_core.reports.plots import lines

    (limit_rps,) = runs.capacities_rps([PaperCase(WORKLOADS["sysx"], _PREFIX)])
    rates = [round(share * limit_rps, 4) for share in _SHARES]
    systems = {"prefix caching": _PREFIX, **{name: _reusing(alpha) for name, alpha in _RECOMPUTED.items()}}
    cases = {(name, rate): _case(runs, options, rate) for name, options in systems.items() for rate in rates}
    done = runs.summaries(cases.values())
    of = {name: {rate: done[cases[name, rate]] for rate in rates} for name in systems}
    rows, base = [], of["prefix caching"]
    for name in _RECOMPUTED:
        for key, what in (("throughput_rps", "throughput"), ("mean_response_s", "response")):
            pairs = [(of[name][rate], base[rate]) for rate in rates]
            gains = [_gain(key, *pair) for pair in pairs]
            best = max(gains)
            says = f"{what}, {name}: times better than prefix caching, at the load where most"
            rows.append(Row(says, best, best, CACHE_CRAFT[f"{what}, {name}"], "x"))
    heads = ("", *(f"{rate:.2f}/s" for rate in rates))
    tables = [
        Table(title, heads, [[name, *(f"{_mean(of[name][r], key):.3g}" for r in rates)] for name in systems])
        for title, key in (
            ("Requests served a second", "throughput_rps"),
            ("Mean response time (s)", "mean_response_s"),
            ("Mean TTFT (s)", "mean_ttft_s"),
        )
    ]
    drawn = {name: [(rate, _mean(of[name][rate], "mean_response_s")) for rate in rates] for name in systems}
    return PaperFigure(
        "Cache-Craft, Figure 22",
        "throughput and response time under load",
        f"{_SETTING} Loads are {', '.join(f'{share:g}' for share in _SHARES)} of what prefix caching serves.",
        rows,
        (
            _WHY_WORKLOAD,
            "answers have 180 tokens on average, whose steps reuse does not shorten: where they are most of the work, "
            "throughput gains less than prefills do. The paper gives neither Sys-X's answers nor batches",
            _WHY_COST,
        ),
        "ragcache bench --workload sysx --compare vllm,ragcache,ragcache-chunks --rates auto",
        tables,
        [lines("Cache-Craft, Figure 22", "requests/s", "mean response time, s", drawn, log_y=True)],
    )


def figure_24(runs: PaperRuns) -> PaperFigure:
    """Return TTFT and computed tokens without queueing, which is Figure 23(a) as well."""
    cases = {"prefix": _case(runs, _PREFIX, _LOW_RPS), "reuse": _case(runs, _reusing(_OF_ALL), _LOW_RPS)}
    done = runs.summaries(cases.values())
    prefix, reuse = done[cases["prefix"]], done[cases["reuse"]]
    rows = [
        Row.of_seeds("mean TTFT of prefix caching over that of reuse", _ratios("mean_ttft_s", prefix, reuse),
                     CACHE_CRAFT["ttft"], "x"),
        Row.of_seeds("99th percentile, the same", _ratios("p99_ttft_s", prefix, reuse), CACHE_CRAFT["p99 ttft"], "x"),
        Row.of_seeds("tokens computed, of those of prefix caching", _ratios("computed_tokens", reuse, prefix),
                     CACHE_CRAFT["computed"]),
        Row.of_seeds("documents' tokens that prefix caching finds", [one["token_hit_rate"] for one in prefix],
                     CACHE_CRAFT["exact prefix"]),
    ]  # fmt: skip
    return PaperFigure(
        "Cache-Craft, Figures 23(a) and 24",
        "time to first token, one request at a time",
        f"{_SETTING} {_LOW_RPS} requests/s, so that hardly anybody waits; {_OF_ALL:.0%} of a reused document are "
        "computed again, as in Figure 23(a).",
        rows,
        (_WHY_WORKLOAD, _WHY_COST),
        "make bench-chunks",
    )


def _case(runs: PaperRuns, options: LabOptions, requests_per_s: float) -> PaperCase:
    warm_up = min(_WARM_UP, (runs.num_requests or _NUM_REQUESTS) // 4)
    return PaperCase(WORKLOADS["sysx"], replace(options, warm_up=warm_up), _NUM_REQUESTS).at(requests_per_s)


def _reusing(fraction: float) -> LabOptions:
    return replace(_PREFIX, chunk_reuse=fraction)


def _gain(key: str, ours: Summaries, base: Summaries) -> float:
    return Ratio.of(key, ours, base).mean if key == "throughput_rps" else Ratio.of(key, base, ours).mean


def _ratios(key: str, over: Summaries, under: Summaries) -> Sequence[float]:
    return [one[key] / other[key] for one, other in zip(over, under, strict=True)]


def _mean(summaries: Summaries, key: str) -> float:
    return fmean(summary[key] for summary in summaries)
