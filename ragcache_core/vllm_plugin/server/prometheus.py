"""From the scheduler's process to the server's: statistics, ``ragcache_*`` series on ``/metrics``, our routes' data.

vLLM carries a connector's statistics to the server's process with every step. Ours hold what the offloading says, the
figures of requests that ended, a report of the tiers, and what has changed of the documents that are cached.
"""

from __future__ import annotations

from typing import Any

from ragcache_core.vllm_plugin.compat import (
    KVConnectorPromMetrics,
    OffloadPromMetrics,
)
from ragcache_core.vllm_plugin.server.engine_view import received
from ragcache_core.vllm_plugin.server.series import (
    _CHUNK_COUNTERS,
    _CHUNK_GAUGES,
    _COUNTERS,
    _GAUGES,
    _TIER_COUNTERS,
    _TIER_GAUGES,
)
from ragcache_core.vllm_plugin.settings import PluginSettings


class RAGCachePromMetrics(KVConnectorPromMetrics):
    """The ``ragcache_*`` series, beside vLLM's own of the offloading."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        received.begin(PluginSettings.from_extra_config(extra_config), self.observe, min(per_engine_labelvalues))
        self._offload = (
            OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            if "spec_name" in extra_config
            else None
        )
        tiered = [*labelnames, "tier"]
        self._counters = {key: self._counter_cls(name, text, labelnames) for key, (name, text) in _COUNTERS.items()}
        self._gauges = {key: self._gauge_cls(name, text, labelnames) for key, (name, text) in _GAUGES.items()}
        self._tier_counters = {key: self._counter_cls(*of, tiered) for key, of in _TIER_COUNTERS.items()}
        self._tier_gauges = {key: self._gauge_cls(*of, tiered) for key, of in _TIER_GAUGES.items()}
        has_chunks = PluginSettings.from_extra_config(extra_config).chunk_reuse is not None
        counters, gauges = (_CHUNK_COUNTERS, _CHUNK_GAUGES) if has_chunks else ({}, {})
        self._chunk_counters = {key: self._counter_cls(*of, labelnames) for key, of in counters.items()}
        self._chunk_gauges = {key: self._gauge_cls(*of, labelnames) for key, of in gauges.items()}
        self._seen: dict[tuple[int, str, str], int] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if self._offload is not None and transfer_stats_data.get("offload"):
            self._offload.observe(transfer_stats_data["offload"], engine_idx)
        received.add(transfer_stats_data, engine_idx)
        report = transfer_stats_data.get("engine")
        if not report:
            return
        labels = self.per_engine_labelvalues[engine_idx]
        for key, counter in self._counters.items():
            counter.labels(*labels).inc(self._growth(engine_idx, key, "", report[key]))
        for key, gauge in self._gauges.items():
            gauge.labels(*labels).set(report[key])
        for tier in report["tiers"]:
            name = tier["name"]
            for key, counter in self._tier_counters.items():
                counter.labels(*labels, name).inc(self._growth(engine_idx, key, name, tier[key]))
            for key, gauge in self._tier_gauges.items():
                gauge.labels(*labels, name).set(tier[key])
        if chunks := report.get("chunks"):
            for key, counter in self._chunk_counters.items():
                counter.labels(*labels).inc(self._growth(engine_idx, key, "chunks", chunks[key]))
            for key, gauge in self._chunk_gauges.items():
                gauge.labels(*labels).set(chunks[key])

    def _growth(self, engine_index: int, key: str, tier: str, total: int) -> int:
        """Return by how much a total has grown; an engine that was reset counts from zero."""
        before = self._seen.get((engine_index, key, tier), 0)
        self._seen[engine_index, key, tier] = total
        return total - before if total >= before else total
