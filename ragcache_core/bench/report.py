"""A comparison as tables and a page with plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ragcache_core.bench.engines import BASELINES
from ragcache_core.bench.results import Results
from ragcache_core.bench.summary import ComparisonSummary, Estimate, Point, highest_rate
from ragcache_core.reports.page import MIB, Report, Table

LAUNCH, SERVER = "launch", "server"
"""The ``engine`` option where engines are launched, and the name of a running server in results."""
_FEW_REQUESTS = 100


def summarise(results: Results) -> ComparisonSummary:
    """Return the summary of the runs so far."""
    options = results.options
    return ComparisonSummary(results.runs, options["compare"] if options["engine"] == LAUNCH else [SERVER])


def warnings(num_seeds: int, num_requests: int) -> list[str]:
    """Return why figures of these numbers of seeds and requests are uncertain, a sentence each."""
    found = []
    if num_seeds == 1:
        found.append("one seed gives no interval, and a difference between two engines may be chance: --seeds 3")
    if num_requests < _FEW_REQUESTS:
        found.append(f"{num_requests} requests at each rate are few for a mean and a p99: --requests {_FEW_REQUESTS}")
    return found


def tables(summary: ComparisonSummary, rates_rps: Sequence[float]) -> list[Table]:
    """Return a table of each rate, with a row for each engine and size of host memory, and one of the throughput."""
    made = []
    for rate, requests_per_s in enumerate(rates_rps):
        points = [point for point in summary.points if point.rate == rate]
        tiers = list(dict.fromkeys(tier for point in points for tier in point.tier_shares))
        heads = ("engine", "host MiB", "TTFT ms", "p50", "p99", "times lower", "TPOT ms", "served/s", "cached", *tiers,
                 "reordered", "CPU ms/req", "seeds")  # fmt: skip
        made.append(Table(f"At {requests_per_s:.3g} requests/s", heads, [_row(point, tiers) for point in points]))
    return [_throughput(summary), *(table for table in made if table.rows)]


def write_report(path: Path, results: Results) -> list[Path]:
    """Write the page, and each plot as PNG beside it; return the paths. Each file is replaced as a whole.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the folder is not writable.
    """
    from ragcache_core.reports.plots import Plot, lines

    options, summary = results.options, summarise(results)
    curves = summary.curves()

    def plot(title: str, y_label: str, value: str, *, log_y: bool = False) -> Plot:
        series = {
            name: [(point.requests_per_s, getattr(point, value).mean) for point in of] for name, of in curves.items()
        }
        spread = {name: bands for name, of in curves.items() if (bands := _bands([getattr(p, value) for p in of]))}
        return lines(title, "requests/s", y_label, series, log_y=log_y, spread=spread)

    drawn = {
        "ttft": plot("Mean time to first token", "mean TTFT, s", "ttft_mean_s", log_y=True),
        "cached": plot("Cached prompt tokens", "share of prompt tokens", "cached_share"),
    }
    names = dict.fromkeys(point.engine for point in summary.points)
    about = [(name, BASELINES[name].summary if name in BASELINES else str(options["engine"])) for name in names]
    what = f"trace {Path(options['trace']).name}" if options["trace"] else f"workload {options['workload']}"
    lead = [
        f"The {what}, lengths times {options['scale']:g}: {options['requests']:,} requests at each rate after "
        f"{options['warm_up']:,} of warm-up.",
        f"Measured on: {', '.join(f'{name} {value}' for name, value in results.machine.items())}.",
    ]
    notes = [
        "Arrivals are Poisson, at the same times for each engine. TTFT counts from a request's arrival time.",
        f"'Times lower' is the mean TTFT of {next(iter(names), '-')} over that of the engine. In brackets: 95 % "
        "confidence interval over seeds.",
        "Processor time is that of the engine's processes, without the client.",
        "vLLM's own disk tier has no limit. Without a GPU its offloading copies blocks by RAGCache's worker.",
    ]
    made = Report(
        "Engines side by side",
        lead,
        list(drawn.values()),
        [Table("", ("engine", "what it is"), about, 2), *tables(summary, results.rates_rps)],
        warnings=warnings(options["seeds"], options["requests"]),
        notes=notes,
        options=options,
    )
    images = made.save_each(path, drawn)
    made.save(path)
    return [path, *images]


def _throughput(summary: ComparisonSummary) -> Table:
    """Return the highest rate of each engine within the SLO."""
    curves = {
        name: [(point.requests_per_s, point.ttft_mean_s.mean) for point in of] for name, of in summary.curves().items()
    }
    slo_s = summary.slo_s
    rows = []
    for name, curve in curves.items():
        rate = highest_rate(curve, slo_s)
        bound = ">= " if rate == curve[-1][0] else ""
        rows.append((name, f"{bound}{rate:.3g}"))
    return Table(f"Throughput with a mean TTFT within {slo_s * 1000:,.0f} ms", ("engine", "requests/s"), rows)


def _row(point: Point, tiers: Sequence[str]) -> list[str]:
    return [
        point.engine,
        f"{point.host_bytes / MIB:,.0f}" if point.host_bytes else "-",
        *(_shown(each, "{:,.0f}", 1000) for each in (point.ttft_mean_s, point.ttft_p50_s, point.ttft_p99_s)),
        _shown(point.ttft_ratio, "{:.2f}"),
        _shown(point.tpot_s, "{:.1f}", 1000),
        _shown(point.completed_rps, "{:.3g}"),
        _shown(point.cached_share, "{:.1f} %", 100),
        *(f"{point.tier_shares[tier]:.1%}" if tier in point.tier_shares else "-" for tier in tiers),
        f"{point.reordered_share:.0%}",
        _shown(point.cpu_s_per_request, "{:,.0f}", 1000),
        str(point.num_seeds),
    ]


def _shown(estimate: Estimate | None, form: str, factor: float = 1.0) -> str:
    if estimate is None:
        return "-"
    shown = form.format(estimate.mean * factor)
    if estimate.low is None or estimate.high is None:
        return shown
    return f"{shown} [{form.format(estimate.low * factor)}, {form.format(estimate.high * factor)}]"


def _bands(estimates: Sequence[Estimate]) -> list[tuple[float, float]] | None:
    """Return the intervals of a curve; ``None`` if a point has none. A logarithmic axis has no 0."""
    known = [(max(e.low, 1e-4), e.high) for e in estimates if e.low is not None and e.high is not None]
    return known if len(known) == len(estimates) else None
