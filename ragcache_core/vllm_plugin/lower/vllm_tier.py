"""vLLM's own lower tiers below RAGCache's host memory, called by its manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.cache.forgetting import OutOfReach
from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
from ragcache_core.vllm_plugin.compat import (
    LookupResult,
    OffloadingConnectorStats,
    OffloadingEvent,
    ReqContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TransferJob,
)
from ragcache_core.vllm_plugin.lower.jobs import EndedJob, TierJob
from ragcache_core.vllm_plugin.lower.tier import LowerTier

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.cache.forgetting import Forgetting
    from ragcache_core.vllm_plugin.cache.kv_groups import KVGroups


class VLLMTier(LowerTier):
    """One of vLLM's tiers that stores blocks, such as ``fs`` and ``obj``, by vLLM's keys. It knows no documents."""

    def __init__(self, tier: SecondaryTierManager, groups: KVGroups, forgetting: Forgetting) -> None:
        self.name, self.source = tier.tier_type, tier.cache_hit_source
        self.medium, self.locality = tier.medium, tier.locality
        self.undeleted_reason = f"vLLM's tier {self.name!r} may keep KV of its own: delete it there"
        self._tier = tier
        self._groups = groups
        self._open: dict[int, tuple[TierJob, TransferJob]] = {}
        self._dropped: list[EndedJob] = []
        forgetting.add_holder(OutOfReach(self.undeleted_reason))

    @staticmethod
    def check(type_name: str, kind: type[SecondaryTierManager]) -> None:
        """Raise ConfigError if a tier needs vLLM's own manager of tiers."""
        if kind.serve_external_requests is not SecondaryTierManager.serve_external_requests:
            raise ConfigError(
                f"secondary_tiers has the type {type_name!r}, which serves other engines out of vLLM's own manager of "
                "tiers: RAGCache has another. Use CacheConfig(shared=...), or vLLM without RAGCache's connector"
            )

    def find(self, key: BlockKey, context: ReqContext) -> Sequence[BlockKey] | None:
        result = self._tier.lookup(*self._groups.offload_keys([key]), context)
        if result in (LookupResult.RETRY, LookupResult.HIT_PENDING):
            return None
        return (key,) if result is LookupResult.HIT else ()

    def store(self, job: TierJob) -> None:
        detector = self._tier.bp_detector
        if detector is not None and not detector.should_store(len(job.keys)):
            self._dropped.append(EndedJob(job.number))
        else:
            self._tier.submit_store(self._begin(job, is_load=False))

    def load(self, job: TierJob) -> None:
        self._tier.submit_load(self._begin(job, is_load=True))

    def take_ended(self) -> Iterable[EndedJob]:
        ended, self._dropped = self._dropped, []
        for result in self._tier.get_finished_jobs():
            job, begun = self._open.pop(result.job_id)
            came = begun.keys if result.success else frozenset(result.successful_keys or ())
            is_loaded = [begun.is_promotion and key in came for key in begun.keys]
            ended.append(EndedJob(job.number, [*compress(job.keys, is_loaded)]))
            if not begun.is_promotion and result.success and self._tier.bp_detector is not None:
                self._tier.bp_detector.update(begun.submit_time, len(job.keys) * self._tier.block_size_bytes)
        return ended

    def begin_request(self, context: ReqContext) -> None:
        self._tier.on_new_request(context)

    def end_request(self, context: ReqContext) -> None:
        self._tier.on_request_finished(context)

    def end_step(self, context: ScheduleEndContext) -> None:
        self._tier.on_schedule_end(context)

    @property
    def has_pending_work(self) -> bool:
        return bool(self._tier.has_pending_work())

    def take_events(self) -> Iterable[OffloadingEvent]:
        events: Iterable[OffloadingEvent] = self._tier.take_events()
        return events

    def take_stats(self) -> OffloadingConnectorStats | None:
        return self._tier.get_stats()

    def drain(self) -> None:
        self._tier.drain_jobs()

    def clear(self) -> None:
        """Do nothing: ``undeleted_reason`` reports that the tier may keep KV of other weights."""

    def shutdown(self) -> None:
        self._tier.shutdown()

    def _begin(self, job: TierJob, *, is_load: bool) -> TransferJob:
        rows = np.array(job.rows, dtype=np.int32)
        begun = TransferJob(job.number, self._groups.offload_keys(job.keys), rows, is_load, job.context)
        self._open[job.number] = job, begun
        return begun
