"""Embedders of the core as LangChain's ``Embeddings``."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.embeddings import Embeddings

from ragcache_core.retrieval import Embedder, TfidfSvdEmbedder


class CoreEmbeddings(Embeddings):
    """An embedder of the core, for any LangChain vector store."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        rows: list[list[float]] = self._embedder.embed_documents(texts).tolist()
        return rows

    def embed_query(self, text: str) -> list[float]:
        row: list[float] = self._embedder.embed_query(text).tolist()
        return row


class TfidfSvdEmbeddings(CoreEmbeddings):
    """The built-in embedder, TF-IDF and a truncated SVD, fitted on ``texts``: no download, no network.

    :class:`~ragcache_integrations.langchain.vectorstore.StagedFAISS` needs none of it: without an embedding it fits
    the built-in embedder on its own documents and keeps it with them.

    Raises:
        ConfigError: no texts, or fewer than 8 dimensions.
    """

    def __init__(self, texts: Sequence[str], *, dimension: int = 128, seed: int = 0) -> None:
        super().__init__(TfidfSvdEmbedder(dimension, seed=seed).fit(texts))
