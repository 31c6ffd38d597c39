"""vLLM's statistics of a primary tier: the share of host memory used by transfers, and stored sizes."""

from __future__ import annotations

from ragcache_core.vllm_plugin.compat import CPUOffloadingMetrics, OffloadingConnectorStats


class HostStats:
    """Collects the values of vLLM's metrics of the host tier, under vLLM's names."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._allocations: list[int] = []

    def on_allocated(self, count: int) -> None:
        """Record that rows were allocated for a store."""
        if count:
            self._allocations.append(count)

    def take(self, num_read: int, num_written: int) -> OffloadingConnectorStats:
        """Return the statistics since the last call.

        Args:
            num_read: blocks that transfers read now.
            num_written: blocks that are being written now.
        """
        stats = OffloadingConnectorStats()
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, (num_read + num_written) / self._num_rows)
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, num_written / self._num_rows)
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, num_read / self._num_rows)
        for count in self._allocations:
            stats.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, count)
        self._allocations.clear()
        return stats
