"""The default search finds documents by their names: measured on the standard library's own help."""

from __future__ import annotations

import importlib
import pydoc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from ragcache_core.ingest import Splitting
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document

pytestmark = pytest.mark.slow

NOT_IMPORTED = {"antigravity", "idlelib", "this", "tkinter", "turtle", "turtledemo"}
"""They open windows and browsers, or print a poem."""
QUESTIONS = (
    "What does the module {} do?",
    "How do I use {}?",
    "Which functions does {} have?",
    "Tell me about the {} module of Python.",
    "what is {} for",
)
NUM_PAGES = 200


def pages() -> Iterator[tuple[str, str]]:
    """Yield the help of modules of the standard library by name."""
    for name in sorted(sys.stdlib_module_names - NOT_IMPORTED):
        if name.startswith("_"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield name, pydoc.render_doc(importlib.import_module(name), renderer=pydoc.plaintext)
        except Exception:
            continue


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """The pages in chunks, as ``ragcache index`` makes them of text files."""
    found = []
    for name, text in islice(pages(), NUM_PAGES):
        chunks = Splitting().split(text)
        for number, chunk in enumerate(chunks):
            doc_id = f"{name}.txt" if len(chunks) == 1 else f"{name}.txt#{number}"
            found.append(Document(doc_id, chunk, {"source": f"{name}.txt", "title": name, "chunk": number}))
    assert len({document.metadata["title"] for document in found}) == NUM_PAGES
    return found


def hits(documents: Sequence[Document], search: Callable[[str], Sequence[Document]]) -> tuple[int, int]:
    """Return how often the page asked for came first, and among the first five, over all questions."""
    names = sorted({str(document.metadata["title"]) for document in documents})
    first = five = 0
    for name in names:
        for question in QUESTIONS:
            found = [document.metadata["title"] for document in search(question.format(name))]
            first += found[0] == name
            five += name in found[:5]
    return first, five


def plain_tfidf(documents: Sequence[Document]) -> Callable[[str], Sequence[Document]]:
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer()
    rows = vectorizer.fit_transform([document.text for document in documents])

    def search(question: str) -> Sequence[Document]:
        similar = (rows @ vectorizer.transform([question]).T).toarray()[:, 0]
        return [documents[i] for i in np.argsort(-similar, kind="stable")[:5]]

    return search


@pytest.fixture(scope="module")
def plain_hits(documents: list[Document]) -> tuple[int, int]:
    return hits(documents, plain_tfidf(documents))


@pytest.mark.parametrize("index", ["ivf", "hnsw"])
def test_the_default_search_finds_named_pages_as_plain_tfidf_does(
    tmp_path: Path, documents: list[Document], plain_hits: tuple[int, int], index: str
) -> None:
    with DocumentStore.create(tmp_path / "store", index=index) as store:  # type: ignore[arg-type]
        store.add(documents)
        first, five = hits(documents, lambda question: store.search(question, 5).documents)
    plain_first, plain_five = plain_hits
    asked = NUM_PAGES * len(QUESTIONS)
    assert first >= plain_first
    assert five >= plain_five
    assert first > 0.95 * asked, f"{first} and {five} of {asked}"
    assert five > 0.97 * asked


def test_pages_that_come_later_and_one_by_one_are_found_by_name_too(tmp_path: Path, documents: list[Document]) -> None:
    by_page: dict[object, list[Document]] = {}
    for document in documents:
        by_page.setdefault(document.metadata["title"], []).append(document)
    with DocumentStore.create(tmp_path / "store", index="flat") as store:
        for page in list(by_page.values())[:60]:
            store.add(page)
        known = [document for page in list(by_page.values())[:60] for document in page]
        first, _ = hits(known, lambda question: store.search(question, 5).documents)
        plain_first, _ = hits(known, plain_tfidf(known))
    assert first >= plain_first
