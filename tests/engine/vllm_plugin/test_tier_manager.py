"""The manager of host memory and lower tiers: no row is used twice, whenever the jobs of a slow tier end."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    ReqContext,
    ScheduleEndContext,
    TierFilter,
    TierMatcher,
)

from ragcache_core.tree import check_invariants
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
from ragcache_core.vllm_plugin.compat import CacheHitSource, TieringOffloadingMetrics
from ragcache_core.vllm_plugin.lower.jobs import EndedJob, TierJob
from ragcache_core.vllm_plugin.lower.manager import TierManager
from ragcache_core.vllm_plugin.lower.tier import LowerTier
from tests.engine.vllm_plugin.host_scene import Asker, Host, PromptKeys

BLOCK_BYTES = 1000


class SlowTier(LowerTier):
    """A tier whose jobs end when a test has them end, over rows of memory that name what they hold."""

    name, source = "slow", CacheHitSource.DISK
    undeleted_reason = "it is a list"

    def __init__(self, memory: list[BlockKey | None]) -> None:
        self.memory = memory
        self.held: set[BlockKey] = set()
        self.requests: dict[str, list[BlockKey]] = {}
        self.jobs: dict[int, tuple[TierJob, bool]] = {}
        self.ended: list[EndedJob] = []
        self.num_found_at_once = 99
        self.is_unknown = False

    def begin_request(self, context: ReqContext) -> None:
        assert context.req_id not in self.requests
        self.requests[context.req_id] = context.get_state(PromptKeys)

    def end_request(self, context: ReqContext) -> None:
        del self.requests[context.req_id]  # once

    def find(self, key: BlockKey, context: ReqContext) -> Sequence[BlockKey] | None:
        if self.is_unknown:
            return None
        keys = self.requests[context.req_id]
        run = []
        for later in keys[keys.index(key) :][: self.num_found_at_once]:
            if later not in self.held:
                break
            run.append(later)
        return run

    def store(self, job: TierJob) -> None:
        assert job.context.req_id in self.requests, "nothing comes after the end of a request"
        self.jobs[job.number] = job, False

    def load(self, job: TierJob) -> None:
        self.jobs[job.number] = job, True

    def end(self, number: int, num_lost: int = 0) -> None:
        """End a job; a load brings all but the last ``num_lost`` blocks."""
        job, is_load = self.jobs.pop(number)
        blocks = list(zip(job.keys, job.rows, strict=True))
        if not is_load:
            assert all(self.memory[row] == key for key, row in blocks), "a row was given away before its copy ended"
            self.held.update(job.keys)
            self.ended.append(EndedJob(number))
            return
        came = blocks[: len(blocks) - num_lost]
        for key, row in came:
            self.memory[row] = key
        self.ended.append(EndedJob(number, [key for key, _ in came]))

    def take_ended(self) -> list[EndedJob]:
        ended, self.ended = self.ended, []
        return ended

    def drain(self) -> None:
        for number in list(self.jobs):
            self.end(number, num_lost=99 if self.jobs[number][1] else 0)

    def end_step(self, context: ScheduleEndContext) -> None: ...

    def clear(self) -> None: ...

    def shutdown(self) -> None: ...


def take_step(manager: TierManager) -> None:
    manager.on_schedule_end(ScheduleEndContext((), ()))


class TierManagerMachine(RuleBasedStateMachine):
    """Requests are stored, looked up and loaded in random order; what is loaded is what was asked for."""

    @initialize(num_rows=st.integers(2, 16))
    def build(self, num_rows: int) -> None:
        self.host = Host(num_rows)
        self.memory: list[BlockKey | None] = [None] * num_rows
        self.tier = SlowTier(self.memory)
        self.manager = TierManager(self.host.tier, [self.tier], BLOCK_BYTES)
        self.askers: dict[str, Asker] = {}
        self.stores: list[tuple[Asker, list[BlockKey], list[int]]] = []
        self.loads: list[tuple[Asker, list[BlockKey], list[int]]] = []

    @rule(documents=st.text("ABCD", min_size=1, max_size=3))
    def arrive(self, documents: str) -> None:
        asker = self.host.ask(documents)
        self.manager.on_new_request(asker.context)
        self.askers[asker.context.req_id] = asker

    @precondition(lambda self: self.askers)
    @rule(data=st.data(), first=st.integers(0, 4), num_keys=st.integers(1, 9))
    def store(self, data: st.DataObject, first: int, num_keys: int) -> None:
        asker = data.draw(st.sampled_from(list(self.askers.values())))
        output = self.manager.prepare_store(asker.keys[first : first + num_keys], asker.context)
        if output is not None and output.keys_to_store:
            self.stores.append((asker, output.keys_to_store, output.store_spec.block_ids.tolist()))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), is_spoiled=st.booleans())
    def complete_store(self, data: st.DataObject, is_spoiled: bool) -> None:
        asker, keys, rows = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        if is_spoiled:
            self.manager.spoil(keys[:1])
        for key, row in zip(keys, rows, strict=True):
            self.memory[row] = None if is_spoiled else key
        self.manager.complete_store(set(keys), asker.context)

    @precondition(lambda self: self.askers)
    @rule(data=st.data(), num_at_once=st.sampled_from((1, 3, 99)), is_unknown=st.sampled_from((False, False, True)))
    def look_up(self, data: st.DataObject, num_at_once: int, is_unknown: bool) -> None:
        asker = data.draw(st.sampled_from(list(self.askers.values())))
        self.tier.num_found_at_once, self.tier.is_unknown = num_at_once, is_unknown
        self.host.tier.begin_lookup(asker.context.req_id, 0)
        ready = asker.keys[: self.manager.leading(asker.keys, asker.context) or 0]
        self.host.tier.end_lookup()
        if not ready:
            return
        rows: list[int] = self.manager.prepare_load(ready, asker.context).block_ids.tolist()
        self.host.tier.drop_promises(asker.context.req_id)
        self.loads.append((asker, ready, rows))
        self.check_load(ready, rows)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        asker, keys, rows = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.check_load(keys, rows)
        self.manager.complete_load(set(keys), asker.context)

    def check_load(self, keys: list[BlockKey], rows: list[int]) -> None:
        assert [self.memory[row] for row in rows] == keys

    @rule()
    def step(self) -> None:
        take_step(self.manager)

    @precondition(lambda self: self.tier.jobs)
    @rule(data=st.data(), num_lost=st.sampled_from((0, 0, 1, 99)))
    def end_job(self, data: st.DataObject, num_lost: int) -> None:
        self.tier.end(data.draw(st.sampled_from(sorted(self.tier.jobs))), num_lost)

    @precondition(lambda self: self.askers)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        asker = self.askers.pop(data.draw(st.sampled_from(sorted(self.askers))))
        self.manager.on_request_finished(asker.context)
        self.host.controller.on_finished(asker.context.req_id)

    @rule()
    def reset(self) -> None:
        self.manager.reset_cache()
        assert not self.tier.jobs
        assert set(self.tier.requests) == set(self.askers), "those that have ended are told of, the others go on"
        self.stores.clear()
        self.loads.clear()

    @rule()
    def settle(self) -> None:
        """Let everything end: then no row is held but for a promise, and each ended request was told of."""
        while self.stores:
            asker, keys, rows = self.stores.pop()
            for key, row in zip(keys, rows, strict=True):
                self.memory[row] = key
            self.manager.complete_store(keys, asker.context)
        while self.loads:
            asker, keys, _ = self.loads.pop()
            self.manager.complete_load(keys, asker.context)
        for asker in self.askers.values():
            self.host.tier.drop_promises(asker.context.req_id)
        take_step(self.manager)
        for number in list(self.tier.jobs):
            self.tier.end(number)
        take_step(self.manager)
        assert not self.manager.has_pending_work()
        assert set(self.tier.requests) == set(self.askers)
        assert self.host.tree.tiers[Tier.HOST].in_use == {}
        assert all(self.memory[row] == key for key, row in self.host.tier.contents().items())

    @invariant()
    def holds(self) -> None:
        check_invariants(self.host.tree, is_connected=False)
        rows = [*self.host.tier.contents().values()]
        assert len(set(rows)) == len(rows)
        assert self.host.tier.rows.num_free == self.host.num_chunks - len(rows)


TestTierManager = TierManagerMachine.TestCase
TestTierManager.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


class Tiers:
    """Host memory with a fast and a slow tier below it, and one request for six blocks."""

    def __init__(self, num_rows: int = 8) -> None:
        self.host = Host(num_rows)
        self.memory: list[BlockKey | None] = [None] * num_rows
        self.fast, self.slow = SlowTier(self.memory), SlowTier(self.memory)
        self.fast.name, self.slow.source = "fast", CacheHitSource.EXTERNAL_UNSPECIFIED
        self.manager = TierManager(self.host.tier, [self.fast, self.slow], BLOCK_BYTES)
        self.asker = self.host.ask("D")
        self.keys, self.context = self.asker.keys, self.asker.context
        self.manager.on_new_request(self.context)

    def look_up(self) -> list[LookupResult]:
        return [self.manager.lookup(key, self.context) for key in self.keys]

    def load_all(self) -> None:
        take_step(self.manager)
        for tier in (self.fast, self.slow):
            for number in list(tier.jobs):
                tier.end(number)
        take_step(self.manager)


def test_the_nearest_tier_that_has_a_block_loads_it_and_counts_as_its_source() -> None:
    it = Tiers()
    it.fast.held, it.slow.held = set(it.keys[:2]), set(it.keys[:4])
    assert it.look_up() == [LookupResult.HIT_PENDING] * 4 + [LookupResult.MISS] * 2
    take_step(it.manager)
    assert [[list(job.keys) for job, _ in tier.jobs.values()] for tier in (it.fast, it.slow)] == [
        [it.keys[:2]],
        [it.keys[2:4]],
    ]
    it.load_all()
    assert it.look_up() == [LookupResult.HIT] * 4 + [LookupResult.MISS] * 2
    assert [it.manager.get_load_source(key, it.context) for key in it.keys[:4]] == (
        [CacheHitSource.DISK] * 2 + [CacheHitSource.EXTERNAL_UNSPECIFIED] * 2
    )
    other = it.host.ask("D")
    assert it.manager.get_load_source(it.keys[0], other.context) is CacheHitSource.HOST, "for others it was there"


def test_a_tier_that_does_not_know_yet_is_queried_again_unless_another_has_it() -> None:
    it = Tiers()
    it.fast.is_unknown, it.slow.held = True, set(it.keys[:1])
    assert it.look_up() == [LookupResult.HIT_PENDING] + [LookupResult.RETRY] * 5
    it.fast.is_unknown = False
    assert it.look_up() == [LookupResult.HIT_PENDING] + [LookupResult.MISS] * 5


def test_a_request_loads_only_from_the_tiers_that_it_allows() -> None:
    it = Tiers()
    it.fast.held = it.slow.held = set(it.keys)
    it.fast.locality, it.slow.locality = Locality.REMOTE, Locality.LOCAL
    it.context.load_tier_filter = TierFilter((TierMatcher(Medium.STORAGE, Locality.LOCAL),))
    it.look_up()
    take_step(it.manager)
    assert (len(it.fast.jobs), len(it.slow.jobs)) == (0, 1)
    it = Tiers()
    it.fast.held = set(it.keys)
    it.context.load_tier_filter = TierFilter((TierMatcher(Medium.CPU, None),))
    assert it.look_up() == [LookupResult.MISS] * 6


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 6])
def test_of_a_prefix_that_is_too_long_the_beginning_is_loaded(num_rows: int) -> None:
    it = Tiers(num_rows)
    it.fast.held = set(it.keys)
    it.host.tier.begin_lookup(it.context.req_id, 0)
    assert it.look_up() == [LookupResult.HIT_PENDING] * num_rows + [LookupResult.MISS] * (6 - num_rows)
    it.load_all()
    assert it.memory == it.keys[:num_rows]


def test_what_a_load_has_lost_is_a_miss_and_no_hit_of_its_tier() -> None:
    it = Tiers()
    it.fast.held = set(it.keys)
    it.look_up()
    take_step(it.manager)
    it.fast.end(next(iter(it.fast.jobs)), num_lost=2)
    it.fast.held.clear()
    assert it.look_up() == [LookupResult.HIT] * 4 + [LookupResult.MISS] * 2
    sources = [it.manager.get_load_source(key, it.context) for key in it.keys]
    assert sources == [CacheHitSource.DISK] * 4 + [CacheHitSource.HOST] * 2


def test_what_was_to_be_loaded_before_a_reset_is_not_loaded_after_it() -> None:
    it = Tiers()
    it.fast.held = set(it.keys)
    it.look_up()
    it.manager.reset_cache()
    take_step(it.manager)
    assert not it.fast.jobs


def test_a_block_is_stored_in_every_lower_tier_and_its_row_is_kept_until_the_last_has_it() -> None:
    it = Tiers(6)
    output = it.manager.prepare_store(it.keys, it.context)
    assert output is not None
    it.memory[:] = it.keys
    it.manager.on_request_finished(it.context)
    assert it.context.req_id in it.fast.requests, "its store is still to come"
    it.manager.complete_store(set(it.keys), it.context)
    assert not it.fast.requests
    other = it.host.ask("BC")
    it.manager.on_new_request(other.context)
    assert it.manager.prepare_store(other.keys, other.context) is None
    it.fast.end(next(iter(it.fast.jobs)))
    take_step(it.manager)
    assert it.manager.prepare_store(other.keys, other.context) is None
    it.slow.end(next(iter(it.slow.jobs)))
    take_step(it.manager)
    assert it.manager.prepare_store(other.keys, other.context) is not None


def test_nothing_is_stored_in_a_tier_that_is_only_read_and_no_row_is_kept_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SlowTier, "is_read_only", True)
    it = Tiers(6)
    it.fast.held = set(it.keys)
    it.look_up()
    it.load_all()
    assert it.memory == it.keys
    it.manager.on_request_finished(it.context)
    for documents in ("BC", "D"):
        asker = it.host.ask(documents)
        it.manager.on_new_request(asker.context)
        output = it.manager.prepare_store(asker.keys, asker.context)
        assert output is not None
        it.manager.complete_store(set(output.keys_to_store), asker.context)
        assert not it.manager.has_pending_work()
        it.manager.on_request_finished(asker.context)
    assert not it.fast.jobs


def test_statistics_have_vllms_names_and_a_series_for_each_tier() -> None:
    it = Tiers()
    it.fast.held, it.slow.held = set(it.keys[:2]), set(it.keys[:4])
    it.look_up()
    take_step(it.manager)
    gauge = TieringOffloadingMetrics.ACTIVE_PROMOTION_JOBS
    stats: Any = it.manager.get_stats()
    assert {labels: value for (name, labels), value in told(stats).items() if name == gauge} == {
        ("1:fast",): 1,
        ("2:slow",): 1,
    }
    it.load_all()
    after = told(it.manager.get_stats())
    assert after[TieringOffloadingMetrics.READ_BYTES, ("1:fast",)] == 2 * BLOCK_BYTES
    assert after[TieringOffloadingMetrics.READ_BYTES, ("2:slow",)] == 2 * BLOCK_BYTES
    assert after[gauge, ("1:fast",)] == 0
    assert not [name for name, _ in told(it.manager.get_stats()) if "tiering" in name], "nothing has changed"


def told(stats: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    return {(name, labels): value for name, series in stats.data["data"].items() for labels, value in series.items()}


def test_host_memory_stays_where_a_tier_that_fails_to_end_may_still_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Tiers()
    ended: list[str] = []
    monkeypatch.setattr(it.host.tier, "shutdown", lambda: ended.append("host"))
    monkeypatch.setattr(it.slow, "shutdown", lambda: ended.append("slow"))
    monkeypatch.setattr(it.fast, "shutdown", lambda: [][0])
    with pytest.raises(IndexError):
        it.manager.shutdown()
    assert ended == ["slow"]


def test_stores_that_wait_for_a_tier_need_no_steps_unless_something_else_is_under_way() -> None:
    it = Tiers()
    waiting: dict[str, int | None] = {"fast": None, "slow": None}
    for name, tier in (("fast", it.fast), ("slow", it.slow)):
        type(tier).newest_store = property(lambda self: waiting[self.name])  # type: ignore[method-assign,assignment]
        assert name == tier.name
    try:
        assert it.manager.newest_store is None
        jobs: Any = {number: SimpleNamespace(tier=number) for number in (0, 1)}
        it.manager._jobs = jobs
        for fast, slow, newest in ((3, 4, 4), (None, 4, None), (5, None, None)):
            waiting |= {"fast": fast, "slow": slow}
            assert it.manager.newest_store == newest
    finally:
        del SlowTier.newest_store
