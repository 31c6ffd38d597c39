"""The connectors' reports of each request's life and of a step, and the connector with the GPU tier only.

vLLM hands ``kv_transfer_params`` to a KV connector only, so this is one. Metadata that contradicts the prompt is
ignored for that request, counted, and logged the first time, never an error: it distorts what is kept at most, and
correctness never depends on it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of
from ragcache_core.runtime.environment import RECORD_TRACE_ENV
from ragcache_core.runtime.shared_memory import region_place
from ragcache_core.runtime.trace_recorder import TraceRecorder, lengths_of
from ragcache_core.types import Origin
from ragcache_core.vllm_plugin.build_context import building
from ragcache_core.vllm_plugin.cache.forgetting import OutOfReach
from ragcache_core.vllm_plugin.cache.request_state import arrived_s
from ragcache_core.vllm_plugin.compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    OffloadingConnectorStats,
    connector_of_this_worker,
    kv_bytes_per_block,
)
from ragcache_core.vllm_plugin.connector.adapter_keys import AdapterKeys
from ragcache_core.vllm_plugin.connector.minimal import MinimalConnector
from ragcache_core.vllm_plugin.offload.worker_memory import Rank, WorkerMemory
from ragcache_core.vllm_plugin.server.metrics.prometheus import RAGCachePromMetrics
from ragcache_core.wire import KEY, RequestMetadata, decode_kv_transfer_params, decode_speculation, tile

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.cache.controller import CacheController
    from ragcache_core.vllm_plugin.chunks.audits import AnswerAudits

_LOAD = ("num_pending_prefills", "pending_prefill_s", "has_room")
_PARTS = ("requests", "engine", "offload", "waited_s")


class RAGCacheStats(KVConnectorStats):
    """The statistics of a step.

    ``data`` holds ``requests`` by id, the latest ``engine`` report or None, the data of vLLM's offloading, how long
    each speculation that was admitted has ``waited_s``, with its tenant, and ``num_pending_prefills``, with how long
    they take, and ``has_room`` where they have changed.
    """

    @classmethod
    def of(
        cls,
        *,
        requests: dict[str, Any],
        engine: dict[str, Any] | None,
        offload: KVConnectorStats | None,
        waited_s: Mapping[str, tuple[float, str | None]] | None = None,
        num_pending_prefills: int | None = None,
        pending_prefill_s: float | None = None,
        has_room: bool | None = None,
    ) -> RAGCacheStats:
        """Return the statistics of one step."""
        below = offload.data if offload else None
        return cls(
            data={
                "requests": requests,
                "engine": engine,
                "offload": below,
                "waited_s": dict(waited_s or {}),
                "num_pending_prefills": num_pending_prefills,
                "pending_prefill_s": pending_prefill_s,
                "has_room": has_room,
            }
        )

    def is_empty(self) -> bool:
        has_load = any(self.data.get(part) is not None for part in _LOAD)
        return not (has_load or any(self.data.get(part) for part in _PARTS))

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> RAGCacheStats:
        """Return both as one; ``other`` is later."""
        offload = [OffloadingConnectorStats(data=s.data["offload"]) for s in (self, other) if s.data.get("offload")]
        requests = {**(self.data.get("requests") or {}), **(other.data.get("requests") or {})}
        merged = offload[0].aggregate(offload[1]) if len(offload) == 2 else next(iter(offload), None)
        engine = other.data.get("engine") or self.data.get("engine")
        waited_s = {**(self.data.get("waited_s") or {}), **(other.data.get("waited_s") or {})}
        load = {
            part: self.data.get(part) if (part_value := other.data.get(part)) is None else part_value for part in _LOAD
        }
        return self.of(requests=requests, engine=engine, offload=merged, waited_s=waited_s, **load)

    def reduce(self) -> dict[str, int | float]:
        """Return a line for vLLM's log."""
        offload = self.data.get("offload")
        line: dict[str, int | float] = OffloadingConnectorStats(data=offload).reduce() if offload else {}
        return {**line, "ragcache_requests": len(self.data.get("requests") or {})}


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


logger = logger_of(__name__)


def is_identified_by_tokens(request: Request, *, any_salt: bool = False) -> bool:
    """Return whether equal tokens have equal KV in other requests; with ``any_salt``, in those with the same salt."""
    is_salted = bool(request.cache_salt) and not any_salt
    is_like_others = not (request.lora_request or is_salted or request.mm_features)
    return bool(request.prompt_token_ids) and request.prompt_embeds is None and is_like_others


