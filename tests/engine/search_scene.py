"""A slow search over documents that no test has shown before, for answers under way on the real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from uuid import uuid4

from ragcache_core.client import Engine
from ragcache_core.types import Document, RetrievalUpdate
from tests.support.waiting import until

QUESTION = "Who founded it?"


@dataclass
class SlowSource:
    """Finds each of ``found`` in a stage, and waits ``wait_s`` between two stages."""

    found: tuple[tuple[Document, ...], ...]
    wait_s: float = 0.6

    async def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        for number, documents in enumerate(self.found):
            await asyncio.sleep(self.wait_s if number else 0)  # the search that the engine's work is hidden behind
            scores = tuple(map(float, range(len(documents))))
            yield RetrievalUpdate(documents, scores, number, number == len(self.found) - 1)


def documents(count: int = 3) -> tuple[Document, ...]:
    """Return documents that no test has shown before."""
    topic = f"Nalna{uuid4().hex[:8]}"
    facts = "It lies in Memgexdak. It was founded by Jonas Foksan. Its river is the Havmirn. "
    return tuple(Document(f"{topic}-{i}", f"{topic} {i} is a city. {facts * 3}".strip()) for i in range(count))


def is_idle(engine: Engine) -> bool:
    """Return whether no request runs or waits in the engine."""
    stats = engine.stats()
    return stats.num_running == stats.num_waiting == 0


def becomes_idle(engine: Engine) -> bool:
    """Return whether the engine soon has nothing to do."""
    return until(lambda: is_idle(engine), 30.0)
