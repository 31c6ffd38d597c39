"""A prefix tree over chained keys, cut at document boundaries: the knowledge tree without tiers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence, Set
from typing import Final

from ragcache_core.tree.node import MAX_OTHER_IDS, NO_IDS, Location, PathSegment, TreeNode, length_of_run
from ragcache_core.types import DocId

_IDS_AT_ONCE: Final = 64
UNIT_BITS: Final = 32
UNITS: Final = (1 << UNIT_BITS) - 1


class PrefixTree:
    """Nodes below a root, each a run of units; runs with a common beginning share nodes.

    What else is known of a node belongs to the subclass, which is told when one is made, cut or forgotten.

    Attributes:
        split_listeners: called with a node that kept its first units, and the new child that has the others.
    """

    def __init__(self) -> None:
        self.split_listeners: list[Callable[[TreeNode, TreeNode], None]] = []
        self._nodes: list[TreeNode | None] = []
        self._free_ids: list[int] = []
        self._places: dict[Hashable, int] = {}  # node id and unit in one number: an object per unit would cost more
        self._by_document: dict[DocId, TreeNode | dict[TreeNode, None]] = {}  # most documents have one node
        self._sequence = 0
        self.root = self._new_node(None, [], 0, None)

    def __len__(self) -> int:
        """Return the number of nodes below the root, resident or not."""
        return len(self._nodes) - len(self._free_ids) - 1

    def nodes(self) -> Iterator[TreeNode]:
        """Yield every node below the root; the tree may change meanwhile."""
        return (node for node in self._nodes if node is not None and node is not self.root)

    def contains(self, node: TreeNode) -> bool:
        """Return whether a node is still in the tree."""
        return self._nodes[node.id] is node

    def locate(self, key: Hashable) -> Location | None:
        """Return the location of a unit, resident or not."""
        place = self._places.get(key)
        return None if place is None else self._location(place)

    def known(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """Return which ``keys`` are in the tree."""
        places = self._places
        return [key for key in keys if key in places]

    def key_before(self, location: Location) -> Hashable | None:
        """Return the key of the previous unit; ``None`` for the first."""
        node = location.node
        if location.unit:
            return node.keys[location.unit - 1]
        return node.parent.keys[-1] if node.parent is not None and node.parent.keys else None

    def units_of(self, keys: Iterable[Hashable]) -> dict[TreeNode, int]:
        """Return the nodes of units with masks of them; unknown keys are skipped.

        O(nodes) and a comparison of lists where the keys are in the order of their path, which they need not be.
        """
        masks: dict[TreeNode, int] = {}
        for _, first, length in self.runs(keys if isinstance(keys, list) else list(keys)):
            masks[first.node] = masks.get(first.node, 0) | ((1 << length) - 1) << first.unit
        return masks

    def runs(self, keys: Sequence[Hashable]) -> Iterator[tuple[int, Location, int]]:
        """Yield runs of consecutive units of one node in ``keys``, as :meth:`units_of` does.

        Each is the index of its first key, the place of that, and how many keys it has.
        """
        find, at = self._places.get, 0
        while at < len(keys):
            place = find(keys[at])
            if place is None:
                at += 1
                continue
            location = self._location(place)
            length = length_of_run(location.node.keys, location.unit, keys, at)
            yield at, location, length
            at += length

    def shielded(self, keys: Iterable[Hashable]) -> dict[TreeNode, int]:
        """Return the units that must stay so that ``keys`` can enter: those, and their prefix.

        Keys that are not in the tree are passed over; the others follow one another on one path.
        """
        masks = self.units_of(keys)
        if masks:
            first = min(masks, key=lambda node: node.start)
            mask = masks[first]
            unit = (mask & -mask).bit_length() - 1
            if unit:
                masks[first] = mask | 1 << unit - 1
            elif (parent := first.parent) is not None and parent.keys:
                masks[parent] = 1 << len(parent.keys) - 1
        return masks

    def insert(self, segments: Iterable[PathSegment]) -> list[TreeNode]:
        """Return the nodes of a prompt from the root down, creating missing ones, which are not resident.

        Nodes begin and end where segments do: a node that spans more is split. A segment without keys is no node.
        """
        parent, path = self.root, []
        for segment in segments:
            for node in self._insert_run(parent, segment):
                path.append(node)
                parent = node
        return path

    def extend(
        self, after: Hashable | None, keys: Sequence[Hashable], num_tokens: int, owner: str | None = None
    ) -> TreeNode:
        """Return the node of ``keys``, new units after the unit ``after`` (the root if ``None``).

        They have no name: an answer, or a prompt without documents. A nameless leaf grows in place, so that an answer
        is one node.
        """
        node, num_before = self._end_of(after)
        if num_before < len(node.keys):
            self._split(node, num_before)
        elif node.doc_id is None and node is not self.root and not node.children and self._may_grow(node):
            return self._grow(node, keys, num_tokens)
        return self._insert_run(node, PathSegment(keys, num_tokens, owner=owner))[-1]

    def attach(
        self,
        after: Hashable | None,
        key: Hashable,
        num_tokens: int,
        doc_id: DocId | None,
        other_ids: frozenset[DocId] = NO_IDS,
        owner: str | None = None,
    ) -> TreeNode | None:
        """Return the node of one unit after ``after``; ``None`` if ``after`` is not in the tree.

        Units of one document that arrive in order become one node: this is how a tree grows again from storage.
        """
        if (known := self.locate(key)) is not None:
            return known.node
        if after is not None and after not in self._places:
            return None
        node, num_before = self._end_of(after)
        is_same = node.doc_id == doc_id and node.other_ids == other_ids
        is_end = not node.children and num_before == len(node.keys)
        if is_same and node is not self.root and is_end and self._may_grow(node):
            return self._grow(node, [key], num_tokens)
        if num_before < len(node.keys):
            self._split(node, num_before)
        return self._insert_run(node, PathSegment([key], num_tokens, doc_id, other_ids=other_ids, owner=owner))[-1]

    # By document

    def nodes_of(self, doc_id: DocId) -> Collection[TreeNode]:
        """Return all nodes of a document in order of naming; O(1)."""
        nodes = self._by_document.get(doc_id, {})
        return (nodes,) if isinstance(nodes, TreeNode) else nodes.keys()

    def named(self, doc_ids: Set[DocId]) -> list[TreeNode]:
        """Return the topmost nodes in which documents begin; O(their nodes x height)."""
        nodes = dict.fromkeys(node for doc_id in doc_ids for node in self.nodes_of(doc_id))
        return [node for node in nodes if not any(step in nodes for step in node.path()[:-1])]

    # For the subclass

    def _may_grow(self, node: TreeNode) -> bool:
        """Return whether units may be added to a leaf, and not to a child of it."""
        return True

    def _on_new_ids(self, num_ids: int) -> None:
        """Grow the columns by ``num_ids`` nodes."""

    def _on_new(self, node: TreeNode) -> None:
        """Handle a new node, which is not resident."""

    def _on_split(self, node: TreeNode, lower: TreeNode) -> None:
        """Divide the data of ``node``, which kept its first units, with ``lower``, which has the others."""

    def _on_renamed(self, node: TreeNode, doc_ids: Collection[DocId]) -> None:
        """Handle a node that got further names ``doc_ids``."""

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def _walk(self, keys: Sequence[Hashable]) -> Iterator[tuple[TreeNode, int]]:
        """Yield the nodes along ``keys`` with their numbers of common keys; stop after a mismatch."""
        node, at = self.root, 0
        while at < len(keys) and node.children and (child := node.children.get(keys[at])) is not None:
            num_common = _num_common(child.keys, keys, at)
            yield child, num_common
            if num_common < len(child.keys):
                return
            node, at = child, at + num_common

    def _end_of(self, after: Hashable | None) -> tuple[TreeNode, int]:
        """Return the node of the unit ``after`` and the end of that unit in it; the root if ``None``."""
        if after is None:
            return self.root, 0
        location = self._location(self._places[after])
        return location.node, location.unit + 1

    def _location(self, place: int) -> Location:
        node = self._nodes[place >> UNIT_BITS]
        assert node is not None
        return Location(node, place & UNITS)

    def _node_of(self, key: Hashable) -> TreeNode:
        """Return the node of a unit that is in the tree."""
        return self._location(self._places[key]).node

    def _place(self, node: TreeNode, keys: Sequence[Hashable], first: int = 0) -> None:
        """Note that ``keys`` are the units of ``node`` from ``first`` on."""
        begin = (node.id << UNIT_BITS) + first
        self._places.update(zip(keys, range(begin, begin + len(keys)), strict=True))

    def _grow(self, node: TreeNode, keys: Sequence[Hashable], num_tokens: int) -> TreeNode:
        """Add ``keys`` behind the units of ``node``, and return it."""
        self._place(node, keys, len(node.keys))
        node.keys.extend(keys)
        node.num_tokens += num_tokens
        return node

    def _insert_run(self, parent: TreeNode, segment: PathSegment) -> list[TreeNode]:
        """Return the nodes of one segment below ``parent``."""
        keys, at, path = segment.keys, 0, []
        tokens_per_unit = segment.num_tokens / len(keys) if keys else 0.0
        while at < len(keys):
            child = parent.children.get(keys[at]) if parent.children else None
            if child is None:
                num_tokens = segment.num_tokens - round(at * tokens_per_unit)
                child = self._new_node(parent, list(keys[at:]), num_tokens, segment.doc_id)
                child.is_transient = segment.is_transient
                child.other_ids = _without(segment.other_ids, child.doc_id)
                if parent is self.root or segment.doc_id is not None:
                    child.owner = segment.owner
                self._index(child, child.doc_ids())
                at = len(keys)
            else:
                num_common = _num_common(child.keys, keys, at)
                if num_common < len(child.keys):
                    self._split(child, num_common)
                if segment.other_ids or segment.doc_id not in (None, child.doc_id):
                    self._name(child, segment)
                child.is_transient = child.is_transient and segment.is_transient
                at += num_common
            path.append(child)
            parent = child
        return path

    def _name(self, node: TreeNode, segment: PathSegment) -> None:
        """Add documents to a node, up to :data:`MAX_OTHER_IDS`."""
        before = node.doc_ids()
        node.doc_id = node.doc_id or segment.doc_id
        if len(node.other_ids) < MAX_OTHER_IDS:
            names = (segment.doc_id, *segment.other_ids)
            node.other_ids |= {name for name in names if name is not None}
        node.other_ids = _without(node.other_ids, node.doc_id)
        if added := [doc_id for doc_id in node.doc_ids() if doc_id not in before]:
            self._index(node, added)
            self._on_renamed(node, added)

    def _index(self, node: TreeNode, doc_ids: Iterable[DocId]) -> None:
        for doc_id in doc_ids:
            nodes = self._by_document.setdefault(doc_id, node)
            if isinstance(nodes, dict):
                nodes[node] = None
            elif nodes is not node:
                self._by_document[doc_id] = {nodes: None, node: None}

    def _new_node(
        self, parent: TreeNode | None, keys: list[Hashable], num_tokens: int, doc_id: DocId | None
    ) -> TreeNode:
        if not self._free_ids:
            num_ids = len(self._nodes)
            self._nodes += [None] * _IDS_AT_ONCE
            self._free_ids += range(num_ids + _IDS_AT_ONCE - 1, num_ids - 1, -1)
            self._on_new_ids(_IDS_AT_ONCE)
        node = TreeNode(self._free_ids.pop(), parent, keys, num_tokens, doc_id)
        node.updated = self._next_sequence()
        self._nodes[node.id] = node
        self._place(node, keys)
        if parent is not None:
            if parent.children is None:
                parent.children = {}
            parent.children[keys[0]] = node
            self._on_new(node)
        return node

    def _split(self, node: TreeNode, num_units: int) -> None:
        """Cut ``node`` after ``num_units`` units; a new child gets the others and the children."""
        assert not node.num_pins, f"{node} is pinned: it cannot be cut"
        keys = node.keys[num_units:]
        num_tokens = node.num_tokens - round(node.num_tokens * num_units / len(node.keys))
        children, node.children = node.children, None
        del node.keys[num_units:]
        node.num_tokens -= num_tokens
        lower = self._new_node(node, keys, num_tokens, node.doc_id)
        node.copy_stats_to(lower)
        lower.other_ids = node.other_ids
        self._index(lower, lower.doc_ids())
        lower.children = children
        for child in lower.iter_children():
            child.parent = lower
        self._on_split(node, lower)
        for listener in self.split_listeners:
            listener(node, lower)

    def _remove_node(self, node: TreeNode) -> TreeNode:
        """Remove a leaf, and return its parent."""
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        assert not node.children
        del parent.children[node.keys[0]]
        if not parent.children:
            parent.children = None
        for key in node.keys:
            del self._places[key]
        for doc_id in node.doc_ids():
            nodes = self._by_document[doc_id]
            if isinstance(nodes, dict) and len(nodes) > 1:
                del nodes[node]
            else:
                del self._by_document[doc_id]
        self._nodes[node.id] = None
        self._free_ids.append(node.id)
        return parent


def _without(ids: frozenset[DocId], doc_id: DocId | None) -> frozenset[DocId]:
    """Return ``ids`` without a node's first document; the same object if absent."""
    return ids if doc_id is None or doc_id not in ids else ids - {doc_id}


def _num_common(node_keys: Sequence[Hashable], keys: Sequence[Hashable], at: int) -> int:
    """Return how many of ``node_keys`` equal ``keys[at]`` onwards; O(log n), as keys are chained."""
    high = min(len(node_keys), len(keys) - at)
    if node_keys[high - 1] == keys[at + high - 1]:
        return high
    low = 1  # the first is known to be equal
    while high - low > 1:
        middle = (low + high) // 2
        if node_keys[middle - 1] == keys[at + middle - 1]:
            low = middle
        else:
            high = middle
    return low
