"""What RAGCache's engine says of a request and of its cache, on two routes beside vLLM's own.

::

    GET /v1/ragcache/requests/{response id}    tokens by tier, bytes moved, times: of a request that was answered
    GET /v1/ragcache/stats                     the policy, the tiers, the hottest documents

Plain vLLM has neither: after a 404 nothing is requested for a minute.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Annotated, Any, get_type_hints
from urllib.parse import quote

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model

from ragcache_core.client.http.network import finish
from ragcache_core.client.http.resume import ResumedAnswers
from ragcache_core.client.server_api import Call, ServerAPI, as_it_is, json_object
from ragcache_core.client.tracing import RequestTraces
from ragcache_core.errors import EngineError, EngineTimeoutError
from ragcache_core.log import logger_of
from ragcache_core.stats import (
    TOKENS_BY_ORIGIN,
    EngineStats,
    RequestStats,
    document_stats,
    fields_merged_by,
    reported_fields,
    vllm_series_of,
)
from ragcache_core.types import DocId, PromptSegment, SegmentKind

_TIMEOUT_S = 2.0
_PAUSE_S = 10.0
"""After a request that was not answered in time none is sent for so long: the engine is busy."""
_UNSUPPORTED_PAUSE_S = 60.0
_RETRYABLE_STATUSES = frozenset((408, 425, 429))

logger = logger_of(__name__)


def metrics_page(response: httpx.Response) -> str:
    """Return the text of ``/metrics``; nothing of it is for tenants."""
    return "" if response.status_code == httpx.codes.FORBIDDEN else response.raise_for_status().text


METRICS = Call("/metrics", metrics_page)
"""The server's own counters."""


def parse_metrics(page: str, *, num_restarts: int = 0) -> EngineStats:
    """Return the engine's statistics from the text of ``/metrics``, summed over data-parallel engines."""
    totals: dict[str, list[float]] = defaultdict(list)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            totals[sample.name].append(sample.value)
    read: dict[str, Any] = {}
    for field, name in vllm_series_of(EngineStats).items():
        read[field] = sum(totals[name]) if field.endswith("_s") else int(sum(totals[name]))
    for field in fields_merged_by("mean", EngineStats):
        of_engines = totals[vllm_series_of(EngineStats)[field]]
        read[field] = sum(of_engines) / len(of_engines) if of_engines else 0.0
    return EngineStats(**read, num_restarts=num_restarts)


def _kv_memory(response: httpx.Response) -> tuple[int, int]:
    page = response.raise_for_status().text
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    (told,) = {sample.name: sample.labels for sample in samples if sample.name == "vllm:cache_config_info"}.values()
    block_size, num_blocks = int(told["block_size"]), int(told["num_gpu_blocks"])
    return block_size, (num_blocks - 1) * block_size  # vLLM keeps one block as "no block"


KV_MEMORY = Call("/metrics", _kv_memory)
"""The block size, and how many tokens fit into the KV memory."""


_OF_A_REQUEST = [*reported_fields(RequestStats), "ttft_s"]


def _read_type(declared: Any) -> Any:
    """Return the type that a reported statistic is read as: a count or a time is 0 or more."""
    if declared == int | None:
        return Annotated[int, Field(ge=0)] | None
    return Annotated[float, Field(ge=0, allow_inf_nan=False)] | None if declared == float | None else declared


_READ: dict[str, Any] = {
    name: (_read_type(kind), None) for name, kind in get_type_hints(RequestStats).items() if name in _OF_A_REQUEST
}


class _Span(BaseModel):
    id: str | None
    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=0)]


_READ["documents"] = list[_Span] | None, None
_READ["epoch"] = str | None, None
_READ["num_prompt_tokens"] = Annotated[int, Field(ge=0)] | None, None
_REQUEST_STATS = create_model("_REQUEST_STATS", **_READ)
"""The engine's answer about one request; what it leaves out is unknown."""
_ENGINE_STATS = TypeAdapter(EngineStats)


