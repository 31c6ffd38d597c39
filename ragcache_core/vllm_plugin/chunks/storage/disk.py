"""An engine's chunks on disk, copied from and to the pages of all workers by threads that no step waits for.

::

    key ‖ number ‖ page         K and V of a page's tokens in all layers of all workers
    key ‖ number ‖ 2^31 + i     tokens, prefix, attention masses; noted with the first: frequency, f_r, documents

A variant is there once its statistics are, which are written last. What a crash leaves of others is deleted at the
start. The store checks what it reads. A disk that fails, or does not answer in time, is out of service until the next
start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from ragcache_core.chunk.types import ChunkKey, ChunkVariant
from ragcache_core.chunkstore import AsyncStore, ChunkNote, ChunkStore, ChunkWrite, Scratch, Transfer, aligned_rows
from ragcache_core.chunkstore.chunks import ChunkEntry, names_of_text, text_of_names
from ragcache_core.errors import CacheTierError, CacheWriteError
from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.chunks.manager.entries import StoredChunk
from ragcache_core.vllm_plugin.chunks.page_layout import (
    num_pages_of,
    pack_statistics,
    part_key,
    read_part_key,
    statistics_bytes,
    statistics_bytes_of,
    unpack_statistics,
)

logger = logger_of(__name__)

_NUM_READERS = 2
_STATISTICS = 1 << 31
_DRAIN_TIMEOUT_S = 60.0


class DiskTransfer(Transfer):
    """What the disk was asked to do with the bytes of a variant, or with those of all deleted ones.

    Attributes:
        is_sound: nothing went wrong so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_sound = False

    @property
    def has_ended(self) -> bool:
        """Whether it touches pages no more."""
        return self.is_finished or self.is_abandoned

    @property
    def is_done(self) -> bool:
        """Whether it has ended well."""
        return self.is_finished and self.is_sound

    def end(self, error: Exception | None, *, is_found: bool = True) -> None:
        """End it, unless it was abandoned."""
        self.is_sound = error is None and is_found
        self.finish()


