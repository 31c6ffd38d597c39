"""Changed nodes of a tree, for readers with derived data."""

from __future__ import annotations

from ragcache_core.tree.node import TreeNode


class NodeChanges:
    """Nodes with changed resident units, cut nodes, and removed nodes."""

    def __init__(self) -> None:
        self._readers: list[set[TreeNode]] = []

    def subscribe(self) -> set[TreeNode]:
        """Return a set to which changed nodes are added from now on; the caller empties it."""
        nodes: set[TreeNode] = set()
        self._readers.append(nodes)
        return nodes

    def unsubscribe(self, nodes: set[TreeNode]) -> None:
        """Stop adding nodes to a set of :meth:`subscribe`."""
        self._readers = [reader for reader in self._readers if reader is not nodes]

    def note(self, node: TreeNode) -> None:
        """Add a node to all readers' sets."""
        for nodes in self._readers:
            nodes.add(node)
