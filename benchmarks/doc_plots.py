"""Draw the plots of the documentation from ``docs/results``: ``python -m benchmarks.doc_plots``.

Each is an SVG of a few KB on a white ground. The same numbers give the same file, byte for byte, and
``tests/unit/core/test_docs.py`` compares the committed files with these functions.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
RESULTS: Final = DOCS / "results"
PICTURES: Final = DOCS / "pictures"

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
_BY_NAME = {"no-cache": 6, "vllm": 3, "vllm-host-lru": 4, "vllm-host-arc": 1, "ragcache": 5, "ragcache-cache-aware": 0}
_LEFT, _TOP, _WIDTH, _HEIGHT, _LEGEND = 64, 36, 420, 240, 190

Points = Sequence[tuple[float, float]]


class Drawing:
    """An SVG document that grows by shapes and texts."""

    def __init__(self, width: int, height: int, title: str) -> None:
        """Begin with a white ground and the title."""
        self.width, self.height = width, height
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" fill="#ffffff" stroke="#dddddd"/>',
        ]
        self.text(12, 22, title, size=13, weight="bold")

    def text(self, x: float, y: float, text: str, **how: object) -> None:
        """Add a text; ``how``: ``anchor``, ``size``, ``colour``, ``weight``, ``turn`` in degrees."""
        style = f' text-anchor="{how.get("anchor", "start")}" fill="{how.get("colour", "#222222")}"'
        style += f' font-size="{how["size"]}"' if "size" in how else ""
        style += f' font-weight="{how["weight"]}"' if "weight" in how else ""
        style += f' transform="rotate({how["turn"]} {_n(x)} {_n(y)})"' if "turn" in how else ""
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y)}"{style}>{escape(text)}</text>')

    def line(self, points: Points, colour: str, width: float = 1.0, dash: str = "") -> None:
        """Add a line through points."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>')

    def dot(self, x: float, y: float, colour: str, *, is_hollow: bool = False) -> None:
        """Add a point."""
        fill = "#ffffff" if is_hollow else colour
        self._parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="3.5" fill="{fill}" stroke="{colour}"/>')

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Add a filled rectangle."""
        size = f'width="{_n(width)}" height="{_n(height)}"'
        self._parts.append(f'<rect x="{_n(x)}" y="{_n(y)}" {size} fill="{colour}"/>')

    def note(self, text: str) -> None:
        """Add a small line at the bottom: where the numbers are from."""
        self.text(12, self.height - 10, text, size=10, colour="#666666")

    def svg(self) -> str:
        """Return the document."""
        return "\n".join([*self._parts, "</svg>", ""])


class Axes:
    """A pair of axes, each linear or logarithmic, with labelled ticks and a grid."""

    def __init__(self, drawing: Drawing, x: Axis, y: Axis) -> None:
        """Draw grid, ticks and labels."""
        self._drawing, self._x, self._y = drawing, x, y
        for tick in y.ticks:
            self._drawing.line([(_LEFT, self.y(tick)), (_LEFT + _WIDTH, self.y(tick))], "#e5e5e5")
            self._drawing.text(_LEFT - 6, self.y(tick) + 4, y.label_of(tick), anchor="end", size=11)
        for tick in x.ticks:
            self._drawing.line([(self.x(tick), _TOP + _HEIGHT), (self.x(tick), _TOP + _HEIGHT + 4)], "#888888")
            self._drawing.text(self.x(tick), _TOP + _HEIGHT + 18, x.label_of(tick), anchor="middle", size=11)
        self._drawing.line([(_LEFT, _TOP), (_LEFT, _TOP + _HEIGHT), (_LEFT + _WIDTH, _TOP + _HEIGHT)], "#888888")
        self._drawing.text(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 38, x.label, anchor="middle")
        self._drawing.text(18, _TOP + _HEIGHT / 2, y.label, anchor="middle", turn=-90)

    def x(self, value: float) -> float:
        """Return where a value lies from the left."""
        return _LEFT + self._x.share(value) * _WIDTH

    def y(self, value: float) -> float:
        """Return where a value lies from the top."""
        return _TOP + (1 - self._y.share(value)) * _HEIGHT


class Axis:
    """The values of an axis: its label, ticks and scale, and how a tick is written."""

    def __init__(self, label: str, ticks: Sequence[float], *, is_log: bool = False, form: str = "{:g}") -> None:
        """Span the axis from the first to the last tick."""
        self.label, self.ticks, self._is_log, self._form = label, ticks, is_log, form

    def share(self, value: float) -> float:
        """Return the place of a value between the ends, from 0 to 1."""
        low, high = (math.log(t) if self._is_log else t for t in (self.ticks[0], self.ticks[-1]))
        return ((math.log(value) if self._is_log else value) - low) / (high - low)

    def label_of(self, tick: float) -> str:
        """Return a tick's text."""
        return self._form.format(tick)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _lines(
    title: str, x: Axis, y: Axis, series: Mapping[str, Points], *, note: str = "", level: float | None = None
) -> str:
    """Return a plot with a line for each name, its legend on the right, a note below, and a dashed level."""
    drawing = Drawing(_LEFT + _WIDTH + _LEGEND, _TOP + _HEIGHT + (66 if note else 50), title)
    axes = Axes(drawing, x, y)
    if level is not None:
        drawing.line([(_LEFT, axes.y(level)), (_LEFT + _WIDTH, axes.y(level))], "#888888", dash="4 3")
    for number, (name, points) in enumerate(series.items()):
        colour = _COLOURS[_BY_NAME.get(name, number)]
        placed = [(axes.x(a), axes.y(b)) for a, b in points]
        drawing.line(placed, colour, 2)
        for place in placed:
            drawing.dot(*place, colour)
        _legend(drawing, number, name, colour)
    drawing.note(note)
    return drawing.svg()


