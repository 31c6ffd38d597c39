"""Answers to the same questions by several methods, each with its own engine and cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ragcache_core.client import Engine
from ragcache_core.client.ordering.document_order import OrderingClient
from ragcache_core.config import CacheConfig
from ragcache_core.quality.answers import Arrange, ScoredAnswer, answers_in_conversations, answers_of, conversations_of
from ragcache_core.quality.methods import Method
from ragcache_core.quality.questions import Question
from ragcache_core.runtime.environment import CPU_KV_CACHE_BYTES_ENV
from ragcache_core.types import Document

_CPU_KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class QualityRun:
    """Questions to a model, and the settings of its engines.

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

    def launch(self, method: Method, directory: Path | None = None) -> Engine:
        """Return the method's engine; its disk tier is in ``directory``."""
        options = dict(self.launch_options or {})
        cache = method.cache(self.sizes)
        if cache is not None and directory is not None:
            cache = cache.model_copy(update={"directory": directory})
        if cache is None:
            kv_bytes = self.sizes.kv_cache_bytes
            options.setdefault("env", {CPU_KV_CACHE_BYTES_ENV: str(_CPU_KV_CACHE_BYTES)})
            options |= {
                "kv_cache_memory_bytes": None if kv_bytes is None else int(kv_bytes),
                "block_size": self.sizes.block_size,
                "enable_prefix_caching": method.caches_prefixes,
            }
        launched: Engine = Engine.launch(self.model, cache=cache, **options)
        return launched

    def answers(
        self, methods: Sequence[Method], *, begin: Callable[[Method], Callable[[int], object]]
    ) -> Iterator[tuple[Method, list[ScoredAnswer]]]:
        """Yield each method and its answers.

        Args:
            methods: the methods, in their order.
            begin: called before each method; returns a function that counts its questions.

        Raises:
            EngineStartError, EngineError, PromptTooLongError
        """
        for method in methods:
            report = begin(method)
            with ExitStack() as stack:
                directory = None
                if method.compression is not None:
                    directory = Path(stack.enter_context(TemporaryDirectory(prefix="ragcache-quality-")))
                    self._store(method, directory)
                engine = stack.enter_context(self.launch(method, directory))
                if method.refers is not None:
                    talks = conversations_of(self.questions)
                    answers = answers_in_conversations(
                        engine, talks, refers=method.refers, max_tokens=self.max_tokens, report=report
                    )
                else:
                    answers = answers_of(
                        engine,
                        self.questions,
                        max_tokens=self.max_tokens,
                        encodes_independently=method.encodes_independently,
                        num_shown=self.num_shown,
                        arrange=self._arrange(engine.integration.ordering, method),
                        report=report,
                    )
            yield method, answers

    def _store(self, method: Method, directory: Path) -> None:
        """Store the documents' KV in ``directory``, by an engine that ends before the one that answers."""
        with self.launch(method, directory) as engine:
            answers_of(engine, self.questions, max_tokens=1, num_shown=self.num_shown)

    def _arrange(self, ordering: OrderingClient, method: Method) -> Arrange | None:
        """Return a function that orders a question's documents; ``None`` for retrieval order."""
        if method.document_order == "retrieval" and method.max_score_loss is None:
            return None

        def arrange(question: Question) -> Sequence[Document]:
            if method.uses_cache:
                ordering.refresh()
            shown = question.documents[: self.num_shown]
            if method.max_score_loss is not None:
                choice = ordering.prefer_cached(
                    [document.doc_id for document in question.documents],
                    question.scores,
                    len(shown),
                    max_score_loss=method.max_score_loss,
                    order=method.document_order,
                    keep_first=False,
                    prefix=None,  # every prompt of the engine has the same
                )
                shown = tuple(question.documents[i] for i in choice.places)
            return ordering.arrange(shown, method.document_order).documents

        return arrange
