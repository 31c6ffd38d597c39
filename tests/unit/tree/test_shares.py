"""Tenants in one tree: none matches another's units, and a full tier evicts from those above their share."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.chunkstore.chunks import ChunkEntry
from ragcache_core.chunkstore.regrowing import note_of, regrow
from ragcache_core.policy import make_policy
from ragcache_core.policy.prefill_cost import PrefillCostModel
from ragcache_core.tree import (
    KnowledgeTree,
    PathSegment,
    TreeNode,
    admit,
    admit_within_quotas,
    check_invariants,
    total_size,
)
from ragcache_core.types import Tier
from tests.unit.tree.scene import BLOCK, cache, new_tree, units_in

TENANTS = ("a", "b", None)
CAPACITY = 24


def prompt(owner: str | None, *documents: str, blocks: int = 2) -> list[PathSegment]:
    """A tenant's prompt: his salt is in the first key, and so in all."""
    keys = [
        f"{owner}:{'/'.join([*documents[:n], documents[n]])}.{i}".encode()
        for n in range(len(documents))
        for i in range(blocks)
    ]
    return [
        PathSegment(keys[n * blocks : (n + 1) * blocks], blocks * BLOCK, doc, owner=owner)
        for n, doc in enumerate(documents)
    ]


def divided(tree: KnowledgeTree, tier: Tier = Tier.GPU, **quotas: int) -> KnowledgeTree:
    tree.tiers[tier].shares.divide(CAPACITY, dict.fromkeys(TENANTS, 1.0), quotas)
    return tree


def owned(tree: KnowledgeTree, tier: Tier = Tier.GPU) -> Counter[str | None]:
    return +Counter(tree.tiers[tier].shares.owned)


paths = st.lists(st.sampled_from("xyz"), min_size=1, max_size=3, unique=True)
requests = st.lists(st.tuples(st.sampled_from(TENANTS), paths), min_size=1, max_size=40)


@given(requests, st.sampled_from(["lru", "pgdsf", "mixture"]))
def test_no_tenant_matches_blocks_of_another_tenant(asked: list[tuple[str | None, list[str]]], policy: str) -> None:
    tree = KnowledgeTree(make_policy(policy, PrefillCostModel.default()))
    divided(tree)
    own: dict[str | None, set[bytes]] = {tenant: set() for tenant in TENANTS}
    for turn, (tenant, documents) in enumerate(asked):
        segments = prompt(tenant, *documents)
        match = tree.match_prefix(segments)
        assert all(node.owner == tenant for node in match.nodes)
        assert {key for node in match.nodes for key in node.keys} <= own[tenant]
        cache(tree, segments, list(Tier)[turn % 3], is_checked=False)
        own[tenant] |= {bytes(key) for segment in segments for key in segment.keys}  # type: ignore[arg-type]  # keys are bytes here
    assert {node.owner for node in tree.nodes()} <= set(TENANTS)
    for node in tree.nodes():
        assert all(str(key, "utf-8").startswith(f"{node.owner}:") for key in node.keys)  # type: ignore[arg-type]  # keys are bytes here


