"""The host tier's policy inside vLLM's own offloading manager, against a model of sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ragcache_core.tree import check_invariants
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
from ragcache_core.vllm_plugin.offload.host_index import HostIndex
from ragcache_core.vllm_plugin.offload.host_tier import ADAPTED
from tests.engine.vllm_plugin.host_scene import Asker, Host


class HostPolicyMachine(RuleBasedStateMachine):
    """Requests look up, load, store and end, in a tier that is too small for them."""

    @initialize(num_chunks=st.integers(1, 14), policy=st.sampled_from(("pgdsf", "lru", "lfu", "mixture")))
    def build(self, num_chunks: int, policy: str) -> None:
        self.it = Host(num_chunks, policy, is_selective=policy == "mixture")
        self.askers: list[Asker] = []
        self.stores: list[tuple[Asker, list[BlockKey]]] = []
        self.loads: list[tuple[Asker, list[BlockKey]]] = []

    @rule(documents=st.text("ABCD", min_size=1, max_size=3), question=st.integers(0, 2), rare=st.integers(0, 9))
    def arrive(self, documents: str, question: int, rare: int) -> None:
        self.askers.append(self.it.ask(documents, question, is_known=rare > 0))

    @precondition(lambda self: self.askers)
    @rule(data=st.data(), first=st.integers(0, 4), num_keys=st.integers(1, 9))
    def store(self, data: st.DataObject, first: int, num_keys: int) -> None:
        asker = data.draw(st.sampled_from(self.askers))
        if keys := asker.keys[first : first + num_keys]:
            new = self.it.prepare_store(asker, keys)
            if new:
                self.stores.append((asker, new))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), success=st.sampled_from((True, True, True, False)))
    def complete_store(self, data: st.DataObject, success: bool) -> None:
        asker, keys = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        self.it.complete_store(asker, keys, success)

    @precondition(lambda self: self.askers)
    @rule(data=st.data(), promotes=st.integers(0, 4), loads=st.booleans())
    def look_up(self, data: st.DataObject, promotes: int, loads: bool) -> None:
        asker = data.draw(st.sampled_from(self.askers))
        writing = set(self.it.writing)
        ready = self.it.look_up(asker, promotes=0 if self.it.is_selective else promotes)  # there is no disk
        self.stores += [(asker, [key]) for key in asker.keys if key in self.it.writing - writing]
        if ready and loads:
            self.it.prepare_load(asker, ready)
            self.it.forget(asker)
            self.loads.append((asker, ready))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        asker, keys = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.it.complete_load(asker, keys)

    @precondition(lambda self: self.askers)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.it.finish(self.askers.pop(data.draw(st.integers(0, len(self.askers) - 1))))

    @rule()
    def reset(self) -> None:
        self.it.tier.reset_cache()
        self.it.writing.clear()
        self.it.refs.clear()
        self.it.promised.clear()
        self.it.awaited.clear()
        self.it.unknown.clear()
        self.stores.clear()
        self.loads.clear()

    @invariant()
    def everything_is_in_its_place(self) -> None:
        if hasattr(self, "it"):
            self.it.check()

    def teardown(self) -> None:
        if not hasattr(self, "it"):
            return
        for asker, keys in self.stores:
            self.it.complete_store(asker, keys, success=True)
        for asker, keys in self.loads:
            self.it.complete_load(asker, keys)
        for asker in self.askers:
            self.it.finish(asker)
        self.it.check()
        last = self.it.ask("D" * 3)
        assert self.it.prepare_store(last, last.keys[: self.it.num_chunks]) is not None, "something is held for ever"


HostPolicyMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHostPolicy = HostPolicyMachine.TestCase


def stored(host: Host, documents: str) -> Asker:
    """Store a request's chunks and end it."""
    asker = host.ask(documents)
    is_new = not set(asker.keys) & host.resident
    new = host.prepare_store(asker, asker.keys)
    assert new == (asker.keys if is_new else [])
    host.complete_store(asker, new, success=True)
    host.finish(asker)
    return asker


