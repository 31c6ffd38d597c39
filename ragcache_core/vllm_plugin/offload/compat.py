"""What vLLM's offloading keeps to itself and RAGCache reads or sets: with ``compat.py``, what a new vLLM may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ragcache_core.vllm_plugin.compat import OffloadingEvent, OffloadKey, ReqContext, RequestStatus

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.compat import (
        CachePolicy,
        ChunkStatus,
        CPUPrimaryTierOffloadingManager,
        OffloadingConnector,
        TieringOffloadingManager,
    )


def host_policy_of(manager: TieringOffloadingManager) -> CachePolicy:
    """Return the policy that vLLM made for the host tier from the names in the configuration."""
    return manager.primary_tier._policy


def adopt_chunks(manager: TieringOffloadingManager, chunks: Mapping[OffloadKey, int]) -> None:
    """Make the host tier, which is empty, hold ``chunks`` of its memory: key -> number of the chunk.

    An empty tier gives its chunks out from the first on. So it is asked to store as many as reach to the last of
    these, is told that these were stored, and that those between were not.
    """
    tier, owner = manager.primary_tier, ReqContext("ragcache-restored")
    keys = {number: key for key, number in chunks.items()}
    asked = [keys.get(i, OffloadKey(b"gap" + i.to_bytes(8, "big"))) for i in range(max(keys, default=-1) + 1)]
    output = tier.prepare_store(asked, owner)
    assert output is not None
    assert output.keys_to_store == asked
    assert output.store_spec.block_ids.tolist() == list(range(len(asked)))
    tier.complete_store([key for key in asked if key not in chunks], owner, success=False)
    tier.complete_store(list(chunks), owner)
    tier.on_request_finished(owner)


def discard_idle(tier: CPUPrimaryTierOffloadingManager, key: OffloadKey, chunk: ChunkStatus) -> None:
    """Take a chunk that nobody holds out of the host tier, as if it had been evicted."""
    tier._policy.remove(key)
    tier._num_evictable_cache_chunks -= 1
    tier._free_chunk(chunk)
    if tier.events is not None:
        tier.events.append(OffloadingEvent(keys=[key], medium=tier.medium, removed=True))


def needs_steps(connector: OffloadingConnector) -> bool:
    """Return whether the offloading has something to do that only an engine's step does, with requests or without.

    vLLM steps as well while chunks of host memory wait for a tier below to take them. That may be a slow disk: what
    becomes of them is taken in with the next step, and no step brings it nearer.
    """
    offloading = connector.scheduler
    if not offloading.has_pending_push_work():
        return False
    tiers = offloading.manager.secondary_tiers
    is_otherwise_busy = bool(offloading._jobs) or any(tier.has_pending_work() for tier in tiers)
    return is_otherwise_busy or newest_store_below(connector) is None


def has_events(connector: OffloadingConnector) -> bool:
    """Return whether a tier below the GPU has KV events to tell, which only an engine's step does."""
    manager = connector.scheduler.manager
    return any(getattr(tier, "events", None) for tier in (manager.primary_tier, *manager.secondary_tiers))


def newest_store_below(connector: OffloadingConnector) -> int | None:
    """Return the latest job that waits for our disk, where nothing else is under way there; None for none."""
    stores = [getattr(tier, "newest_store", None) for tier in connector.scheduler.manager.secondary_tiers]
    return max((store for store in stores if store is not None), default=None)


def num_copies_of_blocks(connector: OffloadingConnector) -> int:
    """Return how many copies between the engine's blocks and host memory the scheduler has not seen end."""
    return len(connector.scheduler._jobs)


def store_at_most(connector: OffloadingConnector, request_id: str, num_tokens: int) -> None:
    """Make the offloading store no more than the first ``num_tokens`` of a request."""
    if (state := connector.scheduler._req_status.get(request_id)) is not None:
        limit = state.max_offload_tokens
        state.max_offload_tokens = num_tokens if limit is None else min(limit, num_tokens)


def rows_in_copies(connector: OffloadingConnector) -> dict[int, tuple[int, list[int]]]:
    """Return the rows of host memory that copies use: job -> the workers that have not ended it, and its rows."""
    offloading = connector.scheduler
    chunks = offloading.manager.primary_tier._policy
    return {
        number: (job.pending_count, [chunk.chunk_id for key in job.keys if (chunk := chunks.get(key)) is not None])
        for number, job in offloading._jobs.items()
    }


def withhold_rows(connector: OffloadingConnector, copies: Mapping[int, tuple[int, Sequence[int]]]) -> None:
    """Have host memory, which has just been reset, give out no row that copies from before use."""
    tier = connector.scheduler.manager.primary_tier
    used = {row for _, rows in copies.values() for row in rows}
    tier._num_allocated_chunks = tier._num_chunks
    tier._free_list = [row for row in reversed(range(tier._num_chunks)) if row not in used]


def end_copies(
    connector: OffloadingConnector, copies: dict[int, tuple[int, list[int]]], ended: Mapping[int, int]
) -> None:
    """Take ``ended``, job -> by how many workers, out of ``copies``, and give out the rows that none uses any more."""
    for job, num_workers in ended.items():
        if job in copies:
            num_pending, rows = copies.pop(job)
            if num_pending > num_workers:
                copies[job] = num_pending - num_workers, rows
            else:
                used = {row for _, others in copies.values() for row in others}
                connector.scheduler.manager.primary_tier._free_list += [row for row in rows if row not in used]


def spoil_stores(connector: OffloadingConnector) -> None:
    """Keep nothing of what is being stored, nor anything more of the requests that have KV by now."""
    offloading = connector.scheduler
    for request_id, state in offloading._req_status.items():
        if state.req.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            store_at_most(connector, request_id, 0)
    for job in offloading._jobs.values():
        if job.is_store:
            offloading.manager.spoil(job.keys)


def keep_from_storing(connector: OffloadingConnector, request_id: str, num_tokens: int) -> None:
    """Make the offloading store no more than the first ``num_tokens`` of a request, and forget the keys beyond."""
    offloading = connector.scheduler
    if (state := offloading._req_status.get(request_id)) is None:
        return
    store_at_most(connector, request_id, num_tokens)
    for config, group in zip(offloading.config.kv_group_configs, state.group_states, strict=True):
        del group.offload_keys[num_tokens // config.tokens_per_chunk :]


def fence_blocks(connector: OffloadingConnector, block_ids: Sequence[int]) -> None:
    """Have stores out of these blocks end before this step writes to them, as vLLM does for blocks that it computes."""
    connector.scheduler._current_batch_allocated_block_ids.update(block_ids)


def requires_all_requests(connector: OffloadingConnector) -> bool:
    """Return whether a group stores other blocks than those of the request's block table, as states do."""
    return any(config.requires_cow_source for config in connector.scheduler.config.kv_group_configs)


def has_stored_all(connector: OffloadingConnector, request_id: str) -> bool:
    """Return whether all that the offloading may store of a request is stored or on its way; True for unknown ones."""
    offloading = connector.scheduler
    if (state := offloading._req_status.get(request_id)) is None:
        return True
    limit = state.max_offload_tokens
    return limit is not None and all(
        group.next_stored_chunk_idx >= limit // config.tokens_per_chunk
        for config, group in zip(offloading.config.kv_group_configs, state.group_states, strict=True)
    )
