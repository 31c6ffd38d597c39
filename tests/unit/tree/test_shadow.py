from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.policy import TournamentPolicy
from ragcache_core.tree import KnowledgeTree, PathSegment, TreeNode, check_invariants
from ragcache_core.tree.shadow import Shadow
from ragcache_core.types import Tier

SIZES = {"A": 1, "B": 3, "C": 2, "D": 5, "E": 1}


def prompt(documents: list[str], *, has_greeting: bool = False) -> list[PathSegment]:
    """Documents of ``SIZES``, each with a unit for each token; between the first two, a run without a name."""
    segments: list[PathSegment] = []
    names: tuple[str, ...] = ()
    for position, doc_id in enumerate(documents):
        if position == 1 and has_greeting:
            names = (*names, "greeting")
            segments.append(PathSegment([names], 1))
        keys = []
        for unit in range(SIZES[doc_id]):
            names = (*names, f"{doc_id}{unit}")
            keys.append(names)
        segments.append(PathSegment(keys, len(keys), doc_id))
    return segments


class PlainShadow:
    """What a shadow does, without a heap: it looks at all that it holds, by the ranks of that moment."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow
        self.held: set[TreeNode] = set()

    def retrieve(self, documents: list[TreeNode]) -> int:
        num_found = next((i for i, node in enumerate(documents) if node not in self.held), len(documents))
        for node in documents:
            while node not in self.held and self._num_tokens() + node.num_tokens > self.shadow.capacity_tokens:
                leaves = [n for n in self.held if not any(c in self.held for c in n.iter_children())]
                others = [n for n in leaves if n not in documents]
                if not others or node.num_tokens > self.shadow.capacity_tokens:
                    return sum(n.num_tokens for n in documents[:num_found])
                self.held.remove(min(others, key=self.shadow._entry))
            self.held.add(node)
        return sum(n.num_tokens for n in documents[:num_found])

    def _num_tokens(self) -> int:
        return sum(node.num_tokens for node in self.held)


@settings(max_examples=300, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.lists(st.sampled_from("ABCDE"), min_size=1, max_size=3), st.booleans()), max_size=60
    ),
    capacity=st.integers(1, 16),
    ghost_size=st.sampled_from([0, 1, 3, 100]),
)
def test_a_shadow_holds_what_it_would_if_it_looked_at_all_it_holds(
    requests: list[tuple[list[str], bool]], capacity: int, ghost_size: int
) -> None:
    """And what the tree has forgotten, whose id another node may have by then, it holds no longer."""
    policy = TournamentPolicy((2.0, 50.0), (), window=10**9)
    tree = KnowledgeTree(policy, ghost_size=ghost_size, shadow_tokens=capacity)
    plain = [PlainShadow(shadow) for shadow in tree.shadows]
    found = [0] * len(plain)
    for documents, has_greeting in requests:
        path = tree.insert(prompt(documents, has_greeting=has_greeting))
        known = set(tree.nodes())
        tree.record_access(path, num_hit_units=0, cost_per_token_s=1e-3)
        for i, model in enumerate(plain):
            model.held &= known
            found[i] += model.retrieve([node for node in path if node.doc_id is not None])
            assert {node for node in tree.nodes() if model.shadow.held_tokens[node.id]} == model.held
        check_invariants(tree)
    assert tree._tournament is not None
    assert tree._tournament._saved_tokens == found


def test_a_shadow_divides_what_it_holds_where_a_document_is_cut() -> None:
    tree = KnowledgeTree(TournamentPolicy(), shadow_tokens=6)
    (document,) = tree.insert(prompt(["D"]))
    tree.record_access([document], num_hit_units=0, cost_per_token_s=1e-3)
    first, rest = PathSegment(document.keys[:2], 2, "D"), PathSegment(document.keys[2:], 3, "D")
    upper, lower = tree.insert([first, rest])
    for shadow in tree.shadows:
        assert (shadow.held_tokens[upper.id], shadow.held_tokens[lower.id], shadow.num_tokens) == (2, 3, 5)
    check_invariants(tree)
    (other,) = tree.insert([PathSegment([("F",)], 2, "F")])
    for _ in range(3):
        tree.record_access([other], num_hit_units=0, cost_per_token_s=1e-3)
    for shadow in tree.shadows:
        assert [bool(shadow.held_tokens[n.id]) for n in (upper, lower, other)] == [True, False, True]
    check_invariants(tree)


def test_shadows_forget_with_the_tree() -> None:
    """What nobody remembers the uses of is held nowhere; another node gets its id."""
    tree = KnowledgeTree(TournamentPolicy(), ghost_size=1, shadow_tokens=100)
    for number in range(50):
        path = tree.insert([PathSegment([(f"{number}", i)], 2, f"{number} {i}") for i in range(2)])
        tree.record_access(path, num_hit_units=0, cost_per_token_s=1e-3)
        check_invariants(tree)
    assert len(tree) < 8
    assert all(shadow.num_tokens == 2 * len(tree) for shadow in tree.shadows)


def test_what_is_forgotten_leaves_no_entries_without_end() -> None:
    """Even where a shadow is never full, so that nothing ever comes up."""
    tree = KnowledgeTree(TournamentPolicy(), ghost_size=1, shadow_tokens=10**6)
    for number in range(4000):
        tree.record_access(tree.insert([PathSegment([number], 1, str(number))]), num_hit_units=0, cost_per_token_s=1.0)
    assert all(len(shadow._heap) < 2_500 for shadow in tree.shadows)
    check_invariants(tree)


def test_a_document_whose_uses_start_anew_ranks_as_a_new_one() -> None:
    tree = KnowledgeTree(TournamentPolicy(), keeps_frequency=False, shadow_tokens=3)
    old, *others = (tree.insert([PathSegment([name], 1, name)])[0] for name in "ABCD")

    def use(node: TreeNode, times: int) -> None:
        for _ in range(times):
            tree.record_access([node], num_hit_units=1, cost_per_token_s=1e-3)

    tree.add(old, 1, Tier.GPU)
    tree.record_prefill([old], num_hit_units=0, cost_per_token_s=1e-3)
    use(old, 30)
    tree.evict(Tier.GPU)
    tree.add(old, 1, Tier.GPU)
    tree.record_prefill([old], num_hit_units=0, cost_per_token_s=1e-3)
    use(old, 1)
    assert old.frequency == 1
    for node in others:
        tree.add(node, 1, Tier.GPU)
        tree.record_prefill([node], num_hit_units=0, cost_per_token_s=1e-3)
        use(node, 2)
    assert [[bool(shadow.held_tokens[n.id]) for n in (old, *others)] for shadow in tree.shadows] == [
        [False, True, True, True]
    ] * len(tree.shadows)


@pytest.mark.parametrize("name", ["system", "another", "a third"])
def test_what_all_prompts_begin_with_does_not_decide_which_are_sampled(name: str) -> None:
    tree = KnowledgeTree(TournamentPolicy(), shadow_tokens=32_000_000)
    for number in range(800):
        keys = [PathSegment([name], 1, name), PathSegment([(name, number)], 1, str(number))]
        tree.record_access(tree.insert(keys), num_hit_units=0, cost_per_token_s=1.0)
    assert all(800 / 16 < shadow.num_tokens < 800 / 4 for shadow in tree.shadows)  # one of eight
