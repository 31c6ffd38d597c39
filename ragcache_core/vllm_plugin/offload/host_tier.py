"""The host tier: blocks of KV in rows of host memory, which the knowledge tree evicts.

vLLM's offloading asks it, through the manager of tiers, where to store KV and where to load it from; the tiers below
read and write the same rows. A block of KV is an offload block here, by its key: its unit's hash and its
group of KV caches. The tree knows those of full attention; those of other groups go with them, or before
(:class:`OtherBlocks`).

A block that a transfer uses is held, and so is one that a waiting request was promised (:class:`Promises`). The tree
keeps the rows of its units, and learns what arrives and what is no longer used: by node, not by block.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, compress, filterfalse, islice, repeat
from typing import TYPE_CHECKING, Final, TypeVar, cast

import numpy as np

from ragcache_core.tree import NO_OWNER, EvictedRun, Location, admit, admit_within_quotas, total_size
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.forgetting import Forgotten, Freed
from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey, OtherBlocks
from ragcache_core.vllm_plugin.compat import (
    CacheHitSource,
    CPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingConnectorStats,
    OffloadingEvent,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from ragcache_core.vllm_plugin.offload.host_rows import HostRows
from ragcache_core.vllm_plugin.offload.host_stats import HostStats
from ragcache_core.vllm_plugin.offload.promises import Promises

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.cache.controller import CacheController
    from ragcache_core.vllm_plugin.cache.request_state import Key
    from ragcache_core.vllm_plugin.compat import SharedOffloadRegion
    from ragcache_core.vllm_plugin.offload.host_index import HostIndex

ADAPTED: Final = "ragcache_adapted"
"""Marks, in its ``kv_transfer_params``, a request whose KV an adapter (LoRA) computes."""
_WRITING: Final = -1
Item = TypeVar("Item")


def is_adapted(req_context: ReqContext) -> bool:
    """Return whether a request uses an adapter, so that its KV must not outlive the engine.

    A key names the adapter but not its weights, and another start may have others under the same name.
    """
    return bool((req_context.kv_transfer_params or {}).get(ADAPTED))


def _chosen(items: Iterable[Item], is_chosen: np.ndarray) -> list[Item]:
    """Return the items that are chosen, in their order."""
    return [*items] if is_chosen.all() else [*compress(items, is_chosen)]


class HostTier:
    """Blocks of KV in host memory, by key.

    A deleted block that is being copied is hidden, and dropped when it is released. Its row is overwritten, as host
    memory outlives the engine.

    Args:
        num_rows: rows of host memory.
        controller: has the tree.
        region: host memory; ``None`` without copies, as in tests.
        is_selective: whether to store only blocks that rank above those evicted for them.
        has_events: whether to collect KV events.
    """

    def __init__(
        self,
        num_rows: int,
        controller: CacheController,
        region: SharedOffloadRegion | None = None,
        *,
        is_selective: bool = False,
        has_events: bool = False,
    ) -> None:
        self.medium = Medium.CPU
        self.controller = controller
        self.groups = controller.groups
        self.events: list[OffloadingEvent] | None = [] if has_events else None
        self.rows = HostRows(num_rows)
        self.promises: Promises[BlockKey] = Promises()
        self._to_hold: list[BlockKey] = []  # promised by the look-up under way
        self.journal: HostIndex | None = None
        self.num_other_blocks = 0
        self.num_rows = num_rows
        self._is_selective = is_selective
        self._tree = controller.tree
        self._tier = controller.tree.tiers[Tier.HOST]
        self._loose: dict[BlockKey, int] = {}
        """Rows of blocks that are no unit of the tree: of other groups, and unknown ones."""
        self._num_reads = array("i", bytes(4 * num_rows))
        """Transfers that read each row; -1 until it is written."""
        self._reads_of = np.frombuffer(self._num_reads, np.int32)  # the same, of many rows at once
        self._is_fleeting = np.zeros(num_rows, bool)
        """Rows whose block must not outlive the engine."""
        self._num_read = self._num_written = 0  # blocks that transfers read, or write
        self._are_kept_forgotten = False
        """Rows that copies from before a reset use may hold what was forgotten."""
        self._unknown: dict[BlockKey, None] = {}  # here, but not in the tree
        self._others: OtherBlocks[BlockKey] = OtherBlocks(self.groups, controller.tree, Tier.HOST)
        self._stats = HostStats(num_rows)
        self._region = region
        self._view: memoryview | None = None if region is None else region.create_kv_memoryview()
        controller.forgetting.add_holder(self)

    # What the manager of tiers asks

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return that blocks are stored as soon as they are computed."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Drop a request's promises."""
        self.drop_promises(req_context.req_id)

    def lookup(self, key: BlockKey, req_context: ReqContext) -> LookupResult:
        """Return whether a block is here, and promise it to the looked-up request."""
        num_found, is_written = self.leading([key])
        if not num_found:
            return LookupResult.MISS
        return LookupResult.HIT if is_written else LookupResult.HIT_PENDING

    def leading(self, keys: Sequence[BlockKey]) -> tuple[int, bool]:
        """Return how many of the leading blocks are here, and whether all are written.

        They are promised to the looked-up request.
        """
        rows, leaving = self._rows(keys), self.controller.leaving
        num_found = rows.index(None) if None in rows else len(rows)
        if leaving:
            num_found = next((i for i, key in enumerate(keys[:num_found]) if key in leaving), num_found)
        found = keys[:num_found]
        is_writing = self._reads_of[cast("list[int]", rows[:num_found])] == _WRITING
        are_written = not is_writing.any()
        if self.promises.is_looking_up:
            self._to_hold += self.promises.add(found, () if are_written else _chosen(found, is_writing))
        return num_found, are_written

    def get_load_source(self, key: BlockKey, req_context: ReqContext) -> CacheHitSource:
        """Return the tier's name for statistics."""
        return CacheHitSource.HOST

    def touch(self, keys: Collection[BlockKey], req_context: ReqContext) -> None:
        """Do nothing, as the tree counts accesses per request."""

    def prepare_load(self, keys: Collection[BlockKey], req_context: ReqContext) -> CPULoadStoreSpec:
        """Hold blocks for reading, and return their rows."""
        rows = self.rows_of(keys)
        num_reads = self._reads_of[rows]
        assert num_reads.min(initial=0) >= 0, "a block is read before it is written"
        idle = _chosen(keys, num_reads == 0)
        self._hold(idle)
        self._num_read += len(idle)
        self._reads_of[rows] += 1
        return CPULoadStoreSpec(rows)

    def complete_load(self, keys: Collection[BlockKey], req_context: ReqContext) -> None:
        """Release blocks after reading."""
        rows = self.rows_of(keys)
        num_reads = self._reads_of[rows]
        assert num_reads.min(initial=1) > 0, "a block is released that is not read"
        self._reads_of[rows] -= 1
        is_last = num_reads == 1
        released = _chosen(keys, is_last)
        self._num_read -= len(released)
        self._release(released, _chosen(rows, is_last))

    def prepare_store(self, keys: Collection[BlockKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Return rows for a request's new blocks; ``None`` if too few can be evicted.

        What ranks below all that would have to go is not stored.
        """
        self._hold_promised()
        offered, new, chosen = self._admit(keys)
        kept = self._within_quotas(offered)
        return self._store(kept, new if kept is offered else self._not_here(kept), req_context, chosen)

    def complete_store(
        self, keys: Collection[BlockKey], req_context: ReqContext, success: bool = True, num_readers: int = 0
    ) -> None:
        """Make written blocks available; drop them after a failure.

        Args:
            keys: the blocks.
            req_context: their request.
            success: whether they are written.
            num_readers: lower tiers that read them from now on, each until :meth:`complete_read`.
        """
        keys, rows = self._here(keys)  # a reset may have dropped some
        is_written = self._reads_of[rows] == _WRITING
        ended, rows = _chosen(keys, is_written), _chosen(rows, is_written)
        self._reads_of[rows] = num_readers
        self._num_written -= len(ended)
        if not success:
            for key in ended:
                self._drop(key)
            return
        self.promises.settle(ended)
        if num_readers:  # they stay held; the journal is not kept beside lower tiers
            self._num_read += len(ended)
        else:
            self._release(ended, rows)
        self._emit(ended, removed=False)

    complete_read, complete_write = complete_load, complete_store

    def prepare_write(self, keys: Sequence[BlockKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Return rows for blocks from a lower tier, within space and quota; ``None`` for none.

        What finds no room is left out from the end.
        """
        self._hold_promised()
        keys = list(self._within_quotas(keys))
        output = None
        while keys and (output := self._store(keys, self._not_here(keys), req_context, [])) is None:
            del keys[len(keys) // 2 :]
        return output

    def get_kv_memoryview(self) -> memoryview:
        """Return host memory, ``[num_rows, row_bytes]``."""
        assert self._view is not None
        return self._view

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Yield the KV events since the last call."""
        if self.events is not None:
            yield from self.events
            self.events.clear()

    def get_stats(self) -> OffloadingConnectorStats:
        """Return vLLM's statistics of a primary tier."""
        return self._stats.take(self._num_read, self._num_written)

    def reset_cache(self) -> None:
        """Drop everything; blocks stored later do not outlive the engine, as its weights may have changed."""
        self._are_kept_forgotten |= bool(self.controller.leaving)
        contents = self.contents()
        self._emit([key for key, row in contents.items() if self._num_reads[row] != _WRITING], removed=True)
        self._loose.clear()
        self.num_other_blocks = 0
        self._num_read = self._num_written = 0
        self._unknown.clear()
        self._others.clear()
        self.promises.clear()
        self._to_hold.clear()
        if self.journal is not None:
            self.journal.remove([*contents.values()])
            self.journal.close()
            self.journal = None
        self._tree.clear_tier(Tier.HOST)
        self.rows.reset()

    def shutdown(self) -> None:
        """Unmap host memory."""
        if self._region is not None:
            assert self._view is not None
            self._view.release()
            self._region.cleanup()

    # For the connector

    def rows_of(self, keys: Collection[BlockKey]) -> list[int]:
        """Return the rows of stored blocks."""
        _, rows = self._here(keys)
        assert len(rows) == len(keys), "a block is not here"
        return rows

    def contents(self) -> dict[BlockKey, int]:
        """Return the row of each block that is here; O(blocks)."""
        rows = dict(self._loose)
        for node in self._tree.nodes():
            units = cast("list[Key]", node.keys) if self._tier.slots[node.id] is not None else []
            keys = self.groups.keys_of(units, self.groups.main)
            slots = self._tier.slots[node.id] or ()
            rows |= {key: row for key, row in zip(keys, slots, strict=False) if row is not None}
        return rows

    def row_of(self, key: BlockKey) -> int | None:
        """Return the row of a stored block."""
        if key in self._loose:
            return self._loose[key]
        place = None if self._others.has_groups and not self.groups.is_main(key) else self._locate(key)
        slots = None if place is None else self._tier.slots[place.node.id]
        return slots[place.unit] if place is not None and slots is not None and place.unit < len(slots) else None

    def begin_lookup(self, request_id: str, num_local_tokens: int) -> None:
        """Promise the following look-ups to a request, instead of its earlier promises.

        ``num_local_tokens`` are those before it, which the GPU holds.
        """
        self.drop_promises(request_id)
        self.promises.begin(request_id, num_local_tokens)

    def end_lookup(self) -> None:
        """End the look-up: later hits are not promised."""
        self._hold_promised()
        self.promises.end()

    def drop_promises(self, request_id: str) -> None:
        """Drop a request's promises, as it was loaded or ended."""
        if dropped := self.promises.drop(request_id):
            self._unhold(dropped)

    def adopt(self, rows: Mapping[BlockKey, int]) -> None:
        """Add blocks of an earlier engine in their rows; the tier is empty, and the tree has them."""
        assert not self._loose
        self.rows.take(rows.values())
        self._insert([*rows], [*rows.values()], 0, is_fleeting=False)
        self._release([*rows], [*rows.values()])

    def note_names(self) -> None:
        """Store the documents of blocks that were named after being stored in the journal."""
        tree, journal = self._tree, self.journal
        if journal is None or not tree.rekeyed:
            return
        nodes = [node for node in tree.nodes() if node.id in tree.rekeyed]
        tree.rekeyed.clear()
        keys = [key for node in nodes for unit in node.keys for key in self._keys_of(cast("Key", unit))]
        rows = self.rows_of(keys)
        is_ready = self._reads_of[rows] != _WRITING
        ready, rows = _chosen(keys, is_ready), _chosen(rows, is_ready)
        journal.remove(rows)
        self._record(ready, rows, self.groups.units_of(ready))

    # A holder of what may be forgotten

    def forget(self, forgotten: Forgotten) -> Freed:
        """Drop blocks, or hide those that are being copied from look-ups."""
        keys = [key for unit in forgotten.units for key in self._keys_of(unit)]
        if forgotten.is_all:
            keys = list(self.contents())
        self.controller.leaving.update(dict.fromkeys(keys))
        self._drop_leaving()
        self._overwrite_unused()
        self._are_kept_forgotten |= self.rows.num_kept > 0
        num_bytes = len(keys) * self.controller.tiers[Tier.HOST].block_bytes
        return Freed({Tier.HOST: len(keys)}, {Tier.HOST: num_bytes})

    def num_pending(self) -> int:
        """Drop deleted blocks whose copies have ended, and return how many are still here."""
        leaving = self.controller.leaving
        has_dropped = bool(leaving) and self._drop_leaving() > 0
        num_kept = self.rows.num_kept if self._are_kept_forgotten else 0
        if has_dropped or (self._are_kept_forgotten and not num_kept):
            self._overwrite_unused()
            self._are_kept_forgotten = num_kept > 0
        return len(leaving) + num_kept + (0 if self.journal is None else self.journal.num_scrubs)

    def deletion_problem(self) -> None:
        """Return ``None``, as copies end."""

    # Inside

    def _admit(self, keys: Collection[BlockKey]) -> tuple[Collection[BlockKey], Sequence[BlockKey], list[EvictedRun]]:
        """Return which of the ``keys`` are here or worth their rows, which are new, and what was evicted for them.

        Of other groups that is what a hit may need.
        """
        has_groups = self._others.has_groups
        if has_groups:
            keys = [key for key in keys if key in self._loose or self._is_needed(key)]
        num_free, new = self.rows.num_free, self._not_here(keys)
        if has_groups or not self._is_selective or len(keys) <= num_free:
            return keys, new, []
        units = self.groups.units_of(keys)
        shield = self._tree.shielded(units)
        num_spare = len(self._spare(set(keys), len(self._unknown))) if self._unknown else 0
        new_units = units if len(new) == len(keys) else self.groups.units_of(new)
        admission = admit(self._tree, Tier.HOST, new_units, num_free + num_spare, shield)
        if admission.num_admitted < len(new):
            left_out = new[admission.num_admitted :]
            keys, new = [*filterfalse(frozenset(left_out).__contains__, keys)], new[: admission.num_admitted]
        return keys, new, admission.evicted

    def _within_quotas(self, keys: Collection[BlockKey]) -> Collection[BlockKey]:
        """Return which of a request's ``keys`` may be stored, evicting others of the same owners."""
        if not self._tree.tiers[Tier.HOST].shares.quotas:
            return keys
        new = [key for key in keys if self.groups.is_main(key) and self.row_of(key) is None]
        unit_of, units_of = self.groups.unit_of, self.groups.units_of
        shield = self._tree.shielded(units_of(keys))
        num_admitted, evicted = admit_within_quotas(self._tree, Tier.HOST, units_of(new), shield)
        self._free_evicted(evicted, [])
        left_out = {unit_of(key) for key in new[num_admitted:]}
        return [key for key in keys if unit_of(key) not in left_out]

    def _store(
        self,
        keys: Collection[BlockKey],
        new: Sequence[BlockKey],
        req_context: ReqContext,
        chosen: list[EvictedRun],
    ) -> PrepareStoreOutput | None:
        """Return rows for the ``new`` ones of ``keys``; ``chosen`` units have left the tree for them already."""
        if not self._evict(len(new) - self.rows.num_free, keys, chosen):
            return None
        rows = self.rows.allocate(len(new))
        self._stats.on_allocated(len(new))
        self._num_written += len(new)
        self._insert(new, rows, _WRITING, is_fleeting=is_adapted(req_context))
        return PrepareStoreOutput(keys_to_store=new, store_spec=CPULoadStoreSpec(rows), evicted_keys=[])  # never read

    def _evict(self, num: int, protected: Collection[BlockKey], chosen: list[EvictedRun]) -> bool:
        """Free ``num`` rows, and those of ``chosen`` units; return False where too little can go."""
        if num <= 0 and not chosen:
            return True
        others = self._others
        num_chosen = total_size(chosen, others.size_of if others else None)
        spare = self._spare(set(protected), max(num - num_chosen, 0)) if self._unknown or others else []
        runs: list[EvictedRun] | None = chosen
        if num > num_chosen + len(spare):
            assert not chosen, "what was admitted has room"
            shield = self._tree.shielded(self.groups.units_of(protected))
            size_of = others.size_of if others else None
            owners = (at.node.owner for key in protected if (at := self._locate(key)) is not None)
            owner = next(owners, NO_OWNER)
            runs = self._tree.evict(Tier.HOST, num - len(spare), shield, size_of=size_of, for_owner=owner)
        if runs is None:  # perhaps there are windows and states whose units have to stay
            kept = {*protected, *spare}
            free = (key for key in others if key not in kept)
            loose = list(islice(free, num - len(spare)))
            if num > len(spare) + len(loose):
                return False
            runs, spare = [], spare + loose
        self._free_evicted(runs, spare)
        return True

    def _free_evicted(self, evicted: Sequence[EvictedRun], spare: Iterable[BlockKey]) -> None:
        """Free the rows of units that the tree has evicted, with what goes with them, and those of ``spare`` blocks."""
        units = cast("list[Key]", [*chain.from_iterable(run.keys for run in evicted)])
        beside = chain.from_iterable(map(self._others.of_unit, units)) if self._others else ()
        loose = dict.fromkeys([*spare, *beside])
        rows = [*chain.from_iterable(run.slots for run in evicted), *map(self._take_loose, loose)]
        self.rows.free(rows)
        if self.journal is not None:
            self.journal.remove(rows)
        if self.events is not None:
            self._emit([*loose, *self.groups.keys_of(units, self.groups.main)], removed=True)

    def _insert(self, keys: Sequence[BlockKey], rows: Sequence[int], num_reads: int, *, is_fleeting: bool) -> None:
        """Assign blocks to rows, held until :meth:`_release`."""
        self._reads_of[rows] = num_reads
        self._is_fleeting[rows] = is_fleeting
        is_unit = [*map(self.groups.is_main, keys)] if self._others.has_groups else repeat(True)
        main, main_rows = [*compress(keys, is_unit)], [*compress(rows, is_unit)]
        self.num_other_blocks += len(keys) - len(main)  # such a block is the tier's once nothing uses it
        num_units = 0
        for at, (node, first), length in self._tree.runs(self.groups.units_of(main)):
            end = first + length
            self._tier.slots_of(node)[first:end] = main_rows[at : at + length]
            self._tree.acquire_units(node, (1 << end) - (1 << first), Tier.HOST)
            self._tree.add(node, (1 << end) - (1 << first), Tier.HOST)
            num_units += length
        if num_units < len(keys):
            for key, row in zip(keys, rows, strict=True):
                is_known = self._locate(key) is not None
                if not is_known or not self.groups.is_main(key):
                    self._loose[key] = row
                if not is_known:
                    self._unknown[key] = None
        if self.promises.is_looking_up:  # they are held already
            self.promises.add(keys, keys if num_reads == _WRITING else ())

    def _not_here(self, keys: Collection[BlockKey]) -> list[BlockKey]:
        rows = self._rows(keys)
        num_here = rows.index(None) if None in rows else len(rows)
        if rows.count(None) == len(rows) - num_here:  # none is here behind the first that is not
            return [*islice(keys, num_here, None)]
        return [key for key, row in zip(keys, rows, strict=True) if row is None]

    def _here(self, keys: Collection[BlockKey]) -> tuple[Sequence[BlockKey], list[int]]:
        """Return which blocks are here, and their rows."""
        rows = self._rows(keys)
        if None not in rows:
            return [*keys], cast("list[int]", rows)
        found = [(key, row) for key, row in zip(keys, rows, strict=True) if row is not None]
        return [key for key, _ in found], [row for _, row in found]

    def _rows(self, keys: Collection[BlockKey]) -> list[int | None]:
        """Return the row of each block that is here; O(nodes) where all are units in the order of their path."""
        rows: list[int | None] = [*map(self._loose.get, keys)]
        is_unit = [*map(self.groups.is_main, keys)] if self._others.has_groups else repeat(True)
        places = [*compress(range(len(rows)), is_unit)]
        for at, (node, first), length in self._tree.runs(self.groups.units_of([*compress(keys, is_unit)])):
            if self._tier.slots[node.id] is not None:
                slots = self._tier.slots_of(node)[first : first + length]
                if not (self._loose or self._others.has_groups):
                    rows[at : at + length] = slots
                    continue
                for place, row in zip(places[at : at + length], slots, strict=True):
                    rows[place] = rows[place] if row is None else row
        return rows

    def _hold(self, keys: Sequence[BlockKey]) -> None:
        """Protect blocks from eviction."""
        main = self.groups.main_of(keys)
        if len(main) < len(keys):
            for key in keys:
                self._others.discard(key)
        for node, units in self._tree.units_of(self.groups.units_of(main)).items():
            self._tree.acquire_units(node, units, Tier.HOST)

    def _release(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> None:
        """Make blocks evictable that no transfer uses, unless they are promised."""
        if self._others.has_groups or self.promises:
            if self.journal is not None:
                self._record(keys, rows, self.groups.units_of(keys))
            self._unhold([key for key in keys if key not in self.promises] if self.promises else keys)
            return
        units = self.groups.units_of(keys)
        if self.journal is not None:
            self._record(keys, rows, units)
        for node, mask in self._tree.units_of(units).items():
            self._tree.release_units(node, mask, Tier.HOST)

    def _unhold(self, keys: Collection[BlockKey]) -> None:
        """Make blocks evictable, except those that a transfer uses."""
        here, rows = self._here(keys)
        idle = _chosen(here, self._reads_of[rows] == 0)
        main = self.groups.main_of(idle)
        for key in idle if len(main) < len(idle) else ():
            if not self.groups.is_main(key) and self._locate(key) is not None:
                group = self.groups.group_of(key)
                self._others.add(key, group, self.groups.unit_of(key), partial(self._has, group=group))
        for node, units in self._tree.units_of(self.groups.units_of(main)).items():
            self._tree.release_units(node, units, Tier.HOST)

    def _record(self, keys: Sequence[BlockKey], rows: Sequence[int], units: Sequence[Key]) -> None:
        """Have the journal note what lies in the rows of blocks, as far as it may outlive the engine."""
        journal, tree = self.journal, self._tree
        assert journal is not None
        is_lasting = ~self._is_fleeting[rows]
        if not is_lasting.all():
            keys, rows, units = _chosen(keys, is_lasting), _chosen(rows, is_lasting), _chosen(units, is_lasting)
        if self._others.has_groups:
            for key, row in zip(keys, rows, strict=True):
                if self._locate(key) is not None:
                    journal.record([row], [key], self.groups.note_of(tree, key))
            return
        for at, first, length in tree.runs(units):
            journal.record(rows[at : at + length], units[at : at + length], self.groups.note_at(tree, first))

    def _hold_promised(self) -> None:
        """Hold the promises of the present look-up: before an eviction, and at its end."""
        if self._to_hold:
            promised, self._to_hold = self._to_hold, []
            self._hold(promised)

    def _drop_idle(self, keys: Sequence[BlockKey]) -> None:
        """Drop blocks that no transfer uses, as by eviction."""
        for key in keys:
            self._drop(key)
        self._emit(keys, removed=True)

    def _drop(self, key: BlockKey) -> None:
        """Remove a block from tier and tree, and free its row."""
        row = self._take_loose(key) if key in self._loose else self.row_of(key)
        assert row is not None
        self.promises.settle([key])
        if self.groups.is_main(key):
            self._others.lose_unit(self.groups.unit_of(key))
            if (location := self._locate(key)) is not None:
                self._tree.release_units(location.node, 1 << location.unit, Tier.HOST)
                self._tree.remove(location.node, 1 << location.unit, Tier.HOST)
        self.rows.free([row])
        if self.journal is not None:
            self.journal.remove([row])

    def _take_loose(self, key: BlockKey) -> int:
        """Take a block that is no unit out of the tier, and return its row."""
        self._unknown.pop(key, None)
        if not self.groups.is_main(key):
            self.num_other_blocks -= 1
            self._others.discard(key)
        return self._loose.pop(key)

    def _drop_leaving(self) -> int:
        """Drop deleted blocks that no transfer uses; return their number."""
        leaving, gone = self.controller.leaving, []
        for key in list(leaving):
            row = self.row_of(key)
            if row is None or not self._num_reads[row]:
                del leaving[key]
            if row is not None and not self._num_reads[row]:
                gone.append(key)
        self._drop_idle(gone)
        return len(gone)

    def _overwrite_unused(self) -> None:
        rows = np.frombuffer(self.get_kv_memoryview(), np.uint8).reshape(self.get_kv_memoryview().shape)
        for row in self.rows.take_unused(self.contents().values()):
            rows[row] = 0
        if self.journal is not None:
            self.journal.scrub()

    def _spare(self, kept: Collection[BlockKey], count: int) -> list[BlockKey]:
        """Return up to ``count`` blocks without a use for hits, except ``kept`` ones."""
        promises = self.promises
        unknown = (key for key in self._unknown if not self._num_reads[self._loose[key]] and key not in promises)
        return list(islice((key for key in chain(unknown, self._others.useless()) if key not in kept), count))

    def _is_needed(self, key: BlockKey) -> bool:
        """Return whether a hit may need a block, as far as its group is known."""
        if self.groups.is_main(key) or self._locate(key) is None:
            return True
        group = self.groups.group_of(key)
        is_here = partial(self._has, group=group)
        return self.groups.is_worth_keeping(self._tree, group, self.groups.unit_of(key), is_here)

    def _has(self, unit: Key, *, group: int) -> bool:
        return self.groups.key_of(unit, group) in self._loose

    def _keys_of(self, unit: Key) -> list[BlockKey]:
        """Return a tree block's stored blocks, one per group."""
        keys = [self.groups.key_of(unit, group) for group in (self.groups.main, *self.groups.others)]
        return [key for key in keys if self.row_of(key) is not None]

    def _locate(self, key: BlockKey) -> Location | None:
        return self._tree.locate(self.groups.unit_of(key))

    def _emit(self, keys: Sequence[BlockKey], *, removed: bool) -> None:
        if self.events is not None and keys:
            keys = self.groups.offload_keys(keys)
            self.events.append(OffloadingEvent(keys=keys, medium=self.medium, removed=removed))
