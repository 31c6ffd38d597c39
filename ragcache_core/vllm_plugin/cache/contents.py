"""The cache's contents by document: tiers, uses, and seconds of compute saved.

Both calls run in slices between steps (:mod:`.operator_calls`): a large tree delays no step::

    GET /v1/ragcache/cache?sort=bytes&limit=2  ->  {"documents": [{"id": "a", "paths": 3, "variants": 0, ...}, ...],
                                                    "total": 812, ...}

Documents of requests with a ``cache_salt`` are in no answer, as in no report.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from typing import Any, Final

from ragcache_core.tree import KnowledgeTree, TreeNode
from ragcache_core.types import DocId, Tier
from ragcache_core.vllm_plugin.cache.operator_calls import Steps

MAX_PLACES: Final = 100
"""Paths that are shown of one document."""


@dataclass(frozen=True, slots=True)
class ChunkHolding:
    """The cached versions of a document for chunk reuse, and their bytes by tier."""

    num_variants: int = 0
    num_host_bytes: int = 0
    num_disk_bytes: int = 0


@dataclass(slots=True)
class _Held:
    """The blocks of one document in the tree, over all prefixes."""

    num_paths: int = 0
    num_tokens: int = 0
    num_blocks: list[int] = field(default_factory=lambda: [0, 0, 0])
    num_uses: int = 0
    saved_s: float = 0.0
    stored_s: float | None = None


ChunkHoldings = Callable[[DocId], ChunkHolding | None]


class Contents:
    """Lists the cached documents, and shows a document's prefixes.

    Args:
        tree: the knowledge tree.
        block_bytes: bytes of a block, by tier.
        chunks: returns a function from a document to its chunks for chunk reuse.
        pinned: the pinned documents.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        block_bytes: Callable[[], Mapping[Tier, int]],
        chunks: Callable[[], ChunkHoldings],
        pinned: Collection[DocId] = frozenset(),
    ) -> None:
        self._tree = tree
        self._block_bytes = block_bytes
        self._chunks = chunks
        self._pinned = pinned

    def list(self, sort: str, limit: int) -> Steps:
        """Return the first ``limit`` documents in sort order, each as it was when it was read."""
        held: dict[DocId, _Held] = {}
        for node in self._tree.nodes():
            if not node.is_private:
                for doc_id in node.doc_ids():
                    self._count(node, doc_id, held.setdefault(doc_id, _Held()))
            yield 1
        chunks, block_bytes = self._chunks(), self._block_bytes()
        best: list[tuple[float, DocId]] = []
        total = 0
        for doc_id, mine in held.items():
            if (worth := self._worth(sort, mine, chunks(doc_id), block_bytes)) is not None:
                total += 1
                (heappush if len(best) < limit else heappushpop)(best, (worth, doc_id))
            yield 1
        shown: list[dict[str, Any]] = []
        for _, doc_id in sorted(best, reverse=True):
            shown.append(self._describe(doc_id, held[doc_id], chunks(doc_id), block_bytes))
            yield 1
        return {"documents": shown, "total": total}

    def _worth(
        self, sort: str, mine: _Held, chunk: ChunkHolding | None, block_bytes: Mapping[Tier, int]
    ) -> float | None:
        """Return a document's sort value; ``None`` if it has no cached KV."""
        if mine.stored_s is None and chunk is None:
            return None
        if sort == "uses":
            return mine.num_uses
        if sort == "saved":
            return mine.saved_s
        if sort == "age":
            return 0.0 if mine.stored_s is None else self._tree.now_s - mine.stored_s
        num_bytes = sum(mine.num_blocks[tier] * bytes_here for tier, bytes_here in block_bytes.items())
        return num_bytes if chunk is None else num_bytes + chunk.num_host_bytes + chunk.num_disk_bytes

    def _count(self, node: TreeNode, doc_id: DocId, mine: _Held) -> None:
        if node.stored_s is not None:
            for tier, state in enumerate(self._tree.tiers):
                mine.num_blocks[tier] += state.resident[node.id].bit_count()
            if mine.stored_s is None or node.stored_s < mine.stored_s:
                mine.stored_s = node.stored_s
        mine.saved_s += max(node.num_uses - node.num_computed, 0) * node.avg_cost_s * node.num_tokens
        if is_beginning(node, doc_id):
            mine.num_paths += node.stored_s is not None
            mine.num_uses += node.num_uses
            mine.num_tokens = max(mine.num_tokens, node.num_tokens)

    def _describe(
        self, doc_id: DocId, mine: _Held, chunk: ChunkHolding | None, block_bytes: Mapping[Tier, int]
    ) -> dict[str, Any]:
        num_bytes = {tier.label: mine.num_blocks[tier] * block_bytes.get(tier, 0) for tier in Tier}
        if chunk is not None:
            num_bytes[Tier.HOST.label] += chunk.num_host_bytes
            num_bytes[Tier.DISK.label] += chunk.num_disk_bytes
        return {
            "id": doc_id,
            "paths": mine.num_paths,
            "tokens": mine.num_tokens,
            "variants": 0 if chunk is None else chunk.num_variants,
            "bytes": num_bytes,
            "uses": mine.num_uses,
            "saved_s": mine.saved_s,
            "age_s": None if mine.stored_s is None else max(self._tree.now_s - mine.stored_s, 0.0),
            "pinned": doc_id in self._pinned,
        }

    def show(self, doc_ids: Collection[DocId]) -> Steps:
        """Return documents as :meth:`list` does, each with its ``places``: the prefixes, and the blocks by tier.

        Those that are not here are left out. It looks at the nodes of these documents alone.
        """
        chunks, block_bytes = self._chunks(), self._block_bytes()
        here: list[dict[str, Any]] = []
        for doc_id in doc_ids:
            mine = _Held()
            places: dict[TreeNode, _Held] = {}
            for node in tuple(self._tree.nodes_of(doc_id)):
                if self._tree.contains(node) and not node.is_private:
                    self._count(node, doc_id, mine)
                    self._count_at(node, doc_id, places)
                yield 1
            chunk = chunks(doc_id)
            if mine.stored_s is not None or chunk is not None:
                shown: list[dict[str, Any]] = []
                here.append({**self._describe(doc_id, mine, chunk, block_bytes), "places": shown})
                for node, place in places.items():
                    path = node.path()
                    shown.append(_shown_place(path, node.num_uses, place, block_bytes))
                    yield len(path)
            yield 1
        return {"documents": here, "total": len(here)}

    def _count_at(self, node: TreeNode, doc_id: DocId, places: dict[TreeNode, _Held]) -> None:
        """Count a node of a document for the prefix where the document begins, up to ``MAX_PLACES`` prefixes."""
        first = node
        while not is_beginning(first, doc_id) and first.parent is not None:
            first = first.parent
        if first not in places and len(places) == MAX_PLACES:
            return
        place = places.setdefault(first, _Held())
        place.num_tokens += node.num_tokens
        for tier, state in enumerate(self._tree.tiers):
            place.num_blocks[tier] += state.resident[node.id].bit_count()


def _shown_place(path: list[TreeNode], num_uses: int, place: _Held, block_bytes: Mapping[Tier, int]) -> dict[str, Any]:
    return {
        "behind": list(dict.fromkeys(step.doc_id for step in path[:-1] if step.doc_id is not None)),
        "tokens": place.num_tokens,
        "bytes": {tier.label: place.num_blocks[tier] * block_bytes.get(tier, 0) for tier in Tier},
        "uses": num_uses,
    }


def is_beginning(node: TreeNode, doc_id: DocId) -> bool:
    """Return whether a document begins in ``node``, rather than continuing from its parent."""
    above = node.parent
    return above is None or (above.doc_id != doc_id and doc_id not in above.other_ids)
