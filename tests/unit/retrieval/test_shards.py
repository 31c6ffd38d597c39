"""Several stores searched as one: the same answer as one store, whichever shard comes first, and nothing left over."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core import errors
from ragcache_core.retrieval import DocumentStore, PrecomputedEmbedder, ShardedStore, TfidfSvdEmbedder
from ragcache_core.retrieval.base import Metric, Stage, Vectors
from ragcache_core.types import Document, RetrievalUpdate

from .conftest import make_documents


class Letters:
    """An embedder that counts letters, and its calls."""

    name = "letters"
    dimension = 26

    def __init__(self) -> None:
        self.num_queries = 0

    def embed_documents(self, texts: list[str]) -> Any:
        return [[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]

    def embed_query(self, text: str) -> Any:
        self.num_queries += 1
        return self.embed_documents([text])[0]


class GatedIndex:
    """An index that answers when its gate is opened, or fails."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.gate = threading.Event()
        self.error: Exception | None = None
        self.is_searching = threading.Event()
        self.is_stopped = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def stages(self, query: Vectors, k: int, cuts: Any, cancel: Any, among: Any = None) -> Iterator[Stage]:
        try:
            self.is_searching.set()
            while not self.gate.is_set() and not cancel.is_cancelled:
                time.sleep(0.001)  # both may end it: no single event to wait for
            if self.error is not None:
                raise self.error
            if not cancel.is_cancelled:
                yield from self.real.stages(query, k, cuts, cancel)
        finally:
            self.is_stopped.set()


Build = Callable[..., DocumentStore]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    with ExitStack() as stack:

        def make(documents: list[Document], *, vectors: Any = None, **options: Any) -> DocumentStore:
            number = len(list(tmp_path.iterdir()))
            store = stack.enter_context(
                DocumentStore.create(tmp_path / f"shard-{number}", **{"index": "flat"} | options)
            )
            store.add(documents, embeddings=vectors)
            return store

        yield make


@pytest.fixture
def gated(build: Build) -> tuple[ShardedStore, list[GatedIndex]]:
    """Three shards of 20, 2 and 30 documents, which wait at their gates."""
    documents = make_documents(52)
    parts = documents[:20], documents[20:22], documents[22:]
    stores = [build(part, embedder=Letters()) for part in parts]
    gates = [GatedIndex(store._snapshot.index) for store in stores]
    for store, gate in zip(stores, gates, strict=True):
        store._snapshot = replace(store._snapshot, index=gate)
    return ShardedStore(stores), gates


async def updates_of(store: Any, query: str, k: int, **options: Any) -> list[RetrievalUpdate]:
    async with aclosing(store.search_staged(query, k, **options)) as updates:
        return [update async for update in updates]


def answer(update: RetrievalUpdate) -> list[tuple[str, float]]:
    return list(zip((d.doc_id for d in update.documents), update.scores, strict=True))


# The answer


