"""Answers in a folder: one SQLite file that its owner alone may read, and in which what is dropped is overwritten."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import filelock

from ragcache_core.errors import StoreCorruptError, StoreError, StoreLockedError, StoreVersionError
from ragcache_core.private_files import FILE_MODE, make_private_folder, open_private
from ragcache_core.types import DocId

_FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    question TEXT,
    answer TEXT NOT NULL,
    documents TEXT NOT NULL,
    vector BLOB
);
CREATE TABLE IF NOT EXISTS probe (vector BLOB NOT NULL);
"""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """An answer as it is stored; ``vector`` are float32 bytes."""

    number: int
    key: str
    question: str | None
    answer: str
    documents: tuple[tuple[DocId, str], ...]
    vector: bytes | None


class AnswerFile:
    """The file of one folder, held against other processes. What cannot be written is told once, and then lost.

    Raises:
        StoreLockedError: another process holds it. StoreCorruptError, StoreVersionError
        StoreError: the folder cannot be used.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        folder = Path(folder).absolute()
        path = folder / "answers.sqlite"
        try:
            make_private_folder(folder)
            self._lock = filelock.FileLock(folder / "answers.lock", timeout=0, mode=FILE_MODE, thread_local=False)
            self._lock.acquire()
            os.close(open_private(path, os.O_RDWR | os.O_CREAT))
        except filelock.Timeout:
            raise StoreLockedError(
                f"{folder} is used by another answer cache: close that one, or choose another folder"
            ) from None
        except OSError as error:
            self._release()
            raise StoreError(f"{folder} cannot keep answers ({error.strerror}): choose another folder") from error
        self._path = path
        self._has_failed = False
        self._damaged = StoreCorruptError(f"{path} is damaged: delete it, answers are given anew")
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA secure_delete = ON")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _FORMAT):
                raise StoreVersionError(
                    f"{path} was written in format {version}, this RAGCache reads {_FORMAT}: choose another folder"
                )
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {_FORMAT}")
        except sqlite3.Error as error:
            self.close()
            raise self._damaged from error
        except StoreVersionError:
            self.close()
            raise

    def begin(self, probe: bytes) -> bool:
        """Return whether the vectors are those of the embedder that has ``probe``; note it, if they were not."""
        try:
            before = self._db.execute("SELECT vector FROM probe").fetchone()
            if before is None or before[0] != probe:
                self._db.execute("DELETE FROM probe")
                self._db.execute("INSERT INTO probe VALUES (?)", (probe,))
        except sqlite3.Error as error:
            self.close()
            raise self._damaged from error
        return before is not None and bool(before[0] == probe)

    def rows(self) -> list[Row]:
        """Return all answers, the oldest first.

        Raises:
            StoreCorruptError
        """
        try:
            found = self._db.execute("SELECT * FROM answers ORDER BY number").fetchall()
            return [
                Row(number, key, question, answer, tuple((i, v) for i, v in json.loads(documents)), vector)
                for number, key, question, answer, documents, vector in found
            ]
        except (sqlite3.Error, ValueError, TypeError) as error:
            self.close()
            raise self._damaged from error

    def put(self, row: Row) -> None:
        """Store an answer, in the place of the one with its number."""
        values = (row.number, row.key, row.question, row.answer, json.dumps(row.documents), row.vector)
        self._write("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?)", [values])

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove answers."""
        self._write("DELETE FROM answers WHERE number = ?", [(number,) for number in numbers])

    def close(self) -> None:
        """Close the file, and let others use it."""
        with suppress(AttributeError, sqlite3.Error):
            self._db.close()
        self._release()

    def _release(self) -> None:
        with suppress(AttributeError):
            self._lock.release()

    def _write(self, statement: str, values: list[tuple[object, ...]]) -> None:
        try:
            self._db.execute("BEGIN")
            self._db.executemany(statement, values)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            if not self._has_failed:
                self._has_failed = True
                _logger.warning("%s is not written any more, answers are lost with the process: %s", self._path, error)
