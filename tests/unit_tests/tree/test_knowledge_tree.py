"""The knowledge tree: matching, growing, and giving up the tail of the lowest-ranked leaf first."""

from __future__ import annotations

import pytest

from ragcache_core.policy import LRUPolicy, PGDSFPolicy, TournamentPolicy
from ragcache_core.tree import KnowledgeTree, PathSegment, TreeNode, by_node, check_invariants
from ragcache_core.types import Tier

BLOCK = 16


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


def cache(tree: KnowledgeTree, segments: list[PathSegment], tier: Tier = Tier.GPU) -> list[TreeNode]:
    """Serve a prompt: everything that was missing is computed and put into ``tier``."""
    path = tree.insert(segments)
    num_hit = tree.match_prefix(segments).num_units
    tree.record_access(path, num_hit_units=num_hit, cost_per_token_s=1e-3)
    for node in path:
        tree.add(node, node.full_mask, tier)
    check_invariants(tree)
    return path


def new_tree(**settings: object) -> KnowledgeTree:
    return KnowledgeTree(LRUPolicy(), **settings)  # type: ignore[arg-type]


def test_a_prompt_matches_as_far_as_its_documents_come_in_the_same_order() -> None:
    tree = new_tree()
    cache(tree, prompt("A", "B", "C"))
    assert tree.match_prefix(prompt("A", "B", "D")).num_units == 4
    assert tree.match_prefix(prompt("B", "A")).num_units == 0
    assert tree.match_prefix(prompt("A", "B", "C")).num_tokens == 6 * BLOCK


def test_matching_changes_nothing() -> None:
    tree = new_tree()
    path = cache(tree, prompt("A", "B"))
    before = [(n.frequency, n.updated, n.last_request) for n in path]
    tree.match_prefix(prompt("A", "B"))
    tree.match_prefix(prompt("A", "X"))
    assert [(n.frequency, n.updated, n.last_request) for n in path] == before
    assert len(tree) == 2


def test_the_same_document_after_other_documents_is_another_node() -> None:
    tree = new_tree()
    first = cache(tree, prompt("A", "C"))
    second = cache(tree, prompt("B", "C"))
    assert first[1] is not second[1]
    assert first[1].doc_id == second[1].doc_id == "C"


def test_another_text_under_the_same_name_is_another_node() -> None:
    tree = new_tree()
    cache(tree, [PathSegment(chain("A.0", "A.1"), 32, "A")])
    changed = [PathSegment(chain("A.0", "A.1 changed"), 32, "A")]
    assert tree.match_prefix(changed).num_units == 1
    cache(tree, changed)
    assert tree.match_prefix(prompt("A")).num_units == 2


def test_runs_that_share_a_beginning_share_a_node() -> None:
    tree = new_tree()
    keys = chain("a", "b", "c", "d")
    cache(tree, [PathSegment(keys, 64)])
    path = cache(tree, [PathSegment([*keys[:2], ("a", "b", "x")], 48)])
    assert [len(n.keys) for n in path] == [2, 1]
    assert tree.match_prefix([PathSegment(keys, 64)]).num_units == 4


def test_a_document_learned_later_cuts_a_nameless_run_and_names_it() -> None:
    tree = new_tree()
    segments = prompt("A", "B")
    cache(tree, [PathSegment([*segments[0].keys, *segments[1].keys], 4 * BLOCK)])
    path = cache(tree, segments)
    assert [n.doc_id for n in path] == ["A", "B"]
    assert tree.match_prefix(segments).num_units == 4


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


def test_a_held_unit_keeps_all_before_it_and_lets_the_tail_go() -> None:
    tree = new_tree()
    (node,) = cache(tree, prompt("A", blocks=3))
    tree.hold(node, 1 << 1, Tier.GPU)
    assert [unit.unit for unit in tree.evict(Tier.GPU) or ()] == [2]
    assert tree.evict(Tier.GPU) is None
    tree.let_go(node, 1 << 1, Tier.GPU)
    assert [unit.unit for unit in tree.evict(Tier.GPU, 2) or ()] == [1, 0]


