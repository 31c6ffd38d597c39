"""What vLLM's offloading keeps to itself and RAGCache reads or sets: with ``compat.py``, what a new vLLM may change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from ragcache_core.vllm_plugin.compat import (
    ChunkStatus,
    OffloadingConnectorMetadata,
    ScheduleEndContext,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    from ragcache_core.vllm_plugin.compat import (
        CachePolicy,
        KVConnectorBase_V1,
        OffloadingConnector,
        OffloadingWorker,
        OffloadKey,
        TieringOffloadingManager,
    )


def host_policy_of(manager: TieringOffloadingManager) -> CachePolicy:
    """Return the policy that vLLM made for the host tier from the names in the configuration."""
    return manager.primary_tier._policy


def adopt_chunks(manager: TieringOffloadingManager, chunks: Mapping[OffloadKey, int]) -> None:
    """Make the host tier, which is empty, hold ``chunks`` of its memory: key -> number of the chunk."""
    tier = manager.primary_tier
    assert not tier._num_allocated_chunks
    for key, chunk_id in chunks.items():
        status = ChunkStatus(chunk_id)
        status.ref_cnt = 0
        tier._policy.insert(key, status)
        tier._policy.mark_evictable(key)
    if chunks:
        used = set(chunks.values())
        tier._num_allocated_chunks = max(used) + 1
        tier._free_list = [chunk_id for chunk_id in range(max(used)) if chunk_id not in used]
        tier._num_evictable_cache_chunks = len(used)


def stores_from(connector: OffloadingConnector, request_id: str) -> float:
    """Return at how many tokens of a running request the offloading has the next chunk to store: never is infinity."""
    offloading = connector.scheduler
    if (state := offloading._req_status.get(request_id)) is None:
        return 0.0
    limit = math.inf if state.max_offload_tokens is None else state.max_offload_tokens
    if offloading.config.offload_prompt_only:
        limit = min(limit, state.req.num_prompt_tokens)
    groups = zip(offloading.config.kv_group_configs, state.group_states, strict=True)
    ends = [(group.next_stored_chunk_idx + 1) * config.tokens_per_chunk for config, group in groups]
    return min((end for end in ends if end <= limit), default=math.inf)


def has_offloading_news(connector: OffloadingConnector, output: SchedulerOutput) -> bool:
    """Return whether a step brings the offloading what no list of requests says: loads, flushes, copies of blocks."""
    offloading, blocks = connector.scheduler, output.kv_connector_block_state
    return bool(
        offloading._current_batch_load_jobs
        or offloading._current_batch_jobs_to_flush
        or offloading._current_batch_allocated_block_ids
        or output.kv_cache_block_copies
        or (blocks is not None and blocks.boundary_state_offloads)
    )


def can_be_put_off(connector: OffloadingConnector, output: SchedulerOutput) -> bool:
    """Return whether the offloading may look into a step when its workers have it already.

    Not where they need to know something of it: what to load, and which copies have to end before the step writes to
    blocks that it got. Those are what a request that ended left in blocks without having been told to store it, too.
    Models with several groups of KV caches are left out.
    """
    offloading = connector.scheduler
    if (
        not output.total_num_scheduled_tokens
        or output.preempted_req_ids
        or output.scheduled_cached_reqs.resumed_req_ids
        or has_offloading_news(connector, output)
        or len(offloading.config.kv_group_configs) != 1
        or offloading._sliding_window_groups
        or any(_has_left_to_store(connector, request_id) for request_id in output.finished_req_ids)
    ):
        return False
    allocated = [new.block_ids[0] for new in output.scheduled_new_reqs]
    allocated += [block_ids[0] for block_ids in output.scheduled_cached_reqs.new_block_ids if block_ids]
    return not any(map(offloading._block_id_to_pending_jobs.__contains__, chain.from_iterable(allocated)))


def _has_left_to_store(connector: OffloadingConnector, request_id: str) -> bool:
    """Return whether a request that ended may have filled a chunk that the offloading has not looked at."""
    state = connector.scheduler._req_status.get(request_id)
    if state is None:
        return False
    num_tokens: int = max(state.req.num_computed_tokens, state.req.num_tokens)
    return num_tokens >= stores_from(connector, request_id)


def has_loaded(connector: OffloadingConnector, output: KVConnectorOutput) -> bool:
    """Return whether a copy into the engine's KV memory is among those that workers say have ended."""
    jobs = connector.scheduler._jobs
    ended = (jobs.get(job_id) for job_id in output.kv_connector_worker_meta.completed_jobs)
    return any(job is not None and not job.is_store for job in ended)  # a reset has forgotten the jobs before it


