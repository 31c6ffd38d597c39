"""What is in the cache, by document: where it lies, how often it was used, and what that has saved.

The tree is walked a part at a time, between steps, so that a large one delays none of them::

    GET /v1/ragcache/cache?sort=bytes&limit=2  ->  {"documents": [{"id": "a", "paths": 3, "variants": 0, ...}, ...],
                                                    "total": 812, ...}

Documents of requests with a ``cache_salt`` are in no answer, as in no report.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice
from typing import Any, Final

from ragcache_core.stats import CONTENTS_ORDERS, MAX_LISTED
from ragcache_core.tree import KnowledgeTree, TreeNode
from ragcache_core.types import DocId, Tier

NODES_AT_ONCE: Final = 2000
"""A few milliseconds of the scheduler's thread."""
_MAX_TOKENS: Final = 64
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


@dataclass(slots=True)
class _Walk:
    left: Iterator[TreeNode]
    held: dict[DocId, _Held] = field(default_factory=dict)


class Contents:
    """Lists what is cached, and shows one document's paths.

    Args:
        tree: knows what lies where.
        block_bytes: of a block, by tier.
        chunks: returns what is kept of documents for reuse anywhere, those of some ids or (None) of all, by id.
        pinned: the documents that are pinned.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        block_bytes: Callable[[], Mapping[Tier, int]],
        chunks: Callable[[Collection[DocId]], Mapping[DocId, ChunkHolding]],
        pinned: Collection[DocId] = frozenset(),
    ) -> None:
        self._tree = tree
        self._block_bytes = block_bytes
        self._chunks = chunks
        self._pinned = pinned
        self._walk: _Walk | None = None
        self._listed: dict[DocId, _Held] = {}
        self._number = 0
        self._wanted: dict[str, int] = {}

    def list(self, token: str, sort: str, limit: int, num_nodes: int = NODES_AT_ONCE) -> dict[str, Any]:
        """Return the ``limit`` documents with most of what they are sorted by; ``{}`` while the tree is being walked.

        A walk begins with a ``token`` that was not asked with before, and goes on whenever it is asked again with it.
        Each document is as it was when the walk passed it.
        """
        number = self._wanted.setdefault(token, self._number + 1)
        if len(self._wanted) > _MAX_TOKENS:
            del self._wanted[next(iter(self._wanted))]
        if number > self._number:
            if self._walk is None:
                self._walk = _Walk(iter(list(self._tree.nodes())))
            if not self._go_on(self._walk, num_nodes):
                return {}
            self._listed, self._walk = self._walk.held, None
            self._number += 1
        return self._answer(self._listed, sort, limit)

    def _go_on(self, walk: _Walk, num_nodes: int) -> bool:
        """Count the next nodes, and return whether there are no more."""
        num_seen = 0
        for node in islice(walk.left, num_nodes):
            num_seen += 1
            self._count(node, walk.held)
        return num_seen < num_nodes

    def _count(self, node: TreeNode, held: dict[DocId, _Held]) -> None:
        if (node.doc_id is None and not node.other_ids) or node.is_private:
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
            mine.saved_s += max(node.frequency - node.num_computed, 0) * node.avg_cost_s * node.num_tokens
            if is_beginning(node, doc_id):
                mine.num_paths += node.stored_s is not None
                mine.num_uses += node.frequency
                mine.num_tokens = max(mine.num_tokens, node.num_tokens)

    def _answer(self, held: Mapping[DocId, _Held], sort: str, limit: int) -> dict[str, Any]:
        chunks = self._chunks(held.keys())
        here = [doc_id for doc_id, mine in held.items() if mine.stored_s is not None or doc_id in chunks]
        block_bytes = self._block_bytes()
        nothing = ChunkHolding()

        gpu_bytes, host_bytes, disk_bytes = (block_bytes.get(tier, 0) for tier in Tier)

        def num_bytes(doc_id: DocId) -> tuple[int, int, int]:
            gpu, host, disk = held[doc_id].num_blocks
            chunk = chunks.get(doc_id, nothing)
            return (
                gpu * gpu_bytes,
                host * host_bytes + chunk.num_host_bytes,
                disk * disk_bytes + chunk.num_disk_bytes,
            )

        now_s = self._tree.now_s
        measure: dict[str, Callable[[DocId], float]] = {
            "bytes": lambda doc_id: sum(num_bytes(doc_id)),
            "uses": lambda doc_id: held[doc_id].num_uses,
            "saved": lambda doc_id: held[doc_id].saved_s,
            "age": lambda doc_id: now_s - (now_s if (since := held[doc_id].stored_s) is None else since),
        }
        of = measure[sort]
        shown = nlargest(min(limit, MAX_LISTED), here, key=lambda doc_id: (of(doc_id), doc_id))
        return {
            "documents": [
                {
                    "id": doc_id,
                    "paths": (mine := held[doc_id]).num_paths,
                    "tokens": mine.num_tokens,
                    "variants": chunks.get(doc_id, nothing).num_variants,
                    "bytes": {tier.label: number for tier, number in zip(Tier, num_bytes(doc_id), strict=True)},
                    "uses": mine.num_uses,
                    "saved_s": mine.saved_s,
                    "age_s": None if mine.stored_s is None else max(now_s - mine.stored_s, 0.0),
                    "pinned": doc_id in self._pinned,
                }
                for doc_id in shown
            ],
            "total": len(here),
        }

    def show(self, doc_ids: Collection[DocId]) -> dict[str, Any]:
        """Return some documents as :meth:`list` does, each with its ``places``: behind what, and how much of it where.

        Those that are not here are left out. O(nodes).
        """
        wanted = set(doc_ids)
        held: dict[DocId, _Held] = {}
        places: dict[DocId, list[dict[str, Any]]] = {doc_id: [] for doc_id in doc_ids}
        block_bytes = self._block_bytes()
        for node in self._tree.nodes():
            if node.is_private or not node.is_named(wanted):
                continue
            self._count(node, held)
            for doc_id in wanted & {node.doc_id, *node.other_ids}:
                if is_beginning(node, doc_id) and len(places[doc_id]) < MAX_PLACES:
                    places[doc_id].append(self._place(node, doc_id, block_bytes))
        kept = {doc_id: held[doc_id] for doc_id in doc_ids if doc_id in held}
        shown = self._answer(kept, CONTENTS_ORDERS[0], len(kept))
        for document in shown["documents"]:
            document["places"] = places[document["id"]]
        return shown

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
            "uses": node.frequency,
        }


def is_beginning(node: TreeNode, doc_id: DocId) -> bool:
    """Return whether a document begins in ``node``, or goes on from the node above."""
    above = node.parent
    return above is None or (above.doc_id != doc_id and doc_id not in above.other_ids)
