"""Residency of chunks: host memory pages, disk space, and transfers between them.

Requests are unknown here: a variant only has a number of pins. Every move runs in :meth:`ChunkResidency.changing`,
which keeps the sums and the ranks correct.

The disk fills pages at once, while workers may be a step behind: pages of a capture that was called off are given out
again when all workers have ended the step that called it off (:meth:`ChunkResidency.begin_step`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ragcache_core.chunk import VariantTable
from ragcache_core.chunk.types import ChunkKey, ChunkVariant
from ragcache_core.chunkstore.slotfile import SlotMap
from ragcache_core.tree.node import MAX_OTHER_IDS
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.chunks.manager.entries import ChunkCounters, StoredChunk, StoredVariants, Variant
from ragcache_core.vllm_plugin.chunks.manager.eviction import ChunkEviction
from ragcache_core.vllm_plugin.chunks.page_layout import num_pages_of

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.chunks.storage.disk import ChunkDisk, DiskTransfer

_NOTED_AT_ONCE = 64
_MAX_WRITING_SHARE = 4
"""One in this many pages may wait for the disk; a disk that falls behind gets no more until then."""


class ChunkResidency:
    """The chunks by key, the tiers of their versions, and transfers between memory and disk.

    Args:
        ranks: which version is evicted first.
        counters: of chunks.
        num_pages: of host memory.
        tokens_per_page: of a chunk.
        max_variants: of one chunk.

    Attributes:
        chunks: those with a variant stored or in flight.
        variants: those that are stored, with their f_r.
        disk: copies between memory and disk; None where there is none, or not yet.
        is_scrub_due: the bytes of deleted chunks must be erased from disk.
        is_disk_down: the disk is out of service.
    """

    def __init__(
        self, ranks: ChunkEviction, counters: ChunkCounters, num_pages: int, tokens_per_page: int, max_variants: int
    ) -> None:
        self.num_pages = num_pages
        self.tokens_per_page = tokens_per_page
        self.disk: ChunkDisk | None = None
        self.chunks: dict[ChunkKey, StoredVariants] = {}
        self.variants = VariantTable(max_variants)
        self.num_used_disk_pages = 0
        self._ranks = ranks
        self._counters = counters
        self._free = SlotMap(num_pages)
        self._num_idle_pages = self._num_idle_disk_pages = self._num_writing_pages = 0
        self._called_off: list[int] = []
        self._fenced: dict[int, list[int]] = {}
        self._num_fences = 0
        self._transfers: dict[DiskTransfer, tuple[StoredVariants, Variant] | None] = {}
        self._uses: dict[int, ChunkVariant] = {}
        self._renamed: dict[int, tuple[StoredVariants, Variant]] = {}
        self.is_scrub_due = self.is_disk_down = self._is_disk_left = False

    @property
    def num_disk_pages(self) -> int:
        """Number of pages that fit on the disk."""
        return 0 if self.disk is None else self.disk.num_pages

    @property
    def is_disk_enabled(self) -> bool:
        """Whether chunks are written to disk."""
        return self.disk is not None and not self._is_disk_left

    @property
    def num_used_pages(self) -> int:
        """Pages of host memory with a chunk, or reserved for one."""
        return self.num_pages - self._free.num_free

    def place(self, variant: ChunkVariant) -> tuple[StoredVariants, Variant] | None:
        """Return a chunk and its version; ``None`` if it is no longer stored."""
        chunk = self.chunks.get(variant.key)
        stored = None if chunk is None else chunk.stored.get(variant.number)
        return None if chunk is None or stored is None else (chunk, stored)

    def found(self) -> list[tuple[StoredVariants, Variant]]:
        """Return all chunks and versions except deleted ones."""
        return [(chunk, v) for chunk in self.chunks.values() for v in chunk.stored.values() if not v.is_doomed]

    @contextmanager
    def changing(self, chunk: StoredVariants, stored: Variant) -> Iterator[None]:
        """Keep sums and ranks correct while a version moves, is acquired or released."""
        self._num_idle_pages -= stored.num_idle_pages(Tier.HOST)
        self._num_idle_disk_pages -= stored.num_idle_pages(Tier.DISK)
        try:
            yield
        finally:
            self._num_idle_pages += stored.num_idle_pages(Tier.HOST)
            self._num_idle_disk_pages += stored.num_idle_pages(Tier.DISK)
            if not stored.is_doomed:
                self._ranks.place(stored)

    # Host memory

    def has_room(self, num_pages: int) -> bool:
        """Return whether :meth:`take_pages` has enough pages."""
        return num_pages <= self._free.num_free + self._num_idle_pages

    def take_pages(self, num_pages: int) -> tuple[int, ...]:
        """Return pages, evicting the lowest-ranked versions if too few are free."""
        while self._free.num_free < num_pages:
            self._leave_host(*self._next_to_leave(Tier.HOST))
        return tuple(self._free.reserve(num_pages))

    def give_pages_back(self, pages: tuple[int, ...]) -> None:
        """Undo :meth:`take_pages`, after all workers stopped writing to the pages."""
        if self.disk is None:  # workers themselves fill them, in the order of their steps
            self._free.release(pages)
        else:
            self._called_off += pages

    def begin_step(self) -> int:
        """Return the ticket for :meth:`end_step`, after all workers have ended the step that begins; or 0."""
        if not self._called_off:
            return 0
        self._num_fences += 1
        self._fenced[self._num_fences], self._called_off = self._called_off, []
        return self._num_fences

    def end_step(self, fence: int) -> None:
        """Record that all workers have ended a step, and all earlier ones."""
        for ended in [each for each in self._fenced if each <= fence]:
            self._free.release(self._fenced.pop(ended))

    def forget(self, chunk: StoredVariants, stored: Variant) -> None:
        """Drop a version that is not in use, from all tiers."""
        with self.changing(chunk, stored):
            self._free.release(stored.pages)
            stored.pages = ()
            if stored.is_on_disk:
                self.num_used_disk_pages -= stored.num_pages
                self._drop(stored)
            stored.is_on_disk = False
            del chunk.stored[stored.variant.number]
            self.variants.remove(stored.variant)
        self.is_scrub_due |= stored.is_doomed
        self.forget_if_empty(chunk)

    def doom(self, gone: Sequence[tuple[StoredVariants, Variant]]) -> None:
        """Delete versions as soon as they are not in use; hide them now."""
        for chunk, stored in gone:
            stored.is_doomed = True
            self._ranks.drop(stored)
            self.variants.remove(stored.variant)
            self.forget_if_doomed(chunk, stored)

    def forget_if_doomed(self, chunk: StoredVariants, stored: Variant) -> None:
        """Drop a deleted version that has been released."""
        if stored.is_doomed and stored.is_idle and stored.variant.number in chunk.stored:
            self.forget(chunk, stored)

    def forget_if_empty(self, chunk: StoredVariants) -> None:
        """Drop a chunk without a stored or in-flight version."""
        if not chunk.num_variants and self.chunks.get(chunk.key) is chunk:
            del self.chunks[chunk.key]

    # Disk

    def read(self, chunk: StoredVariants, stored: Variant) -> None:
        """Read a version from disk into pages; enough are free or evictable."""
        pages = self.take_pages(stored.num_pages)
        with self.changing(chunk, stored):
            stored.pages, stored.is_loading = pages, True
        assert self.disk is not None
        self._transfers[self.disk.read(stored.variant, pages)] = chunk, stored

    def write(self, chunk: StoredVariants, stored: Variant) -> None:
        """Write a version to disk, evicting others; one that does not fit stays in memory."""
        if self.disk is None or not self.is_disk_enabled:
            return
        num_missing = stored.num_pages - (self.num_disk_pages - self.num_used_disk_pages)
        is_behind = self._num_writing_pages + stored.num_pages > self.num_pages // _MAX_WRITING_SHARE
        if num_missing > self._num_idle_disk_pages or (is_behind and self._num_writing_pages):
            self._counters.num_dropped_chunks += 1
            return
        while stored.num_pages > self.num_disk_pages - self.num_used_disk_pages:
            self._leave_disk(*self._next_to_leave(Tier.DISK))
        self.num_used_disk_pages += stored.num_pages
        self._num_writing_pages += stored.num_pages
        with self.changing(chunk, stored):
            stored.is_writing = True
        documents, frequency = stored.documents | chunk.names, self._ranks.frequency(stored.variant)
        noted = StoredChunk(stored.variant, chunk.token_ids, frequency, self._worth(stored), documents, stored.stored_s)
        self._transfers[self.disk.write(noted, stored.pages)] = chunk, stored

    def record_use(self, stored: Variant) -> None:
        """Update a version's access statistics on disk, later."""
        if stored.is_on_disk:
            self._uses[stored.variant.number] = stored.variant

    def name(self, chunk: StoredVariants, document: str) -> None:
        """Add a document to a chunk, in memory and later on disk."""
        if document not in chunk.names and len(chunk.names) <= MAX_OTHER_IDS:
            chunk.names.add(document)
            on_disk = [stored for stored in chunk.stored.values() if stored.is_on_disk or stored.is_writing]
            self._renamed.update({stored.variant.number: (chunk, stored) for stored in on_disk})

    @property
    def num_scrubs(self) -> int:
        """Number of open scrubs of the disk."""
        return 0 if self.disk is None else sum(at is None for at in self._transfers.values()) + self.is_scrub_due

    def poll(self) -> None:
        """Process the disk's results, and start pending work; drop lost versions."""
        if (disk := self.disk) is None:
            return
        is_down = disk.is_down
        for transfer, moved in list(self._transfers.items()):
            if is_down:
                transfer.abandon()
            if transfer.has_ended:
                del self._transfers[transfer]
                if moved is not None:
                    self._finish(*moved, transfer)
        if is_down and not self.is_disk_down:
            self.is_disk_down = True
            self.leave_disk()
        if len(self._uses) >= _NOTED_AT_ONCE:
            kept = [variant for variant in self._uses.values() if variant in self.variants]
            disk.note([(each, self._ranks.frequency(each), self.variants.reuse(each)) for each in kept])
            self._uses.clear()
        if self._renamed:
            places = [at for at in self._renamed.values() if self.place(at[1].variant) is not None]
            disk.rename([(stored.variant, stored.documents | chunk.names) for chunk, stored in places])
            self._renamed.clear()
        if self.is_scrub_due:
            self.is_scrub_due = False
            self._transfers[disk.scrub()] = None

    def restore(self, found: Sequence[StoredChunk], now_s: float) -> int:
        """Load the versions on disk, the most used first; return the number of versions.

        What contradicts another variant, or is more than fits now, is deleted.
        """
        assert self.disk is not None
        num_restored = 0
        for entry in sorted(found, key=lambda each: (-each.frequency, -each.worth, each.variant.name)):
            variant = entry.variant
            num_pages = num_pages_of(variant.num_tokens, self.tokens_per_page)
            chunk = self.chunks.get(variant.key) or StoredVariants(variant.key, entry.token_ids, variant.num_tokens)
            has_room = self.num_used_disk_pages + num_pages <= self.num_disk_pages
            self.variants.retire(variant.number)
            is_new = self.variants.captured_in(variant.key, variant.statistics.context) is None
            is_sound = is_new and entry.token_ids == chunk.token_ids
            if not (is_sound and has_room) or self.variants.is_full(variant.key):
                self.disk.drop(variant)
                continue
            num_restored += 1
            self.variants.restore(variant, reuse=entry.worth)
            self.chunks[variant.key] = chunk
            stored_s = min(entry.stored_s, now_s)  # a clock may have been set back
            stored = Variant(variant, num_pages, documents=entry.documents, stored_s=stored_s)
            self.num_used_disk_pages += num_pages
            with self.changing(chunk, stored):
                stored.is_on_disk = True
                chunk.stored[variant.number] = stored
            self._ranks.restore(variant, entry.frequency)
        return num_restored

    def leave_disk(self) -> None:
        """Stop using the disk until the next start."""
        self._is_disk_left = True
        self._uses.clear()
        for chunk in list(self.chunks.values()):
            for stored in list(chunk.stored.values()):
                if stored.is_on_disk and not stored.is_loading:
                    self._leave_disk(chunk, stored)

    # Inside

    def _next_to_leave(self, tier: Tier) -> tuple[StoredVariants, Variant]:
        """Return the version that a tier evicts."""
        variant = self.variants.captured_in(*self._ranks.lowest(tier))
        assert variant is not None
        self._ranks.record_eviction(variant, tier)
        chunk = self.chunks[variant.key]
        return chunk, chunk.stored[variant.number]

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
        """Drop a version on disk; the one in memory stays."""
        if not stored.pages:
            self.forget(chunk, stored)
            return
        with self.changing(chunk, stored):
            stored.is_on_disk = False
            self.num_used_disk_pages -= stored.num_pages
            self._drop(stored)

    def _drop(self, stored: Variant) -> None:
        assert self.disk is not None
        self.disk.drop(stored.variant)

    def _finish(self, chunk: StoredVariants, stored: Variant, transfer: DiskTransfer) -> None:
        is_lost = stored.is_loading and not transfer.is_done
        with self.changing(chunk, stored):
            if stored.is_writing:
                self._num_writing_pages -= stored.num_pages
                stored.is_on_disk = True  # a part of it, at least
            stored.is_loading, was_writing, stored.is_writing = False, stored.is_writing, False
        if is_lost:
            self._counters.num_lost_chunks += 1
            self._counters.num_corrupt_chunks += transfer.is_finished
            self.forget(chunk, stored)
            return
        if not (transfer.is_done and self.is_disk_enabled):
            self._counters.num_dropped_chunks += was_writing
            self._leave_disk(chunk, stored)
        self.forget_if_doomed(chunk, stored)
