"""Counts of copies and look-ups on the scheduler's side, under the names of vLLM's offloading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragcache_core.vllm_plugin.compat import OffloadingConnectorStats

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.compat import OffloadingWorkerMetadata

LOOKUP_SYNC_DELAY = "vllm:kv_offload_lookup_sync_delay_seconds"
LOOKUP_ASYNC_DELAY = "vllm:kv_offload_lookup_async_delay_seconds"
ALLOCATION_FAILURE = "vllm:kv_offload_allocation_failure"
DIRECTIONS = ("load", "store")


class CopyStats:
    """Counts events until they are read."""

    def __init__(self) -> None:
        self._stats = OffloadingConnectorStats()

    def on_looked_up(self, seconds: float) -> None:
        """Count a look-up."""
        self._stats.observe_histogram(LOOKUP_SYNC_DELAY, seconds)

    def on_deferred(self, seconds: float) -> None:
        """Count the seconds until a deferred look-up had a result, or its request ended."""
        self._stats.observe_histogram(LOOKUP_ASYNC_DELAY, seconds)

    def on_no_room(self) -> None:
        """Count a store that does not fit into host memory."""
        self._stats.increase_counter(ALLOCATION_FAILURE)

    def on_copied(self, told: OffloadingWorkerMetadata) -> None:
        """Count copies that workers ended."""
        for direction in DIRECTIONS:
            copied = getattr(told.transfer_stats, direction)
            if not copied.is_empty():
                self._stats.increase_counter(f"vllm:kv_offload_{direction}_bytes", copied.bytes)
                self._stats.increase_counter(f"vllm:kv_offload_{direction}_time", copied.time)
                for size in copied.sizes:
                    self._stats.observe_histogram(f"vllm:kv_offload_{direction}_size", size)

    def take(self, of_tiers: OffloadingConnectorStats | None) -> OffloadingConnectorStats | None:
        """Return the counts since the last call, including those of the tiers."""
        own, self._stats = self._stats, OffloadingConnectorStats()
        if own.is_empty():
            return of_tiers
        if of_tiers is not None:
            own.aggregate(of_tiers)
        return own
