"""Metadata of stored blocks, and the tree that is rebuilt from it after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

from ragcache_core.chunkstore.chunks import (
    ChunkEntry,
    ChunkNote,
    names_of_text,
    owner_of_text,
    text_of_names,
    text_with_owner,
)
from ragcache_core.tree import KnowledgeTree, Location
from ragcache_core.types import Tier


def note_of(tree: KnowledgeTree, location: Location) -> ChunkNote:
    """Return the metadata to store with a block, for rebuilding the tree."""
    node = location.node
    parent = cast("bytes | None", tree.key_before(location))
    names = text_with_owner(node.owner, text_of_names(node.doc_id, node.other_ids))
    position, stored_s = node.start + location.unit, node.stored_s or 0.0
    return ChunkNote(parent, names, position, node.frequency, node.avg_cost_s, stored_s, node.is_private)


UnitOf = Callable[[ChunkEntry], tuple[bytes, bool]]
"""Returns a chunk's unit in the tree, and whether the chunk is that unit."""


class Regrowth:
    """Adds stored blocks to a tree, parents first, in batches.

    A block without its prefix is useless. Chunks that are not a unit have their unit's chunk as parent, and come last.

    Attributes:
        found: the added blocks.
        orphans: the others.
    """

    def __init__(self, tree: KnowledgeTree, tier: Tier, tokens_per_block: int, unit_of: UnitOf) -> None:
        self.found: list[bytes] = []
        self.orphans: list[bytes] = []
        self._tree = tree
        self._tier = tier
        self._tokens_per_block = tokens_per_block
        self._unit_of = unit_of
        self._units: dict[bytes, bytes] = {}

    def add(self, entry: ChunkEntry) -> None:
        """Add a block, if its prefix is in the tree."""
        unit, is_unit = self._unit_of(entry)
        has_prefix = (entry.parent is None and is_unit) or entry.parent in self._units
        if has_prefix and (not is_unit or self._add_unit(entry, unit)):
            self.found.append(entry.key)
        else:
            self.orphans.append(entry.key)

    def _add_unit(self, entry: ChunkEntry, unit: bytes) -> bool:
        tree = self._tree
        parent = None if entry.parent is None else self._units[entry.parent]
        owner, names = owner_of_text(entry.doc_id)
        node = tree.attach(parent, unit, self._tokens_per_block, *names_of_text(names), owner)
        location = tree.locate(unit)
        if node is None or location is None:
            return False
        tree.add(location.node, 1 << location.unit, self._tier)
        tree.make_older(location.node, entry.stored_s)
        if entry.is_private:
            tree.make_private(location.node)
        tree.restore(location.node, frequency=round(entry.frequency), cost_s=entry.cost)
        self._units[entry.key] = unit
        return True


def in_order_of_growth(entries: Iterable[ChunkEntry], unit_of: UnitOf) -> Iterator[ChunkEntry]:
    """Yield entries in the order for :class:`Regrowth`; blocks of other groups come last."""
    beside: list[ChunkEntry] = []
    for entry in entries:
        if unit_of(entry)[1]:
            yield entry
        else:
            beside.append(entry)
    yield from beside


def is_unit_itself(entry: ChunkEntry) -> tuple[bytes, bool]:
    """Return a chunk's key, which is a unit if the model has one KV cache group."""
    return entry.key, True


def regrow(
    tree: KnowledgeTree,
    entries: Iterable[ChunkEntry],
    tier: Tier,
    tokens_per_block: int,
    unit_of: UnitOf = is_unit_itself,
) -> tuple[list[bytes], list[bytes]]:
    """Add stored blocks to a tree, parents first; return the added ones, and those without their prefix."""
    growth = Regrowth(tree, tier, tokens_per_block, unit_of)
    for entry in in_order_of_growth(entries, unit_of):
        growth.add(entry)
    return growth.found, growth.orphans
