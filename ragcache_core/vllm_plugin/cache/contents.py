"""What is in the cache, by document: where it lies, how often it was used, and what that has saved.

The tree is walked a part at a time, between steps, so that a large one delays none of them::

    GET /v1/ragcache/cache?sort=bytes&limit=2  ->  {"documents": [{"id": "a", "paths": 3, "variants": 0, ...}, ...],
                                                    "total": 812, ...}

Documents of requests with a ``cache_salt`` are in no answer, as in no report.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any, Final, TypeVar

from ragcache_core.tree import KnowledgeTree, TreeNode
from ragcache_core.types import DocId, Tier

_Item = TypeVar("_Item")
AT_ONCE: Final = 500
"""Nodes, or documents, for which the scheduler's thread is kept at a time: some milliseconds."""
_MAX_LISTINGS: Final = 32
MAX_PLACES: Final = 100
"""Paths that are shown of one document."""


@dataclass(frozen=True, slots=True)
class ChunkHolding:
    """What is kept of a document for reuse at any position: variants, their bytes by tier."""

    num_variants: int = 0
    num_host_bytes: int = 0
    num_disk_bytes: int = 0


@dataclass(slots=True)
class _Held:
    """What the tree has of one document, over all paths."""

    num_paths: int = 0
    num_tokens: int = 0
    num_blocks: list[int] = field(default_factory=lambda: [0, 0, 0])
    num_uses: int = 0
    saved_s: float = 0.0
    stored_s: float | None = None


ChunkHoldings = Callable[[DocId], ChunkHolding | None]


class Contents:
    """Lists what is cached, and shows one document's paths.

    Args:
        tree: knows what lies where.
        block_bytes: of a block, by tier.
        chunks: returns a function from a document to what is kept of it for reuse anywhere, if anything is.
        pinned: the documents that are pinned.
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
        self._listings: dict[str, Iterator[dict[str, Any]]] = {}

    def list(self, token: str, sort: str, limit: int) -> dict[str, Any]:
        """Return the ``limit`` documents with most of what they are sorted by; ``{}`` while that is being found out.

        A listing begins with a ``token`` that was not asked with before, and goes on whenever it is asked again with
        it. Each document is as it was when the walk passed it.
        """
        if token not in self._listings:
            self._listings[token] = self._listing(sort, limit)
            if len(self._listings) > _MAX_LISTINGS:
                del self._listings[next(iter(self._listings))]
        return next(self._listings[token])

    def _listing(self, sort: str, limit: int) -> Iterator[dict[str, Any]]:
        held: dict[DocId, _Held] = {}
        for part in _parts(list(self._tree.nodes())):
            for node in part:
                self._count(node, held)
            yield {}
        chunks, block_bytes = self._chunks(), self._block_bytes()
        best: list[tuple[float, DocId]] = []
        total = 0
        for ids in _parts(list(held)):
            worths = [(self._worth(sort, held[doc_id], chunks(doc_id), block_bytes), doc_id) for doc_id in ids]
            here = [(worth, doc_id) for worth, doc_id in worths if worth is not None]
            total += len(here)
            best = nlargest(limit, [*best, *here])
            yield {}
        shown: list[dict[str, Any]] = []
        for ids in _parts([doc_id for _, doc_id in best]):
            shown += [self._describe(doc_id, held[doc_id], chunks(doc_id), block_bytes) for doc_id in ids]
            yield {}
        held.clear()
        while True:  # other engines may still be at it
            yield {"documents": shown, "total": total}

    def _worth(
        self, sort: str, mine: _Held, chunk: ChunkHolding | None, block_bytes: Mapping[Tier, int]
    ) -> float | None:
        """Return what a document is sorted by; None where nothing of it is here."""
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

    def _count(self, node: TreeNode, held: dict[DocId, _Held]) -> None:
        if node.is_private or (node.doc_id is None and not node.other_ids):
            return
        for doc_id in node.other_ids if node.doc_id is None else (node.doc_id, *node.other_ids):
            mine = held.get(doc_id)
            if mine is None:
                mine = held[doc_id] = _Held()
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

    def show(self, doc_ids: Collection[DocId]) -> dict[str, Any]:
        """Return some documents as :meth:`list` does, each with its ``places``: behind what, and how much of it where.

        Those that are not here are left out. O(nodes).
        """
        wanted = set(doc_ids)
        held: dict[DocId, _Held] = {}
        places: dict[DocId, list[dict[str, Any]]] = {doc_id: [] for doc_id in doc_ids}
        chunks, block_bytes = self._chunks(), self._block_bytes()
        for node in self._tree.nodes():
            if node.is_private or not node.is_named(wanted):
                continue
            self._count(node, held)
            for doc_id in wanted.intersection((node.doc_id, *node.other_ids)):
                if is_beginning(node, doc_id) and len(places[doc_id]) < MAX_PLACES:
                    places[doc_id].append(self._place(node, doc_id, block_bytes))
        shown = [
            {**self._describe(doc_id, held[doc_id], chunks(doc_id), block_bytes), "places": places[doc_id]}
            for doc_id in doc_ids
            if doc_id in held
        ]
        here = [document for document in shown if document["age_s"] is not None or document["variants"]]
        return {"documents": here, "total": len(here)}

    def _place(self, node: TreeNode, doc_id: DocId, block_bytes: Mapping[Tier, int]) -> dict[str, Any]:
        behind = [step.doc_id for step in node.path()[:-1] if step.doc_id is not None]
        own = [node]
        for step in own:
            own += [child for child in step.iter_children() if child.is_named({doc_id})]
        blocks = {
            tier: sum(state.resident[step.id].bit_count() for step in own)
            for tier, state in zip(Tier, self._tree.tiers, strict=True)
        }
        return {
            "behind": list(dict.fromkeys(behind)),
            "tokens": sum(step.num_tokens for step in own),
            "bytes": {tier.label: blocks[tier] * block_bytes.get(tier, 0) for tier in Tier},
            "uses": node.num_uses,
        }


def is_beginning(node: TreeNode, doc_id: DocId) -> bool:
    """Return whether a document begins in ``node``, or goes on from the node above."""
    above = node.parent
    return above is None or (above.doc_id != doc_id and doc_id not in above.other_ids)


def _parts(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    return (items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE))
