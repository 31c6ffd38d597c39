"""``ragcache bench`` over real engines: few requests, and what must hold whatever the times are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ragcache_core.cli import cli
from ragcache_core.profiles.random_model import ModelShape, random_model
from ragcache_core.sim.traces.trace import Trace, TracedRequest, write_trace

pytestmark = pytest.mark.benchmark

NUM_PAIRS, RATES = 12, (8.0, 30.0)
ENGINES = ("vllm-host-arc", "ragcache-cache-aware")
SMALL = ModelShape(
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=256,
    vocab_size=2_048,
    max_tokens=4_096,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


def trace() -> Trace:
    """Return three rounds over the same pairs of documents, more than KV memory holds, the second the other way round.

    A round is the warm-up, or the requests of a rate.
    """
    rounds = [[(f"d{i}", f"e{i}")[::step] for i in range(NUM_PAIRS)] for step in (1, -1, 1)]
    requests = [pair for pairs in rounds for pair in pairs]
    return Trace.from_requests(TracedRequest(float(i), pair, (160, 160), 9, 2) for i, pair in enumerate(requests))


def bench(folder: Path, *more: str) -> Any:
    model = random_model(SMALL, folder)
    write_trace(trace(), folder / "trace.jsonl")
    amounts = ("--requests", str(NUM_PAIRS), "--warm-up", str(NUM_PAIRS), "--seeds", "1")
    arguments = [
        *("--compare", ",".join(ENGINES), "--model", str(model), "--trace", str(folder / "trace.jsonl")),
        *("--rates", ",".join(map(str, RATES)), *amounts),
        *("--kv-memory", "2MiB", "--host-memory", "8MiB"),
        *("--output", str(folder / "out.json"), "--html", str(folder / "report.html"), *more),
    ]
    return CliRunner().invoke(cli, ["bench", *arguments])


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    done = bench(folder)
    assert done.exit_code == 0, done.output
    return dict(json.loads((folder / "out.json").read_text(encoding="utf-8")))


def test_every_request_of_every_run_is_answered(report: dict[str, Any]) -> None:
    runs = report["runs"]
    assert [(run["peer"], run["rate"]) for run in runs] == [(peer, rate) for peer in ENGINES for rate in (0, 1)]
    assert all(len(run["ttft_s"]) == NUM_PAIRS and min(run["ttft_s"]) > 0 for run in runs)


def test_engines_get_the_same_tokens_and_every_cached_one_is_of_some_tier(report: dict[str, Any]) -> None:
    runs = report["runs"]
    for rate in (0, 1):
        sizes = {(run["num_prompt_tokens"], run["num_output_tokens"]) for run in runs if run["rate"] == rate}
        assert len(sizes) == 1
    for run in runs:
        assert sum(run["tokens_by_tier"].values()) == run["num_cached_tokens"] <= run["num_prompt_tokens"]
        assert run["num_cached_tokens"] % 32 == 0
    assert all(run["tokens_by_tier"]["host"] > 0 for run in runs if run["rate"] == 1)  # what the warm-up read


def test_documents_come_in_the_order_that_is_cached(report: dict[str, Any]) -> None:
    by_key = {(run["peer"], run["rate"]): run for run in report["runs"]}
    stock, ours = by_key[ENGINES[0], 0], by_key[ENGINES[1], 0]
    assert (stock["num_cached_tokens"], stock["num_reordered"]) == (0, 0)
    assert ours["num_reordered"] > 0
    assert ours["num_cached_tokens"] >= ours["num_reordered"] * 160


def test_what_the_engines_cost_is_measured(report: dict[str, Any]) -> None:
    assert all(run["cpu_s"] > 0 for run in report["runs"])


def test_the_page_is_written_and_going_on_with_what_is_finished_opens_no_engine(
    report: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert all(peer in text for peer in ENGINES)
    assert text.count("<svg") == 2
    monkeypatch.setattr("ragcache_core.client.Engine.launch", lambda *_, **__: pytest.fail("an engine was opened"))
    again = bench(folder, "--resume")
    assert again.exit_code == 0, again.output
    assert json.loads((folder / "out.json").read_text(encoding="utf-8"))["runs"] == report["runs"]
    refused = bench(folder)
    assert refused.exit_code == 1
    assert "--resume" in refused.output