@settings(max_examples=30, deadline=None)
@given(data=st.data(), metric=st.sampled_from(["l2", "ip"]))
def test_the_union_of_shards_is_one_store_of_all_documents(data: st.DataObject, metric: Metric) -> None:
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    k = data.draw(st.integers(1, sum(sizes)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    vectors = rng.integers(-2, 3, (sum(sizes), 5)).astype(np.float32)  # full of ties, and exact
    documents = make_documents(sum(sizes))
    query = rng.integers(-2, 3, 5).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def make(name: str, first: int, size: int) -> DocumentStore:
            path = Path(folder) / name
            options: dict[str, Any] = {"embedder": PrecomputedEmbedder(5), "index": "flat", "metric": metric}
            store = stack.enter_context(DocumentStore.create(path, **options))
            store.add(documents[first : first + size], embeddings=vectors[first : first + size])
            return store

        shards = [make(f"shard-{i}", sum(sizes[:i]), size) for i, size in enumerate(sizes)]
        whole = answer(make("whole", 0, sum(sizes)).search_vector(query, k))
        found = answer(ShardedStore(shards).search_vector(query, k))

        async def staged() -> list[RetrievalUpdate]:
            return [update async for update in ShardedStore(shards).search_vector_staged(query, k)]

        *_, last = asyncio.run(staged())
    sign = -1 if metric == "ip" else 1
    assert found == answer(last) == sorted(found, key=lambda pair: (sign * pair[1], pair[0]))
    assert [score for _, score in found] == [score for _, score in whole]
    worst = whole[-1][1]  # several documents may tie for the last places: any of them will do
    assert {pair for pair in found if pair[1] != worst} == {pair for pair in whole if pair[1] != worst}


@pytest.mark.parametrize("index", ["flat", "ivf", "hnsw"])
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_every_kind_of_index_and_a_mix_of_sizes_gives_the_true_scores(build: Build, index: Any, metric: Metric) -> None:
    vectors = np.random.default_rng(3).standard_normal((700, 16)).astype(np.float32)
    documents = make_documents(700)
    options: dict[str, Any] = {"index": index, "metric": metric, "nprobe": 1000, "ef_search": 1000}
    bounds = ((0, 10), (10, 300), (300, 700))
    embedder = PrecomputedEmbedder(16)
    shards = ShardedStore(
        [build(documents[a:b], vectors=vectors[a:b], embedder=embedder, **options) for a, b in bounds]
    )
    for query in vectors[:5] + 0.01:
        products = vectors @ query
        true = products if metric == "ip" else ((vectors - query) ** 2).sum(axis=1)
        order = np.argsort(-true if metric == "ip" else true)[:20]
        update = shards.search_vector(query, 20)
        assert [d.metadata["number"] for d in update.documents] == order.tolist()
        np.testing.assert_allclose(update.scores, true[order], rtol=1e-4)


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(3))))
def test_the_order_of_arrival_does_not_matter(
    gated: tuple[ShardedStore, list[GatedIndex]], arrival: tuple[int, ...]
) -> None:
    shards, gates = gated
    query, k = "the weaver of Dorn", 6
    expected = answer(shards.search(query, k))
    ids = [set(store.ids()) for store in shards.stores]

    async def scenario() -> None:
        present: set[str] = set()
        async with aclosing(shards.search_staged(query, k)) as updates:
            for stage, position in enumerate(arrival):
                gates[position].gate.set()
                update = await anext(updates)
                present |= ids[position]
                assert (update.stage, update.is_final) == (stage, stage == 2)
                assert {d.doc_id for d in update.documents} <= present
                assert len(update.documents) == min(k, len(present))
                known = answer(update)
                assert known == sorted(known, key=lambda pair: (pair[1], pair[0]))
            assert answer(update) == expected
            with pytest.raises(StopAsyncIteration):
                await anext(updates)

    asyncio.run(scenario())


def test_the_shards_own_stages_count_where_stages_are_asked_for(build: Build) -> None:
    documents = make_documents(400)
    stores = [build(documents[:200], embedder=Letters()), build(documents[200:], embedder=Letters())]
    shards = ShardedStore(stores)
    assert len(asyncio.run(updates_of(shards, "the baker of Elm", 3))) == 2
    updates = asyncio.run(updates_of(shards, "the baker of Elm", 3, stages=3))
    assert [u.stage for u in updates] == list(range(6))
    assert [u.is_final for u in updates] == [False] * 5 + [True]
    assert answer(updates[-1]) == answer(shards.search("the baker of Elm", 3))
    with pytest.raises(errors.SearchError, match="stages is 0"):
        asyncio.run(updates_of(shards, "the baker of Elm", 3, stages=0))


def test_a_query_is_embedded_once(build: Build) -> None:
    embedders = [Letters(), Letters(), Letters()]
    shards = ShardedStore([build(make_documents(5, 5 * i), embedder=each) for i, each in enumerate(embedders)])
    shards.search("the baker of Elm", 3)
    asyncio.run(updates_of(shards, "the baker of Elm", 3))
    assert sum(each.num_queries for each in embedders) == 2


