"""The index of chunks in SQLite: which slot has which chunk.

The slot is the primary key: a batch in neighbouring slots changes neighbouring rows (a commit of 32 rows into a million
took 0.07 ms, and 0.8 ms with the keys, which are hashes, as the primary key), and two chunks cannot claim one slot.
Keys are looked up in memory.

Write-ahead logging makes every commit survive the death of the process. A power cut may take the last commits back,
never a part of one. The database is held exclusively, so there is no shared-memory file that could be cut under us.
"""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from ragcache_core.chunkstore.chunks import ChunkEntry, ChunkNote, place_checksum
from ragcache_core.chunkstore.compression import CODEC
from ragcache_core.errors import CacheLockedError, CacheTierError, CacheWriteError
from ragcache_core.private_files import open_private

_FIRST_SCHEMA = (
    "CREATE TABLE chunks (slot INTEGER PRIMARY KEY, key BLOB NOT NULL, checksum INTEGER NOT NULL, parent BLOB, "
    "doc_id TEXT, position INTEGER NOT NULL, place_checksum INTEGER NOT NULL, frequency REAL NOT NULL, "
    "cost REAL NOT NULL, stored REAL NOT NULL, private INTEGER NOT NULL)"
)
_RECORD_FORMAT = 1
_RAW = "raw"
_IS_KNOWN = "format = ? AND (codec = ? AND length = ? OR codec = ? AND length BETWEEN 1 AND ?)"
_DELETE = "DELETE FROM chunks WHERE slot = ?"
_SUFFIXES = ("", "-wal", "-shm", "-journal")
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM)
_OUT_OF_REACH = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY)
_MAX_PATH_BYTES = 512  # SQLite's
_SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)  # the latter when a message quotes a damaged file
_ROWS_PER_FETCH = 1000
_READ_BYTES = 1 << 20
_MAX_WORTH = 1e12
_INT32 = 1 << 31
_SOUND_TYPES = {
    (bytes, p, d, int, int, float, float, float, int) for p in (bytes, type(None)) for d in (bytes, type(None))
}


class IndexDamagedError(Exception):
    """The file is no valid index of this store.

    Or it could not be read at the moment: see :func:`read_through`.
    """


