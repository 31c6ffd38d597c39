"""The interface of a tier below host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
from ragcache_core.vllm_plugin.compat import (
    CacheHitSource,
    Locality,
    Medium,
    OffloadingConnectorStats,
    OffloadingEvent,
    ReqContext,
    ScheduleEndContext,
)
from ragcache_core.vllm_plugin.lower.jobs import EndedJob, TierJob


class LowerTier(ABC):
    """A tier below host memory.

    All methods run on the scheduler's thread. Only :meth:`drain`, :meth:`clear` and :meth:`shutdown` may wait for the
    tier, and each has a time limit.

    Attributes:
        name: of the tier, in statistics.
        source: what a hit of this tier counts as.
        medium, locality: by which requests choose the tiers that they load from.
        undeleted_reason: why it may hold deleted KV once it is out of service, with a hint.
        is_read_only: whether it stores nothing, so that :meth:`store` is not called.
    """

    name: str
    source: CacheHitSource
    medium: Medium | None = Medium.STORAGE
    locality: Locality | None = None
    undeleted_reason: str
    is_read_only: bool = False

    @abstractmethod
    def find(self, key: BlockKey, context: ReqContext) -> Sequence[BlockKey] | None:
        """Return the contiguous blocks to load for a request, from ``key`` on.

        None are returned where the tier does not hold ``key``, or loading takes longer than computing; ``None`` where
        the tier does not know yet.
        """

    @abstractmethod
    def store(self, job: TierJob) -> None:
        """Begin to copy blocks out of host memory, as far as the tier stores them."""

    @abstractmethod
    def load(self, job: TierJob) -> None:
        """Begin to copy blocks into host memory."""

    @abstractmethod
    def take_ended(self) -> Iterable[EndedJob]:
        """Return the jobs that ended since the last call, and abandon late ones."""

    @abstractmethod
    def drain(self) -> None:
        """End all uses of host memory; :meth:`take_ended` then returns all open jobs."""

    @abstractmethod
    def clear(self) -> None:
        """Stop using what is stored, and store nothing until the next start: the model's weights may have changed."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the tier's threads, and free its resources. Idempotent."""

    @abstractmethod
    def begin_request(self, context: ReqContext) -> None:
        """Record that a request has arrived."""

    @abstractmethod
    def end_request(self, context: ReqContext) -> None:
        """Record that a request has ended, and none of its blocks will be stored or loaded."""

    @abstractmethod
    def end_step(self, context: ScheduleEndContext) -> None:
        """Record the end of an engine step."""

    @property
    def has_pending_work(self) -> bool:
        """Whether an engine without requests continues stepping for this tier, besides for its jobs."""
        return False

    @property
    def newest_store(self) -> int | None:
        """The latest job that waits for the tier, if only stores wait and no step advances them; else ``None``."""
        return None

    @property
    def has_events(self) -> bool:
        """Whether there are KV events."""
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the KV events since the last call."""
        return ()

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return the tier's own statistics since the last call."""
        return None
