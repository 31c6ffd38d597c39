"""The state of a request in the engine, and counts over all requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from ragcache_core.stats import ChunkReuseStats
from ragcache_core.tree import PathSegment
from ragcache_core.types import DocId, Origin, SegmentKind
from ragcache_core.wire import RequestMetadata

Key = bytes
"""vLLM's hash of a block, chained over everything before it."""


@dataclass(slots=True, eq=False)
class WatchedNode:
    """A node on the prefixes of queued requests, with the cached tokens from its start to its end.

    ``num_tokens`` are those before it and its own that are cached, which count where all before it ``is_whole``. One
    object serves all ``requests``: a block that is loaded of a document which hundreds wait for changes one number.
    """

    node_id: int
    num_units: int
    num_tokens_before: int
    num_tokens: int
    is_whole: bool
    before: WatchedNode | None
    requests: set[RequestState] = field(default_factory=set)

    @property
    def counts(self) -> bool:
        """Whether the whole prefix before it is cached."""
        before = self.before
        while before is not None and before.is_whole:
            before = before.before
        return before is None


@dataclass(slots=True, eq=False)
class RequestState:
    """A request from its arrival to its end. Times are seconds of a monotonic clock.

    The :class:`~ragcache_core.vllm_plugin.cache.controller.CacheController` makes, owns and drops it. The cache's parts
    keep their data on the request in it, which is dropped with it.

    Attributes:
        keys: vLLM's keys of its blocks: they grow with its answer.
        is_salted: it shares no block with other requests, and its documents are in no report.
        tenant: the tenant, or None.
        segments: its prompt's blocks, as the tree has them: by document.
        num_local_tokens: prompt tokens hit on the GPU by the look-up before its admission.
        num_speculative_tokens: prompt tokens computed before it was confirmed.
        num_wasted_tokens: those of them that count as wasted now.
        is_used: it is a prefill, and a real request came whose prompt begins with its blocks.
        preempted_s, paused_s: since when it is preempted while speculative, and how long it was so before.
        is_audit: it is the engine's own, and repeats an answer: no statistics count it.
        retained: the last block of its path, which the tree keeps for it.
        tail_ids: ids of documents that begin in its prompt's last block, which is not full.
        prefill_s: how long its prefill takes with its cached blocks, as of its arrival or admission.
        first_private: its first block that no other request may use: its KV is approximate, or deleted from the cache.
        apart: keys of its prompt's blocks, approximate ones included, by which requests with the same settings hit
            them; empty where none is approximate, or its KV is deleted from the cache.
        retained_apart: the last of them that is retained.
        has_forgotten: it has KV of a deleted document.
        loaded_s: when KV of lower tiers was last copied into its blocks.
        is_queued: it waits for admission, and its prefix is watched.
        watched: the nodes of its path while it is queued.
        turn: its number in its conversation, as known at its arrival.
        is_answer_stored: the tiers below store its answer as well.
        num_answer_end_blocks: blocks of its prompt and answer, if some of the answer's are cached but not yet in the
            tree; else 0.
    """

    request_id: str
    num_prompt_tokens: int
    arrived_s: float
    metadata: RequestMetadata
    keys: Sequence[Key]
    is_salted: bool = False
    tenant: str | None = None
    segments: Sequence[PathSegment] = ()
    is_audit: bool = False
    num_local_tokens: int = 0
    num_tokens_by_tier: list[int] = field(default_factory=lambda: [0] * len(Origin))
    num_loaded_bytes: int = 0
    num_stored_bytes: int = 0
    num_speculative_tokens: int = 0
    num_wasted_tokens: int = 0
    is_used: bool = False
    is_confirmed: bool = False
    admitted_s: float | None = None
    loaded_s: float | None = None
    first_token_s: float | None = None
    preempted_s: float | None = None
    paused_s: float = 0.0
    retained: Key | None = None
    tail_ids: frozenset[DocId] = frozenset()
    prefill_s: float = 0.0
    first_private: int | None = None
    apart: Sequence[Key] = ()
    retained_apart: Key | None = None
    has_forgotten: bool = False
    is_queued: bool = False
    watched: list[WatchedNode] = field(default_factory=list)
    chunk_reuse: ChunkReuseStats | None = None
    turn: int = 1
    is_answer_stored: bool = False
    num_answer_end_blocks: int = 0

    @property
    def is_speculative(self) -> bool:
        """Whether it is speculative and not confirmed."""
        return self.metadata.speculation is not None and not self.is_confirmed

    @property
    def is_pending(self) -> bool:
        """Whether it is real, and its prefill has not ended."""
        return self.first_token_s is None and not self.is_speculative and not self.is_audit

    @property
    def waited_s(self) -> float | None:
        """Queue time in seconds, including preemptions while speculative; ``None`` until admitted."""
        return None if self.admitted_s is None else self.admitted_s - self.arrived_s + self.paused_s

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that were cached."""
        return sum(self.num_tokens_by_tier)

    @property
    def _load_s(self) -> float | None:
        """Seconds from admission until its loads ended; ``None`` without an asynchronous load."""
        return None if self.loaded_s is None or self.admitted_s is None else self.loaded_s - self.admitted_s

    def to_dict(self) -> dict[str, object]:
        """Return the response of the engine's per-request route; see ``client/stats/cache_stats.py``."""
        return {
            **{f"num_{origin.label}_tokens": self.num_tokens_by_tier[origin] for origin in Origin},
            "num_loaded_bytes": self.num_loaded_bytes,
            "num_stored_bytes": self.num_stored_bytes,
            "queue_s": None if self.admitted_s is None else self.admitted_s - self.arrived_s,
            "load_s": self._load_s,
            "ttft_s": None if self.first_token_s is None else self.first_token_s - self.arrived_s,
            "is_speculative": self.metadata.speculation is not None,
            "is_confirmed": self.is_confirmed,
            "num_prompt_tokens": self.num_prompt_tokens,
            "documents": [
                {
                    "id": None if self.is_salted else s.doc_id,
                    "start": s.start,
                    "end": s.end if s.text_end is None else s.text_end,
                }
                for s in self.metadata.segments
                if s.kind is SegmentKind.DOCUMENT and s.doc_id is not None and not self.has_forgotten
            ],
            **({} if self.tenant is None else {"tenant": self.tenant}),
            **({} if self.chunk_reuse is None else {"chunk_reuse": self.chunk_reuse.to_dict()}),
        }


