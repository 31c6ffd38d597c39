"""A vector store of each framework over a document store in a folder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcache_core.errors import ConfigError, StoreLockedError
from ragcache_core.retrieval import DocumentStore, TfidfSvdEmbedder
from tests.contracts.rag.frameworks import Framework

TEXTS = {
    "a": "The sun is a star.",
    "b": "The moon is a moon.",
    "c": "Mars is a red planet.",
    "d": "A star shines in the night.",
}
EMBEDDER = TfidfSvdEmbedder(8).fit(list(TEXTS.values()))
both_ways = pytest.mark.parametrize("is_async", [False, True])


@pytest.fixture
def store(framework: Framework, tmp_path: Path) -> Iterator[Any]:
    store = framework.vector_store(tmp_path / "store", EMBEDDER)
    yield store
    store.close()


@both_ways
async def test_documents_are_stored_found_and_removed(framework: Framework, store: Any, is_async: bool) -> None:
    assert await framework.add(store, TEXTS, {"n": 1}, is_async=is_async) == list(TEXTS)
    assert (await framework.search(store, "Which star shines?", 2, is_async=is_async))[0] == "d"
    assert set(await framework.search(store, "star", 100, is_async=is_async)) == set(TEXTS)
    assert await framework.search(store, "star", 0, is_async=is_async) == []
    expected = {"c": (TEXTS["c"], {"n": 1}), "a": (TEXTS["a"], {"n": 1})}
    assert await framework.get(store, ["c", "unknown", "a"], is_async=is_async) == expected
    await framework.remove(store, ["d", "unknown"], is_async=is_async)
    assert set(await framework.search(store, "star", 9, is_async=is_async)) == set("abc")


async def test_documents_survive_in_their_folder_which_one_process_opens(framework: Framework, tmp_path: Path) -> None:
    for run in range(2):
        store = framework.vector_store(tmp_path / "store", EMBEDDER, metric="ip")
        await framework.add(store, {f"{run}": TEXTS["a"]})
        assert len(await framework.search(store, "star", 9)) == run + 1
        with pytest.raises(StoreLockedError):
            framework.vector_store(tmp_path / "store", EMBEDDER)
        store.close()
    with pytest.raises(ConfigError, match="metric 'ip', not 'l2'"):
        framework.vector_store(tmp_path / "store", EMBEDDER, metric="l2")


async def test_documents_without_text_are_left_out_with_one_warning(
    framework: Framework, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {"first": "First page", "none": "", "blank": " \n", "last": "Last\0 page"}
    assert await framework.add(store, texts) == list(texts), "an id in the place of each document"
    found = await framework.get(store, list(texts))
    assert {doc_id: text for doc_id, (text, _) in found.items()} == {"first": "First page", "last": "Last page"}
    assert [r.getMessage() for r in caplog.records] == [
        "RC-DOCUMENTS-BLANK: 2 of 4 documents have no text and are not stored"
    ]
    await framework.add(store, {"first": ""})
    assert list(await framework.get(store, list(texts))) == ["last"], "a blank document removes its former text"


async def test_metadata_that_json_has_no_form_for_is_stored_in_a_plain_form(framework: Framework, store: Any) -> None:
    day = datetime(2026, 5, 4, 12, 30, tzinfo=UTC)
    metadata = {
        "at": day, "day": day.date(), "score": np.float32(0.5), "count": np.int64(3), "nan": math.nan,
        "tags": {"b", "a"}, "nested": {"times": [day.time()]},
    }  # fmt: skip
    await framework.add(store, {"x": "text"}, metadata)
    plain = {
        "at": "2026-05-04T12:30:00+00:00", "day": "2026-05-04", "score": 0.5, "count": 3, "nan": None,
        "tags": ["a", "b"], "nested": {"times": ["12:30:00"]},
    }  # fmt: skip
    assert await framework.get(store, ["x"]) == {"x": ("text", plain)}
    before = framework.documents_of(store).ids()
    with pytest.raises(ValueError, match="object|JSON|serialize"):
        await framework.add(store, {"x": "other", "y": "more"}, {"key": object()})
    assert framework.documents_of(store).ids() == before


async def test_documents_that_are_deleted_before_a_search_begins_are_not_missed(
    framework: Framework, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length and the membership that a caller reads are of an older state than the one that is searched."""
    await framework.add(store, TEXTS)
    monkeypatch.setattr(DocumentStore, "__len__", lambda _: 100)
    monkeypatch.setattr(DocumentStore, "__contains__", lambda _, __: True)
    retriever = framework.retriever(store, k=6)
    for removed, num_remaining in ((["b", "c", "d"], 4), (["a", "b"], 1), ([], 0)):
        for is_async in (False, True):
            assert len(await framework.search(store, "star", 6, is_async=is_async)) == num_remaining
            assert len(await framework.find(retriever, is_async=is_async, question="star")) == num_remaining
            assert len(await framework.get(store, list(TEXTS), is_async=is_async)) == num_remaining
        await framework.remove(store, removed)
