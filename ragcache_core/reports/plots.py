"""Plots for reports: lines, distributions and bars, as SVG for a page and PNG for a document.

A name has the same colour and marker in every plot, and the same data gives the same SVG, byte for byte. Needs
matplotlib (``pip install "ragcache[bench]"``), which is imported when a plot is drawn.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import IO, TYPE_CHECKING, Any
from zlib import crc32

from ragcache_core.errors import ConfigError
from ragcache_core.private_files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

Points = Sequence[tuple[float, float]]

_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#666666", "#8b5a2b", "#9acd32"),
    *("#7a0019", "#1b2a6b"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
_DASHES = ("-", "--", ":", "-.")
_BY_HAND = (
    {"mixture": 0, "pgdsf": 1, "gdsf": 2, "lru": 3, "lfu": 4, "hybrid": 5, "belady": 6, "infinite": 7}
    | {"s3fifo": 8, "arc": 9}
    | {"ragcache": 0, "vllm": 1, "ragcache-cache-aware": 2, "vllm-host-lru": 3, "vllm-host-arc": 4, "no-cache": 7}
    | {"sglang": 4, "ragcache with dsp": 2, "our default": 6, "our default (mixture)": 0, "paper's pgdsf": 7}
    | {"no dsp": 7, "dsp": 1, "first come": 7, "reordered": 0, "retrieval": 0, "canonical": 1, "cache_aware": 2}
    | {"whole_chunks": 0, "cache_craft": 1, "prefix caching": 2, "full recompute": 7}
)
"""The place in the palette of names that meet in one plot, so that no two have the same style."""

_INCHES = (6.4, 4.0)
_COLUMNS = 2
_LINE_INCHES = 0.21
_CHARACTER_INCHES = 0.085
_AXIS_INCHES = 5.4
_MOST_LABELLED_BARS = 12
_STEPS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7))
"""Digits that ticks of a logarithmic axis begin with, from few ticks to many."""
_SETTINGS: Mapping[Any, Any] = {
    "svg.hashsalt": "ragcache",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11.0,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


@dataclass(frozen=True, slots=True)
class Style:
    """The style of a name in plots."""

    colour: str
    marker: str
    dashes: str = "-"


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: its drawing function, and the names in its legend."""

    names: tuple[str, ...]
    draw: Callable[[Axes], None]


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure of one or more panels in two columns, drawn on demand.

    Legends stand below the axes and never on them. ``note`` stands below everything: what the figure was made of.
    """

    title: str
    panels: tuple[Panel, ...]
    note: str = ""

    def svg(self) -> str:
        """Return the plot as an SVG document, deterministic by its data.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        text = io.StringIO()
        self._write(text, "svg")
        return text.getvalue()

    def save_png(self, path: str | Path) -> None:
        """Write the plot as a PNG file.

        Raises:
            ConfigError: matplotlib is not installed. OSError: the file cannot be written.
        """
        with replacing(Path(path)) as file:
            self._write(file, "png")

    def _write(self, stream: io.StringIO | IO[bytes], file_format: str) -> None:
        try:
            import matplotlib
        except ImportError as error:
            raise ConfigError('plots need matplotlib, which is not installed: pip install "ragcache[bench]"') from error
        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # whatever the user's own settings are
            matplotlib.rcParams.update(_SETTINGS)
            metadata = {"Date": None} if file_format == "svg" else {"Software": None}
            self._figure().savefig(stream, format=file_format, dpi=150, metadata=metadata)

    def _figure(self) -> Figure:
        from matplotlib.figure import Figure

        num_columns = min(len(self.panels), _COLUMNS)
        num_rows = math.ceil(len(self.panels) / _COLUMNS)
        width = _INCHES[0] * num_columns
        is_shared = len({panel.names for panel in self.panels}) == 1  # one legend for all
        legend_width = width if is_shared else _INCHES[0]
        columns = {panel.names: _legend_columns(panel.names, legend_width) for panel in self.panels}
        legend_height = _LINE_INCHES * max((math.ceil(len(n) / c) for n, c in columns.items()), default=0)
        notes = [line for part in self.note.split("\n") for line in wrap(part, int(width / _CHARACTER_INCHES * 1.35))]
        drawn_height = (_INCHES[1] + (0 if is_shared else legend_height)) * num_rows + legend_height * is_shared
        record_height = _LINE_INCHES * len(notes)
        figure = Figure(figsize=(width, drawn_height + record_height), layout="constrained")
        drawn: FigureBase = figure
        if notes:
            drawn, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(drawn_height, record_height))[:, 0]
            below.text(0.01, 0.5, "\n".join(notes), fontsize=8, color="#555555", va="center")
        cells = drawn.subfigures(num_rows, num_columns, squeeze=False).flat
        for cell, panel in zip(cells, self.panels, strict=False):  # the last row may have room for one more
            axes = cell.subplots()
            panel.draw(axes)
            if panel.names and (not is_shared or panel is self.panels[-1]):
                where = drawn if is_shared else cell
                where.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns[panel.names])
        return figure


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Points],
    *,
    log_x: bool = False,
    log_y: bool = False,
    spread: Mapping[str, Points] | None = None,
) -> Plot:
    """Return a plot with a line per series.

    Args:
        title: of the plot.
        x_label: of the x axis, with its unit.
        y_label: of the y axis, with its unit.
        series: for each name, (x, y) in the order of x.
        log_x: a logarithmic x axis.
        log_y: a logarithmic y axis.
        spread: for each name, (lowest, highest) y at each of its points; drawn as a band.

    Raises:
        ValueError: a spread that does not have a pair for each point.
    """
    spread = spread or {}
    for name, bands in spread.items():
        if len(bands) != len(series.get(name, ())):
            raise ValueError(f"spread[{name!r}] has {len(bands)} pairs for {len(series.get(name, ()))} points")
    styles = styles_of(series)

    def draw(axes: Axes) -> None:
        for number, (name, points) in enumerate(series.items()):
            x, style = [x for x, _ in points], styles[name]
            size = max(1 - number / 10, 0.5)  # a line that lies on another leaves that one's edge visible
            axes.plot(
                x, [y for _, y in points], color=style.colour, marker=style.marker, linestyle=style.dashes, label=name,
                linewidth=2.6 * size, markersize=7.5 * size, clip_on=False, zorder=2.5,
            )  # fmt: skip
            if bands := spread.get(name):
                axes.fill_between(
                    x, [low for low, _ in bands], [high for _, high in bands], color=style.colour, alpha=0.15, lw=0
                )
        _scale(axes, log_x, log_y, sorted({x for points in series.values() for x, _ in points}))
        axes.set(title=title, xlabel=x_label, ylabel=y_label)

    return Plot(title, (Panel(tuple(series), draw),))


