"""Chunk reuse at the engine's door: what a request says, and what is said of it afterwards."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest

from ragcache_core import ChunkReuseStats, ChunkStats, Document, PromptLayout
from ragcache_core.cli.commands.stats import TEXT, reading_view
from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_core.runtime.terminal import plain
from ragcache_core.stats import ChunkKindStats, EngineStats
from tests.support.asking_ahead import warm
from tests.support.scripted_server import THREE_TIERS, ScriptedServer
from tests.support.waiting import until

SUN = Document("sun", "The sun is a star, and every planet goes around it in its own time.")
MOON = Document("moon", "The moon goes around the earth once in a month, and it has no light.")
LAYOUT = PromptLayout()
CHUNKS = {
    "num_chunks": 3, "num_variants": 4, "capacity_tokens": 8000, "used_tokens": 1500, "disk_capacity_tokens": 9000,
    "used_disk_tokens": 2500, "is_disk_enabled": False, "num_requests": 2, "num_reused_chunks": 5,
    "num_reused_tokens": 900, "num_recomputed_tokens": 300, "num_prefix_tokens": 70,
    "num_captured_chunks": 4, "num_evicted_chunks": 1,
    "num_mismatched_chunks": 6, "num_too_long_chunks": 7, "num_capacity_misses": 8, "num_dropped_chunks": 9,
    "num_corrupt_chunks": 10, "num_lost_chunks": 11, "num_refused_requests": 12,
}  # fmt: skip


def lines_of(reading: EngineStats) -> list[str]:
    return plain(reading_view("m", "http://here", datetime(2026, 1, 1), reading, TEXT)).split("\n")


def prompts(engine: Engine) -> list[Any]:
    return [
        LAYOUT.messages([SUN, MOON], "What is the sun?"),
        LAYOUT.render(engine.tokenizer, [SUN, MOON], "What is the sun?"),
    ]


@pytest.mark.parametrize("kind", [0, 1], ids=["messages", "rendered"])
@pytest.mark.parametrize("way", ["generate", "stream", "agenerate", "astream"])
def test_every_way_to_ask_reports_how_chunks_are_reused(
    engine: Engine, server: ScriptedServer, way: str, kind: int
) -> None:
    engine.remember_documents([SUN, MOON], LAYOUT.document_text)
    prompt = prompts(engine)[kind]

    async def ask(option: Any) -> None:
        match way:
            case "generate":
                await asyncio.to_thread(engine.generate, prompt, chunk_reuse=option)
            case "agenerate":
                await engine.agenerate(prompt, chunk_reuse=option)
            case "stream":
                await asyncio.to_thread(lambda: list(engine.stream(prompt, chunk_reuse=option)))
            case _:
                assert [chunk async for chunk in engine.astream(prompt, chunk_reuse=option)]

    for option in (None, True, False, {"max_recompute": 0.3}):
        asyncio.run(ask(option))
        assert server.requests[-1].chunk_reuse == option
        assert [d["id"] for d in server.requests[-1].documents] == ["sun", "moon"]


def test_a_wish_that_cannot_be_is_refused_before_anything_is_sent(engine: Engine, server: ScriptedServer) -> None:
    for prompt in prompts(engine):
        with pytest.raises(ConfigError, match="max_recompute is 7"):
            engine.generate(prompt, chunk_reuse={"max_recompute": 7})
    assert server.requests == []


def test_a_prefill_ahead_is_exact_whatever_the_engine_does(engine: Engine, server: ScriptedServer) -> None:
    warm(engine, LAYOUT.render(engine.tokenizer, [SUN], "What?"))
    assert until(lambda: server.requests)
    assert server.requests[-1].chunk_reuse is False


def test_an_answer_reports_what_was_reused_and_counts_what_was_computed_for_it(
    engine: Engine, server: ScriptedServer
) -> None:
    prompt = prompts(engine)[1]
    engine.generate(prompt)
    exact = engine.generate(prompt).stats
    assert exact.chunk_reuse is None
    server.reuse = {
        "num_chunks": 2, "num_reused_tokens": 20, "num_recomputed_tokens": 9, "num_computed_tokens": 11,
        "fix_overhead": 0.25, "variants": [0, 7],
    }  # fmt: skip
    stats = engine.generate(prompt).stats
    assert stats.chunk_reuse == ChunkReuseStats(2, 20, 9, 11, 0.25, (0, 7))
    assert stats.num_cached_tokens == exact.num_cached_tokens - 11
    assert stats.num_computed_tokens == exact.num_computed_tokens + 11


def test_the_engine_reports_which_chunks_it_keeps(engine: Engine, server: ScriptedServer) -> None:
    assert engine.stats().chunks is None
    assert "chunk" not in "".join(line for line in lines_of(engine.stats()) if "disk blocks" not in line)
    kind = {"kind": "faq", "num_answers": 1300, "num_approximate": 1200, "num_audits": 400, "num_errors": 3}
    kind |= {"alpha": 1.19, "error_rate": 0.0075, "error_bound": 0.018, "is_stopped": False}
    server.cache = {**THREE_TIERS, "chunks": {**CHUNKS, "kinds": [kind]}}
    reading = engine.stats()
    kinds = (ChunkKindStats(**kind),)  # type: ignore[arg-type]
    assert reading.chunks == ChunkStats(**CHUNKS, kinds=kinds)  # type: ignore[arg-type]  # as the engine sends them
    assert reading.to_dict()["chunks"] == {**CHUNKS, "kinds": (kind,)}
    lines = lines_of(reading)
    assert (
        "kind faq         1,200 of 1,300 answers approximate, 3 of 400 audited answers differed; alpha 1.19, "
        "error rate at most 1.8%"
    ) in lines
    tokens = "900 tokens reused, 300 recomputed, 70 in approximate prefixes"
    assert f"chunk reuse      5 chunks of 2 requests: {tokens}; 12 requests answered exactly" in lines
    assert (
        "stored chunks    3 chunks, 4 versions; 1,500 of 8,000 tokens in host memory, 2,500 of 9,000 on disk "
        "(switched off: see the log)"
    ) in lines
    assert (
        "unused chunks    6 mismatched, 7 too long, 8 without free space, 1 evicted, 10 corrupt, 11 lost, 9 dropped"
    ) in lines
