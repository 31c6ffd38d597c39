"""Each bad input is one clear error of our tree, and nothing already stored is lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcache_core import errors
from ragcache_core.retrieval import DocumentStore, PrecomputedEmbedder, TfidfSvdEmbedder
from ragcache_core.types import Document

from .conftest import make_documents


class ConstantEmbedder:
    """An embedder whose answers can be chosen."""

    name = "constant"

    def __init__(self, dimension: int = 4, fill: float = 1.0) -> None:
        self.dimension: int | None = None
        self.shape = dimension
        self.fill = fill

    def embed_documents(self, texts: Any) -> Any:
        return np.full((len(texts), self.shape), self.fill)

    def embed_query(self, text: str) -> Any:
        return np.full(self.shape, self.fill)


def staged(store: DocumentStore, query: Any, k: Any, **how: Any) -> None:
    async def run() -> None:
        async for _ in store.search_staged(query, k, **how):
            pass

    asyncio.run(run())


new = Document("new", "a new text")

BAD_CALLS: dict[type[Exception], list[Callable[[DocumentStore], object]]] = {
    errors.EmptyDocumentError: [
        lambda s: s.add([new, Document("x", " \n\t ")]),
        lambda s: s.add([new, Document("", "text")]),
    ],
    errors.UndecodableDocumentError: [
        lambda s: s.add([new, Document("x", "PK\0\3")]),
        lambda s: s.add([new, Document("x", b"abc")]),  # type: ignore[arg-type]
        lambda s: s.add([new, Document("x", "a\udc80")]),
        lambda s: s.add([new, Document("\ud800", "a")]),
    ],
    errors.DuplicateDocumentError: [lambda s: s.add([new, new]), lambda s: s.add([new, *make_documents(1)])],
    errors.DocumentError: [
        lambda s: s.add([new, "text"]),  # type: ignore[list-item]
        lambda s: s.put(new),  # type: ignore[arg-type]
        lambda s: s.put("text"),  # type: ignore[arg-type]
        lambda s: s.put(None),  # type: ignore[arg-type]
        lambda s: s.add([new, Document("x", "a", {"s": {1}})]),
        lambda s: s.add([new, Document("x", "a", {"s": float("nan")})]),
        lambda s: s.add([new, Document("x", "a", {"b": [{"c": {None: 1}}]})]),
        lambda s: s.add([new, Document("x", "a", [1])]),  # type: ignore[arg-type]
        lambda s: s.add([new, Document("x", "a")], embeddings=[[0] * 128, [float("nan")] * 128]),
        lambda s: s.add([new], embeddings=[[1e30] * 128]),
    ],
    errors.EmbedderMismatchError: [
        lambda s: s.add([new], embeddings=[[1, 2, 3]]),
        lambda s: s.add([new], embeddings=np.ones((2, 128))),
        lambda s: s.add([new], embeddings=[[1], [1, 2]]),
    ],
    errors.ConfigError: [lambda s: s.add([new], batch_size=0)],
    errors.UnknownDocumentError: [
        lambda s: s.delete(["doc-1", "no"]),
        lambda s: s.get(["doc-1", "\ud800"]),
        lambda s: s.delete([7]),  # type: ignore[list-item]
    ],
    errors.SearchError: [
        lambda s: s.search(" \n ", 1),
        lambda s: staged(s, " ", 1),
        lambda s: s.search(b"a", 1),  # type: ignore[arg-type]
        lambda s: s.search("a\ud800", 1),
        lambda s: s.search("a", 0),
        lambda s: staged(s, "a", -1),
        lambda s: s.search("a", 2.0),  # type: ignore[arg-type]
        lambda s: staged(s, "a", 2, stages=0),
        lambda s: staged(s, "a", 2, stages=10**9),
        lambda s: s.search_vector([1, 2, 3], 1),
        lambda s: s.search_vector([float("nan")] * 128, 1),
        lambda s: s.search_vector(np.ones((2, 128)), 1),
    ],
    errors.TooFewDocumentsError: [lambda s: s.check_k(21)],
}


@pytest.mark.parametrize("error", BAD_CALLS)
def test_a_bad_call_is_an_error_of_its_type_and_nothing_is_lost(
    store: DocumentStore, folder: Path, error: type[Exception]
) -> None:
    before, generation = store.search("Person7", 20), store.stats().generation
    for call in BAD_CALLS[error]:
        with pytest.raises(error) as raised:
            call(store)
        assert isinstance(raised.value, errors.RAGCacheError)
        assert isinstance(raised.value, ValueError | KeyError)
        assert store.stats().generation == generation
    store.close()
    with DocumentStore.open(folder) as again:
        assert again.search("Person7", 20) == before


def test_a_bad_setting_is_refused_and_no_folder_is_made(folder: Path) -> None:
    bad: list[dict[str, Any]] = [
        *({"index": "tree"}, {"metric": "cosine"}, {"encoding": "x"}, {"index": "hnsw", "encoding": "pq"}),
        *({"nlist": 0}, {"nprobe": True}, {"hnsw_m": 1}, {"ef_construction": 1.5}),
        *({"embedder": "minilm"}, {"embedder": TfidfSvdEmbedder}),
        *({"word_weight": weight} for weight in (-0.1, 1.5, "all", True, float("nan"))),
    ]
    for settings in bad:
        with pytest.raises(errors.ConfigError):
            DocumentStore.create(folder, **settings)
    assert not folder.exists()
    for dimension in (7, True, "128"):
        with pytest.raises(errors.ConfigError):
            TfidfSvdEmbedder(dimension)  # type: ignore[arg-type]


def test_a_pq_code_that_does_not_divide_the_dimensions_is_refused_before_anything_is_stored(folder: Path) -> None:
    with DocumentStore.create(folder, encoding="pq", pq_m=7, embedder=PrecomputedEmbedder()) as store:
        with pytest.raises(errors.ConfigError):
            store.add(make_documents(300), embeddings=np.random.default_rng(0).standard_normal((300, 16)))
        assert len(store) == 0
    assert not list(folder.glob("documents-*"))


def test_an_embedder_that_changes_its_dimension_is_refused(folder: Path) -> None:
    embedder = ConstantEmbedder(4)
    with DocumentStore.create(folder, embedder=embedder) as store:
        store.add([new])
        embedder.shape = 5
        with pytest.raises(errors.EmbedderMismatchError):
            store.add(make_documents(1))
        with pytest.raises(errors.EmbedderMismatchError):
            store.search("a", 1)
        with pytest.raises(errors.EmbedderMismatchError):
            staged(store, "a", 1)


def test_an_embedder_that_fails_leaves_the_store_as_it_was(folder: Path) -> None:
    class Failing(ConstantEmbedder):
        def embed_documents(self, texts: Any) -> Any:
            raise ConnectionError("the embedding service is down")

    with DocumentStore.create(folder, embedder=Failing()) as store:
        with pytest.raises(ConnectionError):
            store.add([new])
        assert len(store) == 0


def test_another_embedder_than_the_stores_is_refused(store: DocumentStore, folder: Path) -> None:
    store.close()
    for embedder in (
        ConstantEmbedder(),
        TfidfSvdEmbedder(64),
        TfidfSvdEmbedder(128).fit(["other texts"]),
    ):
        with pytest.raises(errors.EmbedderMismatchError):
            DocumentStore.open(folder, embedder=embedder)
    with DocumentStore.open(folder, embedder=TfidfSvdEmbedder(128)) as again:
        assert again.search("Person7", 1).documents[0].doc_id == "doc-7"


# Paths and handles


def test_a_store_is_not_made_over_another(store: DocumentStore, folder: Path) -> None:
    with pytest.raises(errors.StoreLockedError):
        DocumentStore.create(folder)
    store.close()
    with pytest.raises(errors.StoreExistsError):
        DocumentStore.create(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(errors.StoreExistsError):
        DocumentStore.create(folder)


def test_two_writers_on_one_store_are_refused_and_readers_are_not(store: DocumentStore, folder: Path) -> None:
    with pytest.raises(errors.StoreLockedError):
        DocumentStore.open(folder)
    with DocumentStore.open(folder, read_only=True) as reader:
        assert len(reader) == 20
        with pytest.raises(errors.StoreError):
            reader.add([new])
        with pytest.raises(errors.StoreError):
            reader.delete(["doc-1"])
    store.close()
    DocumentStore.open(folder).close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_one_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(errors.StoreError):
        DocumentStore.create(tmp_path / "store")
