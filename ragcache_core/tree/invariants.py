"""Invariants of a knowledge tree."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from operator import or_

from ragcache_core.tree.knowledge_tree import KnowledgeTree
from ragcache_core.tree.node import TreeNode
from ragcache_core.types import DocId, Tier


def check_invariants(tree: KnowledgeTree, *, is_connected: bool = True) -> None:
    """Assert that ``tree`` is consistent; for tests, O(units).

    ``is_connected``: each resident unit's predecessors are resident in the same tier or a faster one, as long as
    no unit is added without its prefix or taken out from under others (``remove``, ``evict_anything``).
    """
    located = 0
    for node in tree.nodes():
        assert node.parent is not None
        assert node.parent.children is not None
        assert node.parent.children[node.keys[0]] is node
        assert node.parent is tree.root or node.doc_id is not None or node.owner == node.parent.owner
        assert node.start == node.parent.start + len(node.parent.keys)
        assert node.keys
        assert node.num_pins >= 0
        assert node.num_users >= 0
        for unit, key in enumerate(node.keys):
            location = tree.locate(key)
            assert location is not None
            assert (location.node, location.unit) == (node, unit)
            located += 1
        for tier in Tier:
            assert tree.resident_mask(node, tier) & ~node.full_mask == 0
            for unit, slot in enumerate(tree.tiers[tier].slots[node.id] or ()):
                assert slot is None or tree.resident_mask(node, tier) >> unit & 1, (node, unit, tier)
            if is_connected:
                assert not _gaps(tree, node, tier), (node, tier)
    _check_documents(tree)
    _check_protection(tree)
    for tier in Tier:
        state = tree.tiers[tier]
        assert state.num_units == sum(state.resident[n.id].bit_count() for n in tree.nodes())
        assert state.num_nodes == sum(state.resident[n.id] != 0 for n in tree.nodes())
        owned: Counter[str | None] = Counter()
        for node in tree.nodes():
            owned[node.owner] += state.resident[node.id].bit_count()
        assert +owned == +Counter(state.shares.owned), tier
        for parent in (tree.root, *tree.nodes()):
            resident = sum(1 for child in parent.iter_children() if state.resident[child.id])
            assert state.num_resident_children[parent.id] == resident, (parent, tier)
        for node in tree.nodes():
            if state.is_evictable(node):
                assert state.is_candidate(node), (node, tier)
            if tree.policy.copy_discount:
                assert state.is_copied(node) == _is_below(tree, node, tier), (node, tier)


def _check_documents(tree: KnowledgeTree) -> None:
    found: dict[DocId, set[TreeNode]] = {}
    tiers: dict[DocId, set[Tier]] = {}
    for node in tree.nodes():
        assert node.doc_id is None or node.doc_id not in node.other_ids, f"{node} has its document twice"
        for doc_id in node.doc_ids():
            found.setdefault(doc_id, set()).add(node)
            here = {tier for tier in Tier if tree.resident_mask(node, tier) and not node.is_private}
            tiers.setdefault(doc_id, set()).update(here)
    for doc_id, nodes in found.items():
        assert set(tree.nodes_of(doc_id)) == nodes, doc_id
        assert set(tree.tiers_of(doc_id)) == tiers[doc_id], doc_id


def _is_below(tree: KnowledgeTree, node: TreeNode, tier: Tier) -> bool:
    """Return whether slower tiers have all units of a node that ``tier`` has."""
    mask = tree.resident_mask(node, tier)
    below = reduce(or_, [tree.resident_mask(node, slower) for slower in Tier if slower > tier], 0)
    return mask != 0 and mask & ~below == 0


def _check_protection(tree: KnowledgeTree) -> None:
    counts: Counter[int] = Counter()
    for key, count in tree.protected_keys.items():
        location = tree.locate(key)
        assert location is not None, key
        for node in location.node.path():
            counts[node.id] += count
    assert tree.protected == counts
    assert tree.num_replicated_units == sum(tree.replicated.values())
    replicated = [node for node in tree.nodes() if node.id in tree.replicated]
    assert {node.id: len(node.keys) for node in replicated} == tree.replicated
    assert all(tree.resident_mask(node, Tier.GPU) for node in replicated)
    assert tree.tiers[Tier.HOST].protected == counts + Counter(node.id for node in replicated)


def _gaps(tree: KnowledgeTree, node: TreeNode, tier: Tier) -> int:
    """Return the units before the last resident one of ``node`` in ``tier`` that no faster tier has."""
    mask = tree.resident_mask(node, tier)
    if not mask:
        return 0
    gaps = ((1 << mask.bit_length()) - 1) & ~_available(tree, node, tier)
    for ancestor in node.path()[:-1]:
        gaps |= ancestor.full_mask & ~_available(tree, ancestor, tier)
    return gaps


def _available(tree: KnowledgeTree, node: TreeNode, tier: Tier) -> int:
    masks = [tree.resident_mask(node, faster) for faster in Tier if faster <= tier]
    return reduce(or_, masks)
