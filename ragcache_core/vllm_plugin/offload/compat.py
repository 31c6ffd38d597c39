"""What vLLM's offloading keeps to itself and RAGCache reads or sets: with ``compat.py``, what a new vLLM may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ragcache_core.vllm_plugin.compat import OffloadingEvent, OffloadKey, ReqContext

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


def spoil_stores(connector: OffloadingConnector) -> set[int]:
    """Keep nothing of what is being stored, nor of requests that have ended; return which copies have to end."""
    offloading = connector.scheduler
    for request_id, state in offloading._req_status.items():
        if state.req.is_finished():
            store_at_most(connector, request_id, 0)
    stores = {number: job for number, job in offloading._jobs.items() if job.is_store}
    for job in stores.values():
        offloading.manager.spoil(job.keys)
    return set(stores)


def end_spoiled(connector: OffloadingConnector, jobs: set[int]) -> set[int]:
    """Have requests store anew what was spoiled when one of these copies has ended; return those that go on.

    Not with sliding windows, where what a request has left behind may be another's by now.
    """
    offloading = connector.scheduler
    going_on = jobs & offloading._jobs.keys()
    if going_on != jobs:
        for state in offloading._req_status.values():
            for config, group in zip(offloading.config.kv_group_configs, state.group_states, strict=True):
                if config.sliding_window_size_in_chunks is None:
                    group.next_stored_chunk_idx = 0
    return going_on


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
