"""A prefix tree whose units are in tiers: residency, reference counts, and eviction order."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, takewhile
from types import MappingProxyType
from typing import Final, NamedTuple

from ragcache_core.policy.base import ReplacementPolicy
from ragcache_core.tree.changes import NodeChanges
from ragcache_core.tree.node import EvictedRun, TreeNode, evicted_runs, runs_of
from ragcache_core.tree.prefix_tree import UNIT_BITS, UNITS, PrefixTree
from ragcache_core.tree.shares import Owner
from ragcache_core.tree.tier import TierState
from ragcache_core.types import DocId, Tier

Shield = Mapping[TreeNode, int]
"""Units that stay while others are evicted: a mask of them for each node."""
NO_UNITS: Final[Shield] = MappingProxyType({})
NO_OWNER: Final = ""
"""In place of an owner: the owner that units are evicted for is unknown, or does not matter."""


class _Victim(NamedTuple):
    """The node to evict from next, the maximum number of units, and whether ranks are ignored."""

    node: TreeNode
    num_units: int
    is_forced: bool


class TieredTree(PrefixTree):
    """Units enter tiers, are acquired in them, and are evicted from the end of the lowest-ranked leaf.

    The subclass defines ranks, and handles nodes without resident units.

    A node stays in a tier while units in slower tiers depend on its copy there. With ``moves_down`` it may be evicted,
    as the caller moves it to the next tier (:meth:`victim`, :meth:`evict_node`).

    Attributes:
        tiers: by :class:`~ragcache_core.types.Tier`.
        num_requests: number of counted requests since the start.
        protected_keys: units that are pinned or retained, with the number of calls of :meth:`protect`.
        protected: number of these units in a node or below it, by node id; such a node is evicted last.
        replicated: nodes whose copy in host memory is evicted last, by node id, with their units.
        num_replicated_units: units of all replicated nodes.
        changes: records changed nodes; ``None`` without readers.
        now_s: the current time in seconds, which the caller sets.
    """

    def __init__(self, policy: ReplacementPolicy, *, moves_down: bool = False) -> None:
        self.policy = policy
        self._looks_below = policy.copy_discount != 0.0
        self.num_requests = 0
        self.changes: NodeChanges | None = None
        self.now_s = 0.0
        self.protected_keys: dict[Hashable, int] = {}
        self.protected: dict[int, int] = {}
        self.replicated: dict[int, int] = {}
        self.num_replicated_units = 0
        self._host_protected: dict[int, int] = {}
        disk = TierState(policy, (), self.protected, moves_down=moves_down)
        host = TierState(policy, (disk,), self._host_protected, moves_down=moves_down)
        gpu = TierState(policy, (host, disk), self.protected, moves_down=moves_down)
        self.tiers = (gpu, host, disk)
        self._up_from: dict[TierState, tuple[TierState, ...]] = {gpu: (gpu,), host: (gpu, host), disk: self.tiers}
        """Each tier with those above it."""
        self._may_free = {state: (state,) for state in self.tiers} if moves_down else self._up_from
        """Where a change may make a node evictable: there, and in the tiers on whose copies its units stand."""
        super().__init__()

    def resident_mask(self, node: TreeNode, tier: Tier) -> int:
        """Return the mask of units of ``node`` in ``tier``."""
        return self.tiers[tier].resident[node.id]

    def is_resident(self, key: Hashable, tier: Tier) -> bool:
        """Return whether a unit lies in ``tier``."""
        place = self._places.get(key)
        return place is not None and bool(self.tiers[tier].resident[place >> UNIT_BITS] >> (place & UNITS) & 1)

    def tiers_of(self, doc_id: DocId, is_own: Callable[[str | None], bool] = lambda _: True) -> list[Tier]:
        """Return the tiers with a part of a document, over all prefixes, in public nodes of some owners.

        O(nodes of the document).
        """
        own = [node.id for node in self.nodes_of(doc_id) if not node.is_private and is_own(node.owner)]
        return [tier for tier in Tier if any(self.tiers[tier].resident[node_id] for node_id in own)]

    def make_private(self, node: TreeNode) -> None:
        """Restrict a node to one application; see :class:`TreeNode`."""
        node.is_private = True

    # Being used

    def pin(self, nodes: Iterable[TreeNode]) -> None:
        """Keep nodes in their tiers until :meth:`unpin`.

        Pin whole paths for a moment only: inserting a prompt that leaves one inside a pinned node is an error, for a
        pinned node cannot be cut.
        """
        for node in nodes:
            node.num_pins += 1

    def unpin(self, nodes: Iterable[TreeNode]) -> None:
        """Undo :meth:`pin`."""
        for node in nodes:
            assert node.num_pins > 0, node
            node.num_pins -= 1
            if not node.num_pins:
                for state in self.tiers:
                    state.offer(node)
                self._on_left(node)

    def acquire_units(self, node: TreeNode, units: int, tier: Tier) -> None:
        """Keep the units of ``node`` in the mask ``units`` in ``tier``, as requests or transfers use them."""
        in_use = self.tiers[tier].in_use
        in_use[node.id] = in_use.get(node.id, 0) | units

    def release_units(self, node: TreeNode, units: int, tier: Tier) -> None:
        """Undo :meth:`acquire_units`; ignore units that are not acquired."""
        state = self.tiers[tier]
        if (before := state.in_use.get(node.id)) is None:
            return
        mask = before & ~units
        if mask:
            state.in_use[node.id] = mask
        else:
            del state.in_use[node.id]
        state.offer(node)

    def protect(self, key: Hashable) -> None:
        """Keep the nodes from the root to the unit ``key`` in the tree, and evict them last, until :meth:`unprotect`.

        Where nothing else is left they go all the same, the lowest-ranked first.
        """
        self.protected_keys[key] = self.protected_keys.get(key, 0) + 1
        last = self._node_of(key)
        for node in last.path():
            self.protected[node.id] = self.protected.get(node.id, 0) + 1
            self._protect_in_host(node)
        self._on_arrived(last)

    def unprotect(self, key: Hashable) -> None:
        """Undo :meth:`protect`."""
        count = self.protected_keys.pop(key) - 1
        if count:
            self.protected_keys[key] = count
        last = self._node_of(key)
        for node in last.path():
            self.protected[node.id] -= 1
            if not self.protected[node.id]:
                del self.protected[node.id]
                self.tiers[Tier.GPU].unprotect(node)
                self.tiers[Tier.DISK].unprotect(node)
            self._unprotect_in_host(node)
        self._on_left(last)

    def is_protected(self, node: TreeNode) -> bool:
        """Return whether ``node`` is evicted last."""
        return node.id in self.protected

    def demote(self, node: TreeNode) -> None:
        """Evict ``node`` before all others, until it is inserted again."""
        node.is_transient = True
        node.updated = self._next_sequence()
        for state in self.tiers:
            state.update_rank(node)

    def replicate(self, node: TreeNode) -> None:
        """Evict ``node`` last from host memory, until :meth:`unreplicate`, or until the GPU has nothing of it.

        What a GPU that fails takes with it is then still there. RAGCache §6 replicates the most used upper nodes.
        """
        self.replicated[node.id] = len(node.keys)
        self.num_replicated_units += len(node.keys)
        self._protect_in_host(node)

    def unreplicate(self, node: TreeNode) -> None:
        """Undo :meth:`replicate`."""
        self.num_replicated_units -= self.replicated.pop(node.id)
        self._unprotect_in_host(node)

    @contextmanager
    def shielding(self, units: Shield, tier: Tier) -> Iterator[None]:
        """Keep units in ``tier`` over several evictions; do not call :meth:`acquire_units` for others meanwhile."""
        state = self.tiers[tier]
        held = self._shield(units, state)
        try:
            yield
        finally:
            self._unshield(held, state)

    # Entering and leaving a tier

    def add(self, node: TreeNode, units: int, tier: Tier) -> None:
        """Record that the units of ``node`` in the mask ``units`` are in ``tier``."""
        self._add(node, units, self.tiers[tier])

    def make_older(self, node: TreeNode, stored_s: float) -> None:
        """Set an earlier time for units that were just added; a time in the future becomes now."""
        if node.stored_s is not None and stored_s < node.stored_s:
            node.stored_s = stored_s

    def older_than(self, stored_s: float) -> list[TreeNode]:
        """Return the nodes with units from before a time; O(nodes)."""
        return [node for node in self.nodes() if node.stored_s is not None and node.stored_s < stored_s]

    def remove(self, node: TreeNode, units: int, tier: Tier) -> None:
        """Record that the units of ``node`` in the mask ``units`` left ``tier`` without eviction."""
        self._remove(node, units, self.tiers[tier])
        self._forget_uses((node,))

    def evict(
        self,
        tier: Tier,
        num_units: int = 1,
        protected: Shield = NO_UNITS,
        *,
        size_of: Callable[[Hashable], int] | None = None,
        for_owner: Owner = NO_OWNER,
    ) -> list[EvictedRun] | None:
        """Evict ``num_units`` units from ``tier``, the last ones of the lowest-ranked leaf first (Algorithm 1, EVICT).

        Atomic: where fewer can go, none goes and None is returned. ``protected`` units stay;
        ``size_of`` a key says for how many its unit counts, where that is not one. Units of
        owners above their share are evicted first. An owner at its share can evict only those and its own.
        """
        state = self.tiers[tier]
        clock = state.clock
        stored_s: dict[TreeNode, float | None] = {}
        evicted = self._evict(state, num_units, protected, size_of=size_of, for_owner=for_owner, stored_s=stored_s)
        if total_size(evicted, size_of) >= num_units:
            self._forget_uses(run.node for run in evicted)
            return evicted
        for run in evicted:
            end = run.first + len(run.keys)
            self._add(run.node, (1 << end) - (1 << run.first), state)
            if run.slots:
                state.slots_of(run.node)[run.first : end] = run.slots[::-1]
            state.shares.count_evicted(run.node.owner, -len(run.keys))
        for node, moment_s in stored_s.items():
            if moment_s is not None:
                self.make_older(node, moment_s)
        state.clock = clock
        state.num_evicted_units -= total_size(evicted)
        return None

    def evict_up_to(
        self,
        tier: Tier,
        num_units: int,
        protected: Shield = NO_UNITS,
        *,
        below: float = math.inf,
        size_of: Callable[[Hashable], int] | None = None,
        for_owner: Owner = NO_OWNER,
    ) -> list[EvictedRun]:
        """Evict up to ``num_units`` units with a score below ``below``.

        Owners above their share also lose higher-ranked units, where ``for_owner`` is below its own share.
        """
        evicted = self._evict(self.tiers[tier], num_units, protected, below, size_of, for_owner)
        self._forget_uses(run.node for run in evicted)
        return evicted

    def owners_of(self, keys: Iterable[Hashable]) -> list[Owner]:
        """Return the owner of each unit; ``None`` without an owner, or for unknown ones."""
        keys = [*keys]
        owners: list[Owner] = [None] * len(keys)
        for at, first, length in self.runs(keys):
            owners[at : at + length] = [first.node.owner] * length
        return owners

    def evict_from_owner(
        self, tier: Tier, owner: Owner, num_units: int, protected: Shield = NO_UNITS
    ) -> list[EvictedRun]:
        """Do :meth:`evict_up_to` with units of ``owner`` only."""
        evicted = self._evict(self.tiers[tier], num_units, protected, for_owner=owner, is_own_alone=True)
        self._forget_uses(run.node for run in evicted)
        return evicted

    def evict_anything(self, tier: Tier) -> EvictedRun | None:
        """Evict one unit of ``tier`` that is not acquired, even if others depend on it; a last resort, O(nodes)."""
        state = self.tiers[tier]
        best: tuple[tuple[bool, float], TreeNode, int] | None = None
        for node in self.nodes():
            free = state.resident[node.id] & ~state.in_use.get(node.id, 0)
            if not free or node.num_pins:
                continue
            worth = (self.is_protected(node), state.ranks[node.id])
            if best is None or worth < best[0]:
                best = (worth, node, free.bit_length() - 1)
        if best is None:
            return None
        _, node, unit = best
        (evicted,) = evicted_runs(node, 1 << unit, state.slots[node.id])
        self.remove(node, 1 << unit, tier)
        state.num_evicted_units += 1
        return evicted

    def victim(self, tier: Tier) -> TreeNode | None:
        """Return the next node to evict from ``tier``; ``None`` if there is none. The caller may copy it first."""
        return self.tiers[tier].candidate(self._nodes, self.num_requests)

    def evict_node(self, node: TreeNode, tier: Tier) -> None:
        """Evict all of the :meth:`victim` of ``tier``."""
        self._evict_tail(node, len(node.keys), self.tiers[tier])
        self._forget_uses((node,))

    def clear_tier(self, tier: Tier) -> None:
        """Remove everything from ``tier``, whose memory was reset or lost."""
        state = self.tiers[tier]
        state.in_use.clear()
        for node in list(self.nodes()):
            if state.resident[node.id]:
                self._remove(node, state.resident[node.id], state)

    # For the subclass

    def _on_arrived(self, node: TreeNode) -> None:
        """Handle a node that entered a tier or became protected."""

    def _on_left(self, node: TreeNode) -> None:
        """Handle a node that left a tier, or is no longer pinned or protected."""

    def _forget_uses(self, nodes: Iterable[TreeNode]) -> None:
        """Handle nodes whose units left all tiers."""

    # Inside

    def _may_grow(self, node: TreeNode) -> bool:
        return node.id not in self.protected  # what is protected is counted

    def _on_new_ids(self, num_ids: int) -> None:
        for state in self.tiers:
            state.add_columns(num_ids)

    def _on_split(self, node: TreeNode, lower: TreeNode) -> None:
        self.policy.on_split(node, lower)
        if num_protected := self.protected.get(node.id, 0):
            num_protected -= sum(self.protected_keys.get(key, 0) for key in node.keys)
            if num_protected:
                self.protected[lower.id] = self._host_protected[lower.id] = num_protected
        if node.id in self.replicated:
            self.num_replicated_units -= len(lower.keys)
            self.replicated[node.id] = len(node.keys)
        num_units = len(node.keys)
        low_bits = node.full_mask
        for state in self.tiers:
            mask = state.resident[node.id]
            state.resident[node.id], state.resident[lower.id] = mask & low_bits, mask >> num_units
            if mask & low_bits and mask >> num_units:
                state.num_nodes += 1
            if (slots := state.slots[node.id]) is not None:
                state.slots[node.id], state.slots[lower.id] = slots[:num_units], slots[num_units:] or None
            state.num_resident_children[lower.id] = state.num_resident_children[node.id]
            state.num_resident_children[node.id] = 1 if mask >> num_units else 0
            state.ranks[lower.id] = state.ranks[node.id]
            if held := state.in_use.pop(node.id, 0):
                if held & low_bits:
                    state.in_use[node.id] = held & low_bits
                if held >> num_units:
                    state.in_use[lower.id] = held >> num_units
            if mask and not mask & low_bits and node.parent is not None:
                state.num_resident_children[node.parent.id] -= 1
        stored_s = node.stored_s
        for part in (node, lower):
            part.stored_s = stored_s if self.resident_anywhere(part) else None
            if not self.resident_anywhere(part):
                self.policy.on_departure(part)
        for state in self.tiers:
            state.offer(node)
            state.offer(lower)
            if node.parent is not None:
                state.offer(node.parent)
        for part in (node, lower):
            self._note_change(part, self.tiers[Tier.DISK])  # all tiers are at or above the disk

    def _add(self, node: TreeNode, units: int, state: TierState) -> None:
        before = state.resident[node.id]
        if not before and units and not self.resident_anywhere(node):
            self.policy.on_arrival(node)
        state.resident[node.id] = before | units
        num_new = (units & ~before).bit_count()
        state.num_units += num_new
        state.shares.count(node.owner, num_new)
        if not before and units:
            state.num_nodes += 1
            if node.parent is not None:
                state.num_resident_children[node.parent.id] += 1
                state.withdraw(node.parent)
            if node.stored_s is None:
                node.stored_s = self.now_s
            self._on_arrived(node)
        if units & ~before:
            self._note_change(node, state)
        self._offer_again(node, state)

    def _remove(self, node: TreeNode, units: int, state: TierState) -> None:
        before = state.resident[node.id]
        after = state.resident[node.id] = before & ~units
        if after == before:
            return
        num_gone = (before & units).bit_count()
        state.clear_slots(node, before & units)
        state.num_units -= num_gone
        state.shares.count(node.owner, -num_gone)
        self._note_change(node, state)
        self._offer_again(node, state)
        if after:
            return
        state.num_nodes -= 1
        if not self.resident_anywhere(node):
            node.stored_s = None
            self.policy.on_departure(node)
        if node.id in self.replicated and state is self.tiers[Tier.GPU]:
            self.unreplicate(node)
        if node.parent is not None:
            state.num_resident_children[node.parent.id] -= 1
            self._offer_again(node.parent, state)
        self._on_left(node)

    def _offer_again(self, node: TreeNode, state: TierState) -> None:
        """Make a node a candidate in the tiers in which the change in ``state`` may have made it evictable."""
        for tier in self._may_free[state]:
            if tier.resident[node.id]:  # most often it has just left: this is the hottest place of all decisions
                tier.offer(node)

    def _evict(
        self,
        state: TierState,
        num_units: int,
        protected: Shield,
        below: float = math.inf,
        size_of: Callable[[Hashable], int] | None = None,
        for_owner: Owner = NO_OWNER,
        *,
        is_own_alone: bool = False,
        stored_s: dict[TreeNode, float | None] | None = None,
    ) -> list[EvictedRun]:
        """Evict up to ``num_units`` units; ``stored_s`` gets each node's former age, for undoing."""
        held = self._shield(protected, state)
        evicted: list[EvictedRun] = []
        above: TreeNode | None = None
        while num_units > 0:
            if above is None:
                victim = self._next_victim(state, num_units, for_owner, is_own_alone=is_own_alone)
            else:
                victim = _Victim(above, num_units, False)
            if victim is None:
                break
            score = state.score(victim.node, self.num_requests)
            if not (victim.is_forced or score < below):
                break
            if stored_s is not None:
                stored_s.setdefault(victim.node, victim.node.stored_s)
            parent = victim.node.parent
            tail = self._evict_tail(victim.node, victim.num_units, state, size_of)
            evicted += tail
            num_units -= total_size(tail, size_of)
            above = None
            place = score, victim.node.updated
            is_gone = not state.resident[victim.node.id] and not state.shares
            if is_gone and parent is not None and state.is_before(parent, place, self.num_requests):
                above = parent  # then it is the lowest of all, as its child was: most often, of the same history
        self._unshield(held, state)
        return evicted

    def _next_victim(self, state: TierState, num_units: int, for_owner: Owner, *, is_own_alone: bool) -> _Victim | None:
        """Return the next node to evict from, within the limits of owners."""
        shares = state.shares
        owners: Collection[Owner] | None = None
        if is_own_alone:
            owners = (for_owner,)
        elif shares:
            if over := shares.owners_over_quota():
                node = state.candidate(self._nodes, self.num_requests, over)
                if node is not None:
                    is_forced = for_owner != NO_OWNER and shares.excess(for_owner) < 0
                    return _Victim(node, min(num_units, shares.excess(node.owner)), is_forced)
            if for_owner != NO_OWNER and shares.excess(for_owner) >= 0:
                owners = (for_owner,)
        node = state.candidate(self._nodes, self.num_requests, owners)
        return None if node is None else _Victim(node, num_units, False)

    def _evict_tail(
        self, node: TreeNode, num_units: int, state: TierState, size_of: Callable[[Hashable], int] | None = None
    ) -> list[EvictedRun]:
        state.clock = max(state.clock, state.ranks[node.id])
        mask = state.resident[node.id]
        num_stay = (mask & (state.in_use.get(node.id, 0) | state.bases(node))).bit_length()
        first_free = max(num_stay, mask.bit_length() - num_units)  # a unit counts for one at least
        free = mask >> first_free << first_free
        if size_of is not None and free:
            units = [unit for first, length in runs_of(free) for unit in range(first, first + length)][::-1]
            sizes = accumulate(size_of(node.keys[unit]) for unit in units)
            num_taken = 1 + sum(1 for _ in takewhile(lambda size: size < num_units, sizes))
            last = units[:num_taken][-1]
            free = free >> last << last
        evicted = evicted_runs(node, free, state.slots[node.id])
        if free:
            self._remove(node, free, state)
        state.num_evicted_units += free.bit_count()
        state.shares.count_evicted(node.owner, free.bit_count())
        return evicted

    def _shield(self, units: Shield, state: TierState) -> dict[int, int]:
        """Acquire units, and return the former acquired masks of their nodes."""
        before: dict[int, int] = {}
        for node, mask in units.items():
            held = before[node.id] = state.in_use.get(node.id, 0)
            state.in_use[node.id] = held | mask
        return before

    def _unshield(self, before: dict[int, int], state: TierState) -> None:
        for node_id, held in before.items():
            if held:
                state.in_use[node_id] = held
            else:
                del state.in_use[node_id]
            node = self._nodes[node_id]
            assert node is not None
            state.offer(node)

    def _protect_in_host(self, node: TreeNode) -> None:
        self._host_protected[node.id] = self._host_protected.get(node.id, 0) + 1

    def _unprotect_in_host(self, node: TreeNode) -> None:
        self._host_protected[node.id] -= 1
        if not self._host_protected[node.id]:
            del self._host_protected[node.id]
            self.tiers[Tier.HOST].unprotect(node)

    def _note_change(self, node: TreeNode, state: TierState) -> None:
        """Record that units of ``node`` entered or left ``state``, or moved to another node.

        What concerns a tier concerns those above it, whose copies may be copies no longer.
        """
        if self.changes is not None:
            self.changes.note(node)
        if self._looks_below:
            for tier in self._up_from[state]:
                tier.record_copies(node)

    def resident_anywhere(self, node: TreeNode) -> int:
        """Return the mask of units of ``node`` in any tier."""
        gpu, host, disk = self.tiers
        return gpu.resident[node.id] | host.resident[node.id] | disk.resident[node.id]


def total_size(evicted: Iterable[EvictedRun], size_of: Callable[[Hashable], int] | None = None) -> int:
    """Return the total size of units; one each if ``size_of`` is ``None``."""
    return sum(len(run.keys) if size_of is None else sum(map(size_of, run.keys)) for run in evicted)
