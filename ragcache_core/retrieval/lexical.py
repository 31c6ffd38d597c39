"""Lexical search: words of documents in an FTS5 table of each segment, and BM25 over all segments of a snapshot.

FTS5 ranks by the statistics of one table, and a store has several segments. So FTS5 holds the inverted index, and BM25
is computed here from the live documents of all segments. A score depends on the documents of the snapshot alone, not on
the order in which they were added. The words of a document's name (its id, ``title`` and ``source``) are added to those
of its text.
"""

from __future__ import annotations

import math
import re
import sqlite3
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcache_core.retrieval.base import Ids
from ragcache_core.retrieval.filters import Mask, Selection
from ragcache_core.types import DocId

_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]+|[^\W{_CJK}]+")
_IS_CJK = re.compile(f"[{_CJK}]")

_NAME_COUNT = 8  # occurrences that a word of the name adds
_NOT_A_NAME = re.compile(  # the number of a text chunk, a UUID, a hash
    r"#\d+$|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{16,}\b", re.IGNORECASE
)
_NAMING_METADATA = ("title", "source")

# BM25's saturation of term frequency and its weight of document length. With k1 = 1.2, as FTS5 and Lucene have it, 90 %
# of 1,000 questions that name a page of Python's help find that page first, with 3.0 it is 96 %.
_K1 = 3.0
_B = 0.75
_STEEPNESS = 2.5  # of the map from BM25 to scores
_MAX_CACHED_WORDS = 1000

Similarities = NDArray[np.float64]
Posting = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Rows of the documents that have a word, and its number of occurrences in each."""


def words_of(text: str) -> list[str]:
    """Return the words of ``text`` in lower case, in NFKC form; of CJK text also each character and each pair.

    Args:
        text: any text. CJK text has no spaces between words.
    """
    words: list[str] = []
    for word in _WORD.findall(unicodedata.normalize("NFKC", text).casefold()):
        words.append(word)
        if _IS_CJK.match(word):
            words.extend(word)
            words.extend(first + second for first, second in pairwise(word))
    return words


def document_words(doc_id: DocId, text: str, metadata: Mapping[str, Any]) -> list[str]:
    """Return the words of a document and of its name."""
    names = [doc_id, *(metadata.get(key) for key in _NAMING_METADATA)]
    name = " ".join(_NOT_A_NAME.sub(" ", part) for part in names if isinstance(part, str))
    return words_of(text) + _NAME_COUNT * words_of(name)


class WordIndexWriter:
    """Creates the word index of a segment in a schema of its SQLite connection: ``main``, or ``temp`` in memory."""

    def __init__(self, connection: sqlite3.Connection, schema: str = "main") -> None:
        # The words are separated already: of the tokenizer "ascii" no other character ends a word.
        connection.execute(
            f"CREATE VIRTUAL TABLE {schema}.words "
            "USING fts5(text, content='', columnsize=0, tokenize=\"ascii tokenchars '_'\")"
        )
        connection.execute(
            f"CREATE TABLE {schema}.word_counts (internal_id INTEGER PRIMARY KEY, num_words INTEGER NOT NULL)"
        )
        self._connection = connection
        self._schema = schema

    def add(self, internal_id: int, words: Sequence[str]) -> None:
        """Add a document. Internal ids ascend."""
        self._connection.execute(
            f"INSERT INTO {self._schema}.words (rowid, text) VALUES (?, ?)",  # noqa: S608
            (internal_id, " ".join(words)),
        )
        self._connection.execute(
            f"INSERT INTO {self._schema}.word_counts VALUES (?, ?)",  # noqa: S608
            (internal_id, len(words)),
        )


class WordIndex:
    """The word index of one segment, with the postings of recently searched words in memory. Thread-safe.

    Attributes:
        ids: internal ids of the segment's documents, ascending, ``[n]``.
        num_words: length of each document in words, ``[n]``.
    """

    def __init__(self, query: Callable[[str, Sequence[object]], list[Any]]) -> None:
        """``query`` executes SQL on the segment's connection and returns the rows."""
        self._query = query
        self._lock = threading.Lock()
        self._postings: dict[str, Posting] = {}
        rows = query("SELECT internal_id, num_words FROM word_counts ORDER BY internal_id", ())
        table = np.array(rows, np.int64).reshape(-1, 2)
        self.ids: Ids = np.ascontiguousarray(table[:, 0])
        self.num_words: NDArray[np.int64] = np.ascontiguousarray(table[:, 1])

    def posting(self, word: str) -> Posting:
        """Return the rows of the documents that have ``word``, as positions in :attr:`ids`, and its counts."""
        with self._lock:
            posting = self._postings.pop(word, None)
            if posting is None:
                found = self._query("SELECT doc, count(*) FROM temp.word_places WHERE term = ? GROUP BY doc", (word,))
                table = np.array(found, np.int64).reshape(-1, 2)
                rows = np.searchsorted(self.ids, table[:, 0])
                posting = rows.astype(np.int32), table[:, 1].astype(np.int32)
            self._postings[word] = posting  # the most recently used is last
            while len(self._postings) > _MAX_CACHED_WORDS:
                del self._postings[next(iter(self._postings))]
            return posting


