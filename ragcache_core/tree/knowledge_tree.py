"""The knowledge tree: the cached documents with their prefixes and tiers (RAGCache §5.1, Figure 8)."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence

from ragcache_core.policy.base import ReplacementPolicy
from ragcache_core.policy.mixture import MixturePolicy
from ragcache_core.policy.returning import NextTurnModel, kind_by_number
from ragcache_core.tree.conversations import Conversations
from ragcache_core.tree.node import PathSegment, PrefixMatch, TreeNode
from ragcache_core.tree.tiered_tree import TieredTree
from ragcache_core.types import DocId, Tier


class KnowledgeTree(TieredTree):
    """A prefix tree over the documents of prompts, shared by all tiers.

    The root is the common prefix of all requests. It is empty if several applications with their own static prefixes
    share an engine; those are nodes like documents then. A path from the root is an order of documents, because the KV
    of a document depends on the tokens before it. Each tier holds some units of some nodes. It evicts the last unit of
    its lowest-ranked leaf first, which always leaves usable prefixes.

    The tree uses no clock, file or socket, and is independent of the meaning of a unit, so that the engine and the
    simulator share it. Not thread-safe.

    Attributes:
        renamed: ids of nodes that got a name after they entered a tier below the GPU; the tier that stores names
            removes them.
        conversations: maps requests to the turns of conversations.
        returning: predicts whether conversations continue.

    Args:
        policy: ranks the nodes.
        ghost_size: how many evicted documents keep their numbers in the tree.
        keeps_frequency: whether a document's statistics survive its eviction ("ghost" counts). Without, they restart
            when it has left the last tier (RAGCache's text leaves it open).
        moves_down: whether the caller moves evicted units to the next tier.
        replicated_units: units of the most used upper nodes (a prompt's prefix and first document) that host memory
            evicts last while they lie on the GPU; 0 for none.
    """

    def __init__(
        self,
        policy: ReplacementPolicy,
        *,
        ghost_size: int = 100_000,
        keeps_frequency: bool = True,
        moves_down: bool = False,
        replicated_units: int = 0,
    ) -> None:
        self._max_replicated = replicated_units
        self._fewest_uses = 0
        self.is_regrown = False
        self._ghost_size = ghost_size
        self._keeps_frequency = keeps_frequency
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._retained: dict[Hashable, int] = {}
        self.rekeyed: set[int] = set()
        self.returning = policy.returning if isinstance(policy, MixturePolicy) else NextTurnModel()
        self.conversations = Conversations(self.returning)
        self._due: dict[int, list[tuple[int, int]]] = {}
        super().__init__(policy, moves_down=moves_down)

    # Asking: changes nothing

    def match_prefix(self, segments: Iterable[PathSegment]) -> PrefixMatch:
        """Return the longest cached prefix of a prompt in any tiers; O(height) look-ups."""
        matched: list[TreeNode] = []
        num_units = num_tokens = 0
        by_tier = [0] * len(Tier)
        for node, num_common in self._walk([key for segment in segments for key in segment.keys]):
            leading = min(_num_leading(self.resident_anywhere(node)), num_common)
            if leading:
                matched.append(node)
                num_units += leading
                num_tokens += node.num_tokens_of(leading)
                left = (1 << leading) - 1
                for tier, state in enumerate(self.tiers):
                    if here := state.resident[node.id] & left:
                        by_tier[tier] += node.num_tokens_of(here.bit_count())
                        left &= ~here
            if leading < len(node.keys):
                break
        return PrefixMatch(tuple(matched), num_units, num_tokens, tuple(by_tier))

    def num_leading_tokens(self, node: TreeNode) -> int:
        """Return the tokens of the longest cached prefix of the path to ``node``; O(height)."""
        num_tokens = 0
        for step in node.path():
            num_own_tokens = self.num_own_leading_tokens(step)
            num_tokens += num_own_tokens
            if num_own_tokens < step.num_tokens:
                break
        return num_tokens

    def num_own_leading_tokens(self, node: TreeNode) -> int:
        """Return the leading cached tokens of ``node``, regardless of its prefix."""
        return node.num_tokens_of(_num_leading(self.resident_anywhere(node)))

    def num_leading_units(self, node: TreeNode, tiers: Sequence[Tier]) -> int:
        """Return the leading units of the path to ``node`` in any of ``tiers``; O(height)."""
        num_units = 0
        for step in node.path():
            mask = 0
            for tier in tiers:
                mask |= self.tiers[tier].resident[step.id]
            num_own_units = _num_leading(mask)
            num_units += num_own_units
            if num_own_units < len(step.keys):
                break
        return num_units

    # Growing

    def insert(self, segments: Iterable[PathSegment]) -> list[TreeNode]:
        """Return the nodes of a prompt from the root down, creating missing ones, which are not resident.

        Nodes begin and end where segments do: a node that spans more is split. A segment without keys is no node.
        Nodes that are not retained, pinned or put into a tier may be gone after the next call.
        """
        self._drop_ghosts()
        return super().insert(segments)

    def retain(self, key: Hashable) -> None:
        """Keep the unit ``key`` and its prefix in the tree until :meth:`release`, resident or not."""
        node = self._node_of(key)
        self._retained[key] = self._retained.get(key, 0) + 1
        node.num_users += 1
        self._ghosts.pop(node.id, None)

    def is_retained(self, key: Hashable) -> bool:
        """Return whether the unit ``key`` itself is retained."""
        return key in self._retained

    def retained_path(self, key: Hashable) -> list[TreeNode] | None:
        """Return the nodes up to the unit ``key``, as :meth:`insert` would; ``None`` unless it is retained at its end.

        An answer may have grown behind it meanwhile.
        """
        if key not in self._retained:
            return None
        last = self._location(self._places[key])
        return last.node.path() if last.unit + 1 == len(last.node.keys) else None

    def release(self, key: Hashable) -> None:
        """Undo :meth:`retain`."""
        node = self._node_of(key)
        count = self._retained[key] - 1
        if count:
            self._retained[key] = count
        else:
            del self._retained[key]
        node.num_users -= 1
        self._note_if_ghost(node)

    # Being used

    def record_access(
        self, path: Sequence[TreeNode], *, num_hit_units: int, cost_per_token_s: float, turn: int = 0
    ) -> None:
        """Count a request that retrieves ``path`` (RAGCache Algorithm 1, lines 1 to 13).

        Args:
            path: its nodes, from the root down.
            num_hit_units: units of the path that were cached; a node that reaches beyond was missed.
            cost_per_token_s: what each token of a missed node is charged with:
                :meth:`ReplacementPolicy.cost_per_token_s <ragcache_core.policy.ReplacementPolicy.cost_per_token_s>`
                of the tree's policy.
            turn: number of the conversation's turn, as :attr:`conversations` says; 0 where it is unknown.
        """
        self.num_requests += 1
        if turn:
            self._claim(path, turn)
        self.record_prefill(path, num_hit_units=num_hit_units, cost_per_token_s=cost_per_token_s)
        self._count_uses(path)
        self._rank_aged()
        for state in self.tiers:
            state.compact(self._nodes)
        if self._max_replicated:
            self._replicate_upper(path)

    def record_prefill(self, path: Sequence[TreeNode], *, num_hit_units: int, cost_per_token_s: float) -> None:
        """Charge ``path`` with a prefill in advance of its request, which will count as the access.

        See :meth:`record_access`. Ranks stand until that request comes.
        """
        for node in path:
            self._forget_uses((node,))
            if node.start + len(node.keys) > num_hit_units:
                node.total_cost_s += cost_per_token_s
                node.num_computed += 1

    def record_answer(self, key: Hashable, turn: int, tool: str | None = None) -> None:
        """Record the answer of a conversation's ``turn``, which begins in the unit ``key``, and the tool that it calls.

        Its KV ranks with the conversation's history, although no request has used it yet. A later call may name the
        ``tool``.
        """
        kind = self.conversations.on_answered(key, turn, self.num_requests, tool)
        if (location := self.locate(key)) is None:
            return
        ranked = [node for node in location.node.below() if not node.frequency]
        for node in ranked:
            node.turn = turn
        if kind != kind_by_number(turn):
            ranked += [node for node in location.node.path() if node.frequency and _is_of(node, turn)]
        for node in ranked:
            node.turn_kind, node.updated = kind, self._next_sequence()
            if node.turn:
                node.last_request = self.num_requests
            for state in self.tiers:
                state.update_rank(node)

    def record_apart(self, nodes: Sequence[TreeNode], *, num_hit_units: int, cost_per_token_s: float) -> None:
        """Count an access of nodes that are not on a request's path; the number of requests stays.

        Arguments are those of :meth:`record_prefill`.
        """
        self.record_prefill(nodes, num_hit_units=num_hit_units, cost_per_token_s=cost_per_token_s)
        self._count_uses(nodes)

    def restore(self, node: TreeNode, *, frequency: int, cost_s: float) -> None:
        """Restore a node's stored statistics; the largest values win."""
        self.is_regrown = True
        if frequency <= node.frequency:
            return  # as most units of a node say: they were stored with the same numbers
        node.num_computed, node.total_cost_s = 1, cost_s
        self._set_frequency(node, frequency)

    def seed(self, path: Sequence[TreeNode], *, expected_uses: int) -> None:
        """Rank ``path`` as if it had been accessed ``expected_uses`` times, if it has fewer.

        It was prefilled ahead of a forecast: by its uses so far, none, it would be the first to be evicted.
        """
        for node in path:
            if expected_uses > node.frequency:
                node.last_request = self.num_requests
                node.num_expected += expected_uses - node.frequency
                self._set_frequency(node, expected_uses)

    def forget(self, nodes: Iterable[TreeNode]) -> None:
        """Reset the statistics of nodes and their descendants; unused ones leave the tree.

        What lies in tiers is taken out of them before.
        """
        for top in list(nodes):
            for node in reversed(top.below()):
                node.frequency = node.num_computed = node.num_expected = node.last_request = 0
                node.total_cost_s = 0.0
                node.updated = self._next_sequence()
                for state in self.tiers:
                    state.update_rank(node)
                if node.id in self._ghosts:
                    del self._ghosts[node.id]
                    self._forget(node)

    # Inside

    def _count_uses(self, nodes: Iterable[TreeNode]) -> None:
        for node in nodes:
            node.frequency += 1
            self.policy.on_access(node, self.num_requests)
            node.last_request = self.num_requests
            node.updated = self._next_sequence()
            for state in self.tiers:
                state.update_rank(node)
            if node.id in self._ghosts:
                self._ghosts.move_to_end(node.id)
            self._rank_later(node, 0)

    def _rank_later(self, node: TreeNode, age: int) -> None:
        """Rank a node again at the policy's first age above ``age`` requests, unless it is accessed before."""
        ages = self.policy.rank_ages
        if node.turn or (place := bisect_right(ages, age)) == len(ages):
            return
        at = node.last_request + ages[place]
        self._due.setdefault(at, []).append((node.id, node.last_request))

    def _rank_aged(self) -> None:
        for node_id, last_request in self._due.pop(self.num_requests, ()):
            node = self._nodes[node_id]
            if node is not None and node.last_request == last_request:
                for state in self.tiers:
                    state.rank_again(node)
                self._rank_later(node, self.num_requests - last_request)

    def _set_frequency(self, node: TreeNode, frequency: int) -> None:
        node.frequency = frequency
        node.updated = self._next_sequence()
        self.policy.on_restore(node, self.num_requests)
        for state in self.tiers:
            state.update_rank(node)

    def _claim(self, path: Sequence[TreeNode], turn: int) -> None:
        """Assign the unshared end of a path to its conversation, documents included if no other request has used them.

        On such an end each node has as many uses as the one behind it, or one more, which was the turn between them. A
        first turn's documents are not assigned: others may ask for them. What another conversation uses as well ranks
        as documents do.
        """
        num_before = max((i for i, node in enumerate(path, 1) if node.doc_id is not None), default=0)
        first_own, uses = len(path), 0
        while turn > 1 and first_own and path[first_own - 1].frequency <= uses + 1:
            first_own -= 1
            uses = path[first_own].frequency
        is_own = False
        for i, node in enumerate(path):
            is_first = not node.frequency
            is_own = is_own or 0 < node.turn < turn or (is_first and i >= num_before)
            node.turn = turn if i >= first_own or (is_own and (is_first or 0 < node.turn < turn)) else 0
            node.turn_kind = kind_by_number(node.turn)

    def _on_split(self, node: TreeNode, lower: TreeNode) -> None:
        self._ghosts.pop(lower.id, None)
        if node.id in self.rekeyed:
            self.rekeyed.add(lower.id)
        if node.num_users:
            lower.num_users = sum(self._retained.get(key, 0) for key in lower.keys)
            node.num_users -= lower.num_users
        super()._on_split(node, lower)
        self._note_if_ghost(lower)

    def _on_arrived(self, node: TreeNode) -> None:
        self._ghosts.pop(node.id, None)

    def _on_left(self, node: TreeNode) -> None:
        self._note_if_ghost(node)

    def _on_renamed(self, node: TreeNode, doc_ids: Collection[DocId]) -> None:
        if self.resident_mask(node, Tier.HOST) or self.resident_mask(node, Tier.DISK):
            self.rekeyed.add(node.id)

    def _on_new(self, node: TreeNode) -> None:
        assert node.parent is not None
        self._ghosts.pop(node.parent.id, None)
        self._note_if_ghost(node)

    def _forget_uses(self, nodes: Iterable[TreeNode]) -> None:
        """Reset the statistics of nodes that left the last tier, if the policy does not keep them."""
        if self._keeps_frequency:
            return
        for node in nodes:
            if not self.resident_anywhere(node):
                node.frequency = node.num_computed = node.num_expected = 0
                node.total_cost_s = 0.0

    def _replicate_upper(self, path: Sequence[TreeNode]) -> None:
        """Replicate static prefix and first document of a path that was just accessed, if used enough."""
        for node in path:
            is_here = self.tiers[Tier.GPU].resident[node.id] and not node.is_transient
            if is_here and node.id not in self.replicated and len(node.keys) <= self._max_replicated:
                self._replicate_instead(node)
            if node.doc_id is not None:
                return

    def _replicate_instead(self, node: TreeNode) -> None:
        """Replicate ``node`` within the limit, or instead of less used ones.

        No replicated node has fewer uses than ``_fewest_uses``: it spares most others a look at all of them.
        """
        num_missing = self.num_replicated_units + len(node.keys) - self._max_replicated
        leaving: list[TreeNode] = []
        if num_missing > 0:
            if node.frequency <= self._fewest_uses:
                return
            others = [other for node_id in self.replicated if (other := self._nodes[node_id]) is not None]
            others.sort(key=lambda other: other.frequency)
            self._fewest_uses = others[0].frequency
            for other in others:
                if num_missing <= 0 or other.frequency >= node.frequency:
                    break
                leaving.append(other)
                num_missing -= len(other.keys)
            if num_missing > 0:
                return
        for other in leaving:
            self.unreplicate(other)
        self.replicate(node)
        self._fewest_uses = min(self._fewest_uses, node.frequency)

    def _note_if_ghost(self, node: TreeNode) -> None:
        if node.children or node.num_users or node.num_pins or self.is_protected(node):
            return
        if not self.resident_anywhere(node):
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
        if self.changes is not None:
            self.changes.note(node)
        for state in self.tiers:
            state.clear_column(node.id)
        self.policy.on_removed(node)
        self.rekeyed.discard(node.id)
        parent = self._remove_node(node)
        if node.doc_id is not None and not self.nodes_of(node.doc_id):
            self.policy.on_document_removed(node.doc_id)
        if parent is not self.root:
            self._note_if_ghost(parent)


def _is_of(node: TreeNode, turn: int) -> bool:
    """Return whether no other conversation has used a node; documents of a first turn are not assigned to it."""
    return node.turn == turn if node.turn or turn > 1 else node.frequency == 1 and node.doc_id is not None


def _num_leading(mask: int) -> int:
    """Return the number of lowest consecutive set bits."""
    return (~mask & (mask + 1)).bit_length() - 1