@given(requests)
def test_a_full_tier_evicts_no_owner_below_quota_while_another_is_over_quota(
    asked: list[tuple[str | None, list[str]]],
) -> None:
    tree = divided(new_tree())
    shares = tree.tiers[Tier.GPU].shares
    for tenant, documents in asked:
        segments = prompt(tenant, *documents)
        missing = [key for segment in segments for key in segment.keys if not is_cached(tree, key)]
        num_over = tree.tiers[Tier.GPU].num_units + len(missing) - CAPACITY
        if num_over > 0:
            before, over = owned(tree), shares.owners_over_quota()
            gone = Counter(unit.node.owner for unit in units_in(tree.evict_up_to(Tier.GPU, num_over)))
            for victim, num_units in gone.items():
                others = [other for other in over if other != victim and shares.excess(other) > 0]
                assert before[victim] - num_units >= min(before[victim], CAPACITY // 3) or not others
        cache(tree, segments, is_checked=False)
        check_invariants(tree)


def is_cached(tree: KnowledgeTree, key: object) -> bool:
    at = tree.locate(key)  # type: ignore[arg-type]  # keys are bytes here
    return at is not None and bool(tree.resident_mask(at.node, Tier.GPU) >> at.unit & 1)


def test_who_floods_a_tier_pushes_out_himself() -> None:
    tree = divided(new_tree())
    for i in range(4):
        cache(tree, prompt("a", f"mine {i}"))
    for i in range(40):
        num_over = tree.tiers[Tier.GPU].num_units + 2 - CAPACITY
        if num_over > 0:
            assert {run.node.owner for run in tree.evict_up_to(Tier.GPU, num_over)} == {"b"}
        cache(tree, prompt("b", f"flood {i}"))
    assert owned(tree) == {"a": 8, "b": 16}


def test_unused_quota_is_lent_to_other_owners_and_returned() -> None:
    tree = divided(new_tree())
    for i in range(12):
        cache(tree, prompt("b", f"flood {i}"))
    assert owned(tree) == {"b": CAPACITY}, "a tier that is not shared is anybody's"
    for i in range(4):
        assert {run.node.owner for run in tree.evict_up_to(Tier.GPU, 2)} == {"b"}
        cache(tree, prompt("a", f"mine {i}"))
    assert owned(tree) == {"a": 8, "b": 16}


def test_an_owner_below_quota_is_admitted_whatever_the_priority_of_others() -> None:
    """A selective host tier asks what is worth more: who came first, and is asked often, would keep it for ever."""
    tree = KnowledgeTree(make_policy("mixture", PrefillCostModel.default()))
    divided(tree, Tier.HOST)
    for i in range(12):
        for _ in range(5):
            cache(tree, prompt("b", f"hot {i}"), Tier.HOST, is_checked=False)
    segments = prompt("a", "new")
    tree.record_access(tree.insert(segments), num_hit_units=0, cost_per_token_s=1e-9)
    keys = [key for segment in segments for key in segment.keys]
    assert admit(tree, Tier.HOST, keys, 0).num_admitted == 2
    another = prompt("b", "another")
    tree.record_access(tree.insert(another), num_hit_units=0, cost_per_token_s=1e-9)
    assert admit(tree, Tier.HOST, [key for s in another for key in s.keys], 0).num_admitted == 0


def test_a_quota_is_kept_by_giving_up_ones_own() -> None:
    tree = divided(new_tree(), a=6)
    shares = tree.tiers[Tier.GPU].shares
    for i in range(8):
        cache(tree, prompt("a", f"mine {i}"))
        cache(tree, prompt("b", f"his {i}"))
        gone = tree.evict_from_owner(Tier.GPU, "a", shares.num_over_quota("a"))
        assert {run.node.owner for run in gone} <= {"a"}
        assert owned(tree)["a"] <= 6
    assert owned(tree) == {"a": 6, "b": 16}
    assert (shares.num_over_quota("a"), shares.num_over_quota("a", 2), shares.num_over_quota("b", 100)) == (0, 2, 0)


def in_collections(*documents: str, blocks: int = 2) -> list[PathSegment]:
    """A prompt behind a common prefix without an owner. A document's first letter is its collection."""
    segments = prompt(None, "", *documents, blocks=blocks)
    owner = {"a": "a", "b": "b"}
    segments = [s._replace(owner=owner.get((s.doc_id or " ")[0]), doc_id=s.doc_id or None) for s in segments]
    return [*segments, PathSegment([b"?" + "/".join(documents).encode()], BLOCK)]


def test_documents_of_two_collections_on_one_path_count_for_each_its_own() -> None:
    tree = divided(new_tree(), a=4)
    path = cache(tree, in_collections("a1", "b1", "c1", "a2"))
    assert [node.owner for node in path] == [None, "a", "b", None, "a", "a"], (
        "what has no name belongs to the owner of its prefix"
    )
    assert owned(tree) == {"a": 5, "b": 2, None: 4}
    assert [unit.node.owner for unit in units_in(tree.evict_from_owner(Tier.GPU, "a", 1))] == ["a"]
    check_invariants(tree)
    assert tree.evict_from_owner(Tier.GPU, "b", 1) == [], "a document of another stands on it"


def test_a_path_is_kept_up_to_the_first_unit_beyond_a_quota() -> None:
    tree = divided(new_tree(), a=3, b=1)
    for documents, num_kept, num_evicted in (
        (("a1",), 5, 0),
        (("b1", "a2"), 1, 0),
        (("c1", "a2"), 5, 3),
        (("c1", "a3"), 3, 3),
        (("c1", "c2"), 3, 0),
    ):
        path = tree.insert(in_collections(*documents))
        keys = [key for node in path for key in node.keys if not is_cached(tree, key)]
        admitted = admit_within_quotas(tree, Tier.GPU, keys, tree.shielded(keys))
        assert {run.node.owner for run in admitted.evicted} <= {"a"}
        assert (admitted.num_admitted, total_size(admitted.evicted)) == (num_kept, num_evicted), documents
        for key in keys[:num_kept]:
            at = tree.locate(key)
            assert at is not None
            tree.add(at.node, 1 << at.unit, Tier.GPU)
        assert owned(tree)["a"] <= 3
        check_invariants(tree)


def test_an_eviction_that_cannot_be_done_leaves_the_counts_as_they_were() -> None:
    tree = divided(new_tree())
    cache(tree, prompt("a", "mine"))
    before = dict(tree.tiers[Tier.GPU].shares.owned), tree.tiers[Tier.GPU].num_evicted_units
    assert tree.evict(Tier.GPU, 3) is None
    assert (dict(tree.tiers[Tier.GPU].shares.owned), tree.tiers[Tier.GPU].num_evicted_units) == before
    assert sum(tree.tiers[Tier.GPU].shares.evicted.values()) == 0


def test_a_tenant_whom_the_file_names_no_more_has_what_others_leave() -> None:
    tree = divided(new_tree())
    cache(tree, prompt("gone", "old"))
    for i in range(11):
        cache(tree, prompt("a", f"mine {i}"))
    tree.tiers[Tier.GPU].shares.divide(CAPACITY, {"a": 1.0}, {})
    assert {run.node.owner for run in tree.evict_up_to(Tier.GPU, 2)} == {"gone"}


@pytest.mark.parametrize("other_ids", [frozenset(), frozenset({"x2"})])
def test_what_is_stored_is_its_tenants_after_a_restart(other_ids: frozenset[str]) -> None:
    tree = new_tree()
    segments = [segment._replace(other_ids=other_ids) for segment in prompt("a", "x", "y")]
    places: list[TreeNode] = cache(tree, [*segments], Tier.DISK)
    entries = []
    for node in (*places, *cache(tree, prompt(None, "z"), Tier.DISK)):
        for key in node.keys:
            at = tree.locate(key)
            assert at is not None
            note = note_of(tree, at)
            entries.append(ChunkEntry(key, note.parent, note.doc_id, note.position, 1.0, 1.0))  # type: ignore[arg-type]  # keys are bytes here
    again = new_tree()
    found, orphans = regrow(again, entries, Tier.DISK, BLOCK)
    assert (len(found), orphans) == (6, [])
    assert owned(again, Tier.DISK) == {"a": 4, None: 2}
    assert {(node.doc_id, node.owner, node.other_ids) for node in again.nodes()} == {
        ("x", "a", other_ids), ("y", "a", other_ids), ("z", None, frozenset())
    }  # fmt: skip
