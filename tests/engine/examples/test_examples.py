"""Every example runs on the real engine with the demo model, and the demo's answers are right."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from examples import (
    changing_documents,
    compiled_corpus,
    compressed_disk,
    deadline,
    demo,
    document_order,
    guarded_reuse,
    near_equals,
    speculative_rag,
    vector_database,
)
from examples._shared import demo_questions
from ragcache_core.client import Engine
from tests.conftest import ROOT
from tests.support.postgres import pgvector_server

pytestmark = pytest.mark.slow

EXAMPLES = [
    "filtered_search",
    "answer_cache",
    "iterative_retrieval",
    "langchain_agent",
    "langchain_chain",
    "langchain_retriever_agent",
    "langchain_conversation",
    "llamaindex_chat_engine",
    "llamaindex_query_engine",
    "llamaindex_retriever_agent",
    "offline_batch",
    "reranking",
    "speculative_rag",
]
HIDING = {
    "langchain_agent",
    "langchain_chain",
    "langchain_retriever_agent",
    "llamaindex_query_engine",
    "llamaindex_retriever_agent",
    "reranking",
    "speculative_rag",
}
"""Those whose searches take a while, which the engine uses."""
HEADS = ["question", "answer", "ttft", "ms", "prompt", "cached", "gpu", "host", "disk"]


@pytest.fixture(autouse=True)
def key_of_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGCACHE_API_KEY", engine.api_key)


def test_every_example_is_tested() -> None:
    scripts = {p.stem for p in (ROOT / "examples").glob("*.py")} - {"__init__", "_shared", "demo"}
    assert scripts == {
        *EXAMPLES,
        "changing_documents",
        "compiled_corpus",
        "compressed_disk",
        "deadline",
        "document_order",
        "fleet",
        "fleet_ray",
        "guarded_reuse",
        "near_equals",
        "vector_database",
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_a_table_for_people(name: str, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module(f"examples.{name}").main(["--url", engine.base_url])
    printed = capsys.readouterr().out
    heads, *lines = printed[printed.index("question ") :].splitlines()
    assert heads.split() == ([*HEADS, "hidden", "ms"] if name in HIDING else HEADS)
    rows = [line.split() for line in lines]
    assert len(rows) >= 4
    if name in HIDING:
        hidden_ms = [row.pop() for row in rows]
        assert any(ms not in ("-", "0.0") for ms in hidden_ms)
    assert any(row[-4:] == [row[-3], row[-3], "0", "0"] and row[-3] != "0" for row in rows)  # cached, all in GPU
    if name == "llamaindex_query_engine":
        expected = [q["answer"] for q in demo_questions("single")[:3]]
        assert all(answer in printed for answer in expected)
    if name == "offline_batch":
        assert len(rows) == 24
        assert printed.count(" right ") >= 0.9 * len(rows), "each answer is that of its question"


def test_a_compiled_corpus_is_loaded_by_the_first_requests(capsys: pytest.CaptureFixture[str]) -> None:
    compiled_corpus.main(["--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["note"] for row in rows] == ["right"] * 4
    for row in rows:
        assert row["num_cached_tokens"] >= 0.5 * row["num_prompt_tokens"]
        assert row["num_cached_tokens"] > row["num_gpu_tokens"] + row["num_host_tokens"], "the rest is from the folder"


def test_a_compressed_disk_holds_more_and_answers_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    compressed_disk.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["used_bytes"] <= 24 << 20
    assert found["num_blocks"] > 1.1 * found["num_uncompressed_blocks"]
    assert found["num_equal"] == found["num_repeated"] > 40
    assert found["num_disk_tokens"] > 0


def test_documents_are_reused_where_the_bound_on_errors_holds(capsys: pytest.CaptureFixture[str]) -> None:
    guarded_reuse.main(["--json"])
    kinds = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in kinds} == {"single-hop", "continued"}
    for row in kinds:
        assert row["num_answers"] == guarded_reuse.NUM_OF_A_KIND
        assert 0 < row["num_audits"] <= row["num_approximate"] < row["num_answers"]
        assert row["num_errors"] <= row["num_differing"] <= guarded_reuse.MAX_ERROR * row["num_answers"]


def test_the_demo_answers_at_least_nine_in_ten_and_reports_what_was_cached(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "RESULTS", tmp_path / "demo.json")
    demo.main(["--url", engine.base_url])
    report = json.loads((tmp_path / "demo.json").read_text())
    results = report["results"]
    assert report["questions"] == len(results) == 40
    assert report["correct"] == sum(r["answer"] == r["expected"] for r in results)
    assert report["correct"] >= 0.9 * report["questions"]
    assert {(r["framework"], r["documents"]) for r in results} == {
        *(("langchain", 2), ("langchain", 20), ("llamaindex", 2), ("llamaindex", 20)),
    }
    for r in results:
        assert r["warm_is_same"]
        assert r["ttft_s"] > 0
        in_blocks = r["prompt_tokens"] // 32 * 32
        assert r["warm_cached_tokens"] in ((r["prompt_tokens"] - 1) // 32 * 32, in_blocks), "all of it from host memory"
        assert 0 <= r["cached_tokens"] <= r["warm_cached_tokens"]
    (later,) = report["rounds"]  # an engine of others is not restarted
    assert later["same_answers"] == later["questions"] == 40
    found = later["gpu_tokens"] + later["host_tokens"] + later["disk_tokens"]
    assert sum((r["prompt_tokens"] - 1) // 32 * 32 for r in results) <= found <= later["prompt_tokens"]
    printed = capsys.readouterr().out
    assert f"{report['correct']} of 40 right" in printed
    assert all(r["question"][:38] in printed for r in results)


@pytest.mark.benchmark
def test_the_demo_is_served_from_every_tier_and_from_disk_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "RESULTS", tmp_path / "demo.json")
    demo.main([])
    later, restarted, again = json.loads((tmp_path / "demo.json").read_text())["rounds"]
    for served in (later, again):
        assert served["gpu_tokens"] > 0
        assert served["host_tokens"] > 0
        assert served["disk_tokens"] > 0
    assert restarted["host_tokens"] == 0
    assert restarted["disk_tokens"] > restarted["prompt_tokens"] // 2
    for served in (later, restarted, again):
        assert served["same_answers"] == served["questions"] == 40
    assert not list(tmp_path.glob("demo_kv*"))
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("after a restart")]
    assert line.split()[4] == str(restarted["prompt_tokens"])


def test_a_document_that_changes_is_forgotten_and_its_new_version_is_cached_before_it_is_asked_about(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.forget(["nalna.md"])  # other examples ask about it as well
    changing_documents.main(["--url", engine.base_url, "--json"])
    cold, again, changed, deleted = json.loads(capsys.readouterr().out)
    assert cold["answer"] == again["answer"] == demo_questions("single")[0]["answer"]
    assert changed["answer"] == changing_documents.NEW_ANSWER
    assert again["num_gpu_tokens"] > cold["num_cached_tokens"]
    assert changed["num_gpu_tokens"] > cold["num_cached_tokens"], "it was prefilled when it changed"
    assert deleted["answer"] not in (cold["answer"], changed["answer"])
    changing_documents.main(["--url", engine.base_url])
    assert "nalna.md: 0 blocks left, all of it is gone" in capsys.readouterr().out


def test_documents_of_a_vector_database_are_answered_from_and_found_cached(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    with pgvector_server() as address:
        vector_database.main(["--url", engine.base_url, "--json", "--postgres", address])
    rows = json.loads(capsys.readouterr().out)
    assert [row["answer"] for row in rows[::2]] == [asked["answer"] for asked in demo_questions("single")[:3]]
    assert [row["answer"] for row in rows[1::2]] == [row["answer"] for row in rows[::2]]
    assert all(row["num_cached_tokens"] > 0 for row in rows[1::2])


def test_the_fused_pair_prints_what_happened_to_each_speculation(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    speculative_rag.main(["--url", engine.base_url])
    events = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    num_started, num_cancelled = events.count("  start"), events.count("  cancel")
    assert events.count("  confirm") == num_started - num_cancelled >= 4
    assert events.count("  miss") + events.count("  confirm") <= 6  # on a busy machine a search may end too soon


def test_each_deadline_gets_the_least_deviation_that_is_predicted_to_meet_it(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    deadline.main(["--url", engine.base_url, "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["choice"] for row in rows] == ["exact", "document_order", "document_order"]
    assert [row["is_in_time"] for row in rows] == [True, True, False]
    assert all(row["predicted_ms"] <= row["exact_ms"] for row in rows)
    assert len({row["answer"] for row in rows}) == 1
    assert "nothing is predicted to meet" in rows[-1]["why"]


def test_cached_nearly_equal_documents_are_used_and_reported(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    near_equals.main(["--url", engine.base_url, "--json"])
    rows = json.loads(capsys.readouterr().out)
    swaps = [swap for row in rows for swap in row["swaps"]]
    assert swaps
    assert all(0.0 <= swap["score_loss"] <= near_equals.MAX_SCORE_LOSS for swap in swaps)
    assert sum(row["is_right"] for row in rows) >= 0.9 * len(rows)


@pytest.mark.benchmark
def test_every_order_of_documents_is_measured_on_the_same_questions(capsys: pytest.CaptureFixture[str]) -> None:
    document_order.main(["--questions", "24", "--json"])
    measured = json.loads(capsys.readouterr().out)
    assert [(m["order"], m["keep_first"]) for m in measured] == list(document_order.ORDERS)
    plain, canonical, cache_aware, kept = measured
    assert plain["reordered_share"] == 0.0
    assert canonical["reordered_share"] > cache_aware["reordered_share"] > 0.0
    assert cache_aware["cached_share"] > plain["cached_share"]
    assert kept["reordered_share"] <= cache_aware["reordered_share"]
    assert all(m["exact_match"] >= 0.9 for m in measured)


def test_an_engine_whose_cache_cannot_be_emptied_is_not_measured(engine: Engine) -> None:
    with pytest.raises(SystemExit, match="start it with VLLM_SERVER_DEV_MODE=1"):
        document_order.main(["--url", engine.base_url, "--questions", "1"])
