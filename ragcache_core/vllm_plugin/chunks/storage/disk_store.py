"""A worker's chunks on disk: pages in one store, tokens and statistics in another beside it.

::

    pages       key ‖ number ‖ page    K and V of a page's tokens in all layers
    statistics  key ‖ number ‖ piece   tokens, prefix, attention masses; noted with the first: frequency, f_r

A variant is there once its statistics are, which are written last and deleted first. What a crash leaves of others is
deleted at the start. Both stores check what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ragcache_core.chunk.types import ChunkKey, ChunkVariant
from ragcache_core.chunkstore import ChunkNote, ChunkStore, ChunkWrite, Scratch, aligned_rows
from ragcache_core.chunkstore.chunks import ChunkEntry, names_of_text, text_of_names
from ragcache_core.chunkstore.sealing import Keys, load_keys
from ragcache_core.errors import CacheTierError, CacheWriteError, ConfigError
from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.chunks.messages import (
    DropChunks,
    NameChunks,
    NoteUses,
    ReadChunk,
    StoredChunk,
    WriteChunk,
)
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
_HINT = "see to that disk and start again, nothing was deleted; or delete the folder"


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """Where a worker keeps its chunks, what they depend on, and how much room they may take."""

    directory: Path
    identity: Mapping[str, str | int]
    capacity_bytes: int
    match_keys: tuple[str, ...] = ()
    """Entries of the identity that older ones of the same engine share, whose chunks may be deleted for room."""
    key_file: Path | None = None
    """Holds the key that encrypts them, as :func:`load_keys` finds it."""


class ChunkDisk:
    """Two stores as one. Changes come from one thread, reads from any."""

    def __init__(self, place: DiskPlace, *, page_bytes: int, tokens_per_page: int) -> None:
        """Open the stores, or make them; what they hold of other weights is never read.

        Raises:
            ConfigError: there is no room for a page, or no key in ``place.key_file``.
            CacheTierError: another engine uses them, or they cannot be written to.
        """
        self.num_pages = num_disk_pages_within(place.capacity_bytes, page_bytes, tokens_per_page)
        if not self.num_pages:
            raise ConfigError(
                f"a page of chunks of this model takes {page_bytes} bytes, the disk's share for them is "
                f"{place.capacity_bytes}: raise disk_bytes, or ChunkReuse.share"
            )
        self.page_bytes = page_bytes
        self._tokens_per_page = tokens_per_page
        self._pieces_per_page = statistics_bytes_per_page(tokens_per_page) // STATISTICS_BYTES
        keys = load_keys(place.key_file)
        with ExitStack() as opened:
            self._pages = opened.enter_context(self._store(place, keys, "chunks", page_bytes, self.num_pages))
            num_pieces = self.num_pages * self._pieces_per_page
            self._statistics = opened.enter_context(
                self._store(place, keys, "statistics of chunks", STATISTICS_BYTES, num_pieces)
            )
            self._opened = opened.pop_all()

    @staticmethod
    def _store(place: DiskPlace, keys: Keys | None, holds: str, chunk_bytes: int, num_slots: int) -> ChunkStore:
        slot_bytes = -(-chunk_bytes // STATISTICS_BYTES) * STATISTICS_BYTES
        identity = {**place.identity, "holds": holds}
        return ChunkStore(
            place.directory,
            identity,
            chunk_bytes=chunk_bytes,
            capacity_bytes=num_slots * slot_bytes,
            match_keys=place.match_keys,
            keys=keys,
        )

    @property
    def path(self) -> Path:
        """The folder of the pages."""
        return self._pages.path

    def stored(self) -> list[StoredChunk]:
        """Return the variants that are here as a whole, and delete what is left of others.

        Raises:
            CacheTierError: none of several can be read; that is no bad sector, and nothing is deleted.
        """
        num_errors_before = self._statistics.stats.num_read_errors
        notes: dict[tuple[ChunkKey, int], ChunkEntry] = {}
        for entry in self._statistics.entries():
            at = read_part_key(entry.key)
            if at is not None and at[2] == 0:
                notes[at[:2]] = entry
        found = []
        for (key, number), entry in notes.items():
            chunk = self._read_statistics(key, number, entry)
            if chunk is not None and all(page in self._pages for page in self._page_keys_of(chunk.variant)):
                found.append(chunk)
        if self._statistics.stats.num_read_errors - num_errors_before >= len(notes) > 1:
            raise CacheTierError(f"none of the {len(notes)} chunks in {self._statistics.path} can be read: {_HINT}")
        self._delete_all_but({(chunk.variant.key, chunk.variant.number) for chunk in found})
        return found

    def write(self, command: WriteChunk, gather: Callable[[Sequence[int], np.ndarray], None]) -> None:
        """Write a variant; ``gather`` copies pages into rows, ``[num_pages, page_bytes]``.

        Raises:
            CacheTierError: it would not be written; nothing of it is left that :meth:`stored` or :meth:`read` finds.
        """
        key, number = command.variant.key, command.variant.number
        # A crash may have left pages under this number, and a store leaves alone what is there.
        self.drop(DropChunks(((key, number, len(command.pages)),)))
        try:
            for first, pages in self._batches(command.pages):
                rows = aligned_rows(len(pages), self.page_bytes)
                gather(pages, rows)
                writes = [
                    ChunkWrite(part_key(key, number, first + i), row.data, ChunkNote(position=first + i))
                    for i, row in enumerate(rows)
                ]
                self._pages.write_many(writes)
            names = text_of_names(None, command.documents)
            note = ChunkNote(None, names, 0, command.frequency, command.worth, command.stored_s)
            pieces = pack_statistics(command.variant.statistics, command.token_ids)
            self._statistics.write_many(
                [ChunkWrite(part_key(key, number, i), piece, note) for i, piece in enumerate(pieces)]
            )
        except BaseException:
            with suppress(CacheTierError):
                self.drop(DropChunks(((key, number, len(command.pages)),)))
            raise

    def read(self, command: ReadChunk, scratch: Scratch, deliver: Callable[[Sequence[int], np.ndarray], bool]) -> bool:
        """Return whether a variant was read as a whole; ``deliver`` copies rows into pages, until it returns False."""
        key, number = command.key, command.number
        if part_key(key, number, 0) not in self._statistics:
            return False
        for first, pages in self._batches(command.pages):
            rows = scratch.rows(len(pages), self.page_bytes)
            wanted = [(part_key(key, number, first + i), row.data) for i, row in enumerate(rows)]
            if not all(self._pages.read_many(wanted)) or not deliver(pages, rows):
                return False
        return True

    def drop(self, command: DropChunks) -> None:
        """Delete variants. On a full disk some come back if the engine ends before the next change: see `scrub`."""
        for key, number, num_pages in command.dropped:
            most = num_pages * self._pieces_per_page + 1  # a full page behind more than 80 chunks may take one more
            self._statistics.evict_many(part_key(key, number, i) for i in range(most))
            self._pages.evict_many(part_key(key, number, page) for page in range(num_pages))

    def note(self, command: NoteUses) -> None:
        """Note what variants are worth; a full disk keeps what was noted before."""
        with suppress(CacheWriteError):
            self._statistics.update_notes(
                (part_key(key, number, 0), frequency, worth) for key, number, frequency, worth in command.uses
            )

    def scrub(self, on_part: Callable[[], object]) -> None:
        """Leave nothing in the files of what was deleted before.

        Raises:
            CacheWriteError: something may be left.
        """
        self._statistics.erase((), on_part)
        self._pages.erase((), on_part)

    def rename(self, command: NameChunks) -> None:
        """Note which documents variants are; on a full disk with the next change."""
        self._statistics.rename(
            (part_key(key, number, 0), text_of_names(None, documents)) for key, number, documents in command.names
        )

    def check_in_place(self) -> None:
        """Raise CacheWriteError if files of either are gone."""
        self._pages.check_in_place()
        self._statistics.check_in_place()

    def close(self) -> None:
        """Close both stores. Idempotent."""
        self._opened.close()

    # Inside

    def _batches(self, pages: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        size = self._pages.chunks_per_batch
        for first in range(0, len(pages), size):
            yield first, pages[first : first + size]

    def _read_statistics(self, key: ChunkKey, number: int, note: ChunkEntry) -> StoredChunk | None:
        pieces = [bytearray(STATISTICS_BYTES)]
        if not self._statistics.read(part_key(key, number, 0), pieces[0]):
            return None
        num_pieces = num_statistics_pieces(bytes(pieces[0]))
        pieces += [bytearray(STATISTICS_BYTES) for _ in range(1, num_pieces)]
        if not all(self._statistics.read(part_key(key, number, i), pieces[i]) for i in range(1, num_pieces)):
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

    def _page_keys_of(self, variant: ChunkVariant) -> Iterable[bytes]:
        num_pages = num_pages_of(variant.num_tokens, self._tokens_per_page)
        return (part_key(variant.key, variant.number, page) for page in range(num_pages))

    def _delete_all_but(self, kept: set[tuple[ChunkKey, int]]) -> None:
        for store in (self._statistics, self._pages):
            keys = [entry.key for entry in store.entries()]
            store.discard_many(key for key in keys if (at := read_part_key(key)) is None or at[:2] not in kept)
