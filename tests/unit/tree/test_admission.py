"""A full tier takes in what ranks above that which has to go for it, and nothing else."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.policy import MixturePolicy, ReplacementPolicy
from ragcache_core.policy.base import NodeStats
from ragcache_core.tree import KnowledgeTree, PathSegment, TreeNode, admit, check_invariants
from ragcache_core.types import Tier
from tests.unit.tree.scene import units_in

BLOCKS = 2


def keys_of(*documents: str) -> list[tuple[str, ...]]:
    names = [f"{doc}.{i}" for doc in documents for i in range(BLOCKS)]
    return [tuple(names[: i + 1]) for i in range(len(names))]


def ask(tree: KnowledgeTree, *documents: str) -> list[TreeNode]:
    """Count a request whose documents are computed."""
    keys = keys_of(*documents)
    path = tree.insert(
        [PathSegment(keys[n * BLOCKS : (n + 1) * BLOCKS], BLOCKS, doc) for n, doc in enumerate(documents)]
    )
    tree.record_access(path, num_hit_units=0, cost_per_token_s=1e-3)
    return path


def offer(tree: KnowledgeTree, keys: list[tuple[str, ...]], capacity: int, protected: tuple[Hashable, ...] = ()) -> int:
    """Offer the units of a path to the host, put what is admitted there, and return how many that were."""
    num_free = capacity - tree.tiers[Tier.HOST].num_units
    admission = admit(tree, Tier.HOST, keys, num_free, tree.units_of(protected))
    for key in keys[: admission.num_admitted]:
        location = tree.locate(key)
        assert location is not None
        tree.add(location.node, 1 << location.unit, Tier.HOST)
    assert tree.tiers[Tier.HOST].num_units <= capacity
    check_invariants(tree, is_connected=False)
    return admission.num_admitted


def new_tree() -> KnowledgeTree:
    return KnowledgeTree(MixturePolicy())


def test_a_block_of_lower_priority_than_all_present_is_not_admitted() -> None:
    tree = new_tree()
    for _ in range(3):
        ask(tree, "A")
    offer(tree, keys_of("A"), capacity=2)
    ask(tree, "B")
    assert offer(tree, keys_of("B"), capacity=2) == 0
    assert offer(tree, keys_of("B"), capacity=3) == 1, "the beginning of a document is of use without its end"
    for _ in range(9):
        ask(tree, "B")
    assert offer(tree, keys_of("B")[1:], capacity=3, protected=(keys_of("B")[0],)) == 1
    match = tree.match_prefix([PathSegment(keys_of("A"), 2)])
    assert match.num_units == 1, "the last unit of what was worth least went"


class NamedRanks(ReplacementPolicy):
    """Ranks documents by a table."""

    name = "named"
    uses_clock: ClassVar[bool] = False

    def __init__(self, **ranks: float) -> None:
        self._ranks = ranks

    def rank(self, stats: NodeStats, clock: float) -> float:
        assert stats.doc_id is not None
        return self._ranks[stats.doc_id]


def test_the_priority_of_a_node_includes_its_subtree() -> None:
    tree = KnowledgeTree(NamedRanks(old=2.0, low=1.0, high=3.0))
    for documents in (["old"], ["low"], ["low", "high"], ["high", "low"]):
        ask(tree, *documents)
    offer(tree, keys_of("old"), capacity=2)
    assert offer(tree, keys_of("low"), capacity=2) == 0
    assert offer(tree, keys_of("high", "low"), capacity=4) == 2, "what stands before it gives it no rank"
    assert offer(tree, keys_of("low", "high"), capacity=6) == 4
    assert not any(tree.resident_mask(node, Tier.HOST) for node in tree.nodes_of("old"))


def test_units_that_count_for_several_are_taken_in_while_what_goes_makes_room_for_them() -> None:
    tree = new_tree()
    ask(tree, "old")
    offer(tree, keys_of("old"), capacity=2)
    for _ in range(9):
        ask(tree, "A")
    admission = admit(tree, Tier.HOST, keys_of("A"), 1, offered_size=lambda key: 3, evicted_size=lambda key: len(key))
    assert [unit.key for unit in units_in(admission.evicted)] == keys_of("old")[::-1], (
        "two and one, for five that are missing"
    )
    assert admission.num_admitted == 1


@given(
    requests=st.lists(st.lists(st.sampled_from("ABCD"), min_size=1, max_size=3, unique=True), max_size=30),
    capacity=st.integers(1, 9),
)
def test_only_what_ranks_lower_goes(requests: list[list[str]], capacity: int) -> None:
    tree = new_tree()
    host = tree.tiers[Tier.HOST]
    for documents in requests:
        path = ask(tree, *documents)
        keys = [key for key in keys_of(*documents) if not _is_on_host(tree, key)]
        protected = tuple(keys_of(*documents))
        before = {node: tree.resident_mask(node, Tier.HOST) for node in tree.nodes()}
        num_admitted = offer(tree, keys, capacity, protected)
        gone = [node for node, mask in before.items() if mask & ~tree.resident_mask(node, Tier.HOST)]
        worth = {node: host.worth(node, tree.num_requests) for node in (*gone, *path)}
        assert all(worth[node] < max(worth[other] for other in path) for node in gone)
        assert num_admitted == len(keys) or host.num_units == capacity


def _is_on_host(tree: KnowledgeTree, key: Hashable) -> bool:
    location = tree.locate(key)
    return location is not None and bool(tree.resident_mask(location.node, Tier.HOST) >> location.unit & 1)
