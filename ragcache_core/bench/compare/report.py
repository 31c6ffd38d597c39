"""A comparison as a report: plots and tables, what it was measured with, and why its figures may mean little."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcache_core.bench.compare.caveats import afterwards, beforehand
from ragcache_core.bench.compare.peers import PEERS
from ragcache_core.bench.compare.results import Results
from ragcache_core.bench.compare.search.peers import SPECULATIVE
from ragcache_core.bench.compare.summary import SLO_FACTOR, Point, Summary
from ragcache_core.bench.compare.tables import tables
from ragcache_core.reports.page import MIB, Report, Table, worded

if TYPE_CHECKING:
    from ragcache_core.reports.plots import Plot

LAUNCH, SERVER = "launch", "server"
"""What ``engine`` is where engines are launched, and the name of one that runs already."""


def write_report(path: Path, results: Results) -> list[Path]:
    """Write the page of ``results``, and every plot as PNG beside it; return all paths. Each file is replaced whole.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the folder cannot be written to.
    """
    summary = summary_of(results)
    drawn = plots(results, summary)
    made = report(results, summary, list(drawn.values()))
    images = made.save_each(path, drawn)
    made.save(path)
    return [path, *images]


def summary_of(results: Results) -> Summary:
    """Return what the runs so far add up to."""
    options = results.options
    peers = options["compare"] if options["engine"] == LAUNCH else [SERVER]
    return Summary(results.runs, peers, options.get("host_memory_bytes", [1]), len(options["rates"]))


def warnings(results: Results, summary: Summary) -> list[str]:
    """Return why the figures may mean little, a sentence each."""
    return [*beforehand(results.options["seeds"], results.options["requests"]), *afterwards(summary, results.rates_rps)]


def report(results: Results, summary: Summary, drawn: Sequence[Plot]) -> Report:
    """Return the report with its plots."""
    options, rates = results.options, ", ".join(f"{rate:.3g}" for rate in results.rates_rps)
    known = {**PEERS, **SPECULATIVE}
    about = {
        name: known[name].summary if name in known else f"the server at {options['engine']}" for name in summary.peers
    }
    capacity = f"; {summary.peers[0]}, never idle, serves {results.capacity_rps:.3g}" if results.capacity_rps else ""
    lead = [
        f"{_asked(options)}; {rates} requests/s{capacity}.",
        f"{_engines(options)}.",
        f"Measured on: {', '.join(f'{name} {value}' for name, value in results.machine.items())}.",
    ]
    made = [Table("", ("engine", "what it is"), list(about.items()), 2)]
    if results.runs:
        made += tables(summary, results.rates_rps)
    notes = (*notes_of(options), "In brackets the 95 % interval over seeds, where there are several.")
    return Report(
        "Engines side by side", lead, drawn, made, warnings=warnings(results, summary), notes=notes, options=options
    )


def _asked(options: Mapping[str, Any]) -> str:
    """Return in a few words what was asked for."""
    what = f"trace {Path(options['trace']).name}" if options["trace"] else f"workload {options['workload']}"
    seeds = "1 seed" if options["seeds"] == 1 else f"{options['seeds']} seeds"
    if options.get("search"):
        what += f", searched for among {options['search']:,} vectors of {options['search_dim']} ({_index(options)})"
    return (
        f"The {what}, lengths times {options['scale']:g}: {options['requests']:,} requests at each rate after "
        f"{options['warm_up']:,} of warm-up, {seeds}"
    )


_RANDOM_MODELS = {
    "random": "A random Llama of 30 million parameters",
    "random-8b": "A random Llama of the shape of Llama-3.1-8B",
}


def _engines(options: Mapping[str, Any]) -> str:
    """Return in a few words what the engines had."""
    if options["engine"] != LAUNCH:
        return f"The server at {options['engine']}"
    model = _RANDOM_MODELS.get(options["model"], options["model"])
    sizes = {name: worded(f"{name}_bytes", options[f"{name}_bytes"]) for name in ("kv_memory", "host_memory")}
    return f"{model}, {options['dtype']}; {sizes['kv_memory']} of KV memory; {sizes['host_memory']} of host memory"


def notes_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a reader must know of how it was measured."""
    what = "the trace" if options["trace"] else f"the workload {options['workload']}"
    first = options["compare"][0] if options["engine"] == LAUNCH else SERVER
    notes = [
        f"Requests are those of {what}; lengths of documents and questions are times {options['scale']:g}, how many "
        "documents there are and how often each is asked for is not: with memory scaled alike, a tier holds as many "
        "documents.",
        "Arrivals are Poisson, at the same moments for every engine. Requests go out when they are due, whatever "
        "became of those before; TTFT counts from when one was due to the first chunk of its stream.",
        f"{options['warm_up']:,} requests warm an engine up; each rate has {options['requests']:,} of its own, the "
        "same for every engine. Engines run one at a time, another one first for each seed.",
        f"The SLO is a mean TTFT of at most {SLO_FACTOR:g} times that of {first} at the lowest rate, the same for "
        "every engine; throughput is where the line through the measured rates leaves it, and at least (≥) the "
        "highest rate where it does not.",
        "CPU time and memory (proportional set size) are those of the engine's processes; the client is not in them.",
        *_search_notes(options),
    ]
    if options.get("disk_memory_bytes"):
        notes.append("vLLM's own file tier has no limit; RAGCache's has the one given.")
    if options["engine"] == LAUNCH:
        notes.append(
            "vllm-host-* are vLLM's own scheduler, offloading and policies; on a machine without a GPU, for which vLLM "
            "has no worker that copies blocks, they use RAGCache's."
        )
    return tuple(notes)


