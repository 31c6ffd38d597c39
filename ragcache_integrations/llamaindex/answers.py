"""The use of an answer cache by the LLM: look up, store, and mark cached answers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index_instrumentation.span import active_span_id

from ragcache_core.answers import AnswerCache, parse_question
from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_core.stats import ANSWER_KEY, STATS_KEY
from ragcache_integrations.llamaindex.events import CachedAnswerEvent, dispatcher
from ragcache_integrations.llamaindex.requests import current_response


class CachedChat:
    """The lookup of one chat in an answer cache. Create it in the chat's instrumentation span."""

    def __init__(self, answers: AnswerCache, messages: Sequence[Mapping[str, Any]], settings: object, model: str):
        self._answers = answers
        self._model = model
        self._span_id = active_span_id.get()
        self._response_stats = current_response()
        self._since = answers.now()
        queries = [search.query for search in RETRIEVED.searches() if search.query]
        described = json.dumps(settings, sort_keys=True, default=str)
        self._key = parse_question(messages, described, RETRIEVED.shown(), queries)

    def find(self) -> ChatResponse | None:
        """Return the cached answer, marked and published as cached, if there is one."""
        if (found := self._answers.find(self._key)) is None:
            return None
        mark = {ANSWER_KEY: {"question": found.question, "similarity": found.similarity}}
        if self._response_stats is not None:
            self._response_stats.add(mark)
        dispatcher.event(
            CachedAnswerEvent(
                model=self._model, question=found.question, similarity=found.similarity, span_id=self._span_id
            )
        )
        message = ChatMessage(role=MessageRole.ASSISTANT, content=found.answer)
        return ChatResponse(message=message, delta=found.answer, additional_kwargs={STATS_KEY: mark})

    def keep(self, response: ChatResponse) -> ChatResponse:
        """Store a complete answer if it is a text, and return it."""
        text = response.message.content
        if text and not response.message.additional_kwargs.get("tool_calls"):
            self._answers.keep(self._key, text, since=self._since)
        return response

    def keep_last(self, responses: Iterator[ChatResponse]) -> Generator[ChatResponse, None, None]:
        """Yield the responses of a stream; store the answer if the stream is complete."""
        last = None
        for last in responses:
            yield last
        if last is not None:
            self.keep(last)

    async def akeep_last(self, responses: AsyncIterator[ChatResponse]) -> AsyncGenerator[ChatResponse, None]:
        """Yield the responses of a stream; store the answer if the stream is complete."""
        last = None
        async for last in responses:
            yield last
        if last is not None:
            self.keep(last)


async def just(response: ChatResponse) -> AsyncGenerator[ChatResponse, None]:
    """Yield one response."""
    yield response