def test_units_that_are_held_at_once_may_be_let_go_one_by_one() -> None:
    tree = new_tree()
    (node,) = cache(tree, prompt("A", blocks=5))
    tree.hold(node, 0b01011, Tier.GPU)
    tree.hold(node, 0b10100, Tier.GPU)
    tree.let_go(node, 0b00110, Tier.GPU)
    assert tree.evict(Tier.GPU) is None
    tree.let_go(node, 0b11000, Tier.GPU)
    assert [unit.unit for unit in tree.evict(Tier.GPU, 4) or ()] == [4, 3, 2, 1]
    assert tree.evict(Tier.GPU) is None
    tree.let_go(node, 0b11111, Tier.GPU)
    assert [unit.unit for unit in tree.evict(Tier.GPU) or ()] == [0]


@pytest.mark.parametrize("tier", Tier)
def test_a_node_is_offered_again_when_a_cut_leaves_nothing_cached_below_it(tier: Tier) -> None:
    tree = new_tree()
    first, second = prompt("A", "B", blocks=3)
    above, node = cache(tree, [first, second], tier=tier)
    assert tree.evict(tier, 1, protected=second.keys[-1:]) is None
    tree.remove(node, 0b001, tier)
    tree.insert([first, PathSegment([second.keys[0], "other"], 2 * BLOCK, "C")])
    lower = tree.locate(second.keys[1])
    assert lower is not None
    assert lower.node is not node
    tree.remove(lower.node, 0b11, tier)
    check_invariants(tree, is_connected=False)
    assert [(unit.node, unit.unit) for unit in tree.evict(tier) or ()] == [(above, 2)]


def test_locations_are_grouped_by_node_in_their_order() -> None:
    tree = new_tree()
    first, second = tree.insert(prompt("A", "B", blocks=3))
    places = [tree.locate(key) for node in (first, second) for key in node.keys]
    assert list(by_node(place for place in places if place is not None)) == [(first, 0b111), (second, 0b111)]
    assert list(by_node(place for place in (places[4], places[0], places[2], places[3]) if place is not None)) == [
        (second, 0b010),
        (first, 0b101),
        (second, 0b001),
    ]
    assert list(by_node(())) == []


def test_protected_keys_stay_for_this_eviction_only() -> None:
    tree = new_tree()
    cache(tree, prompt("A"))
    cache(tree, prompt("B"))
    keys = prompt("A")[0].keys
    assert {unit.node.doc_id for unit in tree.evict(Tier.GPU, 2, protected=keys) or ()} == {"B"}
    assert tree.evict(Tier.GPU, 1, protected=keys) is None
    assert tree.evict(Tier.GPU, 1) is not None


def test_what_a_slower_tier_stands_on_stays() -> None:
    tree = new_tree()
    first, second = cache(tree, prompt("A", "B"))
    tree.add(second, second.full_mask, Tier.HOST)
    assert [unit.node for unit in tree.evict(Tier.GPU, 2) or ()] == [second, second]
    assert tree.evict(Tier.GPU) is None, "B on the host stands on A on the GPU"
    tree.add(first, first.full_mask, Tier.HOST)
    assert tree.evict(Tier.GPU) is not None
    check_invariants(tree)


def evicted_documents(tree: KnowledgeTree, num_units: int) -> set[str | None]:
    return {unit.node.doc_id for unit in tree.evict(Tier.GPU, num_units) or ()}


def test_what_the_host_holds_as_well_goes_first() -> None:
    tree = KnowledgeTree(TournamentPolicy())
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
    tree = KnowledgeTree(TournamentPolicy())
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
    tree = KnowledgeTree(TournamentPolicy())
    (node,) = cache(tree, prompt("A", blocks=4))
    tree.add(node, 0b0011, Tier.HOST)
    keys = prompt("A", blocks=4)[0].keys
    upper, lower = tree.insert([PathSegment(keys[:2], 32, "A1"), PathSegment(keys[2:], 32, "A2")])
    gpu = tree.tiers[Tier.GPU]
    assert (gpu.is_copied(upper), gpu.is_copied(lower)) == (True, False)
    check_invariants(tree)


