"""Prompts of documents, and a tree that caches them, for tests of the knowledge tree."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from ragcache_core.policy import LRUPolicy
from ragcache_core.tree import EvictedRun, KnowledgeTree, PathSegment, TreeNode, check_invariants
from ragcache_core.types import Tier

BLOCK = 16


class EvictedUnit(NamedTuple):
    """A unit that a tier evicted, and what it kept for it; None for nothing."""

    node: TreeNode
    key: Hashable
    slot: Any


def units_in(evicted: Iterable[EvictedRun] | None) -> list[EvictedUnit]:
    """Return evicted units one by one, in the order of their eviction."""
    units = []
    for run in evicted or ():
        assert run.keys == run.node.keys[run.first : run.first + len(run.keys)][::-1]
        assert len(run.slots) in (0, len(run.keys))
        units += map(EvictedUnit, [run.node] * len(run.keys), run.keys, run.slots or [None] * len(run.keys))
    return units


def chain(*names: str) -> list[tuple[str, ...]]:
    """Keys as the engine's hashes are: each covers everything before it."""
    return [tuple(names[: i + 1]) for i in range(len(names))]


def prompt(*documents: str, blocks: int = 2, question: str | None = None) -> list[PathSegment]:
    """A prompt of documents of ``blocks`` blocks each, and perhaps a question of one."""
    keys = chain(*[f"{doc}.{i}" for doc in documents for i in range(blocks)], *([question] if question else []))
    segments = [
        PathSegment(keys[n * blocks : (n + 1) * blocks], blocks * BLOCK, doc) for n, doc in enumerate(documents)
    ]
    return [*segments, PathSegment(keys[len(documents) * blocks :], BLOCK)] if question else segments


def cache(
    tree: KnowledgeTree, segments: list[PathSegment], tier: Tier = Tier.GPU, *, is_checked: bool = True
) -> list[TreeNode]:
    """Serve a prompt: everything that was missing is computed and put into ``tier``."""
    path = tree.insert(segments)
    num_hit = tree.match_prefix(segments).num_units
    tree.record_access(path, num_hit_units=num_hit, cost_per_token_s=1e-3)
    for node in path:
        tree.add(node, node.full_mask, tier)
    if is_checked:
        check_invariants(tree)
    return path


def new_tree(**settings: object) -> KnowledgeTree:
    return KnowledgeTree(LRUPolicy(), **settings)  # type: ignore[arg-type]
