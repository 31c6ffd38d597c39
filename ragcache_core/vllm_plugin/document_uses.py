"""Which documents are asked for most."""

from __future__ import annotations

from heapq import nsmallest

from ragcache_core.tree import KnowledgeTree, TreeNode
from ragcache_core.types import DocId, Tier

_MAX_HOTTEST = 10
_MAX_COUNTED = 1024


class DocumentUses:
    """How often each document was used, wherever it stood in a prompt."""

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self._uses: dict[DocId, tuple[int, TreeNode]] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def count(self, doc_id: DocId, node: TreeNode) -> None:
        """Count a use of a document that stands in ``node`` this time; the rarest are forgotten."""
        self._uses[doc_id] = (self._uses.get(doc_id, (0, node))[0] + 1, node)
        if len(self._uses) > _MAX_COUNTED:
            kept = sorted(self._uses.items(), key=lambda item: -item[1][0])[: _MAX_COUNTED // 2]
            self._uses = dict(kept)

    def hottest(self) -> list[dict[str, object]]:
        """Return the documents used most, as the engine's stats route has them; see ``client/cache_stats.py``."""
        hottest = nsmallest(_MAX_HOTTEST, self._uses.items(), key=lambda item: (-item[1][0], item[0]))
        return [
            {
                "doc_id": doc_id,
                "frequency": num_uses,
                "num_tokens": node.num_tokens,
                "tiers": [tier.label for tier in Tier if self._is_resident(node, tier)],
            }
            for doc_id, (num_uses, node) in hottest
        ]

    def _is_resident(self, node: TreeNode, tier: Tier) -> bool:
        location = self._tree.locate(node.keys[0])
        return location is not None and bool(self._tree.resident_mask(location.node, tier))
