"""Hints of requests on an engine of three tiers without a model: what is kept, what goes first, what is read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.compat import KvHintAction, KvHintsEnvelope, kv_hints_of
from ragcache_core.vllm_plugin.scheduler import scheduler as scheduler_module
from ragcache_core.vllm_plugin.server.recognition.wrapper import Recogniser
from ragcache_core.wire import KEY, decode_kv_transfer_params
from tests.engine.vllm_plugin import test_cache_contents
from tests.engine.vllm_plugin.storing_scene import BLOCK, request
from tests.engine.vllm_plugin.test_cache_contents import act
from tests.engine.vllm_plugin.test_forgetting import DOCUMENTS, SYSTEM, Scene, prompt

NUM_BLOCKS, NUM_HOST_BLOCKS = 40, 32


@contextmanager
def engine(tmp_path: Path | None = None, **settings: Any) -> Iterator[tuple[Scene, list[float]]]:
    """An engine, and the time that it reads."""
    clock = [1000.0]
    settings = {
        "num_blocks": NUM_BLOCKS,
        "host": f"{4 * NUM_HOST_BLOCKS}KiB",
        "retained_share": 0.75,
        "policy": "lru",
        **settings,
    }
    with pytest.MonkeyPatch.context() as patch, test_cache_contents.engine(tmp_path, **settings) as it:
        patch.setattr(scheduler_module, "steady_s", lambda: clock[0])
        yield it, clock


def ask(it: Scene, name: str, documents: str, question: int = 999, **hints: Any) -> dict[Tier, int]:
    asked = prompt(name, documents, question=question)
    asked.kv_transfer_params["ragcache"].update(hints)
    before = list(it.controller.counters.num_tokens_by_tier)
    it.scheduler.add_request(asked)
    it.steps.rest(100_000)
    after = it.controller.counters.num_tokens_by_tier
    return {tier: after[tier] - before[tier] for tier in Tier}


def flood(it: Scene, mark: str, count: int = 16) -> None:
    """Have other prompts fill the GPU and host memory several times."""
    for number in range(count):
        words = random.Random(f"{mark} {number}").choices(range(10, 900), k=8 * BLOCK)
        it.scheduler.add_request(request(f"{mark} {number}", words, 2))
        it.steps.rest(100_000)


def num_whole(documents: str) -> int:
    """Return the tokens of a prompt's whole blocks before its question."""
    return (len(SYSTEM) + sum(len(DOCUMENTS[name]) for name in documents)) // BLOCK * BLOCK


def figures(it: Scene) -> dict[str, Any]:
    it.controller.tick(scheduler_module.steady_s())
    report: dict[str, Any] = it.controller.report()
    return report


@pytest.mark.parametrize("hints", [{"retain_s": 60}, {"priority": 1}], ids=str)
def test_a_retained_prompt_survives_a_flood_and_another_does_not_until_its_time_is_up(hints: dict[str, Any]) -> None:
    with engine() as (it, clock):
        ask(it, "kept", "A", **hints)
        ask(it, "other", "B")
        retained = figures(it)["num_retained_tokens"]
        assert num_whole("A") <= retained <= num_whole("A") + 3 * BLOCK
        flood(it, "first")
        assert ask(it, "kept again", "A", question=1)[Tier.GPU] >= num_whole("A")
        assert sum(ask(it, "other again", "B", question=1).values()) < num_whole("B")
        assert figures(it)["num_retained_tokens"] == retained, "another question does not go on from the answer"
        clock[0] += 601
        assert figures(it)["num_retained_tokens"] == 0
        flood(it, "second")
        assert sum(ask(it, "kept too late", "A", question=2).values()) < num_whole("A")
        it.check()


