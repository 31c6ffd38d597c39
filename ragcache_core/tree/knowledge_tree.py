"""The knowledge tree: which documents are cached, after which others, and in which tier (RAGCache §5.1, Figure 8)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet

from ragcache_core.policy.base import ReplacementPolicy
from ragcache_core.policy.tournament import TournamentPolicy
from ragcache_core.tree.node import EvictedUnit, PathSegment, PrefixMatch, TreeNode
from ragcache_core.tree.prefix_tree import PrefixTree
from ragcache_core.tree.shadow import ShadowTournament
from ragcache_core.tree.tier import TierState
from ragcache_core.types import Tier


class KnowledgeTree(PrefixTree):
    """A prefix tree over the documents of prompts, shared by all tiers.

    The root is what every request shares: the static prefix, of ``num_root_tokens`` tokens, or nothing where several
    applications with prefixes of their own share an engine; those are then nodes like documents. A path from the root
    is an order of documents, because the KV of a document depends on what stands before it. Each tier holds some units
    of some nodes; it gives up the last unit of its lowest-ranked leaf first, so that what is left is always a usable
    prefix.

    Nothing here reads a clock, a file or a socket, or knows what a unit is: the engine and the simulator run the same
    object. Not thread-safe.

    Args:
        policy: ranks the nodes.
        num_root_tokens: size of the root.
        ghost_size: how many evicted documents keep their numbers in the tree.
        keeps_frequency: whether a document's numbers survive its eviction ("ghost" counts). Without, they start anew
            when it has left the last tier (RAGCache's text leaves it open).
        shadow_tokens: tokens that each shadow of a :class:`TournamentPolicy` holds; 0 runs none.
    """

    def __init__(
        self,
        policy: ReplacementPolicy,
        *,
        num_root_tokens: int = 0,
        ghost_size: int = 100_000,
        keeps_frequency: bool = True,
        shadow_tokens: int = 0,
    ) -> None:
        self.policy = policy
        self.num_requests = 0
        disk = TierState(policy)
        host = TierState(policy, slower=(disk,))
        self.tiers = (TierState(policy, slower=(host, disk)), host, disk)
        self._tournament: ShadowTournament | None = None
        self._states = list(self.tiers)
        if isinstance(policy, TournamentPolicy) and shadow_tokens > 0:
            self._tournament = ShadowTournament(self, policy, shadow_tokens)
            self._states += self._tournament.states
        self._ghost_size = ghost_size
        self._keeps_frequency = keeps_frequency
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._retained: dict[Hashable, int] = {}
        super().__init__(num_root_tokens)

    # Asking: changes nothing

    def resident_mask(self, node: TreeNode, tier: Tier) -> int:
        """Return which units of ``node`` lie in ``tier``, one bit each."""
        return self.tiers[tier].resident[node.id]

    def match_prefix(self, segments: Iterable[PathSegment]) -> PrefixMatch:
        """Return the longest cached prefix of a prompt, in whatever tiers; O(height)."""
        matched: list[TreeNode] = []
        num_units = num_tokens = 0
        by_tier = [0] * len(Tier)
        for node, num_common in self._walk([key for segment in segments for key in segment.keys]):
            masks = [state.resident[node.id] & ((1 << num_common) - 1) for state in self.tiers]
            here = masks[0] | masks[1] | masks[2]
            leading = (~here & (here + 1)).bit_length() - 1
            tokens_per_unit = node.num_tokens / len(node.keys)
            counted = 0
            for tier, mask in enumerate(masks):
                units = mask & ((1 << leading) - 1) & ~counted
                counted |= units
                by_tier[tier] += round(units.bit_count() * tokens_per_unit)
            if leading:
                matched.append(node)
            num_units += leading
            num_tokens += round(leading * tokens_per_unit)
            if leading < len(node.keys):
                break
        return PrefixMatch(tuple(matched), num_units, num_tokens, tuple(by_tier))

    # Growing

    def insert(self, segments: Iterable[PathSegment]) -> list[TreeNode]:
        """Return the nodes of a prompt from the root down, making those that are not there; none is resident yet.

        Nodes begin and end where segments do: a node that spans more is split. A segment without keys is no node.
        Nodes that nobody retains, pins or puts into a tier may be gone after the next call.
        """
        self._drop_ghosts()
        return super().insert(segments)

    def retain(self, key: Hashable) -> None:
        """Keep the unit ``key``, and so all before it, in the tree until :meth:`release`, resident or not."""
        node = self._locations[key].node
        self._retained[key] = self._retained.get(key, 0) + 1
        node.num_users += 1
        self._ghosts.pop(node.id, None)

    def release(self, key: Hashable) -> None:
        """Undo :meth:`retain`."""
        node = self._locations[key].node
        count = self._retained[key] - 1
        if count:
            self._retained[key] = count
        else:
            del self._retained[key]
        node.num_users -= 1
        self._note_if_ghost(node)

    # Being used

    def record_access(
        self, path: Sequence[TreeNode], num_missed_tokens: int, cost_s: float, num_hit_units: int
    ) -> None:
        """Count a request that retrieves ``path`` (RAGCache Algorithm 1, lines 1 to 13).

        Args:
            path: its nodes, from the root down.
            num_hit_units: units of the path that were cached; a node that reaches beyond was missed.
            num_missed_tokens: beta, the tokens that have to be computed, the question's included.
            cost_s: T(alpha, beta), seconds to compute them after the alpha tokens that were cached. A missed node is
                charged cost_s / beta for each of its tokens.
        """
        self.num_requests += 1
        cost_per_token_s = cost_s / num_missed_tokens if num_missed_tokens > 0 else 0.0
        for node in path:
            self._forget_uses((node,))
            node.frequency += 1
            if node.start + len(node.keys) > num_hit_units:
                node.total_cost_s += cost_per_token_s
                node.num_computed += 1
            self.policy.on_access(node, self.num_requests)
            node.last_request = self.num_requests
            node.updated = self._next_sequence()
            for state in self._states:
                state.update_rank(node)
            if node.id in self._ghosts:
                self._ghosts.move_to_end(node.id)
        for state in self._states:
            state.compact(self._nodes)
        if self._tournament is not None and self._tournament.observe(path):
            for state in self.tiers:
                state.rerank()

    def restore(self, node: TreeNode, *, frequency: int, cost_s: float) -> None:
        """Give a node that grew again from storage the numbers that were stored with it; the largest win."""
        if frequency <= node.frequency:
            return  # as most units of a node say: they were stored with the same numbers
        node.frequency, node.num_computed, node.total_cost_s = frequency, 1, cost_s
        node.updated = self._next_sequence()
        self.policy.on_restore(node, self.num_requests)
        for state in self._states:
            state.update_rank(node)

    def pin(self, nodes: Iterable[TreeNode]) -> None:
        """Keep nodes in their tiers until :meth:`unpin`."""
        for node in nodes:
            node.num_pins += 1

    def unpin(self, nodes: Iterable[TreeNode]) -> None:
        """Undo :meth:`pin`."""
        for node in nodes:
            assert node.num_pins > 0, node
            node.num_pins -= 1
            if not node.num_pins:
                for state in self._states:
                    state.offer(node)
                self._note_if_ghost(node)

    def hold(self, node: TreeNode, unit: int, tier: Tier) -> None:
        """Keep one unit in ``tier``: a request or a transfer uses it there."""
        in_use = self.tiers[tier].in_use
        in_use[node.id] = in_use.get(node.id, 0) | 1 << unit

    def let_go(self, node: TreeNode, unit: int, tier: Tier) -> None:
        """Undo :meth:`hold`; does nothing where nobody holds the unit."""
        state = self.tiers[tier]
        if (before := state.in_use.get(node.id)) is None:
            return
        mask = before & ~(1 << unit)
        if mask:
            state.in_use[node.id] = mask
        else:
            del state.in_use[node.id]
        state.offer(node)

    # Entering and leaving a tier

    def add(self, node: TreeNode, units: int, tier: Tier) -> None:
        """Note that the units of ``node`` in the mask ``units`` lie in ``tier`` now."""
        self._add(node, units, self.tiers[tier])

    def remove(self, node: TreeNode, units: int, tier: Tier) -> None:
        """Note that the units of ``node`` in the mask ``units`` are gone from ``tier``: lost, not evicted."""
        self._remove(node, units, self.tiers[tier])
        self._forget_uses((node,))

    def evict(self, tier: Tier, num_units: int = 1, protected: Collection[Hashable] = ()) -> list[EvictedUnit] | None:
        """Take ``num_units`` units out of ``tier``, the lowest-ranked leaf's last ones first (Algorithm 1, EVICT).

        Atomic: where fewer can go, none goes and None is returned. ``protected`` are keys of units that stay.
        """
        state = self.tiers[tier]
        clock = state.clock
        evicted = self._evict(state, num_units, protected)
        if len(evicted) == num_units:
            self._forget_uses(unit.node for unit in evicted)
            return evicted
        for unit in evicted:
            self._add(unit.node, 1 << unit.unit, state)
        state.clock = clock
        state.num_evicted_units -= len(evicted)
        return None

    def evict_up_to(self, tier: Tier, num_units: int, protected: Collection[Hashable] = ()) -> list[EvictedUnit]:
        """Do :meth:`evict`, but where fewer can go, take those."""
        evicted = self._evict(self.tiers[tier], num_units, protected)
        self._forget_uses(unit.node for unit in evicted)
        return evicted

    def evict_anything(self, tier: Tier) -> EvictedUnit | None:
        """Take one unit out of ``tier`` that nobody holds, even if others depend on it; a last resort, O(nodes)."""
        state = self.tiers[tier]
        best: tuple[float, TreeNode, int] | None = None
        for node in self.nodes():
            free = state.resident[node.id] & ~state.in_use.get(node.id, 0)
            if free and not node.num_pins and (best is None or state.ranks[node.id] < best[0]):
                best = (state.ranks[node.id], node, free.bit_length() - 1)
        if best is None:
            return None
        _, node, unit = best
        self.remove(node, 1 << unit, tier)
        state.num_evicted_units += 1
        return EvictedUnit(node, unit, node.keys[unit])

    def evict_node(self, state: TierState, protected: AbstractSet[TreeNode]) -> TreeNode | None:
        """Take the lowest-ranked leaf out of a shadow as a whole; None if it is a protected one."""
        node = state.candidate(self._nodes, self.num_requests)
        if node is None or node in protected:
            return None
        self._evict_tail(node, len(node.keys), state)
        return node

    def place(self, node: TreeNode, state: TierState) -> None:
        """Put a whole node into a shadow."""
        self._add(node, node.full_mask, state)

    def clear_tier(self, tier: Tier) -> None:
        """Take everything out of ``tier``: its memory was reset or lost."""
        state = self.tiers[tier]
        state.in_use.clear()
        for node in list(self.nodes()):
            if state.resident[node.id]:
                self._remove(node, state.resident[node.id], state)

    # Inside

    def _on_new_id(self, node_id: int) -> None:
        for state in self._states:
            state.add_column(node_id)

    def _on_new(self, node: TreeNode) -> None:
        assert node.parent is not None
        self._ghosts.pop(node.parent.id, None)
        self._note_if_ghost(node)

    def _on_split(self, node: TreeNode, lower: TreeNode) -> None:
        self._ghosts.pop(lower.id, None)
        self.policy.on_split(node, lower)
        if node.num_users:
            lower.num_users = sum(self._retained.get(key, 0) for key in lower.keys)
            node.num_users -= lower.num_users
        num_units = len(node.keys)
        low_bits = node.full_mask
        for state in self._states:
            mask = state.resident[node.id]
            state.resident[node.id], state.resident[lower.id] = mask & low_bits, mask >> num_units
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
        for state in self._states:
            state.offer(node)
            state.offer(lower)
        self._note_if_ghost(lower)

    def _add(self, node: TreeNode, units: int, state: TierState) -> None:
        before = state.resident[node.id]
        state.resident[node.id] = before | units
        state.num_units += (units & ~before).bit_count()
        if not before and units:
            if node.parent is not None:
                state.num_resident_children[node.parent.id] += 1
            self._ghosts.pop(node.id, None)
        for tier in self._at_or_above(state):
            tier.offer(node)

    def _remove(self, node: TreeNode, units: int, state: TierState) -> None:
        before = state.resident[node.id]
        after = state.resident[node.id] = before & ~units
        state.num_units -= (before & units).bit_count()
        if after == before:
            return
        for tier in self._at_or_above(state):
            tier.offer(node)
        if after:
            return
        if node.parent is not None:
            state.num_resident_children[node.parent.id] -= 1
            for tier in self._at_or_above(state):
                tier.offer(node.parent)
        self._note_if_ghost(node)

    def _evict(self, state: TierState, num_units: int, protected: Collection[Hashable]) -> list[EvictedUnit]:
        held = self._shield(protected, state)
        evicted: list[EvictedUnit] = []
        while len(evicted) < num_units:
            node = state.candidate(self._nodes, self.num_requests)
            if node is None:
                break
            evicted += self._evict_tail(node, num_units - len(evicted), state)
        self._unshield(held, state)
        return evicted

    def _forget_uses(self, nodes: Iterable[TreeNode]) -> None:
        """Let nodes that have left the last tier start anew, where frequencies are not to survive that."""
        if self._keeps_frequency:
            return
        for node in nodes:
            if not self._is_resident(node):
                node.frequency = node.num_computed = 0
                node.total_cost_s = 0.0

    def _evict_tail(self, node: TreeNode, num_units: int, state: TierState) -> list[EvictedUnit]:
        state.clock = max(state.clock, state.ranks[node.id])
        mask, held = state.resident[node.id], state.in_use.get(node.id, 0)
        evicted: list[EvictedUnit] = []
        units = 0
        while mask and len(evicted) < num_units:
            unit = mask.bit_length() - 1
            if held >> unit & 1 or state.is_base(node, unit):
                break
            mask ^= 1 << unit
            units |= 1 << unit
            evicted.append(EvictedUnit(node, unit, node.keys[unit]))
        self._remove(node, units, state)
        state.num_evicted_units += len(evicted)
        return evicted

    def _shield(self, keys: Collection[Hashable], state: TierState) -> dict[int, int]:
        """Hold units, and return what was held of their nodes before."""
        before: dict[int, int] = {}
        for key in keys:
            if (at := self._locations.get(key)) is not None:
                held = state.in_use.get(at.node.id, 0)
                before.setdefault(at.node.id, held)
                state.in_use[at.node.id] = held | 1 << at.unit
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

    def _at_or_above(self, state: TierState) -> Sequence[TierState]:
        """Return the tiers in which a change in ``state`` may make a node evictable: itself and those that feed it."""
        for i, tier in enumerate(self.tiers):
            if tier is state:
                return self.tiers[: i + 1]
        return (state,)

    def _is_resident(self, node: TreeNode) -> bool:
        return any(tier.resident[node.id] for tier in self.tiers)

    def _note_if_ghost(self, node: TreeNode) -> None:
        if not (node.children or node.num_users or node.num_pins or any(s.resident[node.id] for s in self._states)):
            self._ghosts[node.id] = None
            if node.doc_id is None:  # a run without a name hardly comes back: it is the first to be forgotten
                self._ghosts.move_to_end(node.id, last=False)

    def _drop_ghosts(self) -> None:
        while self._ghosts:
            node = self._nodes[next(iter(self._ghosts))]
            assert node is not None
            if len(self._ghosts) <= self._ghost_size and node.doc_id is not None:
                return
            del self._ghosts[node.id]
            self._forget(node)

    def _forget(self, node: TreeNode) -> None:
        for state in self._states:
            state.clear_column(node.id)
        parent = self._remove_node(node)
        if parent is not self.root:
            self._note_if_ghost(parent)
