"""The shared tier: a store below host memory that engines on several machines read and write.

An engine loads KV that another one has computed. Engines do not track the store's contents: a request that needs more
than its engine's own tiers hold waits while the store is queried, once. The store decides what it evicts, and when.

All methods run on the scheduler's thread and wait for nothing (:class:`SharedIO`). Any error of the store, or in its
data, is a miss: a chunk is used only if its checksum matches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ragcache_core.chunkstore.remote import open_remote
from ragcache_core.chunkstore.sealing import load_keys
from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.cache.forgetting import Forgotten, Freed
from ragcache_core.vllm_plugin.cache.kv_groups import offload_key, unit_of
from ragcache_core.vllm_plugin.compat import (
    CacheHitSource,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TransferJob,
)
from ragcache_core.vllm_plugin.identity import shared_identity
from ragcache_core.vllm_plugin.offload.host_tier import is_adapted
from ragcache_core.vllm_plugin.shared.io import LOAD_TIMEOUT_S, Inquiry, PutJob, SharedIO
from ragcache_core.vllm_plugin.shared.objects import Objects

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.disk.jobs import LoadJob
    from ragcache_core.vllm_plugin.offload.spec import RAGCacheSpec

logger = logger_of(__name__)

_SHORTEST_LIMIT_S = 0.2


@dataclass(slots=True)
class _Asked:
    """A request's query to the store, and the chunks that it may load.

    Attributes:
        first: the first block that its own engine does not have.
        found: names of the chunks to load; None until the store has answered.
        limit_s: how long a load of them may take.
    """

    inquiry: Inquiry
    first: int
    found: set[str] | None = None
    limit_s: float = LOAD_TIMEOUT_S


@dataclass(slots=True)
class _Load:
    job: LoadJob
    request_id: str
    keys: list[OffloadKey]
    computed_s: dict[str, float]
    limit_s: float


class SharedTier(SecondaryTierManager):
    """What vLLM's tiering offload asks of a tier below host memory, over a store of several engines."""

    medium: ClassVar[Medium] = Medium.STORAGE
    cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: RAGCacheSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        url: str,
        ttl_s: float | None = None,
        key_file: str | None = None,
        backpressure_detector: Any = None,
    ) -> None:
        """Begin to use the store at ``url``, which need not answer yet.

        Raises:
            ConfigError: it cannot be used at all, nothing tells the model's weights from others, or there is no key in
                ``key_file``.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        assert offloading_spec.controller is not None
        self.locality = Locality.REMOTE
        self.url = url
        self._controller = offloading_spec.controller
        self._groups = offloading_spec.controller.groups
        keys = load_keys(None if key_file is None else Path(key_file))
        self._objects = Objects(shared_identity(offloading_spec.config), self.block_size_bytes, keys)
        self._io = SharedIO(open_remote(url, ttl_s=ttl_s), self._objects, primary_kv_view)
        self._is_enabled = True
        self._asked: dict[str, _Asked] = {}
        self._loads: dict[int, _Load] = {}
        self._num_loading = 0
        self._puts: dict[int, PutJob] = {}
        self._done: list[int] = []
        self._counted = (0, 0, 0, 0)
        self._controller.shared = self
        self._controller.forgetting.add_holder(self)
        logger.info("RAGCache shares KV at %s, under %s", url, self._objects.prefix)

    # vLLM's SecondaryTierManager

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._is_used or is_adapted(req_context):
            return LookupResult.MISS
        asked = self._asked.get(req_context.req_id)
        if asked is None and (asked := self._ask(key, req_context)) is None:
            return LookupResult.MISS
        if asked.found is None:
            if not self._io.is_answered(asked.inquiry):
                return LookupResult.RETRY
            self._weigh(asked, req_context.req_id)
        assert asked.found is not None
        return LookupResult.HIT if self._name_of(key) in asked.found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        chunks = []
        if self._is_used and not is_adapted(job_metadata.req_context):
            for key, chunk_id in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
                at = self._controller.tree.locate(unit_of(key))
                if at is not None and key not in self._controller.leaving:
                    computed_s = self._controller.tree.now_s if at.node.stored_s is None else at.node.stored_s
                    chunks.append((self._name_of(key), int(chunk_id), computed_s))
        job = self._io.put(chunks)
        if job is None:
            self._done.append(job_metadata.job_id)
        else:
            self._puts[job_metadata.job_id] = job

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys, request_id = list(job_metadata.keys), job_metadata.req_context.req_id
        job, computed_s = self._io.load(
            job_metadata.job_id, list(map(self._name_of, keys)), [int(chunk_id) for chunk_id in job_metadata.chunk_ids]
        )
        asked = self._asked.get(request_id)
        limit_s = LOAD_TIMEOUT_S if asked is None else asked.limit_s
        self._loads[job_metadata.job_id] = _Load(job, request_id, keys, computed_s, limit_s)
        self._num_loading += len(keys)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        ended = [job_id for job_id, job in self._puts.items() if self._io.is_put(job)]
        for job_id in ended:
            del self._puts[job_id]
        results = [JobResult(job_id, success=True) for job_id in (*self._done, *ended)]
        self._done.clear()
        loaded = [load for load in self._loads.values() if self._io.is_loaded(load.job, load.limit_s)]
        results += map(self._finish, loaded)
        self._count()
        return results

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._count()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._asked.pop(req_context.req_id, None)

    def has_pending_work(self) -> bool:
        """Return whether an engine without requests goes on stepping, to report the work of the threads."""
        return self._io.is_writing or self._figures() != self._counted

    def drain_jobs(self) -> None:
        """Stop all use of host memory by the tier: loads and stores in flight are abandoned."""
        self._abandon_loads()
        for job in self._puts.values():
            job.abandon()

    def shutdown(self) -> None:
        self._abandon_loads()
        self._io.close()

    def clear(self) -> None:
        """Stop using the store until the next start: the model's weights may have changed.

        Its chunks belong to the old weights, and are valid for engines that have them.
        """
        self._is_enabled = False
        self.drain_jobs()

    @property
    def num_open_jobs(self) -> int:
        """Loads and stores that vLLM does not know the end of yet."""
        return len(self._loads) + len(self._puts)

    # What the controller reports

    @property
    def is_serving(self) -> bool:
        """Whether the store is queried now: it is in use, and has not failed lately."""
        return self._is_used and not self._io.reads.is_resting

    @property
    def num_known_blocks(self) -> int:
        """Blocks that this engine has put or found there."""
        return self._io.num_known

    # A holder of what may be forgotten

    def forget(self, forgotten: Forgotten) -> Freed:
        """Have the store delete all units that this engine knows.

        Another engine, or this one before a restart, may have stored any of them, so all are deleted. Only the deletion
        of expired KV is not retried: it is a miss wherever it is read.
        """
        groups = (self._groups.main, *self._groups.others)
        names = [self._name_of(OffloadKey(offload_key(unit, group))) for unit in forgotten.units for group in groups]
        gone = set(names)
        for asked in self._asked.values():
            if asked.found is not None:
                asked.found -= gone
        if names:
            self._io.delete(names, is_retried=forgotten.is_all or bool(forgotten.doc_ids))
        return Freed()

    def num_left(self) -> int:
        """Return how many objects are not deleted yet."""
        return self._io.num_undeleted

    def why_left(self) -> str | None:
        """Return why the store may keep deleted KV: it cannot delete it now."""
        if self._io.is_given_up:
            return (
                f"the shared store {self.url} has not deleted what was forgotten, and is used no more: before the next "
                f"start, delete what begins with {self._objects.prefix}"
            )
        if not (num_left := self._io.num_undeleted) or not self._io.writes.is_resting:
            return None
        return (
            f"the shared store {self.url} does not answer, and may have {num_left} chunks: they are deleted when it "
            f"does, while this engine runs; else delete what begins with {self._objects.prefix}"
        )

    # Inside

    @property
    def _is_used(self) -> bool:
        return self._is_enabled and not self._io.is_given_up

    def _abandon_loads(self) -> None:
        for load in self._loads.values():
            load.job.abandon()

    def _name_of(self, key: OffloadKey) -> str:
        return self._objects.name_of(self._groups.chunk_name(key))

    def _ask(self, key: OffloadKey, req_context: ReqContext) -> _Asked | None:
        """Begin to query a request's blocks from ``key`` on; None for a prompt without a request."""
        state = self._controller.state_of(req_context.req_id)
        end = req_context.get_offload_key_position(key)
        if state is None or end is None:
            return None
        size = self._controller.tokens_per_block
        first = max(end // size - 1, 0)
        units = state.keys[first : state.num_prompt_tokens // size]
        chain, *beside = (
            [self._name_of(OffloadKey(offload_key(unit, group))) for unit in units]
            for group in (self._groups.main, *self._groups.others)
        )
        asked = self._asked[req_context.req_id] = _Asked(self._io.ask(chain, beside), first)
        return asked

    def _weigh(self, asked: _Asked, request_id: str) -> None:
        """Take over the store's answer, or none of it if recomputing is faster than loading.

        The measured times of both decide; if one of them is unknown, the chunks are loaded.
        """
        inquiry, state = asked.inquiry, self._controller.state_of(request_id)
        found = inquiry.found if inquiry.is_finished else set()
        asked.found = {name for name in found if not self._io.is_leaving(name)}
        if not asked.found or state is None or not self._controller.is_profiled:
            return
        saved_s = self._controller.saved_s(state, asked.first, sum(name in asked.found for name in inquiry.chain))
        load_s = self._io.load_s(self._num_loading + len(asked.found))
        if load_s is not None and load_s > saved_s:
            asked.found = set()
        asked.limit_s = min(max(saved_s, _SHORTEST_LIMIT_S), LOAD_TIMEOUT_S)

    def _finish(self, load: _Load) -> JobResult:
        del self._loads[load.job.job_id]
        self._num_loading -= len(load.keys)
        names = [name for part in load.job.parts for name, found in zip(part.keys, part.found, strict=True) if found]
        here = {name.decode() for name in names}
        max_age = self._controller.settings.max_age
        oldest_s = None if max_age is None else self._controller.tree.now_s - max_age
        loaded = []
        for key in load.keys:
            name = self._name_of(key)
            if name not in here:
                continue
            if oldest_s is not None and load.computed_s.get(name, 0.0) < oldest_s:
                self._io.unlearn([name])  # the recomputed chunk replaces it in the store, too
                continue
            loaded.append(key)
            if (at := self._controller.tree.locate(unit_of(key))) is not None and name in load.computed_s:
                self._controller.tree.make_older(at.node, load.computed_s[name])
        asked = self._asked.get(load.request_id)
        if asked is not None and asked.found is not None and len(loaded) < len(load.keys):
            asked.found -= {self._name_of(key) for key in load.keys} - {self._name_of(key) for key in loaded}
        return JobResult(
            load.job.job_id,
            success=len(loaded) == len(load.keys),
            successful_keys=loaded,
            transfer_bytes=len(loaded) * self.block_size_bytes,
        )

    def _figures(self) -> tuple[int, int, int, int]:
        io = self._io
        return io.num_damaged, io.num_dropped, io.reads.num_failures + io.writes.num_failures, io.num_known

    def _count(self) -> None:
        """Add the threads' new counts to the engine's counters."""
        counters, now = self._controller.counters, self._figures()
        if now != self._counted:
            damaged, dropped, failures, _ = (new - old for new, old in zip(now, self._counted, strict=True))
            counters.num_corrupt_chunks += damaged
            counters.num_shared_corrupt_chunks += damaged
            counters.num_dropped_chunks += dropped
            counters.num_shared_dropped_chunks += dropped
            counters.num_shared_failures += failures
            self._counted = now
            self._controller.record_change()
