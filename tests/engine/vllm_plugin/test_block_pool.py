"""The GPU tier on vLLM's own block pool, driven by vLLM's own cache manager: the way the scheduler uses it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.request import Request

from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.chunks.private_hashes import private_hashes
from tests.engine.vllm_plugin.pool_scene import BLOCK, MODELS, POLICIES, Pool, Running, block_hasher


class BlockPoolMachine(RuleBasedStateMachine):
    """Requests come, wait, run, are preempted and end, in a pool that is too small for them."""

    @initialize(
        num_blocks=st.integers(6, 24),
        policy=st.sampled_from(POLICIES),
        limit=st.none() | st.integers(1, 2),
        model=st.sampled_from([*MODELS]),
    )
    def build(self, num_blocks: int, policy: str, limit: int | None, model: str) -> None:
        num_blocks *= len(MODELS[model])
        self.it = Pool(num_blocks, policy, max_cached_documents=limit, model=model)
        self.waiting: list[Request] = []
        self.running: list[Running] = []

    @rule(documents=st.text("ABCD", min_size=0, max_size=3), question=st.integers(1, 9), seed=st.integers(1, 2))
    def arrive(self, documents: str, question: int, seed: int) -> None:
        self.waiting.append(self.it.new(documents, question, seed))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), num_tokens=st.none() | st.integers(1, 20), delays=st.booleans())
    def admit(self, data: st.DataObject, num_tokens: int | None, delays: bool) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        if self.it.start(request, num_tokens=num_tokens, delays=delays) is not None:
            self.waiting.remove(request)
            self.running.append(Running(request, delays))

    @precondition(lambda self: any(r.is_delayed for r in self.running))
    @rule(data=st.data())
    def cache_what_was_delayed(self, data: st.DataObject) -> None:
        """Several requests that computed the same at the same time make copies."""
        running = data.draw(st.sampled_from([r for r in self.running if r.is_delayed]))
        running.is_delayed = False
        self.it.manager.cache_blocks(running.request, running.request.num_computed_tokens)

    @precondition(lambda self: any(not r.is_delayed for r in self.running))
    @rule(data=st.data(), num_tokens=st.integers(1, 9), token=st.integers(1, 2))
    def run(self, data: st.DataObject, num_tokens: int, token: int) -> None:
        running = data.draw(st.sampled_from([r for r in self.running if not r.is_delayed]))
        for _ in range(num_tokens):
            if not self.it.advance(running.request, token):
                break

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        running = data.draw(st.sampled_from(self.running))
        self.running.remove(running)
        self.it.finish(running.request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        running = data.draw(st.sampled_from(self.running))
        self.running.remove(running)
        self.waiting.append(running.request)
        self.it.preempt(running.request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def stop_waiting(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.it.controller.on_finished(request.request_id)

    @rule()
    def settle(self) -> None:
        """A step is computed meanwhile; until then a block that came back is in use as far as the tree knows."""
        self.it.settle()

    @rule(data=st.data())
    def lose_blocks(self, data: st.DataObject) -> None:
        """A transfer into these blocks failed."""
        self.it.pool.evict_blocks(set(data.draw(st.lists(st.integers(1, self.it.num_blocks - 1), max_size=3))))

    @rule()
    def reset(self) -> None:
        is_reset = self.it.pool.reset_prefix_cache()
        assert is_reset == (not self.running)
        if is_reset:
            assert self.it.cached_keys() == self.it.resident_keys() == set()

    @rule(share=st.floats(0, 1))
    def take_blocks_for_something_else(self, share: float) -> None:
        num_free = self.it.pool.get_num_free_blocks()
        taken = self.it.pool.get_new_blocks(round(num_free * share))
        assert all(block.ref_cnt == 1 and block.block_hash is None for block in taken)
        assert self.it.pool.get_num_free_blocks() == num_free - len(taken)
        self.it.check()
        self.it.pool.free_blocks(taken)

    @invariant()
    def everything_is_in_its_place(self) -> None:
        if hasattr(self, "it"):
            self.it.check()

    def teardown(self) -> None:
        if not hasattr(self, "it"):
            return
        for running in self.running:
            self.it.finish(running.request)
        for request in self.waiting:
            self.it.controller.on_finished(request.request_id)
        self.it.check()
        self.it.check_nothing_leaks()


BlockPoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase


class RecordingTree:
    """A tree, and how often it was told that blocks are gone."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self.num_reports = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)

    def remove(self, *unit: Any) -> None:
        self.num_reports += 1
        self._tree.remove(*unit)


def test_the_tree_is_notified_only_of_evictions_it_did_not_choose() -> None:
    it = Pool(6)
    it.controller.tree = it.queue._tree = tree = RecordingTree(it.tree)
    request = it.new("D", question=0)
    for _ in range(2):  # the second time in the same blocks, which the tree gave up between
        it.start(request, num_tokens=20)
        it.preempt(request)
        it.settle()
        taken = it.pool.get_new_blocks(5)
        assert it.resident_keys() == set()
        assert tree.num_reports == 0
        it.pool.free_blocks(taken)
    it.start(request, num_tokens=20)
    it.preempt(request)
    it.settle()
    it.pool.evict_blocks({block.block_id for block in it.pool.blocks if block.block_hash is not None})
    assert it.resident_keys() == it.cached_keys() == set()
    assert tree.num_reports == 5


