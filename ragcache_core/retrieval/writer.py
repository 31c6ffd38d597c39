"""How a store changes: new files beside the old ones, the manifest last."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ragcache_core.errors import (
    ConfigError,
    DuplicateDocumentError,
    EmbedderMismatchError,
    StoreCorruptError,
    StoreError,
)
from ragcache_core.retrieval.adapters import MiniLMEmbedder
from ragcache_core.retrieval.base import StagedIndex, Vectors
from ragcache_core.retrieval.documents import (
    DocumentTable,
    Row,
    SegmentFile,
    check_documents,
    segments_to_keep,
    write_segment,
)
from ragcache_core.retrieval.embed import Embedder, PrecomputedEmbedder, TrainableEmbedder, check_embeddings
from ragcache_core.retrieval.indexing import build_index, is_outgrown, load_index, save_index
from ragcache_core.retrieval.manifest import (
    FileEntry,
    Manifest,
    SegmentEntry,
    read_manifest,
    sweep,
    verify_file,
    write_file,
    write_manifest,
)
from ragcache_core.retrieval.snapshot import Snapshot
from ragcache_core.retrieval.tfidf import TfidfSvdEmbedder
from ragcache_core.types import Document

Progress = Callable[[int, int], object]
"""Called with the number of documents embedded so far, and of all."""

_UNSAVED_SHARE = 1 / 8
_SMALL_INDEX_BYTES = 4 << 20
_ATTEMPTS = 5
_logger = logging.getLogger(__name__)


def load_snapshot(
    folder: Path, choose_embedder: Callable[[Manifest], Embedder], rebuild_index: bool = False
) -> Snapshot:
    """Return the state on disk. A writer may replace it meanwhile: then the newer one.

    Raises:
        StoreNotFoundError, StoreCorruptError, StoreVersionError, EmbedderMismatchError
    """
    for attempt in range(_ATTEMPTS):
        manifest = read_manifest(folder)
        try:
            embedder = choose_embedder(manifest)
            documents = DocumentTable([(entry, SegmentFile.open(folder, entry)) for entry in manifest.segments])
            shown = replace(manifest, index=None) if rebuild_index else manifest
            index, num_unsaved = load_index(folder, shown, documents)
            return Snapshot(shown, documents, index, embedder, num_unsaved)
        except StoreCorruptError:
            if attempt == _ATTEMPTS - 1 or read_manifest(folder).generation == manifest.generation:
                raise
    raise AssertionError("unreachable")


def match_embedder(folder: Path, manifest: Manifest, given: Embedder | None) -> Embedder:
    """Return the embedder of a store: the one that was saved in it, or the one ``given``.

    Raises:
        EmbedderMismatchError: another embedder than the store's, or none where one is needed.
    """
    name = manifest.embedder_name
    if given is None:
        given = _known_embedder(name, manifest.dimension)
    if given is None:
        raise EmbedderMismatchError(f"{folder} was made with the embedder {name!r}: pass it as embedder=")
    if given.name != name:
        raise EmbedderMismatchError(
            f"{folder} was made with the embedder {name!r}, not {given.name!r}: pass that one, or make a new store"
        )
    if None not in (given.dimension, manifest.dimension) and given.dimension != manifest.dimension:
        raise EmbedderMismatchError(
            f"the embedder has {given.dimension} dimensions, {folder} has {manifest.dimension}: pass the one it was "
            "made with, or make a new store"
        )
    if manifest.embedder_state is None or not isinstance(given, TrainableEmbedder):
        return given
    path = verify_file(folder, manifest.embedder_state, "restore the store from a backup, or add the documents anew")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            saved = type(given).from_state(dict(arrays))
    except (ValueError, OSError, KeyError, EOFError, BadZipFile) as error:
        raise StoreCorruptError(f"{path} cannot be read ({error}): restore the store from a backup") from error
    if given.is_fitted and not _same_state(given, saved):
        raise EmbedderMismatchError(
            f"the embedder was fitted on other documents than {folder}: leave embedder= out, the store holds its own"
        )
    return saved


def _known_embedder(name: str, dimension: int | None) -> Embedder | None:
    if (built_in := TfidfSvdEmbedder.from_name(name)) is not None:
        return built_in
    if name == PrecomputedEmbedder.name:
        return PrecomputedEmbedder(dimension)
    if name == MiniLMEmbedder.name:
        return MiniLMEmbedder()
    return None


def _same_state(a: TrainableEmbedder, b: TrainableEmbedder) -> bool:
    first, second = a.state(), b.state()
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


class Writer:
    """Makes the next snapshot of a store from the last. The store lets one thread at a time in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def adopt(self, snapshot: Snapshot) -> Snapshot:
        """Begin from what was found on disk: sweep up what a crash left, save an index that was made anew."""
        sweep(self._folder, read_manifest(self._folder))
        return self.save_index(snapshot) if snapshot.manifest.index is None else snapshot

    def add(
        self,
        snapshot: Snapshot,
        batch: Sequence[Document],
        embeddings: object | None,
        progress: bool | Progress,
        batch_size: int,
    ) -> Snapshot:
        """Return the snapshot with ``batch`` added, saved."""
        metadata = check_documents(batch)
        doc_ids = [document.doc_id for document in batch]
        if taken := snapshot.documents.find(doc_ids):
            raise DuplicateDocumentError(
                f"document {next(iter(taken))!r} is in the store already: delete it first, or give it another id"
            )
        manifest = snapshot.manifest
        embedder = snapshot.embedder
        if embeddings is None:
            embedder = _fitted(embedder, batch)
            rows = _embedded(embedder, batch, progress, batch_size, manifest.dimension)
        elif isinstance(embedder, TrainableEmbedder) and not embedder.is_fitted:
            raise ConfigError(
                f"this store embeds with {embedder.name!r}, which is fitted on texts: leave embeddings= out, or make "
                "the store with PrecomputedEmbedder()"
            )
        else:
            rows = check_embeddings(embeddings, doc_ids, manifest.dimension)

        ids = np.arange(manifest.next_id, manifest.next_id + len(batch), dtype=np.int64)
        new_rows = (
            (int(internal_id), document.doc_id, document.text, json, row.tobytes())
            for internal_id, document, json, row in zip(ids, batch, metadata, rows, strict=True)
        )
        entries = [entry for entry, _ in snapshot.documents.segments]
        keep = segments_to_keep(entries, len(batch))
        changed = manifest.changed(dimension=rows.shape[1], next_id=int(ids[-1]) + 1)
        with _cleaning_up(self._folder):
            documents = self._with_segment(changed, snapshot.documents, entries, keep, new_rows)
            index = self._grown(snapshot, documents, ids, rows)
            if isinstance(embedder, TrainableEmbedder) and manifest.embedder_state is None:
                changed = replace(changed, embedder_state=self._save_embedder(changed, embedder))
            return self._commit(snapshot, changed, documents, index, embedder, len(batch))

    def delete(self, snapshot: Snapshot, internal_ids: Sequence[int]) -> Snapshot:
        """Return the snapshot without those documents, saved."""
        gone = np.array(sorted(internal_ids), np.int64)
        entries = []
        for entry, _ in snapshot.documents.segments:
            mine = gone[(gone >= entry.first_id) & (gone < entry.end_id)]
            entries.append(replace(entry, deleted=tuple(sorted({*entry.deleted, *mine.tolist()}))))
        files = [file for _, file in snapshot.documents.segments]
        documents = DocumentTable(list(zip(entries, files, strict=True)))
        wasteful = (at for at, entry in enumerate(entries) if 2 * len(entry.deleted) > entry.num_rows)
        keep = next(wasteful, None)
        changed = snapshot.manifest.changed()
        with _cleaning_up(self._folder):
            if keep is not None:
                documents = self._with_segment(changed, documents, entries, keep, ())
            index = self._shrunk(snapshot, documents, gone)
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

    def _with_segment(
        self,
        changed: Manifest,
        documents: DocumentTable,
        entries: Sequence[SegmentEntry],
        keep: int,
        new_rows: Iterable[Row],
    ) -> DocumentTable:
        """Write a segment of what the segments from ``keep`` on hold and ``new_rows``."""
        name = f"documents-{changed.generation:06}.sqlite"
        file, num_rows = write_segment(self._folder, name, chain(documents.rows_after(keep), new_rows))
        kept = documents.segments[:keep]
        if not num_rows:
            return DocumentTable(kept)
        first_id = entries[keep].first_id if keep < len(entries) else entries[-1].end_id if entries else 0
        entry = SegmentEntry(file, first_id, changed.next_id, num_rows)
        return DocumentTable([*kept, (entry, SegmentFile(self._folder / name))])

    def _grown(self, snapshot: Snapshot, documents: DocumentTable, ids: Any, rows: Vectors) -> StagedIndex:
        options, index = snapshot.manifest.options, snapshot.index
        if index is None:
            return build_index(ids, rows, options)
        if is_outgrown(index, len(documents)):
            live = documents.live_ids()
            return build_index(live, documents.vectors(live, rows.shape[1]), options)
        return index.with_added(ids, rows)

    def _shrunk(self, snapshot: Snapshot, documents: DocumentTable, gone: Any) -> StagedIndex | None:
        manifest = snapshot.manifest
        if not len(documents) or snapshot.index is None or manifest.dimension is None:
            return None
        smaller = None if is_outgrown(snapshot.index, len(documents)) else snapshot.index.without(gone)
        if smaller is not None:
            return smaller
        live = documents.live_ids()
        return build_index(live, documents.vectors(live, manifest.dimension), manifest.options)

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
        """A lagging index costs time at the next ``open``, a saved one costs time now."""
        num_bytes = len(index) * (changed.dimension or 0) * 4
        if changed.index is None or num_bytes <= _SMALL_INDEX_BYTES or index.trained_on != changed.index.trained_on:
            return True
        return num_unsaved >= _UNSAVED_SHARE * len(index)

    def _finish(self, changed: Manifest) -> None:
        write_manifest(self._folder, changed)
        try:
            sweep(self._folder, changed)
        except OSError as error:
            _logger.warning("old files of %s were not removed: %s", self._folder, error)


