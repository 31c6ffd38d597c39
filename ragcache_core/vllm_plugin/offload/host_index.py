"""An index of the blocks in host memory, from which a restarted engine restores its host tier.

The launcher's process holds host memory, which outlives a killed engine; only the engine's knowledge of its contents is
lost. The journal is an index of them, with the same table as the disk tier's; with a disk tier, there is no journal::

    /dev/shm/vllm_offload_<engine id>.mmap      a link to the chunks
    /dev/shm/vllm_offload_<engine id>.journal/  a private folder: any user can create names in /dev/shm
        index.sqlite                            chunk -> key, checksum over both, place in the tree
        identity                                whose KV it is

The scheduler's thread neither waits for it nor wakes its thread: to hand the interpreter over for each chunk would stop
the scheduler for 1 to 2 ms. A chunk is entered some time after it was stored, and removed some time after it was
evicted. Bytes that were overwritten in between do not match the checksum, and are not restored.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from ragcache_core.chunkstore.chunks import ChunkEntry, ChunkNote, checksum
from ragcache_core.chunkstore.index import ChunkIndex, IndexDamagedError, remove_index
from ragcache_core.errors import CacheTierError
from ragcache_core.log import logger_of
from ragcache_core.private_files import make_private_folder, open_private
from ragcache_core.runtime.shared_memory import SHARED_MEMORY, journal_folder

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.cache.request_state import Key

logger = logger_of(__name__)

_WRITE_EVERY_S = 0.1


class _Run(NamedTuple):
    """Consecutive blocks: their rows, keys, and generations of the rows.

    Attributes:
        known: rows among them that are entered already.
        note: of the first block.
    """

    rows: Sequence[int]
    keys: Sequence[Key]
    generations: Sequence[int]
    known: Set[int]
    note: ChunkNote

    def note_of(self, index: int) -> ChunkNote:
        """Return a block's metadata."""
        parent = self.keys[index - 1] if index else self.note.parent
        return replace(self.note, parent=parent, position=self.note.position + index)


class HostIndex:
    """Owns the index and the thread that writes it.

    ``rows`` is host memory, ``[num_chunks, chunk_bytes]``.
    """

    def __init__(self, path: Path, rows: np.ndarray) -> None:
        """Open the index at ``path``; use :meth:`open` instead."""
        self._rows: np.ndarray | None = rows
        self._path = path
        self._generation = array("q", bytes(8 * len(rows)))
        self._recorded: set[int] = set()
        self._work: deque[_Run | list[int]] = deque()
        self._is_closing = threading.Event()
        self._is_broken = False
        self._num_scrubs = 0
        self._index = ChunkIndex(path, path.parent.name, rows.shape[1])
        self._thread = threading.Thread(target=self._write, name="ragcache-host-journal", daemon=True)
        self.restored: list[tuple[int, ChunkEntry]] = []
        """The chunks whose bytes are what they were, parents first."""

    @classmethod
    def open(
        cls, engine_id: str, rows: np.ndarray, identity: Mapping[str, str | int], folder: Path = SHARED_MEMORY
    ) -> Self:
        """Return the running journal of an engine; a damaged one, or one of another namespace, starts empty.

        Raises:
            CacheTierError, OSError: it can be neither read nor written.
        """
        own = journal_folder(engine_id, folder)
        make_private_folder(own)
        path, mark = own / "index.sqlite", own / "identity"
        identity_bytes = repr(sorted(identity.items())).encode()
        if not (mark.is_file() and mark.read_bytes() == identity_bytes):
            remove_index(path)
            with open(mark, "wb", opener=open_private) as file:
                file.write(identity_bytes)
        try:
            return cls._started(path, rows)
        except IndexDamagedError:
            remove_index(path)
        try:
            return cls._started(path, rows)
        except IndexDamagedError as error:
            raise CacheTierError(str(error)) from error

    @classmethod
    def _started(cls, path: Path, rows: np.ndarray) -> Self:
        journal = cls(path, rows)
        try:
            journal._restore(rows)
        except BaseException:
            journal._index.close()
            raise
        journal._thread.start()
        return journal

    def _restore(self, rows: np.ndarray) -> None:
        """Load the valid entries, and remove the rest."""
        digests = {slot: digest for slot, _, digest, _ in self._index.rows()}
        gone = []
        for chunk, key, entry in (row for batch in list(self._index.entries()) for row in batch):
            is_sound = entry is not None and 0 <= chunk < len(rows)
            if entry is not None and is_sound and checksum(key, rows[chunk].data) == digests.get(chunk):
                self._recorded.add(chunk)
                self.restored.append((chunk, entry))
            else:
                gone.append(chunk)
        self._index.discard(gone)

    def record(self, rows: Sequence[int], keys: Sequence[Key], note: ChunkNote) -> None:
        """Add complete blocks that are not in the index.

        Args:
            rows: of the blocks, one after another.
            keys: of the blocks.
            note: what is noted of the first. The others have the one before as parent, and the rest in common.
        """
        known = self._recorded.intersection(rows)
        if self._is_broken or len(known) == len(rows):
            return
        self._recorded.update(rows)
        self._work.append(_Run(rows, keys, [*map(self._generation.__getitem__, rows)], known, note))

    def remove(self, rows: Sequence[int]) -> None:
        """Remove the blocks in these rows (each row once), which will be overwritten."""
        if not rows:
            return
        np.frombuffer(self._generation, np.int64)[rows] += 1
        entered = self._recorded.intersection(rows)
        self._recorded -= entered
        if entered and not self._is_broken:
            self._work.append([*entered])

    def scrub(self) -> None:
        """Overwrite removed entries in the file."""
        if not self._is_broken:
            self._num_scrubs += 1

    @property
    def num_scrubs(self) -> int:
        """Number of open scrubs; 0 if the journal is gone."""
        return 0 if self._is_broken else self._num_scrubs

    def close(self) -> None:
        """End the thread, close the index, and release host memory. Idempotent."""
        self._is_closing.set()
        self._thread.join()
        self._index.close()
        self._rows = None

    def _write(self) -> None:
        is_closing = False
        while not is_closing:
            is_closing = self._is_closing.wait(_WRITE_EVERY_S)
            num_scrubs = self._num_scrubs
            work = [self._work.popleft() for _ in range(len(self._work))]
            try:
                # The last valid seal of a chunk counts, so earlier removals may be written first.
                if taken_out := [row for rows in work if isinstance(rows, list) for row in rows]:
                    self._index.delete(taken_out)
                self._record(run for run in work if isinstance(run, _Run))
                if num_scrubs:
                    self._index.scrub()
                    self._num_scrubs -= num_scrubs
            except CacheTierError as error:
                self._is_broken = True
                logger.warning("RC-HOST-NOT-KEPT: the host tier will not survive a crash of the engine: %s", error)
                with suppress(OSError):
                    remove_index(self._path)
                return

    def _record(self, runs: Iterable[_Run]) -> None:
        assert self._rows is not None
        digests = [
            (run, index, checksum(run.keys[index], self._rows[row].data))
            for run in runs
            for index, row in enumerate(run.rows)
            if row not in run.known
        ]
        # Only now: a row that was freed while its bytes were read may have held another block's.
        rows = [
            (run.rows[index], run.keys[index], digest, self._rows.shape[1], run.note_of(index))
            for run, index, digest in digests
            if self._generation[run.rows[index]] == run.generations[index]
        ]
        if rows:
            self._index.insert(rows)
