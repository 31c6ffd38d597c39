"""Plots are the same for the same data, show every name, and give a name one look wherever it is."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from ragcache_core.errors import ConfigError
from ragcache_core.reports.plots import _SETTINGS, Plot, bars, beside, cdfs, lines

SERIES = {"pgdsf": [(8.0, 2.0), (32.0, 1.3)], "mixture": [(8.0, 1.7), (32.0, 1.2)]}


def three() -> list[Plot]:
    return [
        lines("TTFT", "host GiB", "s", SERIES, log_x=True, spread={"pgdsf": [(1.9, 2.1), (1.2, 1.4)]}),
        cdfs("distribution", "s", {"vllm": [0.3, 0.1, 0.2], "ragcache": [0.1]}),
        bars("hit rate", "share", {"8 GiB": {"lru": 0.2, "lfu": 0.3}, "32 GiB": {"lru": 0.4}}),
    ]


@pytest.mark.parametrize("number", range(3))
def test_the_same_data_gives_the_same_svg(number: int) -> None:
    assert three()[number].svg() == three()[number].svg()


@pytest.mark.parametrize(("number", "texts"), [(0, ["TTFT", "host GiB", "pgdsf", "mixture", "8", "32"]),
                                               (1, ["distribution", "vllm", "ragcache"]),
                                               (2, ["hit rate", "lru", "lfu", "8 GiB", "32 GiB"])])  # fmt: skip
def test_a_plot_names_what_it_shows(number: int, texts: list[str]) -> None:
    shown = {"".join(e.itertext()).strip() for e in ElementTree.fromstring(three()[number].svg()).iter()}
    assert set(texts) <= shown


def test_plots_can_be_drawn_from_nothing() -> None:
    for plot in (lines("a", "x", "y", {}), cdfs("b", "x", {"none": []}), bars("c", "y", {})):
        assert plot.svg().startswith("<?xml")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "ragcache\[bench\]"'):
        three()[0].svg()


def test_matplotlib_is_not_imported_before_a_plot_is_drawn() -> None:
    code = "import sys, ragcache_core.reports.plots as p; p.bars('a', 'b', {}); sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


LONG = [f"trace-number-{i}.jsonl, cache_aware, {size:,}" for i in range(5) for size in (65_536, 1_048_576)]


NOTE = "made of this and that, " * 20


def crowded() -> list[Plot]:
    """What used to run into itself: many long names, many groups, points at the edges."""
    heights = dict(zip(("lru", "lfu", "pgdsf"), (1.0, 1.0, 0.9), strict=True))
    series = {name: [(2.0**n, 5.0 + i), (2.0 ** (n + 8), 0.0)] for i, name in enumerate(LONG) for n in (10,)}
    close = {"lru": [(float(n), 1.0) for n in range(60_000, 1_000_000, 40_000)]}
    return [
        bars("many groups", "share", dict.fromkeys(LONG, heights)),
        lines("many names", "tokens", "s", series, log_x=True),
        lines("many points", "tokens", "s", close, log_x=True),
        cdfs("distribution", "s", {name: [1.0, 2.0, 50.0] for name in LONG}),
        beside("all", [bars("few", "s", {"": {"lru": 0.2}}), lines("more", "x", "y", SERIES, log_y=True)], NOTE),
    ]


def drawn(plot: Plot) -> Figure:
    with rc_context(_SETTINGS):
        figure = plot._figure()
        FigureCanvasAgg(figure).draw()
    return figure


def boxes_of(figure: Figure) -> list[tuple[Bbox, list[list[Bbox]], list[Bbox]]]:
    """Return of each axes: the box of what is drawn, those of its tick labels, and those of all legends and notes."""
    parts, found = [figure, *figure.subfigs], []
    parts += [below for part in figure.subfigs for below in part.subfigs]
    beside_axes = [artist for part in parts for artist in (*part.legends, *part.texts)]
    for axes in figure.axes:
        views = [(axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())]
        shown = [
            [
                t.label1.get_window_extent()
                for t in axis.get_major_ticks()
                if low <= t.get_loc() <= high and t.label1.get_text()
            ]
            for axis, (low, high) in views
        ]
        found.append((axes.get_window_extent(), shown, [artist.get_window_extent() for artist in beside_axes]))
    return found


@pytest.mark.parametrize("number", range(5))
def test_no_label_lies_on_another_and_no_legend_or_note_on_what_is_drawn(number: int) -> None:
    figure = drawn(crowded()[number])
    for axes, (x_labels, y_labels), others in boxes_of(figure):
        assert others
        assert not any(axes.overlaps(box) for box in others)
        assert not any(label.overlaps(box) for label in (*x_labels, *y_labels) for box in others)
        if number == 0:  # slanted, which their boxes are not
            assert all(label.get_rotation() for label in figure.axes[0].get_xticklabels())
        else:
            assert not any(a.overlaps(b) for i, a in enumerate(x_labels) for b in x_labels[:i])
        assert not any(a.overlaps(b) for i, a in enumerate(y_labels) for b in y_labels[:i])


@pytest.mark.parametrize("number", range(5))
def test_everything_lies_within_the_picture(number: int) -> None:
    figure = drawn(crowded()[number])
    for _, (x_labels, y_labels), others in boxes_of(figure):
        for box in (*x_labels, *y_labels, *others):
            assert min(box.x0, box.y0) >= 0
            assert box.x1 <= figure.bbox.x1
            assert box.y1 <= figure.bbox.y1
