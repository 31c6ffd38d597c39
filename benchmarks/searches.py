"""Searches of a chosen length for the pipeline's benchmark: a real index, slowed; candidates that never settle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ragcache_core.retrieval import DocumentStore, PrecomputedEmbedder
from ragcache_core.types import Document, RetrievalUpdate

CUTS = (0.05, 0.15, 0.4, 1.0)
NLIST = 64
_DIMENSION, _CLUSTERS = 64, 200


class DocumentTexts:
    """Documents of about ``num_words`` words out of a corpus; the same for the same number."""

    def __init__(self, corpus: Path, num_words: int) -> None:
        self._words = " ".join(path.read_text(encoding="utf-8") for path in sorted(corpus.glob("*.md"))).split()
        self._num_words = num_words

    def document(self, number: int) -> Document:
        """Return document ``number``, whose text no other one has."""
        start = number * 7919 % len(self._words)
        words = (self._words[start:] + self._words * (1 + self._num_words // len(self._words)))[: self._num_words]
        return Document(f"document-{number}", f"Record {number}. " + " ".join(words))


@dataclass(frozen=True, slots=True)
class Vectors:
    """Clustered vectors for documents, and queries near one of them each: ``[n, dimension] float32``."""

    documents: Any
    queries: Any

    @classmethod
    def draw(cls, num_documents: int, num_queries: int, seed: int) -> Vectors:
        """Return vectors in as many clusters as a topic model would find."""
        rng = np.random.default_rng(seed)
        centres = rng.standard_normal((_CLUSTERS, _DIMENSION))
        documents = centres[rng.integers(_CLUSTERS, size=num_documents)]
        documents = documents + 0.6 * rng.standard_normal(documents.shape)
        near = documents[rng.integers(num_documents, size=num_queries)]
        queries = near + 0.4 * rng.standard_normal(near.shape)
        return cls(documents.astype(np.float32), queries.astype(np.float32))


def make_store(folder: Path, texts: DocumentTexts, vectors: Vectors, share: float) -> DocumentStore:
    """Return an IVF store whose search looks into ``share`` of all lists (RAGCache Table 3, "vector search ratio")."""
    store = DocumentStore.create(
        folder, embedder=PrecomputedEmbedder(_DIMENSION), index="ivf", nlist=NLIST, nprobe=max(1, round(share * NLIST))
    )
    count = len(vectors.documents)
    store.add([texts.document(i) for i in range(count)], embeddings=vectors.documents)
    return store


@dataclass(frozen=True, slots=True)
class SlowedSearch:
    """The real stages of a store, each as late as a search of ``search_s`` seconds would bring it."""

    store: DocumentStore
    queries: Mapping[str, Any]
    search_s: float

    async def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield the store's own stages, slowed."""
        began_s = time.perf_counter()
        cuts = iter(CUTS)
        async with aclosing(self.store.search_vector_staged(self.queries[query], k, stages=CUTS)) as updates:
            async for update in updates:
                cut = 1.0 if update.is_final else next(cuts)
                await asyncio.sleep(max(0.0, began_s + cut * self.search_s - time.perf_counter()))  # a slow index
                yield update


@dataclass(frozen=True, slots=True)
class DrawnSearch:
    """A search whose first stage is wrong and whose second one is right; few documents, in many orders.

    The documents are drawn out of ``num_documents``, the same for the same question.
    """

    texts: DocumentTexts
    num_documents: int
    search_s: float

    async def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield three stages."""
        rng = np.random.default_rng(list(query.encode()))
        wrong, right = ([int(n) for n in rng.choice(self.num_documents, k, replace=False)] for _ in range(2))
        for stage, numbers in enumerate((wrong, right, right)):
            await asyncio.sleep(self.search_s / 3)  # the length of the search is what is chosen
            documents = tuple(self.texts.document(n) for n in numbers)
            yield RetrievalUpdate(documents, tuple(map(float, range(k))), stage, is_final=stage == 2)


@dataclass(frozen=True, slots=True)
class UnsettledSearch:
    """A search each of whose stages names other documents: whatever is speculated is wrong until the end.

    The documents are drawn out of ``num_documents``, the same for the same question. With an ``identity`` what is
    learnt of it is kept.
    """

    texts: DocumentTexts
    num_documents: int
    search_s: float
    identity: str | None = None

    async def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        """Yield stages that have nothing in common."""
        began_s = time.perf_counter()
        rng = np.random.default_rng(list(query.encode()))
        for stage, cut in enumerate(CUTS):
            await asyncio.sleep(max(0.0, began_s + cut * self.search_s - time.perf_counter()))  # likewise
            documents = tuple(self.texts.document(int(n)) for n in rng.choice(self.num_documents, k, replace=False))
            yield RetrievalUpdate(documents, tuple(map(float, range(k))), stage, is_final=cut == CUTS[-1])
