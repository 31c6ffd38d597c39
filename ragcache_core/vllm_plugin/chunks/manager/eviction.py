"""Eviction order of chunks: the tiers' policies on a knowledge tree of one level.

A reusable chunk does not depend on its prefix, so every chunk is a child of the root with one unit. It is in a tier
while one of its versions is, and cannot be evicted while all of them are in use.
"""

from __future__ import annotations

from typing import cast

from ragcache_core.chunk.types import ChunkKey
from ragcache_core.policy import PrefillCost
from ragcache_core.tree import KnowledgeTree, PathSegment, TreeNode
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.chunks.manager.entries import StoredVariants, Variant

_TIERS = (Tier.HOST, Tier.DISK)
_ONLY_UNIT = 0b1
"""A chunk is a node of one unit."""


class ChunkEviction:
    """Counts the accesses of chunks, and returns the lowest-ranked one of a tier.

    Args:
        tree: of its own, with the tiers' policy.
        prefill_cost: what it costs to compute a chunk.
    """

    def __init__(self, tree: KnowledgeTree, prefill_cost: PrefillCost) -> None:
        self._tree = tree
        self._prefill_cost = prefill_cost

    def record_hit(self, key: ChunkKey, num_tokens: int) -> None:
        """Count a request that reuses a chunk."""
        self._tree.record_access([self._node(key, num_tokens)], num_hit_units=1, cost_per_token_s=0.0)

    def record_miss(self, key: ChunkKey, num_tokens: int) -> None:
        """Count a request that computes a chunk."""
        cost_s = self._tree.policy.cost_per_token_s(self._prefill_cost, 0, num_tokens)
        node = self._node(key, num_tokens)
        self._tree.record_access([node], num_hit_units=0, cost_per_token_s=cost_s)

    def seed(self, key: ChunkKey, num_tokens: int, expected_uses: int) -> None:
        """Rank a chunk as if it had been accessed ``expected_uses`` times."""
        self._tree.seed([self._node(key, num_tokens)], expected_uses=expected_uses)

    def frequency(self, key: ChunkKey) -> float:
        """Return a chunk's remembered access frequency."""
        location = self._tree.locate(key)
        return 0.0 if location is None else float(location.node.frequency)

    def restore(self, key: ChunkKey, num_tokens: int, frequency: float) -> None:
        """Restore a chunk's access frequency from before the start."""
        cost_s = self._tree.policy.cost_per_token_s(self._prefill_cost, 0, num_tokens)
        self._tree.restore(self._node(key, num_tokens), frequency=round(frequency), cost_s=cost_s)

    def place(self, chunk: StoredVariants) -> None:
        """Update the tiers of a chunk's variants, and whether one of them is evictable."""
        variants = chunk.stored.values()
        location = self._tree.locate(chunk.key)
        if location is None:
            if not variants:
                return
            node = self._node(chunk.key, chunk.num_tokens)
        else:
            node = location.node
        for tier in _TIERS:
            if not any(variant.is_in(tier) for variant in variants):
                self._tree.release_units(node, _ONLY_UNIT, tier)
                self._tree.remove(node, _ONLY_UNIT, tier)
                continue
            if any(variant.num_idle_pages(tier) for variant in variants):
                self._tree.release_units(node, _ONLY_UNIT, tier)
            else:
                self._tree.acquire_units(node, _ONLY_UNIT, tier)
            self._tree.add(node, _ONLY_UNIT, tier)

    def lowest(self, tier: Tier) -> ChunkKey:
        """Return the chunk from which ``tier`` evicts a version next; it has an idle one there."""
        node = self._tree.victim(tier)
        assert node is not None
        return cast("ChunkKey", node.keys[0])

    def record_eviction(self, chunk: StoredVariants, evicted: Variant, tier: Tier) -> None:
        """Record that ``tier`` evicts a version; with its last version a chunk is evicted."""
        if any(other is not evicted and other.is_in(tier) for other in chunk.stored.values()):
            return
        location = self._tree.locate(chunk.key)
        assert location is not None
        self._tree.evict_node(location.node, tier)

    def _node(self, key: ChunkKey, num_tokens: int) -> TreeNode:
        return self._tree.insert([PathSegment((key,), num_tokens, key.hex())])[0]
