"""Filters, thresholds and MMR: what a search may find, in every stage of it, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.errors import SearchError
from ragcache_core.retrieval import MMR, DocumentStore, PrecomputedEmbedder
from ragcache_core.retrieval.filters import matches, parse_filter
from ragcache_core.types import Document, RetrievalUpdate
from tests.unit.retrieval.conftest import make_documents

QUESTION = "Who is the baker of Aro?"


def metadata_of(i: int) -> dict[str, Any]:
    """Return metadata with every kind of value; some documents lack some fields."""
    metadata: dict[str, Any] = {"number": i, "town": ["Aro", "Brin", "Colt"][i % 3], "tags": ["a", "b", "c"][: i % 4]}
    if i % 5:
        metadata["share"] = i / 100
    if i % 7 == 0:
        metadata |= {"is_old": i % 2 == 0, "note": None}
    return metadata


METADATA = [metadata_of(i) for i in range(200)]

FILTERS: list[tuple[dict[str, Any], Callable[[Mapping[str, Any]], bool]]] = [
    ({"town": "Aro"}, lambda m: m["town"] == "Aro"),
    ({"town": {"$eq": "Aro"}, "number": {"$lt": 60}}, lambda m: m["town"] == "Aro" and m["number"] < 60),
    ({"number": {"$gte": 20, "$lte": 30}}, lambda m: 20 <= m["number"] <= 30),
    ({"number": {"$gt": 20.5}}, lambda m: m["number"] > 20.5),
    ({"town": ["Aro", "Colt"]}, lambda m: m["town"] in ("Aro", "Colt")),
    ({"town": {"$in": ["Aro"]}}, lambda m: m["town"] == "Aro"),
    ({"town": {"$in": []}}, lambda m: False),
    ({"town": {"$nin": ["Aro", "Colt"]}}, lambda m: m["town"] == "Brin"),
    ({"town": {"$ne": "Aro"}}, lambda m: m["town"] != "Aro"),
    ({"share": {"$lte": 0.5}}, lambda m: "share" in m and m["share"] <= 0.5),
    ({"$not": {"share": {"$lte": 0.5}}}, lambda m: not ("share" in m and m["share"] <= 0.5)),
    ({"share": {"$not": {"$lte": 0.5}}}, lambda m: not ("share" in m and m["share"] <= 0.5)),
    ({"share": None}, lambda m: m.get("share") is None),
    ({"is_old": True}, lambda m: m.get("is_old") is True),
    ({"note": {"$ne": None}}, lambda m: False),
    ({"tags": {"$contains": "b"}}, lambda m: "b" in m["tags"]),
    ({"tags": {"$any": ["c", "x"]}}, lambda m: "c" in m["tags"]),
    ({"tags": {"$all": ["a", "b"]}}, lambda m: {"a", "b"} <= set(m["tags"])),
    ({"tags": {"$eq": ["a", "b"]}}, lambda m: m["tags"] == ["a", "b"]),
    (
        {"$or": [{"town": "Aro"}, {"$and": [{"number": {"$lt": 50}}, {"town": "Colt"}]}]},
        lambda m: m["town"] == "Aro" or (m["number"] < 50 and m["town"] == "Colt"),
    ),
    ({}, lambda m: True),
]


@pytest.fixture(scope="module")
def vectors() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory, vectors: np.ndarray[Any, Any]) -> Iterator[DocumentStore]:
    """A store of 200 vectors in two segments, a few deleted."""
    with DocumentStore.create(tmp_path_factory.mktemp("s"), embedder=PrecomputedEmbedder(), index="flat") as made:
        documents = [Document(f"d{i}", f"text {i}", metadata) for i, metadata in enumerate(METADATA)]
        made.add(documents[:150], embeddings=vectors[:150])
        made.add(documents[150:], embeddings=vectors[150:])
        made.delete(["d3", "d160"])
        yield made


async def stages_of(updates: AsyncGenerator[RetrievalUpdate, None]) -> list[RetrievalUpdate]:
    return [update async for update in updates]


@pytest.mark.parametrize(("written", "meant"), FILTERS, ids=lambda it: str(it) if isinstance(it, dict) else "")
def test_a_filter_finds_what_filtering_everything_finds_in_every_stage(
    written: dict[str, Any],
    meant: Callable[[Mapping[str, Any]], bool],
    numbered: DocumentStore,
    vectors: np.ndarray[Any, Any],
) -> None:
    everything = numbered.search_vector(vectors[5], 198)
    pairs = zip(everything.documents, everything.scores, strict=True)
    expected = [(d.doc_id, score) for d, score in pairs if meant(d.metadata)][:6]
    staged = asyncio.run(stages_of(numbered.search_vector_staged(vectors[5], 6, where=written, stages=4)))
    for update in (numbered.search_vector(vectors[5], 6, where=written), staged[-1]):
        assert [(d.doc_id, s) for d, s in zip(update.documents, update.scores, strict=True)] == expected
    assert all(meant(document.metadata) for update in staged for document in update.documents)
    assert all(matches(parse_filter(written), m) == meant(m) for m in METADATA)


def test_a_filter_that_no_document_can_pass_is_an_error(numbered: DocumentStore, vectors: np.ndarray[Any, Any]) -> None:
    with pytest.raises(SearchError, match="the fields are is_old, note, number, share,"):
        numbered.search_vector(vectors[0], 3, where={"twon": "Aro"})
    filters: list[dict[str, Any]] = [
        *({"$not": {"twon": "Aro"}}, {"number": "17"}, {"town": {"$gte": 3}}, {"is_old": 1}),
        {"number": {"$contains": 1}},
    ]
    for where in filters:
        with pytest.raises(SearchError):
            numbered.search_vector(vectors[0], 3, where=where)
        with pytest.raises(SearchError):
            asyncio.run(stages_of(numbered.search_vector_staged(vectors[0], 3, where=where)))


def test_a_hybrid_search_among_some_documents_ends_as_it_is_asked_at_once(tmp_path: Path) -> None:
    with DocumentStore.create(tmp_path / "s", index="hnsw", word_weight=0.5) as store:
        store.add(make_documents(400))
        for where in ({"town": "Elm"}, {"number": {"$lt": 7}}, {"town": {"$ne": "Aro"}}):
            once = store.search(QUESTION, 5, where=where)
            staged = asyncio.run(stages_of(store.search_staged(QUESTION, 5, where=where, stages=3)))
            assert (staged[-1].documents, staged[-1].scores) == (once.documents, once.scores)
            assert len(once.documents) == 5
            everywhere = store.search(QUESTION, 400)
            ranks = {d.doc_id: score for d, score in zip(everywhere.documents, everywhere.scores, strict=True)}
            assert [ranks[d.doc_id] for d in once.documents] == list(once.scores)


def test_filters_that_differ_only_by_the_kind_of_a_number_are_not_taken_for_each_other(
    numbered: DocumentStore, vectors: np.ndarray[Any, Any]
) -> None:
    assert numbered.search_vector(vectors[0], 3, where={"number": 1}).documents[0].doc_id == "d1"
    with pytest.raises(SearchError, match="it wants true or false"):
        numbered.search_vector(vectors[0], 3, where={"number": True})


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_a_threshold_leaves_out_what_is_not_near_in_every_stage(
    metric: Any, tmp_path: Path, vectors: np.ndarray[Any, Any]
) -> None:
    with DocumentStore.create(tmp_path / "s", embedder=PrecomputedEmbedder(), index="flat", metric=metric) as store:
        store.add([Document(f"d{i}", "text", m) for i, m in enumerate(METADATA)], embeddings=vectors)
        every = store.search_vector(vectors[5], 200)
        threshold = every.scores[3]
        staged = asyncio.run(stages_of(store.search_vector_staged(vectors[5], 9, score_threshold=threshold, stages=4)))
        once = store.search_vector(vectors[5], 9, score_threshold=threshold)
        assert once.documents == staged[-1].documents == every.documents[:4]
        sign = 1 if metric == "l2" else -1
        assert all(sign * score <= sign * threshold for update in staged for score in update.scores)
        with pytest.raises(SearchError, match="score_threshold is 'high'"):
            store.search_vector(vectors[5], 9, score_threshold="high")  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 25), st.integers(1, 12), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_mmr_chooses_as_langchain_does(seed: int, count: int, k: int, lambda_mult: float) -> None:
    langchain = pytest.importorskip("langchain_core.vectorstores.utils")
    rng = np.random.default_rng(seed)
    rows, question = rng.standard_normal((count, 6)), rng.standard_normal(6)
    theirs = langchain.maximal_marginal_relevance(question, rows.tolist(), lambda_mult, k)
    assert MMR(lambda_mult=lambda_mult).choose(question, rows, k) == theirs  # type: ignore[arg-type]
