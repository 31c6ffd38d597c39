"""What a tier of the knowledge tree evicts: the tail of the lowest-ranked leaf first."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ragcache_core.policy import POLICIES, LRUPolicy, MixturePolicy, PGDSFPolicy, PrefillCostModel, make_policy
from ragcache_core.tree import KnowledgeTree, PathSegment, TreeNode, check_invariants
from ragcache_core.types import Tier
from tests.unit.tree.scene import BLOCK, cache, chain, new_tree, prompt


def test_the_tail_of_a_document_goes_first_and_the_rest_still_serves() -> None:
    tree = new_tree()
    cache(tree, prompt("A", "B", blocks=3))
    evicted = tree.evict(Tier.GPU)
    assert evicted is not None
    assert evicted[0].key == prompt("A", "B", blocks=3)[1].keys[2]
    assert tree.match_prefix(prompt("A", "B", blocks=3)).num_units == 5
    check_invariants(tree)


def test_a_parent_outlives_its_children_however_little_it_is_used() -> None:
    tree = KnowledgeTree(PGDSFPolicy())
    cache(tree, prompt("A", "B"))
    for _ in range(5):
        cache(tree, prompt("C"))
    order = [unit.node.doc_id for _ in range(6) for unit in tree.evict(Tier.GPU) or ()]
    assert order == ["B", "B", "A", "A", "C", "C"]


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
    assert len(tree.evict(Tier.GPU, 2) or ()) == 2


def test_pinned_node_survives_eviction_until_it_is_unpinned() -> None:
    tree = new_tree()
    path = cache(tree, prompt("A"))
    tree.pin(path)
    tree.pin(path)
    assert tree.evict(Tier.GPU) is None
    tree.unpin(path)
    assert tree.evict(Tier.GPU) is None
    tree.unpin(path)
    assert tree.evict(Tier.GPU) is not None


@pytest.mark.parametrize("tier", Tier)
def test_a_node_is_offered_again_when_a_cut_leaves_nothing_cached_below_it(tier: Tier) -> None:
    tree = new_tree()
    first, second = prompt("A", "B", blocks=3)
    above, node = cache(tree, [first, second], tier=tier)
    assert tree.evict(tier, 1, protected=tree.units_of(second.keys[-1:])) is None
    tree.remove(node, 0b001, tier)
    tree.insert([first, PathSegment([second.keys[0], "other"], 2 * BLOCK, "C")])
    lower = tree.locate(second.keys[1])
    assert lower is not None
    assert lower.node is not node
    tree.remove(lower.node, 0b11, tier)
    check_invariants(tree, is_connected=False)
    assert [(unit.node, unit.unit) for unit in tree.evict(tier) or ()] == [(above, 2)]


def evicted_documents(tree: KnowledgeTree, num_units: int) -> set[str | None]:
    return {unit.node.doc_id for unit in tree.evict(Tier.GPU, num_units) or ()}


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


def test_what_is_worth_far_more_stays_although_the_host_holds_it_as_well() -> None:
    tree = KnowledgeTree(MixturePolicy())
    for _ in range(40):
        (popular,) = cache(tree, prompt("A"))
    tree.add(popular, popular.full_mask, Tier.HOST)
    cache(tree, prompt("B"))
    assert evicted_documents(tree, 2) == {"B"}


def test_policies_with_a_clock_do_not_look_at_the_tier_below() -> None:
    tree = KnowledgeTree(PGDSFPolicy())
    for _ in range(3):
        (copied,) = cache(tree, prompt("A"))
    tree.add(copied, copied.full_mask, Tier.HOST)
    cache(tree, prompt("B"))
    assert evicted_documents(tree, 2) == {"B"}


def test_a_copy_below_is_a_copy_of_the_parts_of_a_document_that_was_cut() -> None:
    tree = KnowledgeTree(MixturePolicy())
    (node,) = cache(tree, prompt("A", blocks=4))
    tree.add(node, 0b0011, Tier.HOST)
    keys = prompt("A", blocks=4)[0].keys
    upper, lower = tree.insert([PathSegment(keys[:2], 32, "A1"), PathSegment(keys[2:], 32, "A2")])
    gpu = tree.tiers[Tier.GPU]
    assert (gpu.is_copied(upper), gpu.is_copied(lower)) == (True, False)
    check_invariants(tree)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_transient_documents_go_first(policy: str) -> None:
    tree = KnowledgeTree(POLICIES[policy](PrefillCostModel.default()))
    keys = chain("L.0", "L.1")
    for _ in range(9):
        cache(tree, [PathSegment(keys, 32, "L", is_transient=True)])
    cache(tree, prompt("A"))
    assert evicted_documents(tree, 2) == {"L"}


def test_the_last_resort_takes_what_nobody_holds() -> None:
    tree = new_tree()
    first, second = cache(tree, prompt("A", "B"))
    tree.acquire_units(second, 1 << 1, Tier.GPU)
    assert tree.evict(Tier.GPU) is None
    unit = tree.evict_anything(Tier.GPU)
    assert unit is not None
    assert unit.node in (first, second)
    tree.acquire_units(second, 1 << 0, Tier.GPU)
    for number in (0, 1):
        tree.acquire_units(first, 1 << number, Tier.GPU)
    assert tree.evict_anything(Tier.GPU) is None


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
    gone = {unit.node for unit in tree.evict(Tier.GPU, 40) or ()}
    assert len(gone) == 40
    assert not gone & set(rare[:num_held])
    assert gone <= set(rare)
    check_invariants(tree)
    assert len(tree.evict_up_to(Tier.GPU, 500)) == 160 - 2 * num_held
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
    assert {unit.node for unit in tree.evict(Tier.GPU, 28) or ()} == {*nodes[32:]}
    assert {unit.node for unit in tree.evict(Tier.GPU, 16) or ()} == {*nodes[16:32]}
    assert tree.evict(Tier.GPU) is None


def test_a_unit_that_counts_for_several_makes_room_for_as_many_and_no_more_go_than_have_to() -> None:
    tree = new_tree()
    path = cache(tree, prompt("A", "B", blocks=3))
    size = {key: 1 + i % 2 for i, key in enumerate(key for node in path for key in node.keys)}
    evicted = tree.evict(Tier.GPU, 4, size_of=size.__getitem__) or []
    assert [size[unit.key] for unit in evicted] == [2, 1, 2]
    assert tree.evict(Tier.GPU, 5, size_of=size.__getitem__) is None, "those that are left count for four"
    assert tree.tiers[Tier.GPU].num_units == 3
    assert len(tree.evict_up_to(Tier.GPU, 5, size_of=size.__getitem__)) == 3
    check_invariants(tree)


def test_entries_do_not_pile_up_where_nothing_is_ever_evicted() -> None:
    tree = KnowledgeTree(LRUPolicy())
    for i in range(20_000):
        path = tree.insert(prompt(f"d{i % 50}"))
        tree.record_access(path, num_hit_units=2, cost_per_token_s=0.0)
        for node in path:
            tree.add(node, node.full_mask, Tier.GPU)
    check_invariants(tree)
    assert all(state.num_entries < 2_000 for state in tree.tiers)


def test_the_units_below_the_tail_are_looked_at_one_by_one() -> None:
    tree = new_tree()
    (node,) = cache(tree, prompt("A", blocks=5))
    tree.add(node, 1 << 3, Tier.HOST)  # stands on what only the GPU has
    assert [unit.unit for unit in tree.evict_up_to(Tier.GPU, 5)] == [4, 3]


@pytest.mark.parametrize("moves_down", [False, True])
def test_a_node_that_others_stand_on_leaves_where_its_evictor_moves_it_down(moves_down: bool) -> None:
    tree = new_tree(moves_down=moves_down)
    first, second = cache(tree, prompt("A", "B"))
    tree.add(second, second.full_mask, Tier.HOST)
    tree.remove(second, second.full_mask, Tier.GPU)
    assert tree.victim(Tier.GPU) is (first if moves_down else None)


def test_the_victim_keeps_its_numbers_if_it_is_put_elsewhere_before_it_is_given_up() -> None:
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
    order = [unit.node.doc_id for _ in range(8) for unit in tree.evict(Tier.GPU) or ()]
    assert {"without", "without too"} <= set(order)
    gone = [unit.node.doc_id for _ in range(60) for unit in tree.evict(Tier.GPU) or ()]
    assert "warmed" not in gone


def test_a_seed_takes_no_uses_away() -> None:
    tree = KnowledgeTree(PGDSFPolicy())
    for _ in range(5):
        (node,) = cache(tree, prompt("A"))
    tree.seed([node], expected_uses=3)
    assert node.frequency == 5
    tree.seed([node], expected_uses=7)
    assert (node.frequency, node.num_uses) == (7, 5), "what is expected ranks, and is no use"
    cache(tree, prompt("A"))
    assert (node.frequency, node.num_uses) == (8, 6)


def test_an_eviction_that_is_undone_makes_nothing_younger() -> None:
    tree = new_tree()
    (node,) = cache(tree, prompt("A", blocks=3))
    tree.now_s = 1000.0
    assert tree.evict(Tier.GPU, 4) is None
    assert node.stored_s == 0.0
    assert tree.older_than(1.0) == [node]
    check_invariants(tree)
