"""Chunk reuse through the door: an engine that was launched with it, what it tells of its requests, and what an engine
after it finds on disk, which never trusts what was damaged. The last test ends the engine of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest

from ragcache_core import CacheConfig, Document, PromptLayout, RequestStats, SegmentKind
from ragcache_core.chunk import AlphaPoint
from ragcache_core.client import Engine
from ragcache_core.config import ChunkReuse
from ragcache_core.vllm_plugin.chunks.page_layout import pack_token_ids
from ragcache_integrations.langchain import ChatRAGCache
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.measured import measured
from tests.support.waiting import until

_LAYOUT = PromptLayout()
_WORDS = ("Zorval", "Tenrik", "was", "a", "company", "founded", "by", "Anna", "Boris", "in", "1823", "makes", "clocks")
_DOCUMENTS = {name: Document(name, " ".join(Random(name).choices(_WORDS, k=60))) for name in "abcdefghklmnopqrstuvwxyz"}
_QUESTION = "Who founded Zorval?"
_THIRD: dict[str, Any] = {"selection": "cache_craft", "alpha": 1e9, "max_recompute": 0.3}
_NOTHING: dict[str, Any] = {"selection": "cache_craft", "alpha": 0.0}
_ALL: dict[str, Any] = {"selection": "cache_craft", "alpha": 1e9, "max_recompute": 1.0}


@contextmanager
def _launch(directory: Path) -> Iterator[Engine]:
    cache = CacheConfig(
        kv_cache_bytes="24MiB",
        block_size=32,
        host_bytes="32MiB",
        disk_bytes="64MiB",
        directory=directory,
        chunk_reuse=ChunkReuse(share=1.0, is_default=False, max_variants=3),
    )
    settings = {**ENGINE_ARGS, "cache": cache}
    with measured(DEMO_MODEL, directory.with_name("measured"), [AlphaPoint(1.7, 0.98, 0.3)]):
        running = Engine.launch(str(DEMO_MODEL), log_path=directory.with_suffix(".log"), **settings)
    with running:
        yield running


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunks") / "kv"


@pytest.fixture(scope="module")
def launched(directory: Path) -> Iterator[Engine]:
    with _launch(directory) as running:
        yield running


def _ask(engine: Engine, names: Sequence[str], chunk_reuse: Any = None) -> tuple[str, RequestStats]:
    prompt = _LAYOUT.render(engine.tokenizer, [_DOCUMENTS[name] for name in names], _QUESTION)
    generation = engine.generate(prompt, max_tokens=8, chunk_reuse=chunk_reuse)
    return generation.text, generation.stats


def test_documents_are_reused_behind_others_and_the_request_reports_it(launched: Engine) -> None:
    _, first = _ask(launched, "abc", _THIRD)
    assert first.chunk_reuse is None, "nothing was stored yet"
    _, stats = _ask(launched, "dcba", _THIRD)
    reuse = stats.chunk_reuse
    assert reuse is not None
    assert reuse.num_chunks == 3
    assert len(reuse.variants) == 3
    assert 0 < reuse.num_recomputed_tokens < reuse.num_reused_tokens
    assert 0.0 < reuse.fix_overhead <= 1.0
    assert reuse.num_computed_tokens >= reuse.num_recomputed_tokens
    assert stats.num_cached_tokens >= reuse.num_reused_tokens
    assert stats.num_computed_tokens + stats.num_cached_tokens == stats.num_prompt_tokens


def test_documents_are_reused_behind_others_with_the_less_computed_the_sooner_focus_lets_others_go(
    launched: Engine,
) -> None:
    _ask(launched, "def", _THIRD)
    reuses = [_ask(launched, "fed", {**_THIRD, "focus": focus})[1].chunk_reuse for focus in (0, 1)]
    whole, focused = (reuse for reuse in reuses if reuse is not None)
    assert focused.num_recomputed_tokens == whole.num_recomputed_tokens
    assert whole.num_computed_tokens >= whole.num_recomputed_tokens
    assert focused.num_computed_tokens < whole.num_computed_tokens


def test_blocks_of_an_approximate_answer_are_hits_for_equal_requests_only(launched: Engine, engine: Engine) -> None:
    _ask(launched, "bad", _THIRD)
    text, first = _ask(launched, "gdab", _THIRD)
    assert first.chunk_reuse is not None
    assert first.chunk_reuse.num_prefix_tokens == 0
    again, same = _ask(launched, "gdab", _THIRD)
    assert again == text
    assert same.chunk_reuse is not None
    assert same.chunk_reuse.num_prefix_tokens > first.chunk_reuse.num_reused_tokens
    assert same.num_computed_tokens <= 32 > same.chunk_reuse.num_reused_tokens, "all but the block of the last token"
    _, longer = _ask(launched, "gdabc", _THIRD)
    assert longer.chunk_reuse is not None
    assert longer.chunk_reuse.num_prefix_tokens > 0, "what both prompts begin with"
    _, otherwise = _ask(launched, "gdab", {**_THIRD, "max_recompute": 0.25})
    assert otherwise.chunk_reuse is not None
    assert otherwise.chunk_reuse.num_prefix_tokens == 0

    exact, plain = _ask(launched, "gdab", False)
    assert plain.chunk_reuse is None
    assert exact == _ask(engine, "gdab")[0]
    assert plain.num_cached_tokens < first.num_cached_tokens, "none of it is plain KV"
    wholly, all_computed = _ask(launched, "gdabc", _ALL)
    assert wholly == _ask(engine, "gdabc")[0]
    assert all_computed.chunk_reuse is None or all_computed.chunk_reuse.num_prefix_tokens == 0
    num_found = same.chunk_reuse.num_prefix_tokens + longer.chunk_reuse.num_prefix_tokens
    assert until(lambda: _chunks(launched).num_prefix_tokens >= num_found, timeout_s=20)


def test_answers_without_it_are_those_of_an_engine_that_has_it_not(launched: Engine, engine: Engine) -> None:
    expected = {names: _ask(engine, names)[0] for names in ("abc", "dcba", "fade", "bead")}
    for names in ("fade", "bead", "dcba"):
        _ask(launched, names, _THIRD)
    for names, text in expected.items():
        answer, stats = _ask(launched, names)
        assert answer == text
        assert stats.chunk_reuse is None
        assert _ask(launched, names, _ALL)[0] == text
        assert _ask(launched, names, False)[0] == text


def test_a_request_for_an_unmeasured_quality_is_answered_exactly_and_counted(launched: Engine) -> None:
    before = launched.stats().chunks
    _, stats = _ask(launched, "cba", {"quality": 0.99})
    after = launched.stats().chunks
    assert stats.chunk_reuse is None
    assert before is not None
    assert after is not None
    assert after.num_refused_requests == before.num_refused_requests + 1


def test_a_deadline_has_documents_reused_that_exact_answers_have_stored(launched: Engine) -> None:
    llm = ChatRAGCache(engine=launched, temperature=0, max_tokens=8)

    def ask(names: str, ttft_slo: float) -> Any:
        documents = [_DOCUMENTS[name] for name in names]
        launched.remember_documents(documents, _LAYOUT.document_text)
        messages = [dict(message) for message in _LAYOUT.messages(documents, _QUESTION)]
        assert launched.integration.ordering.refresh()
        return llm.invoke(messages, ttft_slo=ttft_slo).response_metadata["ragcache"]

    exact = [ask(names, 100.0) for names in ("tu", "vw")]
    late = ask("wuvt", 0.001)
    exact.append(ask("wuvt", 100.0))
    assert [stats["deadline"]["choice"] for stats in exact] == ["exact"] * 3
    assert [stats["chunk_reuse"] for stats in exact] == [None] * 3
    assert late["deadline"]["choice"] == "chunk_reuse"
    assert late["chunk_reuse"]["num_chunks"] > 0
    as_it_is, *_, reused = late["deadline"]["options"]
    assert (reused["alpha"], reused["quality"]) == (1.7, 0.98)
    assert reused["ttft_s"] < as_it_is["ttft_s"] == late["deadline"]["exact_ttft_s"]


def test_single_documents_that_were_warmed_by_forecast_are_reused_behind_others(launched: Engine) -> None:
    shown = launched.bind_prompt(_LAYOUT, is_default=False)
    paths = [([_DOCUMENTS[name]], 50) for name in "xyz"]
    assert launched.warm_paths(paths, prompt=shown).num_warmed == 3
    assert launched.warm_paths(paths, prompt=shown).num_cached == 3
    _, stats = _ask(launched, "zyx", _THIRD)
    assert stats.chunk_reuse is not None
    assert stats.chunk_reuse.num_chunks >= 2, "the first is cached as it stands"


def test_of_a_document_no_more_versions_are_kept_than_set(launched: Engine) -> None:
    for names in ("kl", "ml", "nl", "ol"):
        _ask(launched, names, "store")
    assert launched.forget(["l"]).num_variants == 3


def _chunks(engine: Engine) -> Any:
    return engine.stats().chunks


def _has_kept(engine: Engine, num_captured: int) -> bool:
    """Return whether that many chunks are soon in memory, and all that are there on disk too."""

    def has() -> bool:
        chunks = _chunks(engine)
        return chunks.num_captured_chunks >= num_captured and chunks.used_disk_tokens == chunks.used_tokens > 0

    return until(has, timeout_s=20)


def test_a_forgotten_document_is_in_no_chunk_and_no_file_and_is_recomputed(launched: Engine, directory: Path) -> None:
    prompt = _LAYOUT.render(launched.tokenizer, [_DOCUMENTS["e"], _DOCUMENTS["h"]], _QUESTION)
    documents = (segment for segment in prompt.segments if segment.kind is SegmentKind.DOCUMENT)
    token_ids, behind = (pack_token_ids(prompt.token_ids[each.start : each.text_end]) for each in documents)

    def files() -> bytes:
        return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())

    expected = _ask(launched, "ef", False)[0]
    _ask(launched, "fe", _NOTHING)
    _ask(launched, "eh", _NOTHING)
    assert until(lambda: token_ids in files() and behind in files(), timeout_s=20)
    num_variants = _chunks(launched).num_variants
    receipt = launched.forget(["e"])
    assert receipt.is_complete
    assert receipt.num_variants >= 2, "with those of others that were computed behind it"
    assert receipt.num_blocks["gpu"] > 0
    assert receipt.num_bytes["host"] > 0 < receipt.num_bytes["disk"]
    assert token_ids not in files()
    assert behind not in files(), "its only variant was computed behind it"
    assert until(lambda: _chunks(launched).num_variants == num_variants - receipt.num_variants, timeout_s=20)
    text, stats = _ask(launched, "ef", False)
    assert text == expected
    assert stats.num_cached_tokens < 64, "no more than the static prefix"
    assert launched.forget(["e"]).num_variants == 0


@pytest.mark.slow
def test_chunks_outlive_the_engine_and_damaged_ones_are_computed_exactly(
    launched: Engine, engine: Engine, directory: Path
) -> None:
    num_before = _chunks(launched).num_captured_chunks
    _ask(launched, "pq", _NOTHING)
    assert _has_kept(launched, num_before + 2)
    (data,) = (p for p in directory.glob("**/chunks.data") if '"chunks"' in (p.parent / "identity.json").read_text())
    written = np.fromfile(data, np.uint8) != 0
    _ask(launched, "rs", _NOTHING)
    assert _has_kept(launched, num_before + 4)
    by_memory, stats = _ask(launched, "sr", _NOTHING)
    assert stats.chunk_reuse is not None
    launched.close()
    content = np.fromfile(data, np.uint8)
    content[: len(written)] ^= written  # all that was there before the last two
    content.tofile(data)

    with _launch(directory) as second:
        text, stats = _ask(second, "sr", _NOTHING)
        assert stats.chunk_reuse is not None
        assert stats.chunk_reuse.num_chunks == 2
        assert text == by_memory, "what comes from disk is what was in memory"
        metrics = httpx.get(f"{second.base_url.removesuffix('/v1')}/metrics").text
        assert "ragcache_chunk_reused_total{" in metrics
        assert until(lambda: _chunks(second).num_reused_chunks == 2, timeout_s=20)

        text, stats = _ask(second, "qp", _NOTHING)
        assert stats.chunk_reuse is None
        assert text == _ask(engine, "qp")[0] == _ask(second, "qp", False)[0]
        assert until(lambda: _chunks(second).num_lost_chunks == 2, timeout_s=20)
        assert _ask(second, "pq", _NOTHING)[1].chunk_reuse is not None, "they were captured again"