def _index(options: Mapping[str, Any]) -> str:
    share = options["search_share"] or 0.125
    return f"ivf, {share:.3g} of its lists" if options["search_index"] == "ivf" else options["search_index"]


def _search_notes(options: Mapping[str, Any]) -> tuple[str, ...]:
    if not options.get("search"):
        return ("Search time hidden: none, for a trace has no search.",)
    return (
        "TTFT begins with the search, which shares the processors with the engine and is not in its CPU time. A "
        "question is a vector near that of the document that the workload has it about; embedding a text is not in it.",
        "Engines of vLLM get the request when Faiss's search has ended; RAGCache's are searched for in stages. Not "
        "hidden is by how much later the answer began than if the documents had been known; sent ahead and right are "
        "shares of requests, and tokens of wrong speculations are among those that tiers served.",
    )


def plots(results: Results, summary: Summary) -> dict[str, Plot]:
    """Return the plots by name: TTFT against rate, its distribution, hits against host memory, throughput."""
    from ragcache_core.reports.plots import bars, cdfs, lines

    rates = results.rates_rps
    by_rate = {
        peer: _points(summary, peer, [(summary.main_host, rate) for rate in range(len(rates))])
        for peer in summary.peers
    }
    curve = {peer: [(point.requests_per_s, point.ttft_mean_s.mean) for point in of] for peer, of in by_rate.items()}
    main_rps = f"{rates[summary.main_rate]:.3g} requests/s"
    has_host = results.options["engine"] == LAUNCH and any(point.host_bytes for point in summary.points)
    with_host = f", host memory {summary.main_host / MIB:,.0f} MiB" if has_host else ""
    samples = {
        peer: [t for run in summary.at(peer, summary.main_host, summary.main_rate) for t in run.ttft_s]
        for peer in summary.peers
    }
    drawn = {
        "ttft": lines(
            f"Mean time to first token{with_host}", "requests/s", "mean TTFT, s", curve, log_y=True,
            spread={peer: bands for peer, of in by_rate.items() if (bands := _bands(of))},
        ),
        "cdf": cdfs(
            f"Time to first token at {main_rps}{with_host}", "TTFT, s", {peer: s for peer, s in samples.items() if s}
        ),
        "hits": _by_size(
            summary, f"Cached prompt tokens at {main_rps}", "share of prompt tokens", lambda p: p.cached_share.mean
        ),
        "host": _by_size(
            summary, f"Mean time to first token at {main_rps}", "mean TTFT, s", lambda p: p.ttft_mean_s.mean
        ),
    }  # fmt: skip
    if throughputs := summary.throughputs():
        slo_ms = throughputs[0].slo_s * 1000
        means = {t.peer: t.requests_per_s for t in throughputs}
        drawn["throughput"] = bars(
            f"Requests/s within {slo_ms:,.0f} ms mean TTFT{with_host}", "requests/s",
            {"": {peer: mean.mean for peer, mean in means.items()}},
            intervals={p: (m.low, m.high) for p, m in means.items() if m.low is not None and m.high is not None},
            at_least={found.peer for found in throughputs if found.is_bound},
        )  # fmt: skip
    return drawn


def _points(summary: Summary, peer: str, places: Iterable[tuple[int, int]]) -> list[Point]:
    return [point for size, rate in places if (point := summary.point(peer, size, rate)) is not None]


def _by_size(summary: Summary, title: str, y_label: str, of: Callable[[Point], float]) -> Plot:
    """Return a figure of every engine against host memory; one without is the same for every size."""
    from ragcache_core.reports.plots import bars, lines

    series = {}
    for peer in summary.peers:
        points = {size: summary.point(peer, size, summary.main_rate) for size in summary.host_bytes}
        series[peer] = [(size / MIB, of(point)) for size, point in points.items() if point is not None]
    if len(summary.host_bytes) == 1:
        return bars(title, y_label, {"": {peer: points[0][1] for peer, points in series.items() if points}})
    return lines(title, "host memory, MiB", y_label, series, log_x=True)


def _bands(points: Sequence[Point]) -> list[tuple[float, float]] | None:
    pairs = [(p.ttft_mean_s.low, p.ttft_mean_s.high) for p in points]
    known = [(max(low, 1e-4), high) for low, high in pairs if low is not None and high is not None]
    return known if known and len(known) == len(pairs) else None  # a logarithmic axis has no 0
