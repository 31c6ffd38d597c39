"""What vLLM's offloading keeps to itself and RAGCache reads or sets: with ``compat.py``, what a new vLLM may change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ragcache_core.vllm_plugin.compat import KVConnectorMetadata, RequestStatus

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.compat import OffloadingConnector
    from ragcache_core.vllm_plugin.offload.host_tier import HostTier


def needs_steps(connector: OffloadingConnector) -> bool:
    """Return whether the offloading has something to do that only an engine's step does, with requests or without.

    vLLM steps as well while blocks of host memory wait for a lower tier to take them. That may be a slow disk: what
    becomes of them is taken in with the next step, and no step brings it nearer.
    """
    offloading = connector.scheduler
    return bool(offloading.has_pending_push_work() and (offloading._jobs or offloading.manager.newest_store is None))


def num_copies_of_blocks(connector: OffloadingConnector) -> int:
    """Return how many copies between the engine's blocks and host memory the scheduler has not seen end."""
    return len(connector.scheduler._jobs)


def store_at_most(connector: OffloadingConnector, request_id: str, num_tokens: int) -> None:
    """Make the offloading store no more than the first ``num_tokens`` of a request."""
    if (state := connector.scheduler._req_status.get(request_id)) is not None:
        limit = state.max_offload_tokens
        state.max_offload_tokens = num_tokens if limit is None else min(limit, num_tokens)


def rows_in_copies(connector: OffloadingConnector, host: HostTier) -> dict[int, tuple[int, list[int]]]:
    """Return the rows of host memory that copies use: job -> the workers that have not ended it, and its rows."""
    return {
        number: (job.pending_count, [row for key in job.keys if (row := host.row_of(key)) is not None])
        for number, job in connector.scheduler._jobs.items()
    }


def spoil_stores(connector: OffloadingConnector) -> None:
    """Keep nothing of what is being stored, nor anything more of the requests that have KV by now."""
    offloading = connector.scheduler
    stop_storing(connector)
    for job in offloading._jobs.values():
        if job.is_store:
            offloading.manager.spoil(job.keys)


def stop_storing(connector: OffloadingConnector) -> None:
    """Store nothing more of the requests that have KV by now."""
    for request_id, state in connector.scheduler._req_status.items():
        if state.req.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            store_at_most(connector, request_id, 0)


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
    """Return whether all blocks that the offloading may store of a request are stored or in flight; True if unknown.

    A preempted request gets other blocks, which the offloading has to see although it stored these tokens: after a
    reset it stores them again.
    """
    offloading = connector.scheduler
    if (state := offloading._req_status.get(request_id)) is None:
        return True
    limit, blocks_per_chunk = state.max_offload_tokens, offloading.config.blocks_per_chunk
    return limit is not None and all(
        min(group.next_stored_chunk_idx, len(group.block_ids) // blocks_per_chunk) >= limit // config.tokens_per_chunk
        for config, group in zip(offloading.config.kv_group_configs, state.group_states, strict=True)
    )


class NoOffloading:
    """What an offloading connector does on the scheduler's side where nothing is kept below the GPU: nothing.

    It takes the place of vLLM's scheduler of copies.
    """

    def __init__(self) -> None:
        self.manager = SimpleNamespace(host=None, lower=[], has_events=False, newest_store=None, num_open_jobs=0)
        self._jobs: dict[int, Any] = {}
        self._req_status: dict[str, Any] = {}
        self._current_batch_allocated_block_ids: set[int] = set()

    def on_new_request(self, request: object) -> None:
        """Do nothing."""

    def get_num_new_matched_tokens(self, *request: object, **limits: object) -> tuple[int, bool]:
        """Return that there is nothing to load."""
        return 0, False

    def update_state_after_alloc(self, *request: object) -> None:
        """Do nothing."""

    def build_connector_meta(self, output: object) -> KVConnectorMetadata:
        """Return that workers copy nothing."""
        self._current_batch_allocated_block_ids.clear()
        return KVConnectorMetadata()

    def update_connector_output(self, output: object) -> None:
        """Do nothing."""

    def has_pending_push_work(self) -> bool:
        """Return False."""
        return False

    def request_finished(self, request: object) -> tuple[bool, None]:
        """Return that the blocks can be freed."""
        return False, None

    def take_events(self) -> Iterable[object]:
        """Return none."""
        return ()

    def get_stats(self) -> None:
        """Return none."""

    def reset_cache(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""