def bars(
    title: str,
    y_label: str,
    groups: Mapping[str, Mapping[str, float]],
) -> Plot:
    """Return a plot with a bar per name and group; missing values leave a gap.

    Args:
        title: of the plot.
        y_label: of the y axis, with its unit.
        groups: for each group, the bar of each name.
    """
    names = tuple(dict.fromkeys(name for of in groups.values() for name in of))
    styles = styles_of(names)
    width = 0.8 / max(len(names), 1)
    shows_numbers = len(names) * len(groups) <= _MOST_LABELLED_BARS

    def draw(axes: Axes) -> None:
        for i, name in enumerate(names):
            offset = (i - (len(names) - 1) / 2) * width
            heights = {number + offset: of[name] for number, of in enumerate(groups.values()) if name in of}
            values = list(heights.values())
            drawn = axes.bar(list(heights), values, width * 0.92, color=styles[name].colour, label=name)
            if shows_numbers:
                axes.bar_label(drawn, [f"{value:.3g}" for value in values], padding=2, fontsize=8.5)
        axes.margins(y=0.14)
        axes.set_ylim(bottom=0)
        labels = [group.replace(", ", "\n") for group in groups]
        longest = max((len(line) for label in labels for line in label.split("\n")), default=0)
        is_tight = longest * _CHARACTER_INCHES > _AXIS_INCHES / max(len(groups), 1)
        slant: Mapping[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if is_tight else {}
        axes.set_xticks(range(len(groups)), list(groups) if is_tight else labels, **slant)
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        axes.set(title=title, ylabel=y_label)

    return Plot(title, (Panel(names, draw),))


def beside(title: str, plots: Sequence[Plot], note: str = "") -> Plot:
    """Return one plot with all panels in two columns; each keeps its title."""
    return Plot(title, tuple(panel for plot in plots for panel in plot.panels), note)


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """Return the style of each name: fixed over all plots, unless two names of this one collide.

    Names that agree up to a comma have one colour: what follows it decides between dashes.
    """
    styles: dict[str, Style] = {}
    colours: dict[str, str] = {}
    parts = {name: name.partition(", ")[::2] for name in names}
    tails = list(dict.fromkeys(sorted((tail for _, tail in parts.values()), key=bool)))  # what has none is solid
    for name in sorted(parts, key=lambda name: parts[name][0].lower() not in _BY_HAND):  # those keep their own
        head, tail = parts[name]
        place = _BY_HAND.get(head.lower(), crc32(head.encode()))
        if head not in colours:
            turns = (_COLOURS[(place + turn) % len(_COLOURS)] for turn in range(len(_COLOURS)))
            taken = set(colours.values())
            colours[head] = next((colour for colour in turns if colour not in taken), _COLOURS[place % len(_COLOURS)])
        turn = tails.index(tail)
        styles[name] = Style(colours[head], _MARKERS[(place + turn) % len(_MARKERS)], _DASHES[turn % len(_DASHES)])
    return styles


def _legend_columns(names: Sequence[str], width_inches: float) -> int:
    """Return the number of names per legend row."""
    if not names:
        return 1
    most = max(int(width_inches / (max(map(len, names)) * _CHARACTER_INCHES + 0.6)), 1)
    return math.ceil(len(names) / math.ceil(len(names) / most))  # as many in each row


def _scale(axes: Axes, log_x: bool, log_y: bool, all_x: Sequence[float]) -> None:
    from matplotlib.ticker import NullLocator

    if log_x:
        axes.set_xscale("log")
        ticks = _apart(all_x)  # measured points are few: each has its number, if there is room
        axes.set_xticks(ticks, [_number(x) for x in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    if log_y:
        axes.set_yscale("log")
        ticks = log_ticks(*axes.get_ylim())
        axes.set_yticks(ticks, [_number(y) for y in ticks])
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)


def log_ticks(low: float, high: float) -> list[float]:
    """Return at least three round numbers between two, for a logarithmic axis."""
    from matplotlib.ticker import MaxNLocator

    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in _STEPS:
        every = (float(f"{step}e{exponent}") for exponent in exponents for step in steps)
        ticks = [tick for tick in every if low <= tick <= high]
        if len(ticks) >= 3:
            return ticks
    even = MaxNLocator(5).tick_values(low, high)  # a short piece of a logarithmic axis is nearly a linear one
    return [float(f"{tick:.6g}") for tick in even if low <= tick <= high]


def _apart(values: Sequence[float]) -> list[float]:
    """Return those of ascending values whose labels do not overlap on a logarithmic axis."""
    if len(values) < 2:
        return list(values)
    inches_per_log = _AXIS_INCHES / math.log(values[-1] / values[0])
    kept = [values[0]]
    for value in values[1:]:
        needed = (len(_number(value)) + len(_number(kept[-1]))) / 2 * _CHARACTER_INCHES + 0.1
        if math.log(value / kept[-1]) * inches_per_log >= needed:
            kept.append(value)
    return kept


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"
