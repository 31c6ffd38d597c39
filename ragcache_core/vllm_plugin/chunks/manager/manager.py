"""The store of chunks: cached versions, pins of requests, and eviction.

It lives on the scheduler's side and decides for all workers, which have the same pages (``chunks/page_layout.py``)::

    reserve -> [captured by the workers] -> commit -> host memory, written through to disk
    find -> pin -> host memory, or read from disk into pages -> release

A version evicted from host memory stays on disk; one that is in no tier is deleted. Where no page is free, the version
that the tiers' own policy ranks lowest is evicted, of whatever chunk. The library imports neither vLLM nor torch, and
reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from ragcache_core.chunk.types import ChunkKey, ChunkStatistics, ChunkVariant, ContextKey
from ragcache_core.vllm_plugin.chunks.manager.entries import (
    ChunkCounters,
    ForgottenChunks,
    Reservation,
    StoredVariants,
    Variant,
)
from ragcache_core.vllm_plugin.chunks.manager.eviction import ChunkEviction
from ragcache_core.vllm_plugin.chunks.manager.residency import ChunkResidency
from ragcache_core.vllm_plugin.chunks.page_layout import num_pages_of, pack_token_ids

if TYPE_CHECKING:
    from ragcache_core.chunk.guard import ErrorGuard
    from ragcache_core.vllm_plugin.chunks.storage.disk import ChunkDisk


class ChunkManager:
    """Tracks the chunks whose KV the workers hold. Used by one thread.

    Args:
        ranks: which version is evicted first.
        num_pages: pages of host memory that each worker has, of ``tokens_per_page`` tokens.
        tokens_per_page: of a chunk.
        max_variants: of one chunk, the M of Cache-Craft §3.3.
    """

    def __init__(self, ranks: ChunkEviction, *, num_pages: int, tokens_per_page: int, max_variants: int) -> None:
        self.counters = ChunkCounters()
        self.now_s = 0.0
        """The current time, set by the owner."""
        self.guard: ErrorGuard | None = None
        """Bounds the errors of reuse; its figures are in :meth:`report`."""
        self._num_reservations = 0
        self._ranks = ranks
        self._stock = ChunkResidency(ranks, self.counters, num_pages, tokens_per_page, max_variants)
        self._pins: dict[str, list[ChunkVariant]] = {}
        self._reservations: dict[str, list[Reservation]] = {}

    # Reuse

    def find(self, chunks: Mapping[ChunkKey, Sequence[int]]) -> Mapping[ChunkKey, tuple[ChunkVariant, ...]]:
        """Return the stored versions of ``chunks`` with equal token ids; unknown chunks are omitted.

        A chunk that was stored with other tokens is left out too, and counted.
        """
        found: dict[ChunkKey, tuple[ChunkVariant, ...]] = {}
        for key, token_ids in chunks.items():
            chunk = self._stock.chunks.get(key)
            if chunk is None or not self._are_its_tokens(chunk, token_ids):
                continue
            if variants := tuple(v.variant for v in chunk.stored.values() if not v.is_doomed):
                found[key] = variants
        return found

    def stored(self) -> dict[ChunkKey, int]:
        """Return the chunks with a version in :meth:`find`, and their numbers of tokens."""
        return {chunk.key: chunk.num_tokens for chunk, _ in self._stock.found()}

    def pin(self, variants: Iterable[ChunkVariant], request_id: str) -> bool:
        """Keep versions for a request, and read those that are only on disk.

        Atomic: False, and nothing has changed, where one of them is lost or no page is free to read one into. Ask
        :meth:`is_on_host` afterwards, and :meth:`is_lost`.
        """
        wanted = list(variants)
        places = [at for variant in wanted if (at := self._stock.place(variant)) is not None and not at[1].is_doomed]
        if len(places) < len(wanted):
            return False
        self._hold(places)
        missing = {id(stored): (chunk, stored) for chunk, stored in places if not stored.pages}
        if not self._stock.has_room(sum(stored.num_pages for _, stored in missing.values())):
            self._let_go(places)
            return False
        self._pins.setdefault(request_id, []).extend(wanted)
        for chunk, stored in missing.values():
            self._stock.read(chunk, stored)
        return True

    def release(self, request_id: str) -> None:
        """Release a request's pinned versions and reservations. Idempotent."""
        for reservation in self._reservations.pop(request_id, ()):
            self._give_back(reservation)
        pinned = self._pins.pop(request_id, ())
        self._let_go([at for variant in pinned if (at := self._stock.place(variant)) is not None])

    def pages(self, variant: ChunkVariant) -> tuple[int, ...]:
        """Return the pages of a version in host memory, in token order."""
        at = self._stock.place(variant)
        assert at is not None, variant
        assert at[1].pages, variant
        return at[1].pages

    def is_on_host(self, variant: ChunkVariant) -> bool:
        """Return whether a version is in host memory."""
        at = self._stock.place(variant)
        return at is not None and bool(at[1].pages) and not at[1].is_loading and not at[1].is_doomed

    def is_lost(self, variant: ChunkVariant) -> bool:
        """Return whether a version is no longer stored: damaged, missing, evicted, or reset."""
        at = self._stock.place(variant)
        return at is None or at[1].is_doomed

    def record_use(self, variant: ChunkVariant, overhead: float) -> None:
        """Count that a request reuses a variant with a CFO of ``overhead``: f_r += 1 / CFO (Cache-Craft §3.3)."""
        self._ranks.record_hit(variant)
        self._stock.variants.record_use(variant, overhead)
        if (at := self._stock.place(variant)) is not None:
            self._stock.record_use(at[1])

    def seed(self, key: ChunkKey, context: ContextKey, num_tokens: int, expected_uses: int) -> None:
        """Rank a version as if it had been used ``expected_uses`` times, if it has fewer."""
        self._ranks.seed((key, context), num_tokens, expected_uses)

    # Capture

    def reserve(
        self,
        key: ChunkKey,
        token_ids: Sequence[int],
        context: ContextKey,
        request_id: str,
        *,
        inherits: float,
        documents: Sequence[str] = (),
    ) -> Reservation | None:
        """Return pages for a chunk computed in ``context``, evicting others if needed.

        ``inherits`` is the most lost context that it may inherit from chunks before it; it replaces a variant that
        inherited more. None: that variant is stored or in flight, the chunk is longer than the memory or was stored
        with other tokens, or all pages are held. The chunk counts as retrieved in any case. ``documents`` are the
        digests of those before it and, last, its own.
        """
        num_tokens = len(token_ids)
        self._ranks.record_miss((key, context), num_tokens)
        chunk = self._stock.chunks.get(key)
        if chunk is None:
            chunk = StoredVariants(key, pack_token_ids(token_ids), num_tokens)
        elif not self._are_its_tokens(chunk, token_ids) or self._is_known(chunk, context, inherits):
            return None
        num_pages = num_pages_of(num_tokens, self._stock.tokens_per_page)
        if num_pages > self._stock.num_pages:
            self.counters.num_too_long_chunks += 1
            return None
        if not self._stock.has_room(num_pages):
            self.counters.num_capacity_misses += 1
            return None
        self._stock.chunks[key] = chunk
        number, self._num_reservations = self._num_reservations, self._num_reservations + 1
        chunk.reserved[number] = context
        pages = self._stock.take_pages(num_pages)
        reservation = Reservation(number, key, num_tokens, context, pages, request_id, frozenset(documents))
        for document in documents[-1:]:
            self._stock.name(chunk, document)
        self._reservations.setdefault(request_id, []).append(reservation)
        return reservation

    def commit(self, reservation: Reservation, statistics: ChunkStatistics) -> ChunkVariant | None:
        """Add a version whose KV the workers have captured, write it to disk, and return it.

        It replaces a variant of the same context, or, of too many of the chunk, the one with the lowest f_r. None: that
        one is in use, or meanwhile the request was released, or the library was cleared.

        Raises:
            ValueError: the statistics are those of another context.
        """
        if statistics.context != reservation.context:
            raise ValueError(
                f"a chunk was captured in context {statistics.context.hex()[:12]}, pages were reserved for it in "
                f"{reservation.context.hex()[:12]}: reserve them for the context that is captured"
            )
        if not self._withdraw(reservation):
            return None
        chunk = self._stock.chunks[reservation.key]
        if not self._make_way(chunk, reservation.context):
            self.counters.num_capacity_misses += 1
            self._give_back(reservation)
            return None
        del chunk.reserved[reservation.number]
        variant = self._stock.variants.add(reservation.key, reservation.num_tokens, statistics)
        stored = Variant(variant, len(reservation.pages), documents=reservation.documents, stored_s=self.now_s)
        with self._stock.changing(chunk, stored):
            stored.pages = reservation.pages
            chunk.stored[variant.number] = stored
        self.counters.num_captured_chunks += 1
        self._stock.write(chunk, stored)
        return variant

    def abandon(self, reservation: Reservation) -> None:
        """Release reserved pages of a chunk that was not captured. Idempotent."""
        if self._withdraw(reservation):
            self._give_back(reservation)

    # Documents

    def name(self, key: ChunkKey, document: str) -> None:
        """Add a document's digest to a chunk, if it is stored."""
        if (chunk := self._stock.chunks.get(key)) is not None:
            self._stock.name(chunk, document)

    def forget(self, documents: Set[str], *, is_all: bool = False) -> ForgottenChunks:
        """Delete all versions of documents, given by digest, and of chunks computed after them; or all.

        What a request or a transfer holds goes when it is released; until then it is not found.
        """
        keys = {key for key, chunk in self._stock.chunks.items() if not chunk.names.isdisjoint(documents)}
        gone = [
            (chunk, stored)
            for chunk, stored in self._stock.found()
            if is_all
            or chunk.key in keys
            or not stored.documents.isdisjoint(documents)
            or not keys.isdisjoint(stored.variant.statistics.prefix)
        ]
        found = {name for chunk, stored in gone for name in (*chunk.names, *stored.documents)} & documents
        forgotten = ForgottenChunks(
            keys,
            found | {name for key in keys for name in self._stock.chunks[key].names & documents},
            len(gone),
            sum(len(stored.pages) for _, stored in gone),
            sum(stored.num_pages for _, stored in gone if stored.is_on_disk),
        )
        self._stock.doom(gone)
        self._stock.is_scrub_due = True
        return forgotten

    def holdings(self) -> dict[str, tuple[int, int, int]]:
        """Return the versions of each document by digest, with their pages in memory and on disk."""
        held: dict[str, tuple[int, int, int]] = {}
        for chunk, stored in self._stock.found():
            for name in chunk.names:
                num, num_pages, num_disk_pages = held.get(name, (0, 0, 0))
                num_disk_pages += stored.num_pages * stored.is_on_disk
                held[name] = num + 1, num_pages + len(stored.pages), num_disk_pages
        return held

    def expire(self, oldest_s: float) -> bool:
        """Delete the versions computed before a time, as :meth:`forget` does; return whether there were any."""
        old = [(chunk, stored) for chunk, stored in self._stock.found() if stored.stored_s < oldest_s]
        self._stock.doom(old)
        self._stock.is_scrub_due |= bool(old)
        return bool(old)

    def num_forgotten(self) -> int:
        """Return how much of the deleted KV is still in memory or on disk."""
        self._stock.poll()
        variants = (stored for chunk in self._stock.chunks.values() for stored in chunk.stored.values())
        return sum(stored.is_doomed for stored in variants) + self._stock.num_scrubs

    @property
    def is_disk_down(self) -> bool:
        """Whether the disk is out of service."""
        return self._stock.is_disk_down

    # The disk, and the workers' memory

    def open_disk(self, disk: ChunkDisk | None) -> int:
        """Store chunks on a disk from now on, and load those that it has; return the number of versions.

        None: an engine before had one, which is out of service now.
        """
        self._stock.disk = disk
        if disk is None:
            self._stock.is_disk_down = True
            return 0
        return self._stock.restore(disk.stored(), self.now_s)

    def poll(self) -> None:
        """Process the results of the disk. Unreadable versions are dropped: counted misses."""
        self._stock.poll()

    def begin_step(self) -> int:
        """Return the ticket for :meth:`end_step`, after all workers have ended the step that begins; or 0."""
        self._stock.poll()
        return self._stock.begin_step()

    def end_step(self, fence: int) -> None:
        """Reuse the pages to which workers wrote before that step."""
        self._stock.end_step(fence)

    def close(self) -> None:
        """End the disk's threads after their queued writes. Idempotent."""
        if self._stock.disk is not None:
            self._stock.disk.close()

    def clear(self) -> None:
        """Drop every chunk, and write nothing more to disk, as the model's weights may have changed.

        What a request or a transfer holds is dropped when it is released; until then it is not found.
        """
        for request_id in list(self._reservations):
            for reservation in self._reservations.pop(request_id):
                self._give_back(reservation)
        self._stock.doom(self._stock.found())
        self._stock.leave_disk()

    # Reporting

    @property
    def num_used_pages(self) -> int:
        """Pages of host memory with a chunk, or reserved for one."""
        return self._stock.num_used_pages

    @property
    def num_used_disk_pages(self) -> int:
        """Pages on disk, including those in flight."""
        return self._stock.num_used_disk_pages

    @property
    def num_variants(self) -> int:
        """Versions that are stored or being captured."""
        return sum(chunk.num_variants for chunk in self._stock.chunks.values())

    def report(self) -> dict[str, object]:
        """Return the engine's report of its chunks; see :class:`~ragcache_core.stats.ChunkStats`."""
        self._stock.poll()
        size = self._stock.tokens_per_page
        return {
            "num_chunks": len(self._stock.chunks),
            "num_variants": self.num_variants,
            "capacity_tokens": self._stock.num_pages * size,
            "used_tokens": self.num_used_pages * size,
            "disk_capacity_tokens": self._stock.num_disk_pages * size,
            "used_disk_tokens": self.num_used_disk_pages * size,
            "is_disk_enabled": self._stock.is_disk_enabled,
            **self.counters.to_dict(),
            **({} if self.guard is None else {"kinds": self.guard.report()}),
        }

    # Inside

    def _are_its_tokens(self, chunk: StoredVariants, token_ids: Sequence[int]) -> bool:
        is_same = len(token_ids) == chunk.num_tokens and pack_token_ids(token_ids) == chunk.token_ids
        self.counters.num_mismatched_chunks += not is_same
        return is_same

    def _is_known(self, chunk: StoredVariants, context: ContextKey, inherits: float) -> bool:
        """Return whether a version of ``context`` is in flight, or stored and as good as a new one."""
        known = self._stock.variants.captured_in(chunk.key, context)
        is_as_good = known is not None and known.statistics.inherited <= inherits
        return context in chunk.reserved.values() or is_as_good

    def _make_way(self, chunk: StoredVariants, context: ContextKey) -> bool:
        """Return whether a version of ``context`` may be stored, evicting another if needed."""
        variants = self._stock.variants
        victim = variants.captured_in(chunk.key, context)
        if victim is None:
            if not variants.is_full(chunk.key):
                return True
            victim = variants.victim(chunk.key, lambda variant: chunk.stored[variant.number].is_idle)
        if victim is None or not chunk.stored[victim.number].is_idle:
            return False
        self._stock.forget(chunk, chunk.stored[victim.number])
        return True

    def _hold(self, places: Iterable[tuple[StoredVariants, Variant]]) -> None:
        for chunk, stored in places:
            with self._stock.changing(chunk, stored):
                stored.num_pins += 1

    def _let_go(self, places: Iterable[tuple[StoredVariants, Variant]]) -> None:
        for chunk, stored in places:
            with self._stock.changing(chunk, stored):
                stored.num_pins -= 1
            self._stock.forget_if_doomed(chunk, stored)

    def _withdraw(self, reservation: Reservation) -> bool:
        """Remove a reservation from its request; ``False`` if it is no longer open."""
        held = self._reservations.get(reservation.request_id, [])
        if reservation not in held:
            return False
        held.remove(reservation)
        if not held:
            del self._reservations[reservation.request_id]
        return True

    def _give_back(self, reservation: Reservation) -> None:
        self._stock.give_pages_back(reservation.pages)
        chunk = self._stock.chunks[reservation.key]
        del chunk.reserved[reservation.number]
        self._stock.forget_if_empty(chunk)