class NothingToCopy(OffloadingConnectorMetadata):
    """What workers get in a step in which nothing is copied, or was and is still to be told of."""

    def __init__(self) -> None:
        super().__init__(load_jobs={}, store_jobs={}, jobs_to_flush=None)

    def __reduce__(self) -> str:
        return "NOTHING_TO_COPY"  # by name: it goes to the workers in nearly every step of an answer


NOTHING_TO_COPY = NothingToCopy()
"""The one there is."""


def end_quiet_step(connector: OffloadingConnector) -> OffloadingConnectorMetadata:
    """Do what the offloading does at the end of every step, with news or without; return that there is nothing to do.

    Its manager takes up copies between the tiers that have ended, and begins those that lookups have asked for: where
    there is no tier below host memory, it has nothing to do.
    """
    manager = connector.scheduler.manager
    if manager.secondary_tiers:
        manager.on_schedule_end(ScheduleEndContext((), ()))
    return nothing_new(connector)


def nothing_new(connector: OffloadingConnector) -> OffloadingConnectorMetadata:
    """Return what workers get in a step for which there is nothing to begin."""
    if connector.scheduler._jobs:  # copies that workers have not told the end of
        return OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=set())
    return NOTHING_TO_COPY


@dataclass
class LateStores(OffloadingConnectorMetadata):
    """What workers get with a step that brings them stores of what the step before computed."""

    late_jobs: dict[int, Any] = field(default_factory=dict)


def with_late_stores(
    metadata: OffloadingConnectorMetadata, late: OffloadingConnectorMetadata
) -> OffloadingConnectorMetadata:
    """Return a step's metadata with the stores that workers should have had with the step before.

    None of them has to end before this step, as far as vLLM can say by now; if it says so, it is passed on.
    """
    jobs_to_flush = (metadata.jobs_to_flush or set()) | (late.jobs_to_flush or set())
    return LateStores(metadata.load_jobs, metadata.store_jobs, jobs_to_flush, late_jobs=late.store_jobs)


def take_late_stores(connector: OffloadingConnector, metadata: OffloadingConnectorMetadata) -> None:
    """Let a worker's connector have them as if it had had them then: it begins with them in this step."""
    if isinstance(metadata, LateStores):
        late = OffloadingConnectorMetadata(load_jobs={}, store_jobs=metadata.late_jobs)
        connector.connector_worker.prepare_store_kv(late)


def copies_of_worker(connector: KVConnectorBase_V1 | None) -> OffloadingWorker | None:
    """Return what copies blocks in a worker's process, where it has an offloading."""
    copies: OffloadingWorker | None = getattr(getattr(connector, "connector_worker", None), "worker", None)
    return copies


def needs_steps(connector: OffloadingConnector) -> bool:
    """Return whether the offloading has something to do that only an engine's step does, with requests or without.

    vLLM steps as well while chunks of host memory wait for a tier below to take them. That may be a slow disk: what
    becomes of them is taken in with the next step, and no step brings it nearer.
    """
    offloading = connector.scheduler
    manager = offloading.manager
    return bool(
        offloading._jobs
        or any(job.transfer_job.is_promotion for job in manager._jobs.values())
        or any(state.pending_cascade_keys for state in manager._req_state.values())
        or any(tier.has_pending_work() for tier in manager.secondary_tiers)
    )


def num_free_chunks(connector: OffloadingConnector) -> int:
    """Return how many chunks fit into host memory without anything going for them."""
    num_free: int = connector.scheduler.manager.primary_tier._get_num_free_chunks()
    return num_free


def num_open_copies(connector: OffloadingConnector) -> int:
    """Return how many copies between the tiers are under way, as far as the scheduler was told."""
    return len(connector.scheduler._jobs) + len(connector.scheduler.manager._jobs)


def newest_copy_below(connector: OffloadingConnector) -> int | None:
    """Return the number of the latest open copy between host memory and a tier below; None where there is none."""
    newest: int | None = max(connector.scheduler.manager._jobs, default=None)
    return newest


def keep_from_storing(connector: OffloadingConnector, request_id: str, num_tokens: int) -> None:
    """Make the offloading store no more than the first ``num_tokens`` of a request, and forget the keys beyond."""
    offloading = connector.scheduler
    if (state := offloading._req_status.get(request_id)) is None:
        return
    limit = state.max_offload_tokens
    state.max_offload_tokens = num_tokens if limit is None else min(limit, num_tokens)
    for config, group in zip(offloading.config.kv_group_configs, state.group_states, strict=True):
        del group.offload_keys[num_tokens // config.tokens_per_chunk :]


def fence_blocks(connector: OffloadingConnector, block_ids: Sequence[int]) -> None:
    """Have stores out of these blocks end before this step writes to them, as vLLM does for blocks that it computes."""
    connector.scheduler._current_batch_allocated_block_ids.update(block_ids)