class ChunkIndex:
    """The table of chunks. Not thread-safe; the store has a lock.

    Changes are atomic: when one raises ``CacheWriteError``, nothing was changed.
    """

    def __init__(self, path: Path, owner: str, chunk_bytes: int) -> None:
        """Open or create the index. An index without a format gets one at once.

        Args:
            path: its file.
            owner: names the chunks' identity: an index that was copied from another one's folder is of no use.
            chunk_bytes: bytes of a chunk, and so of a raw record.

        Raises:
            IndexDamagedError. CacheLockedError: another program has it open. CacheWriteError: no space, no memory.
            CacheTierError: it cannot be read at the moment. OSError: the file may not be written.
        """
        self.path = path
        self._owner = xxhash.xxh32_intdigest(owner.encode()) - _INT32
        self._chunk_bytes = chunk_bytes
        os.close(open_private(path, os.O_RDWR | os.O_CREAT))  # what fails from here on is damage
        self._listings: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()
        self._discarded: set[int] = set()
        self._renamed: dict[int, str | None] = {}
        self._is_void = False  # whether nothing that is in it counts any more
        try:
            self._connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise _opening_error(path, error) from error
        # A text with broken UTF-8 is damage that is found when the row is looked at, not an error of the query.
        self._connection.text_factory = bytes
        try:
            self._prepare()
        except _SQLITE_ERRORS as error:
            self._connection.close()
            raise _opening_error(path, error) from error
        except IndexDamagedError:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        run = self._connection.execute
        run("PRAGMA trusted_schema = OFF")
        run("PRAGMA secure_delete = ON")  # a row that is deleted is overwritten: it names a document
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        run("PRAGMA temp_store = MEMORY")  # a list is sorted in 140 bytes a chunk; a folder for it may be full
        columns = [
            f"format INTEGER NOT NULL DEFAULT {_RECORD_FORMAT}",
            f"codec TEXT NOT NULL DEFAULT '{_RAW}'",
            f"length INTEGER NOT NULL DEFAULT {self._chunk_bytes}",
        ]
        run("BEGIN IMMEDIATE")
        if not run("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            run(_FIRST_SCHEMA)
            run(f"PRAGMA user_version = {self._owner}")
        if run("SELECT sql FROM sqlite_schema").fetchall() == [(_FIRST_SCHEMA.encode("ascii"),)]:
            for column in columns:
                run(f"ALTER TABLE chunks ADD COLUMN {column}")
        run("COMMIT")
        schema = f"{_FIRST_SCHEMA[:-1]}, {', '.join(columns)})"
        if run("SELECT sql FROM sqlite_schema").fetchall() != [(schema.encode("ascii"),)]:
            raise IndexDamagedError(f"{self.path} has tables that are not ours")
        if run("PRAGMA user_version").fetchone() != (self._owner,):
            raise IndexDamagedError(f"{self.path} was brought here from another cache")
        if run("PRAGMA quick_check(1)").fetchone() != (b"ok",):  # 0.1 s for a million rows
            raise IndexDamagedError(f"{self.path} does not pass SQLite's check")

    def rows(self) -> Iterator[tuple[int, bytes, int, int]]:
        """Yield slot, key, checksum and stored length of every chunk, by slot.

        A damaged row may hold values of other types. A chunk that is shorter than the others is compressed.

        So does one in a format that is not known here: its key is None.

        Raises:
            IndexDamagedError. CacheTierError: it cannot be read at the moment.
        """
        try:
            yield from self._connection.execute(
                f"SELECT slot, CASE WHEN {_IS_KNOWN} THEN key END, checksum, length FROM chunks",  # noqa: S608
                (_RECORD_FORMAT, _RAW, self._chunk_bytes, CODEC, self._chunk_bytes - 1),
            )
        except _SQLITE_ERRORS as error:
            raise _opening_error(self.path, error) from error

    def num_compressed(self) -> int:
        """Return how many chunks are compressed.

        Raises:
            IndexDamagedError. CacheTierError: it cannot be read at the moment.
        """
        try:
            (number,) = self._connection.execute("SELECT count(*) FROM chunks WHERE codec = ?", (CODEC,)).fetchone()
        except _SQLITE_ERRORS as error:
            raise _opening_error(self.path, error) from error
        return int(number)

    def entries(self) -> Iterator[list[tuple[int, bytes, ChunkEntry | None]]]:
        """Yield lists of (slot, key, chunk) by position, as of the first list.

        None stands for a chunk about which impossible values are noted, or another place than was written.

        Raises:
            CacheTierError: the index can no longer be read.
        """
        try:
            rows = self._connection.execute(  # sorted before the first row comes, so later changes do not show
                "SELECT slot, key, parent, doc_id, position, place_checksum, frequency, cost, stored, private FROM "
                "chunks ORDER BY position, slot"
            )
            self._listings.add(rows)
            while batch := rows.fetchmany(_ROWS_PER_FETCH):
                yield [(row[0], row[1], _entry(*row[1:])) for row in batch]
        except _SQLITE_ERRORS as error:
            raise _read_error(self.path, error) from error

    def insert(self, rows: Iterable[tuple[int, bytes, int, int, ChunkNote]]) -> None:
        """Add chunks: slot, key, checksum, stored length, note."""
        with self._changing() as connection:
            connection.executemany(
                # A row that a failed change left behind gives way: nothing in memory points to it.
                "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    (
                        *(slot, key, digest, *_place(key, note), *_worth(note.frequency, note.cost), *_kept(note)),
                        _RECORD_FORMAT,
                        _RAW if length == self._chunk_bytes else CODEC,
                        length,
                    )
                    for slot, key, digest, length, note in rows
                ),
            )

    def delete(self, slots: Iterable[int]) -> None:
        """Remove the chunks of those slots."""
        with self._changing() as connection:
            connection.executemany(_DELETE, ((slot,) for slot in slots))

    def discard(self, slots: Iterable[int]) -> None:
        """Remove the useless chunks of those slots, now or with the next change."""
        self._discarded.update(slots)
        if not self._discarded:
            return
        with suppress(CacheWriteError):
            self.delete(())

    def clear(self) -> None:
        """Remove every chunk, now or with the next change."""
        self._is_void = True
        self.delete(())

    def scrub(self) -> None:
        """Overwrite removed rows in the files, including the log.

        Raises:
            CacheWriteError: something may be left.
        """
        self.delete(())  # what could not be removed when it was to be
        try:
            self._connection.execute("VACUUM")
            (is_busy, *_) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except _SQLITE_ERRORS as error:
            raise write_error(self.path, error) from error
        if is_busy:
            raise CacheWriteError(f"the log of {self.path} is being read: do this again when that has ended")

    def update(self, worths: Iterable[tuple[float, float, int]]) -> None:
        """Set frequency and cost: frequency, cost, slot."""
        with self._changing() as connection:
            connection.executemany(
                "UPDATE chunks SET frequency = ?, cost = ? WHERE slot = ?",
                ((*_worth(frequency, cost), slot) for frequency, cost, slot in worths),
            )

    def rename(self, names: Iterable[tuple[int, str | None]]) -> None:
        """Set documents: slot, document. Do so now, or if that fails, with the next change."""
        self._renamed.update(names)
        with suppress(CacheWriteError):
            self.delete(())

    def move(self, slots: Iterable[tuple[int, int]]) -> None:
        """Record that chunks moved between slots, as pairs of the new and the old slot."""
        with self._changing() as connection:
            connection.executemany("UPDATE chunks SET slot = ? WHERE slot = ?", slots)

    def deepest(self, num_chunks: int) -> list[int]:
        """Return the slots of the chunks to evict first: the last by position, then the least valuable.

        Raises:
            IndexDamagedError. CacheTierError: it cannot be read at the moment.
        """
        try:
            rows = self._connection.execute(
                "SELECT slot FROM chunks ORDER BY position DESC, frequency * cost, slot DESC LIMIT ?",
                (num_chunks + len(self._discarded),),
            ).fetchall()
        except _SQLITE_ERRORS as error:
            raise _opening_error(self.path, error) from error
        return [slot for (slot,) in rows if slot not in self._discarded][:num_chunks]

    def close(self) -> None:
        """Merge the log into the database and close it."""
        for rows in list(self._listings):  # a list that was left half-way would keep the database open, and locked
            rows.close()
        self._connection.close()

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            if self._is_void:
                connection.execute("DELETE FROM chunks")
            elif self._discarded:
                connection.executemany(_DELETE, ((slot,) for slot in self._discarded))
            for slot, name in self._renamed.items():
                _rename(connection, slot, name)
            yield connection
            connection.execute("COMMIT")
            self._is_void = False
            self._discarded.clear()
            self._renamed.clear()
        except BaseException as error:
            with suppress(*_SQLITE_ERRORS):  # SQLite may have done so already
                connection.execute("ROLLBACK")
            if isinstance(error, _SQLITE_ERRORS):
                raise write_error(self.path, error) from error
            raise