def test_a_filter_holds_in_every_shard(build: Build) -> None:
    documents = make_documents(60)
    shards = ShardedStore([build(documents[i::3], embedder=Letters()) for i in range(3)])
    found = shards.search("the baker of Aro", 8, where=lambda document: document.metadata["town"] == "Aro")
    assert len(found.documents) == 8
    assert {d.metadata["town"] for d in found.documents} == {"Aro"}


# Shards that do not go together


def test_embedders_fitted_on_different_documents_are_refused(build: Build) -> None:
    a, b = build(make_documents(20)), build(make_documents(20, 20))
    with pytest.raises(errors.EmbedderMismatchError, match=r"fitted on different documents: fit one 'tfidf-svd-128'"):
        ShardedStore([a, b])


def test_shards_made_with_one_fitted_embedder_are_like_one_store(build: Build, tmp_path: Path) -> None:
    documents = make_documents(60)
    embedder = TfidfSvdEmbedder().fit([d.text for d in documents])
    stores = [build(documents[:7], embedder=embedder), build(documents[7:], embedder=embedder)]
    whole = build(documents, embedder=embedder)
    opened = [DocumentStore.open(store.path, read_only=True) for store in stores]  # each loads a copy of its own
    query = "Which smith of Fenn knows Person4?"
    for shards in (ShardedStore(stores), ShardedStore(opened)):
        found, expected = answer(shards.search(query, 5)), answer(whole.search(query, 5))
        assert sorted(found) == sorted(expected)
    for store in opened:
        store.close()


def test_a_shard_that_is_still_empty_is_passed_over_and_checked_when_it_is_filled(build: Build) -> None:
    full, empty = build(make_documents(10)), build([])
    shards = ShardedStore([empty, full])
    assert answer(shards.search("the smith of Colt", 3)) == answer(full.search("the smith of Colt", 3))
    assert len(asyncio.run(updates_of(shards, "the smith of Colt", 3))) == 1
    empty.add(make_documents(10, 50))  # which fits its embedder on these
    with pytest.raises(errors.EmbedderMismatchError, match="fitted on different documents"):
        shards.search("the smith of Colt", 3)


def test_other_mismatches_are_refused_with_their_cure(build: Build) -> None:
    documents = make_documents(6)
    letters = build(documents[:2], embedder=Letters())
    inner = build(documents[2:4], embedder=Letters(), metric="ip")
    fitted = build(documents[4:])
    short = build(documents[4:5], embedder=PrecomputedEmbedder(), vectors=[[1.0, 2.0]])
    long = build(documents[5:], embedder=PrecomputedEmbedder(), vectors=[[1.0, 2.0, 3.0]])
    with pytest.raises(errors.ConfigError, match="metric 'l2'.*'ip'"):
        ShardedStore([letters, inner])
    with pytest.raises(errors.EmbedderMismatchError, match="the embedder 'letters'.*'tfidf-svd-128'"):
        ShardedStore([letters, fitted])
    with pytest.raises(errors.EmbedderMismatchError, match="has 2 dimensions.* 3: make all"):
        ShardedStore([short, long])
    with pytest.raises(errors.ConfigError, match="twice"):
        ShardedStore([letters, letters])
    with pytest.raises(errors.ConfigError, match="no shards"):
        ShardedStore([])
    with pytest.raises(errors.ConfigError, match="a shard is a str"):
        ShardedStore(["letters"])  # type: ignore[list-item]  (refused)


def test_a_document_in_two_shards_is_refused(build: Build) -> None:
    a, b = build(make_documents(5), embedder=Letters()), build(make_documents(5, 4), embedder=Letters())
    with pytest.raises(errors.DuplicateDocumentError, match="'doc-4' is in .*shard-0 and in .*shard-1: delete it"):
        ShardedStore([a, b])


def test_a_document_that_comes_to_a_second_shard_later_is_found_once_where_it_is_nearer(build: Build) -> None:
    a, b = build([Document("far", "zzz"), Document("x", "aab")], embedder=Letters()), build([], embedder=Letters())
    shards = ShardedStore([b, a])
    b.add([Document("x", "aaa")])
    assert answer(shards.search("aaa", 2)) == [("x", 0.0), ("far", 18.0)]
    assert shards.search("aaa", 1).documents[0].text == "aaa"
    assert shards.ids() == ["x", "far"]


