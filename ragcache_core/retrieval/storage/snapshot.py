"""One published state of a store, and how it is read from the store's files."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from ragcache_core.errors import EmbedderMismatchError, StoreCorruptError, StoreError
from ragcache_core.retrieval.base import IndexKind, Metric, StagedIndex
from ragcache_core.retrieval.embedders.base import Embedder, MiniLMEmbedder, PrecomputedEmbedder, TrainableEmbedder
from ragcache_core.retrieval.embedders.tfidf import TfidfSvdEmbedder
from ragcache_core.retrieval.index.choice import load_index
from ragcache_core.retrieval.storage.documents import DocumentTable, SegmentFile
from ragcache_core.retrieval.storage.manifest import FileEntry, Manifest, read_error, read_manifest, verify_file

_TIMEOUT_S = 30.0
_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds. ``index_layout`` is ``flat`` while there are too few documents to train ``ivf``."""

    num_documents: int
    dimension: int | None
    embedder: str
    index_kind: IndexKind
    index_layout: str | None
    metric: Metric
    generation: int
    num_segments: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Documents, index and embedder of one generation. Immutable: a search keeps the one it began with."""

    manifest: Manifest
    documents: DocumentTable
    index: StagedIndex | None
    embedder: Embedder
    num_unsaved: int = 0
    """Changes that the saved index lacks; they are made up for when it is read."""

    def stats(self) -> StoreStats:
        """Return what the store holds."""
        manifest = self.manifest
        return StoreStats(
            num_documents=len(self.documents),
            dimension=manifest.dimension,
            embedder=manifest.embedder_name,
            index_kind=manifest.options.kind,
            index_layout=None if self.index is None else self.index.layout,
            metric=manifest.options.metric,
            generation=manifest.generation,
            num_segments=len(manifest.segments),
            num_bytes=sum(entry.num_bytes for entry in manifest.files()),
        )

    @property
    def squared_length(self) -> float:
        """The inner product of a typical stored vector with itself; 1 where words count, whose scores are cosines."""
        return 1.0 if self.manifest.options.word_weight else self.documents.squared_length


def load_snapshot(
    folder: Path, choose_embedder: Callable[[Manifest], Embedder], rebuild_index: bool = False
) -> Snapshot:
    """Return the state on disk. A writer may replace it meanwhile: then the newer one.

    Raises:
        StoreNotFoundError, StoreCorruptError, StoreVersionError, EmbedderMismatchError
        StoreError: a file cannot be read at the moment, or each state was replaced before it was read, for half a
            minute.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    opened: dict[FileEntry, SegmentFile] = {}  # a newer state has most of the older one's: each attempt is shorter
    failed: int | None = None
    while True:
        manifest = read_manifest(folder)
        try:
            embedder = choose_embedder(manifest)
            for entry in manifest.segments:
                if entry.file not in opened:
                    opened[entry.file] = SegmentFile.open(folder, entry)
            documents = DocumentTable([(entry, opened[entry.file]) for entry in manifest.segments])
            shown = replace(manifest, index=None) if rebuild_index else manifest
            index, num_unsaved = load_index(folder, shown, documents)
            return Snapshot(shown, documents, index, embedder, num_unsaved)
        except EmbedderMismatchError:
            raise
        except StoreError as error:
            if manifest.generation == failed:
                raise
            failed = manifest.generation
            if time.monotonic() > deadline and read_manifest(folder).generation != failed:
                raise StoreError(f"{folder} is being changed too fast: try again") from error
            time.sleep(_PAUSE_S)


def match_embedder(folder: Path, manifest: Manifest, given: Embedder | None) -> Embedder:
    """Return the embedder of a store: the one that was saved in it, or the one ``given``.

    Raises:
        EmbedderMismatchError: another embedder than the store's, or none where one is needed.
    """
    name = manifest.embedder_name
    if given is None:
        given = _known_embedder(name, manifest.dimension)
    if given is None:
        raise EmbedderMismatchError(f"{folder} was made with the embedding model {name!r}: pass it to open the store")
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
    path = verify_file(folder, manifest.embedder_state, "restore the store from a backup, or add the documents again")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            saved = type(given).from_state(dict(arrays))
    except OSError as error:
        raise read_error(path, error) from error
    except (ValueError, KeyError, EOFError, BadZipFile) as error:
        raise StoreCorruptError(f"{path} cannot be read ({error}): restore the store from a backup") from error
    if given.is_fitted and not _is_same_state(given, saved):
        raise EmbedderMismatchError(
            f"the embedder was fitted on other documents than {folder}: leave it out, the store holds its own"
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


def _is_same_state(a: TrainableEmbedder, b: TrainableEmbedder) -> bool:
    """Return whether two fitted embedders have learnt the same."""
    first, second = a.state(), b.state()
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)
