"""Documents that are pinned: their paths are the last to be evicted, in each tier.

A pin is of a document, on whatever paths it stands, and on those on which it will. It outlives the document's eviction,
which comes where nothing but pinned paths and those of waiting requests is left, and ends with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import TYPE_CHECKING

from ragcache_core.errors import ConfigError
from ragcache_core.types import DocId

if TYPE_CHECKING:
    from ragcache_core.tree import KnowledgeTree, TreeNode


class Pins:
    """Protects the paths of pinned documents in the tree, as many as ``limit`` blocks hold.

    Args:
        tree: in which they stand.
        limit: how many blocks the pinned paths may have together; asked whenever it matters.
        describe: returns what a number of blocks is in words, and what the limit comes from, for a refusal.
    """

    def __init__(self, tree: KnowledgeTree, limit: Callable[[], int], describe: Callable[[int], str]) -> None:
        self._tree = tree
        self._limit = limit
        self._describe = describe
        self.doc_ids: set[DocId] = set()
        self._ends: set[Hashable] = set()
        """The last unit of each protected path."""

    @property
    def num_units(self) -> int:
        """Blocks of all pinned paths, each once."""
        return self._num_units(self._ends)

    def check(self, doc_ids: Iterable[DocId]) -> set[DocId]:
        """Return those of some documents of which something is cached; see :meth:`pin`."""
        return self._find(doc_ids)[0]

    def pin(self, doc_ids: Iterable[DocId]) -> set[DocId]:
        """Pin documents, those as well of which nothing is cached now, and return all of them.

        Raises:
            ConfigError: their paths are more than the limit, and none is pinned.
        """
        _, ends = self._find(doc_ids)
        self.doc_ids.update(doc_ids)
        self._protect(ends)
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
        if self._num_units_with({last.keys[-1]}) <= self._limit():
            self._protect({last.keys[-1]})

    def on_forgotten(self, doc_ids: Iterable[DocId], units: Set[Hashable]) -> None:
        """Unpin documents, and protect nothing of some units, which others may have pinned, before they go."""
        self.doc_ids.difference_update(doc_ids)
        self._unprotect([end for end in self._ends if end in units or not self._is_pinned(self._node_of(end))])

    def _find(self, doc_ids: Iterable[DocId]) -> tuple[set[DocId], set[Hashable]]:
        """Return which of some documents are cached, and where their paths end, if all of that may be pinned."""
        wanted = set(doc_ids)
        found: set[DocId] = set()
        ends: set[Hashable] = set()
        for node in self._tree.nodes():
            if node.stored_s is not None and not node.is_private and node.is_named(wanted):
                ends.add(node.keys[-1])
                found |= wanted.intersection((node.doc_id, *node.other_ids))
        if (num_units := self._num_units_with(ends)) > self._limit():
            raise ConfigError(
                f"with these {len(wanted)} documents and their paths, {self._describe(num_units)} would be pinned "
                f"({self._describe(self.num_units)} are), and the limit is {self._describe(self._limit())}: pin fewer, "
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

    def _num_units_with(self, ends: Set[Hashable]) -> int:
        """Return what :attr:`num_units` will be with further paths; where it is too much, without those evicted."""
        if (num_units := self._num_units(self._ends | ends)) <= self._limit():
            return num_units
        self._unprotect([end for end in self._ends if self._node_of(end).stored_s is None])
        return self._num_units(self._ends | ends)

    def _protect(self, ends: Iterable[Hashable]) -> None:
        for end in ends:
            if end not in self._ends:
                self._ends.add(end)
                self._tree.protect(end)

    def _unprotect(self, ends: Iterable[Hashable]) -> None:
        for end in ends:
            self._ends.remove(end)
            self._tree.unprotect(end)
