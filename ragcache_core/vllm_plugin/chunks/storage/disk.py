"""An engine's chunks on disk, copied from and to the pages of all workers by background threads.

::

    pages       key ‖ number ‖ page    K and V of a page's tokens in all layers of all workers
    statistics  key ‖ number ‖ piece   tokens, prefix, attention masses; noted with the first: frequency, f_r, documents

A variant is there once its statistics are, which are written last and deleted first. What a crash leaves of others is
deleted at the start. Both stores check what they read. A disk that fails, or does not answer in time, is out of service
until the next start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np

from ragcache_core.chunk.types import ChunkKey, ChunkVariant
from ragcache_core.chunkstore import AsyncStore, ChunkNote, ChunkStore, ChunkWrite, Scratch, Transfer, aligned_rows
from ragcache_core.chunkstore.chunks import ChunkEntry, names_of_text, text_of_names
from ragcache_core.errors import CacheTierError, CacheWriteError, ConfigError
from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.chunks.manager.entries import StoredChunk
from ragcache_core.vllm_plugin.chunks.page_layout import (
    STATISTICS_BYTES,
    num_disk_pages_within,
    num_pages_of,
    num_statistics_pieces,
    pack_statistics,
    part_key,
    read_part_key,
    statistics_bytes_per_page,
    unpack_statistics,
)

logger = logger_of(__name__)

_NUM_READERS = 2
_DRAIN_TIMEOUT_S = 60.0


class DiskTransfer(Transfer):
    """One disk operation on a version, or a scrub of deleted ones.

    Attributes:
        is_sound: nothing went wrong so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_sound = False

    @property
    def has_ended(self) -> bool:
        """Whether it no longer uses pages."""
        return self.is_finished or self.is_abandoned

    @property
    def is_done(self) -> bool:
        """Whether it has succeeded."""
        return self.is_finished and self.is_sound

    def end(self, error: Exception | None, *, is_found: bool = True) -> None:
        """End it, unless it was abandoned."""
        self.is_sound = error is None and is_found
        self.finish()


class _Stores:
    """The stores of pages and statistics as one."""

    def __init__(self, pages: ChunkStore, statistics: ChunkStore) -> None:
        self.path = pages.path
        self._stores = pages, statistics

    def check_in_place(self) -> None:
        for store in self._stores:
            store.check_in_place()

    def close(self) -> None:
        for store in self._stores:
            store.close()


