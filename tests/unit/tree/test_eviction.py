"""What a tier of the knowledge tree evicts: the tail of the lowest-ranked leaf first."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ragcache_core.policy import POLICIES, LRUPolicy, MixturePolicy, ReplacementPolicy, make_policy
from ragcache_core.tree import KnowledgeTree, PathSegment, TreeNode, check_invariants, total_size
from ragcache_core.types import Tier
from tests.unit.tree.scene import cache, new_tree, prompt, units_in


def test_eviction_is_atomic() -> None:
    tree = new_tree()
    path = cache(tree, prompt("A", "B"))
    tree.pin(path[:1])
    clock = tree.tiers[Tier.GPU].clock
    assert tree.evict(Tier.GPU, 3) is None
    assert tree.match_prefix(prompt("A", "B")).num_units == 4
    assert tree.tiers[Tier.GPU].clock == clock
    assert tree.tiers[Tier.GPU].num_evicted_units == 0
    check_invariants(tree)
    assert len(units_in(tree.evict(Tier.GPU, 2))) == 2


def evicted_documents(tree: KnowledgeTree, num_units: int) -> set[str | None]:
    return {run.node.doc_id for run in tree.evict(Tier.GPU, num_units) or ()}


def test_what_the_host_holds_as_well_goes_first() -> None:
    tree = KnowledgeTree(MixturePolicy())
    for _ in range(3):
        (copied,) = cache(tree, prompt("A"))
    cache(tree, prompt("B"))
    for units in (1, 2):  # B ranks lower until all of A lies below
        assert tree.victim(Tier.GPU) is not copied
        tree.add(copied, units, Tier.HOST)
    assert tree.victim(Tier.GPU) is copied
    assert tree.evict(Tier.HOST) is not None
    assert tree.victim(Tier.GPU) is not copied, "what would be lost for good"
    tree.add(copied, copied.full_mask, Tier.DISK)
    check_invariants(tree)
    assert evicted_documents(tree, 2) == {"A"}


def test_a_copy_below_is_a_copy_of_the_parts_of_a_document_that_was_cut() -> None:
    tree = KnowledgeTree(MixturePolicy())
    (node,) = cache(tree, prompt("A", blocks=4))
    tree.add(node, 0b0011, Tier.HOST)
    keys = prompt("A", blocks=4)[0].keys
    upper, lower = tree.insert([PathSegment(keys[:2], 32, "A1"), PathSegment(keys[2:], 32, "A2")])
    gpu = tree.tiers[Tier.GPU]
    assert (gpu.is_copied(upper), gpu.is_copied(lower)) == (True, False)
    check_invariants(tree)


def node_of(tree: KnowledgeTree, doc_id: str) -> TreeNode:
    (node,) = tree.nodes_of(doc_id)
    return node


def served(documents: Iterable[str], *, num_blocks: int = 8) -> KnowledgeTree:
    """Return the tree of a small GPU that served one document a request."""
    tree = KnowledgeTree(MixturePolicy())
    for i, doc_id in enumerate(documents):
        cache(tree, prompt(doc_id), is_checked=i % 50 == 0)
        if (num_over := tree.tiers[Tier.GPU].num_units - num_blocks) > 0:
            tree.evict(Tier.GPU, num_over)
    return tree


def test_stationary_traffic_is_ranked_by_uses_and_drifting_traffic_by_the_last_ones() -> None:
    """An old favourite and a new document: the same uses of both rank by what earlier traffic was like."""
    ends = [*["favourite"] * 12, *(f"between {i}" for i in range(40)), "new", "new"]
    stationary = [f"document {i % 7}" if i % 3 else f"once {i}" for i in range(1200)]
    drifting = [f"fashion {i // 30}.{i % 3}" for i in range(1200)]
    worth = {}
    for name, earlier in (("stationary", stationary), ("drifting", drifting)):
        tree = served([*earlier, *ends])
        old, new = (
            tree.tiers[Tier.GPU].worth(node_of(tree, doc_id), tree.num_requests) for doc_id in ("favourite", "new")
        )
        worth[name] = old - new
    assert worth["drifting"] < worth["stationary"]
    assert worth["stationary"] > 0


@pytest.mark.parametrize("num_held", [0, 30])
def test_a_large_tier_evicts_no_node_that_is_much_used(num_held: int) -> None:
    """Of more nodes than a draw looks at, some of them held."""
    tree = KnowledgeTree(MixturePolicy())
    popular = [cache(tree, prompt(f"popular {i}", blocks=1))[0] for i in range(100)]
    for _ in range(20):
        for i in range(100):
            tree.record_access(tree.insert(prompt(f"popular {i}", blocks=1)), num_hit_units=1, cost_per_token_s=0.0)
    rare = [cache(tree, prompt(f"rare {i}", blocks=1))[0] for i in range(100)]
    for node in (*popular[:num_held], *rare[:num_held]):
        tree.acquire_units(node, 0b1, Tier.GPU)
    gone = {run.node for run in tree.evict(Tier.GPU, 40) or ()}
    assert len(gone) == 40
    assert not gone & set(rare[:num_held])
    assert gone <= set(rare)
    check_invariants(tree)
    assert total_size(tree.evict_up_to(Tier.GPU, 500)) == 160 - 2 * num_held
    assert tree.evict(Tier.GPU) is None


@pytest.mark.parametrize("policy", ["lru", "mixture"])
def test_protected_nodes_go_last_and_held_ones_not_at_all(policy: str) -> None:
    tree = KnowledgeTree(make_policy(policy))
    nodes = [cache(tree, prompt(f"document {i}", blocks=1))[0] for i in range(60)]
    assert tree.victim(Tier.GPU) is nodes[0] or policy == "mixture"
    for node in nodes[:16]:
        tree.acquire_units(node, 0b1, Tier.GPU)
    for node in nodes[16:32]:
        tree.protect(node.keys[0])
    assert {run.node for run in tree.evict(Tier.GPU, 28) or ()} == {*nodes[32:]}
    assert {run.node for run in tree.evict(Tier.GPU, 16) or ()} == {*nodes[16:32]}
    assert tree.evict(Tier.GPU) is None


def test_a_unit_that_counts_for_several_makes_room_for_as_many_and_no_more_go_than_have_to() -> None:
    tree = new_tree()
    path = cache(tree, prompt("A", "B", blocks=3))
    size = {key: 1 + i % 2 for i, key in enumerate(key for node in path for key in node.keys)}
    evicted = tree.evict(Tier.GPU, 4, size_of=size.__getitem__) or []
    assert [size[unit.key] for unit in units_in(evicted)] == [2, 1, 2]
    assert tree.evict(Tier.GPU, 5, size_of=size.__getitem__) is None, "those that are left count for four"
    assert tree.tiers[Tier.GPU].num_units == 3
    assert total_size(tree.evict_up_to(Tier.GPU, 5, size_of=size.__getitem__)) == 3
    check_invariants(tree)


@pytest.mark.parametrize("policy", [LRUPolicy, MixturePolicy])
@pytest.mark.parametrize("turn", [0, 2])
def test_entries_do_not_pile_up_where_nothing_is_ever_evicted(policy: type[ReplacementPolicy], turn: int) -> None:
    tree = KnowledgeTree(policy())
    for i in range(20_000):
        path = tree.insert(prompt(f"d{i % 50}"))
        tree.record_access(path, num_hit_units=2, cost_per_token_s=0.0, turn=turn)
        for node in path:
            tree.add(node, node.full_mask, Tier.GPU)
    check_invariants(tree)
    assert all(state.num_entries < 2_000 for state in tree.tiers)


@pytest.mark.parametrize("moves_down", [False, True])
def test_a_node_that_others_stand_on_leaves_where_its_evictor_moves_it_down(moves_down: bool) -> None:
    tree = new_tree(moves_down=moves_down)
    first, second = cache(tree, prompt("A", "B"))
    tree.add(second, second.full_mask, Tier.HOST)
    tree.remove(second, second.full_mask, Tier.GPU)
    assert tree.victim(Tier.GPU) is (first if moves_down else None)


def test_the_victim_keeps_its_numbers_if_it_is_moved_before_the_eviction() -> None:
    tree = new_tree(moves_down=True, keeps_frequency=False)
    (moved,) = cache(tree, prompt("A"))
    (dropped,) = cache(tree, prompt("B"))
    assert tree.victim(Tier.GPU) is moved
    tree.add(moved, moved.full_mask, Tier.HOST)
    tree.evict_node(moved, Tier.GPU)
    assert tree.victim(Tier.GPU) is dropped
    tree.evict_node(dropped, Tier.GPU)
    assert (moved.frequency, dropped.frequency) == (1, 0)
    assert tree.resident_mask(moved, Tier.GPU) == tree.resident_mask(dropped, Tier.GPU) == 0
    assert tree.resident_mask(moved, Tier.HOST) == moved.full_mask
    assert tree.tiers[Tier.GPU].num_evicted_units == 4
    assert tree.victim(Tier.GPU) is None
    check_invariants(tree)


@pytest.mark.parametrize("policy", [*POLICIES])
def test_what_a_forecast_has_warmed_outlives_what_was_warmed_without(policy: str) -> None:
    tree = KnowledgeTree(make_policy(policy))
    for i in range(40):
        cache(tree, prompt(f"early {i}"))
    for name, expected_uses in (("without", 0), ("warmed", 12), ("without too", 0)):
        path = tree.insert(prompt(name, f"behind {name}"))
        tree.record_prefill(path, num_hit_units=0, cost_per_token_s=1e-3)
        tree.seed(path, expected_uses=expected_uses)
        for node in path:
            tree.add(node, node.full_mask, Tier.GPU)
        check_invariants(tree)
    for _ in range(3):
        cache(tree, prompt("live"))
    order = [unit.node.doc_id for _ in range(8) for unit in units_in(tree.evict(Tier.GPU))]
    assert {"without", "without too"} <= set(order)
    gone = [unit.node.doc_id for _ in range(60) for unit in units_in(tree.evict(Tier.GPU))]
    assert "warmed" not in gone
