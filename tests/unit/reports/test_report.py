"""The page of a comparison: whole, by itself, and in agreement with its runs."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from ragcache_core.bench.compare.report import plots, report, summary_of, write_report
from ragcache_core.bench.compare.results import Results
from ragcache_core.bench.compare.sessions import Run
from ragcache_core.bench.compare.summary import Summary
from ragcache_core.bench.compare.tables import tables

PEERS = ("no-cache", "vllm-host-lru", "ragcache")
SIZES = (64 << 20, 256 << 20, 1024 << 20)


def measured(path: Path, *, seeds: int = 2, peers: tuple[str, ...] = PEERS) -> tuple[Results, Summary]:
    options = {
        "engine": "launch", "compare": peers, "workload": "mmlu", "trace": None, "rates": [1, 2, 4], "seeds": seeds,
        "requests": 2, "warm_up": 3, "scale": 0.125, "model": "<random>", "dtype": "float32", "vllm_args": [],
        "kv_memory_bytes": 40 << 20, "host_memory_bytes": SIZES, "output_tokens": None,
    }  # fmt: skip
    results = Results(path, options, {"processor": "a test", "cores": 2})
    results.rates_rps, results.capacity_rps = (1.0, 2.0, 4.0), 3.5
    for seed in range(seeds):
        for number, peer in enumerate(peers):
            for size in (0,) if peer == "no-cache" else SIZES:
                for rate in range(3) if size in (0, SIZES[1]) else (1,):
                    ttft_s = (1 + seed / 10) * 2**rate / (number + 1)
                    results.runs.append(
                        Run(
                            peer, size, seed, rate, results.rates_rps[rate], 50.0, (ttft_s, ttft_s * 2), (0.01,), 1_000,
                            100 * number, 2, 1, {"gpu": 60 * number, "host": 40 * number}, 3.0, 700 << 20,
                        )
                    )  # fmt: skip
    return results, summary_of(results)


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
    assert "url(http" not in text
    assert "@import" not in text
    assert text.count("<svg") == text.count("<figure>") == 5
    assert "RAGCache as it comes" in checker.text
    assert any("Arrivals are Poisson" in said for said in checker.text)
    assert any("<random>, float32; 40 MiB of KV memory; 64 MiB, 256 MiB, 1,024 MiB of host" in t for t in checker.text)
    options = checker.text[checker.text.index("Options") :]
    assert [*map(options.__getitem__, (options.index("output tokens") + 1, options.index("vllm args") + 1))] == [
        "not given", "none",
    ]  # fmt: skip
    assert any(said.startswith("2 requests at each rate") for said in checker.text)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in paths}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths[1:])
    assert len(paths) == 6


def test_pictures_of_one_size_of_host_memory_name_it(tmp_path: Path) -> None:
    results, summary = measured(tmp_path / "out.json")
    titles = {name: plot.title for name, plot in plots(results, summary).items()}
    assert all("host memory 256 MiB" in titles.pop(name) for name in ("ttft", "cdf", "throughput"))
    assert not any("MiB" in title for title in titles.values()), "these are drawn against it"
    none_has = plots(*measured(tmp_path / "out.json", peers=("no-cache",)))
    results.options["engine"] = "http://localhost:8000"
    nobody_knows = plots(results, summary)
    for drawn in (none_has, nobody_knows):
        assert not any("host" in drawn[name].title for name in ("ttft", "cdf", "throughput"))


def test_the_tables_say_what_was_measured(tmp_path: Path) -> None:
    results, summary = measured(tmp_path / "out.json")
    throughput, *others = tables(summary, results.rates_rps)
    assert [row[0] for row in throughput.rows] == list(PEERS)
    assert [table.title for table in others[:3]] == [
        f"Times lower mean TTFT, at 2 requests/s with {size} MiB" for size in ("64", "256", "1,024")
    ]
    assert [table.title for table in others[3:5]] == [
        f"Times lower mean TTFT, at {rate} requests/s with 256 MiB" for rate in (1, 4)
    ]
    ours = others[1].rows[2]
    assert [cell.partition(" ")[0] for cell in ours] == ["ragcache", "3.00", "1.50", "-"]
    slowest = others[5].rows[0]
    assert slowest[:3] == ["no-cache", "-", slowest[2]]
    assert slowest[2].startswith("1,575 [")
    assert "1,575" in others[5].text()
    assert "[" not in others[5].text()


def test_one_seed_has_no_interval_and_no_band(tmp_path: Path) -> None:
    results, summary = measured(tmp_path / "out.json", seeds=1)
    text = report(results, summary, []).html()
    assert "1,500" in text
    assert "<small>" not in text
    assert "one seed: there is no interval" in text
    write_report(tmp_path / "report.html", results)


def test_a_comparison_that_was_interrupted_early_has_a_page(tmp_path: Path) -> None:
    results, _ = measured(tmp_path / "out.json")
    del results.runs[1:]
    (page_path, *_) = write_report(tmp_path / "report.html", results)
    assert re.search(r"<td[^>]*>no-cache</td>", page_path.read_text(encoding="utf-8"))
    assert not re.search(r"<td[^>]*>vllm-host-lru</td>", page_path.read_text(encoding="utf-8").partition("Options<")[0])
