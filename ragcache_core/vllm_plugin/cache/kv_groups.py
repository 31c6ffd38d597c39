"""The KV cache groups of a model: the one that the tree follows, and the useful blocks of others.

A group is layers that share their blocks. A hit needs the full-attention blocks of the whole prefix, but of a window's
group only the last ones, and of a state's only the last. So a unit of the tree is a full-attention block, and a block
of another group with the same key goes when that goes, or before it, if no hit will end where it would be needed. Hits
end where requests part from one another: where nodes end, and where prompts that are in the engine now end::

    node      [------------- document --------------]
    full       #  #  #  #  #  #  #  #  #  #  #  #  #
    window     .  .  .  .  .  .  .  .  .  #  #  #  #     # worth keeping
    state               .           .              #     . not
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeAlias, TypeVar, cast

from ragcache_core.chunkstore.chunks import ChunkEntry, ChunkNote
from ragcache_core.chunkstore.regrowing import note_of
from ragcache_core.tree import KnowledgeTree, Location
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.request_state import Key

Slot = TypeVar("Slot")
BlockKey: TypeAlias = bytes
"""Names a block in the tiers below the GPU: its unit's key, and behind that its group where there are several."""
_GROUP_BYTES = 4


@dataclass(frozen=True, slots=True)
class OtherGroup:
    """A group other than the one that the tree follows.

    Attributes:
        num_units: units before a hit's end, the last one included, whose blocks a hit needs; infinite: all.
        is_state: a block is the state after all before it: of those that there are, ``num_units`` are worth keeping.
    """

    num_units: float
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups with cached blocks.

    Attributes:
        main: the group of full attention that the tree follows: a unit is one of its blocks.
        others: by the number of the group.
    """

    main: int = 0
    others: Mapping[int, OtherGroup] = field(default_factory=dict)

    @property
    def blocks_per_unit(self) -> int:
        """Maximum number of blocks that a tree block needs over all groups."""
        return 1 + len(self.others)

    def is_worth_keeping(self, tree: KnowledgeTree, group: int, key: Key, is_here: Callable[[Key], bool]) -> bool:
        """Return whether a hit may need the block ``key`` of a group; ``is_here`` tells which others are stored."""
        location = tree.locate(key)
        if location is None:
            return False
        node, unit = location.node, location.unit
        other = self.others[group]
        if other.num_units == math.inf:
            return True
        num_units = int(other.num_units)
        if other.is_state:
            is_last = sum(is_here(cast("Key", later)) for later in node.keys[unit + 1 :]) < num_units
        else:
            is_last = len(node.keys) - unit <= num_units
        # A prompt that is sent again is hit up to its last token but one, which may be a unit before its end.
        return is_last or any(tree.is_retained(near) for near in node.keys[unit : unit + num_units + 1])

    # Keys of blocks below the GPU

    def key_of(self, unit: Key, group: int) -> BlockKey:
        """Return the key of a group's block."""
        return unit + _suffix(group) if self.others else unit

    def keys_of(self, units: Sequence[Key], group: int) -> list[BlockKey]:
        """Return :meth:`key_of` of each block."""
        if not self.others:
            return [*units]
        suffix = _suffix(group)
        return [unit + suffix for unit in units]

    def unit_of(self, key: BlockKey) -> Key:
        """Return the tree block of a block."""
        return key[:-_GROUP_BYTES] if self.others else key

    def units_of(self, keys: Iterable[BlockKey]) -> list[Key]:
        """Return :meth:`unit_of` of each block; ``keys`` themselves where they are a list of units."""
        if not self.others:
            return keys if isinstance(keys, list) else [*keys]
        return [key[:-_GROUP_BYTES] for key in keys]

    def group_of(self, key: BlockKey) -> int:
        """Return the group of a block."""
        return int.from_bytes(key[-_GROUP_BYTES:], "big") if self.others else self.main

    def is_main(self, key: BlockKey) -> bool:
        """Return whether a block belongs to the full-attention group."""
        return not self.others or self.group_of(key) == self.main

    def main_of(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Return the blocks of the full-attention group."""
        return [*filter(self.is_main, keys)] if self.others else keys

    def offload_keys(self, keys: Iterable[BlockKey]) -> list[bytes]:
        """Return the keys that vLLM gives these blocks, which always end with the group."""
        suffix = b"" if self.others else _suffix(self.main)
        return [key + suffix for key in keys]

    def note_of(self, tree: KnowledgeTree, key: BlockKey) -> ChunkNote:
        """Return the metadata stored with a block in ``tree``; it names the parent as stored blocks are named."""
        unit = self.unit_of(key)
        location = tree.locate(unit)
        assert location is not None
        note = self.note_at(tree, location)
        return note if self.is_main(key) else ChunkNote(self.key_of(unit, self.main), position=note.position)

    def note_at(self, tree: KnowledgeTree, location: Location) -> ChunkNote:
        """Return the metadata stored with the full-attention block of a tree block."""
        note = note_of(tree, location)
        if not self.others or note.parent is None:
            return note
        return replace(note, parent=self.key_of(note.parent, self.main))

    def unit_of_entry(self, entry: ChunkEntry) -> tuple[Key, bool]:
        """Return the tree block of a stored block, and whether it is the full-attention one."""
        return self.unit_of(entry.key), self.is_main(entry.key)


def _suffix(group: int) -> bytes:
    return group.to_bytes(_GROUP_BYTES, "big")


class OtherBlocks(Generic[Slot]):
    """Evictable blocks of other groups than the tree's in a tier, by tree block. Each has its own slot.

    Without other groups it stays empty.
    """

    def __init__(self, groups: KVGroups, tree: KnowledgeTree, tier: Tier) -> None:
        self._groups = groups
        self._tree = tree
        self._tier = tier
        self._keys: dict[Slot, Key] = {}
        self._slots: dict[Hashable, dict[Slot, None]] = {}
        self._useless: dict[Slot, None] = {}

    @property
    def has_groups(self) -> bool:
        """Whether the model has other groups."""
        return bool(self._groups.others)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._keys

    def __iter__(self) -> Iterator[Slot]:
        """Yield the evictable blocks, the oldest first."""
        return iter(self._keys)

    def add(self, slot: Slot, group: int, key: Key, is_here: Callable[[Key], bool]) -> None:
        """Add an unused block; see :meth:`KVGroups.is_worth_keeping`.

        It is of no use as well where its unit is not in the tier: no hit reaches that far.
        """
        self._keys[slot] = key
        self._slots.setdefault(key, {})[slot] = None
        is_reached = self._tree.is_resident(key, self._tier)
        if not is_reached or not self._groups.is_worth_keeping(self._tree, group, key, is_here):
            self._useless[slot] = None

    def discard(self, slot: Slot) -> None:
        """Remove a block that is used or has lost its content; ignore unknown ones."""
        if (key := self._keys.pop(slot, None)) is None:
            return
        slots = self._slots[key]
        del slots[slot]
        if not slots:
            del self._slots[key]
        self._useless.pop(slot, None)

    def useless(self) -> Iterable[Slot]:
        """Return the blocks that no hit will need, the oldest first."""
        return self._useless

    def of_unit(self, key: Hashable) -> list[Slot]:
        """Return the blocks that belong to a tree block."""
        return list(self._slots.get(key, ()))

    def size_of(self, key: Hashable) -> int:
        """Return the number of slots freed by evicting a tree block, except for useless blocks."""
        return 1 + sum(slot not in self._useless for slot in self._slots.get(key, ()))

    def lose_unit(self, key: Key) -> None:
        """Handle a tree block that left the tier without eviction."""
        self._useless.update(self._slots.get(key, {}))

    def clear(self) -> None:
        """Remove all blocks."""
        self._keys.clear()
        self._slots.clear()
        self._useless.clear()