class CacheStatsRoutes:
    """Asks one server about requests and about its cache. May be used by any thread and any event loop."""

    def __init__(
        self,
        api: ServerAPI,
        traces: RequestTraces | None = None,
        resumed: ResumedAnswers | None = None,
        on_epoch: Callable[[str | None], object] = lambda _: None,
    ) -> None:
        """``traces``: those of the requests. ``on_epoch`` gets what names the server's registered documents."""
        self._on_epoch = on_epoch
        self._api = api
        self._traces = traces or RequestTraces()
        self._resumed = resumed or ResumedAnswers()
        self._is_there: bool | None = None
        self._paused_until_s = 0.0
        self._retry_at_s = 0.0

    def complete(self, stats: RequestStats, response_id: str | None, doc_ids: Sequence[DocId] = ()) -> RequestStats:
        """Return ``stats`` with the engine's own figures of the answered request, its documents among them.

        Asks once, for two seconds at most. Never fails: where the engine does not say, ``stats`` come back as they are.
        The engine does not name the documents of a request with a salt: ``doc_ids`` are those that the request showed,
        in the order of its prompt.
        """
        return finish(self._complete(stats, response_id, doc_ids, is_blocking=True))

    async def acomplete(
        self, stats: RequestStats, response_id: str | None, doc_ids: Sequence[DocId] = ()
    ) -> RequestStats:
        """Do :meth:`complete` without blocking the event loop."""
        return await self._complete(stats, response_id, doc_ids, is_blocking=False)

    async def _complete(
        self, stats: RequestStats, response_id: str | None, doc_ids: Sequence[DocId], *, is_blocking: bool
    ) -> RequestStats:
        said: httpx.Response | None = None
        if self._may_request(response_id):
            with self._suppress_stats_errors():
                if not self._is_there:
                    call = Call("/v1/ragcache/stats", self._read_stats, timeout=_TIMEOUT_S, is_sent_once=True)
                    await self._api.call_async(call, is_blocking=is_blocking)
                if self._is_there:
                    path = f"/v1/ragcache/requests/{quote(response_id or '', safe='')}"
                    asked = Call(path, as_it_is, timeout=_TIMEOUT_S, is_sent_once=True)
                    said = await self._api.call_async(asked, is_blocking=is_blocking)
        return self._completed(stats, response_id, doc_ids, said)

    def add_to(self, stats: EngineStats) -> EngineStats:
        """Return ``stats`` with what the engine says of its cache; plain vLLM's come back as they are.

        Raises:
            EngineError: the server cannot be asked, or speaks another version's language.
        """
        return finish(self._add_to(stats, is_blocking=True))

    async def aadd_to(self, stats: EngineStats) -> EngineStats:
        """Do :meth:`add_to` without blocking the event loop."""
        return await self._add_to(stats, is_blocking=False)

    async def _add_to(self, stats: EngineStats, *, is_blocking: bool) -> EngineStats:
        if self._is_absent:
            return stats
        figures = await self._api.call_async(Call("/v1/ragcache/stats", self._read_stats), is_blocking=is_blocking)
        return _with_cache(stats, figures)

    def _completed(
        self,
        stats: RequestStats,
        response_id: str | None,
        doc_ids: Sequence[DocId],
        said: httpx.Response | None,
    ) -> RequestStats:
        """Return ``stats`` with what the engine ``said`` of the request, and end its trace, if it has one."""
        ttft_s: float | None = None
        if said is not None:
            with self._suppress_stats_errors():
                read = dict(_REQUEST_STATS.model_validate(json_object(said) or {}))
                ttft_s = read.pop("ttft_s")
                self._on_epoch(read.pop("epoch"))
                stats = _with_figures(stats, read, ttft_s, doc_ids)
        stats = self._resumed.mark(response_id, stats)
        self._traces.complete(response_id, stats, ttft_s)
        return stats

    def _may_request(self, response_id: str | None) -> bool:
        return bool(response_id) and not self._is_absent and time.monotonic() >= self._paused_until_s

    @property
    def _is_absent(self) -> bool:
        """Whether the server had no such route a moment ago; later another server may be there."""
        return self._is_there is False and time.monotonic() < self._retry_at_s

    def _read_stats(self, response: httpx.Response) -> dict[str, object] | None:
        """Return the answer of the stats route, ``None`` if there is no such route; remember which."""
        if response.status_code in _RETRYABLE_STATUSES or response.status_code >= 500:
            response.raise_for_status()
        figures = json_object(response)
        self._is_there = figures is not None
        self._retry_at_s = time.monotonic() + _UNSUPPORTED_PAUSE_S
        return figures

    @contextmanager
    def _suppress_stats_errors(self) -> Iterator[None]:
        """Log every failure: the answer is there already, and must not be lost to its statistics."""
        try:
            yield
        except Exception as error:
            if isinstance(error, EngineTimeoutError):
                self._paused_until_s = time.monotonic() + _PAUSE_S
            logger.debug("no cache statistics for an answer: %s: %s", type(error).__name__, error)


def _with_figures(
    stats: RequestStats, read: dict[str, Any], engine_ttft_s: float | None, doc_ids: Sequence[DocId]
) -> RequestStats:
    spans: list[_Span] = read.pop("documents") or []
    num_prompt_tokens = read.pop("num_prompt_tokens")
    if not stats.num_prompt_tokens and num_prompt_tokens:  # a stream without usage
        stats = replace(stats, num_prompt_tokens=num_prompt_tokens)
    if not stats.num_cached_tokens:  # the usage may lack it, or the answer the usage
        num_served = sum(read[name] or 0 for name in TOKENS_BY_ORIGIN)
        stats = replace(stats, num_cached_tokens=min(num_served, stats.num_prompt_tokens))
    sent = doc_ids if len(doc_ids) == len(spans) else [None] * len(spans)  # else some were not found: which is unknown
    named = ((each, each.id or doc_id) for each, doc_id in zip(spans, sent, strict=True))
    segments = [PromptSegment(SegmentKind.DOCUMENT, each.start, each.end, doc_id) for each, doc_id in named if doc_id]
    stats = replace(stats, documents=document_stats(segments, stats.num_cached_tokens))
    if (reuse := read["chunk_reuse"]) is not None:  # vLLM takes what was computed for it for cached
        num_cached = max(stats.num_cached_tokens - reuse.num_computed_tokens, 0)
        stats = replace(stats, num_cached_tokens=num_cached)
    return replace(stats, **read, ttft_s=engine_ttft_s if stats.ttft_s is None else stats.ttft_s)


def _with_cache(stats: EngineStats, answer: Mapping[str, object] | None) -> EngineStats:
    if answer is None:
        return stats
    said = {name: answer[name] for name in reported_fields(EngineStats) if name in answer}
    for name in reported_fields(EngineStats, required=True):
        said[name] = 0 if answer.get(name) is None else answer[name]  # 0 is of none of their types
    before = {each.name: getattr(stats, each.name) for each in fields(stats)}
    try:
        return _ENGINE_STATS.validate_python({**before, **said})
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise EngineError(
            f"the engine's statistics of its cache cannot be read at {where!r} ({error.errors()[0]['msg']}): install "
            "the same version of ragcache here and there"
        ) from error
