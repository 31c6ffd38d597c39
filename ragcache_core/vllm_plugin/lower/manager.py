"""Host memory and the tiers below it, behind the interface of vLLM's offloading.

::

    GPU  <-- vLLM's copies -->  host memory  <-- jobs of tiers -->  disk, shared store, ...

A block is stored in every lower tier once host memory has it, but not in read-only ones. A block that only a lower tier
has is loaded into host memory when a request is looked up; until it is there, the look-up is to be repeated. Host
memory keeps the rows of a job until the job has ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.compat import (
    CacheHitSource,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    ReqContext,
    RequestOffloadingContext,
)
from ragcache_core.vllm_plugin.lower.jobs import EndedJob, TierJob
from ragcache_core.vllm_plugin.lower.stats import JobStats
from ragcache_core.vllm_plugin.offload.host_tier import HostTier

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
    from ragcache_core.vllm_plugin.compat import (
        LoadStoreSpec,
        OffloadingConnectorStats,
        PrepareStoreOutput,
        ScheduleEndContext,
    )
    from ragcache_core.vllm_plugin.lower.tier import LowerTier

logger = logger_of(__name__)


class _OpenJob(NamedTuple):
    tier: int
    job: TierJob
    is_load: bool
    began_s: float


class TierManager(OffloadingManager):
    """Host memory and the tiers below it.

    A copy's blocks come in the order of their prefix, in which a run of one tree node is one step.

    Args:
        host: our host tier, or vLLM's manager of host memory where the tree cannot follow the model.
        lower: the tiers below it, the nearest first; none below vLLM's manager.
        block_bytes: bytes of a block.

    Attributes:
        host, lower: these.
    """

    def __init__(self, host: HostTier | OffloadingManager, lower: list[LowerTier], block_bytes: int) -> None:
        assert not lower or isinstance(host, HostTier)
        self.host = host
        self.lower = lower
        num_rows = host.num_rows if isinstance(host, HostTier) else 0
        self._stats = JobStats([tier.name for tier in lower], num_rows, block_bytes)
        self._jobs: dict[int, _OpenJob] = {}
        self._num_jobs = 0
        self._has_polled = False
        self._to_load: dict[tuple[int, str], tuple[ReqContext, list[BlockKey], list[int]]] = {}
        self._sources: dict[str, dict[BlockKey, CacheHitSource]] = {}
        self._copies: Counter[str] = Counter()  # under way, by request
        self._finished: dict[str, ReqContext] = {}
        self._spoiled: set[BlockKey] = set()

    # Look-ups and loads

    def leading(self, keys: Sequence[BlockKey], context: ReqContext) -> int | None:
        """Return how many of the leading blocks can be loaded; ``None``: look up again in the next step.

        What host memory lacks is looked for in the tiers below, and loaded into it.
        """
        self._poll()
        at, are_ready = 0, True
        while at < len(keys):
            num_found, are_written = self._host_tier.leading(keys[at:])
            at, are_ready = at + num_found, are_ready and are_written
            if at == len(keys) or not self.lower or self._look_below(keys[at], context) is LookupResult.MISS:
                break
            at, are_ready = at + 1, False  # go on: lower tiers are to be queried for all blocks
        return at if are_ready else None

    def lookup(self, key: BlockKey, req_context: ReqContext) -> LookupResult:
        self._poll()
        result: LookupResult = self.host.lookup(key, req_context)
        return result if result is not LookupResult.MISS or not self.lower else self._look_below(key, req_context)

    def get_load_source(self, key: BlockKey, req_context: ReqContext) -> CacheHitSource:
        """Return the tier from which a request's block was loaded."""
        return self._sources.get(req_context.req_id, {}).get(key) or self.host.get_load_source(key, req_context)

    def load_sources(self, keys: Sequence[BlockKey], context: ReqContext) -> list[CacheHitSource]:
        """Return :meth:`get_load_source` of each block."""
        sources = self._sources.get(context.req_id)
        if sources is None:
            return [CacheHitSource.HOST] * len(keys)
        return [sources.get(key, CacheHitSource.HOST) for key in keys]

    def prepare_load(self, keys: Collection[BlockKey], req_context: ReqContext) -> LoadStoreSpec:
        self._copies[req_context.req_id] += 1
        return self.host.prepare_load(keys, req_context)

    def complete_load(self, keys: Collection[BlockKey], req_context: ReqContext) -> None:
        self.host.complete_load(keys, req_context)
        self._end_copy(req_context.req_id)

    def touch(self, keys: Collection[BlockKey], req_context: ReqContext) -> None:
        self.host.touch(keys, req_context)

    # Stores

    def prepare_store(self, keys: Collection[BlockKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        self._poll()  # what has ended can be evicted
        output: PrepareStoreOutput | None = self.host.prepare_store(keys, req_context)
        if output is not None and output.keys_to_store:
            self._copies[req_context.req_id] += 1
        return output

    def complete_store(self, keys: Collection[BlockKey], req_context: ReqContext, success: bool = True) -> None:
        is_spoiled = bool(self._spoiled) and not self._spoiled.isdisjoint(keys)
        self._spoiled.difference_update(keys)
        is_stored = success and not is_spoiled
        # Computed at each store: the connector clears ``lower`` once it knows that workers have memory of their own.
        stored_in = [(number, tier) for number, tier in enumerate(self.lower) if not tier.is_read_only]
        if stored_in and is_stored:
            self._host_tier.complete_store(keys, req_context, num_readers=len(stored_in))
            rows = self._host_tier.rows_of(keys)
            for number, tier in stored_in:
                tier.store(self._begin_job(number, req_context, keys, rows, is_load=False))
        else:
            self.host.complete_store(keys, req_context, is_stored)
        self._end_copy(req_context.req_id)

    def spoil(self, keys: Collection[BlockKey]) -> None:
        """Let pending stores of ``keys`` end as failed."""
        self._spoiled.update(keys)

    # Requests, steps and resets

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        context: RequestOffloadingContext = self.host.on_new_request(req_context)
        for tier in self.lower:
            tier.begin_request(req_context)
        return context

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.host.on_request_finished(req_context)
        self._finished[req_context.req_id] = req_context
        self._end_if_finished(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._poll()
        self._has_polled = False
        queued, self._to_load = self._to_load, {}
        for (number, _), (request, keys, rows) in queued.items():
            self.lower[number].load(self._begin_job(number, request, keys, rows, is_load=True))
        for tier in self.lower:
            tier.end_step(context)

    def has_pending_work(self) -> bool:
        return bool(self._jobs) or any(tier.has_pending_work for tier in self.lower)

    def take_events(self) -> Iterable[OffloadingEvent]:
        yield from self.host.take_events()
        for tier in self.lower:
            yield from tier.take_events()

    def get_stats(self) -> OffloadingConnectorStats | None:
        parts = (self.host.get_stats(), self._stats.take(), *(tier.take_stats() for tier in self.lower))
        reports = [part for part in parts if part is not None and not part.is_empty()]
        for other in reports[1:]:
            reports[0].aggregate(other)
        return reports[0] if reports else None

    def reset_cache(self) -> None:
        """Empty host memory, which no tier uses meanwhile; lower tiers keep their blocks."""
        for tier in self.lower:
            tier.drain()
        self._take_ended()
        assert not self._jobs, "a tier was drained, and has open jobs"
        self._to_load.clear()
        self._sources.clear()
        self._spoiled.clear()
        self._copies.clear()
        self._has_polled = False
        self.host.reset_cache()
        for request_id in list(self._finished):
            self._end_if_finished(request_id)

    def shutdown(self) -> None:
        """Shut down the lower tiers, then host memory, which stays mapped if one may still use it."""
        failures = []
        for tier in self.lower:
            try:
                tier.shutdown()
            except Exception as error:
                logger.exception("RC-TIER-UNCLOSED: RAGCache's %s could not be shut down", tier.name)
                failures.append(error)
        if failures:
            raise failures[0]
        self.host.shutdown()

    @property
    def num_open_jobs(self) -> int:
        """Number of open jobs of lower tiers."""
        return len(self._jobs)

    @property
    def needs_steps(self) -> bool:
        """Whether tiers have work that engine steps advance.

        Steps do not advance stores that only wait for a lower tier.
        """
        return self.has_pending_work() and self.newest_store is None

    @property
    def newest_store(self) -> int | None:
        """The latest job that waits for a lower tier, if no step advances any tier; else ``None``."""
        if any(tier.has_pending_work for tier in self.lower):
            return None
        newest = [self.lower[number].newest_store for number in {opened.tier for opened in self._jobs.values()}]
        waiting = [store for store in newest if store is not None]
        return max(waiting, default=None) if len(waiting) == len(newest) else None

    @property
    def has_events(self) -> bool:
        """Whether host memory or a lower tier has KV events."""
        return bool(getattr(self.host, "events", None)) or any(tier.has_events for tier in self.lower)

    # Inside

    @property
    def _host_tier(self) -> HostTier:
        assert isinstance(self.host, HostTier)
        return self.host

    def _look_below(self, key: BlockKey, context: ReqContext) -> LookupResult:
        is_unknown = False
        for number, tier in enumerate(self.lower):
            if not context.load_tier_filter.allows(tier.medium, tier.locality):
                continue
            found = tier.find(key, context)
            self._stats.on_lookup(number, None if found is None else len(found))
            if found:
                return LookupResult.HIT_PENDING if self._reserve(number, found, context) else LookupResult.MISS
            is_unknown |= found is None
        return LookupResult.RETRY if is_unknown else LookupResult.MISS

    def _reserve(self, tier: int, keys: Sequence[BlockKey], context: ReqContext) -> bool:
        """Reserve rows for the leading blocks that fit into host memory; return whether there are any.

        They are loaded at the end of the step, all of a request at once.
        """
        output = self._host_tier.prepare_write(keys, context)
        if output is None:
            self._stats.on_no_room()
            return False
        new = output.keys_to_store
        if not new:  # host memory has them by now
            return True
        self._sources.setdefault(context.req_id, {}).update(dict.fromkeys(new, self.lower[tier].source))
        _, to_load, rows = self._to_load.setdefault((tier, context.req_id), (context, [], []))
        to_load += new
        rows += output.store_spec.block_ids.tolist()
        return True

    def _begin_job(
        self, tier: int, context: ReqContext, keys: Collection[BlockKey], rows: list[int], *, is_load: bool
    ) -> TierJob:
        job = TierJob(self._num_jobs, context, keys if isinstance(keys, list) else list(keys), rows)
        self._num_jobs += 1
        self._jobs[job.number] = _OpenJob(tier, job, is_load, time.monotonic())
        self._stats.on_begun(tier, len(rows), is_load=is_load)
        return job

    def _poll(self) -> None:
        """Process ended jobs, once a step."""
        if not self._has_polled:
            self._has_polled = True
            self._take_ended()

    def _take_ended(self) -> None:
        for tier in self.lower:
            for ended in tier.take_ended():
                self._end_job(ended)

    def _end_job(self, ended: EndedJob) -> None:
        opened = self._jobs.pop(ended.number)
        job, is_load = opened.job, opened.is_load
        num_copied = len(ended.loaded) if is_load else len(job.keys)
        took_s = time.monotonic() - opened.began_s
        self._stats.on_ended(opened.tier, len(job.keys), num_copied, took_s, is_load=is_load)
        if not is_load:
            self._host_tier.complete_read(job.keys, job.context)
            return
        if ended.loaded:
            self._host_tier.complete_write(ended.loaded, job.context, True)
        if num_copied < len(job.keys):
            came, sources = frozenset(ended.loaded), self._sources.get(job.context.req_id, {})
            lost = [key for key in job.keys if key not in came]
            for key in lost:
                sources.pop(key, None)
            self._host_tier.complete_write(lost, job.context, False)

    def _end_if_finished(self, request_id: str) -> None:
        """Report the end of a request to the tiers, after its last store."""
        if request_id not in self._finished or request_id in self._copies:
            return
        context = self._finished.pop(request_id)
        self._sources.pop(request_id, None)
        for tier in self.lower:
            tier.end_request(context)

    def _end_copy(self, request_id: str) -> None:
        if self._copies[request_id] > 1:
            self._copies[request_id] -= 1
        else:
            del self._copies[request_id]
            self._end_if_finished(request_id)
