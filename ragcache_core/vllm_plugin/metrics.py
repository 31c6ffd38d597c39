"""From the scheduler's process to the server's: statistics, ``ragcache_*`` series on ``/metrics``, our routes' data.

vLLM carries a connector's statistics to the server's process with every step. Ours hold what the offloading says, the
figures of requests that ended, a report of the tiers, and what has changed of the documents that are cached.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragcache_core.vllm_plugin.compat import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    OffloadingConnectorStats,
    OffloadPromMetrics,
)
from ragcache_core.vllm_plugin.mirroring import PathFeed
from ragcache_core.vllm_plugin.news import News
from ragcache_core.vllm_plugin.settings import PluginSettings

_MAX_REQUESTS = 10_000
_MAX_ADMITTED = 1024
_COUNTERS = {
    "num_requests": ("ragcache_requests", "Requests that were asked for and admitted."),
    "num_prompt_tokens": ("ragcache_prompt_tokens", "Prompt tokens of these requests."),
    "num_loaded_bytes": ("ragcache_loaded_bytes", "Bytes of KV copied into GPU memory."),
    "num_stored_bytes": ("ragcache_stored_bytes", "Bytes of KV copied out of GPU memory."),
    "num_ignored_metadata": ("ragcache_ignored_metadata", "Requests whose documents contradicted their prompt."),
    "num_corrupt_chunks": ("ragcache_corrupt_chunks", "Chunks on disk with wrong content; each was a miss."),
    "num_lost_chunks": ("ragcache_lost_chunks", "Chunks found cut off, or without their prefix, at the start."),
    "num_dropped_chunks": ("ragcache_dropped_chunks", "Chunks that were not written to disk: it was full or slow."),
    "num_reordered_prompts": ("ragcache_reordered_prompts", "Requests whose documents do not stand as retrieved."),
    "num_reordered_requests": ("ragcache_reordered_requests", "Requests that were served before an earlier one."),
    "num_speculative_requests": ("ragcache_speculative_requests", "Requests that came before anybody asked for them."),
    "num_confirmed_speculations": ("ragcache_confirmed_speculations", "Of those, the ones that were asked for."),
    "num_speculative_tokens": ("ragcache_speculative_tokens", "Prompt tokens computed before anybody asked for them."),
}
_GAUGES = {
    "num_wasted_tokens": ("ragcache_wasted_tokens", "Of those, the ones of requests that ended unasked for."),
    "max_overtaken": ("ragcache_max_overtaken", "The most later requests that were served before a waiting one."),
}
_TIER_COUNTERS = {
    "num_hit_tokens": ("ragcache_tier_hit_tokens", "Prompt tokens that came from a tier."),
    "num_evicted_blocks": ("ragcache_tier_evicted_blocks", "Blocks that a tier gave up."),
}
_TIER_GAUGES = {
    "capacity_bytes": ("ragcache_tier_capacity_bytes", "Size of a tier."),
    "used_bytes": ("ragcache_tier_used_bytes", "Bytes of cached KV in a tier."),
    "is_enabled": ("ragcache_tier_enabled", "Whether a tier works: 1 or 0."),
}
_CHUNK_COUNTERS = {
    "num_requests": ("ragcache_chunk_requests", "Requests that reused documents behind others."),
    "num_refused_requests": ("ragcache_chunk_refused_requests", "Requests that wanted to and could not."),
    "num_reused_chunks": ("ragcache_chunk_reused", "Documents that they reused."),
    "num_reused_tokens": ("ragcache_chunk_reused_tokens", "Tokens of these that were taken as they were stored."),
    "num_recomputed_tokens": ("ragcache_chunk_recomputed_tokens", "Tokens of these that were computed anew."),
    "num_captured_chunks": ("ragcache_chunk_captured", "Documents whose KV was kept for reuse."),
    "num_evicted_chunks": ("ragcache_chunk_evicted", "Of those, the ones that left host memory for others."),
    "num_mismatched_chunks": ("ragcache_chunk_mismatched", "Documents with other tokens than stored."),
    "num_too_long_chunks": ("ragcache_chunk_too_long", "Documents that were longer than the memory."),
    "num_crowded_out_chunks": ("ragcache_chunk_crowded_out", "Documents for which there was no room."),
    "num_dropped_chunks": ("ragcache_chunk_dropped", "Documents that were not written to disk."),
    "num_corrupt_chunks": ("ragcache_chunk_corrupt", "Documents that were damaged or gone on disk; each was a miss."),
    "num_lost_chunks": ("ragcache_chunk_lost", "Documents that were given up for it."),
}
_CHUNK_GAUGES = {
    "num_chunks": ("ragcache_chunk_stored", "Documents that are kept for reuse."),
    "num_variants": ("ragcache_chunk_variants", "KVs of them that were computed behind different ones."),
    "capacity_tokens": ("ragcache_chunk_capacity_tokens", "Tokens that fit into host memory's share for them."),
    "used_tokens": ("ragcache_chunk_used_tokens", "Tokens of it in use."),
    "disk_capacity_tokens": ("ragcache_chunk_disk_capacity_tokens", "Tokens that fit on the disk's share for them."),
    "used_disk_tokens": ("ragcache_chunk_disk_used_tokens", "Tokens of it in use."),
    "is_disk_enabled": ("ragcache_chunk_disk_enabled", "Whether they are kept on disk: 1 or 0."),
}
_LOAD = ("num_pending_prefills", "has_room")
_PARTS = ("requests", "engine", "paths", "offload", "waited_s")


class RAGCacheStats(KVConnectorStats):
    """What a step has to say.

    ``data`` holds ``requests`` by id, the latest ``engine`` report or None, deltas of the cached ``paths`` in order,
    the data of vLLM's offloading, how long each speculation that was admitted has ``waited_s``, and
    ``num_pending_prefills`` and ``has_room`` where they have changed.
    """

    @classmethod
    def of(
        cls,
        *,
        requests: dict[str, Any],
        engine: dict[str, Any] | None,
        offload: KVConnectorStats | None,
        paths: Sequence[dict[str, object]] = (),
        waited_s: Mapping[str, float] | None = None,
        num_pending_prefills: int | None = None,
        has_room: bool | None = None,
    ) -> RAGCacheStats:
        """Return the statistics of one step."""
        below = offload.data if offload else None
        return cls(
            data={
                "requests": requests,
                "engine": engine,
                "paths": list(paths),
                "offload": below,
                "waited_s": dict(waited_s or {}),
                "num_pending_prefills": num_pending_prefills,
                "has_room": has_room,
            }
        )

    def is_empty(self) -> bool:
        is_said = any(self.data.get(part) is not None for part in _LOAD)
        return not (is_said or any(self.data.get(part) for part in _PARTS))

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> RAGCacheStats:
        """Return both as one; ``other`` is the later."""
        offload = [OffloadingConnectorStats(data=s.data["offload"]) for s in (self, other) if s.data.get("offload")]
        requests = {**(self.data.get("requests") or {}), **(other.data.get("requests") or {})}
        merged = offload[0].aggregate(offload[1]) if len(offload) == 2 else next(iter(offload), None)
        engine = other.data.get("engine") or self.data.get("engine")
        paths = [*(self.data.get("paths") or ()), *(other.data.get("paths") or ())]
        waited_s = {**(self.data.get("waited_s") or {}), **(other.data.get("waited_s") or {})}
        load = {part: self.data.get(part) if (said := other.data.get(part)) is None else said for part in _LOAD}
        return self.of(requests=requests, engine=engine, offload=merged, paths=paths, waited_s=waited_s, **load)

    def reduce(self) -> dict[str, int | float]:
        """Return a line for vLLM's log."""
        offload = self.data.get("offload")
        line: dict[str, int | float] = OffloadingConnectorStats(data=offload).reduce() if offload else {}
        return {**line, "ragcache_requests": len(self.data.get("requests") or {})}


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a speculation has waited for room in an engine, which has told that ``num_told`` times.

    It tells when it begins, and whenever it goes on after a pause. Of several engines that have requests of one
    speculation, the first that tells counts.
    """

    engine_index: int
    num_told: int
    waited_s: float


class Received:
    """What the server's process knows of the engines; the newest ``max_requests`` requests.

    ``paths`` are those of the first data-parallel engine: nobody can choose which of them serves a request. ``news``
    wakes those who wait for a request's figures, or for a speculation's wait.
    """

    def __init__(self, max_requests: int = _MAX_REQUESTS) -> None:
        self.paths = PathFeed()
        self.news = News()
        self._max_requests = max_requests
        self._requests: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._engines: dict[int, dict[str, Any]] = {}
        self._before_the_first: dict[str, Any] | None = None
        self._waits: OrderedDict[str, Wait] = OrderedDict()
        self._num_pending: dict[int, int] = {}
        self._has_room: dict[int, bool] = {}
        self._max_prefill_bs = 0
        self._first_engine = 0
        self._observe: Callable[[dict[str, Any], int], None] = self.add
        self._lock = threading.Lock()

    def begin(
        self,
        settings: PluginSettings,
        observe: Callable[[dict[str, Any], int], None] | None = None,
        first_engine: int = 0,
    ) -> None:
        """Have an empty report until the first engine is asked for one, when the server is nearly ready.

        ``observe`` takes in what the first engine says otherwise than with a step, and calls :meth:`add`. One server of
        several may have none but a later engine, which then is its ``first_engine``.
        """
        self._first_engine = first_engine
        if observe is not None:
            self._observe = observe
        zeros = dict.fromkeys([*_COUNTERS, *_GAUGES], 0)
        self._max_prefill_bs = settings.max_prefill_bs
        self._before_the_first = {
            **zeros,
            "policy": settings.policy,
            "num_nodes": 0,
            "tiers": [],
            "hottest_documents": [],
        }

    def tell(self, report: dict[str, Any]) -> None:
        """Take in a report of the first engine that came without a step, because it was asked for or nothing ran."""
        self._observe({"engine": report}, self._first_engine)

    def add(self, data: dict[str, Any], engine_index: int) -> None:
        """Take in the statistics of a step."""
        if engine_index == self._first_engine and data.get("paths"):
            self.paths.add(data["paths"])
        with self._lock:
            if data.get("engine"):
                self._engines[engine_index] = data["engine"]
            if (num_pending := data.get("num_pending_prefills")) is not None:
                self._num_pending[engine_index] = num_pending
            if (has_room := data.get("has_room")) is not None:
                self._has_room[engine_index] = has_room
            for request_id, figures in (data.get("requests") or {}).items():
                self._requests[_response_id(request_id)] = figures
            while len(self._requests) > self._max_requests:
                self._requests.popitem(last=False)
            for speculation, waited_s in (data.get("waited_s") or {}).items():
                before = self._waits.get(speculation, Wait(engine_index, 0, 0.0))
                if before.engine_index == engine_index:
                    self._waits[speculation] = Wait(engine_index, before.num_told + 1, waited_s)
            while len(self._waits) > _MAX_ADMITTED:
                self._waits.popitem(last=False)
        if data.get("requests") or data.get("waited_s"):
            self.news.tell()

    def request(self, response_id: str) -> dict[str, Any] | None:
        """Return the figures of an answered request by the ``id`` of its response.

        Of several prompts in one request, or several answers to it, the first counts.
        """
        with self._lock:
            for candidate in (response_id, f"{response_id}-0", f"0_{response_id}"):
                if (figures := self._requests.get(candidate)) is not None:
                    return figures
        return None

    def wait_of(self, speculation: str, *, after: int = 0) -> Wait | None:
        """Return how long a speculation has waited; None until that was told more than ``after`` times.

        None long afterwards as well.
        """
        with self._lock:
            wait = self._waits.get(speculation)
        return None if wait is None or wait.num_told <= after else wait

    def engine(self) -> dict[str, Any] | None:
        """Return the latest report; of several data-parallel engines, that of the first."""
        with self._lock:
            return self._engines[min(self._engines)] if self._engines else self._before_the_first

    def load(self) -> dict[str, Any] | None:
        """Return how much room there is for speculation, as of the last step; None without RAGCache.

        Of several data-parallel engines all must have room: nobody can choose which of them serves a request. An engine
        that has not said anything is idle.
        """
        with self._lock:
            if self._before_the_first is None:
                return None
            return {
                "num_pending_prefills": sum(self._num_pending.values()),
                "max_prefill_bs": self._max_prefill_bs,
                "is_speculative": self._max_prefill_bs > 0,
                "has_room": self._max_prefill_bs > 0 and all(self._has_room.values()),
            }


received = Received()
"""Of this process: vLLM makes the metrics, and our routes are another plugin, so they meet here."""


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


def _response_id(request_id: str) -> str:
    """Return a request's id without the eight random digits that vLLM adds inside."""
    head, dash, tail = request_id.rpartition("-")
    return head if dash and len(tail) == 8 else request_id
