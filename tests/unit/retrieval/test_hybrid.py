"""Searches by words and vectors: one exact score, whatever the store's history or the stage."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import shutil
import sqlite3
import threading
import time
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcache_core.errors import StoreFullError
from ragcache_core.retrieval import DocumentStore
from ragcache_core.retrieval.base import Metric
from ragcache_core.retrieval.lexical import words_of
from ragcache_core.retrieval.storage import writer
from ragcache_core.retrieval.storage.manifest import MANIFEST_NAME
from ragcache_core.types import Document, RetrievalUpdate

from .conftest import make_documents

QUESTIONS = ("Who is the baker of Aro?", "Person41", "doc-7", "does anybody know Person3", "quokka", "the the")


class Letters:
    """A dense embedder of a user's own."""

    name = "letters"
    dimension = 26

    def embed_documents(self, texts: list[str]) -> Any:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> Any:
        return [1.0 + text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]


def answer(update: RetrievalUpdate) -> list[tuple[str, float]]:
    return list(zip((d.doc_id for d in update.documents), update.scores, strict=True))


async def staged(store: Any, query: str, k: int, stages: Any) -> list[RetrievalUpdate]:
    async with aclosing(store.search_staged(query, k, stages=stages)) as updates:
        return [update async for update in updates]


def true_scores(store: DocumentStore, query: str, weight: float) -> dict[str, float]:
    """Return each document's score by the definition, computed with dictionaries."""

    def words(text: str) -> Counter[str]:
        return Counter(re.findall(r"\w+", text.casefold()))

    documents = store.get(store.ids())
    counts = {}
    for document in documents:
        counts[document.doc_id] = words(document.text)
        for word in words(document.doc_id):
            counts[document.doc_id][word] += 8
    frequency = Counter(word for count in counts.values() for word in count)
    asked = words(query)
    mean_length = sum(count.total() for count in counts.values()) / len(documents)

    def idf(word: str) -> float:
        return math.log(1 + (len(documents) - frequency[word] + 0.5) / (frequency[word] + 0.5))

    def bm25(count: Counter[str]) -> float:
        norm = 3.0 * (0.25 + 0.75 * count.total() / mean_length)
        return sum(asked[word] * idf(word) * count[word] / (count[word] + norm) for word in asked)

    typical = sum(asked[word] * idf(word) * asked[word] / (asked[word] + 3.0) for word in asked)
    question = np.asarray(store.embedder.embed_query(query), np.float64)
    found = {}
    for document in documents:
        by_words = 1 - math.exp(-2.5 * bm25(counts[document.doc_id]) / typical)
        vector = np.asarray(store.embedder.embed_documents([document.text])[0], np.float64)
        cosine = vector @ question / (np.linalg.norm(vector) * np.linalg.norm(question) or 1.0)
        found[document.doc_id] = float(weight * by_words + (1 - weight) * cosine)
    return found


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_scores_are_the_weighted_mean_of_bm25_and_the_cosine(folder: Path, metric: Metric) -> None:
    with DocumentStore.create(folder, index="flat", metric=metric, embedder=Letters(), word_weight=0.6) as store:
        store.add(make_documents(30))
        store.delete(["doc-4", "doc-29"])
        store.put([Document("doc-8", "A quokka sleeps; a quokka eats.")])
        for query in QUESTIONS:
            true = true_scores(store, query, 0.6)
            update = store.search(query, len(store))  # all are candidates
            expected = sorted(true.values(), reverse=True)
            told = [score if metric == "ip" else 1 - score / 2 for score in update.scores]
            np.testing.assert_allclose(told, expected, atol=1e-6)
            np.testing.assert_allclose(told, [true[d.doc_id] for d in update.documents], atol=1e-6)


@pytest.mark.parametrize("stages", [None, 1, 4, (0.1, 0.3, 1.0)])
@pytest.mark.parametrize("index", ["flat", "ivf", "hnsw"])
def test_the_last_stage_is_the_plain_search_bit_for_bit(folder: Path, index: Any, stages: Any) -> None:
    with DocumentStore.create(folder, index=index, nprobe=20) as store:
        store.add(make_documents(700))
        store.delete([f"doc-{i}" for i in range(0, 90, 3)])
        for query in QUESTIONS:
            updates = asyncio.run(staged(store, query, 5, stages))
            plain = store.search(query, 5)
            assert (updates[-1].documents, updates[-1].scores) == (plain.documents, plain.scores)
            assert [update.is_final for update in updates] == [False] * (len(updates) - 1) + [True]
            for update in updates:
                assert list(update.scores) == sorted(update.scores)
        if stages == 4 and index != "hnsw":
            assert len(updates) == 4


def test_users_embedders_are_searched_by_vectors_alone_unless_words_are_asked_for(tmp_path: Path) -> None:
    documents = [*make_documents(30), Document("kiwi.md", "It says nothing.", {"title": "Flightless birds"})]
    with DocumentStore.create(tmp_path / "vectors", embedder=Letters(), index="flat") as store:
        store.add(documents)
        scores, _ = store.faiss_index.search(np.array([Letters().embed_query("Person3")], np.float32), 4)
        assert store.search("Person3", 4).scores == tuple(scores[0].tolist())
        assert store.word_weight == 0
    with DocumentStore.create(tmp_path / "both", embedder=Letters(), word_weight=0.5) as store:
        store.add(documents)
        assert store.search("kiwi", 1).documents[0].doc_id == "kiwi.md"
        assert store.search("which birds are flightless?", 1).documents[0].doc_id == "kiwi.md"
    with DocumentStore.open(tmp_path / "both", embedder=Letters()) as store:
        assert store.word_weight == 0.5
        assert store.search("kiwi", 1).documents[0].doc_id == "kiwi.md"


