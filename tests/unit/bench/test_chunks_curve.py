"""The picture of chunk reuse: right answers against computed tokens."""

from __future__ import annotations

from pathlib import Path

from ragcache_core.bench.quality import FULL, PREFIX, Summary
from tests.benchmarks.chunks.answers import curve_plot


def _way(name: str, exact_match: float, num_computed: int) -> dict[str, Summary]:
    return {"continued": Summary(name, "continued", 10, exact_match, exact_match, 1000, num_computed, 0.0, None)}


def test_each_selection_is_a_line_from_few_computed_tokens_to_many(tmp_path: Path) -> None:
    ways = [
        (FULL.name, 1.0, 1200),
        (PREFIX.name, 1.0, 1000),
        ("whole_chunks 2", 0.9, 400),
        ("whole_chunks 1", 0.8, 300),
        ("cache_craft 1", 0.7, 600),
    ]
    plot = curve_plot({name: _way(name, *figures) for name, *figures in ways}, "a-model")
    plot.save_png(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    svg = plot.svg()
    assert "10 continued questions" in svg
    assert "asked of a-model" in svg
    assert all(name in svg for name in ("whole_chunks", "cache_craft", FULL.name, PREFIX.name))
