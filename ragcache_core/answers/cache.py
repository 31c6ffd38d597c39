"""Answers that were given, for questions that are near enough to those they were given to."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from ragcache_core.answers.asked import AskedPrompt, content_hash
from ragcache_core.answers.storage import AnswerFile, Row
from ragcache_core.answers.words import WordEmbedder
from ragcache_core.errors import ConfigError
from ragcache_core.retrieval.base import Vectors
from ragcache_core.retrieval.embedders.base import Embedder, as_embedder, check_query
from ragcache_core.runtime.handle import Handle
from ragcache_core.types import DocId, Document

_PROBE = "Who asked this question, and when?"
"""Embedders that give the same vector for it are taken for the same."""
_NUM_FORGOTTEN_KEPT = 10_000

_logger = logging.getLogger(__name__)


class _Documents(Protocol):
    """What is asked of a store."""

    def __contains__(self, doc_id: object) -> bool: ...

    def get(self, doc_ids: list[DocId]) -> list[Document]: ...


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """An answer that was given before: to which question, ``None`` for the very same prompt, and how near that is."""

    answer: str
    question: str | None
    similarity: float


@dataclass(slots=True)
class _Kept:
    asked: AskedPrompt
    answer: str
    vector: Vectors | None = field(repr=False)


class AnswerCache(Handle):
    """Answers, found again by questions of nearly the same meaning about the very same documents.

    Two prompts share an answer if all but the question is equal (:func:`~ragcache_core.answers.asked.ask`) and the
    cosine of their questions' vectors is at least ``threshold``: this is approximate. A document that was changed makes
    another prompt; what was said of its former text is dropped when the new one is seen, or by :meth:`forget`.

    All methods may be called from several threads. What cannot be embedded, read or written is a miss.

    Args:
        embedder: what compares questions: a sentence embedder of ours, of LangChain or of LlamaIndex, or a store with
            one. Without it they are compared by their words, which seldom finds one, and hardly ever a wrong one.
        threshold: the least cosine, above 0 and at most 1, which lets nothing but equal questions share an answer.
        max_answers: how many are kept; the one that was longest not asked for goes first.
        folder: where they outlive the process, readable by their owner alone; one process at a time.

    Raises:
        ConfigError: a value that cannot work, an embedder that embeds nothing, or the built-in one, which knows the
            words of documents alone.
        StoreLockedError: another process uses the folder. StoreCorruptError, StoreError
    """

    def __init__(
        self,
        embedder: object | None = None,
        *,
        threshold: float = 0.92,
        max_answers: int = 1000,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
            raise ConfigError(f"threshold is {threshold!r}: give a cosine above 0, and at most 1")
        if isinstance(max_answers, bool) or not isinstance(max_answers, int) or max_answers < 1:
            raise ConfigError(f"max_answers is {max_answers!r}: give a whole number of at least 1")
        self._embedder = _compares_questions(embedder)
        self._threshold = threshold
        self._max_answers = max_answers
        self._lock = threading.RLock()
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._by_key: dict[str, list[int]] = {}
        self._by_document: dict[DocId, dict[int, None]] = {}
        self._forgotten: OrderedDict[DocId, int] = OrderedDict()
        self._num_forgets = self._next = 0
        self._vector_of = lru_cache(maxsize=256)(self._embedded)
        try:
            probe = self._vector_of(_PROBE)
        except Exception as error:
            raise ConfigError(
                f"the embedder embeds no question ({error}): pass one that does, or a store that has documents"
            ) from error
        self._file = None if folder is None else AnswerFile(folder)
        if self._file is not None:
            self._load(self._file, probe)

    def __len__(self) -> int:
        return len(self._kept)

    def now(self) -> int:
        """Return a moment for :meth:`keep`: documents that are forgotten later were known to who asked then."""
        return self._num_forgets

    def find(self, asked: AskedPrompt) -> FoundAnswer | None:
        """Return the answer to the nearest question that is near enough, if there is one."""
        with self._lock:
            self._drop_former(asked)
            candidates = [(i, self._kept[i]) for i in self._by_key.get(asked.key, ())]
        if not candidates:
            return None
        number, similarity = next((i for i, kept in candidates if kept.asked.question == asked.question), None), 1.0
        if number is None:
            if (vector := self._try_vector(asked.question)) is None:
                return None
            near = [(float(kept.vector @ vector), i) for i, kept in candidates if kept.vector is not None]
            similarity, number = max(near, default=(0.0, None))
            if similarity < self._threshold:
                return None
        with self._lock:
            if number is None or (kept := self._kept.get(number)) is None:
                return None
            self._kept.move_to_end(number)
            return FoundAnswer(kept.answer, kept.asked.question, min(similarity, 1.0))

    def keep(self, asked: AskedPrompt, answer: str, *, since: int | None = None) -> None:
        """Keep the answer to a prompt that was asked at the moment ``since``, by default now.

        It is not kept if one of its documents was forgotten meanwhile.
        """
        vector = self._try_vector(asked.question)
        with self._lock:
            since = self._num_forgets if since is None else since
            if any(self._forgotten.get(doc_id, 0) > since for doc_id, _ in asked.documents):
                return
            self._drop_former(asked)
            same = [i for i in self._by_key.get(asked.key, ()) if self._kept[i].asked.question == asked.question]
            number = self._add(_Kept(asked, answer, vector))
            excess = list(self._kept)[: max(len(self._kept) - len(same) - self._max_answers, 0)]
            self._drop([*same, *excess])
            if self._file is not None:
                self._file.put(_row(number, self._kept[number]))

    def forget(self, doc_ids: Iterable[DocId]) -> int:
        """Drop every answer that stands on one of these documents, in any version; return how many there were."""
        doc_ids = [doc_ids] if isinstance(doc_ids, str) else list(doc_ids)
        with self._lock:
            self._num_forgets += 1
            for doc_id in doc_ids:
                self._forgotten[doc_id] = self._num_forgets
                self._forgotten.move_to_end(doc_id)
            while len(self._forgotten) > _NUM_FORGOTTEN_KEPT:
                self._forgotten.popitem(last=False)
            return self._drop(number for doc_id in doc_ids for number in self._by_document.get(doc_id, ()))

    def forget_outdated(self, store: _Documents, shown: Callable[[Document], str] = lambda d: d.text) -> int:
        """Drop every answer that stands on a document which ``store`` does not hold, or not as it was shown then.

        ``shown`` is how prompts show a document. Return how many answers there were.
        """
        with self._lock:
            known = [doc_id for doc_id in self._by_document if doc_id in store]
            versions = {d.doc_id: content_hash(shown(d)) for d in store.get(known)}
            return self._drop(
                number
                for number, kept in self._kept.items()
                if any(versions.get(doc_id) != version for doc_id, version in kept.asked.documents)
            )

    def clear(self) -> None:
        """Drop every answer."""
        with self._lock:
            self._drop(self._kept)

    def close(self) -> None:
        """Let another process use the folder. May be called twice."""
        with self._lock:
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, kept: _Kept, number: int | None = None) -> int:
        number = self._next if number is None else number
        self._next = number + 1
        self._kept[number] = kept
        self._by_key.setdefault(kept.asked.key, []).append(number)
        for doc_id, _ in kept.asked.documents:
            self._by_document.setdefault(doc_id, {})[number] = None
        return number

    def _drop(self, numbers: Iterable[int]) -> int:
        gone = list(dict.fromkeys(numbers))
        for number in gone:
            asked = self._kept.pop(number).asked
            self._by_key[asked.key].remove(number)
            if not self._by_key[asked.key]:
                del self._by_key[asked.key]
            for doc_id in dict.fromkeys(doc_id for doc_id, _ in asked.documents):
                del self._by_document[doc_id][number]
                if not self._by_document[doc_id]:
                    del self._by_document[doc_id]
        if self._file is not None and gone:
            self._file.remove(gone)
        return len(gone)

    def _drop_former(self, asked: AskedPrompt) -> None:
        """Drop what was said of other versions of the documents that are shown now."""
        versions: dict[DocId, set[str]] = {}
        for doc_id, version in asked.documents:
            versions.setdefault(doc_id, set()).add(version)
        self._drop(
            number
            for doc_id, current in versions.items()
            for number in self._by_document.get(doc_id, ())
            if any(i == doc_id and version not in current for i, version in self._kept[number].asked.documents)
        )

    def _load(self, file: AnswerFile, probe: Vectors) -> None:
        is_same = file.begin(probe.tobytes())
        for row in file.rows():
            vector = np.frombuffer(row.vector, np.float32) if row.vector is not None else None
            if not is_same:
                vector = self._try_vector(row.question)
            kept = _Kept(AskedPrompt(row.key, row.question, row.documents), row.answer, vector)
            self._add(kept, row.number)
            if not is_same:
                file.put(_row(row.number, kept))
        self._drop(list(self._kept)[: max(len(self._kept) - self._max_answers, 0)])

    def _embedded(self, question: str) -> Vectors:
        vector = check_query(self._embedder.embed_query(question), None)
        length = float(np.linalg.norm(vector))
        return vector / length if length > 0 else vector

    def _try_vector(self, question: str | None) -> Vectors | None:
        if question is None:
            return None
        try:
            return self._vector_of(question)
        except Exception as error:
            _logger.warning("a question could not be embedded, and no answer is looked for: %s", error)
            return None


def _compares_questions(embedder: object | None) -> Embedder:
    if embedder is None:
        return WordEmbedder()
    chosen = as_embedder(getattr(embedder, "embedder", embedder))
    if "tfidfsvd" in chosen.name.lower().replace("-", ""):
        raise ConfigError(
            "the built-in embedder knows the words of documents alone, and takes who and when for the same: leave it "
            "out to compare questions by their words, or pass a sentence embedder, MiniLMEmbedder() for example"
        )
    return chosen


def _row(number: int, kept: _Kept) -> Row:
    vector: Any = None if kept.vector is None else kept.vector.tobytes()
    return Row(number, kept.asked.key, kept.asked.question, kept.answer, kept.asked.documents, vector)
