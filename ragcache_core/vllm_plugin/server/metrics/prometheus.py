"""Statistics from the scheduler's process to the server's: ``ragcache_*`` metrics and the routes' data.

vLLM carries a connector's statistics to the server's process with every step. Ours hold what the offloading says, the
figures of requests that ended, a report of the tiers, and what has changed of the documents that are cached.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from ragcache_core._version import __version__
from ragcache_core.errors import ConfigError, quoted
from ragcache_core.runtime.environment import TENANT_METRICS_ENV
from ragcache_core.stats import (
    CHUNK_KIND_SERIES,
    CHUNK_SERIES,
    ENGINE_SERIES,
    REQUEST_TIMES,
    TENANT_SERIES,
    TENANT_TIER_SERIES,
    TIER_SERIES,
    Series,
)
from ragcache_core.types import Origin
from ragcache_core.vllm_plugin.compat import KVConnectorPromMetrics, OffloadPromMetrics, front_end_of
from ragcache_core.vllm_plugin.release import settings_in_force, unsupported_reason
from ragcache_core.vllm_plugin.server.engine_view import received

MAX_TENANTS = 1000
"""Each has two series, and three for each tier."""
OTHERS = "(others)"
"""No tenant can have this name."""


def num_shown(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of tenants with their own metrics.

    Raises:
        ConfigError: the environment's number cannot work.
    """
    text = environ.get(TENANT_METRICS_ENV) or "0"
    if not text.isdecimal() or int(text) > MAX_TENANTS:
        raise ConfigError(f"{TENANT_METRICS_ENV} is {quoted(text)}: give a number of tenants, {MAX_TENANTS} at most")
    return int(text)


