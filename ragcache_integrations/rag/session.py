"""One question on its way to an answer: the speculation for it, and the report of its search."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic

from ragcache_core.client import EngineClient
from ragcache_core.client.pipeline.session import SearchOverlap, SearchSession
from ragcache_core.client.prompts.bound_prompt import BoundPrompt
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.stats import PIPELINE_KEY, STATS_KEY
from ragcache_core.types import Document
from ragcache_integrations.rag.search import Listener, Shown, StartSpeculation


class QuestionSession(SearchSession, Generic[Shown]):
    """A search whose documents one request of the model answers from.

    Args:
        question: the question.
        engine: the engine that answers, if the model has one.
        start_speculation: sends the model's request with a stage's documents; without it the retriever prefills.
        prompt: the prompt that will show the documents.
        timeout_s: the longest that the search may take; by default the retriever's own limit.
        skipped_because: why nothing is sent ahead, if the reason is known.
    """

    def __init__(
        self,
        question: str,
        engine: EngineClient | None = None,
        start_speculation: StartSpeculation[Shown] | None = None,
        *,
        prompt: Callable[[], BoundPrompt | None] | None = None,
        timeout_s: float | None = None,
        skipped_because: str | None = None,
    ) -> None:
        super().__init__()
        self.question = question
        self._ask_ahead = start_speculation
        ahead: StartSpeculation[Shown] | None = None if start_speculation is None else self._start_speculation
        self.overlap = SearchOverlap(engine, ahead, self.take, timeout_s, prompt, skipped_because)

    async def find_at_once(
        self,
        find: Callable[[], Awaitable[Sequence[Shown]]],
        read: Callable[[Sequence[Shown]], Sequence[Document]],
        on_event: Listener,
    ) -> list[Shown]:
        """Return the documents of a retriever of another type, each once; ``read`` gives their text."""
        overlap = self.overlap
        return await self.search_at_once(
            find, read, on_event, timeout_s=overlap.timeout_s, skipped_because=overlap.skipped_because
        )

    def with_report(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metadata of an answer with the report of the search, if the search has ended."""
        if (report := self.pipeline_report()) is None:
            return dict(metadata)
        return {**metadata, STATS_KEY: {**(metadata.get(STATS_KEY) or {}), PIPELINE_KEY: report}}

    def _start_speculation(self, documents: list[Shown]) -> Callable[[], Speculation] | None:
        assert self._ask_ahead is not None
        with self.model_call():
            return self._ask_ahead(documents)
