"""What a full tier takes in: only what ranks above that which has to go for it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import groupby
from typing import NamedTuple

from ragcache_core.tree.node import EvictedUnit, TreeNode
from ragcache_core.tree.tiered_tree import TieredTree
from ragcache_core.types import Tier


class Admission(NamedTuple):
    """The first ``num_admitted`` units of those offered may enter the tier; ``evicted`` went for them."""

    num_admitted: int
    evicted: list[EvictedUnit]


def admit(
    tree: TieredTree, tier: Tier, keys: Sequence[Hashable], num_free: int, protected: Collection[Hashable]
) -> Admission:
    """Evict from ``tier`` for units that are offered to it, one node after the other, while others rank lower.

    Args:
        keys: of one path, in its order; none of them lies in the tier. What the tree does not know gets what is free:
            nothing goes for it.
        num_free: units that fit as it is.
        protected: keys of units that stay.
    """

    def node_of(key: Hashable) -> TreeNode | None:
        location = tree.locate(key)
        return None if location is None else location.node

    num_admitted = 0
    evicted: list[EvictedUnit] = []
    for node, offered in groupby(keys, node_of):
        num_offered = sum(1 for _ in offered)
        if num_offered > num_free and node is not None:
            num_missing = num_offered - num_free
            gone = tree.evict_up_to(tier, num_missing, protected, below=tree.tiers[tier].worth(node))
            evicted += gone
            num_free += len(gone)
        num_taken = min(num_offered, num_free)
        num_admitted += num_taken
        num_free -= num_taken
        if num_taken < num_offered:
            break
    return Admission(num_admitted, evicted)
