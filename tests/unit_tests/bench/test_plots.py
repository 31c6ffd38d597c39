"""Plots are the same for the same data, show every name, and look alike for a name wherever it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ragcache_core.bench.plots import Plot, bars, beside, cdfs, lines, styles_of
from ragcache_core.errors import ConfigError

SERIES = {"pgdsf": [(8.0, 2.0), (32.0, 1.3)], "tournament": [(8.0, 1.7), (32.0, 1.2)]}


def three() -> list[Plot]:
    return [
        lines("TTFT", "host GiB", "s", SERIES, log_x=True, spread={"pgdsf": [(1.9, 2.1), (1.2, 1.4)]}),
        cdfs("distribution", "s", {"vllm": [0.3, 0.1, 0.2], "ragcache": [0.1]}),
        bars("hit rate", "share", {"8 GiB": {"lru": 0.2, "lfu": 0.3}, "32 GiB": {"lru": 0.4}}),
    ]


@pytest.mark.parametrize("number", range(3))
def test_the_same_data_gives_the_same_svg(number: int) -> None:
    assert three()[number].svg() == three()[number].svg()


@pytest.mark.parametrize(("number", "texts"), [(0, ["TTFT", "host GiB", "pgdsf", "tournament", "8", "32"]),
                                               (1, ["distribution", "vllm", "ragcache"]),
                                               (2, ["hit rate", "lru", "lfu", "8 GiB", "32 GiB"])])  # fmt: skip
def test_a_plot_names_what_it_shows(number: int, texts: list[str]) -> None:
    shown = {"".join(e.itertext()).strip() for e in ElementTree.fromstring(three()[number].svg()).iter()}
    assert set(texts) <= shown


def test_a_png_is_written_and_is_wider_with_more_panels(tmp_path: Path) -> None:
    single, both = tmp_path / "1.png", tmp_path / "2.png"
    three()[0].save_png(single)
    beside("both", three()[:2]).save_png(both)
    widths = [int.from_bytes(path.read_bytes()[16:20], "big") for path in (single, both)]
    assert single.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert widths[1] == 2 * widths[0]


def test_plots_can_be_drawn_from_nothing() -> None:
    for plot in (lines("a", "x", "y", {}), cdfs("b", "x", {"none": []}), bars("c", "y", {})):
        assert plot.svg().startswith("<?xml")


def test_a_known_name_looks_the_same_in_every_company() -> None:
    alone = styles_of(["pgdsf"])["pgdsf"]
    names = ["something", "else", "lru", "pgdsf", "tournament", "belady"]
    assert styles_of(names)["pgdsf"] == styles_of(names[::-1])["pgdsf"] == alone


def test_no_two_of_a_palette_full_of_names_have_the_same_colour() -> None:
    names = [f"series {i}" for i in range(12)]
    assert len({style.colour for style in styles_of(names).values()}) == 12
    assert len(styles_of([f"series {i}" for i in range(40)])) == 40


def test_a_spread_without_a_pair_for_each_point_is_refused() -> None:
    with pytest.raises(ValueError, match="1 pairs for 2 points"):
        lines("a", "x", "y", SERIES, spread={"pgdsf": [(1.0, 2.0)]})


def test_the_users_own_settings_of_matplotlib_change_nothing_and_stay_as_they_are() -> None:
    import matplotlib

    plain = three()[0].svg()
    with matplotlib.rc_context({"font.size": 30.0, "axes.facecolor": "black"}):
        assert three()[0].svg() == plain
        assert matplotlib.rcParams["font.size"] == 30.0


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "ragcache\[bench\]"'):
        three()[0].svg()


def test_matplotlib_is_not_imported_before_a_plot_is_drawn() -> None:
    code = "import sys, ragcache_core.bench.plots as p; p.bars('a', 'b', {}); sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
