"""Small stores and documents for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import faiss
import pytest
import threadpoolctl

from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document

TOWNS = ("Aro", "Brin", "Colt", "Dorn", "Elm", "Fenn", "Gale")
TRADES = ("baker", "miller", "smith", "weaver", "fisher")


def make_documents(num_documents: int, first: int = 0) -> list[Document]:
    """Return documents with words in common, each with a word of its own."""
    return [
        Document(
            f"doc-{i}",
            f"Person{i} is the {TRADES[i % 5]} of {TOWNS[i % 7]}, and knows Person{i * 3 % 11}.",
            {"number": i, "town": TOWNS[i % 7]},
        )
        for i in range(first, first + num_documents)
    ]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Teams of threads on a busy machine take longer than one."""
    with threadpoolctl.threadpool_limits(1):
        faiss.omp_set_num_threads(1)
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[DocumentStore]:
    """A store of 20 documents with the built-in embedder."""
    with DocumentStore.create(folder, index="flat") as made:
        made.add(make_documents(20))
        yield made
