"""One tier of the tree: its resident units, and its order of eviction."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, Final

from ragcache_core.policy.base import ReplacementPolicy
from ragcache_core.tree.node import TreeNode, runs_of
from ragcache_core.tree.shares import Owner, Shares

_MIN_ENTRIES: Final = 1024
_ENTRIES_PER_NODE: Final = 3
"""Heap entries for each resident node, from which on stale ones are dropped."""
_NUM_SIFTED: Final = 3
"""Old entries that are examined for each new one, so that no request waits for all."""
_NUM_RANKED_AT_ONCE: Final = 32
"""Of so few nodes, a policy whose ranks age has all ranked again: they turn over before they reach its first age."""

_RANKED, _RANKED_EARLIER = 1, 2
"""Whether a node has an entry that is valid, and one that is if its rank has not changed; 0 for none."""
_Bucket = tuple[Owner, int]
_Entry = tuple[float, int, int]
"""(rank, sequence number of the node's last update, node id): valid while both numbers are still the node's."""


class TierState:
    """Columns over node ids, and heaps of evictable nodes.

    Attributes:
        resident: bit i is set if unit i of the node is in this tier.
        slots: the owner's data of each resident unit, such as a block or row; ``None`` for a node without.
        num_resident_children: children of the node with any unit here; only a node without one is evictable.
        ranks: the policy's, as of the node's last update.
        in_use: units that transfers or running requests hold; sparse.
        clock: the highest rank evicted from this tier (RAGCache §5.1, Eq. 2).
        num_units, num_nodes: resident now.
        num_evicted_units: evicted since the start.
        num_entries: heap entries, including stale ones.
        slower: the tiers below, whose units may depend on this tier's, or be copies of them.
        protected: ids of nodes that are evicted last; the tree calls :meth:`unprotect` to end it.
        shares: shares of tenants, if there are any.

    Heaps are lazy: an entry whose node was updated, left, got a child or is held is dropped when it comes up, and
    whatever makes a node evictable again offers it again. A protected node is put aside when it is offered or comes
    up, and offered again when it is no longer protected.
    """

    def __init__(
        self,
        policy: ReplacementPolicy,
        slower: Sequence[TierState],
        protected: Mapping[int, int],
        *,
        moves_down: bool,
    ) -> None:
        """Start empty; with ``moves_down`` no unit is held by copies in slower tiers."""
        self.policy = policy
        self._uses_clock = policy.uses_clock
        self._copy_discount = policy.copy_discount
        self._bases_for = () if moves_down else tuple(slower)
        self.slower = tuple(slower)
        self.protected = protected
        self.resident: list[int] = []
        self.slots: list[list[Any] | None] = []
        self.num_resident_children: list[int] = []
        self.ranks = array("d")
        self.in_use: dict[int, int] = {}
        self.clock = 0.0
        self.num_units = 0
        self.num_nodes = 0
        self.num_evicted_units = 0
        self.shares = Shares()
        self._heaps: dict[_Bucket, list[_Entry]] = {}
        self._old_heaps: dict[_Bucket, list[_Entry]] = {}
        self._aside: set[int] = set()
        self._is_offered = bytearray()
        self._is_copied = bytearray()
        self.num_entries = 0
        self._num_pushed = 0
        self._has_ages = bool(policy.rank_ages)
        self._ranked_at = 0

    def add_columns(self, num_columns: int) -> None:
        """Add columns for new node ids."""
        self.resident += [0] * num_columns
        self.slots += [None] * num_columns
        self.num_resident_children += [0] * num_columns
        self.ranks.extend([0.0] * num_columns)
        self._is_offered += bytes(num_columns)
        self._is_copied += bytes(num_columns)

    def clear_column(self, node_id: int) -> None:
        """Clear the column of a removed node, before its id is reused."""
        self.in_use.pop(node_id, None)
        self.slots[node_id] = None
        self.ranks[node_id] = 0.0
        self._is_offered[node_id] = 0
        self._is_copied[node_id] = 0

    def slots_of(self, node: TreeNode) -> list[Any]:
        """Return the slots of ``node``'s units, for reading and writing; ``None`` for a unit without."""
        slots = self.slots[node.id]
        if slots is None:
            slots = self.slots[node.id] = [None] * len(node.keys)
        elif len(slots) < len(node.keys):
            slots += [None] * (len(node.keys) - len(slots))
        return slots

    def clear_slots(self, node: TreeNode, units: int) -> None:
        """Clear the slots of units of ``node`` in the mask ``units``, which have left."""
        slots = self.slots[node.id]
        if slots is None:
            return
        if not self.resident[node.id]:
            self.slots[node.id] = None
            return
        for first, length in runs_of(units):
            length = min(length, len(slots) - first)
            slots[first : first + length] = [None] * length

    def is_evictable(self, node: TreeNode) -> bool:
        """Return whether the last resident unit of ``node`` can be evicted.

        It may not while a child is here, a pin or a user holds it, or a slower tier has units that stand on this copy.
        """
        mask = self.resident[node.id]
        if not mask or self.num_resident_children[node.id] or node.num_pins:
            return False
        unit = mask.bit_length() - 1
        held = self.in_use.get(node.id)
        return (held is None or not held >> unit & 1) and not self.is_base(node, unit)

    def update_rank(self, node: TreeNode) -> None:
        """Update the rank of a node that was just accessed."""
        if node.is_transient:
            self.ranks[node.id] = -math.inf
        elif self._uses_clock:
            self.ranks[node.id] = self.policy.rank(node, self.clock)
        self._is_offered[node.id] = 0
        if self.resident[node.id]:
            self.offer(node)

    def offer(self, node: TreeNode) -> None:
        """Make a node a candidate for eviction, if it can be evicted."""
        before = self._is_offered[node.id]
        if before == _RANKED or not self.is_evictable(node):
            return
        if node.id in self.protected:
            self._put_aside(node)
            return
        rank_before = self.ranks[node.id]
        self._refresh_rank(node)
        bucket, rank = self.policy.bucket(node), self.ranks[node.id]
        self._is_offered[node.id] = _RANKED
        if before == _RANKED_EARLIER and rank == rank_before:
            return
        self._push((node.owner, bucket), (rank, node.updated, node.id))
        if bucket < 0:  # the highest rank first
            self._push((node.owner, -bucket), (-rank, node.updated, node.id))

    def withdraw(self, node: TreeNode) -> None:
        """Have a node that has got a child ranked when it is offered again, however often it was offered before."""
        if self._is_offered[node.id]:
            self._is_offered[node.id] = _RANKED_EARLIER

    def _push(self, bucket: _Bucket, entry: _Entry) -> None:
        heappush(self._heaps.setdefault(bucket, []), entry)
        self.num_entries += 1
        self._num_pushed += 1

    def worth(self, node: TreeNode, num_requests: int) -> float:
        """Return a node's score in this tier, resident or not."""
        if self._uses_clock or node.is_transient:
            return self.ranks[node.id]
        return self.policy.score(node, self.policy.rank(node, 0.0), num_requests)

    def record_copies(self, node: TreeNode) -> None:
        """Update whether the rank of ``node`` is discounted, after its units changed here or in a slower tier."""
        here = missing = self.resident[node.id]
        for state in self.slower:
            missing &= ~state.resident[node.id]
        is_copied = here != 0 and not missing
        if is_copied != self._is_copied[node.id]:
            self._is_copied[node.id] = is_copied
            self._is_offered[node.id] = 0
            self.offer(node)

    def is_copied(self, node: TreeNode) -> bool:
        """Return whether the node's rank is discounted, as of the last :meth:`record_copies`."""
        return bool(self._is_copied[node.id])

    def unprotect(self, node: TreeNode) -> None:
        """Make a node without protection a normal candidate."""
        if node.id in self._aside:
            self._aside.remove(node.id)
            self._is_offered[node.id] = 0
            self.offer(node)

    def compact(self, nodes: Sequence[TreeNode | None]) -> None:
        """Drop some stale heap entries, if they are many, as without evictions none would be removed.

        O(entries that are new since the last call).
        """
        num_sifted, self._num_pushed = _NUM_SIFTED * self._num_pushed, 0
        if not self._old_heaps:
            if self.num_entries <= _MIN_ENTRIES + _ENTRIES_PER_NODE * self.num_nodes:
                return
            self._old_heaps, self._heaps = self._heaps, {}
        while num_sifted > 0 and self._old_heaps:
            bucket, heap = next(iter(self._old_heaps.items()))
            entries, heap[-num_sifted:] = heap[-num_sifted:], []  # what is left of a heap is one
            num_sifted -= len(entries)
            self.num_entries -= len(entries)
            for entry in entries:
                if self._keep(entry, nodes) is not None:
                    heappush(self._heaps.setdefault(bucket, []), entry)
                    self.num_entries += 1
            if not heap:
                del self._old_heaps[bucket]

    def candidate(
        self, nodes: Sequence[TreeNode | None], num_requests: int, owners: Collection[Owner] | None = None
    ) -> TreeNode | None:
        """Return the node whose last resident unit is evicted next; ``None`` if there is none. It stays a candidate.

        A protected one only where there is no other. It is one of ``owners``, if they are given; O(owners).
        """
        best = self._best(nodes, num_requests, owners)
        return best if best is not None or not self._aside else self._first_aside(nodes, num_requests, owners)

    def _best(
        self, nodes: Sequence[TreeNode | None], num_requests: int, owners: Collection[Owner] | None
    ) -> TreeNode | None:
        """Return the best of the buckets' first nodes, or ``None``; protected ones are set aside."""
        best: TreeNode | None = None
        best_score = math.inf
        if self._has_ages and num_requests != self._ranked_at and self.num_nodes <= _NUM_RANKED_AT_ONCE:
            self._ranked_at = num_requests
            self._rank_all(nodes)
        if len(self._heaps) == 1 and not self._old_heaps and owners is None:
            (bucket,) = self._heaps
            return self._first(self._heaps, bucket, nodes)
        for heaps in (self._heaps, self._old_heaps):
            for bucket in [each for each in heaps if owners is None or each[0] in owners]:
                node = self._first(heaps, bucket, nodes)
                if node is None:
                    continue
                score = self.score(node, num_requests)
                if best is None or (score, node.updated) < (best_score, best.updated):
                    best, best_score = node, score
        return best

    def _rank_all(self, nodes: Sequence[TreeNode | None]) -> None:
        entries = self._entries()
        self._heaps, self._old_heaps, self.num_entries = {}, {}, 0
        ranked: set[int] = set()  # a node may have an entry in two buckets
        for entry in entries:
            if entry[2] not in ranked and (node := self._keep(entry, nodes)) is not None:
                ranked.add(node.id)
                self._is_offered[node.id] = 0
                self.offer(node)

    def _entries(self) -> list[_Entry]:
        return [entry for heaps in (self._heaps, self._old_heaps) for heap in heaps.values() for entry in heap]

    def is_candidate(self, node: TreeNode) -> bool:
        """Return whether :meth:`candidate` can return this node; O(entries)."""
        if not self.is_evictable(node) or node.id in self._aside:
            return self.is_evictable(node)
        return any(self._keep(entry, {node.id: node}) is node for entry in self._entries() if entry[2] == node.id)

    def is_before(self, node: TreeNode, place: tuple[float, int], num_requests: int) -> bool:
        """Return whether a node is a candidate, and evicted before one with this score and last update."""
        return (
            self._is_offered[node.id] == _RANKED
            and node.id not in self.protected
            and self.is_evictable(node)
            and (self.score(node, num_requests), node.updated) < place
        )

    def rank_again(self, node: TreeNode) -> None:
        """Update the rank of an aged candidate."""
        if self._is_offered[node.id] and node.id not in self._aside:
            self._is_offered[node.id] = _RANKED_EARLIER
            self.offer(node)

    def bases(self, node: TreeNode) -> int:
        """Return the mask of units of ``node`` for which :meth:`is_base` is true."""
        found, unknown = 0, node.full_mask
        for state in self._bases_for:
            mask = state.resident[node.id]
            unknown &= ~mask
            if unknown and (mask or state.num_resident_children[node.id]):
                depend = unknown if state.num_resident_children[node.id] else unknown & (1 << mask.bit_length()) - 1
                found |= depend
                unknown &= ~depend
        return found

    def is_base(self, node: TreeNode, unit: int) -> bool:
        """Return whether units in a slower tier depend on this tier's copy of a unit."""
        for state in self._bases_for:
            mask = state.resident[node.id]
            if mask >> unit & 1:
                return False
            if mask >> unit or state.num_resident_children[node.id]:
                return True
        return False

    def _first(
        self, heaps: dict[_Bucket, list[_Entry]], bucket: _Bucket, nodes: Sequence[TreeNode | None]
    ) -> TreeNode | None:
        heap = heaps[bucket]
        while heap:
            if (node := self._keep(heap[0], nodes)) is not None:
                if node.id not in self.protected:
                    return node
                self._put_aside(node)
            heappop(heap)
            self.num_entries -= 1
        del heaps[bucket]
        return None

    def _put_aside(self, node: TreeNode) -> None:
        self._aside.add(node.id)
        self._is_offered[node.id] = 1

    def _first_aside(
        self, nodes: Sequence[TreeNode | None], num_requests: int, owners: Collection[Owner] | None
    ) -> TreeNode | None:
        """Return the lowest-ranked protected node; O(set-aside nodes), as a last resort."""
        best: TreeNode | None = None
        best_score = math.inf
        for node_id in list(self._aside):
            node = nodes[node_id]
            assert node is not None
            if not self.is_evictable(node):
                self._aside.remove(node_id)
                self._is_offered[node_id] = 0
                continue
            if owners is not None and node.owner not in owners:
                continue
            self._refresh_rank(node)
            score = self.score(node, num_requests)
            if best is None or (score, node.updated) < (best_score, best.updated):
                best, best_score = node, score
        return best

    def _refresh_rank(self, node: TreeNode) -> None:
        if not self._uses_clock and not node.is_transient:
            rank = self.policy.rank(node, 0.0)  # the policy may have changed its mind since
            self.ranks[node.id] = rank - self._copy_discount if self._is_copied[node.id] else rank

    def score(self, node: TreeNode, num_requests: int) -> float:
        """Return the score by which a resident node is compared."""
        rank = self.ranks[node.id]
        return rank if node.is_transient else self.policy.score(node, rank, num_requests)

    def _keep(self, entry: _Entry, nodes: Sequence[TreeNode | None] | Mapping[int, TreeNode]) -> TreeNode | None:
        """Return the node of a valid entry; mark a node that cannot be evicted now to be offered again.

        An entry is valid if its node has not changed since, in either order of ranks.
        """
        rank, updated, node_id = entry
        node = nodes[node_id]
        if node is None or node.updated != updated or abs(self.ranks[node_id]) != abs(rank):
            return None
        if self.is_evictable(node):
            return node
        self._is_offered[node_id] = 0
        return None
