"""A request of the LLM: its streams, the measurements of its answer, and its statistics.

Importing this module is enough for the statistics of a response's requests to be in its metadata, in every query
engine. LlamaIndex's synthesizers return only the text of an answer. Their events mark the begin and end of a synthesis;
requests between the two belong to its response.

LlamaIndex's streaming generators keep the stream of the ``openai`` package in a local variable, and that stream refers
to itself. Left to the garbage collector, a request keeps running in the engine for an unknown time.
:class:`OpenStreams` remembers the streams that a request opened; they are closed with their reader.

LlamaIndex (0.14) also reads the first tool call delta of a chunk only, where vLLM sends a call's name and the beginning
of its arguments as two deltas of one chunk. Here each gets a chunk of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, closing
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.types import TokenAsyncGen, TokenGen
from llama_index.llms.openai.utils import to_openai_message_dicts
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler
from llama_index_instrumentation.events.span import SpanDropEvent
from llama_index_instrumentation.span import active_span_id
from openai import AsyncOpenAI, AsyncStream, OpenAI, Stream

from ragcache_core.client import EngineClient, RequestPlan
from ragcache_core.client.http.errors import translate_errors_as_openai
from ragcache_core.stats import STATS_KEY, RequestStats
from ragcache_integrations.llamaindex.events import CacheStatsEvent, dispatcher
from ragcache_integrations.rag.call import MeasuredCall

_Response = TypeVar("_Response", ChatResponse, CompletionResponse)


class MeasuredRequest(MeasuredCall):
    """One request; ``body`` is added to LlamaIndex's. Create it in the request's instrumentation span."""

    def __init__(self, engine: EngineClient, plan: RequestPlan, body: dict[str, Any], model: str) -> None:
        super().__init__(engine, plan)
        self.body = body
        self._model = model
        self._span_id = active_span_id.get()
        self._response_stats = current_response()
        self._is_finished = False

    def stream(self, responses: Iterator[_Response]) -> Generator[_Response, None, None]:
        """Yield ``responses``; the last one has the statistics."""
        last: _Response | None = None
        self.start_clock()
        with translate_errors_as_openai():
            for last in responses:
                yield self.finish(last) if self._is_end(last) else last
        if last is not None and not self._is_finished:
            yield self.finish(_end_after(last))

    async def astream(self, responses: AsyncIterator[_Response]) -> AsyncGenerator[_Response, None]:
        """Yield ``responses``; the last one has the statistics."""
        last: _Response | None = None
        self.start_clock()
        with translate_errors_as_openai():
            async for last in responses:
                yield await self.afinish(last) if self._is_end(last) else last
        if last is not None and not self._is_finished:
            yield await self.afinish(_end_after(last))

    def finish(self, response: _Response) -> _Response:
        """Return the response with its statistics, which are published too."""
        self._note_answer(response)
        return self._publish(response, self.complete(_usage_of(response), _id_of(response)))

    async def afinish(self, response: _Response) -> _Response:
        """Return the response with its statistics, which are published too."""
        self._note_answer(response)
        return self._publish(response, await self.acomplete(_usage_of(response), _id_of(response)))

    def _note_answer(self, response: ChatResponse | CompletionResponse) -> None:
        if isinstance(response, ChatResponse):
            self.note_tool_calls(partial(self._sent_back, response.message))

    def _sent_back(self, message: ChatMessage) -> dict[str, Any]:
        """Return a message as the chat's next request contains it."""
        sent: Any = to_openai_message_dicts([message], model=self._model)
        return dict(sent[0])

    def _publish(self, response: _Response, stats: RequestStats) -> _Response:
        self._is_finished = True
        response.additional_kwargs[STATS_KEY] = told = stats.to_dict()
        if self._response_stats is not None:
            self._response_stats.add(told)
        if response.raw is not None:  # agents hand on the raw response only
            setattr(response.raw, STATS_KEY, told)
        dispatcher.event(CacheStatsEvent.from_stats(stats, model=self._model, span_id=self._span_id))
        return response

    def _is_end(self, response: _Response) -> bool:
        """Return whether a stream's response is the last one; record the time of the first token."""
        if _has_token(response):
            self.note_token()
        return getattr(response.raw, "usage", None) is not None and not getattr(response.raw, "choices", None)


