"""A request on its way: what is sent with it, and what is measured of its answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from functools import partial
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.llms.openai.utils import to_openai_message_dicts
from llama_index_instrumentation.span import active_span_id

from ragcache_core.client import EngineClient, RequestPlan
from ragcache_core.client.http.errors import translate_errors_as_openai
from ragcache_core.stats import STATS_KEY, RequestStats
from ragcache_integrations.llamaindex.events import CacheStatsEvent, dispatcher
from ragcache_integrations.llamaindex.response_stats import current_response

_Response = TypeVar("_Response", ChatResponse, CompletionResponse)


class MeasuredRequest:
    """One request; ``body`` is what it adds to what LlamaIndex sends. Made in the span that the request belongs to."""

    def __init__(self, engine: EngineClient, plan: RequestPlan, body: dict[str, Any], model: str) -> None:
        self.body = body
        self._engine = engine
        self._plan = plan
        self._model = model
        self._span_id = active_span_id.get()
        self._response_stats = current_response()
        self._started_s = time.perf_counter()
        self._ttft_s: float | None = None
        self._is_finished = False

    def measured(self, responses: Iterator[_Response]) -> Generator[_Response, None, None]:
        """Yield ``responses``; the last one has the statistics."""
        last: _Response | None = None
        self._started_s = time.perf_counter()  # a stream is asked for when it is read
        with translate_errors_as_openai():
            for last in responses:
                yield self.finish(last) if self._is_end(last) else last
        if last is not None and not self._is_finished:
            yield self.finish(_end_after(last))

    async def ameasured(self, responses: AsyncIterator[_Response]) -> AsyncGenerator[_Response, None]:
        """Yield ``responses``; the last one has the statistics."""
        last: _Response | None = None
        self._started_s = time.perf_counter()
        with translate_errors_as_openai():
            async for last in responses:
                yield await self.afinish(last) if self._is_end(last) else last
        if last is not None and not self._is_finished:
            yield await self.afinish(_end_after(last))

    def finish(self, response: _Response) -> _Response:
        """Return the response with its statistics, which are published too."""
        self._note_tool_calls(response)
        stats, segments = self._stats(response), self._plan.segments
        return self._publish(response, self._engine.integration.stats.complete(stats, _id_of(response), segments))

    async def afinish(self, response: _Response) -> _Response:
        """Return the response with its statistics, which are published too."""
        self._note_tool_calls(response)
        stats, segments = self._stats(response), self._plan.segments
        return self._publish(
            response, await self._engine.integration.stats.acomplete(stats, _id_of(response), segments)
        )

    def _note_tool_calls(self, response: ChatResponse | CompletionResponse) -> None:
        """Tell the engine what an agent waits for."""
        if isinstance(response, ChatResponse):
            self._engine.integration.prompts.note_answer(self._plan, partial(self._sent_back, response.message))

    def _sent_back(self, message: ChatMessage) -> dict[str, Any]:
        """Return a message as the next request of its chat holds it."""
        sent: Any = to_openai_message_dicts([message], model=self._model)
        return dict(sent[0])

    def _stats(self, response: _Response) -> RequestStats:
        usage = getattr(response.raw, "usage", None)
        return self._plan.stats(
            None if usage is None else usage.model_dump(),
            ttft_s=self._ttft_s,
            total_s=time.perf_counter() - self._started_s,
        )

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
        """Return whether a response of a stream is its last one; note the time of the first token."""
        if self._ttft_s is None and _has_token(response):
            self._ttft_s = time.perf_counter() - self._started_s
        return getattr(response.raw, "usage", None) is not None and not getattr(response.raw, "choices", None)


def _end_after(last: _Response) -> _Response:
    """Return one more response, for the statistics, where the server ended a stream without token counts."""
    end = last.model_copy(deep=True)
    end.delta = ""
    return end


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
