"""Searching while others add, delete, cancel and close."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcache_core import errors
from ragcache_core.retrieval import DocumentStore, PrecomputedEmbedder
from ragcache_core.retrieval.base import Stage, Vectors
from ragcache_core.types import RetrievalUpdate

from .conftest import make_documents


def make_store(folder: Path, num_documents: int, **options: Any) -> tuple[DocumentStore, Vectors]:
    vectors = np.random.default_rng(0).standard_normal((num_documents, 8)).astype(np.float32)
    store = DocumentStore.create(folder, embedder=PrecomputedEmbedder(8), **options)
    return store, vectors


async def last_update(store: DocumentStore, vector: Any, k: int, stages: int = 4) -> RetrievalUpdate:
    async with aclosing(store.search_vector_staged(vector, k, stages=stages)) as updates:
        async for update in updates:
            last = update
    assert last.is_final
    return last


@pytest.mark.parametrize("index", ["flat", "ivf", "hnsw"])
def test_searches_are_right_while_documents_are_added_and_deleted(folder: Path, index: Any) -> None:
    """Whatever state a search began with, its scores are true and its documents are the best of some state."""
    total = 400
    store, vectors = make_store(folder, total, index=index, nprobe=1000, ef_search=1000)
    store.add(make_documents(40), embeddings=vectors[:40])
    started = threading.Event()
    failures: list[BaseException] = []
    num_searches = 0
    stop = threading.Event()

    def check(vector: Vectors, update: RetrievalUpdate, least: int) -> None:
        numbers = [int(d.metadata["number"]) for d in update.documents]  # type: ignore[call-overload]
        true = ((vectors[numbers] - vector) ** 2).sum(axis=1)
        np.testing.assert_allclose(update.scores, true, rtol=1e-4, atol=1e-5)
        assert len(set(numbers)) == len(numbers) == 5
        distances = ((vectors - vector) ** 2).sum(axis=1)
        fixed = np.sort(distances[:least])[:5]  # more documents can only be nearer
        assert all(a <= b + 1e-4 for a, b in zip(update.scores, fixed, strict=True))

    def reader(number: int) -> None:
        nonlocal num_searches
        rng = np.random.default_rng(number)

        async def staged() -> None:
            while not stop.is_set():
                least = min(len(store), total)
                vector = rng.standard_normal(8).astype(np.float32)
                check(vector, await last_update(store, vector, 5), least)

        try:
            if number % 2:
                asyncio.run(staged())
            while not stop.is_set():
                least = min(len(store), total)
                vector = rng.standard_normal(8).astype(np.float32)
                check(vector, store.search_vector(vector, 5), least)
                num_searches += 1
                started.set()
        except BaseException as error:
            failures.append(error)
            started.set()

    threads = [threading.Thread(target=reader, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    assert started.wait(60)
    for first in range(40, total, 12):
        store.add(make_documents(12, first), embeddings=vectors[first : first + 12])
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures, failures[0]
    assert num_searches > 0
    assert len(store) == total
    store.close()


def test_a_search_keeps_the_documents_it_began_with(folder: Path) -> None:
    async def scenario() -> None:
        store, vectors = make_store(folder, 1000, index="flat")
        store.add(make_documents(1000), embeddings=vectors)
        expected = store.search_vector(vectors[0], 10)
        async with aclosing(store.search_vector_staged(vectors[0], 10, stages=3)) as updates:
            first = await anext(updates)
            assert not first.is_final
            store.delete(store.ids())
            store.add(make_documents(10, first=2000), embeddings=vectors[:10])
            rest = [update async for update in updates]
        assert (rest[-1].documents, rest[-1].scores) == (expected.documents, expected.scores)
        store.close()

    asyncio.run(scenario())


class SlowIndex:
    """An index whose second stage runs until it is cancelled."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.is_running = threading.Event()
        self.is_stopped = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def stages(self, query: Any, k: int, cuts: Any, cancel: Any, among: Any = None) -> Iterator[Stage]:
        try:
            yield Stage(self.real.search(query, k), is_final=False)
            self.is_running.set()
            while not cancel.is_cancelled:
                time.sleep(0.001)
        finally:
            self.is_stopped.set()


@pytest.fixture
def slow(folder: Path) -> Iterator[tuple[DocumentStore, SlowIndex]]:
    from dataclasses import replace

    store, vectors = make_store(folder, 20, index="flat")
    store.add(make_documents(20), embeddings=vectors)
    index = SlowIndex(store._snapshot.index)
    store._snapshot = replace(store._snapshot, index=index)  # type: ignore[arg-type]
    yield store, index
    store.close()


def test_a_cancelled_search_leaves_no_task_and_no_running_thread(slow: tuple[DocumentStore, SlowIndex]) -> None:
    store, index = slow

    async def scenario() -> None:
        task = asyncio.create_task(last_update(store, [0.0] * 8, 3))
        assert await asyncio.to_thread(index.is_running.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert index.is_stopped.is_set(), "the thread was free before the cancellation was reported"
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_a_store_closed_during_a_search_ends_it_with_one_clear_error(folder: Path) -> None:
    async def scenario() -> None:
        store, vectors = make_store(folder, 1000, index="flat")
        store.add(make_documents(1000), embeddings=vectors)
        async with aclosing(store.search_vector_staged(vectors[0], 10, stages=3)) as updates:
            await anext(updates)
            store.close()
            with pytest.raises(errors.StoreError, match="was closed"):
                await anext(updates)

    asyncio.run(scenario())


def test_a_store_can_be_opened_at_any_moment_of_a_change(folder: Path) -> None:
    store, vectors = make_store(folder, 300, index="flat")
    store.add(make_documents(5), embeddings=vectors[:5])
    stop = threading.Event()
    sizes: list[int] = []
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                with DocumentStore.open(folder, read_only=True) as reader:
                    documents = reader.get(reader.ids())
                    assert reader.faiss_index.ntotal == len(documents)
                    sizes.append(len(documents))
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(5, 40):
        store.add(make_documents(1, i), embeddings=vectors[i : i + 1])
    stop.set()
    reader.join()
    store.close()
    assert not failures, failures[0]
    assert sizes == sorted(sizes)


def test_a_search_for_more_documents_than_remain_returns_those_that_remain(folder: Path) -> None:
    store, vectors = make_store(folder, 6)
    documents = make_documents(6)
    store.add(documents, embeddings=vectors)
    errors_seen: list[Exception] = []
    stopped = threading.Event()

    def search() -> None:
        while not stopped.is_set():
            try:
                assert 1 <= len(store.search_vector(vectors[0], len(store)).documents) <= 6
                assert documents[0] in store.get(store.ids(), missing_ok=True)
            except Exception as error:
                errors_seen.append(error)

    readers = [threading.Thread(target=search) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(20):
        store.delete([document.doc_id for document in documents[1:]])
        store.delete(["doc-1", "doc-0-unknown"], missing_ok=True)
        store.put(documents[1:], embeddings=vectors[1:])
    stopped.set()
    for reader in readers:
        reader.join()
    assert not errors_seen, errors_seen[0]
    store.close()