class ChunkDisk:
    """Variants on disk. Writes and deletions keep their order, reads overtake them.

    Args:
        open_store: opens their store, but for the size of what it holds.
        parts: the workers' pages, ``[num_pages, bytes]`` each, in the order in which a page on disk has them.
        tokens_per_page: of a chunk.

    Attributes:
        num_pages: how many fit, statistics included.

    Raises:
        CacheTierError: there is no room for a page, another engine uses the store, or it cannot be written to.
    """

    def __init__(
        self, open_store: Callable[..., ChunkStore], parts: Sequence[np.ndarray], tokens_per_page: int
    ) -> None:
        self.page_bytes = sum(part.shape[1] for part in parts)
        self._parts = parts
        self._tokens_per_page = tokens_per_page
        self._store = open_store(chunk_bytes=self.page_bytes)
        self.num_pages = self._store.num_slots
        self._threads = AsyncStore(self._store, "RAGCache's disk of chunks", num_readers=_NUM_READERS)

    def num_pages_of(self, variant: ChunkVariant) -> int:
        """Return how many pages a variant takes on disk, with its statistics."""
        return len(self._keys_of(variant))

    def stored(self) -> list[StoredChunk]:
        """Return the variants that are here as a whole, and delete what is left of others.

        Raises:
            CacheTierError: none of several can be read; that is no bad sector, and nothing is deleted.
        """
        num_errors_before = self._store.stats.num_read_errors
        entries = {entry.key: entry for entry in self._store.entries()}
        places = [at for key in entries if (at := read_part_key(key)) is not None and at[2] == _STATISTICS]
        found = [chunk for at in places if (chunk := self._read_statistics(*at, entries[part_key(*at)])) is not None]
        found = [chunk for chunk in found if all(key in entries for key in self._keys_of(chunk.variant))]
        if self._store.stats.num_read_errors - num_errors_before >= len(places) > 1:
            raise CacheTierError(
                f"none of the {len(places)} chunks in {self._store.path} can be read: see to that disk and start "
                "again, nothing was deleted; or delete the folder"
            )
        kept = {key for chunk in found for key in self._keys_of(chunk.variant)}
        self._store.discard_many(entries.keys() - kept)
        return found

    def read(self, variant: ChunkVariant, pages: Sequence[int]) -> DiskTransfer:
        """Begin to read a variant into pages."""
        transfer = DiskTransfer()
        self._threads.read(transfer, partial(self._read, transfer, variant, pages))
        return transfer

    def write(self, chunk: StoredChunk, pages: Sequence[int]) -> DiskTransfer:
        """Begin to write a variant; its pages are left alone until the transfer has ended."""
        transfer = DiskTransfer()
        self._threads.change(partial(self._write, transfer, chunk, pages), transfer.end, is_write=True)
        return transfer

    def scrub(self) -> DiskTransfer:
        """Begin to overwrite what was deleted before."""
        transfer = DiskTransfer()
        erase = partial(self._store.erase, (), self._threads.record_progress)
        self._threads.change(erase, transfer.end, is_forced=True)
        return transfer

    def drop(self, variant: ChunkVariant) -> None:
        """Have a variant deleted. On a full disk it comes back if the engine ends before the next change."""
        self._threads.change(partial(self._store.evict_many, self._keys_of(variant)))

    def rename(self, names: Sequence[tuple[ChunkVariant, frozenset[str]]]) -> None:
        """Have the documents of variants noted; on a full disk with the next change."""
        noted = [(_note_key(variant), text_of_names(None, documents)) for variant, documents in names]
        self._threads.change(partial(self._store.rename, noted))

    def note(self, uses: Sequence[tuple[ChunkVariant, float, float]]) -> None:
        """Have the frequency and f_r of variants noted; a full disk keeps what was noted before."""

        def note() -> None:
            with suppress(CacheWriteError):
                self._store.update_notes((_note_key(variant), *worth) for variant, *worth in uses)

        self._threads.change(note)

    @property
    def is_down(self) -> bool:
        """Whether the disk is out of service: it failed, or takes too long. Transfers are to be abandoned then."""
        return self._threads.why_down() is not None

    def drain(self) -> None:
        """Wait until everything that was asked for has been done."""
        self._threads.finish_reads(_DRAIN_TIMEOUT_S)
        self._threads.finish_changes(_DRAIN_TIMEOUT_S)

    def close(self) -> None:
        """End the threads after what they were asked to write, and close the store. Idempotent."""
        self._threads.close()

    # The threads' side

    def _write(self, transfer: DiskTransfer, chunk: StoredChunk, pages: Sequence[int]) -> None:
        keys, num_batched = self._keys_of(chunk.variant), self._store.chunks_per_batch
        self._store.evict_many(keys)  # a full disk may have kept some, which a store leaves alone
        try:
            for first in range(0, len(pages), num_batched):
                batch = pages[first : first + num_batched]
                rows = aligned_rows(len(batch), self.page_bytes)
                if not transfer.move(partial(self._gather, batch, rows)):
                    raise CacheTierError("it has taken so long that its pages hold something else")
                self._threads.record_progress()  # a large chunk is written in several parts
                notes = (ChunkNote(position=first + i) for i in range(len(batch)))
                self._store.write_many(list(map(ChunkWrite, keys[first:], rows, notes)))
            names = text_of_names(None, chunk.documents)
            note = ChunkNote(None, names, 0, chunk.frequency, chunk.worth, chunk.stored_s)
            rows = aligned_rows(len(keys) - len(pages), self.page_bytes)
            packed = np.frombuffer(pack_statistics(chunk.variant.statistics, chunk.token_ids), np.uint8)
            rows.reshape(-1)[: len(packed)], rows.reshape(-1)[len(packed) :] = packed, 0
            self._store.write_many(
                [ChunkWrite(key, row, note) for key, row in zip(keys[len(pages) :], rows, strict=True)]
            )
        except BaseException:
            with suppress(CacheTierError):
                self._store.evict_many(keys)
            raise

    def _read(self, transfer: DiskTransfer, variant: ChunkVariant, pages: Sequence[int], scratch: Scratch) -> int:
        is_found = False
        try:
            is_found = self._fetch(transfer, variant, pages, scratch)
        except Exception:  # whatever it is, this chunk is a miss
            logger.warning("RC-DISK-UNREADABLE: a chunk cannot be read: a miss", exc_info=True)
        transfer.end(None, is_found=is_found)
        return len(pages) * self.page_bytes if is_found else 0

    def _fetch(self, transfer: DiskTransfer, variant: ChunkVariant, pages: Sequence[int], scratch: Scratch) -> bool:
        """Return whether a variant was read as a whole."""
        keys, num_batched = self._keys_of(variant), self._store.chunks_per_batch
        if _note_key(variant) not in self._store:
            return False
        for first in range(0, len(pages), num_batched):
            batch = pages[first : first + num_batched]
            rows = scratch.rows(len(batch), self.page_bytes)
            if not all(self._store.read_many(list(zip(keys[first:], rows, strict=False)))):
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

    def _read_statistics(self, key: ChunkKey, number: int, first: int, note: ChunkEntry) -> StoredChunk | None:
        rows = bytearray(self.page_bytes)
        if not self._store.read(part_key(key, number, first), rows):
            return None
        num_rows = -(-statistics_bytes_of(rows) // self.page_bytes)
        for i in range(1, num_rows):
            row = bytearray(self.page_bytes)
            if not self._store.read(part_key(key, number, first + i), row):
                return None
            rows += row
        try:
            statistics, token_ids = unpack_statistics(bytes(rows))
            variant = ChunkVariant(key, number, len(statistics.token_inter), statistics)
        except ValueError as error:
            logger.warning(
                "RC-DISK-DAMAGED: the metadata of a chunk on disk is inconsistent, and it is forgotten: %s", error
            )
            return None
        _, documents = names_of_text(note.doc_id)
        return StoredChunk(variant, token_ids, note.frequency, note.cost, documents, note.stored_s)

    def _keys_of(self, variant: ChunkVariant) -> list[bytes]:
        """Return under which keys a variant is stored: its pages, then its statistics."""
        num_pages = num_pages_of(variant.num_tokens, self._tokens_per_page)
        num_rows = -(-statistics_bytes(variant.num_tokens, len(variant.statistics.prefix)) // self.page_bytes)
        parts = (*range(num_pages), *range(_STATISTICS, _STATISTICS + num_rows))
        return [part_key(variant.key, variant.number, part) for part in parts]


def _note_key(variant: ChunkVariant) -> bytes:
    return part_key(variant.key, variant.number, _STATISTICS)