def test_a_returned_block_is_hit_evicted_and_counted_before_any_lookup() -> None:
    it = Pool(6)
    request = it.new("B", question=1)
    it.start(request)
    it.finish(request)
    assert len(it.held_keys()) == 3, "no look-up yet"
    assert it.pool.get_num_free_blocks() == 5
    hit = it.new("B", question=1)
    assert it.start(hit) == 12
    it.check()
    it.finish(hit)
    taken = it.pool.get_new_blocks(5)
    assert it.resident_keys() == it.held_keys() == set()
    it.pool.free_blocks(taken)
    again = it.new("B", question=1)
    it.start(again)
    it.finish(again)
    assert it.pool.reset_prefix_cache()
    it.check()
    assert it.resident_keys() == it.held_keys() == set()
    it.check_nothing_leaks()


def test_content_that_a_failed_load_took_from_one_copy_is_not_in_use_through_a_free_one() -> None:
    it = Pool(16)
    one, two = it.new("B", question=1), it.new("B", question=1)
    it.start(one, delays=True)
    it.start(two, delays=True)
    it.manager.cache_blocks(one, one.num_computed_tokens)
    it.manager.cache_blocks(two, two.num_computed_tokens)
    it.finish(one)
    it.pool.evict_blocks(set(it.manager.get_block_ids(two.request_id)[0]))
    it.check()
    it.finish(two)
    it.check()
    hit = it.new("B", question=1)
    assert it.start(hit) == 12
    it.finish(hit)
    it.check_nothing_leaks()


def test_an_allocation_that_fits_succeeds_when_every_free_block_stands_below_one_in_use() -> None:
    """The tree evicts leaves only, but vLLM has promised the blocks: then it must evict others."""
    it = Pool(9)
    one, two = it.new("B", question=1), it.new("B", question=1)
    it.start(one, delays=True)
    it.start(two, delays=True)
    it.manager.cache_blocks(one, one.num_computed_tokens)
    it.finish(one)
    it.manager.cache_blocks(two, two.num_computed_tokens)
    it.check()
    num_free = it.pool.get_num_free_blocks()
    taken = it.pool.get_new_blocks(num_free)
    assert len(taken) == num_free == 4
    it.check()
    it.pool.free_blocks(taken)
    it.finish(two)
    it.check_nothing_leaks()


def test_a_pool_without_prefix_caching_hands_blocks_out_all_the_same() -> None:
    it = Pool(8)
    it.pool.enable_caching = False
    taken = it.pool.get_new_blocks(7)
    it.pool.free_blocks(taken)
    assert it.pool.get_num_free_blocks() == 7


@pytest.mark.parametrize("first_private", [0, 2, 5])
def test_blocks_from_the_first_approximate_one_on_are_never_hits(first_private: int) -> None:
    """By this alone, whatever their names are: the last block of a prompt gets its name after it was told apart."""
    it = Pool(40)
    request, same = it.new("BC"), it.new("BC")
    it.controller.on_approximated(request.request_id, first_private, [])
    assert it.start(request) == 0
    for token in range(3 * BLOCK):
        assert it.advance(request, token)
    assert it.cached_keys() == it.held_keys() == set(request.block_hashes[:first_private])
    assert len(request.block_hashes) > first_private
    it.finish(request)
    assert it.start(same) == first_private * BLOCK


def test_approximate_prompt_blocks_are_hits_for_equal_requests_and_answer_blocks_never() -> None:
    it = Pool(40)
    request, same, plain = it.new("BC"), it.new("BC"), it.new("BC")
    num_prompt_blocks = len(request.block_hashes)
    for each in (request, same):
        each.block_hashes = private_hashes(each.block_hashes, 2, b"same")
        it.controller.on_approximated(each.request_id, 2, each.block_hashes)
    it.pool.enable_kv_cache_events = True
    assert it.start(request) == 0
    for token in range(3 * BLOCK):
        assert it.advance(request, token)
    assert it.cached_keys() == set(request.block_hashes[:num_prompt_blocks])
    told = [event.token_ids for event in it.pool.take_events()]
    assert told == [request.prompt_token_ids[: 2 * BLOCK]], "no event tells of approximate blocks"
    it.finish(request)
    assert it.start(plain) == 2 * BLOCK
    it.finish(plain)
    assert it.start(same) > 2 * BLOCK


