"""The manifest: which files make up a store, and what they must hash to.

A store is a folder of immutable files and one ``manifest.json`` that names them. A change writes new files beside the
old ones, flushes them to the disk, and replaces the manifest last; that replacement is the commit. A crash before it
leaves the previous state, a crash after it the new one, and files that no manifest names are swept up by the next
writer. No file is parsed before its SHA-256 has matched.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import filelock

from ragcache_core.errors import (
    RAGCacheError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreNotFoundError,
    StoreVersionError,
)
from ragcache_core.private_files import FILE_MODE, make_private, make_private_folder, open_private
from ragcache_core.retrieval.base import IndexOptions

FORMAT = 3
"""3: segments have word indexes. 2: they have counts of words instead. 1: they have neither, and no word weight."""
_READABLE_FORMATS = (1, 2, FORMAT)
MANIFEST_NAME = "manifest.json"
LOCK_NAME = "writer.lock"
_OUR_FILE = re.compile(r"documents-\d{6,}\.sqlite|index-\d{6,}\.faiss|embedder-\d{6,}\.npz|manifest\.json\.new")
_CHUNK_BYTES = 1 << 20
_REMEDY = "restore it from a backup, or add the documents again"
_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the store, its length and its SHA-256."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """Documents with internal ids in ``[first_id, end_id)``; ``deleted`` ones are still in the file."""

    file: FileEntry
    first_id: int
    end_id: int
    num_rows: int
    deleted: tuple[int, ...] = ()

    @property
    def num_live(self) -> int:
        return self.num_rows - len(self.deleted)


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A saved Faiss index. It may lag behind the segments: what they hold more or less is applied when it is read."""

    file: FileEntry
    layout: str
    trained_on: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One state of a store."""

    options: IndexOptions
    embedder_name: str
    dimension: int | None = None
    embedder_state: FileEntry | None = None
    generation: int = 0
    next_id: int = 0
    segments: tuple[SegmentEntry, ...] = ()
    index: IndexEntry | None = None

    @property
    def num_documents(self) -> int:
        return sum(segment.num_live for segment in self.segments)

    def files(self) -> Iterator[FileEntry]:
        yield from (segment.file for segment in self.segments)
        if self.index is not None:
            yield self.index.file
        if self.embedder_state is not None:
            yield self.embedder_state

    def changed(self, **changes: Any) -> Manifest:
        """Return the next generation."""
        return replace(self, generation=self.generation + 1, **changes)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the store in ``folder``.

    Raises:
        StoreNotFoundError, StoreCorruptError, StoreVersionError
    """
    path = folder / MANIFEST_NAME
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if folder.is_dir() and any(folder.glob("documents-*.sqlite")):
            raise StoreCorruptError(f"{path} is missing: {_REMEDY}") from None
        what = "is a file, not a store" if folder.is_file() else "holds no document store"
        raise StoreNotFoundError(f"{folder} {what}: make one with DocumentStore.create") from None
    except OSError as error:
        raise read_error(path, error) from error
    damaged = StoreCorruptError(f"{path} is damaged: {_REMEDY}")
    try:
        content = json.loads(raw)
        version, body, digest = content["format"], content["store"], content["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged from error
    if isinstance(version, int) and version > FORMAT:
        raise StoreVersionError(
            f"{folder} was written in store format {version}, this RAGCache reads up to {FORMAT}: upgrade RAGCache"
        )
    if version not in _READABLE_FORMATS or digest != _digest(body):
        raise damaged
    try:
        return _from_json(body)
    except (ValueError, KeyError, TypeError, RAGCacheError) as error:
        raise damaged from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit ``manifest``. Atomic: when this raises, the previous one is in place.

    Raises:
        StoreFullError, StoreError
    """
    body = asdict(manifest)
    text = json.dumps({"format": FORMAT, "store": body, "sha256": _digest(body)}, indent=1)
    temporary = folder / f"{MANIFEST_NAME}.new"
    with saving(folder):
        with open(temporary, "w", encoding="ascii", opener=open_private) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        flush_folder(folder)  # the files that the manifest names
        temporary.replace(folder / MANIFEST_NAME)
    with suppress(OSError):  # committed; a power cut within seconds could at worst bring the previous state back
        flush_folder(folder)


def write_file(folder: Path, name: str, write: Callable[[Callable[[Any], object]], None]) -> FileEntry:
    """Write a new file through ``write(append)``, flush it to the disk, and return its entry.

    Raises:
        StoreFullError, StoreError
    """
    digest, num_bytes = hashlib.sha256(), 0

    with saving(folder), open(folder / name, "wb", opener=open_private) as file:

        def append(data: Any) -> int:
            nonlocal num_bytes
            view = memoryview(data).cast("B")
            file.write(view)
            digest.update(view)
            num_bytes += len(view)
            return len(view)

        write(append)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name, num_bytes, digest.hexdigest())


def flush_file(folder: Path, name: str) -> FileEntry:
    """Flush a file that another library wrote to the disk, and return its entry."""
    digest, num_bytes = hashlib.sha256(), 0
    with saving(folder), (folder / name).open("rb") as file:
        os.fsync(file.fileno())
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return FileEntry(name, num_bytes, digest.hexdigest())


def verify_file(folder: Path, entry: FileEntry, cure: str) -> Path:
    """Return the path of a file whose length and SHA-256 are as recorded.

    Raises:
        StoreCorruptError: they are not, or the file is missing. The message ends with ``cure``.
        StoreError: it cannot be read at the moment.
    """
    path = folder / entry.name
    try:
        found = path.stat().st_size
        if found != entry.num_bytes:
            raise StoreCorruptError(f"{path} has {found} bytes, the manifest records {entry.num_bytes}: {cure}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise StoreCorruptError(f"{path} is missing: {cure}") from None
    except OSError as error:
        raise read_error(path, error) from error
    if digest != entry.sha256:
        raise StoreCorruptError(f"{path} has SHA-256 {digest[:12]}, the manifest records {entry.sha256[:12]}: {cure}")
    return path


def read_error(path: Path, error: Exception) -> StoreError:
    """Return what to raise when a file cannot be read, which says nothing of what is in it."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return StoreError(
        f"{path} cannot be read ({reason}): see to that disk, to the rights on the file and to the limit of open "
        "files, and try again; nothing says that it is damaged"
    )


