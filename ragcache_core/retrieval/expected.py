"""What will be retrieved from a store: by questions that were asked, or where there are none by its documents' own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from ragcache_core.errors import EmptyStoreError
from ragcache_core.retrieval.reader import StoreReader
from ragcache_core.types import DocId, Document

_MAX_ASKED: Final = 2_000
"""Documents of a store, evenly spread, that are asked about: a search takes about a millisecond."""
_QUESTION_CHARS: Final = 200

_Progress = Callable[[int], object]


def retrieved_for(store: StoreReader, questions: Iterable[str], k: int, progress: _Progress) -> list[tuple[DocId, ...]]:
    """Return what the store's own search finds for each question, the best first; ``progress`` is told of each.

    Raises:
        SearchError, EmptyStoreError
    """
    found = []
    for question in questions:
        found.append(tuple(document.doc_id for document in store.search(question, k).documents))
        progress(1)
    return found


def retrieved_by_popularity(store: StoreReader, k: int, progress: _Progress) -> list[tuple[DocId, ...]]:
    """Return what is found for the beginning of each of the store's documents, without the document itself.

    It stands for questions that are not known: what is near to much else is found often.

    Raises:
        EmptyStoreError: there is no document.
    """
    ids = store.ids()
    if not ids:
        raise EmptyStoreError(f"{store.path} is empty: index documents before they are warmed")
    found = []
    for document in store.get(ids[:: -(-len(ids) // _MAX_ASKED)]):
        near = store.search(_beginning(document), k + 1).documents
        others = tuple(other.doc_id for other in near if other.doc_id != document.doc_id)
        found.append(others[:k] or (document.doc_id,))
        progress(1)
    return found


def num_asked_for_popularity(store: StoreReader) -> int:
    """Return how many searches :func:`retrieved_by_popularity` takes."""
    return -(-len(store) // -(-len(store) // _MAX_ASKED)) if len(store) else 0


def most_retrieved(found: Iterable[tuple[DocId, ...]], num_documents: int) -> list[tuple[DocId, ...]]:
    """Return what was found, each up to the first document that is not among the ``num_documents`` found most."""
    found = list(found)
    counts = Counter(doc_id for ids in found for doc_id in ids)
    top = {doc_id for doc_id, _ in counts.most_common(num_documents)}
    return [up_to_unknown(ids, top.__contains__) for ids in found]


def up_to_unknown(ids: tuple[DocId, ...], is_known: Callable[[DocId], bool]) -> tuple[DocId, ...]:
    """Return the ids before the first that is not known."""
    return ids[: next((i for i, doc_id in enumerate(ids) if not is_known(doc_id)), len(ids))]


def _beginning(document: Document) -> str:
    title = document.metadata.get("title")
    return title if isinstance(title, str) and title.strip() else document.text[:_QUESTION_CHARS]