@pytest.mark.parametrize("num_ahead", [0, 1, 9, 20])
def test_an_answer_that_another_request_gave_is_not_evicted_while_it_is_made_again(num_ahead: int) -> None:
    pool = Pool(40)
    first, again = (pool.new("A", question=2, seed=1) for _ in range(2))
    pool.start(first)
    for _ in range(num_ahead):
        assert pool.advance(first, 7)
    pool.start(again)
    for _ in range(20 - num_ahead):
        assert pool.advance(first, 7)
        assert pool.advance(again, 7)
    pool.controller.insert_answer(first.request_id)  # as the scheduler does
    pool.finish(first)
    pool.settle()
    pool.check()
    for _ in range(num_ahead):
        assert pool.advance(again, 7)
        pool.check()
    made = set(pool.keys_of(block for block in pool.pool.blocks if block.ref_cnt))
    for seed in range(2, 8):
        other = pool.new("BD", question=seed, seed=seed)
        assert pool.start(other) is not None
        pool.finish(other)
        pool.settle()
    assert made & pool.resident_keys() <= pool.held_keys()
    pool.check()
    pool.controller.insert_answer(again.request_id)
    pool.finish(again)
    pool.settle()
    pool.check()
    pool.check_nothing_leaks()


def test_a_document_that_is_forgotten_takes_answers_along_that_are_being_made() -> None:
    pool = Pool(40)
    request = pool.new("B")
    pool.start(request)
    for _ in range(20):
        assert pool.advance(request, 7)
    pool.controller.forget({"B"})
    assert pool.cached_keys() == set()
    pool.finish(request)
    pool.settle()
    assert pool.cached_keys() == set()
    pool.check_nothing_leaks()


def test_blocks_that_are_evicted_before_they_are_needed_are_few_and_hold_nothing() -> None:
    num_blocks = 600
    pool = Pool(num_blocks + 1)
    filling = pool.new("", question=num_blocks * BLOCK)
    pool.start(filling)
    pool.finish(filling)
    pool.settle()
    assert len(pool.resident_keys()) == num_blocks
    (block,) = pool.pool.get_new_blocks(1)
    pool.check()
    num_lost = num_blocks - len(pool.resident_keys())
    assert 1 < num_lost <= 1 + num_blocks // 100
    assert pool.resident_keys() == pool.cached_keys()
    assert pool.resident_keys() == set(filling.block_hashes[: num_blocks - num_lost]), "the last ones go first"
    pool.pool.free_blocks([block])
    pool.check_nothing_leaks()


def test_a_block_that_lost_its_content_is_no_units_block_when_an_answer_ends() -> None:
    pool = Pool(60)
    first, second = pool.new("A", question=2), pool.new("A", question=2)
    pool.start(first)
    pool.start(second)
    for _ in range(9):
        assert pool.advance(first, 7)
    for _ in range(13):
        assert pool.advance(second, 7)
    pool.pool.evict_blocks({pool.manager.get_block_ids(first.request_id)[0][2]})
    pool.controller.insert_answer(second.request_id)
    pool.finish(second)
    pool.settle()
    for _ in range(4):
        assert pool.advance(first, 7)
    pool.check()
    pool.controller.insert_answer(first.request_id)
    pool.finish(first)
    pool.settle()
    pool.check()
    pool.check_nothing_leaks()


def test_copies_of_a_unit_beyond_a_quota_are_not_found_after_its_document_was_deleted() -> None:
    pool = Pool(200, "lru")
    one, two = pool.new("B", question=1), pool.new("B", question=1)
    pool.start(one, delays=True)
    pool.start(two, delays=True)
    for request in (one, two):
        pool.manager.cache_blocks(request, request.num_computed_tokens)
    pool.finish(one)
    pool.finish(two)
    pool.settle()
    pool.tree.tiers[Tier.GPU].shares.divide(200, {}, {None: 5})
    for documents in ("D", "A", "C", "CA", "AC", "DC", "DA", "CD"):  # the node of B is dropped
        request = pool.new(documents, question=1)
        pool.start(request)
        pool.finish(request)
        pool.settle()
    pool.controller.forget({"B"})
    assert pool.manager.get_computed_blocks(pool.new("B", question=1))[1] == 0


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_an_answer_that_ends_just_before_another_request_comes_is_kept_and_can_be_deleted(
    *, is_forgotten: bool
) -> None:
    pool = Pool(100)
    request = pool.new("B", question=1)
    pool.start(request)
    for _ in range(20):
        assert pool.advance(request, 7)
    pool.controller.on_finished(request.request_id)  # the scheduler's order
    pool.manager.free(request)
    pool.new("D", question=1)
    pool.controller.on_step(0.0, 0.1)
    pool.settle()
    pool.check()
    if is_forgotten:
        pool.controller.forget({"B"})
    turn = Request("turn", [*request.all_token_ids, 1, 2], request.sampling_params, None, block_hasher=block_hasher)
    num_full = request.num_tokens // BLOCK
    assert pool.manager.get_computed_blocks(turn)[1] == (0 if is_forgotten else num_full * BLOCK)
    assert set(request.block_hashes[:num_full]) & pool.cached_keys() == (
        set() if is_forgotten else set(request.block_hashes[:num_full])
    )
    assert pool.tree.is_retained(request.block_hashes[num_full - 1])
    for _ in range(3):  # steps whose tokens wait for a grammar count as well
        pool.controller.on_step(0.0, 0.1)
    assert not pool.tree.is_retained(request.block_hashes[num_full - 1])