def test_each_token_is_counted_in_the_fastest_tier_that_holds_it() -> None:
    tree = new_tree()
    first, second = cache(tree, prompt("A", "B"))
    for node in (first, second):
        tree.add(node, node.full_mask, Tier.HOST)
        tree.add(node, node.full_mask, Tier.DISK)
    tree.evict(Tier.GPU, 3)
    tree.evict(Tier.HOST, 1)
    match = tree.match_prefix(prompt("A", "B"))
    assert match.num_tokens_by_tier == (BLOCK, 2 * BLOCK, BLOCK)
    assert match.num_tokens == 4 * BLOCK


def test_an_evicted_document_keeps_its_count_unless_told_otherwise() -> None:
    for keeps, expected in ((True, 2), (False, 1)):
        tree = KnowledgeTree(LRUPolicy(), keeps_frequency=keeps)
        cache(tree, prompt("A"))
        tree.evict(Tier.GPU, 2)
        (node,) = cache(tree, prompt("A"))
        assert node.frequency == expected


def test_a_prefill_ahead_of_its_request_is_a_cost_and_no_use() -> None:
    tree = KnowledgeTree(PGDSFPolicy())
    path = tree.insert(prompt("A", "B"))
    tree.record_prefill(path, num_hit_units=2, cost_per_token_s=0.01)
    first, second = path
    assert [(n.frequency, n.num_computed, n.avg_cost_s) for n in path] == [(0, 0, 0.0), (0, 1, pytest.approx(0.01))]
    assert tree.num_requests == 0
    tree.record_access(path, num_hit_units=4, cost_per_token_s=0.0)
    assert (first.frequency, second.frequency, tree.num_requests) == (1, 1, 1)
    assert second.avg_cost_s == pytest.approx(0.01)


def test_ghosts_are_bounded_and_the_oldest_is_forgotten() -> None:
    tree = new_tree(ghost_size=2)
    for doc in "ABCD":
        cache(tree, prompt(doc))
    tree.evict(Tier.GPU, 8)
    tree.insert([])
    assert {n.doc_id for n in tree.nodes()} == {"C", "D"}
    check_invariants(tree)


def test_a_new_node_ranks_lowest_although_its_id_was_anothers() -> None:
    tree = KnowledgeTree(PGDSFPolicy(), ghost_size=0)
    (first,) = cache(tree, prompt("A"))
    number = first.id
    assert tree.tiers[Tier.GPU].ranks[number] > 0
    assert tree.evict(Tier.GPU, 2)
    tree.insert(prompt("B"))  # the ghost is dropped here, at the latest
    tree.insert(prompt("C"))
    assert number in [node.id for node in tree.nodes()], "an id of a node that is gone is given again"
    assert [tree.tiers[tier].ranks[number] for tier in Tier] == [0.0] * len(Tier)


def test_a_nameless_run_is_forgotten_once_it_is_evicted() -> None:
    tree = new_tree()
    cache(tree, prompt("A", question="why?"))
    tree.evict(Tier.GPU, 3)
    tree.insert([])
    assert [n.doc_id for n in tree.nodes()] == ["A"]


def test_a_retained_node_stays_even_when_it_is_cut() -> None:
    tree = new_tree(ghost_size=0)
    keys = chain("a", "b", "c")
    tree.insert([PathSegment(keys, 48)])
    tree.retain(keys[2])
    tree.insert([PathSegment([keys[0], ("a", "x")], 32)])
    tree.insert([])
    assert tree.locate(keys[2]) is not None
    assert tree.locate(("a", "x")) is None
    tree.release(keys[2])
    tree.insert([])
    assert len(tree) == 0
    check_invariants(tree)