def test_the_next_turn_ends_the_retention_of_the_one_before() -> None:
    with engine() as (it, _):
        words = [*SYSTEM, *DOCUMENTS["C"], *DOCUMENTS["A"]]
        first = request("turn 1", words, 40, params={"ragcache": {"version": 1, "retain_s": 60}})
        it.scheduler.add_request(first)
        it.steps.rest(100_000)
        assert figures(it)["num_retained_tokens"] > len(words)
        flood(it, "tool")
        history = list(first.all_token_ids)
        second = request("turn 2", [*history, *DOCUMENTS["E"]], 2)
        before = it.controller.counters.num_tokens_by_tier[Tier.GPU]
        it.scheduler.add_request(second)
        it.steps.rest(100_000)
        hit = it.controller.counters.num_tokens_by_tier[Tier.GPU] - before
        assert hit >= (len(history) - 1) // BLOCK * BLOCK
        assert figures(it)["num_retained_tokens"] == 0
        it.check()


@pytest.mark.parametrize("is_late", [False, True], ids=["in the request", "after the answer"])
def test_a_turn_ranks_by_the_tool_that_it_calls(is_late: bool) -> None:
    with engine(policy="mixture") as (it, _):
        params = {"ragcache": {"version": 1, **({} if is_late else {"tool": "search"})}}
        turn = request("chatcmpl-1-01234567", [*SYSTEM, *DOCUMENTS["C"]], 40, params=params)
        it.scheduler.add_request(turn)
        it.steps.rest(100_000)
        tree = it.controller.tree
        last = tree.locate(it.controller.last_known(turn.block_hashes))
        assert last is not None
        if is_late:
            assert last.node.turn_kind == 1
            called = {"token": "t", "keeps_answer": False, "response_id": "chatcmpl-1", "tool": "search"}
            assert it.scheduler.act_on_cache("called", called) == {"is_known": True}
            assert it.scheduler.act_on_cache("called", {**called, "response_id": "chatcmpl-2"}) == {"is_known": False}
        assert last.node.turn_kind == tree.returning.kind_of(1, "search") > 8
        it.check()


def test_retained_prompts_take_no_more_than_their_share_and_the_highest_priority_has_it() -> None:
    with engine(retained_share=0.5) as (it, clock):
        ask(it, "low", "A", retain_s=60)
        low = figures(it)["num_retained_tokens"]
        for name in "BCD":
            ask(it, name, name, retain_s=60)
        report = figures(it)
        limit = NUM_HOST_BLOCKS * BLOCK // 2
        assert low < report["num_retained_tokens"] <= limit
        assert report["num_rejected_hints"] > 0
        ask(it, "high", "D", question=7, priority=5)
        assert figures(it)["num_retained_tokens"] <= limit
        flood(it, "others", 30)
        assert ask(it, "high again", "D", question=8)[Tier.GPU] >= num_whole("D")
        clock[0] += 601
        assert figures(it)["num_retained_tokens"] == 0
        it.check()


def test_a_longer_time_than_the_operators_is_shortened_and_counted() -> None:
    with engine(max_retain_s=5) as (it, clock):
        ask(it, "long", "A", retain_s=86_400)
        assert figures(it)["num_clipped_hints"] == 1
        clock[0] += 6
        assert figures(it)["num_retained_tokens"] == 0
    with engine(max_retain_s=0) as (it, _):
        ask(it, "never", "A", priority=9)
        assert figures(it)["num_retained_tokens"] == 0


@pytest.mark.parametrize("hints", [{"demote": True}, {"ttl_s": 30}], ids=str)
def test_a_prompt_asked_once_goes_before_others_with_what_it_alone_has(hints: dict[str, Any]) -> None:
    with engine(num_blocks=30, host="16KiB") as (it, clock):
        ask(it, "usual", "A")
        ask(it, "once", "B", **hints)
        clock[0] += 31
        words = random.Random(3).choices(range(10, 900), k=22 * BLOCK)
        it.scheduler.add_request(request("more", words, 2))
        it.steps.rest(100_000)
        assert ask(it, "usual again", "A", question=5)[Tier.GPU] >= num_whole("A"), "what came before it stayed"
        assert sum(ask(it, "once again", "B", question=4).values()) <= len(SYSTEM), "its document went first"
        it.check()


