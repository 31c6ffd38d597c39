"""Retained paths where the share is full, or where one is retained again; the rest is in the random operations."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core.policy import LRUPolicy
from ragcache_core.tree import KnowledgeTree, PathSegment, Retention
from ragcache_core.tree import retention as retention_module


@pytest.fixture
def tree() -> KnowledgeTree:
    return KnowledgeTree(LRUPolicy())


def path(tree: KnowledgeTree, name: str, num_units: int) -> Any:
    """Insert a path, and return its last unit."""
    keys = [f"{name}{i}" for i in range(num_units)]
    (node,) = tree.insert([PathSegment(keys, num_units, name)])
    tree.retain(keys[-1])
    return node.keys[-1]


def protected(tree: KnowledgeTree) -> set[str]:
    return {node.doc_id or "" for node in tree.nodes() if tree.is_protected(node)}


def test_lower_priorities_stay_where_they_could_not_make_room(tree: KnowledgeTree) -> None:
    retention = Retention(tree, lambda _: 6)
    assert retention.retain(path(tree, "equal", 3), 10.0, priority=1)
    assert retention.retain(path(tree, "low", 2), 10.0, priority=0)
    assert not retention.retain(path(tree, "large", 4), 10.0, priority=1)
    assert protected(tree) == {"equal", "low"}
    assert retention.num_units == 5
    assert retention.retain(path(tree, "small", 3), 10.0, priority=1)
    assert protected(tree) == {"equal", "small"}
    tree.now_s = 10.0
    retention.tick()
    assert (protected(tree), retention.num_units) == (set(), 0)


def test_a_path_that_is_retained_again_stays_for_the_later_time(tree: KnowledgeTree) -> None:
    retention = Retention(tree, lambda _: 6)
    end = path(tree, "A", 3)
    assert retention.retain(end, 10.0)
    tree.now_s = 5.0
    assert retention.retain(end, 10.0)
    tree.now_s = 11.0
    retention.tick()
    assert protected(tree) == {"A"}
    tree.now_s = 15.0
    retention.tick()
    assert protected(tree) == set()


def test_times_of_evicted_paths_do_not_pile_up(tree: KnowledgeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "_FEW_DUE", 8)
    retention = Retention(tree, lambda _: 6)
    retention._most_due = 8
    kept = path(tree, "kept", 1)
    for number in range(100):
        retention.demote_after(86_400.0, f"gone {number}", 0)
        retention.retain(kept, 80_000.0)
    assert len(retention._due) <= 24
    tree.now_s = 80_000.0
    retention.tick()
    assert protected(tree) == set()