def test_the_last_chunks_of_a_document_are_evicted_first() -> None:
    host = Host(num_chunks=6)
    old = stored(host, "D")
    new = host.ask("C")
    assert host.prepare_store(new, new.keys) == new.keys
    assert set(host.refs) == set(old.keys[:4])


def test_a_selective_tier_admits_only_blocks_with_a_higher_priority_than_the_evicted() -> None:
    host = Host(4, "mixture", is_selective=True)
    for _ in range(3):
        popular = stored(host, "B")
    rare = host.ask("D")
    assert host.prepare_store(rare, rare.keys) == rare.keys[:1], "one chunk was free, and nothing goes for the others"
    assert set(popular.keys) <= set(host.refs)
    host.complete_store(rare, rare.keys[:1], success=True)
    host.finish(rare)
    for _ in range(9):
        host.finish(host.ask("D"))
    again = host.ask("D")
    assert host.prepare_store(again, again.keys) == again.keys[1:4], "it has become more popular than the other"
    host.check()


def test_a_request_longer_than_the_tier_reuses_what_fits() -> None:
    """Its promotions from disk do not drive one another out."""
    host = Host(num_chunks=4)
    asker = host.ask("D")
    assert host.look_up(asker, promotes=6) == []
    assert host.writing == set(asker.keys[:4])
    host.complete_store(asker, asker.keys[:4], success=True)
    assert host.look_up(asker, promotes=6) == asker.keys[:4]
    host.prepare_load(asker, asker.keys[:4])
    host.check()


def test_what_a_waiting_request_was_promised_is_there_when_it_comes_back() -> None:
    host = Host(num_chunks=6)
    stored(host, "B")
    waiting = host.ask("B")
    assert host.look_up(waiting) == waiting.keys
    other = host.ask("D")
    assert host.prepare_store(other, other.keys) is None
    assert host.look_up(waiting) == waiting.keys
    host.finish(waiting)
    assert host.prepare_store(other, other.keys) == other.keys, "a request that ended is promised nothing"
    host.check()


def test_two_requests_are_promised_the_same_chunks_and_either_keeps_them() -> None:
    host = Host(num_chunks=3)
    stored(host, "B")
    one, two = host.ask("B"), host.ask("B")
    host.look_up(one)
    host.look_up(two)
    host.forget(one)
    other = host.ask("C")
    assert host.prepare_store(other, other.keys) is None
    host.forget(two)
    host.forget(two)
    assert host.prepare_store(other, other.keys) == other.keys


def test_chunks_unknown_to_the_tree_are_evicted_first() -> None:
    host = Host(num_chunks=4)
    stranger = host.ask("C", is_known=False)
    new = host.prepare_store(stranger, stranger.keys)
    assert new == stranger.keys
    host.complete_store(stranger, new, success=True)
    host.check()
    known = stored(host, "C")
    asker = host.ask("A")
    assert host.prepare_store(asker, asker.keys) == asker.keys
    assert set(known.keys) <= set(host.refs)
    host.check()


@pytest.mark.parametrize("num_keys", [0, 1])
def test_storing_what_is_there_changes_nothing(num_keys: int) -> None:
    host = Host(num_chunks=3)
    old = stored(host, "B")
    asker = host.ask("B")
    assert host.prepare_store(asker, asker.keys[:num_keys]) == []
    assert set(host.refs) == set(old.keys)


def test_chunks_that_an_engine_left_are_held_where_they_lie_and_the_gaps_between_are_free() -> None:
    host = Host(num_chunks=6)
    asker = host.ask("D")
    left = {asker.keys[0]: 4, asker.keys[1]: 1}
    host.tier.adopt(left)
    assert host.tier.prepare_load(list(left), asker.context).block_ids.tolist() == [4, 1]
    host.tier.complete_load(list(left), asker.context)
    output = host.tier.prepare_store(asker.keys[2:], asker.context)
    assert sorted(output.store_spec.block_ids.tolist()) == [0, 2, 3, 5]


