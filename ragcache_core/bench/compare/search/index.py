"""The index that requests are searched in: a document store of vectors made by seed, made once and kept in a folder."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Self

import platformdirs

from ragcache_core.bench.compare.search.vectors import DocumentVectors
from ragcache_core.errors import ConfigError, StoreError
from ragcache_core.memory import read_memory
from ragcache_core.private_files import make_once
from ragcache_core.retrieval import DocumentStore, PrecomputedEmbedder
from ragcache_core.retrieval.base import IndexKind
from ragcache_core.retrieval.index.ivf import IVFIndex
from ragcache_core.retrieval.reader import StoreReader
from ragcache_core.retrieval.storage.snapshot import load_snapshot
from ragcache_core.runtime.terminal import Bar
from ragcache_core.types import Document

_VERSION = 1
"""Part of an index's name: what is made otherwise must not be taken for what was made before."""
_OVERHEAD_BYTES, _LINK_BYTES = 500, 300
"""What a document takes beside its vector, and its links in a graph."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What is searched: ``count`` vectors of ``dim`` numbers.

    ``share`` of an IVF index's lists is looked into, an eighth by default; there are as many lists as the root of
    ``count``.

    Raises:
        ConfigError: options that cannot work, or a share for an index that has no lists.
    """

    count: int
    dim: int = 128
    kind: IndexKind = "ivf"
    share: float | None = None

    def __post_init__(self) -> None:
        if self.count < 1 or self.dim < 2:
            raise ConfigError(f"a search among {self.count} vectors of {self.dim} numbers: give 1 and 2 at least")
        if self.share is not None and self.kind != "ivf":
            raise ConfigError(f"--search-share is for ivf, whose lists it counts, not for {self.kind}: leave it out")
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"--search-share is {self.share:g}: give a share of the lists above 0, at most 1")

    @property
    def num_lists(self) -> int:
        """Lists of an IVF index; one of few vectors is flat."""
        return math.isqrt(self.count)

    @property
    def num_probes(self) -> int:
        """Lists that a search looks into."""
        return max(1, round((self.share or 0.125) * self.num_lists))

    @property
    def memory_bytes(self) -> int:
        """About what it takes to make the index: twice the vectors, since an index that grows is copied."""
        links = _LINK_BYTES if self.kind == "hnsw" else 0
        return self.count * (2 * (4 * self.dim + links) + _OVERHEAD_BYTES)

    def check_memory(self) -> None:
        """Refuse an index that this machine cannot make now.

        Raises:
            ConfigError: with what it needs and what there is.
        """
        memory = read_memory()
        if self.memory_bytes > memory.available:
            needed, free = (f"{number / 2**30:,.1f} GiB" for number in (self.memory_bytes, memory.available))
            raise ConfigError(
                f"an index of {self.count:,} vectors of {self.dim} numbers takes about {needed} of memory to make, "
                f"{memory.whose} {free} left: lower --search or --search-dim"
            )


class SearchIndex(StoreReader):
    """The documents of a store, searched in a share of its lists that may be another than that it was made for."""

    @classmethod
    def open(cls, path: Path, options: SearchOptions) -> Self:
        """Return the index in a folder, ready to be searched."""
        snapshot = load_snapshot(path, lambda _: PrecomputedEmbedder(options.dim))
        if isinstance(made := snapshot.index, IVFIndex):
            probing = IVFIndex(made.native, replace(made.options, nprobe=options.num_probes), made.trained_on)
            snapshot = replace(snapshot, index=probing)
        return cls(path, snapshot)

    def close(self) -> None:
        """Finish what is searched, and end the threads."""
        self._is_closed = True
        self._threads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def open_index(options: SearchOptions, folder: Path | None = None) -> SearchIndex:
    """Return the index, made the first time, with a bar: once for all shares of its lists. Whoever gets it closes it.

    Document ``i`` has the id and the text ``di``. Atomic: an index that is in ``folder`` is whole. By default that is
    one in the user's cache folder.

    Raises:
        ConfigError: it takes more memory than there is. StoreError: the folder cannot be used.
    """
    folder = folder or Path(platformdirs.user_cache_dir("ragcache")) / "searches"
    path = folder / f"{options.kind}-{options.count}x{options.dim}-{_VERSION}"
    try:
        make_once(path, partial(_make, options))
    except OSError as error:
        raise StoreError(f"{folder} cannot be used ({error.strerror}): name another --search-folder") from error
    try:
        return SearchIndex.open(path, options)
    except StoreError as error:
        raise StoreError(f"{error}; the index {path} is made again once that folder is deleted") from error


def _make(options: SearchOptions, path: Path) -> None:
    """Make the store part by part: lists are trained on the first, and anew where that is a quarter of all or less."""
    options.check_memory()
    vectors = DocumentVectors(options.count, options.dim)
    store = DocumentStore.create(
        path,
        embedder=PrecomputedEmbedder(options.dim),
        index=options.kind,
        nlist=options.num_lists,
    )
    bounds = [-(-options.count * eighths // 8) for eighths in (0, *range(3, 9))]
    with store, Bar(f"index {options.kind}", options.count, "vectors", is_kept=True) as bar:
        for start, stop in pairwise(bounds):
            documents = [Document(f"d{number}", f"d{number}") for number in range(start, stop)]
            if documents:
                store.add(documents, embeddings=vectors.draw(start, stop))
            bar.move_to(stop)
