"""The knowledge tree for display: its most used nodes, with tiers and sizes."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from heapq import heappop, heappush, heappushpop

from ragcache_core.tree import KnowledgeTree, TreeNode
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.operator_calls import Steps

MAX_NODES = 1000


def tree_view(tree: KnowledgeTree, block_bytes: Mapping[Tier, int], limit: int) -> Steps:
    """Return the ``limit`` most used nodes, each after its parent.

    ``block_bytes`` are those of a block in each tier that there is. Nodes that lie in no tier are left out with all
    behind them, and so is what requests with a salt have; ``num_left_out`` counts these too. It looks at the children
    of the nodes that it returns, in slices, and changes nothing.
    """
    nodes: list[dict[str, object]] = []
    seen: list[tuple[int, int, TreeNode]] = []

    def see_children(node: TreeNode) -> Generator[int, None, None]:
        best: list[tuple[int, int, TreeNode]] = []
        for child in tuple(node.iter_children()):
            if tree.contains(child) and tree.resident_anywhere(child) and not child.is_private:
                (heappush if len(best) < limit else heappushpop)(best, (child.num_uses, -child.id, child))
            yield 1
        for num_uses, negative_id, child in best:
            heappush(seen, (-num_uses, -negative_id, child))

    yield from see_children(tree.root)
    while seen and len(nodes) < limit:
        _, _, node = heappop(seen)
        if not tree.contains(node):
            continue
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
        yield from see_children(node)
    return {"num_nodes": len(tree), "num_left_out": len(tree) - len(nodes), "nodes": nodes}
