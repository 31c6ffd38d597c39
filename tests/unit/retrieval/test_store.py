"""What a store gives back is what was put in, now and when it is opened again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.retrieval import DocumentStore, PrecomputedEmbedder
from ragcache_core.types import Document, RetrievalUpdate

from .conftest import make_documents

INDEXES: list[dict[str, Any]] = [
    {"index": "flat"},
    {"index": "ivf"},
    {"index": "ivf", "encoding": "sq8"},
    {"index": "ivf", "encoding": "pq"},
    {"index": "hnsw"},
]


async def all_updates(store: DocumentStore, query: str, k: int, **how: Any) -> list[RetrievalUpdate]:
    async with aclosing(store.search_staged(query, k, **how)) as updates:
        return [update async for update in updates]


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("index", INDEXES, ids=lambda i: "-".join(i.values()))
def test_a_reopened_store_answers_bit_for_bit_as_before(folder: Path, index: Any, metric: Any) -> None:
    documents = make_documents(400)
    with DocumentStore.create(folder, metric=metric, nprobe=100, **index) as store:
        store.add(documents[:390])
        store.add(documents[390:])
        store.delete(["doc-3", "doc-395"])
        before = [store.search(d.text, 7) for d in documents[:20]]
        found = sum(update.documents[0] == document for update, document in zip(before, documents, strict=False))
        assert found >= (8 if index.get("encoding") == "pq" else 18)
    with DocumentStore.open(folder) as store:
        assert len(store) == 398
        assert [store.search(d.text, 7) for d in documents[:20]] == before
        staged = asyncio.run(all_updates(store, documents[0].text, 7, stages=4))
        assert staged[-1].documents == before[0].documents
        assert staged[-1].scores == before[0].scores


def test_a_program_that_opens_or_creates_its_store_runs_again_and_again(folder: Path) -> None:
    for _ in range(2):
        with DocumentStore.open_or_create(folder, index="hnsw", metric="ip") as store:
            store.put(make_documents(5))
            assert len(store) == 5
    for wrong, found in ({"index": "flat"}, "hnsw"), ({"metric": "l2"}, "ip"):
        with pytest.raises(ConfigError, match=f"holds a store with {next(iter(wrong))} '{found}', not"):
            DocumentStore.open_or_create(folder, **wrong)
    with DocumentStore.open_or_create(folder) as store:  # the refusals let go of it
        assert (store.index_kind, store.metric) == ("hnsw", "ip")


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("index", INDEXES, ids=lambda i: "-".join(i.values()))
def test_the_last_update_is_what_the_unmodified_faiss_index_answers(folder: Path, index: Any, metric: Any) -> None:
    with DocumentStore.create(folder, metric=metric, word_weight=0, **index) as store:
        store.add(make_documents(300))
        store.put([Document(f"doc-{i}", "The same words, many times.") for i in range(20)])
        for query in ("the same words", "Who is the baker of Aro?", "Person41"):
            scores, internal_ids = store.faiss_index.search(store.embedder.embed_query(query)[None], 12)
            update = asyncio.run(all_updates(store, query, 12, stages=5))[-1]
            read = store._snapshot.documents.read(internal_ids[0].tolist())
            if index["index"] != "hnsw":  # its index still holds what was replaced, and is searched with a selector
                assert list(update.documents) == [read[i] for i in internal_ids[0].tolist()]
                assert np.array(update.scores, np.float32).tobytes() == scores[0].tobytes()
            plain = store.search(query, 12)
            assert (update.documents, update.scores) == (plain.documents, plain.scores)


def test_ivf_is_flat_until_it_can_be_trained_and_is_retrained_as_it_grows(folder: Path) -> None:
    with DocumentStore.create(folder, embedder=PrecomputedEmbedder(4)) as store:
        rng = np.random.default_rng(0)
        layouts = []
        nlists = []
        for first, last in ((0, 100), (100, 300), (300, 900), (900, 1300)):
            vectors = rng.standard_normal((last - first, 4))
            store.add(make_documents(last - first, first), embeddings=vectors)
            layouts.append(store.stats().index_layout)
            nlists.append(getattr(store.faiss_index, "nlist", 0))
        assert layouts == ["flat", "ivf", "ivf", "ivf"]
        assert nlists[1] == nlists[2] == 7
        assert nlists[3] == 33
        store.delete([f"doc-{i}" for i in range(1200)])
        assert store.stats().index_layout == "flat"
        assert store.search_vector(vectors[-1], 1).documents[0].doc_id == "doc-1299"


def test_hnsw_omits_deleted_documents_and_is_rebuilt_after_many_deletions(folder: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((300, 8)).astype(np.float32)
    with DocumentStore.create(folder, index="hnsw", embedder=PrecomputedEmbedder()) as store:
        store.add(make_documents(300), embeddings=vectors)
        store.delete([f"doc-{i}" for i in range(40)])
        assert store.faiss_index.ntotal == 300
        assert all(d.metadata["number"] >= 40 for d in store.search_vector(vectors[3], 50).documents)
    with DocumentStore.open(folder) as store:
        generation = store.stats().generation
        assert all(d.metadata["number"] >= 40 for d in store.search_vector(vectors[3], 50).documents)
        store.close()
    with DocumentStore.open(folder) as store:
        assert store.stats().generation == generation, "closing without changes writes nothing"
        store.delete([f"doc-{i}" for i in range(40, 100)])
        assert store.faiss_index.ntotal == 200
        assert len(store.search_vector(vectors[3], 200).documents) == 200


def test_progress_is_called_with_counts_and_can_be_a_bar(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[int, int]] = []
    with DocumentStore.create(folder) as store:
        store.add(make_documents(10), progress=lambda done, total: calls.append((done, total)), batch_size=4)
        assert calls == [(10, 20), (14, 20), (18, 20), (20, 20)]  # it learns from the ten first
        calls.clear()
        store.add(make_documents(10, first=10), progress=lambda done, total: calls.append((done, total)), batch_size=4)
        assert calls == [(4, 10), (8, 10), (10, 10)]
        store.add(make_documents(10, first=20), progress=True, batch_size=4)
    assert "10/10" in capsys.readouterr().err


def test_a_reader_keeps_its_state_while_another_handle_writes(store: DocumentStore, folder: Path) -> None:
    with DocumentStore.open(folder, read_only=True) as reader:
        before = reader.search("Person7", 5)
        store.delete([f"doc-{i}" for i in range(15)])
        store.add(make_documents(50, first=100))
        assert reader.search("Person7", 5) == before
        assert len(reader.get(reader.ids())) == 20
    with DocumentStore.open(folder, read_only=True) as reader:
        assert len(reader) == 55


def test_a_read_only_store_takes_up_changes_when_it_is_refreshed(folder: Path) -> None:
    with DocumentStore.create(folder, index="flat") as writer:
        writer.add(make_documents(20))
        with DocumentStore.open(folder, read_only=True, rebuild_index=True) as reader:
            assert not reader.refresh()
            writer.delete(["doc-0"])
            assert len(reader) == 20
            assert reader.refresh()
            assert len(reader) == 19
            assert not reader.refresh()
        assert not writer.refresh()


def test_an_interrupt_after_the_commit_does_not_confuse_the_store(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragcache_core.retrieval.storage import writer

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(writer, "sweep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.add(make_documents(5, first=20))
    store.add(make_documents(5, first=30))
    assert len(store) == 30
    assert store.search("Person22", 1).documents[0].doc_id == "doc-22"


def test_staged_searches_import_neither_numba_nor_sklearn_nor_torch() -> None:
    code = """
import sys
import numpy as np
from ragcache_core.retrieval.base import Cancellation, IndexOptions
from ragcache_core.retrieval.index.choice import build_index
vectors = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
for kind in ("flat", "ivf", "hnsw"):
    index = build_index(np.arange(300), vectors, IndexOptions(kind=kind))
    assert len(list(index.stages(vectors[0], 5, (0.2, 1.0), Cancellation()))) == 2
print([name for name in ("numba", "llvmlite", "sklearn", "torch") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
