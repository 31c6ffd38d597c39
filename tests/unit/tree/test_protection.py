"""Protected units are evicted last; and subscribers learn which nodes changed."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from ragcache_core.policy import POLICIES, LRUPolicy, PrefillCostModel
from ragcache_core.tree import KnowledgeTree, NodeChanges, PathSegment, TreeNode, check_invariants
from ragcache_core.types import Tier
from tests.unit.tree.scene import units_in

BLOCK = 16


def document(doc_id: str, *before: str, blocks: int = 2) -> PathSegment:
    """A document after others; keys as the engine's hashes are: each covers everything before it."""
    return PathSegment([(*before, doc_id, i) for i in range(blocks)], blocks * BLOCK, doc_id)


def cache(tree: KnowledgeTree, *segments: PathSegment, tier: Tier = Tier.GPU) -> list[TreeNode]:
    """Serve a prompt whose documents were not cached, and put them into ``tier``."""
    path = tree.insert(segments)
    tree.record_access(path, num_hit_units=0, cost_per_token_s=1e-5)
    for node in path:
        tree.add(node, node.full_mask, tier)
    check_invariants(tree)
    return path


def evict_all(tree: KnowledgeTree, tier: Tier = Tier.GPU) -> str:
    """Return the documents in the order of their eviction."""
    order: list[str] = []
    while (evicted := tree.evict(tier)) is not None:
        check_invariants(tree)
        order += [run.node.doc_id or "?" for run in evicted]
    return "".join(dict.fromkeys(order))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("is_offered_first", [False, True], ids=["before it is offered", "while it is offered"])
def test_protected_units_go_last(policy: str, is_offered_first: bool) -> None:
    tree = KnowledgeTree(POLICIES[policy](PrefillCostModel.default()))
    segments = [document("A"), document("B", "A")]
    if not is_offered_first:
        tree.insert(segments)
        tree.protect(("A", "B", 1))
    cache(tree, *segments)
    for doc_id in "CDE":
        cache(tree, document(doc_id))
        cache(tree, document(doc_id))
    if is_offered_first:
        tree.protect(("A", "B", 1))
    assert evict_all(tree)[-2:] == "BA"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_unprotected_documents_are_evicted_in_normal_order(policy: str) -> None:
    orders = []
    for protects in (False, True):
        tree = KnowledgeTree(POLICIES[policy](PrefillCostModel.default()))
        for doc_id in "ABCD":
            cache(tree, document(doc_id))
        if protects:
            tree.protect(("A", 0))
            tree.protect(("A", 1))
            assert [unit.node.doc_id for unit in units_in(tree.evict(Tier.GPU, 2))] == ["B", "B"]
            tree.unprotect(("A", 0))
            assert [unit.node.doc_id for unit in units_in(tree.evict(Tier.GPU, 2))] == ["C", "C"]
            tree.unprotect(("A", 1))
            check_invariants(tree)
            assert not tree.protected
        orders.append(evict_all(tree))
    assert orders == ["ABCD", "AD"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_host_copy_of_a_hot_upper_node_goes_last_while_the_gpu_has_it(policy: str) -> None:
    """Also where its rank is the lowest: it is cheap to compute, and others came since."""
    tree = KnowledgeTree(POLICIES[policy](PrefillCostModel.default()), replicated_units=2)
    for _ in range(2):  # it is on the GPU when it is used again
        cache(tree, document("A"))
    cache(tree, document("A"), tier=Tier.HOST)
    for doc_id in "BCDE":
        for _ in range(1 if doc_id == "E" else 2):
            path = cache(tree, document(doc_id, blocks=3), tier=Tier.HOST)
            tree.record_access(path, num_hit_units=0, cost_per_token_s=1.0)
    assert evict_all(tree, Tier.HOST)[-1] == "A"
    assert [node.doc_id for node in tree.nodes() if tree.resident_mask(node, Tier.GPU)] == ["A"]


def test_a_hotter_upper_node_takes_the_place_of_another_and_one_that_left_the_gpu_has_none() -> None:
    tree = KnowledgeTree(LRUPolicy(), replicated_units=4)

    def replicated() -> set[str | None]:
        return {node.doc_id for node in tree.nodes() if node.id in tree.replicated}

    for doc_id in "ABAB":
        cache(tree, document(doc_id), document("below", doc_id))
    assert replicated() == {"A", "B"}, "first documents, and not what follows them"
    for _ in range(2):
        cache(tree, document("C"))
    assert replicated() == {"A", "B"}, "none of them is less used than C"
    cache(tree, document("C"))
    assert len(replicated()) == 2
    assert "C" in replicated()
    cache(tree, document("large", blocks=5))
    for _ in range(9):
        cache(tree, document("large", blocks=5))
    assert "large" not in replicated(), "it has more units than may be replicated"
    tree.clear_tier(Tier.GPU)
    assert replicated() == set()
    check_invariants(tree)


def test_protection_never_makes_an_eviction_fail() -> None:
    tree = KnowledgeTree(LRUPolicy())
    for doc_id in "ABC":
        cache(tree, document(doc_id))
    for doc_id in "BA":
        tree.protect((doc_id, 1))
    evicted = tree.evict(Tier.GPU, 6)
    assert evicted is not None
    assert [unit.node.doc_id for unit in units_in(evicted)] == ["C", "C", "A", "A", "B", "B"]


def told(changed: set[TreeNode]) -> set[Hashable]:
    """Return the documents of the nodes that changed, and forget them."""
    names: set[Hashable] = {node.doc_id for node in changed}
    changed.clear()
    return names


def test_listeners_are_notified_of_changed_nodes() -> None:
    tree = KnowledgeTree(LRUPolicy(), ghost_size=0)
    cache(tree, document("A"))
    tree.changes = NodeChanges()
    first, second = tree.changes.subscribe(), tree.changes.subscribe()
    (node,) = cache(tree, document("B"))
    assert told(first) == {"B"}
    tree.add(node, node.full_mask, Tier.GPU)
    tree.match_prefix([document("A")])
    assert told(first) == set(), "nothing is there that was not"
    tree.evict(Tier.GPU, 2)
    assert told(first) == {"A"}
    tree.insert([])
    assert tree.locate(("A", 0)) is None
    assert told(first) == {"A"}
    tree.insert([PathSegment([("B", 0), "x"], 2 * BLOCK, "X")])
    assert len(first) == 2, "both halves"
    assert told(first) == {"B"}
    assert told(second) == {"A", "B"}, "a reader that comes late misses nothing"
