"""Plots for reports: lines, distributions and bars, as SVG for a page and PNG for a document.

A name has the same colour and marker in every plot, and the same data gives the same SVG, byte for byte. Needs
matplotlib (``pip install "ragcache[bench]"``), which is imported when a plot is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from ragcache_core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Panel = Callable[[Axes], None]

Points = Sequence[tuple[float, float]]

_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#666666", "#a6761d", "#11a579"),
    *("#c0392b", "#3969ac"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
_BY_HAND = (
    {"tournament": 0, "pgdsf": 1, "gdsf": 2, "lru": 3, "lfu": 4, "hybrid": 5, "belady": 6, "infinite": 7}
    | {"ragcache": 0, "vllm": 1, "ragcache-cache-aware": 2, "vllm-host-lru": 3, "vllm-host-arc": 4, "no-cache": 7}
    | {"retrieval": 0, "canonical": 1, "cache_aware": 2}
)
"""The place in the palette of names that meet in one plot, so that no two of them look alike."""

_INCHES = (6.4, 4.2)
_SETTINGS: Mapping[Any, Any] = {
    "svg.hashsalt": "ragcache",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.markersize": 5.0,
}


@dataclass(frozen=True, slots=True)
class Style:
    """How a name is drawn."""

    colour: str
    marker: str


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure of one panel or several side by side, drawn when it is asked for."""

    title: str
    panels: tuple[Panel, ...]

    def svg(self) -> str:
        """Return the plot as an SVG document: the same data gives the same text.

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
        image = io.BytesIO()
        self._write(image, "png")
        Path(path).write_bytes(image.getvalue())

    def _write(self, stream: io.StringIO | io.BytesIO, file_format: str) -> None:
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

        width, height = _INCHES
        figure = Figure(figsize=(width * len(self.panels), height), layout="constrained")
        for axes, draw in zip(figure.subplots(1, len(self.panels), squeeze=False)[0], self.panels, strict=True):
            draw(axes)
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
    """Return a plot with a line through the points of each series.

    Args:
        series: for each name, (x, y) in the order of x.
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
        for name, points in series.items():
            x, style = [x for x, _ in points], styles[name]
            axes.plot(x, [y for _, y in points], color=style.colour, marker=style.marker, label=name)
            if bands := spread.get(name):
                axes.fill_between(
                    x, [low for low, _ in bands], [high for _, high in bands], color=style.colour, alpha=0.15, lw=0
                )
        all_x = sorted({x for points in series.values() for x, _ in points})
        _scale(axes, log_x, log_y, all_x)
        _label(axes, title, x_label, y_label, len(series))

    return Plot(title, (draw,))


def cdfs(title: str, x_label: str, samples: Mapping[str, Sequence[float]]) -> Plot:
    """Return a plot with the share of each name's samples that are at most x."""
    styles = styles_of(samples)

    def draw(axes: Axes) -> None:
        for name, values in samples.items():
            x = np.sort(np.asarray(values, dtype=float))
            share = np.arange(len(x) + 1) / max(len(x), 1)
            x = np.concatenate((x[:1], x)) if len(x) else np.zeros(1)
            axes.step(x, share, where="post", color=styles[name].colour, label=name)
        axes.set_ylim(0, 1)
        _label(axes, title, x_label, "share of requests", len(samples))

    return Plot(title, (draw,))


def bars(title: str, y_label: str, groups: Mapping[str, Mapping[str, float]]) -> Plot:
    """Return a plot with a bar for each name in each group; a name that a group lacks leaves a gap."""
    names = list(dict.fromkeys(name for of in groups.values() for name in of))
    styles = styles_of(names)
    width = 0.8 / max(len(names), 1)

    def draw(axes: Axes) -> None:
        for i, name in enumerate(names):
            offset = (i - (len(names) - 1) / 2) * width
            heights = {number + offset: of[name] for number, of in enumerate(groups.values()) if name in of}
            axes.bar(list(heights), list(heights.values()), width * 0.92, color=styles[name].colour, label=name)
        axes.set_xticks(range(len(groups)), list(groups))
        axes.grid(visible=False, axis="x")
        _label(axes, title, "", y_label, len(names))

    return Plot(title, (draw,))


def beside(title: str, plots: Sequence[Plot]) -> Plot:
    """Return one plot with the panels of all, side by side; each keeps its own title."""
    return Plot(title, tuple(panel for plot in plots for panel in plot.panels))


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """Return the style of each name: its own in every plot, unless two names of this one would look alike."""
    styles: dict[str, Style] = {}
    taken: set[str] = set()
    for name in sorted(names, key=lambda name: name not in _BY_HAND):  # those keep their own
        place = _BY_HAND.get(name, crc32(name.encode()))
        turns = (_COLOURS[(place + turn) % len(_COLOURS)] for turn in range(len(_COLOURS)))
        colour = next((colour for colour in turns if colour not in taken), _COLOURS[place % len(_COLOURS)])
        taken.add(colour)
        styles[name] = Style(colour, _MARKERS[place % len(_MARKERS)])
    return styles


def _scale(axes: Axes, log_x: bool, log_y: bool, all_x: Sequence[float]) -> None:
    if log_x:
        from matplotlib.ticker import FuncFormatter, NullLocator

        axes.set_xscale("log")
        axes.set_xticks(all_x)  # measured points are few: each has its number
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if float(x).is_integer() else f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    if log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _label(axes: Axes, title: str, x_label: str, y_label: str, num_names: int) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if num_names:
        axes.legend()
