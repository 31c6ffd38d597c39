"""Paths that are evicted last, within a limit for each tenant: pinned documents, and prefixes that requests retain."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ragcache_core.tree.knowledge_tree import KnowledgeTree
from ragcache_core.tree.node import TreeNode


@dataclass(slots=True)
class _Counted:
    """A node on protected paths: the number of paths through it, and its units as they are counted for a tenant."""

    num_paths: int
    num_units: int
    tenant: str | None


class ProtectedPaths:
    """Protects paths in the tree, as many as ``limit`` units hold of each tenant's.

    A path that is protected or released costs O(height), however many are protected.

    Args:
        tree: in which they stand.
        limit: how many units the paths of a tenant, or None for all others, may have together; asked whenever it
            matters.
        tenant_of: returns the tenant of a path, by its last node's owner; None without one.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        limit: Callable[[str | None], int],
        tenant_of: Callable[[str | None], str | None] = lambda _: None,
    ) -> None:
        self._tree = tree
        self.limit = limit
        self.tenant_of = tenant_of
        self._ends: dict[str | None, dict[Hashable, None]] = {}  # the last unit of each path, by tenant
        self._counted: dict[int, _Counted] = {}  # by node id
        self._num_units: dict[str | None, int] = {}
        tree.split_listeners.append(self._on_split)

    def __bool__(self) -> bool:
        """Whether any path is protected."""
        return bool(self._counted)

    @property
    def num_units(self) -> int:
        """Units of all paths, each once."""
        return sum(self._num_units.values())

    def num_units_of(self, tenant: str | None) -> int:
        """Return the units of a tenant's paths, each once; None for those without a tenant."""
        return self._num_units.get(tenant, 0)

    def ends_of(self, tenant: str | None) -> dict[Hashable, None]:
        """Return the last unit of each path of a tenant, which the caller may put into another order."""
        return self._ends.setdefault(tenant, {})

    def is_counted(self, node: TreeNode) -> bool:
        """Return whether a node is on a protected path."""
        return node.id in self._counted

    def uncounted(self, last: TreeNode, known: dict[int, int] | None = None) -> dict[int, int]:
        """Return the units of the nodes on a path that are on no protected path, by id, up to those in ``known``."""
        found: dict[int, int] = {}
        node: TreeNode | None = last
        while node is not None and node.parent is not None and node.id not in self._counted:
            if known is not None and node.id in known:
                break
            found[node.id] = len(node.keys)
            node = node.parent
        return found

    def protect(self, end: Hashable) -> bool:
        """Protect the path to a unit unless the limit forbids it, and return whether it is protected."""
        if (location := self._tree.locate(end)) is None:
            return False
        node = location.node
        tenant = self.tenant_of(node.owner)
        ends = self.ends_of(tenant)
        if end in ends:
            return True
        num_units = self.num_units_of(tenant) + sum(self.uncounted(node).values())
        if num_units > self.limit(tenant):
            return False
        for step in node.path():
            counted = self._counted.setdefault(step.id, _Counted(0, len(step.keys), tenant))
            counted.num_paths += 1
        ends[end] = None
        self._num_units[tenant] = num_units
        self._tree.protect(end)
        return True

    def release(self, end: Hashable) -> None:
        """Undo :meth:`protect`; does nothing with a unit at which no protected path ends."""
        if (location := self._tree.locate(end)) is None:
            return
        tenant = self.tenant_of(location.node.owner)
        if end not in (ends := self._ends.get(tenant, {})):
            return
        del ends[end]
        for step in location.node.path():
            counted = self._counted[step.id]
            counted.num_paths -= 1
            if not counted.num_paths:
                del self._counted[step.id]
                self._num_units[counted.tenant] -= counted.num_units
        self._tree.unprotect(end)

    def _on_split(self, node: TreeNode, lower: TreeNode) -> None:
        if (counted := self._counted.get(node.id)) is None:
            return
        ends = self._ends.get(self.tenant_of(node.owner), {})
        num_below = counted.num_paths - sum(key in ends for key in node.keys)
        num_units = max(counted.num_units - len(node.keys), 0)
        counted.num_units -= num_units
        if num_below:
            self._counted[lower.id] = _Counted(num_below, num_units, counted.tenant)
        else:
            self._num_units[counted.tenant] -= num_units
