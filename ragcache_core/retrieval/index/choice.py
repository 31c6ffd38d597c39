"""Choose, build, save and load a store's index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ragcache_core.errors import StoreCorruptError
from ragcache_core.retrieval.base import Ids, IndexOptions, StagedIndex, Vectors, faiss
from ragcache_core.retrieval.index.flat import FlatIndex
from ragcache_core.retrieval.index.hnsw import HNSWIndex
from ragcache_core.retrieval.index.ivf import IVFIndex, least_vectors
from ragcache_core.retrieval.storage.documents import DocumentTable
from ragcache_core.retrieval.storage.manifest import IndexEntry, Manifest, verify_file, write_file

_GROWTH_BEFORE_RETRAINING = 4
_HINT = "open the store with rebuild_index=True, it is made again from the stored vectors"


def build_index(ids: Ids, vectors: Vectors, options: IndexOptions) -> StagedIndex:
    """Return an index of ``vectors: [n, dimension]``. Deterministic with one OpenMP thread."""
    if options.kind == "hnsw":
        return HNSWIndex.build(ids, vectors, options)
    if options.kind == "ivf" and len(ids) >= least_vectors(options):
        return IVFIndex.build(ids, vectors, options)
    return FlatIndex.build(ids, vectors, options)


def is_outgrown(index: StagedIndex, num_vectors: int) -> bool:
    """Return whether an index should be rebuilt for ``num_vectors``: it was trained on far fewer or far more."""
    if index.options.kind != "ivf":
        return False
    can_train = num_vectors >= least_vectors(index.options)
    if index.layout == "flat" or not can_train:
        return can_train == (index.layout == "flat")
    factor = _GROWTH_BEFORE_RETRAINING
    return num_vectors >= factor * index.trained_on or num_vectors * factor <= index.trained_on


def save_index(folder: Path, name: str, index: StagedIndex) -> IndexEntry:
    """Write an index to a new file.

    Raises:
        StoreFullError, StoreError
    """

    def write(append: Any) -> None:
        failure: list[OSError] = []

        def guarded(data: bytes) -> int:
            try:
                return int(append(data))
            except OSError as error:  # Faiss would print it and raise something else
                failure.append(error)
                return 0

        try:
            faiss.write_index(index.native, faiss.PyCallbackIOWriter(guarded))
        except RuntimeError:
            if not failure:
                raise
        if failure:
            raise failure[0]

    return IndexEntry(write_file(folder, name, write), index.layout, index.trained_on)


def load_index(folder: Path, manifest: Manifest, documents: DocumentTable) -> tuple[StagedIndex | None, int]:
    """Return the index of all documents, and the number of changes that the saved file lacks.

    Raises:
        StoreCorruptError: the file is not what the manifest records.
    """
    if manifest.dimension is None or not len(documents):
        return None, 0
    if manifest.index is None:
        live = documents.live_ids()
        return build_index(live, documents.vectors(live, manifest.dimension), manifest.options), len(live)
    path = verify_file(folder, manifest.index.file, _HINT)
    try:
        native = faiss.read_index(str(path))
        index = _wrap(native, manifest.index, manifest.options)
    except (RuntimeError, MemoryError, TypeError, AttributeError) as error:
        raise StoreCorruptError(f"{path} cannot be read ({error}): {_HINT}") from error
    saved, live = index.ids(), documents.live_ids()  # only now: a writer may soon remove the file
    gone, missing = np.setdiff1d(saved, live), np.setdiff1d(live, saved)
    changed = index.without(gone) if len(gone) else index
    if changed is None or is_outgrown(changed, len(live)):
        return build_index(live, documents.vectors(live, manifest.dimension), manifest.options), len(live)
    num_unsaved = len(missing) if changed.native is native else len(missing) + len(gone)
    if len(missing):
        changed = changed.with_added(missing, documents.vectors(missing, manifest.dimension))
    return changed, num_unsaved


def _wrap(native: Any, entry: IndexEntry, options: IndexOptions) -> StagedIndex:
    if entry.layout == "ivf":
        return IVFIndex(native, options, entry.trained_on)
    if entry.layout == "hnsw":
        return HNSWIndex(native, options, entry.trained_on)
    return FlatIndex(native, options)