def _legend(drawing: Drawing, number: int, name: str, colour: str) -> None:
    x, y = _LEFT + _WIDTH + 16, _TOP + 12 + 20 * number
    drawing.dot(x, y - 4, colour)
    drawing.text(x + 10, y, name)


def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _comparison(name: str, title: str, ticks: Sequence[float], host_mib: int) -> str:
    """Return mean TTFT over the request rate of the engines in a result of ``ragcache bench``."""
    result = _result(name)
    series: dict[str, list[tuple[float, float]]] = {}
    for point in result["summary"]["points"]:
        if point["host_bytes"] in (0, host_mib << 20):
            points = series.setdefault(point["peer"], [])
            points.append((point["requests_per_s"], 1000 * point["ttft_mean_s"]["mean"]))
    y = Axis("mean TTFT, ms (log)", [200, 500, 1000, 2000, 5000, 10000], is_log=True, form="{:,g}")
    note = f"docs/results/{name}.json, commit {result['machine']['commit']}; lower is better"
    return _lines(title, Axis("requests per second", ticks), y, series, note=note)


def h100() -> str:
    """Return mean and 99th percentile of TTFT on the H100, a row for each engine and rate."""
    points = _result("bench-compare-h100")["summary"]["points"]
    drawing = Drawing(640, 80 + 26 * len(points), "TTFT on one H100: mean (full) and p99 (hollow), ms")
    axis = Axis("", [0, 200, 400, 600, 800, 1000])
    bottom = 48 + 26 * len(points)
    for tick in axis.ticks:
        x = 220 + 400 * axis.share(tick)
        drawing.line([(x, 40), (x, bottom)], "#e5e5e5")
        drawing.text(x, bottom + 18, axis.label_of(tick), anchor="middle", size=11)
    order = sorted(points, key=lambda p: (p["requests_per_s"], -p["ttft_mean_s"]["mean"]))
    for row, point in enumerate(order):
        y = 60 + 26 * row
        colour = _COLOURS[_BY_NAME[point["peer"]]]
        mean, p99 = (220 + 400 * axis.share(1000 * point[f"ttft_{kind}_s"]["mean"]) for kind in ("mean", "p99"))
        drawing.text(210, y + 4, f"{point['peer']}, {point['requests_per_s']:g}/s", anchor="end")
        drawing.line([(mean, y), (p99, y)], colour, 1)
        drawing.dot(mean, y, colour)
        drawing.dot(p99, y, colour, is_hollow=True)
    return drawing.svg()


def search_overlap() -> str:
    """Return the search time that does not overlap, without and with speculation."""
    figures = _result("bench-pipeline-overlap")["parts"]["overlap"]["figures"]
    notes = [f["note"] for f in figures if re.fullmatch(r"unhidden_search_ratio_\d+", f["key"])]
    pairs = [tuple(map(float, re.findall(r"([\d.]+) ms", note)[:2])) for note in notes]
    series = {
        "without speculation": [(without, without) for without, _ in pairs],
        "with speculation": [(without, with_it) for without, with_it in pairs],
    }
    x = Axis("search time, ms", [0, 100, 200, 300, 400, 450])
    y = Axis("not overlapped, ms", [0, 100, 200, 300, 400, 450])
    note = "docs/results/bench-pipeline-overlap.json; lower is better"
    return _lines("Search time that does not overlap with the prefill", x, y, series, note=note)