def test_a_store_of_the_first_format_is_searched_as_before_and_can_be_changed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DocumentStore.create(folder, index="flat", word_weight=0) as store:
        store.add(make_documents(20))
        before = store.search("Person7", 5)
    _age(folder, 1)
    with caplog.at_level(logging.WARNING), DocumentStore.open(folder) as store:
        assert store.search("Person7", 5) == before
        store.add(make_documents(20, first=20))  # merges the old segment
        assert len(store.get(store.ids())) == 40
        assert store.word_weight == 0
    assert "older RAGCache" in caplog.text
    assert json.loads((folder / MANIFEST_NAME).read_text())["format"] == 3
    with DocumentStore.open(folder) as store:
        assert store.search("Person27", 5).documents


def test_a_store_of_the_second_format_is_converted_when_it_is_opened(folder: Path, tmp_path: Path) -> None:
    with DocumentStore.create(folder) as store:
        for first in (0, 20, 30):
            store.add(make_documents(10, first=first))
        store.delete(["doc-3", "doc-22"])
        expected = [answer(store.search(query, 5)) for query in QUESTIONS]
        ids = store.ids()
    _age(folder, 2)
    shutil.copytree(folder, tmp_path / "old")
    with DocumentStore.open(folder, read_only=True) as store:  # indexes the words in memory
        assert [answer(store.search(query, 5)) for query in QUESTIONS] == expected
    assert json.loads((folder / MANIFEST_NAME).read_text())["format"] == 2
    with DocumentStore.open(folder) as store:
        assert [answer(store.search(query, 5)) for query in QUESTIONS] == expected
        assert store.ids() == ids
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    assert manifest["format"] == 3
    for segment in manifest["store"]["segments"]:
        connection = sqlite3.connect(folder / segment["file"]["name"])
        assert connection.execute("SELECT count(*) FROM word_counts").fetchone() == (28,)
        connection.close()
    with DocumentStore.open(folder) as store:  # converted once
        assert store.stats().generation == manifest["store"]["generation"]
        assert [answer(store.search(query, 5)) for query in QUESTIONS] == expected


def test_a_store_that_cannot_be_converted_is_searched_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with DocumentStore.create(folder) as store:
        store.add(make_documents(20))
        expected = [answer(store.search(query, 5)) for query in QUESTIONS]
    _age(folder, 2)

    def full(*_: Any, **__: Any) -> None:
        raise StoreFullError("no space left")

    monkeypatch.setattr(writer, "write_segment", full)
    with caplog.at_level(logging.WARNING), DocumentStore.open(folder) as store:
        assert [answer(store.search(query, 5)) for query in QUESTIONS] == expected
    assert "keeps its format" in caplog.text


def _age(folder: Path, version: int) -> None:
    """Make a store what an older format was: 1 had no words, 2 had a column of packed words."""
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    body = manifest["store"]
    if version == 1:
        del body["options"]["word_weight"]
    for segment in body["segments"]:
        path = folder / segment["file"]["name"]
        connection = sqlite3.connect(path)
        if version == 2:
            connection.execute("DROP TABLE words")
            connection.execute("DROP TABLE word_counts")
            connection.execute("ALTER TABLE documents ADD COLUMN words BLOB")
            connection.execute("UPDATE documents SET words = x'000000000100'")
        connection.commit()
        connection.close()
        content = path.read_bytes()
        segment["file"] |= {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (folder / MANIFEST_NAME).write_text(json.dumps({"format": version, "store": body, "sha256": digest}))


def test_a_word_is_the_same_however_its_accents_and_ligatures_are_encoded() -> None:
    """File names of macOS have accents as letters of their own, PDF files have ligatures."""
    composed, decomposed = "Äpfel für das Café", "A\u0308pfel fu\u0308r das Cafe\u0301"
    assert words_of(decomposed) == words_of(composed)
    assert words_of("the o\ufb03ce, \uff21\uff22\uff23") == words_of("the office, ABC")


class SlowLetters(Letters):
    """Takes its time with a question, as a service that embeds does: until its gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def embed_documents(self, texts: list[str]) -> Any:
        return [Letters.embed_query(self, text) for text in texts]

    def embed_query(self, text: str) -> Any:
        time.sleep(0.01)
        assert self.gate.wait(20)
        return super().embed_query(text)


def test_words_find_documents_while_a_question_is_still_embedded(folder: Path) -> None:
    embedder = SlowLetters()
    with DocumentStore.create(folder, embedder=embedder, index="flat", word_weight=0.5) as store:
        store.add(make_documents(60))

        async def updates_of(**wanted: Any) -> list[RetrievalUpdate]:
            updates = []
            async with aclosing(store.search_staged(QUESTIONS[0], 3, **wanted)) as stages:
                async for update in stages:
                    updates.append(update)
                    embedder.gate.set()
            return updates

        (only,) = asyncio.run(updates_of())  # it is not known yet that it takes long
        for wanted in ({}, {"where": {"town": ["Aro", "Elm"]}}):
            expected = store.search(QUESTIONS[0], 3, **wanted)
            embedder.gate.clear()
            guess, final = asyncio.run(updates_of(**wanted))
            assert ([guess.stage, final.stage], [guess.is_final, final.is_final]) == ([0, 1], [False, True])
            assert answer(final) == answer(expected)
            assert guess.documents[0] == only.documents[0]
            assert "where" not in wanted or {d.metadata["town"] for d in guess.documents} <= {"Aro", "Elm"}
