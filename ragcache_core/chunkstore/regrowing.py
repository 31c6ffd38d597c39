"""What is stored beside a block's KV, and the tree that grows again from it after a restart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from ragcache_core.chunkstore.chunks import ChunkEntry, ChunkNote
from ragcache_core.tree import KnowledgeTree, Location
from ragcache_core.types import Tier


def note_of(tree: KnowledgeTree, location: Location) -> ChunkNote:
    """Return what has to be stored with a block's KV for the tree to grow again from it."""
    node = location.node
    parent = cast("bytes | None", tree.key_before(location))
    return ChunkNote(parent, node.doc_id, node.start + location.unit, node.frequency, node.avg_cost_s)


def regrow(
    tree: KnowledgeTree, entries: Iterable[ChunkEntry], tier: Tier, tokens_per_block: int
) -> tuple[list[bytes], list[bytes]]:
    """Put stored blocks back into a tree without any, parents first; return those that stand there, and the others.

    A block whose prefix is gone is of no use to anybody.
    """
    found: dict[bytes, None] = {}
    orphans: list[bytes] = []
    for entry in entries:
        if entry.parent is not None and entry.parent not in found:
            orphans.append(entry.key)
            continue
        node = tree.attach(entry.parent, entry.key, tokens_per_block, entry.doc_id)
        location = tree.locate(entry.key)
        if node is None or location is None:
            orphans.append(entry.key)
            continue
        tree.add(location.node, 1 << location.unit, tier)
        tree.restore(location.node, frequency=round(entry.frequency), cost_s=entry.cost)
        found[entry.key] = None
    return list(found), orphans
