"""vLLM's statistics of lower tiers, under the names of vLLM's own tiering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_core.vllm_plugin.compat import OffloadingConnectorStats, TieringOffloadingMetrics


@dataclass(slots=True)
class _TierUse:
    """Open jobs, and their rows of host memory."""

    label: tuple[str]
    num_loads: int = 0
    num_stores: int = 0
    num_loading: int = 0
    num_storing: int = 0


class JobStats:
    """Collects the values of vLLM's metrics of lower tiers; gauges are reported on changes.

    Args:
        names: of the lower tiers, the nearest first.
        num_rows: rows of host memory.
        block_bytes: bytes of a block.
    """

    def __init__(self, names: Sequence[str], num_rows: int, block_bytes: int) -> None:
        self._uses = [_TierUse((f"{number}:{name}",)) for number, name in enumerate(names, 1)]
        self._num_rows = num_rows
        self._block_bytes = block_bytes
        self._changed: set[int] = set(range(len(names)))
        self._stats = OffloadingConnectorStats()

    def on_lookup(self, tier: int, num_found: int | None) -> None:
        """Count a look-up with ``num_found`` hits; ``None`` if the tier does not know yet."""
        if num_found is not None:
            self._count(TieringOffloadingMetrics.CHUNK_QUERIES, tier, max(num_found, 1))
            if num_found:
                self._count(TieringOffloadingMetrics.CHUNK_HITS, tier, num_found)

    def on_no_room(self) -> None:
        """Count a load that does not fit into host memory."""
        self._stats.increase_counter(TieringOffloadingMetrics.PROMOTION_ALLOCATION_FAILURES)

    def on_begun(self, tier: int, num_blocks: int, *, is_load: bool) -> None:
        """Count a started job."""
        self._change(tier, 1, num_blocks, is_load=is_load)

    def on_ended(self, tier: int, num_blocks: int, num_copied: int, seconds: float, *, is_load: bool) -> None:
        """Count an ended job: ``num_copied`` copied blocks, in ``seconds``."""
        self._change(tier, -1, -num_blocks, is_load=is_load)
        if num_copied < num_blocks:
            self._count(TieringOffloadingMetrics.PROMOTION_JOB_FAILURES, tier)
        if num_copied:
            names = TieringOffloadingMetrics
            num_bytes, time = (names.READ_BYTES, names.READ_TIME) if is_load else (names.WRITE_BYTES, names.WRITE_TIME)
            self._count(num_bytes, tier, num_copied * self._block_bytes)
            self._count(time, tier, seconds)

    def take(self) -> OffloadingConnectorStats:
        """Return the statistics since the last call."""
        for use in map(self._uses.__getitem__, sorted(self._changed)):
            for name, value in (
                (TieringOffloadingMetrics.PRIMARY_WRITE_USAGE_PERC, use.num_loading / self._num_rows),
                (TieringOffloadingMetrics.PRIMARY_READ_USAGE_PERC, use.num_storing / self._num_rows),
                (TieringOffloadingMetrics.ACTIVE_PROMOTION_JOBS, use.num_loads),
                (TieringOffloadingMetrics.ACTIVE_CASCADE_JOBS, use.num_stores),
            ):
                self._stats.set_gauge(name, value, use.label)
        self._changed.clear()
        taken, self._stats = self._stats, OffloadingConnectorStats()
        return taken

    def _change(self, tier: int, num_jobs: int, num_blocks: int, *, is_load: bool) -> None:
        use = self._uses[tier]
        if is_load:
            use.num_loads += num_jobs
            use.num_loading += num_blocks
        else:
            use.num_stores += num_jobs
            use.num_storing += num_blocks
        self._changed.add(tier)

    def _count(self, name: str, tier: int, value: float = 1) -> None:
        self._stats.increase_counter(name, value, self._uses[tier].label)


def unreported_metrics() -> set[str]:
    """Return vLLM's metrics without a counterpart here: of single look-ups, and of its tiers' detectors."""
    names = TieringOffloadingMetrics
    return {
        *(names.LOOKUP_SYNC_DELAY, names.LOOKUP_ASYNC_DELAY, names.BACKPRESSURE_STORE_LATENCY_EMA),
        *(names.BACKPRESSURE_STORES_DROPPED, names.BACKPRESSURE_BLOCKS_DROPPED),
        getattr(names, "PROMOTION_LATENCY", ""),  # of vLLM 0.33
    }
