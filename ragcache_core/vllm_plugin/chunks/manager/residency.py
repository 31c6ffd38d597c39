"""Residency of chunks: pages of host memory, space on disk, and transfers between them.

Requests are unknown here: a variant only has a number of pins. Every move runs in :meth:`ChunkResidency.changing`,
which keeps the sums and the ranks correct.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ragcache_core.chunk import VariantTable
from ragcache_core.chunk.types import ChunkKey, ChunkVariant
from ragcache_core.chunkstore.slotfile import SlotMap
from ragcache_core.tree.node import MAX_OTHER_IDS
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.chunks.manager.entries import ChunkCounters, ChunkTransfer, StoredVariants, Variant
from ragcache_core.vllm_plugin.chunks.manager.eviction import ChunkEviction
from ragcache_core.vllm_plugin.chunks.messages import (
    DropChunks,
    MemoryCommand,
    MemoryReport,
    NameChunks,
    NoteUses,
    ReadChunk,
    ScrubDisk,
    StoredChunk,
    WriteChunk,
)
from ragcache_core.vllm_plugin.chunks.page_layout import num_pages_of

_NOTED_AT_ONCE = 64
_MAX_WRITING_SHARE = 4
"""One in this many pages may wait for the disk; a disk that falls behind gets no more until then."""


class ChunkResidency:
    """The chunks by key, where their variants are, and the commands that move them.

    Args:
        ranks: which chunk is evicted first.
        counters: of chunks.
        num_pages, num_disk_pages: of every worker.
        tokens_per_page: of a chunk.
        num_workers: how many report on each command.
        max_variants: of one chunk.

    Attributes:
        chunks: those with a variant stored or in flight.
        variants: those that are stored, with their f_r.
        is_scrub_due: the bytes of deleted chunks must be erased from disk.
        is_disk_down: a worker's disk is out of service.
    """

    def __init__(
        self,
        ranks: ChunkEviction,
        counters: ChunkCounters,
        *,
        num_pages: int,
        num_disk_pages: int,
        tokens_per_page: int,
        num_workers: int,
        max_variants: int,
    ) -> None:
        self.num_pages = num_pages
        self.num_disk_pages = num_disk_pages
        self.tokens_per_page = tokens_per_page
        self.is_disk_enabled = num_disk_pages > 0
        self.chunks: dict[ChunkKey, StoredVariants] = {}
        self.variants = VariantTable(num_pages + num_disk_pages, max_variants)
        self.num_used_disk_pages = 0
        self._ranks = ranks
        self._counters = counters
        self._num_workers = num_workers
        self._free = SlotMap(num_pages)
        self._num_idle_pages = self._num_idle_disk_pages = self._num_writing_pages = 0
        self._next_command = 0
        self._transfers: dict[int, ChunkTransfer] = {}
        self._commands: list[MemoryCommand] = []
        self._uses: dict[int, ChunkVariant] = {}
        self._scrubs: dict[int, int] = {}
        self._renamed: dict[int, tuple[StoredVariants, Variant]] = {}
        self.is_scrub_due = self.is_disk_down = False

    @property
    def num_used_pages(self) -> int:
        """Pages of host memory that hold a chunk, or are to hold one."""
        return self.num_pages - self._free.num_free

    def place(self, variant: ChunkVariant) -> tuple[StoredVariants, Variant] | None:
        """Return a chunk and its variant; None if it is stored no longer."""
        chunk = self.chunks.get(variant.key)
        stored = None if chunk is None else chunk.stored.get(variant.number)
        return None if chunk is None or stored is None else (chunk, stored)

    @contextmanager
    def changing(self, chunk: StoredVariants, stored: Variant) -> Iterator[None]:
        """Keep the sums and the ranks correct while a variant moves, is held or released."""
        self._num_idle_pages -= stored.num_idle_pages(Tier.HOST)
        self._num_idle_disk_pages -= stored.num_idle_pages(Tier.DISK)
        try:
            yield
        finally:
            self._num_idle_pages += stored.num_idle_pages(Tier.HOST)
            self._num_idle_disk_pages += stored.num_idle_pages(Tier.DISK)
            self._ranks.place(chunk)

    # Host memory

    def has_room(self, num_pages: int) -> bool:
        """Return whether :meth:`take_pages` would find the pages."""
        return num_pages <= self._free.num_free + self._num_idle_pages

    def take_pages(self, num_pages: int) -> tuple[int, ...]:
        """Return pages; the lowest-ranked chunks are evicted where too few are free."""
        while self._free.num_free < num_pages:
            chunk = self.chunks[self._ranks.lowest(Tier.HOST)]
            stored = self._least(chunk, Tier.HOST)
            self._ranks.record_eviction(chunk, stored, Tier.HOST)
            self._leave_host(chunk, stored)
        return tuple(self._free.reserve(num_pages))

    def give_pages_back(self, pages: tuple[int, ...]) -> None:
        """Undo :meth:`take_pages`."""
        self._free.release(pages)

    def forget(self, chunk: StoredVariants, stored: Variant) -> None:
        """Drop a variant that is not held, wherever it is."""
        with self.changing(chunk, stored):
            self._free.release(stored.pages)
            stored.pages = ()
            if stored.is_on_disk:
                self.num_used_disk_pages -= stored.num_pages
                self._drop(stored)
            stored.is_on_disk = False
            del chunk.stored[stored.variant.number]
            self.variants.remove(stored.variant)
        if stored.is_doomed:
            self.is_scrub_due = self.num_disk_pages > 0
        self.forget_if_empty(chunk)

    def doom(self, chunk: StoredVariants, stored: Variant) -> None:
        """Drop a variant as soon as it is not held; from now on it is not found."""
        stored.is_doomed = True
        self.variants.remove(stored.variant)
        self.forget_if_doomed(chunk, stored)

    def forget_if_doomed(self, chunk: StoredVariants, stored: Variant) -> None:
        """Drop a doomed variant that has been released."""
        if stored.is_doomed and stored.is_idle and stored.variant.number in chunk.stored:
            self.forget(chunk, stored)

    def forget_if_empty(self, chunk: StoredVariants) -> None:
        """Drop a chunk without a variant stored or in flight."""
        if not chunk.num_variants and self.chunks.get(chunk.key) is chunk:
            del self.chunks[chunk.key]

    # Disk

    def read(self, chunk: StoredVariants, stored: Variant) -> None:
        """Have a variant that lies on disk alone read into pages; enough are free or evictable."""
        pages = self.take_pages(stored.num_pages)
        with self.changing(chunk, stored):
            stored.pages, stored.is_loading = pages, True
        command_id = self._begin(chunk, stored)
        self._commands.append(ReadChunk(command_id, chunk.key, stored.variant.number, pages))

    def write(self, chunk: StoredVariants, stored: Variant) -> None:
        """Have a variant written to disk, where others are deleted for it; what does not fit stays in memory."""
        if not self.is_disk_enabled:
            return
        num_missing = stored.num_pages - (self.num_disk_pages - self.num_used_disk_pages)
        is_behind = self._num_writing_pages + stored.num_pages > self.num_pages // _MAX_WRITING_SHARE
        if num_missing > self._num_idle_disk_pages or (is_behind and self._num_writing_pages):
            self._counters.num_dropped_blocks += 1
            return
        while stored.num_pages > self.num_disk_pages - self.num_used_disk_pages:
            victim_chunk = self.chunks[self._ranks.lowest(Tier.DISK)]
            victim = self._least(victim_chunk, Tier.DISK)
            self._ranks.record_eviction(victim_chunk, victim, Tier.DISK)
            self._leave_disk(victim_chunk, victim)
        self.num_used_disk_pages += stored.num_pages
        self._num_writing_pages += stored.num_pages
        with self.changing(chunk, stored):
            stored.is_writing = True
        frequency = self._ranks.frequency(chunk.key)
        command_id = self._begin(chunk, stored)
        worth, documents = self._worth(stored), stored.documents | chunk.names
        self._commands.append(
            WriteChunk(
                command_id,
                stored.variant,
                chunk.token_ids,
                stored.pages,
                frequency,
                worth,
                documents,
                stored.stored_s,
            )
        )

    def record_use(self, stored: Variant) -> None:
        """Have it noted on disk before long what a variant is worth."""
        if stored.is_on_disk:
            self._uses[stored.variant.number] = stored.variant

    def name(self, chunk: StoredVariants, document: str) -> None:
        """Add a document to a chunk, in memory and before long on disk."""
        if document not in chunk.names and len(chunk.names) <= MAX_OTHER_IDS:
            chunk.names.add(document)
            on_disk = [stored for stored in chunk.stored.values() if stored.is_on_disk or stored.is_writing]
            self._renamed.update({stored.variant.number: (chunk, stored) for stored in on_disk})

    @property
    def num_scrubs(self) -> int:
        """Scrubs of the workers' disks that have not ended, or not begun."""
        return len(self._scrubs) + self.is_scrub_due

    def take_commands(self) -> tuple[MemoryCommand, ...]:
        """Return what the workers' memory has to do, in order."""
        if len(self._uses) >= _NOTED_AT_ONCE:
            kept = [variant for variant in self._uses.values() if variant in self.variants]
            uses = [(v.key, v.number, self._ranks.frequency(v.key), self.variants.reuse(v)) for v in kept]
            self._uses.clear()
            self._commands.append(NoteUses(tuple(uses)))
        if self._renamed:
            places = [at for at in self._renamed.values() if self.place(at[1].variant) is not None]
            names = [(at.variant.key, at.variant.number, at.documents | chunk.names) for chunk, at in places]
            self._renamed.clear()
            self._commands.append(NameChunks(tuple(names)))
        if self.is_scrub_due:
            self.is_scrub_due = False
            command_id, self._next_command = self._next_command, self._next_command + 1
            self._scrubs[command_id] = 0
            self._commands.append(ScrubDisk(command_id))
        commands, self._commands = tuple(self._commands), []
        return commands

    def on_report(self, report: MemoryReport) -> None:
        """Take in what the workers did; a variant that one of them could not read is forgotten."""
        self._counters.num_corrupt_blocks += report.num_corrupt
        for command_id in report.num_done.keys() | report.num_failed.keys():
            if command_id in self._scrubs:
                self._scrubs[command_id] += report.num_done[command_id] + report.num_failed[command_id]
                if self._scrubs[command_id] == self._num_workers:
                    del self._scrubs[command_id]
            transfer = self._transfers.get(command_id)
            if transfer is None:
                continue
            transfer.num_done += report.num_done[command_id]
            transfer.num_failed += report.num_failed[command_id]
            if transfer.num_done + transfer.num_failed == self._num_workers:
                del self._transfers[command_id]
                self._finish(transfer)
        if report.is_disk_down:
            self.is_disk_down = True
            self.leave_disk()

    def restore(self, found: Sequence[Sequence[StoredChunk]], now_s: float) -> int:
        """Take up what every worker found on its disk, the most used first; return how many variants.

        What only some of them have, or have from another context, or more than fits now, is deleted.
        """
        if not found:
            return 0
        on_all = set.intersection(*({c.variant.name for c in part} for part in found))
        entries = {(c.variant.key, c.variant.number): c for part in found for c in part}
        orphans: list[tuple[ChunkKey, int, int]] = []
        for at, entry in sorted(entries.items(), key=lambda item: (-item[1].frequency, -item[1].worth, item[0])):
            num_pages = num_pages_of(entry.variant.num_tokens, self.tokens_per_page)
            chunk = self.chunks.get(at[0]) or StoredVariants(at[0], entry.token_ids, entry.variant.num_tokens)
            has_room = self.num_used_disk_pages + num_pages <= self.num_disk_pages
            self.variants.retire(at[1])
            is_sound = entry.variant.name in on_all and entry.token_ids == chunk.token_ids
            is_new = self.variants.captured_in(at[0], entry.variant.statistics.context) is None
            if not (is_sound and is_new and has_room) or self.variants.is_full(at[0]):
                orphans.append((*at, num_pages))
                continue
            self.variants.restore(entry.variant, reuse=entry.worth)
            self.chunks[at[0]] = chunk
            stored_s = min(entry.stored_s, now_s)  # a clock may have been set back
            stored = Variant(entry.variant, num_pages, documents=entry.documents, stored_s=stored_s)
            self.num_used_disk_pages += num_pages
            with self.changing(chunk, stored):
                stored.is_on_disk = True
                chunk.stored[at[1]] = stored
            self._ranks.restore(chunk.key, chunk.num_tokens, entry.frequency)
        if orphans:
            self._commands.append(DropChunks(tuple(orphans)))
        return len(entries) - len(orphans)

    def leave_disk(self) -> None:
        """Use the disk no more until the next start."""
        self.is_disk_enabled = False
        self._uses.clear()
        for chunk in list(self.chunks.values()):
            for stored in list(chunk.stored.values()):
                if stored.is_on_disk and not stored.is_loading:
                    self._leave_disk(chunk, stored)

    # Inside

    def _least(self, chunk: StoredVariants, tier: Tier) -> Variant:
        """Return the variant with the lowest f_r that a tier can evict; the oldest of equal ones."""
        idle = (stored for stored in chunk.stored.values() if stored.num_idle_pages(tier))
        return min(idle, key=lambda stored: (self._worth(stored), stored.variant.number))

    def _worth(self, stored: Variant) -> float:
        return self.variants.reuse(stored.variant)

    def _leave_host(self, chunk: StoredVariants, stored: Variant) -> None:
        self._counters.num_evicted_chunks += 1
        with self.changing(chunk, stored):
            self._free.release(stored.pages)
            stored.pages = ()
        if not stored.is_on_disk:
            self.forget(chunk, stored)

    def _leave_disk(self, chunk: StoredVariants, stored: Variant) -> None:
        """Drop a variant's copy on disk; the one in memory stays."""
        if not stored.pages:
            self.forget(chunk, stored)
            return
        with self.changing(chunk, stored):
            stored.is_on_disk = False
            self.num_used_disk_pages -= stored.num_pages
            self._drop(stored)

    def _drop(self, stored: Variant) -> None:
        variant = stored.variant
        self._commands.append(DropChunks(((variant.key, variant.number, stored.num_pages),)))

    def _begin(self, chunk: StoredVariants, stored: Variant) -> int:
        command_id, self._next_command = self._next_command, self._next_command + 1
        self._transfers[command_id] = ChunkTransfer(chunk, stored)
        return command_id

    def _finish(self, transfer: ChunkTransfer) -> None:
        chunk, stored = transfer.chunk, transfer.stored
        is_lost = stored.is_loading and bool(transfer.num_failed)
        with self.changing(chunk, stored):
            if stored.is_writing:
                self._num_writing_pages -= stored.num_pages
                stored.is_on_disk = True  # of some workers at least
            stored.is_loading, was_writing, stored.is_writing = False, stored.is_writing, False
        if is_lost:
            self._counters.num_lost_blocks += 1
            self.forget(chunk, stored)
            return
        if transfer.num_failed or not self.is_disk_enabled:
            self._counters.num_dropped_blocks += was_writing
            self._leave_disk(chunk, stored)
        self.forget_if_doomed(chunk, stored)
