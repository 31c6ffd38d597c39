"""Whatever is done to a store, it holds what a dict would hold and finds what numpy would find."""

from __future__ import annotations

import errno
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ragcache_core import errors
from ragcache_core.retrieval import DocumentStore, PrecomputedEmbedder
from ragcache_core.retrieval.storage import writer
from ragcache_core.types import Document

from .test_durability import failing_at

DIMENSION = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "flat": {"index": "flat"},
    "ivf": {"index": "ivf", "nlist": 4, "nprobe": 4},  # probes every list: exact
    "hnsw": {"index": "hnsw", "ef_search": 500, "hnsw_m": 16},
}


class StoreMachine(RuleBasedStateMachine):
    """The store against a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.model: dict[str, tuple[Document, np.ndarray[Any, Any]]] = {}
        self.rng = np.random.default_rng(0)
        self.serial = 0
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(writer, "_SMALL_INDEX_BYTES", 0)  # so that the saved index lags behind

    @initialize(kind=st.sampled_from(sorted(OPTIONS)), metric=st.sampled_from(["l2", "ip"]))
    def make(self, kind: str, metric: Any) -> None:
        self.path, self.metric = Path(self.folder.name) / "store", metric
        self.store = DocumentStore.create(
            self.path, metric=metric, embedder=PrecomputedEmbedder(DIMENSION), **OPTIONS[kind]
        )

    def _batch(self, count: int) -> tuple[list[Document], Any]:
        documents = []
        for _ in range(count):
            self.serial += 1
            # Ids come back after they were deleted.
            doc_id = f"id-{self.serial % 60}"
            if doc_id not in self.model and doc_id not in {d.doc_id for d in documents}:
                documents.append(Document(doc_id, f"text {self.serial}", {"serial": self.serial}))
        return documents, self.rng.standard_normal((len(documents), DIMENSION)).astype(np.float32)

    @rule(count=st.integers(1, 25))
    def add(self, count: int) -> None:
        documents, vectors = self._batch(count)
        assert self.store.add(documents, embeddings=vectors if documents else None) == [d.doc_id for d in documents]
        self.model.update({d.doc_id: (d, v) for d, v in zip(documents, vectors, strict=True)})

    @rule(count=st.integers(1, 5), data=st.data())
    def put(self, count: int, data: Any) -> None:
        documents, _ = self._batch(count)
        if self.model:
            again = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
            documents += [Document(doc_id, f"changed by {self.serial}", {"new": True}) for doc_id in again]
        if not documents:
            return
        vectors = self.rng.standard_normal((len(documents), DIMENSION)).astype(np.float32)
        self.store.put(documents, embeddings=vectors)
        for document, vector in zip(documents, vectors, strict=True):
            self.model.pop(document.doc_id, None)  # what is put comes last
            self.model[document.doc_id] = document, vector

    @rule(count=st.integers(1, 5), step=st.integers(1, 4))
    def fail_to_add(self, count: int, step: int) -> None:
        documents, vectors = self._batch(count)
        if documents:
            with pytest.MonkeyPatch.context() as patched:
                failing_at(patched, step, errno.ENOSPC)
                with pytest.raises(errors.StoreFullError):
                    self.store.add(documents, embeddings=vectors)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def add_a_duplicate(self, data: Any) -> None:
        documents, vectors = self._batch(3)
        taken = self.model[data.draw(st.sampled_from(sorted(self.model)))][0]
        with pytest.raises(errors.DuplicateDocumentError):
            self.store.add([*documents, taken], embeddings=np.vstack((vectors, np.ones((1, DIMENSION)))))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data: Any) -> None:
        gone = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, max_size=len(self.model)))
        self.store.delete(gone)
        for doc_id in gone:
            del self.model[doc_id]

    @rule()
    def delete_an_unknown(self) -> None:
        with pytest.raises(errors.UnknownDocumentError):
            self.store.delete([*self.model, "unknown"])

    @rule(rebuild=st.booleans())
    def reopen(self, rebuild: bool) -> None:
        self.store.close()
        self.store = DocumentStore.open(self.path, rebuild_index=rebuild)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def search(self, data: Any) -> None:
        k = data.draw(st.integers(1, len(self.model)))
        query = self.rng.standard_normal(DIMENSION).astype(np.float32)
        vectors = np.stack([vector for _, vector in self.model.values()])
        true = vectors @ query if self.metric == "ip" else ((vectors - query) ** 2).sum(axis=1)
        best = np.sort(-true if self.metric == "ip" else true)[:k]
        update = self.store.search_vector(query, k)
        scores = np.array(update.scores)
        np.testing.assert_allclose(-scores if self.metric == "ip" else scores, best, rtol=1e-3, atol=1e-4)
        score_of = dict(zip(self.model, true.tolist(), strict=True))
        for document, score in zip(update.documents, update.scores, strict=True):
            assert document == self.model[document.doc_id][0]
            assert score == pytest.approx(score_of[document.doc_id], rel=1e-3, abs=1e-4)

    @precondition(lambda self: not self.model)
    @rule()
    def search_the_empty_store(self) -> None:
        with pytest.raises(errors.EmptyStoreError):
            self.store.search_vector(np.ones(DIMENSION), 1)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "store"):
            return
        assert len(self.store) == len(self.model)
        assert self.store.ids() == list(self.model)
        assert self.store.get(self.model) == [document for document, _ in self.model.values()]
        entries = self.store._snapshot.manifest.segments
        assert all(a.end_id <= b.first_id for a, b in pairwise(entries))

    def teardown(self) -> None:
        self.patched.undo()
        if hasattr(self, "store"):
            self.store.close()
        self.folder.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
TestStoreMachine = StoreMachine.TestCase
