"""Conversations in traces and in the simulated cache, and the workload that is like a production chat's."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.policy import PrefillCostModel
from ragcache_core.policy.returning import NextTurnModel
from ragcache_core.sim.blocks import BlockCache
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.traces.trace import Trace, TracedRequest, read_trace, write_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace
from ragcache_core.tree import check_invariants

BLOCK = 16
TALK = Trace.from_requests(
    [
        TracedRequest(0.0, ("a",), (64,), 10, 30, conversation=7),
        TracedRequest(1.0, ("b",), (32,), 5, 8),
        TracedRequest(2.0, (), (), 12, 40, conversation=7),
        TracedRequest(3.0, ("c",), (48,), 9, 4, conversation=7),
    ]
)


def test_a_turn_begins_with_all_that_was_shown_asked_and_answered_before() -> None:
    assert TALK.history_tokens.tolist() == [0, 0, 104, 156]
    assert [request.history_tokens for request in TALK] == [0, 0, 104, 156]
    assert [request.conversation for request in TALK] == [7, None, 7, 7]


def test_a_trace_of_conversations_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_trace(TALK, tmp_path / "talk.jsonl")
    assert read_trace(tmp_path / "talk.jsonl") == TALK
    assert '"conversation": 7' in (tmp_path / "talk.jsonl").read_text().splitlines()[0]
    assert "conversation" not in (tmp_path / "talk.jsonl").read_text().splitlines()[1]


def serve(trace: Trace, **settings: Any) -> tuple[list[tuple[int, int]], BlockCache]:
    """Return cached and new tokens of each request, and the cache after all of them."""
    sizes = {"gpu_tokens": 64 * BLOCK, "host_tokens": 256 * BLOCK, "block_size": BLOCK}
    cache = BlockCache(SimulationOptions(**{**sizes, **settings}), PrefillCostModel.default())
    found = []
    for number, request in enumerate(trace):
        served = cache.serve(request, number)
        found.append((served.num_cached_tokens, served.num_new_tokens))
    check_invariants(cache.tree, is_connected=False)  # a full GPU evicts blocks under others
    return found, cache


def test_a_next_turn_finds_what_the_turn_before_left() -> None:
    found, cache = serve(TALK)
    assert found[0] == (0, 74)
    assert found[2] == ((74 + 30 - 1) // BLOCK * BLOCK, 116 - (74 + 30 - 1) // BLOCK * BLOCK)
    assert found[3][0] == (116 + 40 - 1) // BLOCK * BLOCK
    assert cache.tree.returning.probability(1) > 0


def test_a_turn_that_overtook_the_one_before_it_finds_nothing_of_it() -> None:
    requests = list(TALK)
    _, cache = serve(TALK.head(1))
    served = cache.serve(requests[3], 3)
    assert served.num_cached_tokens == 0
    assert served.num_new_tokens == 156 + 48 + 9


def talk(num_conversations: int, num_turns: int, num_apart: int = 1) -> Trace:
    """Return conversations about a document each, whose turns come ``num_apart`` conversations apart."""
    turns = sorted((i + turn * num_apart, turn, i) for i in range(num_conversations) for turn in range(num_turns))
    return Trace.from_requests(
        TracedRequest(float(n), (f"d{i}",) if turn == 0 else (), (320,) if turn == 0 else (), 20, 60, conversation=i)
        for n, (_, turn, i) in enumerate(turns)
    )


def test_histories_are_kept_below_the_gpu_and_single_turns_leave_nothing_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"host_tokens": 1024 * BLOCK}
    found, _ = serve(talk(60, 3, num_apart=6), **sizes)
    monkeypatch.setattr(NextTurnModel, "is_likely", lambda self, turn: False)
    without, _ = serve(talk(60, 3, num_apart=6), **sizes)
    assert sum(cached for cached, _ in found) > 1.1 * sum(cached for cached, _ in without)
    monkeypatch.undo()
    _, single = serve(talk(60, 1))
    stored = {node.doc_id for node in single.tree.nodes() if single.tree.tiers[1].resident[node.id]}
    assert stored
    assert None not in stored, "documents alone"


def test_of_more_conversations_than_fit_some_stay_for_good() -> None:
    """Up to 40 conversations take turns, and the GPU holds a third of their histories at the end."""
    mixture, lru = (
        sum(cached for cached, _ in serve(talk(40, 40), policy=policy, gpu_tokens=20_000, host_tokens=0)[0])
        for policy in ("mixture", "lru")
    )
    assert mixture > 3 * lru


def test_single_turns_hit_as_much_as_without_conversation_detection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mmlu = replace(WORKLOADS["mmlu"], mean_tokens=200.0, mean_output_tokens=200.0, output_sigma=0.5)
    trace = make_trace(mmlu, 600, 3)
    sizes = {"gpu_tokens": 8_000, "host_tokens": 20_000, "disk_tokens": 40_000}
    learned = sum(cached for cached, _ in serve(trace, **sizes)[0])
    monkeypatch.setattr(NextTurnModel, "is_likely", lambda self, turn: False)
    assert learned == sum(cached for cached, _ in serve(trace, **sizes)[0])


def test_a_simulated_engine_counts_histories_as_part_of_prompts() -> None:
    options = SimulationOptions(block_size=BLOCK, gpu_tokens=4096, host_tokens=8192)
    summary = simulate(talk(20, 3), options).summary
    assert summary.computed_tokens < 20 * (340 + 3 * 80)
    assert 0.4 < summary.token_hit_rate < 1.0


def test_turns_of_a_conversation_stay_at_one_replica() -> None:
    options = SimulationOptions(block_size=BLOCK, gpu_tokens=4096, routing="round-robin", replicas=2)
    several, one = (simulate(talk(20, 3), replace(options, replicas=num)).summary for num in (2, 1))
    assert several.token_hit_rate == pytest.approx(one.token_hit_rate)


def test_chunks_know_no_conversations() -> None:
    with pytest.raises(ConfigError, match="chunk_reuse"):
        simulate(TALK, SimulationOptions(chunk_reuse=0.3))


def histogram(trace: Trace) -> dict[str, float]:
    """Return what the workload was fitted to."""
    turns, last_s = defaultdict[int, int](int), {}
    think_s, later = [], 0
    for request in trace:
        assert request.conversation is not None
        turns[request.conversation] += 1
        if (before := last_s.get(request.conversation)) is not None:
            think_s.append(request.arrival_s - before)
            later += 1
        last_s[request.conversation] = request.arrival_s
    prompts = trace.history_tokens + trace.document_tokens() + trace.question_tokens
    return {
        "later turns": later / len(trace),
        "median think time": float(np.median(think_s)),
        "mean prompt": float(prompts.mean()),
        "median prompt": float(np.median(prompts)),
        "history": float(trace.history_tokens.sum() / prompts.sum()),
        "a second": trace.requests_per_s,
        "answer": float(trace.output_tokens.mean()),
    }


def test_the_conversation_workload_is_like_the_production_trace_it_was_fitted_to() -> None:
    """Mooncake's conversation trace (FAST 2025, Apache-2.0), told apart into conversations by common prefixes."""
    published = {
        "later turns": 0.329,
        "median think time": 123.0,
        "mean prompt": 11_170.0,
        "median prompt": 6_046.0,
        "history": 0.332,
        "a second": 3.40,
        "answer": 342.6,
    }
    made = histogram(make_trace(WORKLOADS["conversation"], 12_031, 3))
    for name, value in published.items():
        assert made[name] == pytest.approx(value, rel=0.2), name


@pytest.mark.parametrize(("retain_s", "is_retained"), [(0.0, False), (29.0, False), (30.0, True)])
def test_a_turn_whose_next_one_comes_in_time_survives_what_comes_meanwhile(retain_s: float, is_retained: bool) -> None:
    others = [TracedRequest(1.0 + i, (f"d{i}",), (256,), 8, 4) for i in range(8)]
    turns = [TracedRequest(t, (), (), 100, 29, conversation=1) for t in (0.0, 30.0)]
    trace = Trace.from_requests([turns[0], *others, turns[1]])
    options = SimulationOptions(policy="lru", gpu_tokens=600, host_tokens=0, retain_s=retain_s, retained_share=0.5)
    cache = BlockCache(options, PrefillCostModel.default(), trace=trace)
    served = [cache.serve(request, number) for number, request in enumerate(trace)]
    assert served[-1].num_cached_tokens == (128 if is_retained else 0)
    assert not cache.tree.protected, "the turn that comes ends it"
