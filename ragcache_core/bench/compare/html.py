"""A comparison as one page that needs nothing else: tables, plots inside, and how it was measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcache_core.bench.compare.results import Results
from ragcache_core.bench.compare.summary import Point, Summary
from ragcache_core.bench.compare.tables import MIB, tables

if TYPE_CHECKING:
    from ragcache_core.bench.plots import Plot

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --dim: #777; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.dim { color: var(--dim); } .plots { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; background: #fff; border-radius: 6px; padding: .4rem; }
figure svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; vertical-align: bottom; }
small { color: var(--dim); }
"""
Row = Sequence[str]


def write_report(
    path: Path, results: Results, summary: Summary, summaries: Mapping[str, str], notes: Sequence[str]
) -> list[Path]:
    """Write the page, and every plot as PNG beside it; return all paths. Each file is replaced whole.

    ``summaries`` says in a few words what each engine is.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the folder cannot be written to.
    """
    drawn = plots(results, summary)
    path.parent.mkdir(parents=True, exist_ok=True)
    images = []
    for name, plot in drawn.items():
        image = path.with_name(f"{path.stem}-{name}.png")
        _replace(image, plot.save_png)
        images.append(image)
    text = page(results, summary, summaries, notes, drawn)
    _replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return [path, *images]


def plots(results: Results, summary: Summary) -> dict[str, Plot]:
    """Return the plots by name: TTFT against rate, its distribution, hits against host memory, throughput."""
    from ragcache_core.bench.plots import bars, cdfs, lines

    rates = results.rates_rps
    by_rate = {peer: _points(summary, peer, [(summary.main_host, rate) for rate in range(len(rates))])
               for peer in summary.peers}  # fmt: skip
    by_host = {peer: _points(summary, peer, [(size, summary.main_rate) for size in summary.host_bytes])
               for peer in summary.peers}  # fmt: skip
    curve = {peer: [(point.requests_per_s, point.ttft_mean_s.mean) for point in of] for peer, of in by_rate.items()}
    host_label = "host memory, MiB"
    main_rps = f"{rates[summary.main_rate]:.3g} requests/s"
    samples = {
        peer: [t for run in summary.at(peer, summary.main_host, summary.main_rate) for t in run.ttft_s]
        for peer in summary.peers
    }
    drawn = {
        "ttft": lines(
            "Mean time to first token", "requests/s", "s", curve, log_y=True,
            spread={peer: bands for peer, of in by_rate.items() if (bands := _bands(of))},
        ),
        "cdf": cdfs(f"Time to first token at {main_rps}", "s", {peer: s for peer, s in samples.items() if s}),
        "hits": lines(
            f"Cached prompt tokens at {main_rps}", host_label, "share of prompt tokens",
            _by_size(summary, by_host, lambda point: point.cached_share.mean), log_x=True,
        ),
        "host": lines(
            f"Mean time to first token at {main_rps}", host_label, "s",
            _by_size(summary, by_host, lambda point: point.ttft_mean_s.mean), log_x=True,
        ),
    }  # fmt: skip
    if throughputs := summary.throughputs():
        heights = {t.peer: t.requests_per_s.mean for t in throughputs}
        slo_ms = throughputs[0].slo_s * 1000
        drawn["throughput"] = bars("Throughput", "requests/s", {f"mean TTFT within {slo_ms:,.0f} ms": heights})
    return drawn


def page(
    results: Results,
    summary: Summary,
    summaries: Mapping[str, str],
    notes: Sequence[str],
    drawn: Mapping[str, Plot],
) -> str:
    """Return the whole page."""
    machine = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    options = ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in results.options.items())
    rates = ", ".join(f"{rate:.3g}" for rate in results.rates_rps)
    capacity = f"; an engine that is never idle serves {results.capacity_rps:.3g}" if results.capacity_rps else ""
    made = tables(summary, results.rates_rps) if results.runs else []
    figures = "".join(f"<figure>{_inline(plot)}</figure>" for plot in drawn.values())
    parts = [
        f"<h1>Engines side by side</h1><p class=dim>{escape(machine)}</p>",
        f"<p>{escape(options)}. Rates {escape(rates)} requests/s{escape(capacity)}.</p>",
        _table(("engine", "what it is"), [(name, summaries.get(name, "")) for name in summary.peers], is_text=True),
        f'<div class="plots">{figures}</div>',
        "<p class=dim>In brackets the 95 % interval over seeds, where there are several.</p>",
        *(f"<h2>{escape(table.title)}</h2>{_table(table.heads, table.rows)}" for table in made),
        "<h2>How it was measured</h2><ul>",
        *(f"<li>{escape(note)}</li>" for note in notes),
        "</ul>",
    ]
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
    title = "<!doctype html><html lang=en><head><title>ragcache bench</title>"
    return f"{title}{head}</head><body>{''.join(parts)}</body></html>\n"


def _points(summary: Summary, peer: str, places: Iterable[tuple[int, int]]) -> list[Point]:
    return [point for size, rate in places if (point := summary.point(peer, size, rate)) is not None]


def _by_size(
    summary: Summary, by_host: Mapping[str, Sequence[Point]], of: Callable[[Point], float]
) -> dict[str, list[tuple[float, float]]]:
    """Return (MiB, figure) for each engine; one without host memory is the same for every size."""
    sizes = [size / MIB for size in summary.host_bytes]
    series = {}
    for peer, points in by_host.items():
        if points and all(not point.host_bytes for point in points):
            series[peer] = [(size, of(points[0])) for size in sizes]
        elif points:
            series[peer] = [(point.host_bytes / MIB, of(point)) for point in points]
    return series


def _bands(points: Sequence[Point]) -> list[tuple[float, float]] | None:
    pairs = [(p.ttft_mean_s.low, p.ttft_mean_s.high) for p in points]
    known = [(max(low, 1e-4), high) for low, high in pairs if low is not None and high is not None]
    return known if known and len(known) == len(pairs) else None  # a logarithmic axis has no 0


def _table(heads: Row, rows: Iterable[Row], *, is_text: bool = False) -> str:
    aligned = " style='text-align:left;white-space:normal'" if is_text else ""
    head = "".join(f"<th{aligned}>{escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td{aligned}>{_cell(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    figure, bracket, rest = text.partition(" [")
    return escape(figure) + (f" <small>[{escape(rest)}</small>" if bracket else "")


def _inline(plot: Plot) -> str:
    svg = plot.svg()
    return svg[svg.index("<svg") :]


def _plain(value: Any) -> str:
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
