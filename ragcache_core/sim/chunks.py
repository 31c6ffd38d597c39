"""Chunk reuse in virtual time: documents' KV at other positions than it was computed at (Cache-Craft)."""

from __future__ import annotations

import math
from itertools import accumulate

from ragcache_core.chunk.scores import num_selected
from ragcache_core.policy import PrefillCost, make_policy
from ragcache_core.sim.engine import NO_REUSE, Reuse
from ragcache_core.sim.options import INFINITE, SimulationOptions
from ragcache_core.sim.traces.trace import TracedRequest
from ragcache_core.tree import KnowledgeTree, PathSegment, TreeNode
from ragcache_core.types import Tier

_UNBOUNDED = 1 << 62


class SimulatedChunks:
    """Chunks on host and disk, one version each, reused in any prompt that contains them.

    Of each reused document the same fraction is recomputed. A document that was computed is stored, where the policy
    has room for it. One that was cached exactly in part is stored as the engine does: if half of it was computed, or
    all of it in a request that reuses others.
    """

    def __init__(self, options: SimulationOptions, cost: PrefillCost, *, page_tokens: int = 1) -> None:
        """Start empty; a chunk takes whole pages of its tier.

        Args:
            options: with ``chunk_reuse``, the fraction that is recomputed.
            cost: of a prefill.
            page_tokens: tokens in a page.
        """
        assert options.chunk_reuse is not None
        self._fraction = options.chunk_reuse
        self._system_tokens = options.system_tokens
        self._page_tokens = page_tokens
        self._store = _ChunkStore(options, cost)

    def serve(self, request: TracedRequest, num_exact_tokens: int) -> Reuse:
        """Return a request's reused chunks after its ``num_exact_tokens``, and store those that it computes."""
        ends = list(accumulate(request.doc_tokens, initial=self._system_tokens))[1:]
        ahead = {i: min(request.doc_tokens[i], end - num_exact_tokens) for i, end in enumerate(ends)}
        ahead = {i: num_tokens for i, num_tokens in ahead.items() if num_tokens > 0}
        selected = {i: num_selected(self._fraction, num_tokens) for i, num_tokens in ahead.items()}
        tiers: dict[int, Tier] = {}
        for i, num_tokens in ahead.items():
            chunk = self._chunk(request, i)
            if selected[i] < num_tokens and self._store.has(chunk):
                tier = self._store.use(chunk)
                if tier is not None:  # otherwise earlier reads evicted it, and it is stored again
                    tiers[i] = tier
        for i, num_tokens in ahead.items():
            if i not in tiers and num_tokens >= request.doc_tokens[i] / (1 if tiers else 2):
                self._store.use(self._chunk(request, i))
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
        """Store the documents of a prompt in advance."""
        for place in range(len(request.doc_ids)):
            self._store.warm(self._chunk(request, place), expected_uses)

    def _chunk(self, request: TracedRequest, place: int) -> PathSegment:
        num_tokens = -(-request.doc_tokens[place] // self._page_tokens) * self._page_tokens
        doc_id = request.doc_ids[place]
        return PathSegment(((doc_id, num_tokens),), num_tokens, doc_id)


class _ChunkStore:
    """Two tiers of whole chunks; those evicted from the host are written to disk.

    The tree's first two tiers are used for the chunks' host memory and their disk.
    """

    def __init__(self, options: SimulationOptions, cost: PrefillCost) -> None:
        num_host, num_disk = options.chunk_tokens
        self._capacities = (_UNBOUNDED if options.policy == INFINITE else num_host, num_disk)
        self._num_tokens = [0, 0]
        self._cost = cost
        self._tree = KnowledgeTree(
            make_policy("lru" if options.policy == INFINITE else options.policy, cost),
            keeps_frequency=options.keeps_frequency,
            moves_down=True,
        )

    def has(self, chunk: PathSegment) -> bool:
        """Return whether a chunk is in any tier."""
        at = self._tree.locate(chunk.keys[0])
        return at is not None and bool(self._tree.resident_anywhere(at.node))

    def use(self, chunk: PathSegment) -> Tier | None:
        """Count a use of a chunk, move it to the host, and return its tier; ``None`` if it is new."""
        (node,) = self._tree.insert([chunk])
        tier = self._tier_of(node)
        self._tree.pin([node])
        self._tree.record_access([node], num_hit_units=int(tier is not None), cost_per_token_s=self._cost_s(node, tier))
        self._place(node)
        return tier

    def warm(self, chunk: PathSegment, expected_uses: int) -> None:
        """Store a chunk, ranked as if used that many times."""
        (node,) = self._tree.insert([chunk])
        tier = self._tier_of(node)
        self._tree.pin([node])
        self._tree.record_prefill(
            [node], num_hit_units=int(tier is not None), cost_per_token_s=self._cost_s(node, tier)
        )
        self._tree.seed([node], expected_uses=expected_uses)
        self._place(node)

    def _cost_s(self, node: TreeNode, tier: Tier | None) -> float:
        num_cached, num_new = (0, node.num_tokens) if tier is None else (node.num_tokens, 0)
        return self._tree.policy.cost_per_token_s(self._cost, num_cached, num_new)

    def _place(self, node: TreeNode) -> None:
        """Put a pinned chunk on the host, and unpin it."""
        if not self._tree.tiers[Tier.GPU].resident[node.id] and self._make_room(Tier.GPU, node.num_tokens):
            self._add(node, Tier.GPU)
        self._tree.unpin([node])

    def _make_room(self, tier: Tier, num_tokens: int, below: float = math.inf) -> bool:
        """Evict chunks with priority below ``below`` until ``num_tokens`` fit; return whether they do."""
        while self._num_tokens[tier] + num_tokens > self._capacities[tier]:
            node = self._tree.victim(tier)
            if node is None or not self._tree.tiers[tier].score(node, self._tree.num_requests) < below:
                return False
            if tier is Tier.GPU:
                self._move_down(node)
            self._tree.evict_node(node, tier)
            self._num_tokens[tier] -= node.num_tokens
        return True

    def _move_down(self, node: TreeNode) -> None:
        state = self._tree.tiers[Tier.HOST]
        is_selective = self._tree.policy.is_selective
        below = state.worth(node, self._tree.num_requests) if is_selective else math.inf
        if not state.resident[node.id] and self._make_room(Tier.HOST, node.num_tokens, below):
            self._add(node, Tier.HOST)

    def _add(self, node: TreeNode, tier: Tier) -> None:
        self._tree.add(node, 1, tier)
        self._num_tokens[tier] += node.num_tokens

    def _tier_of(self, node: TreeNode) -> Tier | None:
        """Return the tier of the chunks that contains a node."""
        host, disk, _ = self._tree.tiers
        if host.resident[node.id]:
            return Tier.HOST
        return Tier.DISK if disk.resident[node.id] else None