def chunk_curve() -> str:
    """Return right answers to continued questions over computed tokens, by selection and alpha."""
    series: dict[str, list[tuple[float, float]]] = {"whole_chunks": [], "cache_craft": []}
    for part in _result("bench-chunks")["parts"].values():
        for figure in part["figures"]:
            if match := re.fullmatch(r"em_(whole_chunks|cache_craft)_[\d.]+", figure["key"]):
                computed, right = map(float, re.findall(r"(?:computed|continued) ([\d.]+)", figure["note"]))
                series[match[1]].append((100 * computed, 100 * right))
    x = Axis("computed tokens of all questions, % of prefix caching's", [20, 40, 60, 80, 100])
    y = Axis("exact match, continued questions, %", [60, 70, 80, 90, 100])
    points = {name: sorted(values) for name, values in series.items()}
    note = "docs/results/bench-chunks.json; a point for each alpha"
    return _lines("Chunk reuse: answers against recompute", x, y, points, note=note)


def chunk_sizes() -> str:
    """Return exact match over the number of documents."""
    result = _result("bench-chunks-sizes")
    names = {"whole_chunks, alpha 1.7": "whole_chunks_1.7", "cache_craft, 30 %": "30_percent"}
    numbers = (3, 5, 8, 12)
    series = {n: [(k, 100 * result[f"em_{k}_documents_{key}"]) for k in numbers] for n, key in names.items()}
    x, y = Axis("documents of a prompt", numbers), Axis("exact match, %", [70, 80, 90, 100])
    note = "docs/results/bench-chunks-sizes.json; 90 questions each"
    return _lines("Chunk reuse: answers by number of documents", x, y, series, note=note)


def _policies(tiers: str, title: str) -> str:
    """Return a heat map of our token hit rate over that of the best fixed policy, workloads by capacities."""
    details = _result("bench-simulation-policies")["parts"]["policies"]["details"]
    rows = {name.partition(",")[0]: cells for name, cells in details.items() if name.endswith(f", {tiers}")}
    columns = list(next(iter(rows.values())))
    drawing = Drawing(560, 90 + 34 * len(rows), title)
    for place, column in enumerate(columns):
        drawing.text(150 + 80 * place, 52, column, anchor="middle")
    for line, (name, cells) in enumerate(rows.items()):
        y = 62 + 34 * line
        drawing.text(100, y + 21, name, anchor="end")
        for place, column in enumerate(columns):
            rates = {policy: cell["token_hit_rate"] for policy, cell in cells[column].items() if policy != "belady"}
            ratio = rates.pop("mixture") / max(rates.values())
            drawing.box(112 + 80 * place, y, 76, 30, _shade(ratio))
            drawing.text(150 + 80 * place, y + 20, f"{ratio:.2f}", anchor="middle")
    drawing.note(
        "docs/results/bench-simulation-policies.json; columns: capacity, % of an infinite cache; above 1 is better"
    )
    return drawing.svg()


def _shade(ratio: float) -> str:
    """Return white at 1, blue above, orange below, full at a difference of a fifth."""
    strength = min(abs(ratio - 1) / 0.2, 1.0)
    full = (0x56, 0xB4, 0xE9) if ratio >= 1 else (0xE6, 0x9F, 0x00)
    return "#" + "".join(f"{round(255 + (part - 255) * strength):02x}" for part in full)


def deadlines() -> str:
    """Return the share of questions in time over the TTFT SLO."""
    plotted = _result("plotted")["deadlines"]
    series = {
        name: [(s, 100 * share) for s, share in zip(plotted["ttft_slo_s"], shares, strict=True)]
        for name, shares in plotted["share_in_time"].items()
    }
    x, y = Axis("ttft_slo, s", plotted["ttft_slo_s"]), Axis("questions in time, %", [0, 25, 50, 75, 100])
    return _lines("Questions in time (predicted)", x, y, series, note=plotted["command"])


def fleet_curve() -> str:
    """Return the document tokens that fleets find over the number of replicas."""
    plotted = _result("plotted")["fleet_curve"]
    series = {
        name: [(n, 100 * share) for n, share in zip(plotted["replicas"], shares, strict=True)]
        for name, shares in plotted["document_tokens_found"].items()
    }
    x, y = Axis("replicas (log)", plotted["replicas"], is_log=True), Axis("document tokens found, %", [30, 50, 70, 90])
    return _lines("Document tokens found by a fleet (simulated)", x, y, series, note=plotted["command"])


def kernel_runs() -> str:
    """Return the time of vLLM's attention over that of scattered attention, by length of the runs."""
    plotted = _result("plotted")["kernel_runs"]
    points = list(zip(plotted["run_length"], plotted["vllm_over_ours"], strict=True))
    x = Axis("length of the runs of recomputed tokens (log)", plotted["run_length"], is_log=True)
    y = Axis("vLLM's time / ours (log)", [0.25, 0.5, 1, 2, 4, 8], is_log=True)
    title, series = "scattered_attention beside FlashAttention 3", {"vLLM / ours": points}
    return _lines(title, x, y, series, note=plotted["command"], level=1)


