"""The shadows of a tournament: what each candidate policy would hold, as metadata only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from ragcache_core.policy.tournament import TournamentPolicy
from ragcache_core.tree.node import TreeNode
from ragcache_core.tree.tier import TierState

if TYPE_CHECKING:
    from ragcache_core.tree.knowledge_tree import KnowledgeTree

_TOKENS_SIMULATED = 250_000
_MAX_SAMPLE_EVERY = 16


class ShadowTournament:
    """One imaginary tier for each candidate, of ``capacity_tokens``, that every request runs through.

    A shadow lives in the same tree and holds whole documents. It costs a few numbers for each node and some heap
    operations for each request, and no memory for KV. A large cache is judged by a sample: of every ``sample_every``
    first documents one, with all that follows it, in a shadow that is as much smaller (miniature simulation,
    Waldspurger et al., USENIX ATC 2017).
    """

    def __init__(self, tree: KnowledgeTree, policy: TournamentPolicy, capacity_tokens: int) -> None:
        self.states = tuple(TierState(candidate) for candidate in policy.candidates)
        self._tree = tree
        self._policy = policy
        self._sample_every = min(max(capacity_tokens // _TOKENS_SIMULATED, 1), _MAX_SAMPLE_EVERY)
        self._capacity_tokens = capacity_tokens // self._sample_every
        self._num_tokens = [0] * len(self.states)
        self._saved_tokens = [0] * len(self.states)
        self._num_observed = 0

    def observe(self, path: Sequence[TreeNode]) -> bool:
        """Run a request through every shadow, and return whether the policy adopted another candidate."""
        documents = [node for node in path if node.doc_id is not None and not node.is_transient]
        if not self._is_sampled(documents):
            documents = []
        for i, state in enumerate(self.states):
            self._saved_tokens[i] += sum(node.num_tokens for node in self._leading(documents, state))
            self._admit(documents, i, state)
        self._num_observed += 1
        if self._num_observed < self._policy.window:
            return False
        self._num_observed = 0
        saved, self._saved_tokens = self._saved_tokens, [0] * len(self.states)
        return self._policy.adopt(saved)

    def _is_sampled(self, documents: Sequence[TreeNode]) -> bool:
        if not documents or self._sample_every == 1:
            return True
        return crc32((documents[0].doc_id or "").encode()) % self._sample_every == 0

    def _leading(self, documents: Sequence[TreeNode], state: TierState) -> Sequence[TreeNode]:
        for i, node in enumerate(documents):
            if not state.resident[node.id]:
                return documents[:i]
        return documents

    def _admit(self, documents: Sequence[TreeNode], i: int, state: TierState) -> None:
        retrieved = set(documents)
        for node in documents:
            if state.resident[node.id]:
                continue
            while self._num_tokens[i] + node.num_tokens > self._capacity_tokens:
                evicted = self._tree.evict_node(state, retrieved)
                if evicted is None:
                    return
                self._num_tokens[i] -= evicted.num_tokens
            self._tree.place(node, state)
            self._num_tokens[i] += node.num_tokens
