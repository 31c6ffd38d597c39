"""The shadows of a tournament: what each candidate policy would hold, as metadata only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush, heapreplace
from typing import Final
from zlib import crc32

from ragcache_core.policy.candidate import CandidatePolicy
from ragcache_core.policy.tournament import TournamentPolicy
from ragcache_core.tree.node import TreeNode

_TOKENS_SIMULATED: Final = 4_000_000
_MAX_SAMPLE_EVERY: Final = 16

_ID_BITS: Final = 32
_ID_MASK: Final = (1 << _ID_BITS) - 1
_MAX_LEFT_BEHIND: Final = 1024
_STEPS_PER_RANK: Final = 1 << 20
"""Ranks of shadows are logarithms; finer differences are a tie."""


class Shadow:
    """The whole documents that one candidate would hold in an imaginary tier of ``capacity_tokens``.

    Only leaves are given up. The heap has an integer for each: its rank, in steps, above its node's id. A use raises
    ranks, so an entry stands still until it comes up, and goes back with the rank that the node has by then. A rank
    that fell, because a node became cheaper, is noticed no sooner; that of a node whose uses begin at zero again is
    noticed at its first use.

    Attributes:
        num_tokens: held.
        held_tokens: of each node that is held, by node id; 0 of the others.
        num_children: that are held, by node id.
    """

    def __init__(self, policy: CandidatePolicy, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.num_tokens = 0
        self.held_tokens = array("i")
        self.num_children: list[int] = []
        self._is_queued = bytearray()
        self._policy = policy
        self._heap: list[int] = []
        self._num_left_behind = 0

    def add_columns(self, num_columns: int) -> None:
        """Grow for nodes of the next ids."""
        self.held_tokens.extend([0] * num_columns)
        self.num_children += [0] * num_columns
        self._is_queued += bytes(num_columns)

    def retrieve(
        self, documents: Sequence[TreeNode], retrieved: AbstractSet[TreeNode], nodes: Sequence[TreeNode | None]
    ) -> int:
        """Take in what is missing of a request's ``documents``, and return the tokens of the first that were there.

        ``retrieved`` are the same documents, ``nodes`` the tree's by their ids.
        """
        num_found_tokens = num_found = 0
        for node in documents:
            if not self.held_tokens[node.id]:
                break
            num_found_tokens += self.held_tokens[node.id]
            num_found += 1
            if node.frequency == 1:
                self._queue_anew(node)
        if num_found == len(documents):
            return num_found_tokens
        for node in documents[num_found:]:
            if self.held_tokens[node.id]:
                continue
            num_tokens = _size(node)
            if num_tokens > self.capacity_tokens:
                break
            while self.num_tokens + num_tokens > self.capacity_tokens and self._evict(retrieved, nodes):
                pass
            if self.num_tokens + num_tokens > self.capacity_tokens:
                break
            self._hold(node, num_tokens)
        for node in documents:  # those that came, and those that did not go
            if self.held_tokens[node.id]:
                self._queue(node)
        return num_found_tokens

    def split(self, node: TreeNode, lower: TreeNode) -> None:
        """Divide what is held of ``node``, which kept its first units, with ``lower``, which has the others."""
        self.num_children[lower.id], self.num_children[node.id] = self.num_children[node.id], 0
        if held := self.held_tokens[node.id]:
            self.num_tokens += _size(node) - held
            self.held_tokens[node.id] = _size(node)
            self._hold(lower, _size(lower))
            self._queue(lower)

    def drop(self, node: TreeNode) -> None:
        """Forget a leaf that is gone from the tree."""
        if self.held_tokens[node.id]:
            self._release(node)
            self._leave_behind()

    def is_candidate(self, node: TreeNode) -> bool:
        """Return whether the heap has an entry of a node; O(entries)."""
        return any(entry & _ID_MASK == node.id for entry in self._heap)

    def _hold(self, node: TreeNode, num_tokens: int) -> None:
        self.held_tokens[node.id] = num_tokens
        self.num_tokens += num_tokens
        assert node.parent is not None
        self.num_children[node.parent.id] += 1

    def _release(self, node: TreeNode) -> None:
        self.num_tokens -= self.held_tokens[node.id]
        self.held_tokens[node.id] = 0
        self._is_queued[node.id] = 0
        parent = node.parent
        assert parent is not None
        self.num_children[parent.id] -= 1
        if self.held_tokens[parent.id]:
            self._queue(parent)

    def _queue(self, node: TreeNode) -> None:
        if not self.num_children[node.id] and not self._is_queued[node.id]:
            self._is_queued[node.id] = 1
            heappush(self._heap, self._entry(node))

    def _queue_anew(self, node: TreeNode) -> None:
        """Give a node an entry of its present rank, which may be lower than that of the entry that it has."""
        if self._is_queued[node.id]:
            self._is_queued[node.id] = 0
            self._queue(node)
            self._leave_behind()

    def _leave_behind(self) -> None:
        """Count an entry that is no longer valid: it is skipped when it comes up, or dropped with others."""
        self._num_left_behind += 1
        if self._num_left_behind > _MAX_LEFT_BEHIND + len(self._heap) // 2:
            lowest: dict[int, int] = {}
            for entry in sorted(self._heap, reverse=True):
                if self.held_tokens[entry & _ID_MASK]:
                    lowest[entry & _ID_MASK] = entry
            self._heap = sorted(lowest.values())
            self._num_left_behind = 0

    def _evict(self, retrieved: AbstractSet[TreeNode], nodes: Sequence[TreeNode | None]) -> bool:
        """Evict the lowest-ranked leaf outside ``retrieved``, which leave the heap; return whether there is one."""
        heap = self._heap
        while heap:
            node_id = heap[0] & _ID_MASK
            node = nodes[node_id]
            if node is None or not self.held_tokens[node_id] or self.num_children[node_id]:
                heappop(heap)
                self._is_queued[node_id] = 0
                continue
            entry = self._entry(node)
            if entry > heap[0]:
                heapreplace(heap, entry)
                continue
            heappop(heap)
            if node in retrieved:
                self._is_queued[node_id] = 0
                continue
            self._release(node)
            self._policy.on_shadow_evicted((entry >> _ID_BITS) / _STEPS_PER_RANK)
            return True
        return False

    def _entry(self, node: TreeNode) -> int:
        return int(self._policy.rank(node, 0.0) * _STEPS_PER_RANK) << _ID_BITS | node.id


class ShadowTournament:
    """One shadow of ``capacity_tokens`` for each candidate, that every request runs through.

    It costs a few numbers for each node and some heap operations for each request, and no memory for KV. A large cache
    is judged by a sample: of every ``sample_every`` first documents one, with all that follows it, in shadows that are
    as much smaller (miniature simulation, Waldspurger et al., USENIX ATC 2017). A common beginning, as a system
    prompt, would put all requests into the sample or none: the documents behind it decide instead.
    """

    def __init__(self, policy: TournamentPolicy, capacity_tokens: int) -> None:
        self._policy = policy
        self._sample_every = min(max(capacity_tokens // _TOKENS_SIMULATED, 1), _MAX_SAMPLE_EVERY)
        shadow_tokens = capacity_tokens // self._sample_every
        self.shadows = tuple(Shadow(candidate, shadow_tokens) for candidate in policy.candidates)
        self._saved_tokens = [0] * len(self.shadows)
        self._num_observed = self._num_requests = 0

    def observe(self, path: Sequence[TreeNode], nodes: Sequence[TreeNode | None]) -> bool:
        """Run a request through every shadow, and return whether the policy adopted another candidate.

        ``nodes`` are the tree's, by their ids.
        """
        self._num_requests += 1
        documents = [node for node in path if node.doc_id is not None and not node.is_transient]
        if self._is_sampled(documents):
            retrieved = set(documents)
            for i, shadow in enumerate(self.shadows):
                self._saved_tokens[i] += shadow.retrieve(documents, retrieved, nodes)
        self._num_observed += 1
        if self._num_observed < self._policy.window:
            return False
        self._num_observed = 0
        saved, self._saved_tokens = self._saved_tokens, [0] * len(self.shadows)
        return self._policy.adopt(saved)

    def _is_sampled(self, documents: Sequence[TreeNode]) -> bool:
        if not documents or self._sample_every == 1:
            return True
        most_uses = self._num_requests / (2 * self._sample_every)
        first = next((node for node in documents if node.frequency <= most_uses), documents[-1])
        return crc32((first.doc_id or "").encode()) % self._sample_every == 0


def _size(node: TreeNode) -> int:
    """Return what a held node counts; nothing is for nothing."""
    return max(node.num_tokens, 1)
