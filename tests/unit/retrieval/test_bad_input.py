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
from ragcache_core.retrieval import DocumentStore, MiniLMEmbedder, PrecomputedEmbedder, TfidfSvdEmbedder, as_embedder
from ragcache_core.retrieval.base import IndexOptions
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

BAD_CALLS: dict[str, tuple[Callable[[DocumentStore], object], type[Exception], str]] = {
    "empty text": (lambda s: s.add([new, Document("x", "")]), errors.EmptyDocumentError, "'x' has an empty text"),
    "blank text": (lambda s: s.add([new, Document("x", " \n\t ")]), errors.EmptyDocumentError, "'x' has an empty"),
    "empty id": (lambda s: s.add([new, Document("", "text")]), errors.EmptyDocumentError, "empty id"),
    "binary text": (lambda s: s.add([new, Document("x", "PK\0\3")]), errors.UndecodableDocumentError, "NUL at .* 2"),
    "bytes": (lambda s: s.add([new, Document("x", b"abc")]), errors.UndecodableDocumentError, "bytes as text"),  # type: ignore[arg-type]
    "lone surrogate": (
        lambda s: s.add([new, Document("x", "a\udc80")]),
        errors.UndecodableDocumentError,
        "character 1",
    ),
    "surrogate in id": (lambda s: s.add([new, Document("\ud800", "a")]), errors.UndecodableDocumentError, "surrogate"),
    "id twice in the batch": (
        lambda s: s.add([new, new]),
        errors.DuplicateDocumentError,
        "'new' is in the batch twice",
    ),
    "id in the store": (lambda s: s.add([new, *make_documents(1)]), errors.DuplicateDocumentError, "'doc-0' is in the"),
    "not a document": (lambda s: s.add([new, "text"]), errors.DocumentError, "builtins.str is not a document: pass"),  # type: ignore[list-item]
    "one document to put": (lambda s: s.put(new), errors.DocumentError, "types.Document: put takes a list of doc"),  # type: ignore[arg-type]
    "one document to add": (lambda s: s.add(new), errors.DocumentError, "as add does"),  # type: ignore[arg-type]
    "one text to put": (lambda s: s.put("text"), errors.DocumentError, "builtins.str: put takes a list of documents"),  # type: ignore[arg-type]
    "nothing to put": (lambda s: s.put(None), errors.DocumentError, "NoneType: put takes a list of documents"),  # type: ignore[arg-type]
    "metadata not JSON": (lambda s: s.add([new, Document("x", "a", {"s": {1}})]), errors.DocumentError, "plain JSON"),
    "metadata NaN": (
        lambda s: s.add([new, Document("x", "a", {"s": float("nan")})]),
        errors.DocumentError,
        "plain JSON",
    ),
    "metadata key": (lambda s: s.add([new, Document("x", "a", {1: "b"})]), errors.DocumentError, "key 1 is not a str"),  # type: ignore[dict-item]
    "deep metadata key": (
        lambda s: s.add([new, Document("x", "a", {"b": [{"c": {None: 1}}]})]),
        errors.DocumentError,
        "key None is not a str",
    ),
    "metadata no mapping": (lambda s: s.add([new, Document("x", "a", [1])]), errors.DocumentError, "not a mapping"),  # type: ignore[arg-type]
    "NaN embedding": (
        lambda s: s.add([new, Document("x", "a")], embeddings=[[0] * 128, [float("nan")] * 128]),
        errors.DocumentError,
        "embedding of document 'x' holds NaN",
    ),
    "infinite embedding": (
        lambda s: s.add([new], embeddings=[[float("inf")] * 128]),
        errors.DocumentError,
        "infinity",
    ),
    "huge embedding": (lambda s: s.add([new], embeddings=[[1e30] * 128]), errors.DocumentError, "too large"),
    "embedding of 3": (lambda s: s.add([new], embeddings=[[1, 2, 3]]), errors.EmbedderMismatchError, "3 dimensions"),
    "too few embeddings": (lambda s: s.add([new], embeddings=np.ones((2, 128))), errors.EmbedderMismatchError, "shape"),
    "ragged embeddings": (
        lambda s: s.add([new], embeddings=[[1], [1, 2]]),
        errors.EmbedderMismatchError,
        "not an array",
    ),
    "no batch size": (lambda s: s.add([new], batch_size=0), errors.ConfigError, "batch_size is 0"),
    "unknown id at delete": (lambda s: s.delete(["doc-1", "no"]), errors.UnknownDocumentError, "'no' is not in"),
    "unknown id at get": (lambda s: s.get(["doc-1", "no"]), errors.UnknownDocumentError, "'no' is not in"),
    "surrogate at get": (lambda s: s.get(["\ud800"]), errors.UnknownDocumentError, "is not in"),
    "number at delete": (lambda s: s.delete([7]), errors.UnknownDocumentError, "7 is not in"),  # type: ignore[list-item]
    "empty query": (lambda s: s.search("", 1), errors.SearchError, "ask something"),
    "blank query": (lambda s: s.search(" \n ", 1), errors.SearchError, "ask something"),
    "blank staged query": (lambda s: staged(s, " ", 1), errors.SearchError, "ask something"),
    "query of bytes": (lambda s: s.search(b"a", 1), errors.SearchError, "ask something"),  # type: ignore[arg-type]
    "query with a surrogate": (lambda s: s.search("a\ud800", 1), errors.SearchError, "surrogate"),
    "k of 0": (lambda s: s.search("a", 0), errors.SearchError, "k is 0"),
    "k of -1": (lambda s: staged(s, "a", -1), errors.SearchError, "k is -1"),
    "k of 2.0": (lambda s: s.search("a", 2.0), errors.SearchError, "k is 2.0"),  # type: ignore[arg-type]
    "k checked, too large": (lambda s: s.check_k(21), errors.TooFewDocumentsError, "21 .* holds 20"),
    "stages of 0": (lambda s: staged(s, "a", 2, stages=0), errors.SearchError, "stages is 0"),
    "too many stages": (lambda s: staged(s, "a", 2, stages=10**9), errors.SearchError, "at most 1000"),
    "query vector of 3": (lambda s: s.search_vector([1, 2, 3], 1), errors.SearchError, "3 dimensions, the store 128"),
    "query vector NaN": (lambda s: s.search_vector([float("nan")] * 128, 1), errors.SearchError, "NaN"),
    "query vector empty": (lambda s: s.search_vector([], 1), errors.SearchError, "0 dimensions"),
    "query vectors": (lambda s: s.search_vector(np.ones((2, 128)), 1), errors.SearchError, "one vector"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_one_clear_error_and_nothing_is_lost(store: DocumentStore, folder: Path, case: str) -> None:
    call, error, message = BAD_CALLS[case]
    before, generation = store.search("Person7", 20), store.stats().generation
    with pytest.raises(error, match=message) as raised:
        call(store)
    assert isinstance(raised.value, errors.RAGCacheError)
    assert isinstance(raised.value, ValueError | KeyError)
    assert store.stats().generation == generation
    assert store.search("Person7", 20) == before
    store.close()
    with DocumentStore.open(folder) as again:
        assert again.search("Person7", 20) == before


BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "index is 'tree'": {"index": "tree"},
    "metric is 'cosine'": {"metric": "cosine"},
    "encoding is 'x'": {"encoding": "x"},
    "encoding 'pq' is for index='ivf'": {"index": "hnsw", "encoding": "pq"},
    "nlist is 0": {"nlist": 0},
    "nprobe is -1": {"nprobe": -1},
    "nprobe is True": {"nprobe": True},
    "hnsw_m is 1": {"hnsw_m": 1},
    "ef_search is 0": {"ef_search": 0},
    "ef_construction is 1.5": {"ef_construction": 1.5},
    "str is not an embedding model": {"embedder": "minilm"},
    "TfidfSvdEmbedder is a class": {"embedder": TfidfSvdEmbedder},
}


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_a_bad_setting_is_refused_and_no_folder_is_made(folder: Path, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        DocumentStore.create(folder, **BAD_OPTIONS[message])
    assert not folder.exists()


@pytest.mark.parametrize("dimension", [0, 7, True, 12.5, "128"])
def test_an_impossible_embedder_dimension_is_refused(dimension: Any) -> None:
    with pytest.raises(errors.ConfigError, match="dimension is"):
        TfidfSvdEmbedder(dimension)


def test_a_pq_code_that_does_not_divide_the_dimensions_is_refused_before_anything_is_stored(folder: Path) -> None:
    with DocumentStore.create(folder, encoding="pq", pq_m=7, embedder=PrecomputedEmbedder()) as store:
        with pytest.raises(errors.ConfigError, match=r"pq_m is 7.*16 dimensions"):
            store.add(make_documents(300), embeddings=np.random.default_rng(0).standard_normal((300, 16)))
        assert len(store) == 0
    assert not list(folder.glob("documents-*"))


def test_an_empty_store_says_so_before_it_says_that_k_is_too_large(folder: Path) -> None:
    with DocumentStore.create(folder) as store:
        for call in (
            lambda: store.search("a", 1),
            lambda: staged(store, "a", 5),
            lambda: store.search_vector([1.0] * 128, 1),
        ):
            with pytest.raises(errors.EmptyStoreError, match="add some"):
                call()


def test_a_store_without_an_embedder_says_what_to_do(folder: Path) -> None:
    with DocumentStore.create(folder, embedder=PrecomputedEmbedder()) as store:
        with pytest.raises(errors.ConfigError, match="embeddings="):
            store.add([new])
        store.add([new], embeddings=[[1, 2]])
        with pytest.raises(errors.ConfigError, match="search_vector"):
            store.search("a", 1)


def test_embeddings_for_an_embedder_that_is_not_fitted_are_refused(folder: Path) -> None:
    with DocumentStore.create(folder) as store, pytest.raises(errors.ConfigError, match="PrecomputedEmbedder"):
        store.add([new], embeddings=[[1.0] * 128])


def test_an_embedder_that_changes_its_dimension_is_refused(folder: Path) -> None:
    embedder = ConstantEmbedder(4)
    with DocumentStore.create(folder, embedder=embedder) as store:
        store.add([new])
        embedder.shape = 5
        with pytest.raises(errors.EmbedderMismatchError, match="5 dimensions, the store 4"):
            store.add(make_documents(1))
        with pytest.raises(errors.EmbedderMismatchError, match="5 dimensions, the store 4"):
            store.search("a", 1)
        with pytest.raises(errors.EmbedderMismatchError, match="5 dimensions, the store 4"):
            staged(store, "a", 1)


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 1e300])
def test_an_embedder_that_returns_no_numbers_is_refused(folder: Path, fill: float) -> None:
    embedder = ConstantEmbedder()
    with DocumentStore.create(folder, embedder=embedder) as store:
        store.add([new])
        embedder.fill = fill
        with pytest.raises(errors.DocumentError, match="doc-0"):
            store.add(make_documents(1))
        with pytest.raises(errors.SearchError, match="check the embedder"):
            store.search("a", 1)
        assert store.ids() == ["new"]


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
    for embedder, message in (
        (ConstantEmbedder(), "'tfidf-svd-128', not 'constant'"),
        (TfidfSvdEmbedder(64), "not 'tfidf-svd-64'"),
        (TfidfSvdEmbedder(128).fit(["other texts"]), "fitted on other documents"),
    ):
        with pytest.raises(errors.EmbedderMismatchError, match=message):
            DocumentStore.open(folder, embedder=embedder)
    with DocumentStore.open(folder, embedder=TfidfSvdEmbedder(128)) as again:
        assert again.search("Person7", 1).documents[0].doc_id == "doc-7"


