"""A search whose stages are written down: what it finds when, and how it goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from ragcache_core import Document
from ragcache_core.types import RetrievalUpdate
from ragcache_integrations.langchain import format_documents
from tests.support.scripted_server import ScriptedServer

DOCUMENTS = {
    "sun": Document("sun", "The sun is a star, and every planet goes around it in its own time.", {"page": 3}),
    "moon": Document("moon", "The moon goes around the earth once in a month, and it has no light of its own."),
    "mars": Document("mars", "Mars is red, and two small moons go around it, one of them twice a day."),
}
QUESTION = "What goes around the earth in a month?"
EVENTS_OF_A_CHANGE = [
    ("stage", 0, "mars"),
    ("start", 0, "mars"),
    ("stage", 1, "moon"),
    ("cancel", 0, "mars"),
    ("start", 1, "moon"),
    ("stage", 2, "moon"),
    ("confirm", 2, "moon"),
]
"""What is told of a search that finds ``mars`` first, and then ``moon``."""


@dataclass(frozen=True)
class Stage:
    """Finds ``doc_ids`` as soon as ``once`` holds; or raises ``error`` then. ``scores`` are distances by default."""

    doc_ids: str = ""
    once: Callable[[], bool] = lambda: True
    error: Exception | None = None
    scores: tuple[float, ...] = ()


@dataclass
class ScriptedSource:
    """Finds in stages what is written down, the last one final unless ``is_endless``, and ends ``pause_s`` later."""

    script: tuple[Stage, ...]
    is_endless: bool = False
    asked: list[tuple[str, int]] = field(default_factory=list)
    num_open: int = 0
    pause_s: float = 60.0

    async def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        self.asked.append((query, k))
        self.num_open += 1
        try:
            for number, stage in enumerate(self.script):
                while not stage.once():  # noqa: ASYNC110  (a server's thread makes it true)
                    await asyncio.sleep(0.002)
                if stage.error is not None:
                    raise stage.error
                documents = tuple(DOCUMENTS[doc_id] for doc_id in stage.doc_ids.split())
                is_final = not self.is_endless and number == len(self.script) - 1
                scores = stage.scores or tuple(map(float, range(len(documents))))
                yield RetrievalUpdate(documents, scores, number, is_final)
            await asyncio.sleep(self.pause_s)
        finally:
            self.num_open -= 1


class InTurn:
    """Each search is that of the next source."""

    def __init__(self, *sources: ScriptedSource) -> None:
        self._sources = iter(sources)

    def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        return next(self._sources).stages(query, k)


def once_answered(server: ScriptedServer, events: list[str]) -> Callable[[], bool]:
    """Return what holds once an answer is whole; it notes then that the documents are ``final``."""

    def holds() -> bool:
        if not server.requests or server.num_running:
            return False
        events.append("final")
        return True

    return holds


def expected(*doc_ids: str, question: str = QUESTION) -> str:
    """Return what the scripted server answers about these documents: it repeats the prompt."""
    return f"You said: {format_documents([DOCUMENTS[i] for i in doc_ids])}\n\nQuestion: {question}"
