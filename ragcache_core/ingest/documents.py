"""Finds files, and makes documents of their records: split, with ids that are the same at every reading."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ragcache_core.errors import DocumentError, DuplicateDocumentError
from ragcache_core.ingest.readers import READERS, read_records
from ragcache_core.ingest.records import OnBad, Record
from ragcache_core.ingest.source import FileLimits, SourceFile
from ragcache_core.ingest.splitting import Splitting
from ragcache_core.types import DocId, Document


def stop_at_bad(error: DocumentError) -> None:
    """Raise ``error``: one bad document stops the reading."""
    raise error


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The readable files in sorted order, the number of files of other kinds, and the unreadable directories."""

    files: tuple[SourceFile, ...]
    num_skipped: int
    unreadable: tuple[Path, ...] = ()


def find_files(paths: Iterable[Path], *, on_bad: OnBad = stop_at_bad) -> FoundFiles:
    """Return every readable file at ``paths``: files as they are, directories with all that is below them.

    Hidden files and directories are left out. Files with a suffix that no reader knows are counted, as are links to
    directories, which are not followed. A file that is named itself must have a known suffix.

    Args:
        paths: files and directories.
        on_bad: called with the error of each directory that cannot be listed; by default it raises the error.

    Raises:
        DocumentError: nothing is at a path, or nothing there can be read.
    """
    files: list[SourceFile] = []
    num_skipped = 0
    unreadable: list[Path] = []

    def leave_out(error: OSError) -> None:
        on_bad(DocumentError(f"directory {error.filename!r} cannot be read ({error.strerror}): check its permissions"))
        unreadable.append(Path(error.filename))

    known = ", ".join(sorted(READERS))
    for path in paths:
        if path.is_dir():
            num_unreadable = len(unreadable)
            below = list(_walk(path, leave_out))
            readable = [file for file in below if file.path.suffix.lower() in READERS]
            if not readable and len(unreadable) == num_unreadable:
                raise DocumentError(
                    f"directory {str(path)!r} holds no document ({len(below)} other files): give a directory with "
                    f"{known} files"
                )
            files += readable
            num_skipped += len(below) - len(readable)
        elif not path.exists():
            raise DocumentError(f"nothing is at {str(path)!r}: give a file, or a directory with {known} files")
        elif path.suffix.lower() not in READERS:
            raise DocumentError(f"file {str(path)!r} has suffix {path.suffix!r}, only {known} are read: convert it")
        else:
            files.append(SourceFile(path, path.name))
    return FoundFiles(tuple(files), num_skipped, tuple(unreadable))


def _walk(root: Path, on_error: Callable[[OSError], None]) -> Iterator[SourceFile]:
    for folder, folders, names in os.walk(root, onerror=on_error):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in sorted([*names, *links]):
            if not name.startswith("."):
                path = Path(folder, name)
                yield SourceFile(path, path.relative_to(root).as_posix(), within=root)


@dataclass(frozen=True, slots=True)
class FileReading:
    """The documents of one file. It is whole if none of them was bad."""

    file: SourceFile
    documents: tuple[Document, ...]
    is_whole: bool


def read_documents(
    files: Iterable[SourceFile],
    splitting: Splitting | None = None,
    *,
    on_bad: OnBad = stop_at_bad,
    limits: FileLimits | None = None,
) -> Iterator[Document]:
    """Yield the documents of ``files`` in order; see :func:`read_files`."""
    for reading in read_files(files, splitting, on_bad=on_bad, limits=limits):
        yield from reading.documents


def read_files(
    files: Iterable[SourceFile],
    splitting: Splitting | None = None,
    *,
    on_bad: OnBad = stop_at_bad,
    limits: FileLimits | None = None,
) -> Iterator[FileReading]:
    """Yield what each of ``files`` holds, in order.

    The id of a text in one chunk is the file's name (``guide/zor.md``), or what a JSON Lines record calls itself;
    the chunks of a longer one are ``guide/zor.md#0``, ``guide/zor.md#1``. Metadata: ``source`` (the file's name),
    ``title``, ``chunk`` (its number, from 0).

    Raises:
        DocumentError: what ``on_bad`` raises; by default the first document that is empty
            (:class:`EmptyDocumentError`), binary or not UTF-8 (:class:`UndecodableDocumentError`), whose id was read
            before (:class:`DuplicateDocumentError`), or whose file is not a regular one, too long, damaged, or
            encrypted.
    """
    splitting = splitting or Splitting()
    seen: dict[DocId, str] = {}
    for file in files:
        bad: list[DocumentError] = []

        def on_error(error: DocumentError, bad: list[DocumentError] = bad) -> None:
            bad.append(error)
            on_bad(error)

        documents: list[Document] = []
        for record in read_records(file, on_error, limits or FileLimits()):
            where = f"{file.path}:{record.line}" if record.line else str(file.path)
            chunks = list(_documents(record, splitting))
            twice = next((d.doc_id for d in chunks if d.doc_id in seen), None)
            if twice is None:
                seen.update((d.doc_id, where) for d in chunks)
                documents += chunks
            else:
                on_error(
                    DuplicateDocumentError(
                        f"document id {twice!r} is in {seen[twice]} and again in {where}: give one of them another id"
                    )
                )
        yield FileReading(file, tuple(documents), is_whole=not bad)


def _documents(record: Record, splitting: Splitting) -> Iterator[Document]:
    chunks = splitting.split(record.text, is_markdown=record.is_markdown)
    for number, chunk in enumerate(chunks):
        doc_id = record.record_id if len(chunks) == 1 else f"{record.record_id}#{number}"
        yield Document(doc_id, chunk, {"chunk": number, **record.metadata})
