"""Documents that are pinned: their paths are the last to be evicted, in each tier.

A pin is of a document, on whatever paths it stands, and on those on which it will. It outlives the document's eviction,
which comes where nothing but pinned paths and those of waiting requests is left, and ends with the engine. Tenants'
documents may have the same ids: what is protected of their paths is limited for each by what he has of the tiers, and
takes nothing from what an operator may pin of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import TYPE_CHECKING

from ragcache_core.errors import ConfigError
from ragcache_core.types import DocId

if TYPE_CHECKING:
    from ragcache_core.tree import KnowledgeTree, TreeNode


class Pins:
    """Protects the paths of pinned documents in the tree, as many as ``limit`` blocks hold of each tenant's.

    Args:
        tree: in which they stand.
        limit: how many blocks the pinned paths of a tenant, or None for all others, may have together; asked whenever
            it matters.
        describe: returns what a number of blocks is in words, and what the limit comes from, for a refusal.
        tenant_of: returns whose a path is, by its last node's owner; nobody's without it.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        limit: Callable[[str | None], int],
        describe: Callable[[int], str],
        tenant_of: Callable[[str | None], str | None] = lambda _: None,
    ) -> None:
        self._tree = tree
        self._limit = limit
        self._describe = describe
        self._tenant_of = tenant_of
        self.doc_ids: set[DocId] = set()
        self._ends: set[Hashable] = set()
        """The last unit of each protected path."""

    @property
    def num_units(self) -> int:
        """Blocks of all pinned paths but tenants', each once."""
        return self._num_units(self._ends_of(None))

    def check(self, doc_ids: Iterable[DocId]) -> set[DocId]:
        """Return those of some documents of which something is cached; see :meth:`pin`."""
        return self._find(doc_ids)[0]

    def pin(self, doc_ids: Iterable[DocId]) -> set[DocId]:
        """Pin documents, those as well of which nothing is cached now, and return all of them.

        Raises:
            ConfigError: their paths, but for tenants', are more than the limit, and none is pinned.
        """
        _, ends = self._find(doc_ids)
        self.doc_ids.update(doc_ids)
        for tenant, theirs in ends.items():
            self._protect(theirs if tenant is None else self._fitting(theirs, tenant))
        return set(doc_ids)

    def unpin(self, doc_ids: Iterable[DocId]) -> set[DocId]:
        """Pin documents no more, and return those that were pinned."""
        gone = self.doc_ids.intersection(doc_ids)
        self.doc_ids -= gone
        self._unprotect([end for end in self._ends if not self._is_pinned(self._node_of(end))])
        return gone

    def on_used(self, path: Sequence[TreeNode]) -> None:
        """Take note of a path that is used: what is pinned on it is protected, where the limit allows."""
        last = next((node for node in reversed(path) if self._is_pinned(node) and not node.is_private), None)
        if last is None or last.keys[-1] in self._ends:
            return
        tenant = self._tenant_of(last.owner)
        if self._num_units_with({last.keys[-1]}, tenant) <= self._limit(tenant):
            self._protect({last.keys[-1]})

    def on_forgotten(self, doc_ids: Iterable[DocId], units: Set[Hashable]) -> None:
        """Unpin documents, and protect nothing of some units, which others may have pinned, before they go."""
        self.doc_ids.difference_update(doc_ids)
        self._unprotect([end for end in self._ends if end in units or not self._is_pinned(self._node_of(end))])

    def _find(self, doc_ids: Iterable[DocId]) -> tuple[set[DocId], dict[str | None, set[Hashable]]]:
        """Return which of some documents are cached, and where whose paths to them end, if those may be pinned."""
        wanted = set(doc_ids)
        found: set[DocId] = set()
        ends: dict[str | None, set[Hashable]] = {None: set()}
        for node in self._tree.nodes():
            if node.stored_s is not None and not node.is_private and node.is_named(wanted):
                ends.setdefault(self._tenant_of(node.owner), set()).add(node.keys[-1])
                found |= wanted.intersection((node.doc_id, *node.other_ids))
        if (num_units := self._num_units_with(ends[None], None)) > (limit := self._limit(None)):
            raise ConfigError(
                f"with these {len(wanted)} documents and their paths, {self._describe(num_units)} would be pinned "
                f"({self._describe(self.num_units)} are), and the limit is {self._describe(limit)}: pin fewer, "
                "unpin others, or start with a larger CacheConfig.pinned_share"
            )
        return found, ends

    def _is_pinned(self, node: TreeNode) -> bool:
        return node.is_named(self.doc_ids)

    def _node_of(self, end: Hashable) -> TreeNode:
        location = self._tree.locate(end)
        assert location is not None, "what is protected stays in the tree"
        return location.node

    def _num_units(self, ends: Iterable[Hashable]) -> int:
        nodes = {step.id: step for end in ends for step in self._node_of(end).path()}
        return sum(len(node.keys) for node in nodes.values())

    def _ends_of(self, tenant: str | None) -> set[Hashable]:
        return {end for end in self._ends if self._tenant_of(self._node_of(end).owner) == tenant}

    def _num_units_with(self, ends: Set[Hashable], tenant: str | None) -> int:
        """Return how many blocks a tenant's will be with further paths; where it is too much, without those evicted."""
        own = self._ends_of(tenant)
        if (num_units := self._num_units(own | ends)) <= self._limit(tenant):
            return num_units
        evicted = {end for end in own if self._node_of(end).stored_s is None}
        self._unprotect(evicted)
        return self._num_units(own - evicted | ends)

    def _fitting(self, ends: Iterable[Hashable], tenant: str) -> list[Hashable]:
        """Return which of a tenant's further paths may be pinned."""
        counted = {step.id: len(step.keys) for end in self._ends_of(tenant) for step in self._node_of(end).path()}
        num_left = self._limit(tenant) - sum(counted.values())
        fitting: list[Hashable] = []
        for end in ends:
            new = {step.id: len(step.keys) for step in self._node_of(end).path() if step.id not in counted}
            if sum(new.values()) <= num_left:
                fitting.append(end)
                counted.update(new)
                num_left -= sum(new.values())
        return fitting

    def _protect(self, ends: Iterable[Hashable]) -> None:
        for end in ends:
            if end not in self._ends:
                self._ends.add(end)
                self._tree.protect(end)

    def _unprotect(self, ends: Iterable[Hashable]) -> None:
        for end in ends:
            self._ends.remove(end)
            self._tree.unprotect(end)
