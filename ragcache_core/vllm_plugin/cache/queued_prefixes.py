"""The requests that wait: how much of each is cached, and that it stays so until they are served (RAGCache §5.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from ragcache_core.queueing import order_priority
from ragcache_core.tree import KnowledgeTree, NodeChanges, TreeNode
from ragcache_core.vllm_plugin.cache.request_state import RequestRecord

_TRIED_AT_ONCE = 32


@dataclass(slots=True)
class _Watched:
    """A node that waiting requests pass: how much of their prompts is cached up to where it is not cached any more.

    ``num_tokens`` are those before it and its own that are cached, which count where all before it ``is_whole``. One
    object serves all ``requests``: a block that arrives in a document which hundreds wait for changes one number.
    """

    node_id: int
    num_units: int
    num_tokens_before: int
    num_tokens: int
    is_whole: bool
    before: _Watched | None
    requests: set[str] = field(default_factory=set)

    @property
    def counts(self) -> bool:
        """Whether everything before it is cached."""
        before = self.before
        while before is not None and before.is_whole:
            before = before.before
        return before is None


class QueuedPrefixes:
    """Knows which waiting request a change in the tree concerns, and protects what they will find.

    Those that came first are protected, while the units of their paths fit into ``max_protected_units``: were
    everything protected, nothing would be. Where one leaves, those that come next are tried, a few of them: thousands
    may wait. Without ``follows_changes`` it protects only: nobody asks what has changed.
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
        self._paths: dict[str, list[_Watched]] = {}
        self._protected: dict[str, int] = {}
        self._unprotected: dict[str, None] = {}
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
        self._unprotected.pop(request_id, None)
        if (num_units := self._protected.pop(request_id, None)) is None:
            return
        self._tree.unprotect(record.retained)
        self._num_protected_units -= num_units
        for waiting_id in list(islice(self._unprotected, _TRIED_AT_ONCE)):
            if self._num_protected_units >= self.max_protected_units:
                break
            self._protect(waiting_id, self._records[waiting_id])

    def priority(self, request_id: str, record: RequestRecord) -> float:
        """Return a request's OrderPriority, as the tiers were at the last :meth:`take_touched` if it waits here."""
        num_cached = 0
        if (path := self._paths.get(request_id)) is not None:
            for watched in path:
                num_cached = watched.num_tokens
                if not watched.is_whole:
                    break
        elif record.retained is not None and (location := self._tree.locate(record.retained)) is not None:
            num_cached = self._tree.num_leading_tokens(location.node)
        num_prompt = record.num_prompt_tokens
        return order_priority(num_cached, num_prompt - num_cached) if num_cached < num_prompt else float(num_prompt)

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
            if len(node.keys) != watched.num_units:  # it was cut
                self._touched |= watched.requests
                moving = set(watched.requests)
                for request_id in moving:
                    self._unwatch(request_id)
                for request_id in moving:
                    self._watch(request_id)
                continue
            num_own_tokens = self._tree.num_own_leading_tokens(node)
            num_tokens = watched.num_tokens_before + num_own_tokens
            if num_tokens != watched.num_tokens:
                watched.num_tokens, watched.is_whole = num_tokens, num_own_tokens == node.num_tokens
                if watched.counts:
                    self._touched |= watched.requests

    def _watch(self, request_id: str) -> None:
        record = self._records[request_id]
        location = None if record.retained is None else self._tree.locate(record.retained)
        path = self._paths[request_id] = []
        num_before, before = 0, None
        for node in location.node.path() if location is not None else ():
            watched = self._watched.get(node.id)
            if watched is None:
                num_own_tokens = self._tree.num_own_leading_tokens(node)
                watched = self._watched[node.id] = _Watched(
                    node.id,
                    len(node.keys),
                    num_before,
                    num_before + num_own_tokens,
                    num_own_tokens == node.num_tokens,
                    before,
                )
            watched.requests.add(request_id)
            path.append(watched)
            num_before, before = num_before + node.num_tokens, watched

    def _unwatch(self, request_id: str) -> None:
        for watched in self._paths.pop(request_id, ()):
            watched.requests.discard(request_id)
            if not watched.requests:
                del self._watched[watched.node_id]

    def _protect(self, request_id: str, record: RequestRecord) -> None:
        if record.retained is None or (location := self._tree.locate(record.retained)) is None:
            return
        num_units = location.node.start + location.unit + 1
        if self._num_protected_units + num_units > self.max_protected_units:
            self._unprotected[request_id] = None
            return
        self._unprotected.pop(request_id, None)
        self._tree.protect(record.retained)
        self._protected[request_id] = num_units
        self._num_protected_units += num_units
