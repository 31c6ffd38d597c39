"""Stages of stores elsewhere, by growing effort."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ragcache_core.errors import SearchError
from ragcache_core.retrieval import GrowingEffort, lancedb_stages, qdrant_stages
from ragcache_core.types import Document, RetrievalUpdate


class Letters:
    """An embedder of two dimensions."""

    def embed_query(self, text: str) -> list[float]:
        return [float(len(text)), 1.0]

    def embed_documents(self, texts: Sequence[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


def found(effort: object) -> list[tuple[Document, float]]:
    return [(Document(f"by-{effort}", "text"), 1.0)]


async def ids_of(source: Any) -> list[tuple[str, bool]]:
    return [(update.documents[0].doc_id, update.is_final) async for update in source.stages("Who?", 1)]


async def test_every_effort_that_comes_before_more_of_it_is_a_stage() -> None:
    arrived = {effort: asyncio.Event() for effort in (1, 2, 3)}

    async def find(_question: str, _k: int, effort: int) -> list[tuple[Document, float]]:
        await arrived[effort].wait()
        return found(effort)

    updates: list[RetrievalUpdate] = []
    async with aclosing(GrowingEffort(find, (1, 2, 3)).stages("Who?", 1)) as stages:
        arrived[2].set()
        updates.append(await anext(stages))
        arrived[1].set()  # too late: more effort came first
        await asyncio.sleep(0)
        arrived[3].set()
        updates += [update async for update in stages]
    assert [(u.documents[0].doc_id, u.stage, u.is_final) for u in updates] == [("by-2", 0, False), ("by-3", 1, True)]


async def test_the_efforts_run_concurrently_in_one_thread_each() -> None:
    both = threading.Barrier(2, timeout=20)

    def find(_question: str, _k: int, effort: int) -> list[tuple[Document, float]]:
        both.wait()
        return found(effort)

    assert (await ids_of(GrowingEffort(find, (1, 2))))[-1] == ("by-2", True)


async def test_a_failure_of_less_effort_is_passed_over_and_one_of_the_most_is_raised() -> None:
    def failing(at: int) -> GrowingEffort[int]:
        async def find(_question: str, _k: int, effort: int) -> list[tuple[Document, float]]:
            if effort == at:
                raise OSError("the store is gone")
            await asyncio.sleep(0)
            return found(effort)

        return GrowingEffort(find, (1, 2))

    assert await ids_of(failing(1)) == [("by-2", True)]
    with pytest.raises(OSError, match="the store is gone"):
        await ids_of(failing(2))


async def test_the_question_is_embedded_once() -> None:
    asked: list[str] = []
    source = GrowingEffort(lambda _vector, _k, effort: found(effort), (1, 2, 3), embed=asked.append)
    assert (await ids_of(source))[-1] == ("by-3", True)
    assert asked == ["Who?"]


class Table:
    """A table of LanceDB that writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.both_began = threading.Barrier(2, timeout=20)

    def search(self, vector: Any, vector_column_name: str) -> Any:
        self.both_began.wait()
        asked: dict[str, Any] = {"vector": vector.tolist(), "column": vector_column_name}
        self.asked.append(asked)
        search = SimpleNamespace(to_list=lambda: [{"id": 7, "text": "t", "n": 1, "vector": [], "_distance": 0.5}])
        for name in ("nprobes", "limit", "refine_factor", "where"):

            def note(value: Any, name: str = name, **kwargs: Any) -> Any:
                asked[name] = value
                return search

            setattr(search, name, note)
        return search


async def test_lancedb_is_asked_for_its_probes_and_refines_the_last_answer() -> None:
    table = Table()
    source = lancedb_stages(table, Letters(), efforts=(2, 20), refine_factor=4, where="n = 1")
    updates = [update async for update in source.stages("Who?", 3)]
    assert updates[-1] == RetrievalUpdate((Document("7", "t", {"n": 1}),), (0.5,), updates[-1].stage, is_final=True)
    first = {"vector": [4.0, 1.0], "column": "vector", "nprobes": 2, "limit": 3, "where": "n = 1"}
    by_probes = {asked["nprobes"]: asked for asked in table.asked}
    assert by_probes.pop(20) == {**first, "nprobes": 20, "refine_factor": 4}
    assert by_probes in ({2: first}, {}), "the first search is left out where the last one is sooner"


@pytest.mark.parametrize("is_async", [False, True])
async def test_qdrant_is_asked_for_its_ef(is_async: bool) -> None:
    models = pytest.importorskip("qdrant_client.models")
    asked: list[dict[str, Any]] = []
    payloads: list[dict[str, Any]] = [{"page_content": "t", "metadata": {"n": 1}}, {"text": "t", "n": 1}]

    def query_points(**settings: Any) -> Any:
        asked.append(settings)
        points = [SimpleNamespace(id=i, score=0.5, payload=payload) for i, payload in enumerate(payloads)]
        return SimpleNamespace(points=points)

    async def awaited(**settings: Any) -> Any:
        return query_points(**settings)

    client = SimpleNamespace(query_points=awaited if is_async else query_points)
    source = qdrant_stages(client, "docs", Letters(), efforts=(16, "exact"), query_filter="theirs")
    updates = [update async for update in source.stages("Who?", 2)]
    assert [(d.text, d.metadata) for d in updates[-1].documents] == [("t", {"n": 1})] * 2
    params = [settings["search_params"] for settings in asked]
    efforts = {(p.hnsw_ef, p.exact or False) for p in params}
    assert efforts - {(16, False)} == {(None, True)}, "the first search is left out where the last one is sooner"
    assert all(isinstance(p, models.SearchParams) for p in params)
    assert np.allclose(asked[0]["query"], [4.0, 1.0])
    assert (asked[0]["limit"], asked[0]["query_filter"]) == (2, "theirs")
    payloads[:] = [{"body": "t"}]
    with pytest.raises(SearchError, match="point 0 has no page_content, text, document, but body: give document_of="):
        [update async for update in source.stages("Who?", 2)]
