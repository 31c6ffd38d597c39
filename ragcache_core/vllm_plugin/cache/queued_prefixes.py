"""The cached part of the prefixes of queued requests, which orders them (RAGCache §5.2)."""

from __future__ import annotations

from ragcache_core.queueing import order_priority
from ragcache_core.tree import KnowledgeTree, NodeChanges, TreeNode
from ragcache_core.vllm_plugin.cache.request_state import RequestState, WatchedNode


class QueuedPrefixes:
    """Maps changes in the tree to queued requests.

    Without ``follows_changes``, where no order depends on them, requests are not watched, and :meth:`take_touched` is
    never called.
    """

    def __init__(self, tree: KnowledgeTree, *, follows_changes: bool = True) -> None:
        self._tree = tree
        self._follows_changes = follows_changes
        self._changed: set[TreeNode] = set()
        if follows_changes:
            if tree.changes is None:
                tree.changes = NodeChanges()
            self._changed = tree.changes.subscribe()
        self._touched: set[RequestState] = set()
        self._watched: dict[int, WatchedNode] = {}

    def add(self, state: RequestState) -> None:
        """Add a queued request; its prefix is in the tree and retained."""
        if not self._follows_changes:
            return
        state.is_queued = True
        self._follow_changes()
        self._watch(state)

    def remove(self, state: RequestState) -> None:
        """Remove a request that was admitted or ended; ignore one that is not queued."""
        if not state.is_queued:
            return
        state.is_queued = False
        self._unwatch(state)
        self._touched.discard(state)

    def priority(self, state: RequestState) -> float:
        """Return a request's OrderPriority, for a queued one as of the last :meth:`take_touched`."""
        num_cached, num_prompt = self.num_cached_tokens(state), state.num_prompt_tokens
        return order_priority(num_cached, num_prompt - num_cached) if num_cached < num_prompt else float(num_prompt)

    def num_cached_tokens(self, state: RequestState) -> int:
        """Return the number of leading prompt tokens in some tier, as :meth:`priority` uses it."""
        num_cached = 0
        if state.is_queued:
            for watched in state.watched:
                num_cached = watched.num_tokens
                if not watched.is_whole:
                    break
        elif state.retained is not None and (location := self._tree.locate(state.retained)) is not None:
            num_cached = self._tree.num_leading_tokens(location.node)
        return num_cached

    def take_touched(self) -> set[str]:
        """Return the ids of the requests whose cached prefix has changed since the last call."""
        self._follow_changes()
        touched = {state.request_id for state in self._touched}
        self._touched.clear()
        return touched

    def _follow_changes(self) -> None:
        while self._changed:
            node = self._changed.pop()
            watched = self._watched.get(node.id)
            if watched is None:
                continue
            if len(node.keys) != watched.num_units:  # it was cut
                self._touched |= watched.requests
                moving = set(watched.requests)
                for state in moving:
                    self._unwatch(state)
                for state in moving:
                    self._watch(state)
                continue
            num_own_tokens = self._tree.num_own_leading_tokens(node)
            num_tokens = watched.num_tokens_before + num_own_tokens
            if num_tokens != watched.num_tokens:
                watched.num_tokens, watched.is_whole = num_tokens, num_own_tokens == node.num_tokens
                if watched.counts:
                    self._touched |= watched.requests

    def _watch(self, state: RequestState) -> None:
        location = None if state.retained is None else self._tree.locate(state.retained)
        num_before, before = 0, None
        for node in location.node.path() if location is not None else ():
            watched = self._watched.get(node.id)
            if watched is None:
                num_own_tokens = self._tree.num_own_leading_tokens(node)
                watched = self._watched[node.id] = WatchedNode(
                    node.id,
                    len(node.keys),
                    num_before,
                    num_before + num_own_tokens,
                    num_own_tokens == node.num_tokens,
                    before,
                )
            watched.requests.add(state)
            state.watched.append(watched)
            num_before, before = num_before + node.num_tokens, watched

    def _unwatch(self, state: RequestState) -> None:
        for watched in state.watched:
            watched.requests.discard(state)
            if not watched.requests:
                del self._watched[watched.node_id]
        state.watched.clear()
