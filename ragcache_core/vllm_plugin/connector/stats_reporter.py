"""Statistics of a step for the server's process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ragcache_core.vllm_plugin.connector.step_stats import RAGCacheStats

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.cache.controller import CacheController
    from ragcache_core.vllm_plugin.compat import KVConnectorStats

_REPORT_EVERY_S = 1.0


class StatsReporter:
    """Reports ended requests at once, and tiers at most once a second.

    The statistics of vLLM's offloading are reported with the tiers: its gauges change in each step, and would cost each
    step 0.1 ms in each of the two processes.

    Args:
        controller: the source of the statistics.
        stats_below: returns the offloading's statistics since its last call.
        num_copies: returns how many copies are in flight.
    """

    def __init__(
        self,
        controller: CacheController,
        stats_below: Callable[[], KVConnectorStats | None],
        num_copies: Callable[[], int],
    ) -> None:
        self._controller = controller
        self._stats_below = stats_below
        self._num_copies = num_copies
        self._reported_s = 0.0
        self._reported_copies = 0
        self._reported_load = (0, True)
        """Pending prefills, and whether speculation would be admitted, as the server's process knows them."""

    def take(self) -> RAGCacheStats | None:
        """Return the new statistics, each once."""
        controller = self._controller
        now_s = time.monotonic()
        pending, has_room = load = controller.num_pending_prefills, controller.has_room()
        is_time = now_s - self._reported_s > _REPORT_EVERY_S
        is_report_due = controller.is_idle or is_time
        if not (is_report_due or controller.has_news or load != self._reported_load):
            return None  # as after most steps of an answer: those must cost next to nothing
        report = below = None
        if is_report_due:
            report = controller.take_report()
            num_copies = self._num_copies()  # an engine may step a thousand times a second for nothing but those
            if report is not None or is_time or num_copies != self._reported_copies:
                self._reported_s, self._reported_copies, below = now_s, num_copies, self._stats_below()
        num_reported, reported_room = self._reported_load
        self._reported_load = load
        stats = RAGCacheStats.of(
            requests=controller.take_finished(),
            engine=report,
            offload=below,
            waited_s=controller.speculations.take_waited_s(),
            num_pending_prefills=None if pending == num_reported else pending,
            pending_prefill_s=None if pending == num_reported else controller.pending_prefill_s,
            has_room=None if has_room == reported_room else has_room,
        )
        return None if stats.is_empty() else stats
