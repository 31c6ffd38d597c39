"""Put the statistics of a response's requests into its metadata, in every query engine: importing this is enough.

LlamaIndex's synthesizers return the text of an answer alone. Their events say when a synthesis begins and ends; the
requests made between the two belong to its response.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, closing
from contextvars import ContextVar
from typing import Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.types import TokenAsyncGen, TokenGen
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler
from llama_index_instrumentation.events.span import SpanDropEvent

from ragcache_core.stats import STATS_KEY

_SUMMED_TIMES = ("total_s", "queue_s")


class ResponseStats:
    """The statistics of the requests of one synthesis, summed."""

    def __init__(self, span_id: str | None, outer: ResponseStats | None) -> None:
        self.span_id = span_id
        self.outer = outer
        self._stats: dict[str, Any] = {}
        self._metadata: dict[str, Any] | None = None

    def add(self, stats: Mapping[str, Any]) -> None:
        """Add the statistics of a request; a stream's arrive after its response was returned."""
        self._stats = _sum_of(self._stats, stats)
        self._put()

    def put_into(self, response: Any) -> None:
        """Put the statistics into the metadata of ``response``, also those of requests made when its stream is read."""
        if response.metadata is None:
            response.metadata = {}
        self._metadata = response.metadata
        self._put()
        if isinstance(response, StreamingResponse):
            response.response_gen = self._read(response.response_gen)
        elif isinstance(response, AsyncStreamingResponse):
            response.response_gen = self._aread(response.response_gen)

    def _read(self, tokens: TokenGen) -> Generator[str, None, None]:
        with closing(tokens):
            while True:
                before = _current.set(self)
                try:
                    token = next(tokens)
                except StopIteration:
                    return
                finally:
                    _current.reset(before)
                yield token

    async def _aread(self, tokens: TokenAsyncGen) -> AsyncGenerator[str, None]:
        async with aclosing(tokens):
            while True:
                before = _current.set(self)
                try:
                    token = await anext(tokens)
                except StopAsyncIteration:
                    return
                finally:
                    _current.reset(before)
                yield token

    def _put(self) -> None:
        if self._metadata is not None and self._stats:
            self._metadata[STATS_KEY] = {**self._metadata.get(STATS_KEY, {}), **self._stats}


_current: ContextVar[ResponseStats | None] = ContextVar("ragcache_response_stats", default=None)


def current_response() -> ResponseStats | None:
    """Return where the statistics of a request made now belong; ``None`` outside of a synthesis."""
    return _current.get()


def _sum_of(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of two requests as those of one; the time to the first token is the first one's."""
    joined = {**then, **first}
    for name, value in then.items():
        before = first.get(name)
        if before is None:
            joined[name] = value
        elif name.startswith("num_") or name in _SUMMED_TIMES:
            joined[name] = before + (value or 0)
        elif isinstance(value, list):
            joined[name] = [*before, *value]
    return joined


class _SynthesisListener(BaseEventHandler):
    """Follows syntheses; one may run inside another."""

    @classmethod
    def class_name(cls) -> str:
        return "RAGCacheSynthesisListener"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, SynthesizeStartEvent):
            _current.set(ResponseStats(event.span_id, _current.get()))
            return
        if not isinstance(event, SynthesizeEndEvent | SpanDropEvent):
            return
        stats = _current.get()
        if stats is not None and stats.span_id == event.span_id:
            _current.set(stats.outer)
            if isinstance(event, SynthesizeEndEvent):
                stats.put_into(event.response)


get_dispatcher().add_event_handler(_SynthesisListener())
