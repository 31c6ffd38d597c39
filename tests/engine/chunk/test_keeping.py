"""Chunks on disk, through the door: an engine finds what one before it kept, and never trusts what was damaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from ragcache_core import CacheConfig, ChunkReuse, Document, PromptLayout, RequestStats
from ragcache_core.client import Engine
from ragcache_core.errors import EngineStartError
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.waiting import until

_LAYOUT = PromptLayout()
_WORDS = ("Zorval", "Tenrik", "was", "a", "company", "founded", "by", "Anna", "Boris", "in", "1823", "makes", "clocks")
_DOCUMENTS = {name: Document(name, " ".join(Random(name).choices(_WORDS, k=60))) for name in "abcd"}
_NOTHING_ANEW: dict[str, Any] = {"selection": "cache_craft", "alpha": 0.0}


@contextmanager
def _launched(folder: Path, **settings: Any) -> Iterator[Engine]:
    cache = CacheConfig(
        kv_cache_bytes="24MiB",
        block_size=32,
        host_bytes="32MiB",
        disk_bytes="64MiB",
        directory=folder / "kv",
        chunk_reuse=ChunkReuse(share=1.0, is_default=False),
    )
    given = {**ENGINE_ARGS, "cache": cache, "log_path": folder / "server.log", **settings}
    with Engine.launch(str(DEMO_MODEL), **given) as engine:
        yield engine


def _ask(engine: Engine, names: Sequence[str], chunk_reuse: Any = _NOTHING_ANEW) -> tuple[str, RequestStats]:
    prompt = _LAYOUT.render(engine.tokenizer, [_DOCUMENTS[name] for name in names], "Who founded Zorval?")
    generation = engine.generate(prompt, max_tokens=8, chunk_reuse=chunk_reuse)
    return generation.text, generation.stats


def _chunks(engine: Engine) -> Any:
    return engine.stats().chunks


def test_chunks_outlive_the_engine_and_damaged_ones_are_computed_exactly(tmp_path: Path) -> None:
    with _launched(tmp_path) as first:
        _ask(first, "abcd")
        assert until(lambda: _chunks(first).num_captured_chunks == 4, timeout_s=20)
        kept, by_memory = _chunks(first), _ask(first, "dcba")[0]
        assert kept.used_disk_tokens == kept.used_tokens > 0
    with _launched(tmp_path) as second:
        text, stats = _ask(second, "dcba")
        assert stats.chunk_reuse is not None
        assert stats.chunk_reuse.num_chunks == 4
        assert text == by_memory, "what comes from disk is what was in memory"
        metrics = httpx.get(f"{second.base_url.removesuffix('/v1')}/metrics").text
        assert "ragcache_chunk_reused_total{" in metrics
        assert until(lambda: _chunks(second).num_reused_chunks == 4, timeout_s=20)
    for data in (tmp_path / "kv").glob("**/chunks.data"):
        if '"chunks"' in (data.parent / "identity.json").read_text():
            data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))
    with _launched(tmp_path) as third:
        text, stats = _ask(third, "dcba")
        assert stats.chunk_reuse is None
        assert text == _ask(third, "dcba", False)[0]
        assert until(lambda: _chunks(third).num_lost_chunks == 4, timeout_s=20)
        assert _ask(third, "bdca")[1].chunk_reuse is not None, "they were captured anew"
    with _launched(tmp_path, dtype="bfloat16") as other:
        assert _ask(other, "dcba")[1].chunk_reuse is None, "KV of another dtype is not theirs"


def test_a_share_that_holds_no_block_is_refused_at_the_start(tmp_path: Path) -> None:
    cache = CacheConfig(kv_cache_bytes="24MiB", block_size=32, host_bytes="1MiB", chunk_reuse=ChunkReuse(share=0.001))
    with pytest.raises(EngineStartError, match=r"raise host_bytes, or ChunkReuse\.share"):
        Engine.launch(str(DEMO_MODEL), log_path=tmp_path / "server.log", **{**ENGINE_ARGS, "cache": cache})
