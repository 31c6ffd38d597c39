"""One question on its way to an answer, in any framework: the result of its search, and the end of its speculation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, aclosing, closing
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ragcache_core.client.engine_client import EngineClient
from ragcache_core.client.pipeline.run import PipelineEvent, PipelineResult, run_pipeline
from ragcache_core.client.pipeline.stages import DEFAULT_TIMEOUT_S
from ragcache_core.client.prompts.bound_prompt import BoundPrompt
from ragcache_core.client.speculation.request_capture import request_scope
from ragcache_core.retrieval.sources import one_stage
from ragcache_core.stats import PipelineReport
from ragcache_core.types import DocId, Document

_Found = TypeVar("_Found")
_Part = TypeVar("_Part")
_Ahead = TypeVar("_Ahead")


@dataclass(frozen=True, slots=True)
class SearchOverlap(Generic[_Ahead]):
    """What the engine does during one search, in place of prefilling the prompt's documents, and who gets its result.

    ``ahead`` asks ``engine`` ahead, with the documents of a stage; without it the retriever does what it always does,
    or nothing where ``skipped_because`` says why. ``on_result`` gets what the search came to, and owns its speculation.
    ``prompt`` is what will show the documents, for an order by what is cached after it; by default the retriever's.
    """

    engine: EngineClient | None
    ahead: _Ahead | None
    on_result: Callable[[PipelineResult], None]
    timeout_s: float | None = None
    prompt: Callable[[], BoundPrompt | None] | None = None
    skipped_because: str | None = None


class SearchSession:
    """What a search came to, once it has; its speculation is ended here unless a request took it over."""

    def __init__(self) -> None:
        self._result: PipelineResult | None = None
        self._settled: PipelineReport | None = None
        self._scope = object()

    def take(self, result: PipelineResult) -> None:
        """Own the result of the search, and its speculation."""
        self._result = result

    def model_call(self) -> AbstractContextManager[None]:
        """Ask the model in this question's scope: the request joins what was sent ahead of it, not of an equal one."""
        return request_scope(self._scope)

    def stream_parts(self, parts: Generator[_Part, None, None]) -> Generator[_Part, None, None]:
        """Yield what ``parts`` does, which asks the model in this question's scope; close them in the end."""
        with closing(parts):
            while True:
                with self.model_call():
                    try:
                        part = next(parts)
                    except StopIteration:
                        return
                yield part

    async def astream_parts(self, parts: AsyncGenerator[_Part, None]) -> AsyncGenerator[_Part, None]:
        """Yield what ``parts`` does, which asks the model in this question's scope; close them in the end."""
        async with aclosing(parts):
            while True:
                with self.model_call():
                    try:
                        part = await anext(parts)
                    except StopAsyncIteration:
                        return
                yield part

    def pipeline_report(self) -> dict[str, Any] | None:
        """Return the report as of now, or as settled, as plain data; ``None`` before the search has ended."""
        if self._result is None:
            return None
        return (self._settled or self._result.settled_report()).to_dict()

    def settle(self) -> PipelineEvent | None:
        """Settle the report: the answer has ended. Return the event that tells of it, once, if there is one."""
        if self._result is None or self._settled is not None:
            return None
        self._settled = self._result.settled_report()
        return self._result.settled(self._settled)

    def close(self) -> None:
        """End the speculation, unless a request took it over. May be called again."""
        if self._result is not None and self._result.speculation is not None:
            self._result.speculation.cancel()

    async def search_at_once(
        self,
        find: Callable[[], Awaitable[Sequence[_Found]]],
        to_core: Callable[[Sequence[_Found]], Sequence[Document]],
        on_event: Callable[[PipelineEvent], Awaitable[None] | None],
        *,
        timeout_s: float | None,
        skipped_because: str | None = None,
    ) -> list[_Found]:
        """Return what a retriever of another make finds, each once: its search is one stage, which hides nothing.

        ``to_core`` gives the documents that it found, in its order.

        Raises:
            SearchTimeoutError: it took longer than ``timeout_s``, by default a minute.
        """
        originals: dict[DocId, _Found] = {}

        async def found() -> Sequence[Document]:
            them = await find()
            documents = to_core(them)
            for document, original in zip(documents, them, strict=True):
                originals.setdefault(document.doc_id, original)
            return documents

        timeout_s = timeout_s or DEFAULT_TIMEOUT_S
        result = await run_pipeline(one_stage(found), None, None, timeout_s=timeout_s, on_event=on_event)
        why = skipped_because or "the retriever has one stage only"
        self.take(replace(result, report=replace(result.report, skipped_because=why)))
        return [originals[document.doc_id] for document in result.documents]
