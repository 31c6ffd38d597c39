"""OpenTelemetry spans of searches, speculations and requests, for applications that have set up its SDK.

They join the trace of whatever span is current, a framework's for example, and the engine's server joins them::

    ragcache.search                     a staged search; gen_ai.operation.name is retrieval
      ragcache.search.stage             from the end of the stage before to its own
      ragcache.speculation              from being sent until the engine has ended it; its outcome
    chat MODEL, text_completion MODEL   a request and its answer
      ragcache.queue                    from its arrival in the engine until it got its blocks
      ragcache.prefill                  from there to its first token; what was loaded is an event of each tier
      llm_request                       vLLM's own, where its server has --otlp-traces-endpoint

Of an answer that was generated ahead the engine's part stands below its speculation. Nothing is imported: an SDK that
was set up has imported the API. No span holds a text or the id of a document.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx

from ragcache_core._version import __version__
from ragcache_core.client.speculation.request_capture import asks_completion
from ragcache_core.stats import RequestStats

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from ragcache_core.client.pipeline.result import PipelineEvent, PipelineResult

SPECULATION_EXTENSION = "ragcache.speculation"
"""Key of a joined response's extensions for the trace of the speculation whose answer it is."""
_NUM_OPEN = 1024
"""Answered requests that wait for their statistics, which an application may never read."""
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]+)"')
_ID_BYTES = 4096
_LAST_EVENT = b"data: [DONE]\n\n"


def tracer() -> Tracer | None:
    """Return the application's tracer; ``None`` where it has not set up an SDK."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None or isinstance(api.get_tracer_provider(), (api.ProxyTracerProvider, api.NoOpTracerProvider)):
        return None
    made: Tracer = api.get_tracer("ragcache", __version__)
    return made


def _parent() -> Any:
    """Return the context that a search or request belongs to; ``None`` is the current one.

    OpenInference keeps the spans of LangChain's runs to itself and makes none of them the current one.
    """
    instrumentation = sys.modules.get("openinference.instrumentation.langchain")
    span = None if instrumentation is None else instrumentation.get_current_span()
    return None if span is None else _context_of(span)


def _context_of(span: Span) -> Any:
    return sys.modules["opentelemetry.trace"].set_span_in_context(span)


def _inject(span: Span, headers: httpx.Headers) -> None:
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier, _context_of(span))
    headers.update(carrier)


def _fail(span: Span, error: type[BaseException]) -> None:
    """End a span with an error's kind: its message may hold what was asked."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", error.__name__)
    span.set_status(Status(StatusCode.ERROR, error.__name__))
    span.end()


class SearchTrace:
    """The span of one search, and those of its stages."""

    def __init__(self, tracer: Tracer, span: Span, began_ns: int) -> None:
        self._tracer, self._span, self._began_ns, self._stage_ns = tracer, span, began_ns, began_ns

    def record_event(self, event: PipelineEvent) -> None:
        """Record what happened during the search; speculations have spans of their own."""
        at_ns = self._began_ns + int(event.search_s * 1e9)
        if event.kind != "stage":
            self._span.add_event(f"ragcache.speculation.{event.kind}", {"ragcache.search.stage": event.stage}, at_ns)
            return
        attributes = {
            "ragcache.search.stage": event.stage,
            "ragcache.search.num_documents": len(event.doc_ids),
            "ragcache.search.is_final": event.is_final,
        }
        stage = self._tracer.start_span(
            "ragcache.search.stage", _context_of(self._span), attributes=attributes, start_time=self._stage_ns
        )
        stage.end(at_ns)
        self._stage_ns = at_ns

    def end(self, result: PipelineResult) -> None:
        """Record what the search came to."""
        report = result.report
        self._span.set_attributes(
            {
                "ragcache.search.num_stages": report.num_stages,
                "ragcache.search.num_documents": len(result.documents),
                "ragcache.search.num_speculations": report.num_started,
                "ragcache.search.num_cancelled_speculations": report.num_cancelled,
                "ragcache.search.is_confirmed": report.is_confirmed,
                "ragcache.search.unhidden_s": report.non_overlapped_search_s,
            }
        )


@contextmanager
def search_span() -> Iterator[SearchTrace | None]:
    """Make a search the current span, in which its stages and speculations are; ``None`` where nothing is traced."""
    if (made_by := tracer()) is None:
        yield None
        return
    from opentelemetry.trace import use_span

    began_ns = time.time_ns()
    attributes = {"gen_ai.operation.name": "retrieval"}
    span = made_by.start_span("ragcache.search", _parent(), attributes=attributes, start_time=began_ns)
    with use_span(span, record_exception=False, set_status_on_exception=False):
        try:
            yield SearchTrace(made_by, span, began_ns)
        except BaseException as error:
            _fail(span, type(error))
            raise
    span.end()


