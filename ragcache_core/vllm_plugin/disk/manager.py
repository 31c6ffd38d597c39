"""The disk tier: blocks evicted from host memory, or to be evicted, in a crash-safe store of limited size.

The scheduler's thread decides what is kept and never waits for the disk. Other threads do the work::

    scheduler     copier                   writer                      readers
    store   ->    copies the payloads, ->  deletes evicted chunks,
                  releases host memory     writes, commits
    take_ended  <----------------------------------------------------  load

A chunk is stored under its unit's key. If the model has several KV cache groups, the key has the group as well. The
tree knows one group only; chunks of the others are evicted with their units (:class:`OtherBlocks`).

The tree counts blocks. How many fit follows from the mean of their compressed sizes. The store never takes more than
its capacity: where an estimate was too low, it refuses a write, whose chunks are dropped.

The copier has few buffers; host memory, which is held until a job has ended, waits for them. If the disk is too slow
for that, chunks are dropped. After a failed write, as on a full disk, writing rests for a while and is tried again;
reads go on. If the disk is gone, or does not answer in time, the tier is out of service, but the engine runs on. The
store is opened again when the disk answers (:class:`Reopening`), and the tree grows again from it in slices of a step.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ragcache_core.chunkstore import ChunkEntry, ChunkStore, async_store
from ragcache_core.chunkstore.compression import Compression
from ragcache_core.chunkstore.encryption import load_keys
from ragcache_core.chunkstore.regrowing import Regrowth, in_order_of_growth
from ragcache_core.errors import CacheTierError
from ragcache_core.log import logger_of
from ragcache_core.runtime.environment import STARTED_AGAIN_ENV
from ragcache_core.tree import Location, admit_within_quotas, runs_of
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.controller import TierReport
from ragcache_core.vllm_plugin.cache.forgetting import Forgotten, Freed, why_on_disk
from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey, OtherBlocks
from ragcache_core.vllm_plugin.compat import (
    CacheHitSource,
    OffloadingEvent,
    ReqContext,
    ScheduleEndContext,
)
from ragcache_core.vllm_plugin.disk.events import DiskEvents
from ragcache_core.vllm_plugin.disk.io import NUM_READERS, DiskIO
from ragcache_core.vllm_plugin.disk.jobs import DiskStore, Erasure, PendingRun
from ragcache_core.vllm_plugin.disk.reopening import Reopening, UnopenedStore, device_of
from ragcache_core.vllm_plugin.identity import MATCH_KEYS, approximate_type, kv_identity
from ragcache_core.vllm_plugin.lower.jobs import EndedJob, LoadTransfer, TierJob
from ragcache_core.vllm_plugin.lower.transfers import TransferTier

if TYPE_CHECKING:
    from ragcache_core.tree import EvictedRun
    from ragcache_core.vllm_plugin.cache.request_state import Key, RequestState
    from ragcache_core.vllm_plugin.offload.spec import RAGCacheSpec

logger = logger_of(__name__)

_OUT_OF_SERVICE_TIMEOUT_S = 1.0
_NOTED_AT_ONCE = 64
_REGROWN_A_STEP = 256
"""Of a store that is open again: some milliseconds' work."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Contiguous blocks of a request on disk, from the index ``first`` on.

    They are a miss unless loading ``pays``.
    """

    first: int
    units: Sequence[Key]
    pays: bool


@dataclass(frozen=True, slots=True)
class _Regrowing:
    """A reopened store, and the part of it that is in the tree; ``entries`` are the rest."""

    store: ChunkStore
    growth: Regrowth
    entries: Iterator[ChunkEntry]


class DiskTier(TransferTier):
    """The disk tier below host memory, on this machine."""

    source = CacheHitSource.DISK

    def __init__(
        self,
        spec: RAGCacheSpec,
        host_memory: memoryview,
        directory: str,
        capacity_bytes: int,
        key_file: str | None = None,
    ) -> None:
        """Open the store, and add its blocks to the tree.

        An engine that the supervisor restarts runs on without a store that cannot be opened, until it can.

        Args:
            spec: has the controller and the cache namespace.
            host_memory: rows of host memory, ``[num_rows, block_bytes]``.
            directory: the cache directory.
            capacity_bytes: capacity of the store.
            key_file: keys of an encrypted store; without it, the environment may have them.

        Raises:
            CacheTierError: another engine uses it, it is not writable, or its capacity is invalid.
            ConfigError: the identity of the model's weights is unknown, ``key_file`` has no key, or the compression
                package is not installed.
        """
        assert spec.controller is not None
        num_rows, block_bytes = host_memory.shape  # type: ignore[misc]  # typeshed: of any length
        self._open_store = partial(
            ChunkStore,
            directory,
            kv_identity(spec.config),
            chunk_bytes=block_bytes,
            capacity_bytes=capacity_bytes,
            match_keys=MATCH_KEYS,
            keys=load_keys(None if key_file is None else Path(key_file)),
            compression=Compression(
                spec.controller.settings.compression,
                "RAGCache's disk tier",
                num_readers=NUM_READERS,
                number_type=approximate_type(spec.config, spec.controller.settings.compression),
            ),
        )
        self._directory = Path(directory).absolute()
        is_again = STARTED_AGAIN_ENV in os.environ
        failure: CacheTierError | None = None
        try:
            store = self._open_store()
        except CacheTierError as error:
            if not is_again:
                raise
            failure = error
            store = cast("ChunkStore", UnopenedStore(self._directory, block_bytes, capacity_bytes, str(error)))
        self._device = device_of(self._directory)
        self._host_memory = host_memory
        self._io = DiskIO(store, host_memory)
        super().__init__(spec.controller, self._io, num_rows, block_bytes)
        self.path = store.path
        self.undeleted_reason = why_on_disk([self.path])
        self._is_enabled = True
        self._others: OtherBlocks[bytes] = OtherBlocks(self._groups, self._tree, Tier.DISK)
        self._stored: set[bytes] = set()
        self._events = DiskEvents(self._groups, is_published=spec.kv_events_config.enable_kv_cache_events)
        self._writing: set[bytes] = set()
        self._found: dict[str, _Found] = {}
        self._erasures: list[Erasure] = []
        self._reopening: Reopening | None = None
        self._regrowth: _Regrowing | None = None
        self._emptying: Erasure | None = None
        self._has_forgotten = False
        """While it was out of service: what it holds may be what was forgotten."""
        self._is_emptied = False
        self._report = TierReport(store.capacity_bytes, store.slot_bytes, used_bytes=self._used_bytes)
        if self._groups.others:
            self._report.num_other_blocks = lambda: len(self._stored) - self._tree.tiers[Tier.DISK].num_units
        self._controller.add_tier(Tier.DISK, self._report)
        try:
            if failure is None:
                self._restore(store)
        except BaseException as error:
            if not (is_again and isinstance(error, CacheTierError)):
                self._io.close()
                raise
            failure = error
        if failure is not None:
            self._disable(str(failure))
        self._controller.forgetting.add_holder(self)

    # A tier below host memory

    def find(self, key: BlockKey, context: ReqContext) -> Sequence[BlockKey]:
        if not self._is_enabled or key not in self._stored:
            return ()
        place = self._place_of(key, context)
        if place is None:
            return (key,)
        state, index = place
        found = self._found.get(context.req_id)
        if found is None or not 0 <= index - found.first < len(found.units):
            found = self._found[context.req_id] = self._find(state, index)
        if not found.pays:
            return ()
        return (key,) if self._groups.others else self._run_of(found.units[index - found.first :])

    def take_ended(self) -> Iterable[EndedJob]:
        self._take_in_written()
        return super().take_ended()

    def end_step(self, context: ScheduleEndContext) -> None:
        """Store access counts of blocks now and then, for the next start.

        It is told of every step, so this is also where it is noticed that the disk fails, hangs or is gone.
        """
        self._notice_failure()
        self._come_back()
        super().end_step(context)
        self._found.clear()  # what pays is being loaded by now
        self._note_names()
        if len(self._controller.retrieved) < _NOTED_AT_ONCE:
            return
        retrieved = self._controller.take_retrieved()
        named = [(self._key_of(unit), *worth) for unit, worth in retrieved.items()]
        if worths := [worth for worth in named if worth[0] in self._stored]:
            self._io.update_notes(worths)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._events.take()

    @property
    def has_pending_work(self) -> bool:
        """Whether the tree is being restored, a slice per step."""
        return self._regrowth is not None

    def drain(self) -> None:
        """Wait until the tier uses no host memory; late reads are abandoned."""
        timeout_s = async_store.READ_TIMEOUT_S if self._is_enabled else 0.0
        if not self._io.finish_reads(timeout_s):
            self._disable(f"a reset had to wait longer than {timeout_s:g} s for what was being read")
        self._abandon_loads()

    def shutdown(self) -> None:
        if self._reopening is not None:
            self._reopening.stop()
        self._abandon_loads()
        self._io.close()

    def clear(self) -> None:
        """Delete everything, and store nothing until the next start: the model's weights may have changed."""
        timeout_s = async_store.READ_TIMEOUT_S if self._is_enabled else _OUT_OF_SERVICE_TIMEOUT_S
        self._disable(
            "the caches were reset, and KV of other weights could not be told from what is stored", comes_back=False
        )
        self._io.clear()
        is_answered = self._io.finish_writes(timeout_s)
        self._is_emptied = is_answered and self._io.is_cleared
        if not is_answered:
            logger.error(
                "RC-RESET-LATE: RAGCache's disk tier has not answered in %g s, and is emptied when it does: if the "
                "engine ends before that, delete %s",
                timeout_s,
                self.path,
            )
        self._take_in_written()

    # A holder of what may be forgotten

    def forget(self, forgotten: Forgotten) -> Freed:
        """Delete blocks, and overwrite them and their earlier copies on the disk; reads of them are misses."""
        groups = self._groups
        names = [groups.key_of(unit, group) for unit in forgotten.units for group in (groups.main, *groups.others)]
        if forgotten.is_all:
            names = [*self._stored, *self._writing]
        num_chunks = sum(map(self._is_here, names))
        for name in names:
            if self._is_here(name):
                self._remove(name)
        self._has_forgotten |= not self._is_enabled
        if not self._io.is_closed:
            self._erasures.append(self._io.erase(names))
        return Freed({Tier.DISK: num_chunks}, {Tier.DISK: num_chunks * self._report.block_bytes})

    def num_pending(self) -> int:
        """Return the number of open erasures; failed ones are retried together after the write pause.

        Until then nothing of them is found, nor stored again.
        """
        ended = [erasure for erasure in self._erasures if erasure.is_done]
        if ended:
            self._take_in_written()  # removes blocks of earlier writes
        if any(erasure.error is not None for erasure in ended):
            self._is_emptied = False
        self._notice_failure()
        failed = [erasure for erasure in ended if erasure.error is not None and self._is_enabled]
        waits = failed and not self._io.can_write
        self._erasures = [erasure for erasure in self._erasures if not erasure.is_done or (waits and erasure in failed)]
        if failed and not waits:
            self._erasures.append(self._io.erase(list(frozenset().union(*(erasure.names for erasure in failed)))))
        return len(self._erasures)

    def deletion_problem(self) -> str | None:
        """Return why KV may stay on the disk: out of service, or not writable now."""
        self._notice_failure()
        if self._is_emptied:
            return None
        if not self._is_enabled:
            return why_on_disk([self.path])
        errors = [erasure.error for erasure in self._erasures if erasure.error is not None]
        if not errors:
            return None
        return (
            f"the disk tier cannot overwrite it now ({errors[0]}), and tries again while this engine runs: if it ends "
            f"before that, delete {self.path}"
        )

    # Inside

    def _find(self, state: RequestState, first: int) -> _Found:
        """Return the contiguous blocks of a request on disk from its block ``first`` on."""
        units = list(islice(state.keys, first, None))
        names = self._groups.keys_of(units, self._groups.main)
        units = units[: sum(1 for _ in takewhile(self._stored.__contains__, names))]
        if not self._controller.is_profiled:
            return _Found(first, units, True)
        num_to_load = len(units) - sum(mask.bit_count() for _, mask in self._in_host(units))
        return _Found(first, units, self._pays(state, first, len(units), num_to_load)[0])

    def _note_names(self) -> None:
        """Store the documents of blocks that were named after being stored."""
        if not self._tree.rekeyed:
            return
        nodes = [node for node in self._tree.nodes() if node.id in self._tree.rekeyed]
        self._tree.rekeyed.clear()
        names = [key for node in nodes for unit in node.keys if self._is_here(key := self._key_of(unit))]
        if names:
            notes = (self._groups.note_of(self._tree, name) for name in names)
            self._io.rename([(name, note.doc_id) for name, note in zip(names, notes, strict=True)])

    def _is_leaving(self, name: bytes) -> bool:
        """Return whether a block is deleted, but still being copied or overwritten."""
        return name in self._controller.leaving or any(name in erasure.names for erasure in self._erasures)

    def _begin_store(self, job: TierJob) -> DiskStore | None:
        self._take_in_written()
        if not self._is_enabled:
            return None
        new = self._new_chunks(job)
        if new and not (self._io.can_write and self._has_room(len(new))):
            if self._io.can_write:
                self._io.warn_of_slowness(len(new))
            self._controller.counters.num_dropped_blocks += len(new)
            new.clear()
        evicted = self._make_room(new)
        runs = self._admit(new)
        self._events.stored(new)
        return self._io.store(runs, evicted) if runs or evicted else None

    def _begin_load(self, job: TierJob) -> tuple[LoadTransfer, float]:
        self._hold(job.keys)
        return self._io.load([*job.keys], job.rows), async_store.READ_TIMEOUT_S

    def _new_chunks(self, job: TierJob) -> dict[bytes, int]:
        """Return a job's blocks that are not stored yet, by depth; one without its parent is useless."""
        self.num_pending()
        rows: dict[bytes, int] = dict(zip(job.keys, job.rows, strict=True))
        if self._controller.leaving or self._erasures:
            for name in [*filter(self._is_leaving, rows)]:
                del rows[name]
        stored, writing, new = self._stored, self._writing, dict[bytes, int]()
        masks = self._tree.units_of(self._groups.units_of(rows))
        for node in sorted(masks, key=lambda node: node.start):
            for first, length in runs_of(masks[node]):
                before = self._tree.key_before(Location(node, first))
                is_reached = before is None or self._is_kept(self._key_of(before), new)
                units = cast("list[Key]", node.keys[first : first + length])
                if is_reached and not self._groups.others and stored.isdisjoint(units) and writing.isdisjoint(units):
                    new.update(zip(units, map(rows.__getitem__, units), strict=True))
                    continue
                for unit in units:
                    name = self._key_of(unit)
                    if is_reached and name in rows and name not in stored and name not in writing:
                        new[name] = rows[name]
                    is_reached = self._is_kept(name, new)
                    for other in self._others_of(unit) if self._groups.others else ():
                        if is_reached and other in rows and not self._is_here(other):
                            new[other] = rows[other]
        if len(new) < len(rows):
            left_out = [name for name in rows if name not in new and not self._is_here(name)]
            self._controller.counters.num_dropped_blocks += len(self._tree.known(self._groups.units_of(left_out)))
        return new

    def _is_kept(self, name: bytes, new: dict[bytes, int]) -> bool:
        """Return whether a block is stored, in flight to the disk, or among the ``new`` ones."""
        return name in self._stored or name in self._writing or name in new

    def _others_of(self, unit: Hashable) -> list[bytes]:
        """Return the names of a tree block's blocks in other groups."""
        return [self._groups.key_of(cast("Key", unit), group) for group in self._groups.others]

    def _key_of(self, unit: Hashable) -> BlockKey:
        return self._groups.key_of(cast("Key", unit), self._groups.main)

    def _is_here(self, name: bytes) -> bool:
        return name in self._stored or name in self._writing

    def _make_room(self, new: dict[bytes, int]) -> list[bytes]:
        """Return the blocks evicted for ``new`` ones; remove the last of those that do not fit from ``new``."""
        own = self._take_out(self._keep_quotas(new))
        num_missing = self._io.num_over(len(self._stored), len(self._writing) + len(new))
        if num_missing <= 0 or not new:
            return own
        evicted = dict.fromkeys(islice(self._others.useless(), num_missing))
        new_units = self._groups.units_of(new)
        shielded = self._tree.shielded(new_units)
        for owner, num_new in Counter(self._tree.owners_of(new_units)).items():
            if num_missing <= len(evicted):
                break
            units = self._tree.evict_up_to(
                Tier.DISK,
                min(num_missing - len(evicted), max(num_new, num_new * num_missing // len(new))),
                shielded,
                size_of=self._others.size_of if self._others else None,
                for_owner=owner,
            )
            evicted.update(dict.fromkeys(self._names_of(units)))
        for _ in range(min(num_missing - len(evicted), len(new))):
            new.popitem()
            self._controller.counters.num_dropped_blocks += 1
        return [*own, *self._take_out(list(evicted))]

    def _keep_quotas(self, new: dict[bytes, int]) -> list[bytes]:
        """Return blocks that owners evict for their ``new`` ones; drop new ones from the first over a quota on.

        All are of one request, so of one tenant, or of the collections of its documents.
        """
        if not self._tree.tiers[Tier.DISK].shares.quotas:
            return []
        units = self._groups.units_of(self._groups.main_of([*new]))
        shielded = self._tree.shielded(self._groups.units_of(new))
        num_admitted, evicted = admit_within_quotas(self._tree, Tier.DISK, units, shielded)
        num_left_out = len(units) - num_admitted
        while num_left_out > 0 and new:
            name, _ = new.popitem()
            num_left_out -= self._groups.is_main(name)
            self._controller.counters.num_dropped_blocks += 1
        return self._names_of(evicted)

    def _names_of(self, evicted: Iterable[EvictedRun]) -> list[bytes]:
        """Return the chunks of evicted units, with those of other groups."""
        units = chain.from_iterable(run.keys for run in evicted)
        if not self._groups.others:
            return cast("list[bytes]", [*units])
        return [name for unit in units for name in (self._key_of(unit), *self._others.of_unit(unit))]

    def _take_out(self, evicted: list[bytes]) -> list[bytes]:
        """Remove evicted blocks from the sets of stored ones, and return them."""
        for name in evicted if self._groups.others else ():
            self._others.discard(name)
        self._stored.difference_update(evicted)
        self._events.removed(evicted)
        return evicted

    def _admit(self, new: dict[bytes, int]) -> list[PendingRun]:
        """Add blocks to the tree, held until they are written, and return them with metadata, parents first."""
        self._writing.update(new)
        names = self._groups.main_of([*new])
        rows = list(new.values()) if len(names) == len(new) else [new[name] for name in names]
        runs = []
        for at, first, length in self._tree.runs(self._groups.units_of(names)):
            mask = (1 << length) - 1 << first.unit
            self._tree.acquire_units(first.node, mask, Tier.DISK)
            self._tree.add(first.node, mask, Tier.DISK)
            note = self._groups.note_at(self._tree, first)
            runs.append(PendingRun(names[at : at + length], rows[at : at + length], note))
        for name in new if len(names) < len(new) else ():
            if not self._groups.is_main(name):
                self._others.discard(name)
                note = self._groups.note_of(self._tree, name)
                runs.append(PendingRun([name], [new[name]], note))
        return runs

    def _hold(self, names: Sequence[bytes]) -> None:
        """Hold blocks during a write or read."""
        for name in names if self._groups.others else ():
            if not self._groups.is_main(name):
                self._others.discard(name)
        for node, mask in self._tree.units_of(self._groups.units_of(self._groups.main_of(names))).items():
            self._tree.acquire_units(node, mask, Tier.DISK)

    def _let_go(self, names: Sequence[bytes]) -> None:
        """Undo :meth:`_hold`."""
        for node, mask in self._tree.units_of(self._groups.units_of(self._groups.main_of(names))).items():
            self._tree.release_units(node, mask, Tier.DISK)
        for name in names if self._groups.others else ():
            if not self._groups.is_main(name) and name in self._stored:
                group = self._groups.group_of(name)
                self._others.add(name, group, self._groups.unit_of(name), partial(self._has, group=group))

    def _has(self, unit: Key, *, group: int) -> bool:
        return self._groups.key_of(unit, group) in self._stored

    def _take_in_written(self) -> None:
        self._notice_failure()
        for outcome in self._io.take_written():
            self._controller.record_change()
            self._writing.difference_update(outcome.names)
            known = outcome.names
            units = self._groups.units_of(known)
            in_tree = self._tree.known(units)
            if len(in_tree) < len(units):
                known = [name for name in known if self._tree.locate(self._groups.unit_of(name)) is not None]
            is_stored = self._is_enabled and outcome.error is None and not outcome.is_dropped
            erased = {name for erasure in self._erasures for name in erasure.names} if self._erasures else set()
            if is_stored:
                self._stored.update(known if not erased else [name for name in known if name not in erased])
            if self._is_enabled:
                self._let_go(known)
                for name in known if not is_stored or erased else ():
                    if not is_stored or name in erased:
                        self._remove(name)
            if outcome.is_dropped or outcome.error is not None:
                self._controller.counters.num_dropped_blocks += len(outcome.names)

    def _finish_load(self, job: TierJob, load: LoadTransfer) -> Sequence[BlockKey]:
        lost: list[bytes] = []
        for part in load.parts:
            self._let_go(part.names)
            if not part.is_abandoned and not all(part.found):
                missing = [name for name, is_found in zip(part.names, part.found, strict=True) if not is_found]
                lost += [name for name in missing if name in self._stored]  # else it was forgotten meanwhile
        for name in lost:
            self._remove(name)
        if lost:
            self._controller.counters.num_corrupt_blocks += len(lost)
            self._controller.record_change()
            self._io.delete(lost)  # the store keeps what it could not read, and its slot
        return list(compress(job.keys, load.found))

    def _remove(self, name: bytes) -> None:
        """Remove a block that is not on the disk: a miss."""
        self._stored.discard(name)
        self._events.removed([name])
        if not self._groups.is_main(name):
            self._others.discard(name)
            return
        unit = self._groups.unit_of(name)
        self._others.lose_unit(unit)
        if (location := self._tree.locate(unit)) is not None:
            self._tree.remove(location.node, 1 << location.unit, Tier.DISK)

    def _notice_failure(self) -> None:
        if (self._is_enabled or self._regrowth is not None) and (why := self._io.why_down()) is not None:
            self._disable(why)

    def _disable(self, why: str, *, comes_back: bool = True) -> None:
        """Take the tier out of service and out of the tree, where its blocks would hold host memory."""
        self._is_enabled = self._report.is_enabled = False
        self._report.used_bytes = None
        self._io.take_down(why, comes_back=comes_back)
        self._take_all_out()
        self._regrowth = self._emptying = None
        if self._reopening is not None:
            self._reopening.stop()
        self._reopening = None
        if comes_back:
            self._reopening = Reopening(self._open_store, self._io.close, self._directory, self._device)

    def _take_all_out(self) -> None:
        self._stored.clear()
        self._events.all_removed()
        self._others.clear()
        self._tree.clear_tier(Tier.DISK)
        self._controller.record_change()

    def _come_back(self) -> None:
        """Continue with a reopened store; its blocks return, unless documents were deleted meanwhile."""
        if self._reopening is not None and self._reopening.is_ready and not (self._loads or self._stores):
            reopened, self._reopening = self._reopening.take(), None
            self._io = self._threads = DiskIO(reopened.store, self._host_memory)
            self.path, self.undeleted_reason = reopened.store.path, why_on_disk([reopened.store.path])
            self._report.capacity_bytes = reopened.store.capacity_bytes
            self._report.block_bytes = reopened.store.slot_bytes
            self._controller.add_tier(Tier.DISK, self._report)
            self._writing.clear()
            entries = in_order_of_growth(reopened.entries, self._groups.unit_of_entry)
            self._regrowth = _Regrowing(reopened.store, self._growth(), entries)
        if self._regrowth is None:
            return
        if self._has_forgotten:
            if self._emptying is None:
                self._take_all_out()
                self._emptying = self._io.clear()
                self._erasures = [self._emptying]
            if not self._emptying.is_done or self._emptying.error is not None:  # the latter is noticed as a failure
                return
            self._has_forgotten = False
        else:
            slice_ = list(islice(self._regrowth.entries, _REGROWN_A_STEP))
            for entry in slice_:
                self._regrowth.growth.add(entry)
            if len(slice_) == _REGROWN_A_STEP:
                return
            self._finish_restoring(self._regrowth.store, self._regrowth.growth)
        self._regrowth = self._emptying = None
        self._is_enabled = self._report.is_enabled = True
        self._report.used_bytes = self._used_bytes
        self._controller.record_change()
        logger.warning(
            "RC-TIER-WORKS: RAGCache's disk tier works again, with %d blocks of KV in %s", len(self._stored), self.path
        )

    def _used_bytes(self) -> int:
        return self._io.used_bytes

    def _growth(self) -> Regrowth:
        return Regrowth(self._tree, Tier.DISK, self._controller.tokens_per_block, self._groups.unit_of_entry)

    def _restore(self, store: ChunkStore) -> None:
        """Rebuild the tree from the store's blocks."""
        growth = self._growth()
        for entry in in_order_of_growth(store.entries(), self._groups.unit_of_entry):
            growth.add(entry)
        self._finish_restoring(store, growth)
        if self._stored:
            logger.info("RAGCache found %d blocks of KV in %s", len(self._stored), store.path)

    def _finish_restoring(self, store: ChunkStore, growth: Regrowth) -> None:
        """Make restored blocks available; discard those without their prefix."""
        found, orphans = growth.found, growth.orphans
        self._stored.update(found)
        self._events.stored(found)
        if self._groups.others:
            self._let_go(found)
        if orphans:
            store.discard_many(orphans)
        counters, stats = self._controller.counters, store.stats
        counters.num_lost_blocks += len(orphans) + stats.num_missing
        counters.num_corrupt_blocks += stats.num_damaged
        if num_given_up := len(orphans) + stats.num_missing + stats.num_damaged:
            logger.warning(
                "RC-DISK-DISCARDED: RAGCache discarded %d damaged blocks, or blocks without their prefix, in %s",
                num_given_up,
                store.path,
            )
