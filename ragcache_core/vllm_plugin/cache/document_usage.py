"""Which documents are used by most requests."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from heapq import nsmallest

from ragcache_core.stats import MAX_HOTTEST
from ragcache_core.tree import KnowledgeTree, PathSegment
from ragcache_core.types import DocId, Tier

_MAX_COUNTED = 1024


@dataclass(slots=True)
class _Use:
    num_uses: int = 0
    num_tokens: int = 0
    keys: tuple[Hashable, ...] = ()
    """The blocks that it was last time."""


class DocumentUses:
    """How many requests have named each document, wherever it stood in the prompt."""

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree
        self._uses: dict[DocId, _Use] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def count(self, doc_ids: Iterable[DocId], path: Iterable[PathSegment]) -> None:
        """Count a request that uses documents, each once; ``path`` is its prompt. The rarest are forgotten.

        The documents of requests count, not the tree's nodes: those are cut, and named by the first request.
        """
        for doc_id in doc_ids:
            self._uses.setdefault(doc_id, _Use()).num_uses += 1
        for segment in path:
            if segment.doc_id is not None:
                use = self._uses[segment.doc_id]
                use.num_tokens, use.keys = segment.num_tokens, tuple(segment.keys)
        if len(self._uses) > _MAX_COUNTED:
            kept = sorted(self._uses.items(), key=lambda item: -item[1].num_uses)[: _MAX_COUNTED // 2]
            self._uses = dict(kept)

    def forget(self, doc_ids: Iterable[DocId]) -> None:
        """Count documents no more that are gone."""
        for doc_id in doc_ids:
            self._uses.pop(doc_id, None)

    def clear(self) -> None:
        """Count all documents anew."""
        self._uses.clear()

    def hottest(self) -> list[dict[str, object]]:
        """Return the documents used most, as the engine's stats route has them; see ``client/stats/cache_stats.py``."""
        hottest = nsmallest(MAX_HOTTEST, self._uses.items(), key=lambda item: (-item[1].num_uses, item[0]))
        return [
            {
                "doc_id": doc_id,
                "frequency": use.num_uses,
                "num_tokens": use.num_tokens,
                "tiers": [tier.label for tier in Tier if self._is_resident(use.keys, tier)],
            }
            for doc_id, use in hottest
        ]

    def _is_resident(self, keys: Iterable[Hashable], tier: Tier) -> bool:
        for location in map(self._tree.locate, keys):
            if location is not None and self._tree.resident_mask(location.node, tier) >> location.unit & 1:
                return True
        return False
