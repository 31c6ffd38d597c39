"""What changed in a tree's tiers, for whoever keeps something that depends on it."""

from __future__ import annotations

from ragcache_core.tree.node import TreeNode


class NodeChanges:
    """Nodes of which other units lie in some tier than before, that were cut, or that are gone from the tree."""

    def __init__(self) -> None:
        self._readers: list[set[TreeNode]] = []

    def subscribe(self) -> set[TreeNode]:
        """Return a set that every node is put into from now on; whoever asked for it empties it."""
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
