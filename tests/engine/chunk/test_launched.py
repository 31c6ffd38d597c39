"""Chunk reuse through the door: an engine that was launched with it, and what it tells of its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ragcache_core import CacheConfig, Document, PromptLayout, RequestStats
from ragcache_core.client import Engine
from ragcache_core.config import ChunkReuse
from ragcache_core.errors import EngineStartError
from tests.conftest import DEMO_MODEL, ENGINE_ARGS

_LAYOUT = PromptLayout()
_WORDS = ("Zorval", "Tenrik", "was", "a", "company", "founded", "by", "Anna", "Boris", "in", "1823", "makes", "clocks")
_DOCUMENTS = {name: Document(name, " ".join(Random(name).choices(_WORDS, k=60))) for name in "abcdef"}
_QUESTION = "Who founded Zorval?"
_THIRD: dict[str, Any] = {"selection": "cache_craft", "alpha": 1e9, "max_recompute": 0.3}
_ALL: dict[str, Any] = {"selection": "cache_craft", "alpha": 1e9, "max_recompute": 1.0}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("kv")
    cache = CacheConfig(
        kv_cache_bytes="24MiB",
        block_size=32,
        host_bytes="32MiB",
        disk_bytes="64MiB",
        directory=directory,
        chunk_reuse=ChunkReuse(is_default=False),
    )
    settings = {**ENGINE_ARGS, "cache": cache}
    with Engine.launch(str(DEMO_MODEL), log_path=directory / "server.log", **settings) as running:
        yield running


def _ask(engine: Engine, names: Sequence[str], chunk_reuse: Any = None) -> tuple[str, RequestStats]:
    prompt = _LAYOUT.render(engine.tokenizer, [_DOCUMENTS[name] for name in names], _QUESTION)
    generation = engine.generate(prompt, max_tokens=8, chunk_reuse=chunk_reuse)
    return generation.text, generation.stats


def test_documents_are_reused_behind_others_and_the_request_says_so(launched: Engine) -> None:
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


def test_answers_without_it_are_those_of_an_engine_that_has_it_not(launched: Engine) -> None:
    settings = {**ENGINE_ARGS, "cache": None}
    with Engine.launch(str(DEMO_MODEL), **settings) as plain:
        expected = {names: _ask(plain, names)[0] for names in ("abc", "dcba", "fade", "bead")}
    for names in ("fade", "bead", "dcba"):
        _ask(launched, names, _THIRD)
    for names, text in expected.items():
        answer, stats = _ask(launched, names)
        assert answer == text
        assert stats.chunk_reuse is None
        assert _ask(launched, names, _ALL)[0] == text
        assert _ask(launched, names, False)[0] == text


def test_the_engine_tells_of_its_chunks(launched: Engine) -> None:
    chunks = launched.stats().chunks
    assert chunks is not None
    assert chunks.num_reused_chunks >= 3
    assert chunks.num_captured_chunks >= 4
    assert 0 < chunks.used_tokens <= chunks.capacity_tokens


def test_a_request_for_a_quality_that_nobody_measured_is_answered_exactly_and_counted(launched: Engine) -> None:
    before = launched.stats().chunks
    _, stats = _ask(launched, "cba", {"quality": 0.99})
    after = launched.stats().chunks
    assert stats.chunk_reuse is None
    assert before is not None
    assert after is not None
    assert after.num_refused_requests == before.num_refused_requests + 1


def test_an_engine_that_cannot_do_it_is_refused_at_the_start(tmp_path: Path) -> None:
    cache = CacheConfig(kv_cache_bytes="24MiB", block_size=32, host_bytes="32MiB", chunk_reuse=ChunkReuse())
    settings = {**ENGINE_ARGS, "cache": cache, "enable_prefix_caching": False}
    with pytest.raises(EngineStartError, match="prefix caching switched off"):
        Engine.launch(str(DEMO_MODEL), log_path=tmp_path / "server.log", **settings)