def test_an_embedder_that_is_needed_is_asked_for(folder: Path) -> None:
    with DocumentStore.create(folder, embedder=ConstantEmbedder()) as store:
        store.add([new])
    with pytest.raises(errors.EmbedderMismatchError, match="'constant': pass it"):
        DocumentStore.open(folder)
    wrong = ConstantEmbedder(5)
    wrong.dimension = 5
    with pytest.raises(errors.EmbedderMismatchError, match="5 dimensions.*has 4"):
        DocumentStore.open(folder, embedder=wrong)
    with DocumentStore.open(folder, embedder=ConstantEmbedder()) as store:
        assert store.search("a", 1).documents == (new,)


def test_a_missing_extra_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(errors.ConfigError, match=r"pip install 'ragcache\[minilm\]'"):
        MiniLMEmbedder()


def test_an_object_that_cannot_embed_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="object is not an embedding model"):
        as_embedder(object())


# Paths and handles


def test_a_path_that_is_a_file_is_no_store(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("something")
    with pytest.raises(errors.StoreNotFoundError, match="is a file, not a store"):
        DocumentStore.open(path)
    with pytest.raises(errors.ConfigError, match="is a file: choose a folder"):
        DocumentStore.create(path)
    with pytest.raises(errors.StoreError, match="cannot be written"):
        DocumentStore.create(path / "below")
    assert path.read_text() == "something"


def test_a_folder_without_a_store_is_not_opened_and_stays_empty(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        for read_only in (False, True):
            with pytest.raises(errors.StoreNotFoundError, match="DocumentStore.create"):
                DocumentStore.open(folder, read_only=read_only)
    assert not list(tmp_path.iterdir())


def test_a_store_is_not_made_over_another(store: DocumentStore, folder: Path) -> None:
    with pytest.raises(errors.StoreLockedError):
        DocumentStore.create(folder)
    store.close()
    with pytest.raises(errors.StoreExistsError, match="open it"):
        DocumentStore.create(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(errors.StoreExistsError):
        DocumentStore.create(folder)


def test_two_writers_on_one_store_are_refused_and_readers_are_not(store: DocumentStore, folder: Path) -> None:
    with pytest.raises(errors.StoreLockedError, match="read_only=True"):
        DocumentStore.open(folder)
    with DocumentStore.open(folder, read_only=True) as reader:
        assert len(reader) == 20
        with pytest.raises(errors.StoreError, match="read-only"):
            reader.add([new])
        with pytest.raises(errors.StoreError, match="read-only"):
            reader.delete(["doc-1"])
    store.close()
    DocumentStore.open(folder).close()


def test_a_closed_store_says_so(store: DocumentStore) -> None:
    store.close()
    store.close()
    for call in (
        lambda: store.search("a", 1),
        lambda: store.add([new]),
        lambda: store.delete(["doc-1"]),
        lambda: store.get(["doc-1"]),
        lambda: store.ids(),
        lambda: staged(store, "a", 1),
    ):
        with pytest.raises(errors.StoreError, match="was closed"):
            call()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_one_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(errors.StoreError, match="cannot be written"):
        DocumentStore.create(tmp_path / "store")


def test_options_are_checked_when_they_are_made() -> None:
    with pytest.raises(errors.ConfigError):
        IndexOptions(nlist=-3)