def test_an_adapters_chunks_do_not_outlive_the_engine_also_if_stored_before(tmp_path: Path) -> None:
    """vLLM says once for a request that it will store them, and it may do so after others did."""
    host = Host(num_chunks=6)
    rows = np.random.default_rng(0).integers(0, 256, (6, 64), dtype=np.uint8)
    host.tier.journal = HostIndex.open("me", rows, {"weights": "one"}, tmp_path)

    def ask(documents: str) -> Asker:
        asker = host.ask(documents)
        asker.context.kv_transfer_params = {ADAPTED: True} if documents == "B" else {}
        return asker

    def store(asker: Asker) -> list[BlockKey] | None:
        output = host.tier.prepare_store(asker.keys, asker.context)
        if output is None:
            return None
        new = list(output.keys_to_store)
        host.tier.complete_store(new, asker.context)
        return new

    busy = ask("D")
    filling = store(busy)
    assert filling == busy.keys
    host.tier.prepare_load(filling, busy.context)
    first = ask("B")
    assert store(first) is None, "there is no room"
    host.tier.complete_load(filling, busy.context)
    host.tier.on_request_finished(busy.context)
    second = ask("B")
    assert store(second) == first.keys
    host.tier.on_request_finished(second.context)
    for _ in range(4):
        other = ask("D")
        store(other)
        host.tier.on_request_finished(other.context)
    assert not host.tier.contents().keys() & set(first.keys), "they went for others"
    assert store(first) == first.keys
    host.tier.journal.close()
    again = HostIndex.open("me", rows, {"weights": "one"}, tmp_path)
    again.close()
    left = {entry.key for _, entry in again.restored}
    assert left
    assert not left & set(first.keys)


@pytest.mark.parametrize("is_selective", [False, True])
def test_a_quota_of_host_memory_is_kept_by_giving_up_ones_own(*, is_selective: bool) -> None:
    """Those without a tenant are a party like any other."""
    it = Host(14, "mixture", is_selective=True)
    it.tier._is_selective = is_selective
    shares = it.tree.tiers[Tier.HOST].shares
    shares.divide(14, {None: 1.0}, {None: 5})
    for documents, num_stored in (("A", 1), ("BC", 5), ("D", 5), ("CB", 5)):
        asker = it.ask(documents)
        output = it.tier.prepare_store(asker.keys, asker.context)
        assert output is not None
        it.tier.complete_store(output.keys_to_store, asker.context)
        it.tier.on_request_finished(asker.context)
        assert shares.owned[None] <= 5
        assert output.keys_to_store == asker.keys[:num_stored], documents
        assert len(it.tier.contents()) == shares.owned[None], "what the tree gave up is free"
        check_invariants(it.tree)


def test_a_quota_of_host_memory_is_kept_by_what_comes_from_a_tier_below() -> None:
    it = Host(14, "mixture", is_selective=True)
    it.tier._is_selective = False
    shares = it.tree.tiers[Tier.HOST].shares
    shares.divide(14, {None: 1.0}, {None: 5})
    for documents, num_written in (("A", 1), ("BC", 5), ("D", 5), ("CB", 5)):
        asker = it.ask(documents)
        written: list[BlockKey] = []
        it.tier.begin_lookup(asker.context.req_id, 0)
        for key in asker.keys:
            if (output := it.tier.prepare_write([key], asker.context)) is None:
                break
            written += output.keys_to_store
        it.tier.end_lookup()
        assert written == asker.keys[:num_written], documents
        assert shares.owned[None] <= 5
        it.tier.complete_store(written, asker.context)
        it.tier.drop_promises(asker.context.req_id)
        it.tier.on_request_finished(asker.context)
        assert len(it.tier.contents()) == shares.owned[None], "what the tree gave up is free"
        check_invariants(it.tree)
