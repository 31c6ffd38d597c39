"""Jobs and time limits of the disk tier and the shared store.

A store holds rows of host memory until they are copied. At most half of host memory is held for a tier, unless one job
takes more. What finds no room, comes while writing rests or waits too long is dropped and counted. A load that is late
is abandoned: what it has not brought is a miss.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
from ragcache_core.vllm_plugin.compat import ReqContext, ScheduleEndContext
from ragcache_core.vllm_plugin.lower.jobs import EndedJob, LoadTransfer, StoreTransfer, TierJob
from ragcache_core.vllm_plugin.lower.tier import LowerTier
from ragcache_core.vllm_plugin.offload.host_tier import is_adapted

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.cache.controller import CacheController
    from ragcache_core.vllm_plugin.cache.request_state import Key, RequestState


class TierThreads(Protocol):
    """The threads that copy, write and read for a tier."""

    @property
    def can_write(self) -> bool:
        """Whether writing is not paused after a failure."""
        ...

    def load_s(self, num_blocks: int) -> float | None:
        """Return the estimated seconds of a load, from recent ones; ``None`` if unknown."""
        ...

    def is_to_be_abandoned(self, load: LoadTransfer, limit_s: float) -> bool:
        """Return whether an open load is to be abandoned; ``limit_s`` is its longest time."""
        ...

    def wake(self) -> None:
        """Wake the threads, as stores were released."""
        ...


@dataclass(frozen=True, slots=True)
class _OpenLoad:
    job: TierJob
    transfer: LoadTransfer
    limit_s: float


class TransferTier(LowerTier):
    """A tier with its own threads.

    Args:
        controller: knows requests, tree and counters.
        threads: of the tier.
        num_rows: rows of host memory.
        block_bytes: bytes of a block.
    """

    def __init__(self, controller: CacheController, threads: TierThreads, num_rows: int, block_bytes: int) -> None:
        self.name = type(self).__name__
        self.block_bytes = block_bytes
        self._controller = controller
        self._tree = controller.tree
        self._groups = controller.groups
        self._threads = threads
        self._num_rows = num_rows
        self._loads: dict[int, _OpenLoad] = {}
        self._stores: dict[int, StoreTransfer] = {}
        self._ended: list[EndedJob] = []
        self._num_loading = self._num_to_load = 0

    # Jobs

    def store(self, job: TierJob) -> None:
        transfer = None if is_adapted(job.context) else self._begin_store(job)
        if transfer is None:
            self._ended.append(EndedJob(job.number))
        else:
            self._stores[job.number] = transfer

    def load(self, job: TierJob) -> None:
        self._num_loading += len(job.keys)
        transfer, limit_s = self._begin_load(job)
        self._loads[job.number] = _OpenLoad(job, transfer, limit_s)

    def take_ended(self) -> Iterable[EndedJob]:
        for number, store in list(self._stores.items()):
            if not store.has_ended and (not store.remaining_s or not self._threads.can_write):
                store.release()
                self._threads.wake()
            if store.has_ended:
                del self._stores[number]
                self._ended.append(EndedJob(number))
        for number, load in list(self._loads.items()):
            if not load.transfer.has_ended and self._threads.is_to_be_abandoned(load.transfer, load.limit_s):
                load.transfer.abandon()
            if load.transfer.has_ended:
                del self._loads[number]
                self._num_loading -= len(load.job.keys)
                self._ended.append(EndedJob(number, self._finish_load(load.job, load.transfer)))
        ended, self._ended = self._ended, []
        return ended

    def begin_request(self, context: ReqContext) -> None:
        """Do nothing."""

    def end_request(self, context: ReqContext) -> None:
        """Do nothing."""

    def end_step(self, context: ScheduleEndContext) -> None:
        """Let loads of the next step count."""
        self._num_to_load = 0

    @property
    def newest_store(self) -> int | None:
        return None if self._loads else max(self._stores, default=None)

    @abstractmethod
    def _begin_store(self, job: TierJob) -> StoreTransfer | None:
        """Begin to copy a job's blocks that the tier stores; return ``None`` if there are none."""

    @abstractmethod
    def _begin_load(self, job: TierJob) -> tuple[LoadTransfer, float]:
        """Begin to load; return the transfer, and its longest time in seconds."""

    @abstractmethod
    def _finish_load(self, job: TierJob, load: LoadTransfer) -> Sequence[BlockKey]:
        """Return the loaded blocks."""

    def _has_room(self, num_blocks: int) -> bool:
        """Return whether a job may hold rows: alone, or if all jobs hold at most half of host memory."""
        num_held = sum(store.num_blocks for store in self._stores.values() if not store.has_ended)
        return not num_held or num_held + num_blocks <= self._num_rows // 2

    def _abandon_loads(self) -> None:
        for load in self._loads.values():
            load.transfer.abandon()

    # Look-ups

    def _place_of(self, key: BlockKey, context: ReqContext) -> tuple[RequestState, int] | None:
        """Return a request, and a block's index in it; ``None`` for a prompt without a request."""
        state, at = self._controller.state_of(context.req_id), self._tree.locate(self._groups.unit_of(key))
        return None if state is None or at is None else (state, at.node.start + at.unit)

    def _pays(self, state: RequestState, first: int, num_units: int, num_blocks: int) -> tuple[bool, float]:
        """Return whether loading blocks is faster than computing them, and the seconds of computing.

        By the measured times of both; where one of them is not known, they are. What is to be loaded is counted until
        the end of the step, at which it is.

        Args:
            state: their request.
            first: the index of the first of them.
            num_units: how many the tier has from there on.
            num_blocks: how many have to be loaded.
        """
        saved_s = self._controller.saved_s(state, first, num_units)
        load_s = self._threads.load_s(self._num_loading + self._num_to_load + num_blocks)
        pays = load_s is None or load_s <= saved_s
        self._num_to_load += num_blocks if pays else 0
        return pays, saved_s

    def _run_of(self, units: Sequence[Key]) -> Sequence[BlockKey]:
        """Return the leading blocks that host memory lacks."""
        num_missing = len(units)
        for at, mask in self._in_host(units):
            if mask:
                num_missing = at + (mask & -mask).bit_length() - 1
                break
        return self._groups.keys_of(units[:num_missing], self._groups.main)

    def _in_host(self, units: Sequence[Key]) -> Iterator[tuple[int, int]]:
        """Yield runs of one tree node: the index of the first block, and which blocks are in host memory."""
        for at, first, length in self._tree.runs(units):
            yield at, self._tree.resident_mask(first.node, Tier.HOST) >> first.unit & (1 << length) - 1
