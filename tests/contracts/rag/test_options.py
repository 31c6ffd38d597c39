"""The settings of a request in both frameworks: chunk reuse, a TTFT SLO, and references to repeated documents."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core import Document
from ragcache_core.client import Engine
from ragcache_core.client.prompts.repeated_documents import reference_to
from ragcache_core.policy import PrefillCostModel
from ragcache_core.stats import ChunkReuseStats, request_stats_from_dict
from tests.contracts.rag.frameworks import Framework
from tests.support.scripted_server import IDLE, THREE_TIERS, ScriptedServer
from tests.support.scripted_source import Stage

ASKED = "The sun is a star. What is the sun?"
REUSE = {
    "num_chunks": 2, "num_reused_tokens": 20, "num_recomputed_tokens": 9, "num_computed_tokens": 0,
    "num_prefix_tokens": 4, "fix_overhead": 0.25, "variants": [0, 7],
}  # fmt: skip
ZOR = (
    "Zor is a lighthouse in the north of Mel, kept by Anna Krenvi since 1823, and painted white every spring. Ships "
    "sound their horns at it."
)
TOLD = [("user", f"{ZOR}\n\nWho keeps it?"), ("assistant", "Anna Krenvi."), ("user", f"{ZOR}\n\nSince when?")]


@pytest.fixture
def measured(server: ScriptedServer) -> None:
    """The server knows how long its prefills take."""
    times = PrefillCostModel((0, 1000), (1, 1001), ((0.001, 1.001), (0.001, 1.001)))
    server.costs, server.load = {"prefill": times.to_dict(), "chunk_reuse": None}, IDLE


@pytest.mark.parametrize("option", [None, False, {"max_recompute": 0.3}])
async def test_a_model_and_a_call_say_how_chunks_are_reused(
    framework: Framework, ask: str, server: ScriptedServer, option: Any
) -> None:
    await framework.ask(ask, framework.model(chunk_reuse=option), ASKED)
    assert server.requests[-1].chunk_reuse == option
    await framework.ask(ask, framework.model(chunk_reuse=True), ASKED, chunk_reuse=option)
    assert server.requests[-1].chunk_reuse == option
    assert "chunk_reuse" not in server.requests[-1].body


async def test_a_model_and_a_call_have_a_ttft_slo(
    framework: Framework, ask: str, server: ScriptedServer, measured: None
) -> None:
    for deadline_s, is_in_time in ((5.0, True), (0.0001, False)):
        for model, call in (
            (framework.model(ttft_slo=deadline_s), {}),
            (framework.model(ttft_slo=9.0), {"ttft_slo": deadline_s}),
        ):
            told = (await framework.ask(ask, model, ASKED, **call)).stats["deadline"]
            assert (told["ttft_slo_s"], told["choice"], told["is_in_time"]) == (deadline_s, "exact", is_in_time)
            assert "ttft_slo" not in server.requests[-1].body


async def test_a_model_and_a_call_refer_to_what_the_chat_has_shown(
    framework: Framework, engine: Engine, server: ScriptedServer
) -> None:
    engine.remember_documents([Document("zor", ZOR)], query="Since when?")
    whole, reference = TOLD[-1][1], f"{reference_to(ZOR)}\n\nSince when?"
    for way in list(framework.asks)[:4]:
        for model, call, expected in (
            ({}, {}, whole),
            ({"deduplicate": True}, {}, reference),
            ({}, {"deduplicate": True}, reference),
            ({"deduplicate": True}, {"deduplicate": False}, whole),
        ):
            await framework.ask(way, framework.model(**model), TOLD, **call)
            assert server.requests[-1].body["messages"][-1]["content"] == expected
            assert "deduplicate" not in server.requests[-1].body


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(("option", "value"), [("chunk_reuse", {"max_recompute": 0.3}), ("ttft_slo", 5.0)])
async def test_a_speculation_has_the_same_options_and_is_joined(
    framework: Framework, few: str, generations: Any, option: str, value: Any
) -> None:
    model = framework.model(**{option: value})
    pair = framework.over(Stage("moon sun"), Stage("moon sun", once=lambda: bool(generations())), model=model)
    answer = await framework.answer(pair, few)
    (seen,) = generations()
    assert seen.speculation is not None
    assert answer.stats["pipeline"]["is_confirmed"]
    if option == "chunk_reuse":
        assert seen.chunk_reuse == value
    else:
        assert answer.stats["deadline"]["is_in_time"]


async def test_an_answer_reports_what_was_reused_and_the_handler_sums_it_up(
    framework: Framework, server: ScriptedServer
) -> None:
    server.cache, server.reuse = THREE_TIERS, REUSE
    way = next(iter(framework.asks))
    for _ in range(2):
        answer = await framework.ask(way, framework.model(), ASKED, chunk_reuse=True)
    assert answer.stats["chunk_reuse"] == REUSE
    stats = request_stats_from_dict(answer.stats)
    assert stats.chunk_reuse == ChunkReuseStats(2, 20, 9, 0, 0.25, (0, 7), 4)
    summary = framework.summary()
    assert (summary.num_reused_chunks, summary.num_reused_tokens, summary.num_recomputed_tokens) == (4, 40, 18)