def predicted() -> str:
    """Return predicted over measured mean TTFT, with the diagonal and a band of 15 %."""
    plotted = _result("plotted")["predicted"]
    drawing = Drawing(_LEFT + _WIDTH + _LEGEND, _TOP + _HEIGHT + 66, "Mean TTFT, predicted and measured")
    ticks = [250, 500, 1000, 2000, 5000, 10000]
    x = Axis("measured, ms (log)", ticks, is_log=True, form="{:,g}")
    axes = Axes(drawing, x, Axis("predicted, ms (log)", ticks, is_log=True, form="{:,g}"))
    for factor, dash in ((1.0, ""), (1.15, "4 3"), (1 / 1.15, "4 3")):
        low, high = max(250.0, 250 / factor), min(10_000.0, 10_000 / factor)
        ends = [(axes.x(value), axes.y(value * factor)) for value in (low, high)]
        drawing.line(ends, "#888888", dash=dash)
    for number, (name, pairs) in enumerate(plotted["measured_predicted_ms"].items()):
        colour = _COLOURS[_BY_NAME[name]]
        for measured, foreseen in pairs:
            drawing.dot(axes.x(measured), axes.y(foreseen), colour)
        _legend(drawing, number, name, colour)
    drawing.note("dashed: 15 % off; docs/results/bench-compare.json")
    return drawing.svg()


def simulation_goals() -> str:
    """Return Algorithm 1's mean TTFT over ours, with one standard deviation over seeds, and each goal as a tick."""
    rows = _result("plotted")["simulation_goals"]["rows"]
    drawing = Drawing(600, 90 + 24 * len(rows), "Algorithm 1's mean TTFT over RAGCache's: mean, one sd, goal (tick)")
    axis = Axis("", [1, 2, 5, 10, 20, 40], is_log=True)
    bottom = 46 + 24 * len(rows)
    for tick in axis.ticks:
        x = 180 + 400 * axis.share(tick)
        drawing.line([(x, 40), (x, bottom)], "#e5e5e5")
        drawing.text(x, bottom + 18, axis.label_of(tick), anchor="middle", size=11)
    for line, row in enumerate(rows):
        y = 56 + 24 * line
        mean, low, high, goal = (
            180 + 400 * axis.share(1 / value)
            for value in (row["mean"], row["mean"] + row["sd"], row["mean"] - row["sd"], row["goal"])
        )
        drawing.text(170, y + 4, row["name"], anchor="end")
        drawing.line([(low, y), (high, y)], _COLOURS[0], 2)
        drawing.dot(mean, y, _COLOURS[0])
        drawing.line([(goal, y - 8), (goal, y + 8)], _COLOURS[1], 2)
    drawing.note("make bench-simulation, 10 seeds; larger is better, right of the tick is met (log)")
    return drawing.svg()


PLOTS: Final[Mapping[str, Callable[[], str]]] = {
    "chunk-curve": chunk_curve,
    "chunk-sizes": chunk_sizes,
    "compare-h100": h100,
    "compare-ttft": lambda: _comparison(
        "bench-compare", "Mean TTFT after 200 requests, 64 MiB of host memory", [1, 2, 4, 6, 8], 64
    ),
    "compare-ttft-slo": lambda: _comparison(
        "bench-compare-slo", "Mean TTFT after 1,000 requests, 64 MiB of host memory", [1, 3, 5, 7, 9], 64
    ),
    "compare-ttft-warm": lambda: _comparison(
        "bench-compare-warm", "Mean TTFT after 1,000 requests, 256 MiB of host memory", [1, 2, 3, 4, 5, 6], 256
    ),
    "deadlines": deadlines,
    "fleet-curve": fleet_curve,
    "kernel-runs": kernel_runs,
    "policies-gpu": lambda: _policies("gpu", "Token hit rate over the best fixed policy's: GPU alone"),
    "policies-host": lambda: _policies("host", "Token hit rate over the best fixed policy's: GPU and host memory"),
    "policies-tiers": lambda: _policies("tiers", "Token hit rate over the best fixed policy's: three tiers"),
    "predicted": predicted,
    "search-overlap": search_overlap,
    "simulation-goals": simulation_goals,
}
"""By the name of its file, what draws each plot."""


def main() -> None:
    """Write all plots to ``docs/pictures``."""
    for name, draw in PLOTS.items():
        (PICTURES / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
