"""Admission to a full tier: only units that rank above the ones evicted for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

from ragcache_core.tree.node import EvictedRun, TreeNode
from ragcache_core.tree.tiered_tree import NO_UNITS, Shield, TieredTree, total_size
from ragcache_core.types import Tier


class Admission(NamedTuple):
    """The first ``num_admitted`` offered units may enter the tier; ``evicted`` were evicted for them."""

    num_admitted: int
    evicted: list[EvictedRun]


def admit(
    tree: TieredTree,
    tier: Tier,
    keys: Sequence[Hashable],
    num_free: int,
    protected: Shield = NO_UNITS,
    *,
    offered_size: Callable[[Hashable], int] | None = None,
    evicted_size: Callable[[Hashable], int] | None = None,
) -> Admission:
    """Evict lower-ranked units from ``tier`` for the offered ones, node by node.

    A node ranks at least as high as those offered behind it, which are of no use without it: a document that was used
    once enters with the history of a conversation that is likely to go on.

    Args:
        tree: has the units.
        tier: the tier.
        keys: units of one path in order, none of them in the tier. Unknown ones only get free space.
        num_free: free units.
        protected: units that must stay.
        offered_size: size of an offered unit by key; one if ``None``.
        evicted_size: size of an evicted unit.
    """

    num_admitted = num_seen = 0
    evicted: list[EvictedRun] = []
    with tree.shielding(protected, tier):
        parts = _parts(tree, keys)
        for (node, num_offered), worth in zip(parts, _worths(tree, tier, parts), strict=True):
            offered = keys[num_seen : num_seen + num_offered]
            num_seen += num_offered
            sizes = None if offered_size is None else [*map(offered_size, offered)]
            num_missing = (len(offered) if sizes is None else sum(sizes)) - num_free
            if num_missing > 0 and node is not None:
                gone = tree.evict_up_to(tier, num_missing, below=worth, size_of=evicted_size, for_owner=node.owner)
                evicted += gone
                num_free += total_size(gone, evicted_size)
            num_fitting = _num_fitting(len(offered), sizes, num_free)
            num_admitted += num_fitting
            if num_fitting < len(offered):
                return Admission(num_admitted, evicted)
            num_free -= len(offered) if sizes is None else sum(sizes)
    return Admission(num_admitted, evicted)


def _worths(tree: TieredTree, tier: Tier, parts: Sequence[tuple[TreeNode | None, int]]) -> list[float]:
    """Return, for each part of a path, the highest rank of its node and the following ones."""
    state = tree.tiers[tier]
    own = [-math.inf if node is None else state.worth(node, tree.num_requests) for node, _ in parts]
    return [*accumulate(reversed(own), max)][::-1]


def _parts(tree: TieredTree, keys: Sequence[Hashable]) -> list[tuple[TreeNode | None, int]]:
    """Return the nodes of units in order (``None`` for unknown ones), with their numbers of units."""
    parts: list[tuple[TreeNode | None, int]] = []
    end = 0
    for at, first, length in tree.runs(keys):
        if at > end:
            parts.append((None, at - end))
        end = at + length
        if parts and parts[-1][0] is first.node:
            length += parts.pop()[1]
        parts.append((first.node, length))
    if end < len(keys):
        parts.append((None, len(keys) - end))
    return parts


def _num_fitting(num_offered: int, sizes: Sequence[int] | None, num_free: int) -> int:
    """Return how many leading units fit into ``num_free``; each has size one if ``sizes`` is ``None``."""
    if sizes is None:
        return max(min(num_offered, num_free), 0)
    return sum(1 for _ in takewhile(lambda size: size <= num_free, accumulate(sizes)))


def admit_within_quotas(tree: TieredTree, tier: Tier, keys: Sequence[Hashable], protected: Shield) -> Admission:
    """Evict an owner's own units from ``tier``, if the offered ones exceed its quota.

    ``keys`` and ``protected`` are as those of :func:`admit`. From the first unit that is beyond a quota all the same,
    none is admitted.
    """
    shares = tree.tiers[tier].shares
    owners = tree.owners_of(keys)
    evicted: list[EvictedRun] = []
    for owner in dict.fromkeys(owners):
        places = [at for at, each in enumerate(owners) if each == owner]
        if places and (num_over := shares.num_over_quota(owner, len(places))):
            evicted += tree.evict_from_owner(tier, owner, num_over, protected)
            if num_over := shares.num_over_quota(owner, len(places)):
                del owners[places[max(len(places) - num_over, 0)] :]
    return Admission(len(owners), evicted)
