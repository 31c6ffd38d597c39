"""Documents and their vectors in SQLite: a few immutable segments, newest last.

A segment is one SQLite file that is written once, hashed, and only read from then on. New documents go to a new
segment; smaller ones before it are merged into it, so that there are about log2(n) of them and each document is
rewritten about as often. Deleted documents are named in the manifest and left out at the next merge.

Internal ids ascend over all segments and are never reused::

    segment 0 [0, 4000)   segment 1 [4000, 6000)   segment 2 [6000, 6032)   next_id = 6032
"""

from __future__ import annotations

import functools
import json
import os
import sqlite3
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ragcache_core.errors import (
    DocumentError,
    DuplicateDocumentError,
    EmptyDocumentError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    UndecodableDocumentError,
)
from ragcache_core.private_files import open_private
from ragcache_core.retrieval.base import Ids, Vectors
from ragcache_core.retrieval.filters import Column, Mask, Selection, Where, conditions_of, evaluate, read_columns
from ragcache_core.retrieval.lexical import WordIndex, WordIndexWriter, document_words
from ragcache_core.retrieval.storage.manifest import (
    FileEntry,
    SegmentEntry,
    flush_file,
    read_error,
    saving,
    verify_file,
)
from ragcache_core.runtime.terminal import Bar
from ragcache_core.types import DocId, Document

_SCHEMA = """
CREATE TABLE documents (
    internal_id INTEGER PRIMARY KEY,
    doc_id TEXT NOT NULL UNIQUE,
    text TEXT NOT NULL,
    metadata TEXT NOT NULL,
    vector BLOB NOT NULL
)
"""
_ROWS_PER_QUERY = 500
_MOST_SELECTIONS = 32
"""Filters with cached selections: a byte for each document of the store, and eight for each selected one."""
_HINT = "restore the store from a backup, or add the documents again"


Row = tuple[int, DocId, str, str, bytes]
"""Internal id, document id, text, metadata as JSON, vector as float32 bytes."""


def check_documents(documents: Sequence[Document]) -> list[str]:
    """Return the metadata of each document as JSON.

    Raises:
        DuplicateDocumentError, EmptyDocumentError, UndecodableDocumentError, DocumentError
    """
    seen: set[DocId] = set()
    metadata = []
    for document in documents:
        _check_text("id", document.doc_id, document.doc_id)
        _check_text("text", document.text, document.doc_id)
        if document.doc_id in seen:
            raise DuplicateDocumentError(f"document {document.doc_id!r} is in the batch twice: give each its own id")
        seen.add(document.doc_id)
        metadata.append(_metadata_json(document))
    return metadata


def _check_text(what: str, value: object, doc_id: object) -> None:
    name = f"document {doc_id!r:.80}"
    if not isinstance(value, str):
        raise UndecodableDocumentError(f"{name} has {type(value).__name__} as {what}: decode it to str first")
    if not value.strip():
        raise EmptyDocumentError(f"{name} has an empty {what}: leave it out, or give it one")
    if (nul := value.find("\0")) >= 0:
        raise UndecodableDocumentError(f"the {what} of {name} has a NUL at character {nul}: is it a binary file?")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UndecodableDocumentError(
            f"the {what} of {name} has a lone surrogate at character {error.start}: decode the file as UTF-8"
        ) from error


def _can_be_stored(doc_id: object) -> bool:
    try:
        return isinstance(doc_id, str) and bool(doc_id.encode("utf-8"))
    except UnicodeEncodeError:
        return False


def _check_keys(metadata: dict[str, object]) -> None:
    """Raise TypeError for a key that JSON would turn into a text."""
    values: list[object] = [metadata]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r} is not a str")
            values.extend(value.values())
        elif isinstance(value, (list, tuple)):
            values.extend(value)


def _metadata_json(document: Document) -> str:
    try:
        if not isinstance(document.metadata, Mapping):
            raise TypeError(f"{type(document.metadata).__name__} is not a mapping")
        text = json.dumps(dict(document.metadata), allow_nan=False)
        _check_keys(dict(document.metadata))
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise DocumentError(
            f"the metadata of document {document.doc_id!r} is not plain JSON ({error}): convert it first"
        ) from error


