"""Reopen a failed disk store, on a thread that may wait for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ragcache_core.chunkstore import ChunkEntry, ChunkStore
from ragcache_core.errors import CacheTierError, RAGCacheError
from ragcache_core.log import logger_of

logger = logger_of(__name__)

_FIRST_WAIT_S = 30.0
_LONGEST_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Reopened:
    """A reopened store, and its entries, parents first."""

    store: ChunkStore
    entries: list[ChunkEntry]


class UnopenedStore:
    """Placeholder for a store that could not be opened: it holds nothing, and every use fails.

    Args:
        path: the cache directory.
        chunk_bytes: size of a chunk.
        capacity_bytes: the limit of what is stored.
        why: it could not be opened.
    """

    chunks_per_batch = 1

    def __init__(self, path: Path, chunk_bytes: int, capacity_bytes: int, why: str) -> None:
        self.path = path
        self.chunk_bytes = self.slot_bytes = chunk_bytes
        self.capacity_bytes = capacity_bytes
        self._why = why

    def check_in_place(self) -> None:
        """Raise CacheTierError."""
        raise CacheTierError(self._why)

    def clear(self) -> None:
        """Raise CacheTierError: what the disk holds cannot be deleted."""
        raise CacheTierError(self._why)

    def erase(self, keys: object, progress: object) -> None:
        """Raise CacheTierError: what the disk holds cannot be overwritten."""
        raise CacheTierError(self._why)

    def close(self) -> None:
        """Do nothing."""


class Reopening:
    """Retries opening a store: after 30 s, then with doubled pauses of at most 5 minutes.

    Args:
        open_store: opens it.
        close_before: closes what is open of it, as far as the disk answers; its lock is free then.
        directory: the cache directory. While another file system is in its place, as without a mount, it stays closed.
        device: the file system on which the store was.
    """

    def __init__(
        self, open_store: Callable[[], ChunkStore], close_before: Callable[[], object], directory: Path, device: int
    ) -> None:
        self._open_store = open_store
        self._close_before = close_before
        self._directory = directory
        self._device = device
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        self._reopened: Reopened | None = None
        threading.Thread(target=self._run, name="ragcache-disk-reopen", daemon=True).start()

    @property
    def is_ready(self) -> bool:
        """Whether the store is open."""
        return self._reopened is not None

    def take(self) -> Reopened:
        """Return the open store; the caller owns it."""
        assert self._reopened is not None
        reopened, self._reopened = self._reopened, None
        return reopened

    def stop(self) -> None:
        """Stop retrying; close an open store. Does not wait for the disk."""
        self._is_stopped.set()
        with self._lock:
            reopened, self._reopened = self._reopened, None
        if reopened is not None:
            reopened.store.close()

    def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        while not self._is_stopped.wait(wait_s):
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            try:
                self._close_before()
                if device_of(self._directory) == self._device and self._reopen():
                    return
            except (RAGCacheError, OSError, ValueError) as error:
                logger.debug("%s cannot be opened again yet: %s", self._directory, error)

    def _reopen(self) -> bool:
        store = self._open_store()
        try:
            reopened = Reopened(store, list(store.entries()))
        except BaseException:
            store.close()
            raise
        with self._lock:
            if not self._is_stopped.is_set():
                self._reopened = reopened
                return True
        store.close()
        return True


def device_of(directory: Path) -> int:
    """Return the file system of a directory, or of its nearest existing parent."""
    while not directory.exists():
        directory = directory.parent
    return directory.stat().st_dev
