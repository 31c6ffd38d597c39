"""Records become documents: split, with ids that stay the same from one reading to the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ragcache_core.errors import DocumentError, DuplicateDocumentError
from ragcache_core.ingest.readers import read_records
from ragcache_core.ingest.records import OnBad, Record
from ragcache_core.ingest.source import FileLimits, SourceFile
from ragcache_core.ingest.splitting import Splitting
from ragcache_core.types import DocId, Document


def stop_at_bad(error: DocumentError) -> None:
    """Raise ``error``: one bad document stops the reading."""
    raise error


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

        def tell(error: DocumentError, bad: list[DocumentError] = bad) -> None:
            bad.append(error)
            on_bad(error)

        documents: list[Document] = []
        for record in read_records(file, tell, limits or FileLimits()):
            where = f"{file.path}:{record.line}" if record.line else str(file.path)
            chunks = list(_documents(record, splitting))
            twice = next((d.doc_id for d in chunks if d.doc_id in seen), None)
            if twice is None:
                seen.update((d.doc_id, where) for d in chunks)
                documents += chunks
            else:
                tell(
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
