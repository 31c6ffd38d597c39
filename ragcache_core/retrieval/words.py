"""Words: how often each document has each, what each is worth, and how alike a question and every document are.

The measure is the cosine of TF-IDF vectors, computed exactly over an inverted list of each segment. Counts are stored,
weights are not: what a word is worth follows from all documents that a search begins with, whenever they were added.
A document's name, which is its id, ``title`` and ``source``, is counted as words of its text.
"""

from __future__ import annotations

import re
import threading
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ragcache_core.retrieval.base import Ids
from ragcache_core.retrieval.selection import Selection
from ragcache_core.types import Document

_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]+|[^\W{_CJK}]+")
_IS_CJK = re.compile(f"[{_CJK}]")

_NAME_COUNT = 2
"""How often a word of a document's name counts as one of its text. One finds a few named pages fewer."""
_NAMES_NOTHING = re.compile(r"#\d+$|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{16,}\b", re.IGNORECASE)
"""A chunk's number, a UUID, a hash."""
_NAMING_METADATA = ("title", "source")
_LARGEST_COUNT = np.iinfo(np.uint16).max
_TERMS_PER_BLOCK = 1 << 16

Terms = NDArray[np.uint32]
Similarities = NDArray[np.float64]


def count_words(text: str) -> Counter[int]:
    """Return how often ``text`` has each word: by the word's CRC-32, without its case. A text has at least one word.

    A letter and an accent behind it, as file names of macOS have them, are the letter with the accent.
    """
    words: list[str] = []
    for word in _WORD.findall(unicodedata.normalize("NFKC", text).casefold()):
        words.append(word)
        if _IS_CJK.match(word):  # written without spaces: characters and pairs of them
            words.extend(word)
            words.extend(a + b for a, b in pairwise(word))
    return Counter(zlib.crc32(word.encode("utf-8", "replace")) for word in words or [text])


def pack_words(document: Document) -> bytes:
    """Return the words of a document and its name, as a segment stores them: ascending terms, then their counts.

    ``n`` little-endian ``uint32`` and ``n`` ``uint16``.
    """
    counts = count_words(document.text)
    named = [document.doc_id, *(document.metadata.get(key) for key in _NAMING_METADATA)]
    name = " ".join(_NAMES_NOTHING.sub(" ", part) for part in named if isinstance(part, str))
    if name.strip():
        for term in count_words(name):
            counts[term] += _NAME_COUNT
    terms = sorted(counts)
    packed = np.array([min(counts[term], _LARGEST_COUNT) for term in terms], "<u2")
    return np.array(terms, "<u4").tobytes() + packed.tobytes()