def test_the_path_of_a_retained_prompt_is_what_inserting_it_again_returns() -> None:
    tree = new_tree()
    segments = prompt("A", "B", question="why?")
    last = segments[-1].keys[-1]
    path = tree.insert(segments)
    assert tree.retained_path(last) is None
    tree.retain(last)
    assert tree.retained_path(last) == path
    tree.insert([PathSegment([segments[0].keys[0], ("A.0", "another A")], 32)])
    assert [len(node.keys) for node in tree.retained_path(last) or []] == [1, 1, 2, 1]
    assert tree.retained_path(last) == tree.insert(segments)
    tree.extend(last, [(*last, "because")], BLOCK)
    assert tree.retained_path(last) is None, "the answer is not a part of the prompt"
    path = tree.insert(segments)
    assert tree.retained_path(last) == path
    tree.release(last)
    assert tree.retained_path(last) is None


def test_an_answer_grows_the_last_nameless_leaf() -> None:
    tree = new_tree()
    keys = chain("q", "a1", "a2", "b2")
    tree.insert([PathSegment(keys[:1], BLOCK)])
    node = tree.extend(keys[0], [keys[1]], BLOCK)
    assert len(tree) == 1
    assert node.num_tokens == 2 * BLOCK
    other = tree.extend(keys[0], [("q", "b1")], BLOCK)
    assert other is not node
    assert len(tree) == 3
    check_invariants(tree)


def test_a_tree_grows_again_from_stored_units() -> None:
    tree, copy = new_tree(), new_tree()
    cache(tree, prompt("A", "B", blocks=3, question="?"))
    cache(tree, prompt("A", "C", blocks=3))
    stored = sorted(
        (
            (
                n.start + i,
                key,
                n.keys[i - 1] if i else (n.parent.keys[-1] if n.parent and n.parent.keys else None),
                n.doc_id,
            )
            for n in tree.nodes()
            for i, key in enumerate(n.keys)
        ),
        key=lambda unit: unit[0],
    )
    for _, key, after, doc_id in stored:
        assert copy.attach(after, key, BLOCK, doc_id) is not None
    check_invariants(copy)
    assert sorted((n.doc_id or "", n.start, len(n.keys)) for n in copy.nodes()) == sorted(
        (n.doc_id or "", n.start, len(n.keys)) for n in tree.nodes()
    )
    assert copy.attach(("unknown",), ("unknown", "x"), BLOCK, None) is None


def test_transient_documents_go_first() -> None:
    tree = KnowledgeTree(PGDSFPolicy())
    keys = chain("L.0", "L.1")
    for _ in range(9):
        cache(tree, [PathSegment(keys, 32, "L", is_transient=True)])
    cache(tree, prompt("A"))
    assert {unit.node.doc_id for unit in tree.evict(Tier.GPU, 2) or ()} == {"L"}


def test_the_last_resort_takes_what_nobody_holds() -> None:
    tree = new_tree()
    first, second = cache(tree, prompt("A", "B"))
    tree.hold(second, 1 << 1, Tier.GPU)
    assert tree.evict(Tier.GPU) is None
    unit = tree.evict_anything(Tier.GPU)
    assert unit is not None
    assert unit.node in (first, second)
    tree.hold(second, 1 << 0, Tier.GPU)
    for number in (0, 1):
        tree.hold(first, 1 << number, Tier.GPU)
    assert tree.evict_anything(Tier.GPU) is None


def test_clearing_a_tier_leaves_the_others() -> None:
    tree = new_tree()
    path = cache(tree, prompt("A", "B"))
    for node in path:
        tree.add(node, node.full_mask, Tier.HOST)
    tree.clear_tier(Tier.GPU)
    match = tree.match_prefix(prompt("A", "B"))
    assert match.num_tokens_by_tier == (0, 4 * BLOCK, 0)
    check_invariants(tree)