class DocumentAware:
    """The scheduler side of both connectors: reports each request's life to the controller."""

    controller: CacheController | None = None
    adapter_keys: AdapterKeys
    engine_config: VllmConfig
    _worker_block_bytes: int
    _news: StatsReporter | None = None
    _recorder: TraceRecorder | None = None
    _keeps_weights = False
    audits: AnswerAudits | None = None
    """The audits of approximate answers, with chunk reuse and a bound on their errors."""
    _has_other_connectors = False
    """Whether other connectors store and load beside this one."""

    def _begin(self, controller: CacheController) -> None:
        self.controller = controller
        self.adapter_keys = AdapterKeys(self.engine_config)
        self._news = StatsReporter(controller, lambda: self._stats_below(), lambda: self._num_copies())
        since, _, path = os.environ.get(RECORD_TRACE_ENV, "").partition(":")
        self._recorder = TraceRecorder(path, since_s=float(since)) if path else None

    def shutdown(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        super().shutdown()  # type: ignore[misc]

    def is_audit(self, request: Request) -> bool:
        """Return whether a request is the engine's own, which repeats an answer."""
        return self.audits is not None and self.audits.running is request

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def on_new_request(self, request: Request) -> None:
        """Read the request's documents."""
        assert self.controller is not None
        try:
            metadata = decode_kv_transfer_params(request.kv_transfer_params or {}, request.num_prompt_tokens)
        except ConfigError as error:
            if self.controller.on_ignored_metadata():  # messages hold ids: each would be a new one
                logger.warning(
                    "RC-METADATA-IGNORED: the documents of a request are ignored, those of further ones are counted: "
                    "%s",
                    error,
                )
            speculation = decode_speculation(request.kv_transfer_params or {})  # a guess stays one
            metadata = RequestMetadata(tile([], request.num_prompt_tokens), speculation)
        if not self.controller.settings.speculates:
            metadata = replace(metadata, speculation=None)  # nothing would ever admit it
        tenant = self.controller.tenants.of_salt(request.cache_salt)
        is_tenants_own = self.controller.tenants.is_own_salt(tenant, request.cache_salt)
        is_salted = bool(request.cache_salt) and not is_tenants_own
        self.adapter_keys.separate(request)
        since_s = arrived_s(time.monotonic(), time.time() - request.arrival_time, self.controller.last_step)
        self.controller.on_new_request(
            request.request_id,
            metadata,
            request.block_hashes,
            request.num_prompt_tokens,
            since_s,
            is_salted=is_salted,
            tenant=tenant,
            is_audit=self.is_audit(request),
        )
        if self._recorder is not None and not metadata.is_prefill and not self.is_audit(request):
            self._recorder.begin(request.request_id, request.arrival_time)
        if is_identified_by_tokens(request, any_salt=is_tenants_own) and not self.is_audit(request):
            self.controller.paths_of(tenant).track(request.prompt_token_ids, metadata.segments, request.block_hashes)
        self._limit_storing(request)
        super().on_new_request(request)  # type: ignore[misc]
        self._read(request, metadata)

    def prefetch(self, request: Request) -> bool:
        """Begin to prefetch a prompt from disk; return whether there is anything to read."""
        return False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self.controller is not None
        self.controller.on_looked_up(request.request_id, num_computed_tokens)
        return self._match_below(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert self.controller is not None
        num_by_tier = self._load(request, blocks, num_external_tokens)
        self.controller.on_admitted(request.request_id, request.block_hashes, num_by_tier, time.monotonic())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))  # what vLLM calls beside one for single groups

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finish(request, self._finish_below(request, block_ids))

    def reset_cache(self) -> bool | None:
        self._on_reset()
        return True

    @contextmanager
    def keeping_weights(self) -> Iterator[None]:
        """Inside, a reset of the caches does not change the weights."""
        self._keeps_weights = True
        try:
            yield
        finally:
            self._keeps_weights = False

    def forget_weights(self) -> None:
        """Delete all KV that outlives a reset, and keep none from now on, as the weights may change."""

    def run_alongside(self, others: Sequence[str]) -> None:
        """Record that other connectors store and load too; ``others`` may keep deleted KV."""
        assert self.controller is not None
        self._has_other_connectors = True
        if others:
            why = f"{', '.join(others)} beside RAGCache may keep KV of its own: delete it there"
            self.controller.forgetting.add_holder(OutOfReach(why))

    def stop_reporting(self) -> None:
        """Stop sending statistics with steps."""
        self._news = None

    def _on_reset(self) -> None:
        if not self._keeps_weights:
            self.forget_weights()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the statistics for the server's process."""
        return None if self._news is None else self._news.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return RAGCacheStats() if data is None else RAGCacheStats(data=data)

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KVConnectorPromMetrics:
        return RAGCachePromMetrics(*args, **kwargs)

    # Between the sides, before the first request

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this worker's memory layout; ``None`` with other connectors, as vLLM takes only one's."""
        if connector_of_this_worker() not in (None, self):
            return None
        assert self.engine_config.kv_transfer_config is not None
        region = region_place(str(self.engine_config.kv_transfer_config.engine_id))
        return WorkerMemory(self._worker_block_bytes, region)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Rank, KVConnectorHandshakeMetadata]) -> None:
        """Receive the layout of all workers; unused by the GPU tier."""

    # What differs

    def _read(self, request: Request, metadata: RequestMetadata) -> None:
        """Read a new request's documents; none if they contradict its prompt."""

    def _limit_storing(self, request: Request) -> None:
        """Set how much of a prompt is stored below the GPU."""

    def _match_below(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def _load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> dict[Origin, int]:
        assert num_external_tokens == 0
        return {}

    def _finish_below(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def _stats_below(self) -> KVConnectorStats | None:
        return None

    def _num_copies(self) -> int:
        """Return the number of copies in flight."""
        return 0

    def _finish(
        self, request: Request, outcome: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self.controller is not None
        self._record(request)
        figures = self.controller.on_finished(request.request_id, time.monotonic())
        is_ragcache_request = KEY in (request.kv_transfer_params or {})
        delays, params = outcome
        return delays, {**(params or {}), KEY: figures} if is_ragcache_request and figures is not None else params

    def _record(self, request: Request) -> None:
        """Add an ended request to the trace, unless it was never confirmed."""
        assert self.controller is not None
        if self._recorder is None or (state := self.controller.state_of(request.request_id)) is None:
            return
        if state.is_audit:
            return
        if state.is_speculative:
            self._recorder.drop(request.request_id)
            return
        documents, question_tokens = lengths_of(state.metadata.segments, state.num_prompt_tokens)
        self._recorder.end(request.request_id, documents, question_tokens, request.num_output_tokens)


class DocumentConnector(DocumentAware, MinimalConnector):
    """The connector with the GPU tier only: reads document spans, and moves no KV."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._worker_block_bytes = kv_bytes_per_block(kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            with building(vllm_config, kv_cache_config) as context:
                self._begin(context.make_controller())
