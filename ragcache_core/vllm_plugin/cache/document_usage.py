"""Count the requests that use each document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import nsmallest

from ragcache_core.stats import MAX_HOTTEST
from ragcache_core.tree import KnowledgeTree, PathSegment
from ragcache_core.types import DocId

_MAX_COUNTED = 1024


@dataclass(slots=True)
class _Use:
    num_uses: int = 0
    num_tokens: int = 0
    label: str | None = None


class DocumentUses:
    """Counts the requests that use each document, at any position in the prompt.

    Args:
        tree: knows which tiers hold a document.
        is_own: whether nodes of an owner in the tree may be reported here.
    """

    def __init__(self, tree: KnowledgeTree, is_own: Callable[[str | None], bool]) -> None:
        self._tree = tree
        self._is_own = is_own
        self._uses: dict[DocId, _Use] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def count(self, labels: Mapping[DocId, str | None], path: Iterable[PathSegment]) -> None:
        """Count a request that uses documents, each once; drop the least used of too many.

        The documents of requests count, not the tree's nodes: those are split, and named by the first request.

        Args:
            labels: the readable name of each document, None for those without one.
            path: the request's prompt.
        """
        for doc_id, label in labels.items():
            use = self._uses.setdefault(doc_id, _Use())
            use.num_uses += 1
            use.label = label or use.label
        for segment in path:
            if segment.doc_id is not None:
                self._uses[segment.doc_id].num_tokens = segment.num_tokens
        if len(self._uses) > _MAX_COUNTED:
            kept = sorted(self._uses.items(), key=lambda item: -item[1].num_uses)[: _MAX_COUNTED // 2]
            self._uses = dict(kept)

    def forget(self, doc_ids: Iterable[DocId]) -> None:
        """Remove deleted documents."""
        for doc_id in doc_ids:
            self._uses.pop(doc_id, None)

    def clear(self) -> None:
        """Reset the counts of all documents."""
        self._uses.clear()

    def hottest(self) -> list[dict[str, object]]:
        """Return the most used documents in the format of the statistics route; see ``client/stats/cache_stats.py``."""
        hottest = nsmallest(MAX_HOTTEST, self._uses.items(), key=lambda item: (-item[1].num_uses, item[0]))
        return [
            {
                "doc_id": doc_id,
                "frequency": use.num_uses,
                "num_tokens": use.num_tokens,
                "tiers": [tier.label for tier in self._tree.tiers_of(doc_id, self._is_own)],
                **({} if use.label is None else {"label": use.label}),
            }
            for doc_id, use in hottest
        ]