def _rename(connection: sqlite3.Connection, slot: int, name: str | None) -> None:
    """Set the document of a row, unless the row is damaged, whose checksum must not become valid."""
    found = connection.execute(
        "SELECT key, parent, doc_id, position, place_checksum FROM chunks WHERE slot = ?", (slot,)
    ).fetchone()
    if found is None or place_checksum(*found[:4]) != found[4]:
        return
    key, parent, _, position, _ = found
    doc_id = None if name is None else name.encode()
    digest = place_checksum(key, parent, doc_id, position)
    connection.execute("UPDATE chunks SET doc_id = ?, place_checksum = ? WHERE slot = ?", (doc_id, digest, slot))


def remove_index(path: Path) -> None:
    """Remove an index with SQLite's other files.

    Raises:
        OSError
    """
    for suffix in _SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def read_through(path: Path) -> None:
    """Read all of a closed index and its log.

    SQLite calls damaged what it cannot read, too: its check says so in words, and some queries with that very code.

    Raises:
        CacheTierError: a part of them cannot be read.
    """
    for suffix in _SUFFIXES:
        try:
            with path.with_name(path.name + suffix).open("rb", buffering=0) as file:
                while file.read(_READ_BYTES):
                    pass
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _read_error(path, error) from error


def write_error(path: Path, error: Exception) -> CacheWriteError:
    """Return the error for a failed write."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return CacheWriteError(f"{path} cannot be written ({reason}): see to the space and the health of that disk")


def _opening_error(path: Path, error: Exception) -> Exception:
    """Return the error for an index that cannot be opened; only a damaged one may be deleted."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return CacheLockedError(f"{path} is open in another program: close that one")
    if code in _NO_ROOM:
        return write_error(path, error)
    if code in _OUT_OF_REACH:
        return _read_error(path, error)
    return IndexDamagedError(f"{path}: {error}")


def _read_error(path: Path, error: Exception) -> CacheTierError:
    cure = "see to that disk and to the limit of open files, or delete the file"
    if len(os.fsencode(path)) >= _MAX_PATH_BYTES - len("-journal"):
        cure = f"SQLite takes paths of up to {_MAX_PATH_BYTES} bytes, name a shorter directory"
    return CacheTierError(f"{path} cannot be read ({error}): {cure}")


def _place(key: bytes, note: ChunkNote) -> tuple[bytes | None, str | None, int, int]:
    doc_id = None if note.doc_id is None else note.doc_id.encode()
    return note.parent, note.doc_id, note.position, place_checksum(key, note.parent, doc_id, note.position)


def _worth(frequency: float, cost: float) -> tuple[float, float]:
    return float(frequency), float(cost)  # NumPy's float32 is no float to SQLite


def _kept(note: ChunkNote) -> tuple[float, int]:
    return float(note.stored_s), int(note.is_private)


def _entry(
    key: bytes,
    parent: bytes | None,
    doc_id: bytes | None,
    position: int,
    place_digest: int,
    frequency: float,
    cost: float,
    stored_s: float,
    is_private: int,
) -> ChunkEntry | None:
    types = tuple(map(type, (key, parent, doc_id, position, place_digest, frequency, cost, stored_s, is_private)))
    if types not in _SOUND_TYPES or place_checksum(key, parent, doc_id, position) != place_digest:
        return None
    if position < 0 or not all(0.0 <= number <= _MAX_WORTH for number in (frequency, cost, stored_s)):
        return None  # nor are these, whatever wrote them
    try:
        text = doc_id.decode("utf-8") if doc_id is not None else None
    except UnicodeDecodeError:
        return None
    return ChunkEntry(key, parent, text, position, frequency, cost, stored_s, bool(is_private))
