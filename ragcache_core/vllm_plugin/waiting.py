"""The requests that wait: how much of each is cached, and that it stays so until they are served (RAGCache §5.2)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragcache_core.queueing import order_priority
from ragcache_core.tree import KnowledgeTree, NodeChanges, TreeNode
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.records import RequestRecord


@dataclass(slots=True)
class _Watched:
    """A node on whose units the priority of waiting requests depends.

    What is cached of a request is whole up to its last watched node, where it is ``ending``; it is ``passing`` those
    before. So a block that arrives in a document which hundreds wait for changes one number here.
    """

    num_units: int
    num_cached_tokens: int
    passing: set[str] = field(default_factory=set)
    ending: set[str] = field(default_factory=set)


class WaitingRequests:
    """Knows which waiting request a change in the tree concerns, and protects what they will find.

    Those that came first are protected, while the units of their paths fit into ``max_protected_units``: were
    everything protected, nothing would be. Without ``follows_changes`` it protects only: nobody asks what has changed.
    """

    def __init__(self, tree: KnowledgeTree, max_protected_units: int = 0, *, follows_changes: bool = True) -> None:
        self.max_protected_units = max_protected_units
        self._tree = tree
        self._follows_changes = follows_changes
        self._changed: set[TreeNode] = set()
        if follows_changes:
            if tree.changes is None:
                tree.changes = NodeChanges()
            self._changed = tree.changes.subscribe()
        self._touched: set[str] = set()
        self._records: dict[str, RequestRecord] = {}
        self._watched: dict[int, _Watched] = {}
        self._watched_by: dict[str, list[int]] = {}
        self._ends: dict[str, _Watched] = {}
        self._protected: dict[str, int] = {}
        self._num_protected_units = 0

    def add(self, request_id: str, record: RequestRecord) -> None:
        """Take a request in that waits from now on; its path is in the tree, and retained."""
        self._records[request_id] = record
        if self._follows_changes:
            self._follow_changes()
            self._watch(request_id)
        self._protect(request_id, record)

    def remove(self, request_id: str) -> None:
        """Let a request go that was admitted or ended; does nothing for one that is not here."""
        record = self._records.pop(request_id, None)
        if record is None:
            return
        self._unwatch(request_id)
        self._touched.discard(request_id)
        if (num_units := self._protected.pop(request_id, None)) is None:
            return
        self._tree.unprotect(record.retained)
        self._num_protected_units -= num_units
        for waiting_id, waiting in self._records.items():
            if self._num_protected_units >= self.max_protected_units:
                break
            if waiting_id not in self._protected:
                self._protect(waiting_id, waiting)

    def priority(self, request_id: str, record: RequestRecord) -> float:
        """Return a request's OrderPriority, as the tiers were at the last :meth:`take_touched` if it waits here."""
        if (end := self._ends.get(request_id)) is not None:
            num_cached = end.num_cached_tokens
        elif record.retained is not None and (location := self._tree.locate(record.retained)) is not None:
            num_cached = self._tree.num_leading_tokens(location.node)
        else:
            num_cached = 0
        num_cached = min(num_cached, record.num_prompt_tokens)
        return order_priority(num_cached, record.num_prompt_tokens - num_cached)

    def take_touched(self) -> set[str]:
        """Return the requests whose cached prefix has changed since the last call."""
        self._follow_changes()
        touched, self._touched = self._touched, set()
        return touched

    def _follow_changes(self) -> None:
        while self._changed:
            node = self._changed.pop()
            watched = self._watched.get(node.id)
            if watched is None:
                continue
            now = (len(node.keys), self._tree.num_leading_tokens(node))
            if now == (watched.num_units, watched.num_cached_tokens):
                continue
            watched.num_units, watched.num_cached_tokens = now
            self._touched |= watched.passing | watched.ending
            moving = watched.passing | watched.ending if self._is_whole(node) else set(watched.passing)
            for request_id in moving:
                self._unwatch(request_id)
            for request_id in moving:
                self._watch(request_id)

    def _watch(self, request_id: str) -> None:
        record = self._records[request_id]
        location = None if record.retained is None else self._tree.locate(record.retained)
        path = location.node.path() if location is not None else []
        node_ids = self._watched_by[request_id] = []
        for node in path:
            watched = self._watched.get(node.id)
            if watched is None:
                watched = self._watched[node.id] = _Watched(len(node.keys), self._tree.num_leading_tokens(node))
            node_ids.append(node.id)
            if node is path[-1] or not self._is_whole(node):
                watched.ending.add(request_id)
                self._ends[request_id] = watched
                break
            watched.passing.add(request_id)

    def _unwatch(self, request_id: str) -> None:
        self._ends.pop(request_id, None)
        for node_id in self._watched_by.pop(request_id, ()):
            watched = self._watched[node_id]
            watched.passing.discard(request_id)
            watched.ending.discard(request_id)
            if not watched.passing and not watched.ending:
                del self._watched[node_id]

    def _is_whole(self, node: TreeNode) -> bool:
        mask = 0
        for tier in Tier:
            mask |= self._tree.resident_mask(node, tier)
        return mask == node.full_mask

    def _protect(self, request_id: str, record: RequestRecord) -> None:
        if record.retained is None or (location := self._tree.locate(record.retained)) is None:
            return
        num_units = location.node.start + location.unit + 1
        if self._num_protected_units + num_units > self.max_protected_units:
            return
        self._tree.protect(record.retained)
        self._protected[request_id] = num_units
        self._num_protected_units += num_units