class SegmentFile:
    """An open segment. Safe to use from many threads; it stays readable when its file is unlinked."""

    def __init__(self, folder: Path, entry: FileEntry) -> None:
        self.path = folder / entry.name
        self._entry = entry
        self._lock = threading.Lock()
        self._words: WordIndex | None = None
        self._opening_words = threading.Lock()
        self._ids: Ids | None = None
        self._columns: dict[str, Column] = {}
        self._reading_columns = threading.Lock()
        uri = f"{self.path.absolute().as_uri()}?mode=ro&immutable=1"
        with self._reading():
            self._connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
        weakref.finalize(self, self._connection.close)

    @classmethod
    def open(cls, folder: Path, entry: SegmentEntry) -> SegmentFile:
        """Open a segment that the manifest names.

        Raises:
            StoreCorruptError: its file is not what the manifest records. StoreError: it cannot be read at the moment.
        """
        verify_file(folder, entry.file, _HINT)
        segment = cls(folder, entry.file)
        ((count,),) = segment.query("SELECT count(*) FROM documents")
        if count != entry.num_rows:
            raise StoreCorruptError(f"{segment.path} has {count} documents, the manifest {entry.num_rows}: {_HINT}")
        return segment

    def query(self, sql: str, arguments: Sequence[object] = ()) -> list[Any]:
        with self._lock, self._reading():
            return self._connection.execute(sql, arguments).fetchall()

    def select(self, columns: str, key: str, values: Sequence[object]) -> Iterator[Any]:
        """Yield ``columns`` of the rows whose ``key`` is one of ``values``."""
        for start in range(0, len(values), _ROWS_PER_QUERY):
            some = values[start : start + _ROWS_PER_QUERY]
            marks = ",".join("?" * len(some))
            yield from self.query(f"SELECT {columns} FROM documents WHERE {key} IN ({marks})", some)  # noqa: S608

    def scan(self, columns: str) -> Iterator[Any]:
        """Yield ``internal_id`` and ``columns`` of all rows, by ascending internal id."""
        last = -1
        sql = f"SELECT internal_id, {columns} FROM documents WHERE internal_id > ? ORDER BY internal_id LIMIT ?"  # noqa: S608
        while rows := self.query(sql, (last, _ROWS_PER_QUERY)):
            yield from rows
            last = rows[-1][0]

    @property
    def has_words(self) -> bool:
        """Whether the file holds a word index. Files of store formats 1 and 2 hold none."""
        return bool(self.query("SELECT 1 FROM main.sqlite_master WHERE name = 'word_counts'"))

    def words(self) -> WordIndex:
        """Return the word index; of a file without one, an index in memory that the first call creates."""
        with self._opening_words:
            if self._words is None:
                schema = "main" if self.has_words else "temp"
                if schema == "temp":
                    self._index_words()
                self.query(f"CREATE VIRTUAL TABLE temp.word_places USING fts5vocab({schema}, words, instance)")
                self._words = WordIndex(self.query)
            return self._words

    def _index_words(self) -> None:
        self.query("PRAGMA temp_store = MEMORY")
        ((total,),) = self.query("SELECT count(*) FROM documents")
        with Bar("indexing words", total, "documents") as bar, self._reading():
            writer = WordIndexWriter(self._connection, "temp")
            for number, (internal_id, doc_id, text, metadata) in enumerate(self.scan("doc_id, text, metadata"), 1):
                writer.add(internal_id, document_words(doc_id, text, json.loads(metadata)))
                bar.move_to(number)

    def ids(self) -> Ids:
        """Return the internal ids of its documents, deleted or not, ascending. Read once."""
        if self._ids is None:
            self._ids = np.array([row[0] for row in self.scan("0")], np.int64)
        return self._ids

    def columns(self, fields: Iterable[str]) -> Mapping[str, Column]:
        """Return fields of its documents' metadata, and maybe others. Each is read once, when first asked for."""
        with self._reading_columns:
            new = {field for field in fields if field not in self._columns}
            if new:
                self._columns.update(read_columns((row[1] for row in self.scan("metadata")), new))
            return self._columns

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Say what is wrong. Damage is another SHA-256: SQLite calls damaged what it cannot read, too."""
        try:
            yield
        except sqlite3.ProgrammingError as error:
            raise StoreError(f"{self.path} is not open ({error}): open the store again") from error
        except sqlite3.DatabaseError as error:
            if self.path.exists():  # not if a writer has replaced it meanwhile
                verify_file(self.path.parent, self._entry, _HINT)
            raise read_error(self.path, error) from error


class DocumentTable:
    """All documents of one generation. Immutable."""

    def __init__(self, segments: Sequence[tuple[SegmentEntry, SegmentFile]] = ()) -> None:
        self.segments = tuple(segments)
        self._deleted = [frozenset(entry.deleted) for entry, _ in self.segments]
        self._first_ids = [entry.first_id for entry, _ in self.segments]
        self._words: list[tuple[WordIndex, Mask]] | None = None
        self._counting = threading.RLock()
        self._selections: dict[str, Selection] = {}

    @property
    def entries(self) -> list[SegmentEntry]:
        return [entry for entry, _ in self.segments]

    def __len__(self) -> int:
        return sum(entry.num_live for entry, _ in self.segments)

    def without(self, ids: Ids) -> DocumentTable:
        """Return the same segments with ``ids`` (ascending) deleted."""
        segments = []
        for entry, file in self.segments:
            begin, end = np.searchsorted(ids, (entry.first_id, entry.end_id))
            deleted = sorted({*entry.deleted, *ids[begin:end].tolist()})
            segments.append((replace(entry, deleted=tuple(deleted)), file))
        return DocumentTable(segments)

    def find(self, doc_ids: Sequence[DocId]) -> dict[DocId, int]:
        """Return the internal ids of those documents that are stored."""
        found: dict[DocId, int] = {}
        doc_ids = [doc_id for doc_id in doc_ids if _can_be_stored(doc_id)]
        for (_, file), deleted in zip(self.segments, self._deleted, strict=True):
            rows = file.select("doc_id, internal_id", "doc_id", doc_ids)
            found.update({doc_id: internal_id for doc_id, internal_id in rows if internal_id not in deleted})
        return found

    def read(self, internal_ids: Sequence[int]) -> dict[int, Document]:
        """Return documents by internal id. Ids that were never stored are left out."""
        return {
            internal_id: Document(doc_id, text, json.loads(metadata))
            for internal_id, doc_id, text, metadata in self._select("doc_id, text, metadata", internal_ids)
        }

    def read_vectors(self, internal_ids: Sequence[int], dimension: int) -> Vectors:
        """Return the vectors of stored documents: ``[len(internal_ids), dimension]``."""
        found = dict(self._select("vector", internal_ids))
        joined = b"".join(found[internal_id] for internal_id in internal_ids)
        return np.frombuffer(joined, np.float32).reshape(len(internal_ids), dimension)

    def _select(self, columns: str, internal_ids: Sequence[int]) -> Iterator[Any]:
        by_segment: dict[int, list[int]] = {}
        for internal_id in internal_ids:
            by_segment.setdefault(bisect_right(self._first_ids, internal_id) - 1, []).append(internal_id)
        for position, wanted in by_segment.items():
            yield from self.segments[position][1].select(f"internal_id, {columns}", "internal_id", wanted)

    def words(self) -> list[tuple[WordIndex, Mask]]:
        """Return the word index of each segment with the mask of its live documents. Read at the first call."""
        with self._counting:
            if self._words is None:
                self._words = [
                    (index := file.words(), ~np.isin(index.ids, list(deleted)))
                    for (_, file), deleted in zip(self.segments, self._deleted, strict=True)
                ]
            return self._words

    @functools.cached_property
    def squared_length(self) -> float:
        """The mean squared length of the first vectors, exactly 1 if all of these are unit vectors."""
        vectors = [np.frombuffer(row, np.float32) for _, row in self._select("vector", self.live_ids()[:64].tolist())]
        lengths = np.array([vector.astype(np.float64) @ vector for vector in vectors])
        if np.allclose(lengths, 1.0, atol=0.01):
            return 1.0
        return float(lengths.mean()) or 1.0

    def selected(self, where: Where) -> Selection:
        """Return the documents that a filter accepts. Those of the last filters are remembered."""
        key = repr(where)  # 1, 1.0 and True are equal
        with self._counting:
            found = self._selections.pop(key, None)
            if found is None:
                found = self._select_where(where)
            self._selections[key] = found  # the newest
            while len(self._selections) > _MOST_SELECTIONS:
                del self._selections[next(iter(self._selections))]
            return found

    def _select_where(self, where: Where) -> Selection:
        fields = {condition.field for condition in conditions_of(where)}
        parts = [np.zeros(0, np.int64)]
        for (_, file), deleted in zip(self.segments, self._deleted, strict=True):
            ids = file.ids()
            ids = ids[evaluate(where, file.columns(fields), len(ids))]
            parts.append(ids[~np.isin(ids, list(deleted))] if deleted else ids)
        return Selection(np.concatenate(parts))

    def kinds_of(self, field: str) -> dict[str, object]:
        """Return the kinds of values that a field of the metadata has, each with an example."""
        kinds: dict[str, object] = {}
        for _, file in self.segments:
            kinds = {**file.columns([field])[field].kinds, **kinds}
        return kinds

    def fields(self) -> set[str]:
        """Return the fields that some document's metadata has. Reads all of it."""
        return {field for _, (metadata,) in self._live("metadata") for field in json.loads(metadata)}

    def doc_ids(self) -> Iterator[DocId]:
        """Yield the ids of all documents, in the order they were added."""
        for _, (doc_id,) in self._live("doc_id"):
            yield doc_id

    def live_ids(self) -> Ids:
        """Return all internal ids, ascending."""
        parts = []
        for (_, file), deleted in zip(self.segments, self._deleted, strict=True):
            ids = file.ids()
            parts.append(ids[~np.isin(ids, list(deleted))] if deleted else ids)
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def vectors(self, ids: Ids, dimension: int) -> Vectors:
        """Return the vectors of ``ids`` (ascending): ``[n, dimension]``."""
        vectors = np.empty((len(ids), dimension), np.float32)
        position = 0
        for internal_id, (vector,) in self._live("vector"):
            if position < len(ids) and internal_id == ids[position]:
                vectors[position] = np.frombuffer(vector, np.float32)
                position += 1
        assert position == len(ids), "an internal id is in the index, but in no segment"
        return vectors

    def rows_after(self, position: int) -> Iterator[Row]:
        """Yield the live rows of the segments from ``position`` on, for a merge."""
        for internal_id, (doc_id, text, metadata, vector) in self._live("doc_id, text, metadata, vector", position):
            yield internal_id, doc_id, text, metadata, vector

    def _live(self, columns: str, position: int = 0) -> Iterator[tuple[int, Any]]:
        for (_, file), deleted in zip(self.segments[position:], self._deleted[position:], strict=True):
            for internal_id, *values in file.scan(columns):
                if internal_id not in deleted:
                    yield internal_id, values


