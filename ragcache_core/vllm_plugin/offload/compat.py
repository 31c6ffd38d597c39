"""What vLLM's offloading keeps to itself and RAGCache reads or sets: with ``compat.py``, what a new vLLM may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ragcache_core.vllm_plugin.compat import ChunkStatus

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.compat import (
        CachePolicy,
        OffloadingConnector,
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