# What it holds


def test_it_holds_what_its_shards_hold(build: Build) -> None:
    a, b = build(make_documents(5), embedder=Letters()), build(make_documents(5, 5), embedder=Letters())
    shards = ShardedStore([a, b])
    assert len(shards) == 10
    assert shards.ids() == [*a.ids(), *b.ids()]
    assert shards.get(["doc-7", "doc-1", "doc-7"]) == [*b.get("doc-7"), *a.get("doc-1"), *b.get("doc-7")]
    assert "doc-7" in shards
    assert "doc-70" not in shards
    assert (shards.metric, shards.dimension, shards.embedder.name) == ("l2", 26, "letters")
    with pytest.raises(errors.UnknownDocumentError, match="'doc-70' is in no shard"):
        shards.get("doc-70")
    b.add(make_documents(1, 10))  # an owner may go on
    assert shards.search("Person10", 11).is_final


def test_impossible_searches_are_refused(build: Build) -> None:
    a, b = build(make_documents(5), embedder=Letters()), build(make_documents(2, 5), embedder=Letters())
    shards = ShardedStore([a, b])
    assert len(shards.search("Person1", 7).documents) == 7, "more than either holds"
    assert shards.search("Person1", 8) == shards.search("Person1", 7), "no more than both hold"
    with pytest.raises(errors.SearchError, match="k is 0"):
        shards.search("Person1", 0)
    with pytest.raises(errors.SearchError, match="ask something"):
        asyncio.run(updates_of(shards, " ", 2))
    with pytest.raises(errors.SearchError, match="has 2 dimensions"):
        shards.search_vector([1.0, 2.0], 2)
    a.delete(a.ids())
    b.delete(b.ids())
    with pytest.raises(errors.EmptyStoreError, match="the shards hold no documents"):
        shards.search("Person1", 1)


# Failing and leaving early


def test_a_shard_that_fails_ends_the_search_with_its_error_and_stops_the_others(
    gated: tuple[ShardedStore, list[GatedIndex]],
) -> None:
    shards, gates = gated
    gates[1].error = OSError("the disk is gone")

    async def scenario() -> None:
        gates[1].gate.set()
        with pytest.raises(OSError, match="the disk is gone") as caught:
            await updates_of(shards, "the weaver of Dorn", 3)
        assert caught.value.__notes__ == [f"in the shard {shards.stores[1].path}"]
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert all(gate.is_stopped.is_set() or not gate.is_searching.is_set() for gate in gates)

    asyncio.run(scenario())


def test_a_cancelled_search_leaves_no_task_and_no_running_thread(gated: tuple[ShardedStore, list[GatedIndex]]) -> None:
    shards, gates = gated

    async def scenario() -> None:
        task = asyncio.create_task(updates_of(shards, "the weaver of Dorn", 3))
        for gate in gates:
            assert await asyncio.to_thread(gate.is_searching.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(gate.is_stopped.is_set() for gate in gates)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_a_search_that_is_left_early_leaves_no_task_and_no_running_thread(
    gated: tuple[ShardedStore, list[GatedIndex]],
) -> None:
    shards, gates = gated

    async def scenario() -> None:
        gates[2].gate.set()
        async with aclosing(shards.search_staged("the weaver of Dorn", 3)) as updates:
            assert not (await anext(updates)).is_final
            for gate in gates:
                assert await asyncio.to_thread(gate.is_searching.wait, 60)
        assert all(gate.is_stopped.is_set() for gate in gates)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_a_closed_shard_is_named(build: Build) -> None:
    a, b = build(make_documents(5), embedder=Letters()), build(make_documents(5, 5), embedder=Letters())
    shards = ShardedStore([a, b])
    b.close()
    with pytest.raises(errors.StoreError, match="shard-1 was closed"):
        shards.search("Person1", 2)
    with pytest.raises(errors.StoreError, match="shard-1 was closed"):
        asyncio.run(updates_of(shards, "Person1", 2))
