"""Copies between the engine's blocks and host memory, on the scheduler's side.

A step's work is proportional to what changes in it: a request that stores nothing more is not looked at, whatever it
generates. Block tables are vLLM's own, read when something is stored.

::

    request    arrives -> looked up -> (loads) -> runs: stores each full block -> ends: stores the rest
    job        a load or a store; it ends when all workers have ended it
    fence      a store out of blocks that a step writes to ends before that step

A store copies after the step that asked for it. So a block that is freed and used again meanwhile has to be copied
first: the step that writes to it names the store, and workers wait for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.compat import (
    CacheHitSource,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingConnectorMetadata,
    OffloadingEventsTracker,
    OffloadingTransferJob,
    OffloadingWorkerMetadata,
    RequestStatus,
    ScheduleEndContext,
)
from ragcache_core.vllm_plugin.offload.copied_requests import CopiedRequest, LoadedRun, read_key_groups
from ragcache_core.vllm_plugin.offload.copy_jobs import CopyJobs, blocks_written
from ragcache_core.vllm_plugin.offload.copy_stats import CopyStats
from ragcache_core.vllm_plugin.offload.host_tier import HostTier
from ragcache_core.vllm_plugin.offload.layer_loads import LayerLoad, LayerLoadMetadata
from ragcache_core.vllm_plugin.offload.lookups import Lookups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
    from ragcache_core.vllm_plugin.compat import OffloadingConnectorStats, TieringOffloadingSpec
    from ragcache_core.vllm_plugin.lower.manager import TierManager

logger = logger_of(__name__)


class CopyScheduler:
    """Hits, loads and stores the KV of requests, behind the scheduler side of vLLM's connector interface.

    Args:
        spec: of the tiers, whose manager is built here.
        vllm_config, kv_cache_config: of the engine.
        manager: of the tiers, over a :class:`HostTier`.
    """

    def __init__(
        self,
        spec: TieringOffloadingSpec,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        manager: TierManager,
    ) -> None:
        assert isinstance(manager.host, HostTier)
        self._manager = manager
        self._groups = read_key_groups(spec.config, kv_cache_config)
        self._key_groups = manager.host.groups
        self._has_states = any(group.is_handed_over for group in self._groups)
        self._jobs = CopyJobs(manager, manager.host, num_workers=vllm_config.parallel_config.world_size)
        self._events: OffloadingEventsTracker | None = None
        if spec.kv_events_config.enable_kv_cache_events:
            self._events = OffloadingEventsTracker(spec.kv_events_config)
        self._lookups = Lookups(self._groups, manager, None if self._events is None else self._emit_hit)
        self._stats = CopyStats()
        self._requests: dict[str, CopiedRequest] = {}
        self._storing: dict[str, CopiedRequest] = {}  # those that run and may store more
        self._ended: list[CopiedRequest] = []  # since the last step
        self._shares_loads = bool(vllm_config.cache_config.enable_prefix_caching)
        self._loading: set[BlockKey] = set()
        # Of the next step
        self._loads: dict[int, OffloadingTransferJob] = {}
        self._layer_loads: list[LayerLoad] = []
        self._to_flush: set[int] = set()
        self._fenced: list[int] = []

    @property
    def num_jobs(self) -> int:
        """Number of copies that workers have not ended."""
        return len(self._jobs)

    @property
    def num_requests(self) -> int:
        """Number of requests in the engine, or with open copies."""
        return len(self._requests)

    # Requests

    def on_new_request(self, request: Request) -> None:
        """Add a new request."""
        copied = CopiedRequest.of(request, self._groups, self._key_groups)
        self._requests[request.request_id] = copied
        self._manager.on_new_request(copied.context)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the loadable tokens (``None`` if unknown yet), and whether they load between steps."""
        copied = self._requests[request.request_id]
        copied.has_blocks = False  # it gets others
        self._storing.pop(request.request_id, None)
        if copied.jobs:
            return None, False
        copied.num_local_tokens, copied.loaded, copied.sources = num_computed_tokens, [], None
        if request.skip_reading_prefix_cache:
            return 0, False
        began_s = time.monotonic()
        num_found = self._lookups.find(copied)
        if num_found and self._loading and not self._loading.isdisjoint(self._lookups.blocks_of_hit(copied, num_found)):
            num_found = None  # another request loads them into blocks that this one can use then
        self._stats.on_looked_up(time.monotonic() - began_s)
        if num_found is None:
            copied.deferred_since_s = copied.deferred_since_s or began_s
            return None, False
        self._end_deferral(copied)
        return num_found, num_found > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Load the hit blocks into the request's allocated blocks."""
        if not num_external_tokens:
            return
        copied = self._requests[request.request_id]
        assert not copied.jobs, "a request loads that has other copies under way"
        keys, targets, sizes, firsts = self._plan_load(copied, blocks, num_external_tokens)
        target = GPULoadStoreSpec(targets, group_sizes=sizes, block_indices=firsts)
        source = self._manager.prepare_load(keys, copied.context)
        number = self._jobs.begin(copied, keys)
        self._loads[number] = OffloadingTransferJob(request.request_id, source, target)
        self._fenced += targets
        if self._shares_loads:
            self._loading.update(keys)

    def load_by_layer(self, request: Request, blocks: KVCacheBlocks, num_local: int, num_tokens: int) -> None:
        """Load blocks of the only group layer by layer, in the request's first step.

        Args:
            request: that has its blocks now.
            blocks: these.
            num_local: tokens before the loaded ones, in whole blocks.
            num_tokens: to load, in whole blocks.
        """
        copied, (group,) = self._requests[request.request_id], self._groups
        size = group.tokens_per_block
        first, end = num_local // size, (num_local + num_tokens) // size
        keys = copied.keys_of(0)[first:end]
        source = self._manager.prepare_load(keys, copied.context)
        assert isinstance(source, CPULoadStoreSpec)
        targets = [block.block_id for block in blocks.blocks[0][first:end]]
        number = self._jobs.begin(copied, keys, is_by_layer=True)
        rows = source.block_ids.astype(np.int64)
        self._layer_loads.append(LayerLoad(number, rows, np.array(targets, np.int64)))
        self._fenced += targets
        copied.num_stored[0] = max(copied.num_stored[0], end)
        copied.loaded = [LoadedRun(first * size, size, keys)]
        copied.sources = None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Record a request's end; the rest of it is stored with the next step."""
        if (copied := self._requests.get(request.request_id)) is not None:
            self._end_deferral(copied)
            self._storing.pop(request.request_id, None)
            if copied.has_blocks and not copied.has_stored_all:
                copied.last_blocks = block_ids
            self._ended.append(copied)
        return False, None

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Return the loaded tokens by tier; of several groups, the outermost tier."""
        copied = self._requests[request.request_id]
        if copied.sources is None or copied.sources[0] != num_external_tokens:
            copied.sources = num_external_tokens, self._sources(copied, num_external_tokens)
        return copied.sources[1]

    # Steps

    def build_connector_meta(self, output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Return the workers' copies for a step."""
        shown = self._shown(output)
        preempted = output.preempted_req_ids or ()
        new_ids = [new.req_id for new in output.scheduled_new_reqs]
        self._manager.on_schedule_end(ScheduleEndContext(new_ids, preempted))
        for request_id in preempted:
            if (copied := self._requests.get(request_id)) is not None:
                self._to_flush |= copied.jobs
        ended, self._ended = self._ended, []
        open_stores = self._jobs.stores()
        is_fenced = bool(open_stores or any(copied.last_blocks for copied in ended))
        written = blocks_written(output, self._groups, self._fenced) if is_fenced else set()
        self._to_flush.update(number for number, job in open_stores if not written.isdisjoint(job.blocks or ()))
        stores: dict[int, OffloadingTransferJob] = {}
        if self._has_states:
            self._store_states(output, stores)
        state, scheduled = output.kv_connector_block_state, output.num_scheduled_tokens
        assert state is not None
        for name, copied in shown.items():
            num_tokens = copied.request.num_computed_tokens + scheduled[name]
            self._store(copied, num_tokens, state.resolve_block_ids(name), stores)
            if copied.has_stored_all:
                self._storing.pop(name, None)
        for copied in ended:
            self._end(copied, written, stores)
        loads, self._loads = self._loads, {}
        by_layer, self._layer_loads = self._layer_loads, []
        flushed, self._to_flush = self._to_flush, set()
        self._fenced = []
        if by_layer:
            return LayerLoadMetadata(loads, stores, flushed, by_layer)
        return OffloadingConnectorMetadata(loads, stores, flushed)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Process the copies that workers ended."""
        told = output.kv_connector_worker_meta
        if told is None:
            return
        assert isinstance(told, OffloadingWorkerMetadata)
        self._stats.on_copied(told)
        for job in self._jobs.end(told.completed_jobs):
            if job.blocks is None:
                self._loading.difference_update(job.keys)
            copied, name = job.copied, job.copied.request.request_id
            if copied.is_ended and not copied.jobs and self._requests.get(name) is copied:
                del self._requests[name]

    def has_pending_push_work(self) -> bool:
        """Return whether there is work that only an engine step does."""
        return self._jobs.are_pending or bool(self._ended) or self._manager.needs_steps

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the KV events of the tiers since the last call, as vLLM publishes them."""
        return () if self._events is None else self._events.take_events(self._manager.take_events())

    def get_kv_connector_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call."""
        return self._stats.take(self._manager.get_stats())

    def reset_cache(self) -> bool:
        """Empty host memory; running requests store their blocks again.

        Rows that workers still copy are used again when these copies have ended.
        """
        self._to_flush |= self._jobs.reset()
        for copied in [copied for copied in self._requests.values() if copied.request.is_finished()]:
            if not copied.is_ended:
                self._manager.on_request_finished(copied.context)
            del self._requests[copied.request.request_id]
        self._ended.clear()
        self._loading.clear()
        self._manager.reset_cache()
        for name, copied in self._requests.items():
            copied.num_stored = [0] * len(self._groups)
            copied.retry_tokens = 0
            copied.jobs.clear()
            if copied.has_blocks:
                self._storing[name] = copied
        if len(self._groups) > 1:  # a request may lack blocks of a window or state
            self.stop_storing()
        if self._events is not None:
            self._events.reset()
        self._jobs.keep_late_rows()
        return True

    def shutdown(self) -> None:
        """Shut the tiers down."""
        self._manager.shutdown()

    # What else the connector asks

    def fence(self, block_ids: Iterable[int]) -> None:
        """End stores of these blocks before the next step, which writes to them."""
        self._fenced += block_ids

    def store_at_most(self, request_id: str, num_tokens: int) -> None:
        """Store no more than the first ``num_tokens`` of a request."""
        if (copied := self._requests.get(request_id)) is not None:
            copied.store_at_most(num_tokens)

    def keep_from_storing(self, request_id: str, num_tokens: int) -> None:
        """Store no more than the first ``num_tokens`` of a request, and drop the keys after them."""
        if (copied := self._requests.get(request_id)) is not None:
            copied.store_at_most(num_tokens)
            copied.forget_keys(num_tokens)

    def stop_storing(self) -> None:
        """Stop storing requests that have KV now."""
        for copied in self._requests.values():
            if copied.request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                copied.store_at_most(0)

    def spoil_stores(self) -> None:
        """Drop pending stores, and stop storing requests that have KV now."""
        self.stop_storing()
        for _, job in self._jobs.stores():
            self._manager.spoil(job.keys)

    # Loads

    def _plan_load(
        self, copied: CopiedRequest, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> tuple[list[BlockKey], list[int], list[int], list[int]]:
        """Return keys and blocks of a load; per group the number of blocks, and the first block's index.

        A group is loaded from its first block that holds nothing yet: the blocks before lie on the GPU, or are outside
        of its window.
        """
        first, end = copied.num_local_tokens, copied.num_local_tokens + num_external_tokens
        keys: list[BlockKey] = []
        targets: list[int] = []
        sizes: list[int] = []
        firsts: list[int] = []
        copied.loaded, copied.sources = [], None
        for number, group in enumerate(self._groups):
            held, size = blocks.blocks[group.group_idx], group.tokens_per_block
            num_blocks = -(-end // size)
            assert len(held) >= num_blocks
            begin = next((i for i in range(-(-first // size), num_blocks) if _is_empty(held[i])), num_blocks)
            loaded = copied.keys_of(number)[begin:num_blocks]
            keys += loaded
            targets += [block.block_id for block in held[begin:num_blocks]]
            sizes.append(num_blocks - begin)
            firsts.append(begin)
            copied.num_stored[number] = num_blocks
            if group.is_handed_over:  # a state replaces all earlier blocks
                copied.loaded += [LoadedRun(first, end - first, [key]) for key in loaded]
            else:
                copied.loaded.append(LoadedRun(begin * size, size, loaded))
        return keys, targets, sizes, firsts

    def _sources(self, copied: CopiedRequest, num_tokens: int) -> dict[CacheHitSource, int]:
        """Return the tiers of a load of that many tokens."""
        first, end = copied.num_local_tokens, copied.num_local_tokens + num_tokens
        found: Counter[CacheHitSource] = Counter()
        if len(self._groups) == 1:  # whose ranges do not overlap
            for run in copied.loaded:
                begin, size, keys = run.before(end)
                sources = self._manager.load_sources(keys, copied.context)
                for source, count in Counter(sources).items():
                    found[source] += count * size
                if sources:
                    found[sources[-1]] -= max(begin + len(keys) * size - end, 0)
        else:
            sources_at: dict[int, list[CacheHitSource]] = {}
            size = min(group.tokens_per_block for group in self._groups)
            for begin, num_each, keys in copied.loaded:
                sources = self._manager.load_sources(keys, copied.context)
                for start, source in zip(range(begin, end, num_each), sources, strict=False):
                    for position in range(max(start, first), min(start + num_each, end), size):
                        sources_at.setdefault(position, []).append(source)
            for position, several in sources_at.items():
                found[CacheHitSource.outermost(several)] += min(size, end - position)
        found[CacheHitSource.EXTERNAL_UNSPECIFIED] += num_tokens - found.total()
        return {source: count for source, count in found.items() if count}

    def _end_deferral(self, copied: CopiedRequest) -> None:
        if copied.deferred_since_s is not None:
            self._stats.on_deferred(time.monotonic() - copied.deferred_since_s)
            copied.deferred_since_s = None

    def _emit_hit(self, copied: CopiedRequest, number: int, index: int, key: BlockKey) -> None:
        assert self._events is not None
        (named,) = self._key_groups.offload_keys([key])
        self._events.record_lookup(copied.request, self._groups[number], index, named)

    # Stores

    def _shown(self, output: SchedulerOutput) -> dict[str, CopiedRequest]:
        """Return the requests that may have blocks to store in a step: they start, or get blocks in it.

        A block is full before the next one is allocated, so each full block is stored one step late at most; the rest
        is stored when the request ends.
        """
        cached, storing = output.scheduled_cached_reqs, self._storing
        begun = [new.req_id for new in output.scheduled_new_reqs]
        for name in chain(begun, cached.resumed_req_ids) if cached.resumed_req_ids else begun:
            if (copied := self._requests.get(name)) is not None:
                copied.has_blocks = True
                if not copied.has_stored_all:
                    storing[name] = copied
        if not storing:
            return {}
        grown = [name for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True) if blocks is not None]
        return {name: storing[name] for name in (*begun, *grown) if name in storing}

    def _end(self, copied: CopiedRequest, written: set[int], stores: dict[int, OffloadingTransferJob]) -> None:
        """Store the rest of a request, and report its end to the tiers."""
        request = copied.request
        if copied.last_blocks:
            if request.status is RequestStatus.FINISHED_ABORTED:
                num_tokens = request.num_computed_tokens
            else:  # the KV of the last token was not computed, or is that of a rejected one
                num_tokens = max(request.num_prompt_tokens, request.num_tokens - 1)
            copied.retry_tokens = 0
            number = self._store(copied, num_tokens, copied.last_blocks, stores)
            if number is not None and not written.isdisjoint(stores[number].src_spec.block_ids.tolist()):
                self._to_flush.add(number)
            copied.last_blocks = ()
        copied.is_ended = True
        self._manager.on_request_finished(copied.context)
        if not copied.jobs:
            del self._requests[request.request_id]

    def _store(
        self,
        copied: CopiedRequest,
        num_tokens: int,
        block_ids: Sequence[Sequence[int]],
        stores: dict[int, OffloadingTransferJob],
    ) -> int | None:
        """Store the full blocks of a request with ``num_tokens`` computed tokens; return the number of the job."""
        num_tokens = copied.num_storable_tokens(num_tokens)
        if num_tokens < copied.retry_tokens:
            return None
        ranges: list[range] = []
        offered: list[BlockKey] = []
        for number, group in enumerate(self._groups):
            blocks = block_ids[group.group_idx]
            places = range(copied.num_stored[number], copied.num_storable(number, num_tokens, len(blocks)))
            ranges.append(places)
            if places and not group.is_handed_over:
                keys = copied.keys_of(number)[places.start : places.stop]
                if group.sliding_window_size_in_chunks is not None:  # vLLM freed some of them
                    keys = [key for i, key in zip(places, keys, strict=True) if blocks[i]]
                offered += keys
        output = self._manager.prepare_store(offered, copied.context) if offered else None
        if output is None and offered:
            self._stats.on_no_room()
            copied.wait_for_room(num_tokens)
            logger.warning(
                "RC-HOST-HELD: RAGCache's host tier has no room for %d blocks of a request, as copies or requests hold "
                "what it has. The request goes on",
                len(offered),
            )
            return None
        copied.num_stored = [max(done, places.stop) for done, places in zip(copied.num_stored, ranges, strict=True)]
        if output is None or not output.keys_to_store:
            return None
        chosen = output.keys_to_store
        first_chosen = offered.index(chosen[0])
        is_run, wanted = offered[first_chosen : first_chosen + len(chosen)] == chosen, frozenset(chosen)
        sources: list[int] = []
        sizes, firsts = [0] * len(ranges), [0] * len(ranges)
        for number, (group, places) in enumerate(zip(self._groups, ranges, strict=True)):
            if not places or group.is_handed_over:
                continue
            blocks, keys = block_ids[group.group_idx], copied.keys_of(number)
            if is_run and len(ranges) == 1 and group.sliding_window_size_in_chunks is None:
                stored: Collection[int] = places[first_chosen : first_chosen + len(chosen)]
            else:
                stored = [i for i in places if keys[i] in wanted and blocks[i]]
            sources += blocks[stored.start : stored.stop] if isinstance(stored, range) else [blocks[i] for i in stored]
            sizes[number], firsts[number] = len(stored), next(iter(stored), 0)
            if self._events is not None:
                for i, key in zip(stored, self._key_groups.offload_keys(keys[i] for i in stored), strict=True):
                    self._events.record_store(copied.request, group, i, key)
        source = GPULoadStoreSpec(sources, group_sizes=sizes, block_indices=firsts)
        job = self._jobs.begin(copied, chosen, blocks=frozenset(sources))
        stores[job] = OffloadingTransferJob(copied.request.request_id, source, output.store_spec)
        return job

    def _store_states(self, output: SchedulerOutput, stores: dict[int, OffloadingTransferJob]) -> None:
        """Store the states from vLLM: each is one block, which may no longer be in the request's table."""
        state = output.kv_connector_block_state
        by_number = {group.group_idx: number for number, group in enumerate(self._groups)}
        for name, handed in state.boundary_state_offloads.items() if state is not None else ():
            if (copied := self._requests.get(name)) is None:
                continue
            most = copied.num_storable_tokens(copied.request.num_tokens)
            for group_idx, block, num_tokens in handed:
                number = by_number.get(group_idx)
                if number is None or not block or num_tokens > most:
                    continue
                group = self._groups[number]
                if num_tokens % group.tokens_per_block:
                    continue
                key = copied.key_at(number, num_tokens)
                stored = self._manager.prepare_store([key], copied.context)
                if stored is None:
                    self._stats.on_no_room()
                elif stored.keys_to_store:
                    sizes, firsts = [0] * len(self._groups), [0] * len(self._groups)
                    sizes[number], firsts[number] = 1, num_tokens // group.tokens_per_block - 1
                    source = GPULoadStoreSpec([block], group_sizes=sizes, block_indices=firsts)
                    job = self._jobs.begin(copied, [key], blocks=frozenset([block]))
                    stores[job] = OffloadingTransferJob(name, source, stored.store_spec)
                    if self._events is not None:
                        self._events.record_store(copied.request, group, firsts[number], key)


def _is_empty(block: Any) -> bool:
    """Return whether a block is real and has no content yet."""
    return not block.is_null and block.block_hash is None
