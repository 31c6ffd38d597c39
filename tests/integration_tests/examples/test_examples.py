"""Every example runs on the real engine with the demo model, and the demo's answers are right."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from examples import demo
from examples._shared import demo_questions
from ragcache_core.client import Engine
from tests.conftest import ROOT

EXAMPLES = [
    "iterative_retrieval",
    "langchain_agent",
    "langchain_chain",
    "llamaindex_agent",
    "llamaindex_query_engine",
    "llamaindex_workflow",
]


@pytest.fixture(autouse=True)
def key_of_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGCACHE_API_KEY", engine.api_key)


def test_every_example_is_tested() -> None:
    scripts = {p.stem for p in (ROOT / "examples").glob("*.py")} - {"__init__", "_shared", "demo"}
    assert scripts == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_a_table_for_people(name: str, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module(f"examples.{name}").main(["--url", engine.base_url])
    printed = capsys.readouterr().out
    heads, *rows = printed[printed.index("question ") :].splitlines()
    assert heads.split() == ["question", "answer", "ttft", "ms", "prompt", "cached"]
    assert len(rows) >= 4
    if name == "llamaindex_query_engine":
        expected = [q["answer"] for q in demo_questions("single")[:3]]
        assert all(answer in printed for answer in expected)


def test_the_demo_answers_at_least_nine_in_ten_and_says_what_was_cached(
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
        assert r["warm_cached_tokens"] == (r["prompt_tokens"] - 1) // 32 * 32
        assert 0 <= r["cached_tokens"] <= r["warm_cached_tokens"]
    printed = capsys.readouterr().out
    assert f"{report['correct']} of 40 right" in printed
    assert all(r["question"][:38] in printed for r in results)
