"""Eviction order of the versions of chunks: the tiers' policies on a knowledge tree of one level.

Reused KV does not depend on what stands before it now, so every version is a child of the root with one unit. It is
evicted among all versions of all chunks (Cache-Craft §3.3), by the tiers' policy in place of f_r: simulated, f_r
computes less than that only while the popular documents stay the same (docs/evaluate/chunk-reuse.md).
"""

from __future__ import annotations

from typing import cast

from ragcache_core.chunk.types import ChunkKey, ChunkVariant, ContextKey
from ragcache_core.policy import PrefillCost
from ragcache_core.tree import KnowledgeTree, PathSegment, TreeNode
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.chunks.manager.entries import Variant

_TIERS = (Tier.HOST, Tier.DISK)
_ONLY_UNIT = 0b1
"""A version is a node of one unit."""

VersionKey = tuple[ChunkKey, ContextKey]
"""A chunk, and the context of its capture."""


class ChunkEviction:
    """Counts the uses of versions, and returns the lowest-ranked one of a tier.

    Args:
        tree: of its own, with the tiers' policy.
        prefill_cost: what it costs to compute a chunk.
    """

    def __init__(self, tree: KnowledgeTree, prefill_cost: PrefillCost) -> None:
        self._tree = tree
        self._prefill_cost = prefill_cost

    def record_hit(self, variant: ChunkVariant) -> None:
        """Count a request that reuses a version."""
        self._tree.record_access([self._node_of(variant)], num_hit_units=1, cost_per_token_s=0.0)

    def record_miss(self, version: VersionKey, num_tokens: int) -> None:
        """Count a request that computes a chunk."""
        cost_s = self._tree.policy.cost_per_token_s(self._prefill_cost, 0, num_tokens)
        self._tree.record_access([self._node(version, num_tokens)], num_hit_units=0, cost_per_token_s=cost_s)

    def seed(self, version: VersionKey, num_tokens: int, expected_uses: int) -> None:
        """Rank a version as if it had been used ``expected_uses`` times."""
        self._tree.seed([self._node(version, num_tokens)], expected_uses=expected_uses)

    def frequency(self, variant: ChunkVariant) -> float:
        """Return how often a version was used or computed, as far as remembered."""
        location = self._tree.locate((variant.key, variant.statistics.context))
        return 0.0 if location is None else float(location.node.frequency)

    def restore(self, variant: ChunkVariant, frequency: float) -> None:
        """Restore a version's frequency from before the start."""
        cost_s = self._tree.policy.cost_per_token_s(self._prefill_cost, 0, variant.num_tokens)
        self._tree.restore(self._node_of(variant), frequency=round(frequency), cost_s=cost_s)

    def place(self, stored: Variant) -> None:
        """Update the tiers of a version, and whether it is evictable there."""
        node = self._node_of(stored.variant)
        for tier in _TIERS:
            if not stored.is_in(tier):
                self._leave(node, tier)
                continue
            if stored.num_idle_pages(tier):
                self._tree.release_units(node, _ONLY_UNIT, tier)
            else:
                self._tree.acquire_units(node, _ONLY_UNIT, tier)
            self._tree.add(node, _ONLY_UNIT, tier)

    def drop(self, stored: Variant) -> None:
        """Remove a deleted version that is in use: another one of its context may be stored before it is gone."""
        for tier in _TIERS:
            self._leave(self._node_of(stored.variant), tier)

    def lowest(self, tier: Tier) -> VersionKey:
        """Return the version that ``tier`` evicts next; it is idle there."""
        node = self._tree.victim(tier)
        assert node is not None
        return cast("VersionKey", node.keys[0])

    def record_eviction(self, variant: ChunkVariant, tier: Tier) -> None:
        """Record that ``tier`` evicts a version."""
        self._tree.evict_node(self._node_of(variant), tier)

    def _leave(self, node: TreeNode, tier: Tier) -> None:
        self._tree.release_units(node, _ONLY_UNIT, tier)
        self._tree.remove(node, _ONLY_UNIT, tier)

    def _node_of(self, variant: ChunkVariant) -> TreeNode:
        return self._node((variant.key, variant.statistics.context), variant.num_tokens)

    def _node(self, version: VersionKey, num_tokens: int) -> TreeNode:
        key, context = version
        return self._tree.insert([PathSegment((version,), num_tokens, (key + context).hex())])[0]
