"""The built-in embedder finds documents by their words, in corpora of any size."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.errors import StoreCorruptError
from ragcache_core.retrieval import TfidfSvdEmbedder, TrainableEmbedder

from .conftest import make_documents


def best(embedder: TfidfSvdEmbedder, texts: list[str], query: str) -> int:
    return int(np.argmax(embedder.embed_documents(texts) @ embedder.embed_query(query)))


@pytest.mark.parametrize("num_documents", [1, 2, 30, 127, 600])
def test_documents_are_found_by_their_own_words(num_documents: int) -> None:
    texts = [document.text for document in make_documents(num_documents)]
    embedder = TfidfSvdEmbedder(128).fit(texts)
    assert isinstance(embedder, TrainableEmbedder)
    vectors = embedder.embed_documents(texts)
    assert vectors.shape == (num_documents, 128)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    found = int((np.argmax(vectors @ vectors.T, axis=1) == np.arange(num_documents)).sum())
    assert found == num_documents if num_documents < 96 else found > 0.8 * num_documents


def test_a_question_finds_the_document_that_answers_it() -> None:
    texts = [
        "The lighthouse of Varn was built by Osk Tellmar in 1871.",
        "Bread in Halm is baked with rye and caraway.",
        "The tallest tree of the northern forest is a silver fir.",
    ]
    embedder = TfidfSvdEmbedder().fit(texts)
    assert best(embedder, texts, "Who built the lighthouse?") == 0
    assert best(embedder, texts, "What is the bread of Halm baked with?") == 1
    assert best(embedder, texts, "which tree is the tallest") == 2


def test_words_that_came_after_fitting_are_found_and_disturb_nothing() -> None:
    first = [document.text for document in make_documents(40)]
    later = ["A quokka sleeps under the jacaranda.", "Marzipan and nougat from the confectioner."]
    embedder = TfidfSvdEmbedder().fit(first)
    assert best(embedder, [*first, *later], "quokka jacaranda") == 40
    assert best(embedder, [*first, *later], "nougat") == 41
    with_unknown = embedder.embed_documents(first) @ embedder.embed_query(first[3] + " xylograph zeppelin")
    without = embedder.embed_documents(first) @ embedder.embed_query(first[3])
    scale = with_unknown[3] / without[3]
    np.testing.assert_allclose(with_unknown, without * scale, atol=1e-6)


def test_the_same_texts_and_seed_give_the_same_vectors_in_another_process() -> None:
    code = (
        "import sys, threadpoolctl; threadpoolctl.threadpool_limits(1)\n"
        "from ragcache_core.retrieval import TfidfSvdEmbedder\n"
        "from tests.unit.retrieval.conftest import make_documents\n"
        "for num_documents in (20, 600):\n"
        "    texts = [d.text for d in make_documents(num_documents)]\n"
        "    print(TfidfSvdEmbedder(seed=5).fit(texts).embed_documents(texts).tobytes().hex())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PATH": ""},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_what_was_fitted_can_be_saved_and_read_back() -> None:
    texts = [document.text for document in make_documents(30)]
    embedder = TfidfSvdEmbedder(32, seed=7).fit(texts)
    state = embedder.state()
    assert all(array.dtype != object for array in state.values())
    again = TfidfSvdEmbedder.from_state(state)
    assert again.name == embedder.name == "tfidf-svd-32-seed7"
    query = "Who is Person7, the quokka?"
    np.testing.assert_array_equal(again.embed_query(query), embedder.embed_query(query))
    del state["idf"]
    with pytest.raises(StoreCorruptError, match="idf"):
        TfidfSvdEmbedder.from_state(state)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=12), st.text(max_size=40))
def test_any_text_gets_a_finite_vector_of_length_one(texts: list[str], query: str) -> None:
    embedder = TfidfSvdEmbedder(16).fit(texts)
    for vector in (*embedder.embed_documents(texts), embedder.embed_query(query)):
        assert np.isfinite(vector).all()
        length: Any = np.linalg.norm(vector)
        assert length == pytest.approx(1, abs=1e-4) or length == 0
