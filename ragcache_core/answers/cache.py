"""Semantic answer cache: the key of a prompt; answers in memory and optionally in SQLite."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import filelock
import numpy as np

from ragcache_core.errors import ConfigError, StoreCorruptError, StoreError, StoreLockedError, StoreVersionError
from ragcache_core.log import logger_of
from ragcache_core.private_files import FILE_MODE, make_private_folder, open_private
from ragcache_core.prompt import ChatMessage, DocumentSpan, locate_documents
from ragcache_core.retrieval.base import Vectors, check_count
from ragcache_core.retrieval.embedders.base import as_embedder, check_query
from ragcache_core.retrieval.store import DocumentStore
from ragcache_core.runtime.handle import Handle
from ragcache_core.types import DocId, Document

# Embedders place "where was she born" near "when was she born", and one year near another.
_DISTINGUISHING_WORDS = re.compile(
    r"\d+(?:[.,:]\d+)*|\b(?:who|whom|whose|what|which|when|where|why|how)\b", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class QuestionKey:
    """The question of a prompt, (id, content hash) of its documents, and a hash of all parts that must be equal.

    The hash covers model, settings, instructions, conversation, documents and their order, and the numbers and English
    question words of the question. Where a prompt shows no known query ``question`` is ``None``, and all is hashed.
    """

    context_hash: str
    question: str | None
    documents: tuple[tuple[DocId, str], ...]


def parse_question(
    messages: Sequence[ChatMessage], settings: str, shown: Iterable[tuple[DocId, str]], queries: Iterable[str]
) -> QuestionKey:
    """Return the cache key of ``messages``.

    The question is the longest query in the last user message outside of its documents. An answer depends on the whole
    prompt, so all other text is hashed.

    Args:
        messages: the chat.
        settings: the model and its settings, serialised.
        shown: (id, text as shown) of documents that the messages may contain.
        queries: recent queries of retrievers.
    """
    shown, queries = list(shown), sorted({q for query in queries if (q := query.strip())}, key=len, reverse=True)
    context = [dict(message) for message in messages]
    texts = [_text_of(message) for message in context]
    spans = [locate_documents(text, shown, queries) if text else [] for text in texts]
    last = max((i for i, message in enumerate(context) if message.get("role") == "user"), default=None)
    question, words = None, []
    if last is not None and (place := _place_of(texts[last], queries, spans[last])) is not None:
        start, end = place
        question = texts[last][start:end]
        words = sorted(word.lower() for word in _DISTINGUISHING_WORDS.findall(question))
        context[last]["content"] = [texts[last][:start], texts[last][end:]]
    documents = dict.fromkeys(
        (span.doc_id, content_hash(text[span.start : span.end]))
        for text, found in zip(texts, spans, strict=True)
        for span in found
    )
    rest = json.dumps([settings, context, question is None, words], sort_keys=True, default=str)
    return QuestionKey(_sha256(rest), question, tuple(documents))


def content_hash(text: str) -> str:
    """Return the hash that identifies a version of a document."""
    return _sha256(text.strip())


def _text_of(message: Mapping[str, object]) -> str:
    match message.get("content"):
        case str(text) | [{"type": "text", "text": str(text)}]:
            return text
    return ""


def _place_of(text: str, queries: Iterable[str], spans: Sequence[DocumentSpan]) -> tuple[int, int] | None:
    """Return the last place outside of documents of the first query that ``text`` contains there."""
    for query in queries:
        start = text.rfind(query)
        while start >= 0:
            end = start + len(query)
            if not any(span.start < end and start < span.end for span in spans):
                return start, end
            start = text.rfind(query, 0, end - 1)
    return None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


_PROBE = "Who asked this question, and when?"  # embedders with an equal vector of it count as equal
_NUM_WORD_BUCKETS = 2048
_MAX_FORGOTTEN = 10_000
_FORMAT = 2  # format 1 has no checksums
_COLUMNS = "number INTEGER PRIMARY KEY, key TEXT, question TEXT, answer TEXT, documents TEXT, vector BLOB"
_INSERT = "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)"

logger = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """A cached answer, the question it was given to (``None`` for an equal prompt), and the cosine of the questions."""

    answer: str
    question: str | None
    similarity: float


class _Entry(NamedTuple):
    prompt: QuestionKey
    answer: str
    vector: Vectors | None

    def row(self, number: int) -> tuple[object, ...]:
        vector = None if self.vector is None else self.vector.tobytes()
        documents = json.dumps(self.prompt.documents)
        row = (number, self.prompt.context_hash, self.prompt.question, self.answer, documents, vector)
        return (*row, _checksum(row))


class AnswerCache(Handle, AbstractContextManager["AnswerCache"]):
    """Answers for questions of nearly the same meaning about the same versions of the same documents.

    Two prompts share an answer if everything but the question is equal
    (:func:`~ragcache_core.answers.cache.parse_question`) and the cosine of the questions' vectors is at least
    ``threshold``. This is approximate. Answers about an old version of a document are deleted when a prompt shows a
    new one, or by :meth:`forget`. A question that cannot be embedded is a miss, and so is a damaged row. Thread-safe.

    Args:
        embedder: compares questions: a sentence embedder of ours, of LangChain or of LlamaIndex, or a store with one.
            The default compares their words, which finds few rewordings and almost no wrong answer.
        threshold: minimum cosine, above 0 and at most 1; with 1 only equal questions share an answer.
        max_answers: capacity; the least recently used answer is evicted.
        folder: where answers outlive the process, readable by their owner alone; one process at a time.

    Raises:
        ConfigError: an invalid value, an embedder that embeds nothing, or the built-in one.
        StoreError: the folder cannot be used (StoreLockedError, StoreCorruptError, StoreVersionError).
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
        check_count("max_answers", max_answers, 1)
        self._threshold = threshold
        self._max_answers = max_answers
        self._lock = threading.RLock()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # the least recently used first
        self._by_context: dict[str, set[int]] = {}
        self._by_document: dict[DocId, dict[str, set[int]]] = {}  # id -> version -> answers
        self._next_number = 1
        self._undeleted: set[int] = set()  # deleted from memory, but not from the file yet
        self._forgotten: deque[tuple[int, DocId]] = deque(maxlen=_MAX_FORGOTTEN)
        self._num_forgets = 0
        self._is_warned = False
        self._db: sqlite3.Connection | None = None
        self._embed = lru_cache(maxsize=256)(_embedding(embedder))
        try:
            probe = self._embed(_PROBE)
        except Exception as error:
            raise ConfigError(
                f"the embedder embeds no question ({error}): pass one that does, or a store that has documents"
            ) from error
        if folder is not None:
            self._open(Path(folder).absolute() / "answers.sqlite", probe.tobytes())

    def __len__(self) -> int:
        return len(self._entries)

    def now(self) -> int:
        """Return the time for ``since`` of :meth:`keep`: the number of calls of :meth:`forget`."""
        return self._num_forgets

    def find(self, prompt: QuestionKey) -> FoundAnswer | None:
        """Return the answer to the most similar question, if its cosine reaches the threshold."""
        with self._lock:
            self._try_write(lambda: self._delete(self._outdated(prompt)))
            candidates = [(n, self._entries[n]) for n in sorted(self._by_context.get(prompt.context_hash, ()))]
        number, similarity = next((n for n, e in candidates if e.prompt.question == prompt.question), None), 1.0
        if number is None and candidates and (vector := self._try_embed(prompt.question)) is not None:
            scores = [(float(e.vector @ vector), n) for n, e in candidates if e.vector is not None]
            similarity, number = max(scores, default=(0.0, None))
        with self._lock:
            if number is None or similarity < self._threshold or (found := self._entries.get(number)) is None:
                return None
            self._entries.move_to_end(number)
            return FoundAnswer(found.answer, found.prompt.question, min(similarity, 1.0))

    def keep(self, prompt: QuestionKey, answer: str, *, since: int | None = None) -> None:
        """Store the answer to a prompt; it replaces the answer to the same question.

        An answer about a document that was deleted from the cache after ``since``, a value of :meth:`now`, is not
        stored. The default is the current time.
        """
        entry = _Entry(prompt, answer, self._try_embed(prompt.question))
        with self._lock:
            forgotten = {doc_id for at, doc_id in self._forgotten if since is not None and at > since}
            if any(doc_id in forgotten for doc_id, _ in prompt.documents):
                return
            same_context = self._by_context.get(prompt.context_hash, ())
            replaced = self._outdated(prompt).union(n for n in same_context if self._entries[n].prompt == prompt)
            number, self._next_number = self._next_number, self._next_number + 1
            self._add(number, entry)
            num_excess = max(0, len(self._entries) - len(replaced) - self._max_answers)
            evicted = list(islice((n for n in self._entries if n not in replaced), num_excess))
            self._try_write(lambda: self._delete([*replaced, *evicted]))
            self._try_write(lambda: self._execute(_INSERT, [entry.row(number)]))

    def forget(self, doc_ids: Iterable[DocId]) -> int:
        """Delete every answer about one of these documents, in any version, and return the number of answers.

        Answers about them that are being generated are not stored. The deletion is on disk when this returns.

        Raises:
            StoreError: the answers are not found any more, but are still on disk: repeat the call.
        """
        forgotten = {doc_ids} if isinstance(doc_ids, str) else set(doc_ids)
        with self._lock:
            self._num_forgets += 1
            self._forgotten.extend((self._num_forgets, doc_id) for doc_id in forgotten)
            return self._delete(self._about(forgotten, lambda _, __: True))

    def forget_outdated(self, store: DocumentStore, shown: Callable[[Document], str] = lambda d: d.text) -> int:
        """Delete every answer about a document that ``store`` lacks or has in another version; see :meth:`forget`.

        ``shown`` returns the text of a document as prompts show it. Return the number of answers.
        """
        with self._lock:
            stored = store.get([doc_id for doc_id in self._by_document if doc_id in store])
            versions = {document.doc_id: content_hash(shown(document)) for document in stored}
            outdated = self._about(self._by_document, lambda doc_id, version: versions.get(doc_id) != version)
            return self._delete(outdated)

    def clear(self) -> None:
        """Delete every answer; see :meth:`forget`."""
        with self._lock:
            self._delete(self._entries)

    def close(self) -> None:
        """Release the folder and the loaded answers. Idempotent."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None
                self._file_lock.release()
                self._entries.clear()
                self._by_context.clear()
                self._by_document.clear()
                self._undeleted.clear()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _add(self, number: int, entry: _Entry) -> None:
        documents = set(entry.prompt.documents)  # raises for a damaged row, before anything changes
        self._entries[number] = entry
        self._by_context.setdefault(entry.prompt.context_hash, set()).add(number)
        for doc_id, version in documents:
            self._by_document.setdefault(doc_id, {}).setdefault(version, set()).add(number)

    def _remove(self, number: int) -> None:
        prompt = self._entries.pop(number).prompt
        _discard(self._by_context, prompt.context_hash, number)
        for doc_id, version in set(prompt.documents):
            _discard(self._by_document[doc_id], version, number)
            if not self._by_document[doc_id]:
                del self._by_document[doc_id]

    def _about(self, doc_ids: Iterable[DocId], matches: Callable[[DocId, str], bool]) -> set[int]:
        """Return the answers about those of the documents whose id and version match, in O(documents + answers)."""
        return {
            number
            for doc_id in doc_ids
            for version, numbers in self._by_document.get(doc_id, {}).items()
            if matches(doc_id, version)
            for number in numbers
        }

    def _outdated(self, prompt: QuestionKey) -> set[int]:
        """Return the answers about other versions of the documents in ``prompt``."""
        shown, doc_ids = set(prompt.documents), {doc_id for doc_id, _ in prompt.documents}
        return self._about(doc_ids, lambda doc_id, version: (doc_id, version) not in shown)

    def _delete(self, numbers: Iterable[int]) -> int:
        """Delete answers, and from the file those of failed deletions before; return the number of answers."""
        for number in list(numbers):
            self._remove(number)
            self._undeleted.add(number)
        if num_deleted := len(self._undeleted):
            try:
                self._execute("DELETE FROM answers WHERE number = ?", [(number,) for number in self._undeleted])
            except sqlite3.Error as error:
                raise StoreError(
                    f"{num_deleted} deleted answers are still on disk ({error}): free disk space and repeat the call, "
                    "or close the cache and delete its folder"
                ) from error
            self._undeleted.clear()
        return num_deleted

    def _execute(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        if self._db is not None:
            with self._db:
                self._db.executemany(statement, rows)

    def _try_write(self, write: Callable[[], object]) -> None:
        try:
            write()
        except (StoreError, sqlite3.Error, UnicodeError) as error:
            if not self._is_warned:
                self._is_warned = True
                logger.warning(
                    "RC-ANSWERS-UNSAVED: a change of the answer cache is not on disk, and is lost with the process: %s",
                    error,
                )

    def _try_embed(self, question: str | None) -> Vectors | None:
        try:
            return None if question is None else self._embed(question)
        except Exception as error:
            logger.warning("RC-QUESTION-UNEMBEDDED: a question could not be embedded: %s", error)
            return None

    def _open(self, path: Path, probe: bytes) -> None:
        self._file_lock = filelock.FileLock(path.with_suffix(".lock"), timeout=0, mode=FILE_MODE, thread_local=False)
        try:
            make_private_folder(path.parent)
            self._file_lock.acquire()
            os.close(open_private(path, os.O_RDWR | os.O_CREAT))
            self._db = sqlite3.connect(path, check_same_thread=False)
            self._load(self._db, path, probe)
        except filelock.Timeout:
            raise StoreLockedError(
                f"{path.parent} is used by another answer cache: close that one, or choose another folder"
            ) from None
        except (OSError, sqlite3.Error, UnicodeError, StoreError) as error:
            self.close()
            self._file_lock.release()
            if isinstance(error, OSError | sqlite3.OperationalError):
                raise StoreError(f"{path.parent} cannot keep answers ({error}): choose another folder") from error
            if not isinstance(error, StoreError):
                raise StoreCorruptError(
                    f"{path} is damaged ({error}): delete it; a cache holds nothing else"
                ) from error
            raise

    def _load(self, db: sqlite3.Connection, path: Path, probe: bytes) -> None:
        """Read the valid answers; rewrite the file if it has others, or another format or embedder."""
        db.text_factory = lambda raw: raw.decode(errors="replace")  # damaged text has another checksum
        db.execute("PRAGMA secure_delete = ON")  # deleted text leaves the file
        db.execute("PRAGMA synchronous = EXTRA")  # a deletion survives a power failure
        with db:
            db.execute("BEGIN IMMEDIATE")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, 1, _FORMAT):
                raise StoreVersionError(f"{path} has format {version}, not {_FORMAT}: choose another folder")
            db.execute(f"CREATE TABLE IF NOT EXISTS answers ({_COLUMNS}, checksum BLOB)")
            db.execute("CREATE TABLE IF NOT EXISTS probe (vector BLOB)")
            is_same_embedder = version == _FORMAT and db.execute("SELECT vector FROM probe").fetchone() == (probe,)
            rows = db.execute("SELECT * FROM answers ORDER BY number").fetchall()
            for row in rows[-self._max_answers :]:
                if version == 1 or _checksum(row[:-1]) == row[-1]:
                    with suppress(TypeError, ValueError):  # format 1
                        number, key, question, answer, documents, vector = row[:6]
                        prompt = QuestionKey(key, question, tuple((i, content) for i, content in json.loads(documents)))
                        if is_same_embedder:
                            embedded = None if vector is None else np.frombuffer(vector, np.float32)
                        else:
                            embedded = self._try_embed(question)
                        self._add(number, _Entry(prompt, answer, embedded))
            if not is_same_embedder or len(self._entries) < len(rows):
                for statement in (
                    "DROP TABLE answers",
                    f"CREATE TABLE answers ({_COLUMNS}, checksum BLOB)",
                    "DELETE FROM probe",
                    f"PRAGMA user_version = {_FORMAT}",
                ):
                    db.execute(statement)
                db.execute("INSERT INTO probe VALUES (?)", (probe,))
                db.executemany(_INSERT, [entry.row(number) for number, entry in self._entries.items()])
        self._next_number = max(self._entries, default=0) + 1


def _embedding(embedder: object | None) -> Callable[[str], Vectors]:
    """Return a function from a question to its unit vector."""
    embed = _count_words
    if embedder is not None:
        chosen = as_embedder(getattr(embedder, "embedder", embedder))
        if "tfidfsvd" in chosen.name.lower().replace("-", ""):
            raise ConfigError(
                "the built-in embedder knows the words of documents alone, and takes who and when for the same: leave "
                "it out to compare questions by their words, or pass a sentence embedder, MiniLMEmbedder() for example"
            )
        embed = chosen.embed_query

    def unit_vector(question: str) -> Vectors:
        vector = check_query(embed(question), None)
        return vector / (np.linalg.norm(vector) or np.float32(1))

    return unit_vector


def _discard(numbers: dict[str, set[int]], key: str, number: int) -> None:
    """Remove a number from the set of a key, and an empty set from the dictionary."""
    numbers[key].discard(number)
    if not numbers[key]:
        del numbers[key]


def _count_words(text: str) -> Vectors:
    counts = np.zeros(_NUM_WORD_BUCKETS, np.float32)
    for word in re.findall(r"\w+", text.casefold()):
        counts[zlib.crc32(word.encode("utf-8", "surrogatepass")) % _NUM_WORD_BUCKETS] += 1
    return counts


def _checksum(row: tuple[object, ...]) -> bytes:
    return hashlib.blake2b(ascii(row).encode(), digest_size=16).digest()