def test_a_demoted_prompt_is_not_stored_below_the_gpu() -> None:
    with engine(host="256KiB") as (it, _):
        ask(it, "once", "B", demote=True)
        it.steps.rest(100_000)
        assert it.controller.tree.tiers[Tier.HOST].num_units == 0
        ask(it, "usual", "A")
        assert it.controller.tree.tiers[Tier.HOST].num_units > 0


def test_forgetting_a_document_ends_its_retention(tmp_path: Path) -> None:
    with engine(tmp_path) as (it, _):
        ask(it, "kept", "A", retain_s=60)
        it.forget("A")
        it.settle()
        assert figures(it)["num_retained_tokens"] == 0
        assert it.num_resident("A") == 0
        it.check()


def test_documents_of_the_next_prompts_are_read_from_disk_while_a_request_runs(tmp_path: Path) -> None:
    with engine(tmp_path, host="128KiB") as (it, _):
        for number in range(3):
            ask(it, f"c{number}", "C", question=number)
        it.settle()
    with engine(tmp_path, host="128KiB") as (it, _):
        ask(it, "now", "E", question=3, prefetch=["C"])
        it.settle()
        hit = ask(it, "next", "C", question=4)
        assert hit[Tier.HOST] + hit[Tier.GPU] >= num_whole("C")
        assert act(it, "prefetch", "C")["num_read_tokens"] == 0
        it.check()


def generated(kv_hints: KvHintsEnvelope | None, metadata: dict[str, Any] | None) -> tuple[Any, Any]:
    """Return the transfer parameters and the ``kv_hints`` with which the wrapper has a request generated."""
    got: list[Any] = []

    async def generate(
        prompt: Any, sampling_params: Any, request_id: str, *, kv_hints: Any = None
    ) -> AsyncGenerator[Any, None]:
        got.append(((sampling_params.extra_args or {}).get("kv_transfer_params"), kv_hints))
        yield SimpleNamespace()

    async def ask() -> None:
        params = None if metadata is None else {"kv_transfer_params": {KEY: metadata}}
        wrapped = Recogniser(None, to_kv_hints=kv_hints_of).wrapped(generate)
        options = {} if kv_hints is None else {"kv_hints": kv_hints}
        async for _ in wrapped({"prompt_token_ids": [1, 2]}, SimpleNamespace(extra_args=params), "r", **options):
            pass

    asyncio.run(ask())
    return got[-1]  # type: ignore[no-any-return]


def test_actions_of_vllms_kv_hints_are_the_requests_hints_and_its_hints_are_such_actions() -> None:
    actions = [("ragcache.retain", {"retain_s": 30.0, "priority": 2}), ("evict_now", {})]
    said = [KvHintAction(str(i), kind, "1", payload) for i, (kind, payload) in enumerate(actions)]
    envelope = KvHintsEnvelope("1", "m", said)
    params, passed_on = generated(envelope, {"version": 1, "priority": 3})
    metadata = decode_kv_transfer_params(params, 2)
    assert (metadata.hints.to_dict(), metadata.num_unknown_actions) == ({"retain_s": 30.0, "priority": 3}, 1)
    assert passed_on is envelope
    params, passed_on = generated(None, {"version": 1, "retain_s": 30.0})
    assert params == {KEY: {"version": 1, "retain_s": 30.0}}
    assert [(action.action_type, action.payload) for action in passed_on.actions] == [
        ("ragcache.retain", {"retain_s": 30.0})
    ]
    assert generated(None, None) == (None, None)
    with pytest.raises(ValueError, match="retain_s is -1"):
        generated(kv_hints_of("r", [("ragcache.retain", {"retain_s": -1})]), None)


def test_unknown_actions_are_counted_once_for_each_request() -> None:
    with engine() as (it, _):
        ask(it, "theirs", "A", unknown_actions=2)
        assert figures(it)["num_unknown_hints"] == 2
