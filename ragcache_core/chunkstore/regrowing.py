"""What is stored beside a block's KV, and the tree that grows again from it after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """Return what has to be stored with a block's KV for the tree to grow again from it."""
    node = location.node
    parent = cast("bytes | None", tree.key_before(location))
    names = text_with_owner(node.owner, text_of_names(node.doc_id, node.other_ids))
    position, stored_s = node.start + location.unit, node.stored_s or 0.0
    return ChunkNote(parent, names, position, node.frequency, node.avg_cost_s, stored_s, node.is_private)


def regrow(
    tree: KnowledgeTree,
    entries: Iterable[ChunkEntry],
    tier: Tier,
    tokens_per_block: int,
    unit_of: Callable[[ChunkEntry], tuple[bytes, bool]] = lambda entry: (entry.key, True),
) -> tuple[list[bytes], list[bytes]]:
    """Add stored blocks to a tree without any, parents first; return the added ones, and the others.

    A block without its prefix is useless. ``unit_of`` returns a chunk's unit in the tree, and whether the chunk is that
    unit. Chunks that are not have their unit's chunk as parent, and come last.
    """
    units: dict[bytes, bytes] = {}
    found: list[bytes] = []
    beside: list[ChunkEntry] = []
    orphans: list[bytes] = []
    for entry in entries:
        unit, is_unit = unit_of(entry)
        if not is_unit:
            beside.append(entry)
            continue
        if entry.parent is not None and entry.parent not in units:
            orphans.append(entry.key)
            continue
        parent = None if entry.parent is None else units[entry.parent]
        owner, names = owner_of_text(entry.doc_id)
        node = tree.attach(parent, unit, tokens_per_block, *names_of_text(names), owner)
        location = tree.locate(unit)
        if node is None or location is None:
            orphans.append(entry.key)
            continue
        tree.add(location.node, 1 << location.unit, tier)
        tree.make_older(location.node, entry.stored_s)
        if entry.is_private:
            tree.make_private(location.node)
        tree.restore(location.node, frequency=round(entry.frequency), cost_s=entry.cost)
        units[entry.key] = unit
        found.append(entry.key)
    for entry in beside:
        (found if entry.parent in units else orphans).append(entry.key)
    return found, orphans