class _Appending:
    """A file for ``numpy.savez`` that cannot be sought."""

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
    """Sweep up half-written files when a change fails."""
    try:
        yield
    except BaseException:
        try:
            sweep(folder, read_manifest(folder))
        except (StoreError, OSError) as error:
            _logger.warning("what a failed change of %s wrote is removed when it is opened: %s", folder, error)
        raise


def _fitted(embedder: Embedder, batch: Sequence[Document]) -> Embedder:
    """Return the embedder, or a copy of it that was fitted on ``batch``."""
    if not isinstance(embedder, TrainableEmbedder) or embedder.is_fitted:
        return embedder
    return copy.copy(embedder).fit([document.text for document in batch])


def _embedded(
    embedder: Embedder, batch: Sequence[Document], progress: bool | Progress, batch_size: int, dimension: int | None
) -> Vectors:
    parts = []
    for start in _reported(range(0, len(batch), batch_size), len(batch), batch_size, progress):
        some = batch[start : start + batch_size]
        vectors = embedder.embed_documents([document.text for document in some])
        parts.append(check_embeddings(vectors, [document.doc_id for document in some], dimension))
        dimension = parts[0].shape[1]
    return np.concatenate(parts)


def _reported(starts: Iterable[int], total: int, batch_size: int, progress: bool | Progress) -> Iterator[int]:
    if not progress:
        yield from starts
    elif callable(progress):
        for start in starts:
            yield start
            progress(min(start + batch_size, total), total)
    else:
        from tqdm import tqdm

        with tqdm(total=total, unit="doc") as bar:
            for start in starts:
                yield start
                bar.update(min(batch_size, total - start))