def sweep(folder: Path, manifest: Manifest) -> None:
    """Remove the store's files that ``manifest`` does not name: older generations, and what a crash left."""
    named = {entry.name for entry in manifest.files()}
    for path in folder.iterdir():
        if _OUR_FILE.fullmatch(path.name) and path.name not in named:
            path.unlink(missing_ok=True)


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Turn what can go wrong while saving into one error; what was stored before is intact."""
    try:
        yield
    except OSError as error:
        if error.errno in _OUT_OF_SPACE:
            raise StoreFullError(
                f"no space left to save {folder} ({error.strerror}): free some and try again, nothing was lost"
            ) from error
        raise StoreError(f"{folder} cannot be written: {error.strerror or error}") from error


def lock_folder(folder: Path) -> filelock.BaseFileLock:
    """Return the lock of the one writer, held, to whose user alone the store's files belong from now on.

    The system frees it when the process dies.

    Raises:
        StoreLockedError: another handle holds it. StoreError: the folder cannot be written.
    """
    lock = filelock.FileLock(folder / LOCK_NAME, timeout=0, mode=FILE_MODE, thread_local=False)
    try:
        lock.acquire()
        for path in folder.iterdir():  # of a version that wrote them as the umask said
            if _OUR_FILE.fullmatch(path.name) or path.name in (MANIFEST_NAME, LOCK_NAME):
                make_private(path)
    except filelock.Timeout:
        raise StoreLockedError(
            f"{folder} is being written by another store handle: close that one, or open this one with read_only=True"
        ) from None
    except OSError as error:
        raise StoreError(f"{folder} cannot be locked ({error.strerror}): open it with read_only=True") from error
    return lock


def make_folder(folder: Path) -> None:
    """Make a folder for its owner alone, and its parents, and flush their names to the disk.

    Raises:
        StoreFullError, StoreError
    """
    with saving(folder):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        make_private_folder(folder)
        for made in missing:
            with suppress(PermissionError):  # a parent that may not be read
                flush_folder(made.parent)


def flush_folder(folder: Path) -> None:
    """Flush the names of a folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(body: object) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _from_json(body: Any) -> Manifest:
    index, state = body["index"], body["embedder_state"]
    manifest = Manifest(
        options=IndexOptions(**body["options"]),
        embedder_name=body["embedder_name"],
        dimension=body["dimension"],
        embedder_state=state and FileEntry(**state),
        generation=body["generation"],
        next_id=body["next_id"],
        segments=tuple(
            SegmentEntry(**{**s, "file": FileEntry(**s["file"]), "deleted": tuple(s["deleted"])})
            for s in body["segments"]
        ),
        index=index and IndexEntry(**{**index, "file": FileEntry(**index["file"])}),
    )
    for entry in manifest.files():
        if not _OUR_FILE.fullmatch(entry.name):
            raise ValueError(f"{entry.name!r} is not a file of a store")
    return manifest
