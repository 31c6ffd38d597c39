"""Nodes of the knowledge tree, and types of its queries."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence, Set
from typing import Any, Final, NamedTuple

from ragcache_core.policy.base import NodeStats
from ragcache_core.types import DocId

NO_IDS: Final[frozenset[DocId]] = frozenset()
MAX_OTHER_IDS: Final = 32
"""Bound on the names of the same tokens: a client that sends a new name in every request must not grow it forever."""


class PathSegment(NamedTuple):
    """A part of a prompt: the static prefix, a document, or the text after the documents.

    ``keys`` name its units of storage in order, and they are chained: two runs with the same key at one place have the
    same keys everywhere before it. In the engine a unit is a block of KV and its key vLLM's block hash, which covers
    all tokens up to there; the simulator may take a whole document for one unit. ``num_tokens`` are spread evenly over
    the units. ``is_transient`` marks what must not be kept at another's expense. ``other_ids`` are those of documents
    that lie in its first unit as a whole, before its own. ``owner`` is the tenant whose prompt it is, or
    the collection that the document is in.
    """

    keys: Sequence[Hashable]
    num_tokens: int
    doc_id: DocId | None = None
    is_transient: bool = False
    other_ids: frozenset[DocId] = NO_IDS
    owner: str | None = None


class TreeNode(NodeStats):
    """Consecutive units of one document (or unnamed text) after one particular prefix.

    ::

        root --[prefix]--[D1]--[D3]--[question]
                           \\---[D2]

    Attributes:
        keys: of its units, in order.
        start: number of units on the path before it.
        children: by the first key of the child; None where there are none.
        other_ids: documents with the same tokens, and those that lie in its first unit as a whole.
        owner: tenant or collection that owns it, or None. A node without a name has its parent's owner.
        num_pins: while positive, no tier may evict it.
        num_users: while positive, it stays in the tree, resident or not.
        is_private: it was requested with a salt: no other application may see it or its descendants.
        stored_s: the moment from which on units of it have been in some tier, and so the age of the oldest of them.
        updated: sequence number of the last change of its numbers; breaks ties between equal ranks.
    """

    __slots__ = (
        "children", "is_private", "keys", "num_pins", "num_users", "other_ids", "owner", "start", "stored_s", "updated"
    )  # fmt: skip
    parent: TreeNode | None

    def __init__(
        self, node_id: int, parent: TreeNode | None, keys: list[Hashable], num_tokens: int, doc_id: DocId | None
    ) -> None:
        super().__init__(node_id, num_tokens, parent, doc_id)
        self.keys = keys
        self.start: int = 0 if parent is None else parent.start + len(parent.keys)
        self.children: dict[Hashable, TreeNode] | None = None
        self.other_ids = NO_IDS
        self.owner: str | None = None if parent is None else parent.owner
        self.num_pins = 0
        self.num_users = 0
        self.is_private: bool = parent is not None and parent.is_private
        self.stored_s: float | None = None
        self.updated = 0

    @property
    def full_mask(self) -> int:
        """A bit for each unit."""
        return (1 << len(self.keys)) - 1

    def num_tokens_of(self, num_units: int) -> int:
        """Return the tokens of its first ``num_units`` units."""
        return self.num_tokens if num_units == len(self.keys) else round(num_units * self.num_tokens / len(self.keys))

    def iter_children(self) -> Iterator[TreeNode]:
        """Yield the children."""
        return iter(self.children.values() if self.children else ())

    def below(self) -> list[TreeNode]:
        """Return this node and its descendants, each before its children."""
        nodes = [self]
        for node in nodes:
            nodes.extend(node.iter_children())
        return nodes

    def path(self) -> list[TreeNode]:
        """Return the nodes from below the root down to this one."""
        nodes: list[TreeNode] = []
        node: TreeNode | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def doc_ids(self) -> tuple[DocId, ...]:
        """Return the ids of all documents in it."""
        return (*self.other_ids,) if self.doc_id is None else (self.doc_id, *self.other_ids)

    def is_named(self, doc_ids: Set[DocId]) -> bool:
        """Return whether one of the documents begins or continues in it."""
        return self.doc_id in doc_ids or not self.other_ids.isdisjoint(doc_ids)

    def __repr__(self) -> str:
        return f"TreeNode({self.id}, doc_id={self.doc_id!r}, units=[{self.start}, {self.start + len(self.keys)}))"


class Location(NamedTuple):
    """Where a unit stands until its node is cut: the node, and the unit's number in it."""

    node: TreeNode
    unit: int


def length_of_run(node_keys: Sequence[Hashable], unit: int, keys: Sequence[Hashable], at: int) -> int:
    """Return how many keys from ``keys[at]`` on match those of a node from ``unit`` on; at least 1.

    The first of them is known to be.
    """
    most = min(len(node_keys) - unit, len(keys) - at)
    is_last_equal = node_keys[unit + most - 1] == keys[at + most - 1]
    if is_last_equal and node_keys[unit : unit + most] == keys[at : at + most]:
        return most  # the usual case, at the speed of a comparison of lists
    length = 1
    while length < most and node_keys[unit + length] == keys[at + length]:
        length += 1
    return length


def runs_of(mask: int) -> Iterator[tuple[int, int]]:
    """Yield first bit and length of each run of set bits, the lowest first."""
    start = 0
    while mask:
        gap = (mask & -mask).bit_length() - 1
        mask >>= gap
        length = (~mask & (mask + 1)).bit_length() - 1
        yield start + gap, length
        start += gap + length
        mask >>= length


class PrefixMatch(NamedTuple):
    """The longest prefix of a prompt in any tier.

    ``num_tokens_by_tier`` counts each token in the fastest tier that holds it, indexed by
    :class:`~ragcache_core.types.Tier`.
    """

    nodes: tuple[TreeNode, ...] = ()
    num_units: int = 0
    num_tokens: int = 0
    num_tokens_by_tier: tuple[int, ...] = (0, 0, 0)


class EvictedRun(NamedTuple):
    """Units of ``node`` that a tier evicted, from the number ``first`` on without a gap.

    ``keys`` and ``slots``, what the tier kept for each, have the last unit first; it may have kept none.
    """

    node: TreeNode
    first: int
    keys: list[Hashable]
    slots: list[Any]


def evicted_runs(node: TreeNode, units: int, slots: list[Any] | None) -> list[EvictedRun]:
    """Return the runs of units in the mask ``units``, the last first; a tier kept ``slots`` for the node's units."""
    return [
        EvictedRun(
            node,
            first,
            node.keys[first : first + length][::-1],
            [] if slots is None else slots[first : first + length][::-1],
        )
        for first, length in runs_of(units)
    ][::-1]
