"""The built-in embedder as LlamaIndex's embedding model: no download, no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr

from ragcache_core.retrieval import TfidfSvdEmbedder


class TfidfSvdEmbedding(BaseEmbedding):
    """TF-IDF and a truncated SVD, fitted on ``texts``, for any index of LlamaIndex.

    ::

        embed_model = TfidfSvdEmbedding([node.get_content() for node in nodes])
        index = VectorStoreIndex(nodes, embed_model=embed_model)

    A :class:`~ragcache_core.retrieval.DocumentStore` needs none of it: it fits the built-in embedder on its own
    documents and keeps it with them.

    Raises:
        ConfigError: no texts, or fewer than 8 dimensions.
    """

    _embedder: TfidfSvdEmbedder = PrivateAttr()

    def __init__(self, texts: Sequence[str], *, dimension: int = 128, seed: int = 0, **kwargs: Any) -> None:
        embedder = TfidfSvdEmbedder(dimension, seed=seed).fit(texts)
        super().__init__(**{"model_name": embedder.name, **kwargs})
        self._embedder = embedder

    @classmethod
    def class_name(cls) -> str:
        return "TfidfSvdEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        row: list[float] = self._embedder.embed_query(query).tolist()
        return row

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_query_embedding(text)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return self._get_query_embedding(text)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        rows: list[list[float]] = self._embedder.embed_documents(texts).tolist()
        return rows

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._get_text_embeddings(texts)
