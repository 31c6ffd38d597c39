"""What requests say of the KV that they leave, within what the operator allows; see ``hints.py``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence, Set

from ragcache_core.log import logger_of
from ragcache_core.tree import KnowledgeTree, Retention
from ragcache_core.types import DocId
from ragcache_core.vllm_plugin.cache.request_state import Counters, Key, RequestState

logger = logger_of(__name__)

_MAX_PREFETCHES = 64


class RequestHints:
    """Follows the hints of one engine's requests, each on its own tenant's KV.

    Args:
        tree: holds the KV.
        limit: returns how many units of a tenant, or None for all others, may be retained.
        tenant_of: returns the tenant of an owner of nodes.
        max_retain_s: the longest time for which a request's KV is retained.
        counters: count what is not followed.

    Attributes:
        prefetches: documents to be read ahead, with the tenant of the request; the latest 64.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        limit: Callable[[str | None], int],
        tenant_of: Callable[[str | None], str | None],
        max_retain_s: float,
        counters: Counters,
    ) -> None:
        self._retention = Retention(tree, limit, tenant_of)
        self._max_retain_s = max_retain_s
        self._counters = counters
        self.prefetches: deque[tuple[Sequence[DocId], str | None]] = deque(maxlen=_MAX_PREFETCHES)

    @property
    def num_retained_units(self) -> int:
        """Units of the retained prefixes, each once."""
        return self._retention.num_units

    def tick(self) -> None:
        """Do what is due at the tree's time."""
        self._retention.tick()

    def on_new_request(self, state: RequestState) -> None:
        """Take in a request that has arrived."""
        self._counters.num_unknown_hints += state.metadata.num_unknown_actions
        if documents := state.metadata.hints.prefetch:
            self.prefetches.append((documents, state.tenant))

    def on_access(self, keys: Sequence[Key]) -> None:
        """End the retention of what a prompt of these blocks goes on from."""
        self._retention.on_used(keys)

    def on_ended(self, state: RequestState, end: Key, first_computed: int) -> None:
        """Retain what a request leaves up to the block ``end``; demote what it computed of it."""
        hints = state.metadata.hints
        if hints.is_retained:
            retain_s = self._allowed_s(self._max_retain_s if hints.retain_s is None else hints.retain_s)
            if retain_s > 0.0 and not self._retention.retain(end, retain_s, hints.priority):
                self._counters.num_rejected_hints += 1
        if hints.end_s is not None:
            self._retention.demote_after(hints.end_s, end, first_computed)

    def on_forgotten(self, units: Set[Hashable]) -> None:
        """Retain nothing of blocks that are deleted next."""
        self._retention.on_forgotten(units)

    def _allowed_s(self, retain_s: float) -> float:
        if retain_s <= self._max_retain_s:
            return retain_s
        self._counters.num_clipped_hints += 1
        if self._counters.num_clipped_hints == 1:
            logger.warning(
                "RC-HINT-CLIPPED: a request asks for retain_s %g, and CacheConfig.max_retain_s is %g: its KV is "
                "retained for that long. Further ones are counted",
                retain_s,
                self._max_retain_s,
            )
        return self._max_retain_s