def shown_tenants(report: Mapping[str, Any], num_tenants: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and statistics of tenants with their own metrics, then of all others together."""
    tenants = list(report.get("tenants", {}).items())
    yield from tenants[:num_tenants]
    if others := [figures for _, figures in tenants[num_tenants:]]:
        yield OTHERS, _summed(others)


def _summed(figures: list[dict[str, Any]]) -> dict[str, Any]:
    by_tier = zip(*(each["tiers"] for each in figures), strict=True)
    return {
        **{key: sum(each[key] for each in figures) for key in TENANT_SERIES},
        "tiers": [
            {"name": tiers[0]["name"], **{key: sum(tier[key] for tier in tiers) for key in TENANT_TIER_SERIES}}
            for tiers in by_tier
        ],
    }


_BUILD = ("version", "vllm_version", "policy")
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class RAGCachePromMetrics(KVConnectorPromMetrics):
    """The ``ragcache_*`` metrics, beside vLLM's of the offloading.

    Each of several API servers is told everything; the first shows it, for all of them.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._types = metric_types
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = settings_in_force(extra_config)
        received.begin(settings, self.observe, [*per_engine_labelvalues], vllm_config.scheduler_config.max_num_seqs)
        self._offload = (
            OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            if "spec_name" in extra_config and unsupported_reason() is None
            else None
        )
        reuse = settings.chunk_reuse
        chunks = {} if reuse is None else CHUNK_SERIES
        chunk_kinds = {} if reuse is None or reuse.max_error is None else CHUNK_KIND_SERIES
        self._num_tenants = num_shown()
        tenant, tenant_tier = (TENANT_SERIES, TENANT_TIER_SERIES) if self._num_tenants else ({}, {})
        shown = [
            (ENGINE_SERIES, labelnames),
            (TIER_SERIES, [*labelnames, "tier"]),
            (chunks, labelnames),
            (chunk_kinds, [*labelnames, "kind"]),
            (tenant, [*labelnames, "tenant"]),
            (tenant_tier, [*labelnames, "tenant", "tier"]),
        ]
        index, _ = front_end_of(vllm_config)
        made = (
            {} if index else {key: self._metric(series, labels) for key, series in table.items()}
            for table, labels in shown
        )
        self._engine_series, self._tier_series, self._chunk_series, self._chunk_kind_series, *of_tenants = made
        self._tenant_series, self._tenant_tier_series = of_tenants
        self._request_times = {
            key: metric_types[Histogram](series.name, series.text, [*labelnames, "tier"], buckets=_SECONDS)
            for key, series in ({} if index else REQUEST_TIMES).items()
        }
        self._seen: dict[tuple[int, str, str], int] = {}
        if not index:
            from vllm import __version__ as vllm_version

            build = self._types[Gauge](
                "ragcache_build_info",
                "The releases that run and the cache's policy; always 1",
                [*labelnames, *_BUILD],
                multiprocess_mode="mostrecent",
            )
            for labels in per_engine_labelvalues.values():
                build.labels(*labels, __version__, vllm_version, settings.policy).set(1)

    def _metric(self, series: Series, labels: list[str]) -> Any:
        if series.is_gauge:
            return self._types[Gauge](series.name, series.text, labels, multiprocess_mode="mostrecent")
        return self._types[Counter](series.name, series.text, labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if self._offload is not None and transfer_stats_data.get("offload"):
            self._offload.observe(transfer_stats_data["offload"], engine_idx)
        received.add(transfer_stats_data, engine_idx)
        for request in (transfer_stats_data.get("requests") or {}).values() if self._request_times else ():
            self._observe_times(request, self.per_engine_labelvalues[engine_idx])
        report = transfer_stats_data.get("engine")
        if not report:
            return
        labels = self.per_engine_labelvalues[engine_idx]
        self._show(ENGINE_SERIES, self._engine_series, report, "", labels, engine_idx)
        for tier in report["tiers"]:
            self._show(TIER_SERIES, self._tier_series, tier, tier["name"], [*labels, tier["name"]], engine_idx)
        if chunks := report.get("chunks"):
            self._show(CHUNK_SERIES, self._chunk_series, chunks, "chunks", labels, engine_idx)
            for each in chunks.get("kinds", ()):
                kind = each["kind"]
                of_kind = [*labels, kind]
                self._show(CHUNK_KIND_SERIES, self._chunk_kind_series, each, f"kind {kind}", of_kind, engine_idx)
        if self._num_tenants:
            self._show_tenants(report, labels, engine_idx)

    def _observe_times(self, request: Mapping[str, Any], labels: Sequence[object]) -> None:
        if request["is_speculative"] and not request["is_confirmed"]:
            return
        from_tiers = [origin.label for origin in Origin if request[f"num_{origin.label}_tokens"]]
        for key, histogram in self._request_times.items():
            if (seconds := request[key]) is not None:
                histogram.labels(*labels, from_tiers[-1] if from_tiers else "none").observe(seconds)

    def _show_tenants(self, report: Mapping[str, Any], labels: Sequence[object], engine_idx: int) -> None:
        for name, figures in shown_tenants(report, self._num_tenants):
            part = f"tenant {name}"
            self._show(TENANT_SERIES, self._tenant_series, figures, part, [*labels, name], engine_idx)
            for tier in figures["tiers"]:
                of_tier = [*labels, name, tier["name"]]
                self._show(
                    TENANT_TIER_SERIES, self._tenant_tier_series, tier, f"{part} {tier['name']}", of_tier, engine_idx
                )

    def _show(
        self,
        table: Mapping[str, Series],
        shown: Mapping[str, Any],
        figures: Mapping[str, Any],
        part: str,
        labels: Sequence[object],
        engine_index: int,
    ) -> None:
        for key, metric in shown.items():
            if table[key].is_gauge:
                metric.labels(*labels).set(figures[key])
            else:
                metric.labels(*labels).inc(self._growth(engine_index, key, part, figures[key]))

    def _growth(self, engine_index: int, key: str, part: str, total: int) -> int:
        """Return the increase of a counter; after an engine's reset it counts from zero."""
        before = self._seen.get((engine_index, key, part), 0)
        self._seen[engine_index, key, part] = total
        return total - before if total >= before else total
