"""The knowledge tree: matching, growing, counting, and what it remembers."""

from __future__ import annotations

import pytest

from ragcache_core.policy import LRUPolicy, PGDSFPolicy
from ragcache_core.tree import KnowledgeTree, PathSegment, check_invariants
from ragcache_core.types import Tier
from tests.unit.tree.scene import BLOCK, cache, chain, new_tree, prompt


@pytest.mark.parametrize("doc_ids", [(None, "B"), ("B", None), ("B", "B"), ("A", "B")])
def test_a_document_that_names_a_node_twice_is_removed_with_it_once(doc_ids: tuple[str | None, ...]) -> None:
    tree = new_tree(ghost_size=0)
    cache(tree, prompt("X", "B"))  # another node of the document stays in the index
    for doc_id in doc_ids:
        path = cache(tree, [PathSegment(chain("b"), BLOCK, doc_id, other_ids=frozenset({"B"}))])
    assert set(path[-1].doc_ids()) == {"B", *filter(None, doc_ids)}
    tree.evict(Tier.GPU, tree.tiers[Tier.GPU].num_units)
    cache(tree, prompt("Y"))
    check_invariants(tree)
    assert tree.locate(chain("b")[0]) is None
    assert not tree.nodes_of("B")


def test_a_document_learned_later_cuts_a_nameless_run_and_names_it() -> None:
    tree = new_tree()
    segments = prompt("A", "B")
    cache(tree, [PathSegment([*segments[0].keys, *segments[1].keys], 4 * BLOCK)])
    path = cache(tree, segments)
    assert [n.doc_id for n in path] == ["A", "B"]
    assert tree.match_prefix(segments).num_units == 4


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


@pytest.mark.parametrize("stored", [(5, 2, 3), (3, 5, 2)])
def test_the_highest_of_the_counts_stored_with_a_documents_units_wins(stored: tuple[int, ...]) -> None:
    """Only its first unit is noted again after later uses."""
    tree = new_tree()
    for key, frequency in zip(prompt("A", blocks=3)[0].keys, stored, strict=True):
        node = tree.attach(key[:-1] or None, key, BLOCK, "A")  # type: ignore[index]
        assert node is not None
        tree.restore(node, frequency=frequency, cost_s=frequency * 1e-3)
    assert (node.frequency, node.avg_cost_s) == (5, 5e-3)


def test_counts_restart_also_where_blocks_are_cached_before_the_access_is_counted() -> None:
    """As in the engine: vLLM caches a request's blocks when it schedules them, and then it is admitted."""
    tree = KnowledgeTree(LRUPolicy(), keeps_frequency=False)
    for _ in range(3):
        (node,) = tree.insert(prompt("A"))
        tree.add(node, node.full_mask, Tier.GPU)
        tree.record_access([node], num_hit_units=0, cost_per_token_s=3e-5)
        assert node.frequency == 1
        tree.evict_up_to(Tier.GPU, 2)
