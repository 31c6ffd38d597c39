"""Nodes of a tree that changed, for readers that keep data derived from them."""

from __future__ import annotations

from ragcache_core.tree.node import TreeNode


class NodeChanges:
    """Nodes whose resident units changed, that were cut, or that left the tree."""

    def __init__(self) -> None:
        self._readers: list[set[TreeNode]] = []

    def subscribe(self) -> set[TreeNode]:
        """Return a set that every changed node is added to from now on; the caller empties it."""
        nodes: set[TreeNode] = set()
        self._readers.append(nodes)
        return nodes

    def unsubscribe(self, nodes: set[TreeNode]) -> None:
        """Put no more nodes into what :meth:`subscribe` returned."""
        self._readers = [reader for reader in self._readers if reader is not nodes]

    def note(self, node: TreeNode) -> None:
        """Tell all readers of a node."""
        for nodes in self._readers:
            nodes.add(node)
