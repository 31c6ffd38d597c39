"""What the engine knows of a request, and counts over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ragcache_core.stats import ChunkReuseStats
from ragcache_core.types import Tier
from ragcache_core.wire import RequestMetadata

Key = bytes
"""vLLM's hash of a block, chained over everything before it."""


@dataclass(slots=True)
class RequestRecord:
    """What a request found, cost and waited for. Times are seconds of a monotonic clock.

    ``keys`` are its blocks' as vLLM has them: they grow with its answer. ``num_speculative_tokens`` of its prompt were
    computed before anybody asked for its answer; until then it was ``paused_s`` in all, and is now since
    ``preempted_s``. One that ``is_salted`` is a tenant's of its own: nobody else hears which documents it showed.
    """

    num_prompt_tokens: int
    arrived_s: float
    metadata: RequestMetadata
    keys: Sequence[Key]
    is_salted: bool = False
    num_tokens_by_tier: list[int] = field(default_factory=lambda: [0] * len(Tier))
    num_loaded_bytes: int = 0
    num_stored_bytes: int = 0
    num_speculative_tokens: int = 0
    is_confirmed: bool = False
    admitted_s: float | None = None
    first_token_s: float | None = None
    preempted_s: float | None = None
    paused_s: float = 0.0
    retained: Key | None = None
    chunk_reuse: ChunkReuseStats | None = None

    @property
    def is_speculative(self) -> bool:
        """Whether nobody has asked for its answer yet."""
        return self.metadata.speculation is not None and not self.is_confirmed

    @property
    def waited_s(self) -> float | None:
        """How long it waited for room, at first and whenever it was preempted unasked for; None before it got any."""
        return None if self.admitted_s is None else self.admitted_s - self.arrived_s + self.paused_s

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that did not have to be computed."""
        return sum(self.num_tokens_by_tier)

    def to_dict(self) -> dict[str, object]:
        """Return the body of the engine's per-request route; see ``client/stats/cache_stats.py``."""
        return {
            **{f"num_{tier.label}_tokens": self.num_tokens_by_tier[tier] for tier in Tier},
            "num_loaded_bytes": self.num_loaded_bytes,
            "num_stored_bytes": self.num_stored_bytes,
            "queue_s": None if self.admitted_s is None else self.admitted_s - self.arrived_s,
            "ttft_s": None if self.first_token_s is None else self.first_token_s - self.arrived_s,
            "is_speculative": self.metadata.speculation is not None,
            "is_confirmed": self.is_confirmed,
            **({} if self.chunk_reuse is None else {"chunk_reuse": self.chunk_reuse.to_dict()}),
        }


def arrived_s(now_s: float, age_s: float, last_step: tuple[float, float]) -> float:
    """Return since when a request waits that an engine takes in now, ``age_s`` after its server had it.

    An engine takes requests in between two steps. What came during the ``last_step``, given by its first and its last
    moment, waited for its end; the rest of its age was its way. The server's clock may differ: an age below 0 is none,
    and no age makes more of the wait than the step was long.
    """
    began_s, ended_s = last_step
    return now_s - max(0.0, ended_s - max(began_s, now_s - max(age_s, 0.0)))


@dataclass(slots=True)
class Counters:
    """What happened since the engine started.

    The tiers' tokens are those of every look-up; requests count once somebody has asked for them.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_tokens_by_tier: list[int] = field(default_factory=lambda: [0] * len(Tier))
    num_loaded_bytes: int = 0
    num_stored_bytes: int = 0
    num_ignored_metadata: int = 0
    num_reordered_prompts: int = 0
    num_corrupt_chunks: int = 0
    num_lost_chunks: int = 0
    num_dropped_chunks: int = 0

    def count(self, record: RequestRecord) -> None:
        """Count a request that somebody asked for, and that was admitted."""
        self.num_requests += 1
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_reordered_prompts += record.metadata.is_reordered

    def to_dict(self) -> dict[str, object]:
        """Return them by name, but for the tiers', which each tier reports."""
        counts = asdict(self)
        del counts["num_tokens_by_tier"]
        return counts