class SpeculationTrace:
    """The span of one speculation, which ends when that has and it is known whether it was right.

    Its methods may be called by any thread, and at most one of them ends it.
    """

    def __init__(self, made_by: Tracer, *, has_documents: bool, can_be_adopted: bool) -> None:
        from opentelemetry.trace import SpanKind

        attributes = {
            "ragcache.speculation.kind": "answer" if can_be_adopted else "prefill",
            "ragcache.speculation.has_documents": has_documents,
        }
        self.began_ns = time.time_ns()
        self.span = made_by.start_span(
            "ragcache.speculation", kind=SpanKind.CLIENT, attributes=attributes, start_time=self.began_ns
        )
        self._lock = threading.Lock()
        self._is_confirmed = self._is_over = False
        self._done_ns: int | None = None

    @classmethod
    def begin(cls, *, has_documents: bool, can_be_adopted: bool) -> SpeculationTrace | None:
        """Return the trace of what is sent now, a part of the current span; ``None`` where nothing is traced."""
        made_by = tracer()
        return None if made_by is None else cls(made_by, has_documents=has_documents, can_be_adopted=can_be_adopted)

    def inject(self, request: httpx.Request) -> None:
        """Let the server join the trace."""
        _inject(self.span, request.headers)

    def admitted(self, waited_s: float) -> None:
        """Record how long it waited in the engine."""
        if not self._is_over:
            self.span.set_attribute("ragcache.queue_s", waited_s)

    def confirmed(self) -> None:
        """It is asked for."""
        with self._lock:
            if not self._is_over and not self._is_confirmed:
                self.span.add_event("ragcache.speculation.confirmed")
                self._is_confirmed = True
        if self._done_ns is not None:
            self._end("confirmed")

    def done(self, error: BaseException | None, *, is_cancelled: bool) -> None:
        """The engine has ended it."""
        self._done_ns = time.time_ns()
        if is_cancelled or error is not None:
            self._end("cancelled" if is_cancelled else "failed")
        elif self._is_confirmed:
            self._end("confirmed")

    def forgotten(self) -> None:
        """No request can join it any more."""
        if self._done_ns is not None:
            self._end("unused")

    def _end(self, outcome: str) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self.span.set_attribute("ragcache.speculation.outcome", outcome)
        self.span.end(self._done_ns)