@dataclass(frozen=True, eq=False)
class Postings:
    """Which of a segment's documents have a word, and how often. Immutable.

    Six bytes for each different word of each document. ``ids: [n]`` are the documents' internal ids, ascending;
    ``terms: [t]``, ascending, have their documents at ``starts[i]:starts[i + 1]`` of ``rows`` and ``counts``.
    """

    ids: Ids
    terms: Terms
    starts: NDArray[np.int64]
    rows: NDArray[np.int32]
    counts: NDArray[np.uint16]

    @classmethod
    def build(cls, packed: Iterable[tuple[int, bytes]]) -> Postings:
        """Return the lists of documents by internal id, with what :func:`pack_words` returned."""
        ids, lengths, terms, counts = [], [], [np.zeros(0, np.uint32)], [np.zeros(0, np.uint16)]
        for internal_id, words in packed:
            length = len(words) // 6
            ids.append(internal_id)
            lengths.append(length)
            terms.append(np.frombuffer(words, "<u4", length))
            counts.append(np.frombuffer(words, "<u2", length, offset=4 * length))
        of_rows = np.concatenate(terms)
        order = np.argsort(of_rows, kind="stable")
        in_order = of_rows[order]
        begins = np.flatnonzero(np.concatenate(([True], in_order[1:] != in_order[:-1]))[: len(in_order)])
        rows = np.repeat(np.arange(len(ids), dtype=np.int32), lengths)
        return cls(
            np.array(ids, np.int64),
            in_order[begins],
            np.append(begins, len(in_order)).astype(np.int64),
            rows[order],
            np.concatenate(counts)[order],
        )

    def num_documents_with(self, is_live: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return how many live documents have each term: ``[t]``."""
        if is_live.all() or not len(self.terms):
            return np.diff(self.starts)
        return np.add.reduceat(is_live[self.rows].astype(np.int64), self.starts[:-1])

    def documents_with(self, term: int) -> slice:
        """Return where ``rows`` and ``counts`` have the documents of a term."""
        at = int(np.searchsorted(self.terms, np.uint32(term)))
        if at == len(self.terms) or self.terms[at] != term:
            return slice(0, 0)
        return slice(int(self.starts[at]), int(self.starts[at + 1]))


class WordWeights:
    """What words are worth (their inverse document frequency), by the live documents of some segments."""

    def __init__(self, segments: Sequence[tuple[Postings, NDArray[np.bool_]]]) -> None:
        self._terms: Terms = np.unique(np.concatenate([np.zeros(0, np.uint32), *(part.terms for part, _ in segments)]))
        frequency = np.zeros(len(self._terms), np.int64)
        for part, is_live in segments:
            frequency[np.searchsorted(self._terms, part.terms)] += part.num_documents_with(is_live)
        self._num_documents = sum(int(is_live.sum()) for _, is_live in segments)
        self._idf: Similarities = self._weigh(frequency)
        self._lengths: dict[Postings, Similarities] = {}
        self._measuring = threading.Lock()

    def _weigh(self, frequency: NDArray[np.int64]) -> Similarities:
        weights: Similarities = np.log((1 + self._num_documents) / (1 + frequency)) + 1
        return weights

    def similarities(self, postings: Postings, words: Mapping[int, int]) -> Similarities:
        """Return the cosine of a question with each document of a segment: ``[n]``, from 0 to 1.

        A document's number depends on its words, the question's and the weights alone, not on its segment.
        """
        terms = sorted(words)
        idf = self._idf_of(np.array(terms, np.uint32))
        found = np.zeros(len(postings.ids))
        for term, weight in zip(terms, (idf**2).tolist(), strict=True):
            there = postings.documents_with(term)
            found[postings.rows[there]] += postings.counts[there] * (words[term] * weight)
        length = float(np.linalg.norm(idf * [words[term] for term in terms]))
        similar: Similarities = found / (self._lengths_of(postings) * length)
        return similar

    def _idf_of(self, terms: Terms) -> Similarities:
        at = np.searchsorted(self._terms, terms)
        idf = np.append(self._idf, np.inf)[at]
        is_known = np.append(self._terms, np.uint32(0))[at] == terms
        is_known &= at < len(self._terms)
        unknown = self._weigh(np.zeros(1, np.int64))
        return np.where(is_known, idf, unknown)

    def _lengths_of(self, postings: Postings) -> Similarities:
        with self._measuring:
            if postings not in self._lengths:
                idf = self._idf[np.searchsorted(self._terms, postings.terms)]
                squared = np.zeros(len(postings.ids))
                for first in range(0, len(idf), _TERMS_PER_BLOCK):
                    last = min(first + _TERMS_PER_BLOCK, len(idf))
                    there = slice(int(postings.starts[first]), int(postings.starts[last]))
                    values = postings.counts[there] * np.repeat(
                        idf[first:last], np.diff(postings.starts[first : last + 1])
                    )
                    np.add.at(squared, postings.rows[there], values**2)  # one after the other: blocks round alike
                self._lengths[postings] = np.sqrt(squared)
            return self._lengths[postings]


class WordMatches:
    """How alike a question and each live document of some segments are, by their words."""

    def __init__(
        self,
        segments: Sequence[tuple[Postings, NDArray[np.bool_]]],
        weights: WordWeights,
        words: Mapping[int, int],
    ) -> None:
        self._ids: Ids = np.concatenate([np.zeros(0, np.int64), *(part.ids for part, _ in segments)])
        similar = [np.where(is_live, weights.similarities(part, words), 0.0) for part, is_live in segments]
        self._similarities: Similarities = np.concatenate([np.zeros(0), *similar])

    def best(self, count: int, among: Selection | None = None) -> Ids:
        """Return the ids of the ``count`` most alike documents, of equals the first, in no order.

        Documents that have no word of the question are none of them.
        """
        matching = np.flatnonzero(self._similarities)
        if among is not None:
            matching = matching[among.has(self._ids[matching])]
        if len(matching) > count:
            similar = self._similarities[matching]
            least = np.partition(similar, len(matching) - count)[len(matching) - count]
            above, equal = matching[similar > least], matching[similar == least]
            matching = np.concatenate((above, equal[: count - len(above)]))
        return self._ids[matching]

    def of(self, ids: Ids) -> Similarities:
        """Return how alike stored documents are: ``[len(ids)]``."""
        similar: Similarities = self._similarities[np.searchsorted(self._ids, ids)]
        return similar