def segments_to_keep(entries: Sequence[SegmentEntry], num_new: int) -> int:
    """Return how many leading segments stay as they are when ``num_new`` rows are written.

    The others are merged into the new one: each that is not more than twice as long as what follows it, and all from
    the first on that is mostly deleted.
    """
    keep, num_rows = len(entries), num_new
    while keep and entries[keep - 1].num_live <= 2 * num_rows:
        keep -= 1
        num_rows += entries[keep].num_live
    wasteful = (at for at, entry in enumerate(entries[:keep]) if 2 * entry.num_live < entry.num_rows)
    return next(wasteful, keep)


def write_segment(folder: Path, name: str, rows: Iterable[Row], *, with_words: bool) -> tuple[FileEntry, int]:
    """Write a new segment and flush it to the disk; return its entry and the number of rows.

    Args:
        folder: the store's folder.
        name: name of the new file.
        rows: the documents by ascending internal id.
        with_words: whether the segment gets a word index.

    Raises:
        StoreFullError, StoreError
    """
    path = folder / name
    with saving(folder), _writing(path):
        path.unlink(missing_ok=True)  # what an interrupted change left
        os.close(open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            # No journal and no flushes of its own: no reader opens the file before the manifest names it.
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("BEGIN")
            connection.execute(_SCHEMA)
            words = WordIndexWriter(connection) if with_words else None
            for row in rows:
                connection.execute("INSERT INTO documents VALUES (?, ?, ?, ?, ?)", row)
                if words is not None:
                    internal_id, doc_id, text, metadata, _ = row
                    words.add(internal_id, document_words(doc_id, text, json.loads(metadata)))
            connection.execute("COMMIT")
            (num_rows,) = connection.execute("SELECT count(*) FROM documents").fetchone()
        finally:
            connection.close()
    return flush_file(folder, name), num_rows


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise StoreFullError(
                f"no space left to save {path} ({error}): free some and try again, nothing was lost"
            ) from error
        raise StoreError(f"{path} cannot be written: {error}") from error
