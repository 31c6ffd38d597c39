"""Copies in flight, until all workers have ended them, and the blocks that they use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
    from ragcache_core.vllm_plugin.lower.manager import TierManager
    from ragcache_core.vllm_plugin.offload.copied_requests import CopiedRequest, KeyGroup
    from ragcache_core.vllm_plugin.offload.host_tier import HostTier


@dataclass(slots=True, eq=False)
class CopyJob:
    """A copy.

    Attributes:
        copied: whose blocks these are.
        keys: of the blocks, in the order of the copy.
        blocks: of the engine that a store reads; None: it is a load.
        is_by_layer: workers copy it in the step that its request begins with.
        num_pending: workers that have not ended it.
    """

    copied: CopiedRequest
    keys: Sequence[BlockKey]
    blocks: frozenset[int] | None
    is_by_layer: bool
    num_pending: int


class _CopyBeforeReset(NamedTuple):
    """A copy from before a reset, which workers continue."""

    num_pending: int
    rows: list[int]


class CopyJobs:
    """Numbers copies, and reports their ends to the tiers.

    Rows of host memory that a copy from before a reset uses are used again once it has ended.

    Args:
        manager: of the tiers.
        host: host memory below it.
        num_workers: each of them ends each copy.
    """

    def __init__(self, manager: TierManager, host: HostTier, *, num_workers: int) -> None:
        self._manager = manager
        self._host = host
        self._num_workers = num_workers
        self._jobs: dict[int, CopyJob] = {}
        self._late: dict[int, _CopyBeforeReset] = {}
        self._num_begun = 0

    def __len__(self) -> int:
        """Return the number of open copies, except those from before a reset."""
        return len(self._jobs)

    @property
    def are_pending(self) -> bool:
        """Whether any copy has not ended."""
        return bool(self._jobs or self._late)

    def begin(
        self,
        copied: CopiedRequest,
        keys: Sequence[BlockKey],
        *,
        blocks: frozenset[int] | None = None,
        is_by_layer: bool = False,
    ) -> int:
        """Return the number of a new copy; a store reads ``blocks``."""
        self._num_begun += 1
        self._jobs[self._num_begun] = CopyJob(copied, keys, blocks, is_by_layer, self._num_workers)
        if not is_by_layer:
            copied.jobs.add(self._num_begun)
        return self._num_begun

    def stores(self) -> list[tuple[int, CopyJob]]:
        """Return the stores with their numbers."""
        return [(number, job) for number, job in self._jobs.items() if job.blocks is not None]

    def end(self, completed: Mapping[int, int]) -> list[CopyJob]:
        """Process the number of workers that ended each copy; return those ended by all, loads first."""
        loads: list[CopyJob] = []
        stores: list[CopyJob] = []
        for number, count in completed.items():
            job = self._jobs.get(number)
            if job is None:
                self._end_late(number, count)
                continue
            job.num_pending -= count
            if job.num_pending <= 0:
                del self._jobs[number]
                job.copied.jobs.discard(number)
                (loads if job.blocks is None else stores).append(job)
        for job in loads:
            self._manager.complete_load(job.keys, job.copied.context)
        for job in stores:
            self._manager.complete_store(job.keys, job.copied.context)
        return loads + stores

    def reset(self) -> set[int]:
        """Drop all copies before the tiers are emptied; return those that workers may still begin or wait for."""
        for number, job in self._jobs.items():
            rows = [row for key in job.keys if (row := self._host.row_of(key)) is not None]
            self._late[number] = _CopyBeforeReset(job.num_pending, rows)
        left = {number for number, job in self._jobs.items() if not job.is_by_layer}
        self._jobs.clear()
        return left

    def keep_late_rows(self) -> None:
        """Keep rows in use by copies out of the emptied host memory."""
        self._host.rows.reset([row for late in self._late.values() for row in late.rows])

    def _end_late(self, number: int, count: int) -> None:
        late = self._late.pop(number, _CopyBeforeReset(0, []))
        if late.num_pending > count:
            self._late[number] = _CopyBeforeReset(late.num_pending - count, late.rows)
        elif late.rows:
            used = {row for other in self._late.values() for row in other.rows}
            self._host.rows.free([row for row in late.rows if row not in used])


def blocks_written(output: SchedulerOutput, groups: Sequence[KeyGroup], fenced: Iterable[int]) -> set[int]:
    """Return the blocks that a step may write to, so that stores of them must end before.

    Args:
        output: of the step.
        groups: of the engine.
        fenced: further blocks, which are written to before the step or which it does not tell of.
    """
    written = set(fenced)
    for new in output.scheduled_new_reqs:
        written.update(_without_hit(new.block_ids, new.num_computed_tokens, groups))
    cached = output.scheduled_cached_reqs
    for name, blocks, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if blocks is not None:
            is_whole = name in cached.resumed_req_ids
            new_blocks = _without_hit(blocks, num_computed, groups) if is_whole else chain.from_iterable(blocks)
            written.update(new_blocks)
    written.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
    written.discard(0)
    return written


def _without_hit(
    block_ids: Sequence[Sequence[int]], num_computed_tokens: int, groups: Sequence[KeyGroup]
) -> Iterator[int]:
    """Yield the blocks of a table after a request's hit; hit blocks are shared, and never written."""
    for group in groups:
        blocks = block_ids[group.group_idx]
        is_full = group.sliding_window_size_in_chunks is None
        yield from blocks[num_computed_tokens // group.tokens_per_block :] if is_full else blocks