def test_the_tournament_adopts_the_memory_that_fits_the_traffic() -> None:
    policy = TournamentPolicy(half_lives=(5.0, 1e6), window=50)
    tree = KnowledgeTree(policy, shadow_tokens=8 * BLOCK)
    for i in range(400):  # one favourite among many that come once: a long memory is right
        cache(tree, prompt("favourite" if i % 12 == 0 else f"once {i}"))
        if tree.tiers[Tier.GPU].num_units > 8:
            tree.evict(Tier.GPU, tree.tiers[Tier.GPU].num_units - 8)
    assert policy.ruling == 1
    for i in range(1200):  # a new favourite every 30 requests: a short memory is right
        cache(tree, prompt(f"fashion {i // 30}.{i % 3}"))
        if tree.tiers[Tier.GPU].num_units > 8:
            tree.evict(Tier.GPU, tree.tiers[Tier.GPU].num_units - 8)
    assert policy.ruling == 0


def test_a_protected_node_goes_last_while_the_order_is_made_anew() -> None:
    tree = KnowledgeTree(TournamentPolicy(), shadow_tokens=1)
    nodes = [cache(tree, prompt(f"document {i}", blocks=1))[0] for i in range(60)]
    tree.tiers[Tier.GPU].rerank()
    first = tree.victim(Tier.GPU)
    assert first is nodes[0]
    for node in nodes[:16]:  # as many as are ranked at once
        tree.hold(node, 0b1, Tier.GPU)
    for node in nodes[16:32]:
        tree.protect(node.keys[0])
    assert [unit.node for unit in tree.evict(Tier.GPU, 28) or ()] == nodes[32:]
    assert [unit.node for unit in tree.evict(Tier.GPU, 16) or ()] == nodes[16:32]
    assert tree.evict(Tier.GPU) is None


def test_a_pinned_node_cannot_be_cut() -> None:
    tree = new_tree()
    keys = chain("a", "b")
    tree.pin(cache(tree, [PathSegment(keys, 32)]))
    with pytest.raises(AssertionError, match="pinned"):
        tree.insert([PathSegment([keys[0], ("a", "x")], 32)])


def test_counts_start_anew_also_where_blocks_are_cached_before_the_access_is_counted() -> None:
    """As in the engine: vLLM caches a request's blocks when it schedules them, and then it is admitted."""
    tree = KnowledgeTree(LRUPolicy(), keeps_frequency=False)
    for _ in range(3):
        (node,) = tree.insert(prompt("A"))
        tree.add(node, node.full_mask, Tier.GPU)
        tree.record_access([node], num_hit_units=0, cost_per_token_s=3e-5)
        assert node.frequency == 1
        tree.evict_up_to(Tier.GPU, 2)


def test_up_to_as_many_as_can_go_are_evicted() -> None:
    tree = new_tree()
    first, _ = cache(tree, prompt("A", "B"))
    tree.hold(first, 1 << 1, Tier.GPU)
    assert [unit.node.doc_id for unit in tree.evict_up_to(Tier.GPU, 9)] == ["B", "B"]
    assert tree.evict_up_to(Tier.GPU, 9) == []


def test_entries_do_not_pile_up_where_nothing_is_ever_evicted() -> None:
    tree = KnowledgeTree(TournamentPolicy(), shadow_tokens=10**6)
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
    tree.give_up(moved, Tier.GPU)
    assert tree.victim(Tier.GPU) is dropped
    tree.give_up(dropped, Tier.GPU)
    assert (moved.frequency, dropped.frequency) == (1, 0)
    assert tree.resident_mask(moved, Tier.GPU) == tree.resident_mask(dropped, Tier.GPU) == 0
    assert tree.resident_mask(moved, Tier.HOST) == moved.full_mask
    assert tree.tiers[Tier.GPU].num_evicted_units == 4
    assert tree.victim(Tier.GPU) is None
    check_invariants(tree)