def _end_after(last: _Response) -> _Response:
    """Return one more response for the statistics, if the server ended a stream without token counts."""
    end = last.model_copy(deep=True)
    end.delta = ""
    return end


def _usage_of(response: ChatResponse | CompletionResponse) -> dict[str, Any] | None:
    usage = getattr(response.raw, "usage", None)
    return None if usage is None else dict(usage.model_dump())


def _id_of(response: ChatResponse | CompletionResponse) -> str | None:
    return getattr(response.raw, "id", None)


def _has_token(response: ChatResponse | CompletionResponse) -> bool:
    choices = getattr(response.raw, "choices", None) or []
    return bool(
        response.delta
        or response.additional_kwargs.get("thinking_delta")
        or any(
            choice.finish_reason or (getattr(choice, "delta", None) and choice.delta.tool_calls) for choice in choices
        )
    )


class OpenStreams:
    """The streams opened by one request."""

    def __init__(self) -> None:
        self._streams: list[Any] = []

    def watch(self, client: OpenAI) -> SimpleNamespace:
        """Return a proxy of ``client`` that records the streams it opens."""
        return _client(client, self._remembering)

    def awatch(self, client: AsyncOpenAI) -> SimpleNamespace:
        """Return a proxy of ``client`` that records the streams it opens."""
        return _client(client, self._aremembering)

    def close(self) -> None:
        """Close the streams, which cancels a running request. Idempotent."""
        while self._streams:
            self._streams.pop().close()

    async def aclose(self) -> None:
        """Close the streams, which cancels a running request. Idempotent."""
        while self._streams:
            await self._streams.pop().close()

    def _remembering(self, create: Callable[..., Any]) -> Callable[..., Any]:
        def created(**body: Any) -> Any:
            answer = create(**body)
            if not isinstance(answer, Stream):
                return answer
            self._streams.append(answer)
            return (part for chunk in answer for part in one_call_each(chunk))

        return created

    def _aremembering(self, create: Callable[..., Any]) -> Callable[..., Any]:
        async def created(**body: Any) -> Any:
            answer = await create(**body)
            if not isinstance(answer, AsyncStream):
                return answer
            self._streams.append(answer)
            return (part async for chunk in answer for part in one_call_each(chunk))

        return created


def one_call_each(chunk: Any) -> Iterator[Any]:
    """Yield a chunk as several with at most one tool call delta each; text in the first, finish in the last.

    A chunk of another answer than the first (``n`` above 1) is left out: LlamaIndex would read both as one text.
    """
    if chunk.choices and chunk.choices[0].index:
        return
    delta = getattr(chunk.choices[0], "delta", None) if chunk.choices else None
    calls = delta.tool_calls if delta is not None else None
    if calls is None or len(calls) < 2:
        yield chunk
        return
    for i, call in enumerate(calls):
        part = chunk.model_copy(deep=True)
        choice = part.choices[0]
        choice.delta.tool_calls = [call]
        if i:
            choice.delta.content = None
        if i < len(calls) - 1:
            choice.finish_reason = None
        yield part


def _client(
    client: OpenAI | AsyncOpenAI, remembering: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> SimpleNamespace:
    return SimpleNamespace(
        chat=SimpleNamespace(completions=SimpleNamespace(create=remembering(client.chat.completions.create))),
        completions=SimpleNamespace(create=remembering(client.completions.create)),
    )


_SUMMED_TIMES = ("total_s", "queue_s")


class ResponseStats:
    """The summed statistics of the requests of one synthesis."""

    def __init__(self, span_id: str | None, outer: ResponseStats | None) -> None:
        self.span_id = span_id
        self.outer = outer
        self._stats: dict[str, Any] = {}
        self._metadata: dict[str, Any] | None = None

    def add(self, stats: Mapping[str, Any]) -> None:
        """Add the statistics of a request; those of a stream arrive after its response was returned."""
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
    """Return the statistics to which a present request belongs; ``None`` outside of a synthesis."""
    return _current.get()


def _sum_of(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum of two requests' statistics; the time to first token is the first one's."""
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
    """Tracks syntheses, which may be nested."""

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
