"""A picture of the knowledge tree for people: its most used nodes, where they lie, and what they take there."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush, nlargest
from operator import attrgetter

from ragcache_core.tree import KnowledgeTree, TreeNode
from ragcache_core.types import Tier

MAX_NODES = 1000


def tree_view(tree: KnowledgeTree, block_bytes: Mapping[Tier, int], limit: int) -> dict[str, object]:
    """Return the ``limit`` nodes that are used most, each after the one before it on its path.

    ``block_bytes`` are those of a block in each tier that there is. Nodes that lie in no tier are left out with all
    behind them, and so is what requests with a salt have; ``num_left_out`` counts these too. It looks at the children
    of the nodes that it returns, and changes nothing.
    """
    nodes: list[dict[str, object]] = []
    seen: list[tuple[int, int, TreeNode]] = []
    gpu, host, disk = (tree.tiers[tier].resident for tier in Tier)

    def see_children(node: TreeNode) -> None:
        children = (c for c in node.iter_children() if (gpu[c.id] or host[c.id] or disk[c.id]) and not c.is_private)
        for child in nlargest(limit, children, key=attrgetter("num_uses")):
            heappush(seen, (-child.num_uses, child.id, child))

    see_children(tree.root)
    while seen and len(nodes) < limit:
        _, _, node = heappop(seen)
        parent = node.parent
        num_bytes = {t.label: tree.resident_mask(node, t).bit_count() * size for t, size in block_bytes.items()}
        nodes.append(
            {
                "node": node.id,
                "parent": None if parent is None or parent is tree.root else parent.id,
                "doc_id": node.doc_id,
                "num_tokens": node.num_tokens,
                "num_uses": node.num_uses,
                "num_bytes": {tier: number for tier, number in num_bytes.items() if number},
            }
        )
        see_children(node)
    return {"num_nodes": len(tree), "num_left_out": len(tree) - len(nodes), "nodes": nodes}