def arrived_s(now_s: float, age_s: float, last_step: tuple[float, float]) -> float:
    """Return the arrival time at the server of a request that reaches the engine core after ``age_s`` seconds.

    An engine core takes requests in between two steps. What came during the ``last_step``, given by its first and its
    last moment, waited for its end; the rest of its age was its way. The server's clock may differ: an age below 0 is
    none, and no age makes more of the wait than the step was long.
    """
    began_s, ended_s = last_step
    return now_s - max(0.0, ended_s - max(began_s, now_s - max(age_s, 0.0)))


@dataclass(slots=True)
class Counters:
    """Counts of events since the engine started.

    The tokens by tier, or other origin, are those of every look-up; requests count once they are real: sent as such, or
    confirmed. Corrupt and dropped chunks are those of the disk and of the shared store, which are counted apart, too.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_tokens_by_tier: list[int] = field(default_factory=lambda: [0] * len(Origin))
    num_loaded_bytes: int = 0
    num_stored_bytes: int = 0
    num_ignored_metadata: int = 0
    num_reordered_prompts: int = 0
    num_followup_turns: int = 0
    num_clipped_hints: int = 0
    num_rejected_hints: int = 0
    num_unknown_hints: int = 0
    num_corrupt_blocks: int = 0
    num_lost_blocks: int = 0
    num_dropped_blocks: int = 0
    num_shared_failures: int = 0
    num_shared_pending_blocks: int = 0
    num_shared_corrupt_blocks: int = 0
    num_shared_dropped_blocks: int = 0

    def count(self, state: RequestState) -> None:
        """Count a real request that was admitted."""
        self.num_requests += 1
        self.num_prompt_tokens += state.num_prompt_tokens
        self.num_reordered_prompts += state.metadata.is_reordered

    def to_dict(self) -> dict[str, object]:
        """Return the counts by name, without those of tiers."""
        return {name: getattr(self, name) for name in _REPORTED}


_OF_A_TIER = {"num_tokens_by_tier", "num_shared_corrupt_blocks", "num_shared_dropped_blocks"}
_REPORTED = tuple(each.name for each in fields(Counters) if each.name not in _OF_A_TIER)
