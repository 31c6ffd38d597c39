"""The requests that wait: how much of each is cached, and that it stays so until they are served (RAGCache §5.2)."""

from __future__ import annotations

from ragcache_core.queueing import order_priority
from ragcache_core.tree import KnowledgeTree, NodeChanges
from ragcache_core.vllm_plugin.records import RequestRecord


class WaitingRequests:
    """Knows which waiting request a change in the tree concerns, and protects what they will find.

    Those that came first are protected, while the units of their paths fit into ``max_protected_units``: were
    everything protected, nothing would be.
    """

    def __init__(self, tree: KnowledgeTree, max_protected_units: int = 0) -> None:
        self.max_protected_units = max_protected_units
        self._tree = tree
        if tree.changes is None:
            tree.changes = NodeChanges()
        self._changed = tree.changes.subscribe()
        self._records: dict[str, RequestRecord] = {}
        self._node_ids: dict[str, list[int]] = {}
        self._by_node: dict[int, set[str]] = {}
        self._protected: dict[str, int] = {}
        self._num_protected_units = 0

    def add(self, request_id: str, record: RequestRecord) -> None:
        """Take a request in that waits from now on; its path is in the tree, and retained."""
        self._records[request_id] = record
        self._index(request_id, record)
        self._protect(request_id, record)

    def remove(self, request_id: str) -> None:
        """Let a request go that was admitted or ended; does nothing for one that is not here."""
        record = self._records.pop(request_id, None)
        if record is None:
            return
        self._forget(request_id)
        if (num_units := self._protected.pop(request_id, None)) is None:
            return
        self._tree.unprotect(record.retained)
        self._num_protected_units -= num_units
        for waiting_id, waiting in self._records.items():
            if self._num_protected_units >= self.max_protected_units:
                break
            if waiting_id not in self._protected:
                self._protect(waiting_id, waiting)

    def priority(self, record: RequestRecord) -> float:
        """Return a request's OrderPriority as the tiers are now."""
        if record.retained is None or (location := self._tree.locate(record.retained)) is None:
            return order_priority(0, record.num_prompt_tokens)
        num_cached = min(self._tree.num_leading_tokens(location.node), record.num_prompt_tokens)
        return order_priority(num_cached, record.num_prompt_tokens - num_cached)

    def take_touched(self) -> set[str]:
        """Return the requests on whose paths something has changed in the tiers since the last call."""
        touched: set[str] = set()
        while self._changed:
            touched |= self._by_node.get(self._changed.pop().id, set())
        for request_id in touched:
            self._forget(request_id)
            self._index(request_id, self._records[request_id])
        return touched

    def _index(self, request_id: str, record: RequestRecord) -> None:
        location = None if record.retained is None else self._tree.locate(record.retained)
        path = location.node.path() if location is not None else []
        self._node_ids[request_id] = [node.id for node in path]
        for node in path:
            self._by_node.setdefault(node.id, set()).add(request_id)

    def _forget(self, request_id: str) -> None:
        for node_id in self._node_ids.pop(request_id):
            others = self._by_node[node_id]
            others.discard(request_id)
            if not others:
                del self._by_node[node_id]

    def _protect(self, request_id: str, record: RequestRecord) -> None:
        if record.retained is None or (location := self._tree.locate(record.retained)) is None:
            return
        num_units = location.node.start + location.unit + 1
        if self._num_protected_units + num_units > self.max_protected_units:
            return
        self._tree.protect(record.retained)
        self._protected[request_id] = num_units
        self._num_protected_units += num_units