class WordScores:
    """BM25 of every document for one question, mapped to scores from 0 to 1 in the same order.

    ``score = 1 - exp(-2.5 BM25 / typical)``, where ``typical`` is the BM25 of a document of mean length that has each
    word as often as the question has it. Such a document has a score of 0.92.
    """

    def __init__(self, segments: Sequence[tuple[WordIndex, Mask]], words: Iterable[str]) -> None:
        """Score the documents of ``segments``, each with the mask of its live documents: ``[n]``."""
        self._ids: Ids = np.concatenate([np.zeros(0, np.int64), *(index.ids for index, _ in segments)])
        num_live = sum(int(is_live.sum()) for _, is_live in segments)
        num_words = sum(int(index.num_words[is_live].sum()) for index, is_live in segments)
        mean_length = max(1.0, num_words / max(1, num_live))
        norms = [_K1 * (1 - _B + _B * index.num_words / mean_length) for index, _ in segments]
        scores = [np.zeros(len(index.ids)) for index, _ in segments]
        typical = 0.0
        for word, num_in_query in sorted(Counter(words).items()):
            postings = [index.posting(word) for index, _ in segments]
            num_with = sum(int(is_live[rows].sum()) for (rows, _), (_, is_live) in zip(postings, segments, strict=True))
            weight = num_in_query * math.log(1 + (num_live - num_with + 0.5) / (num_with + 0.5))
            typical += weight * num_in_query / (num_in_query + _K1)
            for (rows, counts), score, norm in zip(postings, scores, norms, strict=True):
                score[rows] += weight * counts / (counts + norm[rows])
        live = [np.where(is_live, score, 0.0) for (_, is_live), score in zip(segments, scores, strict=True)]
        self._scores: Similarities = -np.expm1(np.concatenate([np.zeros(0), *live]) * (-_STEEPNESS / (typical or 1.0)))

    def best(self, count: int, among: Selection | None = None) -> Ids:
        """Return the ids of the ``count`` documents with the highest scores above 0, in no order; ties by lowest id."""
        matching = np.flatnonzero(self._scores)
        if among is not None:
            matching = matching[among.has(self._ids[matching])]
        if len(matching) > count:
            scores = self._scores[matching]
            least = np.partition(scores, len(matching) - count)[len(matching) - count]
            above, equal = matching[scores > least], matching[scores == least]
            matching = np.concatenate((above, equal[: count - len(above)]))
        return self._ids[matching]

    def of(self, ids: Ids) -> Similarities:
        """Return the scores of stored documents: ``[len(ids)]``."""
        scores: Similarities = self._scores[np.searchsorted(self._ids, ids)]
        return scores