class ChunkDisk:
    """Versions on disk. Writes and deletions keep their order; reads may overtake them.

    Args:
        open_store: opens a store of chunks: what it holds, the size of each, how many.
        capacity_bytes: how much room they may take.
        parts: the workers' pages, ``[num_pages, bytes]`` each, in the order in which a page on disk has them.
        tokens_per_page: of a chunk.

    Attributes:
        num_pages: how many fit.

    Raises:
        ConfigError: there is no room for a page.
        CacheTierError: another engine uses the stores, or they cannot be written to.
    """

    def __init__(
        self,
        open_store: Callable[[str, int, int], ChunkStore],
        capacity_bytes: int,
        parts: Sequence[np.ndarray],
        tokens_per_page: int,
    ) -> None:
        self.page_bytes = sum(part.shape[1] for part in parts)
        self.num_pages = num_disk_pages_within(capacity_bytes, self.page_bytes, tokens_per_page)
        if not self.num_pages:
            raise ConfigError(
                f"a page of chunks of this model takes {self.page_bytes} bytes, the disk's share for them is "
                f"{capacity_bytes}: raise disk_bytes, or ChunkReuse.share"
            )
        self._parts = parts
        self._tokens_per_page = tokens_per_page
        self._pieces_per_page = statistics_bytes_per_page(tokens_per_page) // STATISTICS_BYTES
        with ExitStack() as opened:
            self._pages = opened.enter_context(open_store("chunks", self.page_bytes, self.num_pages))
            num_pieces = self.num_pages * self._pieces_per_page
            self._statistics = open_store("statistics of chunks", STATISTICS_BYTES, num_pieces)
            opened.pop_all()
        stores = _Stores(self._pages, self._statistics)
        self._threads = AsyncStore(stores, "RAGCache's disk of chunks", num_readers=_NUM_READERS)

    def stored(self) -> list[StoredChunk]:
        """Return the complete versions, and delete the rest of others.

        Raises:
            CacheTierError: none of several can be read; that is no bad sector, and nothing is deleted.
        """
        num_errors_before = self._statistics.stats.num_read_errors
        entries = {read_part_key(entry.key): entry for entry in self._statistics.entries()}
        notes = [(at[:2], entry) for at, entry in entries.items() if at is not None and at[2] == 0]
        found = [chunk for at, entry in notes if (chunk := self._read_statistics(*at, entry)) is not None]
        found = [chunk for chunk in found if all(key in self._pages for key in self._page_keys(chunk.variant))]
        if self._statistics.stats.num_read_errors - num_errors_before >= len(notes) > 1:
            raise CacheTierError(
                f"none of the {len(notes)} chunks in {self._statistics.path} can be read: see to that disk and start "
                "again, nothing was deleted; or delete the folder"
            )
        kept = {(chunk.variant.key, chunk.variant.number) for chunk in found}
        for store in (self._statistics, self._pages):
            keys = [entry.key for entry in store.entries()]
            store.discard_many(key for key in keys if (at := read_part_key(key)) is None or at[:2] not in kept)
        return found

    def read(self, variant: ChunkVariant, pages: Sequence[int]) -> DiskTransfer:
        """Begin to read a variant into pages."""
        transfer = DiskTransfer()
        self._threads.read(transfer, partial(self._read, transfer, variant, pages))
        return transfer

    def write(self, chunk: StoredChunk, pages: Sequence[int]) -> DiskTransfer:
        """Begin to write a version; its pages must not change until the transfer has ended."""
        transfer = DiskTransfer()
        self._threads.change(partial(self._write, transfer, chunk, pages), transfer.end, is_write=True)
        return transfer

    def scrub(self) -> DiskTransfer:
        """Begin to overwrite deleted data."""
        transfer = DiskTransfer()
        self._threads.change(self._erase, transfer.end, is_forced=True)
        return transfer

    def drop(self, variant: ChunkVariant) -> None:
        """Delete a version. On a full disk it returns if the engine ends before the next change."""
        self._threads.change(partial(self._drop, variant))

    def rename(self, names: Sequence[tuple[ChunkVariant, frozenset[str]]]) -> None:
        """Update the documents of versions; on a full disk with the next change."""
        noted = [(_note_key(variant), text_of_names(None, documents)) for variant, documents in names]
        self._threads.change(partial(self._statistics.rename, noted))

    def note(self, uses: Sequence[tuple[ChunkVariant, float, float]]) -> None:
        """Update frequency and f_r of versions; a full disk keeps the old ones."""
        worths = [(_note_key(variant), frequency, worth) for variant, frequency, worth in uses]

        def note() -> None:
            with suppress(CacheWriteError):
                self._statistics.update_notes(worths)

        self._threads.change(note)

    @property
    def is_down(self) -> bool:
        """Whether the disk is out of service, after a failure or time-out. Then abandon all transfers."""
        return self._threads.why_down() is not None

    def drain(self) -> None:
        """Wait for all queued work."""
        self._threads.finish_reads(_DRAIN_TIMEOUT_S)
        self._threads.finish_changes(_DRAIN_TIMEOUT_S)

    def close(self) -> None:
        """End the threads after their queued writes, and close the store. Idempotent."""
        self._threads.close()

    # The threads' side

    def _write(self, transfer: DiskTransfer, chunk: StoredChunk, pages: Sequence[int]) -> None:
        variant = chunk.variant
        self._drop(variant)  # a full disk may have kept some, which a store leaves alone
        try:
            for first, batch, keys in self._batches(variant, pages):
                rows = aligned_rows(len(batch), self.page_bytes)
                if not transfer.move(partial(self._gather, batch, rows)):
                    raise CacheTierError("it has taken so long that its pages hold something else")
                self._threads.record_progress()  # a large chunk is written in several parts
                notes = (ChunkNote(position=first + i) for i in range(len(batch)))
                self._pages.write_many(list(map(ChunkWrite, keys, rows, notes)))
            names = text_of_names(None, chunk.documents)
            note = ChunkNote(None, names, 0, chunk.frequency, chunk.worth, chunk.stored_s)
            pieces = pack_statistics(variant.statistics, chunk.token_ids)
            self._statistics.write_many(
                [ChunkWrite(part_key(variant.key, variant.number, i), piece, note) for i, piece in enumerate(pieces)]
            )
        except BaseException:
            with suppress(CacheTierError):
                self._drop(variant)
            raise

    def _drop(self, variant: ChunkVariant) -> None:
        keys = self._page_keys(variant)
        most = len(keys) * self._pieces_per_page + 1  # a full page behind more than 80 chunks may take one more
        self._statistics.evict_many(part_key(variant.key, variant.number, i) for i in range(most))
        self._pages.evict_many(keys)

    def _erase(self) -> None:
        for store in (self._statistics, self._pages):
            store.erase((), self._threads.record_progress)

    def _read(self, transfer: DiskTransfer, variant: ChunkVariant, pages: Sequence[int], scratch: Scratch) -> int:
        is_found = False
        try:
            is_found = self._fetch(transfer, variant, pages, scratch)
        except Exception:  # whatever it is, this chunk is a miss
            logger.warning("RC-DISK-UNREADABLE: a chunk cannot be read: a miss", exc_info=True)
        transfer.end(None, is_found=is_found)
        return len(pages) * self.page_bytes if is_found else 0

    def _fetch(self, transfer: DiskTransfer, variant: ChunkVariant, pages: Sequence[int], scratch: Scratch) -> bool:
        """Return whether a version was read completely."""
        if _note_key(variant) not in self._statistics:
            return False
        for _, batch, keys in self._batches(variant, pages):
            rows = scratch.rows(len(batch), self.page_bytes)
            if not all(self._pages.read_many(list(zip(keys, rows, strict=True)))):
                return False
            if not transfer.move(partial(self._scatter, batch, rows)):
                return False
        return True

    def _gather(self, pages: Sequence[int], rows: np.ndarray) -> None:
        """Copy pages into rows, ``[len(pages), page_bytes]``."""
        start, index = 0, list(pages)
        for part in self._parts:
            rows[:, start : start + part.shape[1]] = part[index]
            start += part.shape[1]

    def _scatter(self, pages: Sequence[int], rows: np.ndarray) -> None:
        """Copy rows into pages."""
        start, index = 0, list(pages)
        for part in self._parts:
            part[index] = rows[:, start : start + part.shape[1]]
            start += part.shape[1]

    def _read_statistics(self, key: ChunkKey, number: int, note: ChunkEntry) -> StoredChunk | None:
        pieces = [bytearray(STATISTICS_BYTES)]
        if not self._statistics.read(part_key(key, number, 0), pieces[0]):
            return None
        pieces += [bytearray(STATISTICS_BYTES) for _ in range(1, num_statistics_pieces(bytes(pieces[0])))]
        if not all(self._statistics.read(part_key(key, number, i), pieces[i]) for i in range(1, len(pieces))):
            return None
        try:
            statistics, token_ids = unpack_statistics(map(bytes, pieces))
            variant = ChunkVariant(key, number, len(statistics.token_inter), statistics)
        except ValueError as error:
            logger.warning(
                "RC-DISK-DAMAGED: the metadata of a chunk on disk is inconsistent, and it is forgotten: %s", error
            )
            return None
        _, documents = names_of_text(note.doc_id)
        return StoredChunk(variant, token_ids, note.frequency, note.cost, documents, note.stored_s)

    def _batches(
        self, variant: ChunkVariant, pages: Sequence[int]
    ) -> Iterator[tuple[int, Sequence[int], Sequence[bytes]]]:
        """Yield batches of pages with their keys on disk, and the number of the first page."""
        keys, size = self._page_keys(variant), self._pages.chunks_per_batch
        for first in range(0, len(pages), size):
            yield first, pages[first : first + size], keys[first : first + size]

    def _page_keys(self, variant: ChunkVariant) -> list[bytes]:
        num_pages = num_pages_of(variant.num_tokens, self._tokens_per_page)
        return [part_key(variant.key, variant.number, page) for page in range(num_pages)]


def _note_key(variant: ChunkVariant) -> bytes:
    return part_key(variant.key, variant.number, 0)
