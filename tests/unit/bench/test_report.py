"""The page of a comparison: complete, without other files, and in agreement with its runs."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from ragcache_core.bench.report import summarise, write_report
from ragcache_core.bench.results import Results, TimedRun
from ragcache_core.bench.summary import ComparisonSummary

ENGINES = ("no-cache", "vllm-host-lru", "ragcache")
SIZES = (64 << 20, 256 << 20)


def measured(path: Path, *, seeds: int = 2) -> tuple[Results, ComparisonSummary]:
    options = {
        "engine": "launch", "compare": ENGINES, "workload": "mmlu", "trace": None, "rates": [1, 2, 4], "seeds": seeds,
        "requests": 2, "warm_up": 3, "scale": 0.125, "model": "<random>", "output_tokens": None, "vllm_args": [],
    }  # fmt: skip
    results = Results(path, options, {"processor": "a test", "cores": 2})
    results.rates_rps, results.capacity_rps = (1.0, 2.0, 4.0), 3.5
    for seed in range(seeds):
        for number, engine in enumerate(ENGINES):
            for size in (0,) if engine == "no-cache" else SIZES:
                for rate in range(3):
                    ttft_s = (1 + seed / 10) * 2**rate / (number + 1)
                    results.runs.append(
                        TimedRun(
                            engine, size, seed, rate, results.rates_rps[rate], 50.0, (ttft_s, ttft_s * 2), (0.01,),
                            1_000, 100 * number, 2, 1, {"gpu": 60 * number, "host": 40 * number}, 3.0,
                        )
                    )  # fmt: skip
    return results, summarise(results)


class _Checker(HTMLParser):
    """Notes what a page would load, and whether its tags are closed in order."""

    VOID = {"meta", "path", "use", "rect", "br"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.loads += [
            value for name, value in attrs if name in ("src", "href", "xlink:href") and value and value[0] != "#"
        ]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_loads_nothing_and_is_well_formed(tmp_path: Path) -> None:
    results, _ = measured(tmp_path / "out.json")
    paths = write_report(tmp_path / "report.html", results)
    checker = _Checker()
    text = paths[0].read_text(encoding="utf-8")
    checker.feed(text)
    assert checker.open == []
    assert checker.loads == []
    assert text.count("<svg") == text.count("<figure>") == 2
    assert "RAGCache with default settings" in checker.text
    options = checker.text[checker.text.index("Options") :]
    assert [*map(options.__getitem__, (options.index("output tokens") + 1, options.index("vllm args") + 1))] == [
        "not given", "none",
    ]  # fmt: skip
    assert any(text.startswith("2 requests at each rate") for text in checker.text)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in paths}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[1:])
