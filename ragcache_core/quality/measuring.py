"""Answer the same questions in several ways, each with an engine of its own, so that none sees another's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ragcache_core.client import Engine
from ragcache_core.client.ordering.document_order import OrderingClient
from ragcache_core.config import CacheConfig
from ragcache_core.quality.asking import Arrange, AskedAnswer, answers_of
from ragcache_core.quality.conversing import answers_in_conversations, conversations_of
from ragcache_core.quality.questions import Question
from ragcache_core.quality.ways import Way
from ragcache_core.runtime.environment import CPU_KV_CACHE_BYTES_ENV
from ragcache_core.types import Document

_CPU_KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class QualityRun:
    """Which questions are asked of which model, and how its engines are launched.

    ``launch_options`` are those of :meth:`Engine.launch <ragcache_core.client.Engine.launch>`; ``sizes`` are the same
    for every engine, as far as it has what they size. The first ``num_shown`` documents of a question are shown; the
    others may take their places.
    """

    model: str
    questions: Sequence[Question]
    sizes: CacheConfig
    max_tokens: int = 64
    launch_options: dict[str, Any] | None = None
    num_shown: int | None = None

    def launch(self, way: Way) -> Engine:
        """Return the way's engine, ready."""
        options = dict(self.launch_options or {})
        cache = way.cache(self.sizes)
        if cache is None:
            kv_bytes = self.sizes.kv_cache_bytes
            options.setdefault("env", {CPU_KV_CACHE_BYTES_ENV: str(_CPU_KV_CACHE_BYTES)})
            options |= {
                "kv_cache_memory_bytes": None if kv_bytes is None else int(kv_bytes),
                "block_size": self.sizes.block_size,
                "enable_prefix_caching": way.caches_prefixes,
            }
        launched: Engine = Engine.launch(self.model, cache=cache, **options)
        return launched

    def answers(
        self, ways: Sequence[Way], *, begin: Callable[[Way], Callable[[int], object]]
    ) -> Iterator[tuple[Way, list[AskedAnswer]]]:
        """Yield each way's answers, way after way. ``begin`` is told of a way and returns what counts its questions.

        Raises:
            EngineStartError, EngineError, PromptTooLongError
        """
        for way in ways:
            report = begin(way)
            with self.launch(way) as engine:
                if way.refers is not None:
                    talks = conversations_of(self.questions)
                    answers = answers_in_conversations(
                        engine, talks, refers=way.refers, max_tokens=self.max_tokens, report=report
                    )
                else:
                    answers = answers_of(
                        engine,
                        self.questions,
                        max_tokens=self.max_tokens,
                        reads_alone=way.reads_alone,
                        num_shown=self.num_shown,
                        arrange=self._arrange(engine.integration.ordering, way),
                        report=report,
                    )
            yield way, answers

    def _arrange(self, ordering: OrderingClient, way: Way) -> Arrange | None:
        """Return what shows documents as ``way`` does, by what is cached when a question is asked."""
        if way.document_order == "retrieval" and way.max_score_loss is None:
            return None

        def arrange(question: Question) -> Sequence[Document]:
            if way.goes_by_the_cache:
                ordering.refresh()
            shown = question.documents[: self.num_shown]
            if way.max_score_loss is not None:
                choice = ordering.prefer_cached(
                    [document.doc_id for document in question.documents],
                    question.scores,
                    len(shown),
                    max_score_loss=way.max_score_loss,
                    order=way.document_order,
                    keep_first=False,
                    prefix=None,  # every prompt of the engine has the same
                )
                shown = tuple(question.documents[i] for i in choice.places)
            return ordering.arrange(shown, way.document_order).documents

        return arrange
