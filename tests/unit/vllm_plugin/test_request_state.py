"""What the cache knows of a request is gone with it, whatever happened to it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ragcache_core.runtime.tenant_entries import TenantEntries
from ragcache_core.stats import ChunkReuseStats
from ragcache_core.tree import check_invariants
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController
from ragcache_core.vllm_plugin.cache.request_state import RequestState
from ragcache_core.vllm_plugin.chunks.private_hashes import private_hashes
from ragcache_core.wire import RequestMetadata
from tests.unit.vllm_plugin.scene import BLOCK, controller, keys, segments

_NUMBERS = st.integers(0, 30)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.text("abc", min_size=1, max_size=3), st.none() | st.sampled_from(["s", "t"])),
        st.tuples(
            st.sampled_from(
                ["look up", "admit", "first token", "preempt", "compute", "queue", "approximate", "finish"]
            ),
            _NUMBERS,
            st.none(),
        ),
        st.tuples(st.just("confirm"), st.sampled_from(["s", "t"]), st.none()),
        st.tuples(st.sampled_from(["load", "evict"]), _NUMBERS, st.sampled_from(list(Tier))),
        st.tuples(st.sampled_from(["touched", "news"]), st.none(), st.none()),
    ),
    max_size=60,
)


def reachable(it: object) -> Iterator[object]:
    """Yield every object that ``it`` leads to, but for code."""
    seen: set[int] = set()
    ahead = [it]
    while ahead:
        found = ahead.pop()
        if id(found) in seen or isinstance(found, (type, ModuleType, FunctionType, BuiltinFunctionType)):
            continue
        seen.add(id(found))
        yield found
        ahead += gc.get_referents(found)


def step(it: CacheController, alive: dict[str, list[bytes]], number: int, what: str, which: Any, more: Any) -> None:
    request_id = list(alive)[which % len(alive)] if alive and isinstance(which, int) else ""
    match what:
        case "ask":
            chain, ends = [], []
            for i, _ in enumerate(which):
                chain += keys(2, which[: i + 1] + ":")
                ends.append((which[i], len(chain) * BLOCK))
            parts = segments(*ends, (None, len(chain) * BLOCK + 2))
            alive[f"request {number}"] = chain
            it.on_new_request(f"request {number}", RequestMetadata(parts, more), chain, parts[-1].end, float(number))
        case "confirm":
            for confirmed in it.confirm(which):
                if number % 2:
                    it.on_waiting(confirmed)
        case "touched":
            assert it.take_touched() <= set(alive)
        case "news":
            it.take_finished()
            it.speculations.take_waited_s()
            it.take_report()
        case _ if not request_id:
            pass
        case "look up":
            it.on_looked_up(request_id, which)
        case "admit":
            it.on_admitted(request_id, alive[request_id], {Tier.HOST: which}, float(number))
        case "first token":
            it.on_first_token(request_id, float(number))
        case "preempt":
            it.on_preempted(request_id, float(number))
        case "compute":
            it.on_speculated(request_id, which)
        case "queue" if not it.is_speculative(request_id):
            state = it.state_of(request_id)
            assert state is not None
            if not state.is_queued:
                it.on_waiting(request_id)
        case "approximate":
            it.on_approximated(request_id, which, private_hashes(alive[request_id], which, b""))
            it.on_chunks_reused(request_id, ChunkReuseStats(1, 2, 3, 4, 0.3, (0,)))
        case "load" if (location := it.tree.locate(alive[request_id][which % len(alive[request_id])])) is not None:
            if not it.tree.resident_mask(location.node, more) >> location.unit & 1:
                it.tree.add(location.node, 1 << location.unit, more)
        case "evict":
            it.tree.evict_up_to(more, which)
        case "finish":
            del alive[request_id]
            assert it.on_finished(request_id) is not None


def check(it: CacheController, alive: dict[str, list[bytes]]) -> None:
    """Assert that what is counted is what the requests say."""
    states = [state for request_id in alive if (state := it.state_of(request_id)) is not None]
    assert len(states) == len(alive)
    without_token = [state for state in states if state.first_token_s is None]
    assert it.num_pending_prefills == sum(not state.is_speculative for state in without_token)
    pending_s = [state.prefill_s for state in without_token if not state.is_speculative]
    assert it.pending_prefill_s == pytest.approx(sum(pending_s))
    assert bool(it.speculations) == any(state.is_speculative for state in states)


_TOUCHED: list[Any] = [("ask", "a", None), ("load", 0, Tier.GPU), ("ask", "b", None)]


@settings(max_examples=300, deadline=None)
@given(_STEPS, st.booleans())
@example(_TOUCHED, True)
def test_nothing_of_a_request_is_left_after_its_end(steps: list[Any], is_ordered: bool) -> None:
    it = controller(
        queue="cache_aware" if is_ordered else "fifo",
        max_prefill_bs=4 if is_ordered else 0,
    )
    alive: dict[str, list[bytes]] = {}
    for number, (what, which, more) in enumerate(steps):
        step(it, alive, number, what, which, more)
        check(it, alive)
    for request_id in alive:
        it.on_finished(request_id)
    check(it, {})
    for speculation in ("s", "t"):  # which are remembered for a while, and by what of them began first
        it.confirm(speculation)
    it.speculations._first_admitted = TenantEntries(0)
    it.take_finished()
    assert it.is_idle
    assert not it.tree.protected_keys
    check_invariants(it.tree, is_connected=False)
    names = {f"request {number}" for number in range(len(steps))}
    left = [each for each in reachable(it) if isinstance(each, RequestState) or (type(each) is str and each in names)]
    assert left == []
