"""What requests ask for the KV that they leave: kept for some time within a share, or evicted first after a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Set
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, NamedTuple

from ragcache_core.tree.knowledge_tree import KnowledgeTree
from ragcache_core.tree.protected_paths import ProtectedPaths

_FEW_DUE: Final = 4096
"""Times to come up to which those of evicted KV are not looked for."""


class _Retained(NamedTuple):
    """A retained path: the first of a tenant in this order gives way."""

    priority: int
    until_s: float
    number: int
    end: Hashable


class _Due(NamedTuple):
    """At ``at_s`` the path to ``end`` is retained no longer, or, from ``first_unit`` on, evicted first."""

    at_s: float
    number: int
    end: Hashable
    first_unit: int | None


class Retention:
    """Retains paths of the tree for a time, and has others evicted first after a time.

    A retained path is evicted last in each tier, as a pinned one is. All of a tenant's take ``limit`` units at most:
    where one more does not fit, it takes the place of those with a lower priority, or is not retained. The time is the
    tree's ``now_s``.

    Args:
        tree: holds the paths.
        limit: returns how many units the paths of a tenant, or None for all others, may have together.
        tenant_of: returns the tenant of an owner of nodes; None without one.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        limit: Callable[[str | None], int],
        tenant_of: Callable[[str | None], str | None] = lambda _: None,
    ) -> None:
        self._tree = tree
        self._paths = ProtectedPaths(tree, limit, tenant_of)
        self._retained: dict[Hashable, _Retained] = {}
        self._by_rank: dict[str | None, list[_Retained]] = {}  # heaps, with entries that ended
        self._due: list[_Due] = []
        self._numbers = count(1)
        self._most_due = _FEW_DUE

    @property
    def num_units(self) -> int:
        """Units of the retained paths, each once, whether they are cached or not."""
        return self._paths.num_units

    def retain(self, end: Hashable, retain_s: float, priority: int = 0) -> bool:
        """Retain the path to the unit ``end`` for ``retain_s`` seconds, and return whether the share has room for it.

        What was asked of the same path before gives way.
        """
        if (location := self._tree.locate(end)) is None:
            return False
        self._release(end)
        tenant = self._paths.tenant_of(location.node.owner)
        heap = self._by_rank.setdefault(tenant, [])
        displaced = []
        while not (is_retained := self._paths.protect(end)) and heap and heap[0].priority < priority:
            lowest = heappop(heap)
            if self._retained.get(lowest.end) == lowest:
                self._paths.release(lowest.end)
                displaced.append(lowest)
        for lowest in displaced:
            if is_retained:
                del self._retained[lowest.end]
            else:  # it was all for nothing
                self._paths.protect(lowest.end)
                heappush(heap, lowest)
        if is_retained:
            entry = _Retained(priority, self._tree.now_s + retain_s, next(self._numbers), end)
            self._retained[end] = entry
            heappush(heap, entry)
            self._add_due(_Due(entry.until_s, entry.number, end, None))
        return is_retained

    def demote_after(self, seconds: float, end: Hashable, first_unit: int) -> None:
        """Have the path to ``end`` evicted first from ``first_unit`` on, after a time: what one request alone used."""
        if seconds > 0.0:
            self._add_due(_Due(self._tree.now_s + seconds, next(self._numbers), end, first_unit))
        else:
            self._demote(end, first_unit)

    def on_used(self, keys: Iterable[Hashable]) -> None:
        """End the retention of the paths that a prompt of these units goes on from: they have served their purpose."""
        if self._retained and not self._retained.keys().isdisjoint(keys):
            for key in [key for key in keys if key in self._retained]:
                self._release(key)

    def tick(self) -> None:
        """Do what is due at the tree's ``now_s``; O(that)."""
        while self._due and self._due[0].at_s <= self._tree.now_s:
            due = heappop(self._due)
            if due.first_unit is not None:
                self._demote(due.end, due.first_unit)
            elif self._is_current(due):
                self._release(due.end)

    def on_forgotten(self, units: Set[Hashable]) -> None:
        """Retain nothing of some units, before they are deleted."""
        for end in self._retained.keys() & units:
            self._release(end)

    def _release(self, end: Hashable) -> None:
        if self._retained.pop(end, None) is not None:
            self._paths.release(end)

    def _demote(self, end: Hashable, first_unit: int) -> None:
        if (location := self._tree.locate(end)) is None:
            return
        for node in location.node.path():
            if node.start >= first_unit and node.frequency <= 1:
                self._tree.demote(node)

    def _add_due(self, due: _Due) -> None:
        heappush(self._due, due)
        if len(self._due) <= self._most_due:
            return
        self._due = [due for due in self._due if self._is_current(due)]
        heapify(self._due)
        self._most_due = max(2 * len(self._due), _FEW_DUE)
        for tenant in self._by_rank:
            heap = [entry for entry in self._by_rank[tenant] if self._retained.get(entry.end) == entry]
            heapify(heap)
            self._by_rank[tenant] = heap

    def _is_current(self, due: _Due) -> bool:
        if due.first_unit is not None:
            return self._tree.locate(due.end) is not None
        return (entry := self._retained.get(due.end)) is not None and entry.number == due.number
