"""Stored chunks in virtual time: KV of documents, used behind others than it was computed behind (Cache-Craft)."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache_core.chunk.scores import num_selected
from ragcache_core.sim.cache import NO_REUSE, Reuse, SimulatedCache
from ragcache_core.sim.traces.trace import TracedRequest
from ragcache_core.types import Tier


class StoredChunks:
    """Chunks on the host and on disk, one variant of each, wherever a prompt shows them.

    Of each reused document the same ``fraction`` is computed again. A document that was computed is stored, where the
    policy has room for it; of one that was cached exactly in part, as the engine does: if half of it was computed, and
    all of it in a request that reuses others.

    Args:
        shelf: a cache of whole documents that keeps each by itself; what it calls its GPU is the chunks' host memory,
            and its host their disk.
        fraction: of a reused document, to be computed.
        system_tokens: of the prompt, before its documents.
        page_tokens: a chunk takes whole pages of its tier.
    """

    def __init__(self, shelf: SimulatedCache, fraction: float, *, system_tokens: int, page_tokens: int = 1) -> None:
        self._shelf = shelf
        self._fraction = fraction
        self._system_tokens = system_tokens
        self._page_tokens = page_tokens

    def serve(self, request: TracedRequest, number: int, num_exact_tokens: int) -> Reuse:
        """Return what a request reuses whose first ``num_exact_tokens`` are cached, and store what it computes."""
        ends = self._ends(request)
        ahead = {i: min(request.doc_tokens[i], end - num_exact_tokens) for i, end in enumerate(ends)}
        ahead = {i: num_tokens for i, num_tokens in ahead.items() if num_tokens > 0}
        selected = {i: num_selected(self._fraction, num_tokens) for i, num_tokens in ahead.items()}
        tiers: dict[int, Tier] = {}
        for i, num_tokens in ahead.items():
            alone = self._alone(request, i)
            if selected[i] < num_tokens and self._shelf.num_cached_tokens(alone):
                (tier,) = self._shelf.serve(alone, number).tiers
                if tier is not None:  # else what was read before it has pushed it out, and it is stored again
                    tiers[i] = Tier(tier + 1)
        for i, num_tokens in ahead.items():
            if i not in tiers and num_tokens >= request.doc_tokens[i] / (1 if tiers else 2):
                self._shelf.serve(self._alone(request, i), number)
        if not tiers:
            return NO_REUSE
        return Reuse(
            documents=frozenset(tiers),
            first_token=max(num_exact_tokens, min(ends[i] - request.doc_tokens[i] for i in tiers)),
            num_host_tokens=sum(ahead[i] - selected[i] for i, tier in tiers.items() if tier is Tier.HOST),
            num_disk_tokens=sum(ahead[i] - selected[i] for i, tier in tiers.items() if tier is Tier.DISK),
            num_recomputed_tokens=sum(selected[i] for i in tiers),
        )

    def warm(self, request: TracedRequest, expected_uses: int) -> None:
        """Store the documents of a prompt before anybody asks for them."""
        for place in range(len(request.doc_ids)):
            self._shelf.warm(self._alone(request, place), expected_uses)

    def _ends(self, request: TracedRequest) -> Sequence[int]:
        ends, end = [], self._system_tokens
        for num_tokens in request.doc_tokens:
            end += num_tokens
            ends.append(end)
        return ends

    def _alone(self, request: TracedRequest, place: int) -> TracedRequest:
        num_tokens = -(-request.doc_tokens[place] // self._page_tokens) * self._page_tokens
        return TracedRequest(request.arrival_s, (request.doc_ids[place],), (num_tokens,), 0, 1)
