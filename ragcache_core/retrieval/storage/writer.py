"""Change a store: write new files beside the old ones, then the manifest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ragcache_core.errors import ConfigError, DuplicateDocumentError, StoreError
from ragcache_core.log import logger_of
from ragcache_core.retrieval.base import Ids, StagedIndex, Vectors
from ragcache_core.retrieval.embedders.base import Embedder, TrainableEmbedder, check_embeddings
from ragcache_core.retrieval.embedders.tfidf import TfidfSvdEmbedder
from ragcache_core.retrieval.index.choice import build_index, is_outgrown, save_index
from ragcache_core.retrieval.storage.documents import (
    DocumentTable,
    Row,
    SegmentFile,
    check_documents,
    segments_to_keep,
    write_segment,
)
from ragcache_core.retrieval.storage.manifest import (
    FileEntry,
    Manifest,
    SegmentEntry,
    read_manifest,
    sweep,
    write_file,
    write_manifest,
)
from ragcache_core.retrieval.storage.snapshot import Snapshot
from ragcache_core.runtime.terminal import Bar
from ragcache_core.types import DocId, Document

Progress = Callable[[int, int], object]
"""Called with the number of steps done so far, and of all: a step is a document that was embedded, or before that,
where the built-in embedder learns from them, one that was learnt from."""

_UNSAVED_SHARE = 1 / 8
_SMALL_INDEX_BYTES = 4 << 20
logger = logger_of(__name__)


class Writer:
    """Makes the next snapshot of a store. The store admits one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, manifest: Manifest, embedder: Embedder) -> None:
        """Save an empty store, with the embedder if it is fitted."""
        if isinstance(embedder, TrainableEmbedder) and embedder.is_fitted:
            manifest = replace(manifest, embedder_state=self._save_embedder(manifest, embedder))
        write_manifest(self._folder, manifest)

    def adopt(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot on disk without remains of a crash, in the present format, with its index saved."""
        sweep(self._folder, read_manifest(self._folder))
        snapshot = self._with_words(snapshot)
        return self.save_index(snapshot) if snapshot.manifest.index is None else snapshot

    def add(
        self,
        snapshot: Snapshot,
        batch: Sequence[Document],
        *,
        replacing: bool,
        embeddings: object | None,
        progress: bool | Progress,
        batch_size: int,
    ) -> Snapshot:
        """Save and return the snapshot with ``batch`` added."""
        metadata = check_documents(batch)
        doc_ids = [document.doc_id for document in batch]
        taken = snapshot.documents.find(doc_ids)
        if taken and not replacing:
            raise DuplicateDocumentError(
                f"document {next(iter(taken))!r} is in the store already: delete it first, put() it, or give it "
                "another id"
            )
        embedder, rows = _embedded(snapshot, batch, doc_ids, embeddings, progress, batch_size)
        first_id = snapshot.manifest.next_id
        ids = np.arange(first_id, first_id + len(batch), dtype=np.int64)
        new_rows = (
            (first_id + i, document.doc_id, document.text, metadata[i], rows[i].tobytes())
            for i, document in enumerate(batch)
        )
        changed = snapshot.manifest.changed(dimension=rows.shape[1], next_id=first_id + len(batch))
        gone = np.array(sorted(taken.values()), np.int64)
        remaining = snapshot.documents.without(gone)
        keep = segments_to_keep(remaining.entries, len(batch))
        with _cleaning_up(self._folder):
            documents = self._with_segment(changed, remaining, keep, new_rows)
            index = _next_index(snapshot, documents, gone, ids, rows)
            if isinstance(embedder, TrainableEmbedder) and changed.embedder_state is None:
                changed = replace(changed, embedder_state=self._save_embedder(changed, embedder))
            return self._commit(snapshot, changed, documents, index, embedder, len(gone) + len(batch))

    def delete(self, snapshot: Snapshot, internal_ids: Iterable[int]) -> Snapshot:
        """Save and return the snapshot without those documents."""
        gone = np.array(sorted(internal_ids), np.int64)
        changed = snapshot.manifest.changed()
        documents = snapshot.documents.without(gone)
        keep = segments_to_keep(documents.entries, 0)
        with _cleaning_up(self._folder):
            if keep < len(documents.entries):
                documents = self._with_segment(changed, documents, keep, ())
            nothing = np.zeros((0, changed.dimension or 0), np.float32)
            index = _next_index(snapshot, documents, gone, np.zeros(0, np.int64), nothing)
            return self._commit(snapshot, changed, documents, index, snapshot.embedder, len(gone))

    def save_index(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with its index saved, if the saved one lags behind."""
        if not snapshot.num_unsaved or snapshot.index is None:
            return snapshot
        with _cleaning_up(self._folder):
            changed = snapshot.manifest.changed()
            entry = save_index(self._folder, f"index-{changed.generation:06}.faiss", snapshot.index)
            changed = replace(changed, index=entry)
            self._finish(changed)
        return replace(snapshot, manifest=changed, num_unsaved=0)

    def _with_words(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with a word index in each segment; this rewrites a store of format 2."""
        changed, documents = snapshot.manifest.changed(), snapshot.documents
        if not changed.options.word_weight or all(file.has_words for _, file in documents.segments):
            return snapshot
        try:
            with _cleaning_up(self._folder), Bar("converting the store", len(documents), "documents") as bar:
                converted = self._with_segment(changed, documents, 0, (), bar.move_to)
                return self._commit(snapshot, changed, converted, snapshot.index, snapshot.embedder, 0)
        except StoreError as error:
            logger.warning(
                "RC-STORE-UNCONVERTED: %s keeps its format, and indexes words whenever it is opened: %s",
                self._folder,
                error,
            )
            return snapshot

    def _with_segment(
        self,
        changed: Manifest,
        documents: DocumentTable,
        keep: int,
        new_rows: Iterable[Row],
        report: Callable[[int], object] = lambda _: None,
    ) -> DocumentTable:
        """Write a segment of the live documents from segment ``keep`` on and ``new_rows``; ``report`` each row."""
        name = f"documents-{changed.generation:06}.sqlite"
        rows = _reported(chain(documents.rows_after(keep), new_rows), report)
        file, num_rows = write_segment(self._folder, name, rows, with_words=bool(changed.options.word_weight))
        kept, entries = documents.segments[:keep], documents.entries
        if not num_rows:
            return DocumentTable(kept)
        first_id = entries[keep].first_id if keep < len(entries) else entries[-1].end_id if entries else 0
        entry = SegmentEntry(file, first_id, changed.next_id, num_rows)
        return DocumentTable([*kept, (entry, SegmentFile(self._folder, file))])

    def _save_embedder(self, changed: Manifest, embedder: TrainableEmbedder) -> FileEntry:
        def write(append: Callable[[Any], object]) -> None:
            np.savez(_Appending(append), **embedder.state())  # type: ignore[arg-type]

        return write_file(self._folder, f"embedder-{changed.generation:06}.npz", write)

    def _commit(
        self,
        before: Snapshot,
        changed: Manifest,
        documents: DocumentTable,
        index: StagedIndex | None,
        embedder: Embedder,
        num_changes: int,
    ) -> Snapshot:
        changed = replace(changed, segments=tuple(entry for entry, _ in documents.segments))
        num_unsaved = before.num_unsaved + num_changes
        if index is None:
            changed, num_unsaved = replace(changed, index=None), 0
        elif before.index is not None and index.native is before.index.native:
            num_unsaved = before.num_unsaved
        elif self._is_worth_saving(changed, index, num_unsaved):
            entry = save_index(self._folder, f"index-{changed.generation:06}.faiss", index)
            changed, num_unsaved = replace(changed, index=entry), 0
        self._finish(changed)
        return Snapshot(changed, documents, index, embedder, num_unsaved)

    def _is_worth_saving(self, changed: Manifest, index: StagedIndex, num_unsaved: int) -> bool:
        """Return whether to save the index: a lagging one costs time at the next ``open``, saving costs time now."""
        num_bytes = len(index) * (changed.dimension or 0) * 4
        if changed.index is None or num_bytes <= _SMALL_INDEX_BYTES or index.trained_on != changed.index.trained_on:
            return True
        return num_unsaved >= _UNSAVED_SHARE * len(index)

    def _finish(self, changed: Manifest) -> None:
        write_manifest(self._folder, changed)
        try:
            sweep(self._folder, changed)
        except OSError as error:
            logger.warning("RC-STORE-FILES-LEFT: old files of %s were not removed: %s", self._folder, error)


class _Appending:
    """A file for ``numpy.savez`` without seeking."""

    def __init__(self, append: Callable[[Any], object]) -> None:
        self._append = append

    def write(self, data: Any) -> int:
        self._append(data)
        return memoryview(data).nbytes

    def read(self, _: int = -1) -> bytes:  # numpy tells files by this method
        raise OSError("write only")

    def flush(self) -> None:
        pass


@contextmanager
def _cleaning_up(folder: Path) -> Iterator[None]:
    """Remove half-written files if a change fails."""
    try:
        yield
    except BaseException:
        try:
            sweep(folder, read_manifest(folder))
        except (StoreError, OSError) as error:
            logger.warning(
                "RC-STORE-FILES-LEFT: what a failed change of %s wrote is removed when it is opened: %s", folder, error
            )
        raise


def _next_index(before: Snapshot, documents: DocumentTable, gone: Ids, ids: Ids, rows: Vectors) -> StagedIndex | None:
    """Return the index without ``gone`` and with ``ids``, updated or rebuilt."""
    index, options = before.index, before.manifest.options
    if not len(documents):
        return None
    if len(ids) == len(documents):
        return build_index(ids, rows, options)
    if index is not None and not is_outgrown(index, len(documents)):
        smaller = index.without(gone) if len(gone) else index
        if smaller is not None:
            return smaller.with_added(ids, rows) if len(ids) else smaller
    live = documents.live_ids()
    return build_index(live, documents.vectors(live, rows.shape[1]), options)


def _embedded(
    snapshot: Snapshot,
    batch: Sequence[Document],
    doc_ids: Sequence[DocId],
    embeddings: object | None,
    progress: bool | Progress,
    batch_size: int,
) -> tuple[Embedder, Vectors]:
    """Return the embedder and the vectors of ``batch``.

    The embedder is a copy that was fitted on the batch, where that is the first.
    """
    embedder, dimension = snapshot.embedder, snapshot.manifest.dimension
    is_unfitted = isinstance(embedder, TrainableEmbedder) and not embedder.is_fitted
    if embeddings is not None:
        if is_unfitted:
            raise ConfigError(
                f"this store embeds with {embedder.name!r}, which is fitted on texts: leave embeddings= out, or make "
                "the store with PrecomputedEmbedder()"
            )
        return embedder, check_embeddings(embeddings, doc_ids, dimension)
    texts = [document.text for document in batch]
    total = len(batch) * (2 if is_unfitted and isinstance(embedder, TfidfSvdEmbedder) else 1)
    with _reporting(progress, total) as report:
        if is_unfitted and isinstance(embedder, TfidfSvdEmbedder):
            embedder = copy.copy(embedder).fit(texts, lambda share: report(int(share * len(batch))))
        elif is_unfitted and isinstance(embedder, TrainableEmbedder):
            embedder = copy.copy(embedder).fit(texts)
        parts: list[Vectors] = []
        for start in range(0, len(batch), batch_size):
            stop = min(start + batch_size, len(batch))
            vectors = embedder.embed_documents(texts[start:stop])
            parts.append(check_embeddings(vectors, doc_ids[start:stop], dimension))
            dimension = parts[0].shape[1]
            report(total - len(batch) + stop)
    return embedder, np.concatenate(parts)


@contextmanager
def _reporting(progress: bool | Progress, total: int) -> Iterator[Callable[[int], object]]:
    """Yield a callback for the number of finished steps of ``total``."""
    if callable(progress):
        yield lambda num_done: progress(num_done, total)
    elif progress:
        with Bar("embedding", total, "steps", enabled=True, is_kept=True) as bar:
            yield bar.move_to
    else:
        yield lambda _: None


def _reported(rows: Iterable[Row], report: Callable[[int], object]) -> Iterator[Row]:
    for number, row in enumerate(rows, 1):
        yield row
        report(number)
