"""The examples of this integration run on the demo model, and show what they say."""

import json
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

from examples import iterative_retrieval, langchain_agent, langchain_chain, langchain_conversation
from ragcache_core.client import Engine


@pytest.fixture
def rows(
    request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, Any]]:
    """The JSON that the example prints."""
    example: ModuleType = request.param
    monkeypatch.setenv("RAGCACHE_API_KEY", engine.api_key)
    example.main(["--url", engine.base_url, "--json"])
    printed: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return printed


@pytest.mark.parametrize("rows", [langchain_chain], indirect=True)
def test_the_chain_finds_its_documents_cached_the_second_time(rows: list[dict[str, Any]]) -> None:
    assert [row["note"] for row in rows] == ["cold", "again"] * 3
    for cold, again in zip(rows[::2], rows[1::2], strict=True):
        assert again["answer"] == cold["answer"] != ""
        assert again["num_cached_tokens"] > again["num_prompt_tokens"] // 2
        assert again["ttft_ms"] > 0


@pytest.mark.parametrize("rows", [langchain_agent], indirect=True)
def test_the_agent_searches_and_answers(rows: list[dict[str, Any]]) -> None:
    by_note = {row["note"]: row for row in reversed(rows)}
    assert by_note["step 1"]["answer"].startswith("search(")
    assert by_note["step 2"]["answer"] == by_note["again 2"]["answer"] != ""
    assert by_note["step 2"]["num_prompt_tokens"] > by_note["step 1"]["num_prompt_tokens"]
    assert by_note["again 2"]["num_cached_tokens"] > by_note["again 2"]["num_prompt_tokens"] // 2


@pytest.mark.parametrize("rows", [iterative_retrieval], indirect=True)
def test_the_second_round_begins_with_the_documents_of_the_first(rows: list[dict[str, Any]]) -> None:
    assert [row["note"] for row in rows] == ["round 1", "round 2"] * 3
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert second["num_prompt_tokens"] >= first["num_prompt_tokens"]
        assert second["num_cached_tokens"] > first["num_prompt_tokens"] // 2


@pytest.mark.parametrize("rows", [langchain_conversation], indirect=True)
def test_a_turn_begins_with_the_turn_before(rows: list[dict[str, Any]]) -> None:
    assert [row["note"] for row in rows] == ["turn 1", "turn 2", "turn 3", "turn 1", "turn 2"]
    for before, after in [*pairwise(rows[:3]), *pairwise(rows[3:])]:
        assert after["num_cached_tokens"] >= before["num_prompt_tokens"] // 32 * 32
