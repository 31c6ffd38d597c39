"""vLLM's own lower tiers below RAGCache's host memory, called by its manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.cache.forgetting import OutOfReach
from ragcache_core.vllm_plugin.compat import (
    LookupResult,
    OffloadingConnectorStats,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TransferJob,
)
from ragcache_core.vllm_plugin.lower.jobs import EndedJob, TierJob
from ragcache_core.vllm_plugin.lower.tier import LowerTier

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.cache.forgetting import Forgetting


class VLLMTier(LowerTier):
    """One of vLLM's tiers that stores blocks, such as ``fs`` and ``obj``. It knows no documents."""

    def __init__(self, tier: SecondaryTierManager, forgetting: Forgetting) -> None:
        self.name, self.source = tier.tier_type, tier.cache_hit_source
        self.medium, self.locality = tier.medium, tier.locality
        self.undeleted_reason = f"vLLM's tier {self.name!r} may keep KV of its own: delete it there"
        self._tier = tier
        self._open: dict[int, TransferJob] = {}
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

    def find(self, key: OffloadKey, context: ReqContext) -> Sequence[OffloadKey] | None:
        result = self._tier.lookup(key, context)
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
            job = self._open.pop(result.job_id)
            came = job.keys if result.success else frozenset(result.successful_keys or ())
            ended.append(EndedJob(job.job_id, [key for key in job.keys if key in came] if job.is_promotion else ()))
            if not job.is_promotion and result.success and self._tier.bp_detector is not None:
                self._tier.bp_detector.update(job.submit_time, len(job.keys) * self._tier.block_size_bytes)
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
        self._open[job.number] = begun = TransferJob(job.number, job.keys, rows, is_load, job.context)
        return begun