class RequestTrace:
    """The span of one request, over all the times that it is sent, until its statistics are there."""

    def __init__(self, made_by: Tracer, owner: RequestTraces, request: httpx.Request, began_ns: int) -> None:
        from opentelemetry.trace import SpanKind

        body = _body(request)
        operation = "chat" if "messages" in body else "text_completion"
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": str(body.get("model", "")),
            "gen_ai.request.stream": bool(body.get("stream")),
            "server.address": request.url.host,
        }
        if request.url.port is not None:
            attributes["server.port"] = request.url.port
        for name in ("max_tokens", "temperature", "top_p"):
            if isinstance(body.get(name), int | float):
                attributes[f"gen_ai.request.{name}"] = body[name]
        self._tracer, self._owner, self._began_ns = made_by, owner, began_ns
        self._is_streamed = bool(body.get("stream"))
        self._span = made_by.start_span(
            f"{operation} {body.get('model', '')}",
            _parent(),
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=began_ns,
        )
        self._ahead: SpeculationTrace | None = None
        self._response_id: str | None = None
        self._head = self._tail = b""
        self._first_ns: int | None = None
        self._end_ns: int | None = None
        self._is_over = False

    def inject(self, request: httpx.Request) -> None:
        """Let the server join the trace."""
        _inject(self._span, request.headers)

    def joined(self, ahead: SpeculationTrace | None) -> None:
        """Note that its answer is that of a speculation."""
        self._span.set_attribute("ragcache.speculation.is_joined", True)
        if ahead is not None:
            self._ahead = ahead
            self._span.add_link(ahead.span.get_span_context())

    def read(self, part: bytes) -> None:
        """Note the moment of the first token, the answer's id, by which its statistics are told, and its end."""
        self._tail = (self._tail + part)[-len(_LAST_EVENT) :]
        if self._response_id is not None:
            return
        if self._first_ns is None:
            self._first_ns = time.time_ns()
            if self._is_streamed:
                self._span.add_event("ragcache.first_token", timestamp=self._first_ns)
        if len(self._head) < _ID_BYTES:
            self._head += part
            if (found := _ID.search(self._head)) is not None:
                self._response_id = found[1].decode(errors="replace")
                self._owner.add(self._response_id, self)

    def answered(self) -> None:
        """All of the answer is there; its statistics end the span."""
        self._end_ns = time.time_ns()
        if self._response_id is None:
            self.end()

    def refused(self, status: int) -> None:
        """The server has an error in place of an answer; its text is the caller's."""
        self._span.set_attribute("http.response.status_code", status)
        self.failed(httpx.HTTPStatusError)

    def closed(self) -> None:
        """The reader left: the answer was complete, or the request was cancelled."""
        if self._end_ns is not None or self._is_over:
            return
        if self._tail == _LAST_EVENT:
            self.answered()
        else:
            self._span.set_attribute("ragcache.is_cancelled", True)
            self.end()

    def failed(self, error: type[BaseException]) -> None:
        """It has no answer, or not all of it."""
        if not self._is_over:
            self._is_over = True
            self._owner.drop(self._response_id)
            _fail(self._span, error)

    def complete(self, stats: RequestStats, engine_ttft_s: float | None) -> None:
        """Record the statistics, with the engine's own time to the first token, and end the span."""
        if self._is_over:
            return
        figures = {
            "gen_ai.response.id": self._response_id,
            "gen_ai.usage.input_tokens": stats.num_prompt_tokens,
            "gen_ai.usage.output_tokens": stats.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": stats.num_cached_tokens,
            "ragcache.num_documents": len(stats.documents),
            "ragcache.loaded_bytes": stats.num_loaded_bytes,
            "ragcache.stored_bytes": stats.num_stored_bytes,
            "ragcache.reused_tokens": None if stats.chunk_reuse is None else stats.chunk_reuse.num_reused_tokens,
            "ragcache.num_resumes": stats.num_resumes or None,
            "ragcache.deadline.choice": None if stats.deadline is None else stats.deadline.choice,
        }
        self._span.set_attributes({name: value for name, value in figures.items() if value is not None})
        self._add_phases(stats, engine_ttft_s)
        self.end()

    def _add_phases(self, stats: RequestStats, engine_ttft_s: float | None) -> None:
        """Add what the engine did until the first token, whose moment is known here, by the engine's durations."""
        if stats.queue_s is None or engine_ttft_s is None:
            return
        if self._ahead is not None:
            parent, arrived_ns = self._ahead.span, self._ahead.began_ns
            first_ns = arrived_ns + int(engine_ttft_s * 1e9)
        else:
            parent = self._span
            seen_ns = self._first_ns if self._is_streamed else None
            first_ns = self._began_ns + int(engine_ttft_s * 1e9) if seen_ns is None else seen_ns
            arrived_ns = max(first_ns - int(engine_ttft_s * 1e9), self._began_ns)
        admitted_ns = min(arrived_ns + int(stats.queue_s * 1e9), first_ns)
        context = _context_of(parent)
        self._tracer.start_span("ragcache.queue", context, start_time=arrived_ns).end(admitted_ns)
        attributes = {"ragcache.computed_tokens": stats.num_computed_tokens}
        prefill = self._tracer.start_span("ragcache.prefill", context, attributes=attributes, start_time=admitted_ns)
        for tier in ("gpu", "host", "disk", "shared"):
            if num_tokens := getattr(stats, f"num_{tier}_tokens"):
                prefill.add_event("ragcache.load", {"ragcache.tier": tier, "ragcache.tokens": num_tokens}, admitted_ns)
        prefill.end(first_ns)

    def end(self) -> None:
        """End the span, where the answer did."""
        if not self._is_over:
            self._is_over = True
            self._owner.drop(self._response_id)
            self._span.end(self._end_ns)


@contextmanager
def ended_by_errors(trace: RequestTrace | None) -> Iterator[None]:
    """End a trace with what is raised."""
    try:
        yield
    except BaseException as error:
        if trace is not None:
            trace.failed(type(error))
        raise


class RequestTraces:
    """The traced requests of one engine's handle whose statistics are still to come. May be used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[str, RequestTrace] = OrderedDict()

    def begin(self, request: httpx.Request, began_ns: int, joined: httpx.Response | None) -> RequestTrace | None:
        """Return the trace of a request that is to be sent, or has ``joined`` the answer of a speculation.

        The server joins it where it is sent. ``None`` where nothing is traced.
        """
        if (made_by := tracer()) is None or not asks_completion(request):
            return None
        trace = RequestTrace(made_by, self, request, began_ns)
        if joined is None:
            trace.inject(request)
        else:
            trace.joined(joined.extensions.get(SPECULATION_EXTENSION))
        return trace

    def complete(self, response_id: str | None, stats: RequestStats, engine_ttft_s: float | None) -> None:
        """Record the statistics of an answered request."""
        if self._open and response_id is not None and (trace := self._open.get(response_id)) is not None:
            trace.complete(stats, engine_ttft_s)

    def add(self, response_id: str, trace: RequestTrace) -> None:
        """Keep a request until its statistics are there, or too many others came since."""
        with self._lock:
            self._open[response_id] = trace
            oldest = next(iter(self._open.values())) if len(self._open) > _NUM_OPEN else None
        if oldest is not None:
            oldest.end()

    def drop(self, response_id: str | None) -> None:
        """Let go of a request that has ended."""
        with self._lock:
            self._open.pop(response_id or "", None)


def _body(request: httpx.Request) -> dict[str, Any]:
    try:
        body = json.loads(request.content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
