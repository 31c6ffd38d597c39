"""Host and disk tier of a model with windows and states: what is stored of them, and what goes with what."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from ragcache_core.policy import PrefillCostModel
from ragcache_core.tree import check_invariants
from ragcache_core.types import PromptSegment, SegmentKind, Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController, TierReport
from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey, KVGroups, OtherGroup
from ragcache_core.vllm_plugin.offload.host_tier import HostTier
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import RequestMetadata
from tests.engine.vllm_plugin.disk_scene import Opening, Scene
from tests.engine.vllm_plugin.host_scene import BLOCK, BLOCKS, chain

MAIN, WINDOW, STATE = 1, 0, 2
GROUPS = KVGroups(MAIN, {WINDOW: OtherGroup(2), STATE: OtherGroup(1, is_state=True)})


class Request:
    """A request over documents, and what its chunks are called."""

    def __init__(self, controller: CacheController, name: str, documents: str) -> None:
        self.context = ReqContext(name)
        self.hashes = chain(documents)
        segments, end = [], 0
        for doc in documents:
            segments.append(PromptSegment(SegmentKind.DOCUMENT, end, end + BLOCKS[doc] * BLOCK, doc))
            end += BLOCKS[doc] * BLOCK
        controller.on_new_request(name, RequestMetadata(tuple(segments)), self.hashes, end, 0.0)
        controller.on_admitted(name, self.hashes, {}, 0.0)

    def chunks(self, first: int = 0, last: int | None = None) -> list[BlockKey]:
        """Return the chunks of some of its units, group by group as vLLM offers them."""
        return [GROUPS.key_of(key, group) for group in (WINDOW, MAIN, STATE) for key in self.hashes[first:last]]


class Host:
    """The host tier of a model with a window and a state."""

    def __init__(self, num_chunks: int, policy: str = "pgdsf", *, is_selective: bool = False) -> None:
        self.num_chunks = num_chunks
        self.controller = CacheController(
            PluginSettings(policy=policy, ghost_size=2),
            tokens_per_block=BLOCK,
            prefill_cost=PrefillCostModel.default(),
            tiers={Tier.HOST: TierReport(num_chunks, 1)},
            groups=GROUPS,
        )
        self.tier = HostTier(num_chunks, self.controller, is_selective=is_selective)
        self.num_requests = 0

    def ask(self, documents: str) -> Request:
        self.num_requests += 1
        request = Request(self.controller, f"r{self.num_requests}", documents)
        self.tier.on_new_request(request.context)
        return request

    def finish(self, request: Request) -> None:
        self.tier.on_request_finished(request.context)
        self.tier.drop_promises(request.context.req_id)
        self.controller.on_finished(request.context.req_id)

    def stored(self, documents: str) -> Request:
        """Store all chunks of a request and end it."""
        request = self.ask(documents)
        output = self.tier.prepare_store(request.chunks(), request.context)
        assert output is not None
        self.tier.complete_store(output.keys_to_store, request.context)
        self.finish(request)
        return request

    def here(self, request: Request, group: int) -> list[int]:
        """Return which units of a request have a chunk of a group."""
        return [i for i, key in enumerate(request.hashes) if self.tier.row_of(GROUPS.key_of(key, group)) is not None]

    def check(self) -> None:
        check_invariants(self.controller.tree, is_connected=False)
        chunks = {key: self.tier._num_reads[row] for key, row in self.tier.contents().items()}
        assert self.tier.rows.num_free == self.num_chunks - len(chunks)
        assert self.tier._num_read == sum(num_reads > 0 for num_reads in chunks.values())
        tree = self.controller.tree
        resident = {
            key for n in tree.nodes() for i, key in enumerate(n.keys) if tree.resident_mask(n, Tier.HOST) >> i & 1
        }
        assert resident == {GROUPS.unit_of(key) for key in chunks if GROUPS.is_main(key)}
        others = {key for key in chunks if not GROUPS.is_main(key)}
        assert self.tier.num_other_blocks == len(others)
        for key in others:
            is_idle = chunks[key] == 0 and key not in self.tier.promises
            assert (key in self.tier._others) == (is_idle and key not in self.tier._unknown)


class GroupChunksMachine(RuleBasedStateMachine):
    """Requests look up, load, store and end, in a tier that is too small for them."""

    @initialize(num_chunks=st.integers(1, 24), policy=st.sampled_from(("pgdsf", "lru", "mixture")))
    def build(self, num_chunks: int, policy: str) -> None:
        self.it = Host(num_chunks, policy, is_selective=policy == "mixture")
        self.requests: list[Request] = []
        self.stores: list[tuple[Request, list[BlockKey]]] = []
        self.loads: list[tuple[Request, list[BlockKey]]] = []

    @rule(documents=st.text("ABCD", min_size=1, max_size=3))
    def arrive(self, documents: str) -> None:
        self.requests.append(self.it.ask(documents))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), first=st.integers(0, 4), num_units=st.integers(1, 9))
    def store(self, data: st.DataObject, first: int, num_units: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        keys = request.chunks(first, first + num_units)
        busy = {key for _, keys in (*self.stores, *self.loads) for key in keys} | set(self.it.tier.promises._counts)
        before = set(self.it.tier.contents())
        output = self.it.tier.prepare_store(keys, request.context)
        if output is None:
            assert set(self.it.tier.contents()) == before
            return
        evicted = before - set(self.it.tier.contents())
        assert not evicted & (busy | set(keys)), "a chunk in use, or wanted, was evicted"
        assert set(output.keys_to_store) <= set(keys) - before
        if output.keys_to_store:
            self.stores.append((request, list(output.keys_to_store)))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), success=st.sampled_from((True, True, True, False)))
    def complete_store(self, data: st.DataObject, success: bool) -> None:
        request, keys = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        self.it.tier.complete_store(keys, request.context, success)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), loads=st.booleans())
    def look_up(self, data: st.DataObject, loads: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.it.tier.begin_lookup(request.context.req_id, 0)
        ready = [k for k in request.chunks() if self.it.tier.lookup(k, request.context) is LookupResult.HIT]
        self.it.tier.end_lookup()
        if ready and loads:
            self.it.tier.prepare_load(ready, request.context)
            self.it.tier.drop_promises(request.context.req_id)
            self.loads.append((request, ready))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        request, keys = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.it.tier.complete_load(keys, request.context)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.it.finish(self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))))

    @rule()
    def reset(self) -> None:
        self.it.tier.reset_cache()
        self.stores.clear()
        self.loads.clear()

    @invariant()
    def everything_is_in_its_place(self) -> None:
        if hasattr(self, "it"):
            self.it.check()

    def teardown(self) -> None:
        if not hasattr(self, "it"):
            return
        for request, keys in self.stores:
            self.it.tier.complete_store(keys, request.context)
        for request, keys in self.loads:
            self.it.tier.complete_load(keys, request.context)
        for request in self.requests:
            self.it.finish(request)
        self.it.check()
        last = self.it.ask("A")
        keys = [GROUPS.key_of(b"new %d" % i, MAIN) for i in range(self.it.num_chunks)]
        assert self.it.tier.prepare_store(keys, last.context) is not None, "something is held for ever"


GroupChunksMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGroupChunks = GroupChunksMachine.TestCase


def test_of_windows_and_states_only_what_a_hit_may_need_is_stored() -> None:
    host = Host(40)
    request = host.stored("BD")  # 3 and 6 units
    assert host.here(request, MAIN) == list(range(9))
    assert host.here(request, WINDOW) == [1, 2, 6, 7, 8], "and one more where a prompt ends"


def test_full_attention_blocks_are_found_among_missing_ones_of_other_groups() -> None:
    host = Host(40)
    request = host.ask("B")
    main = [GROUPS.key_of(unit, MAIN) for unit in request.hashes]
    host.tier.prepare_store(main, request.context)
    host.tier.complete_store(main, request.context)
    output = host.tier.prepare_store(request.chunks(), request.context)
    assert output is not None
    assert output.keys_to_store
    assert not set(main) & set(output.keys_to_store)
    host.tier.complete_store(output.keys_to_store, request.context)
    host.check()


def test_every_group_of_a_document_is_on_the_disk_after_a_new_start(opening: Opening) -> None:
    scene = opening(groups=GROUPS)
    request = stored_on_disk(scene, "BC")
    assert scene.load(request) == set(request)
    scene.close()
    again = opening(groups=GROUPS)
    assert all(again.tier.find(key, again.context) for key in request)
    assert again.load(request) == set(request)
    report = again.controller.report()
    assert [tier["num_blocks"] for tier in report["tiers"] if tier["name"] == "disk"] == [len(request)]


def stored_on_disk(scene: Scene, documents: str) -> list[BlockKey]:
    """Write the chunks that the host tier would have of a request."""
    request = Request(scene.controller, f"{documents} {scene.num_jobs}", documents)
    keys = request.chunks()
    job_id = scene.submit_store(keys)
    scene.controller.on_finished(request.context.req_id)
    scene.settle()
    assert [ended.number for ended in scene.tier.take_ended()] == [job_id]
    return keys


def test_a_full_disk_evicts_blocks_no_hit_needs_and_then_blocks_with_all_groups(opening: Opening) -> None:
    scene = opening(num_slots=18, groups=GROUPS)
    old = stored_on_disk(scene, "D")
    assert len(old) == 18
    stored_on_disk(scene, "B")
    here = {key for key in old if scene.tier.find(key, scene.context)}
    units = {GROUPS.unit_of(key) for key in here if GROUPS.is_main(key)}
    assert {GROUPS.unit_of(key) for key in here} == units, "nothing is left of a unit that is gone"
    assert len(units) == 6, "windows and states amid the document made room for nine chunks"
    stored_on_disk(scene, "CC")
    assert all(GROUPS.unit_of(key) in units for key in old if scene.tier.find(key, scene.context))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_stored_evicted_and_lost_the_disk_serves_right_bytes(opening: Opening, seed: int) -> None:
    rng = Random(seed)
    scene = opening(num_slots=20, groups=GROUPS)
    for step in range(25):
        documents = rng.choice(["A", "B", "C", "D", "AB", "BC", "CA", "BD"])
        if rng.random() < 0.6:
            keys = stored_on_disk(scene, documents)
        else:
            keys = Request(scene.controller, f"look {step}", documents).chunks()
            scene.controller.on_finished(f"look {step}")
        found = [key for key in keys if scene.tier.find(key, scene.context)]
        if found:
            assert scene.load(found[:16]) == set(found[:16])
        if rng.random() < 0.2:
            before = set(scene.tier._stored)
            scene.close()
            scene = opening(num_slots=20, groups=GROUPS)
            assert set(scene.tier._stored) == before
        check_invariants(scene.tree, is_connected=False)
        scene.check_events()
        units = scene.tree.tiers[Tier.DISK].num_units
        assert units == sum(GROUPS.is_main(key) for key in scene.tier._stored)
