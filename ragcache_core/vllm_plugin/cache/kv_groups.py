"""The groups of a model's KV caches: which of them the knowledge tree follows, and what of the others is worth keeping.

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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, cast

from ragcache_core.chunkstore.chunks import ChunkEntry, ChunkNote
from ragcache_core.chunkstore.regrowing import note_of
from ragcache_core.tree import KnowledgeTree, Location
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.request_state import Key

Slot = TypeVar("Slot")
_GROUP_BYTES = 4


@dataclass(frozen=True, slots=True)
class OtherGroup:
    """A group beside the one that the tree follows.

    Attributes:
        num_units: units before a hit's end, the last one included, whose blocks a hit needs; infinite: all.
        is_state: a block is the state after all before it: of those that there are, ``num_units`` are worth keeping.
    """

    num_units: float
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups whose blocks are cached.

    Attributes:
        main: the group of full attention that the tree follows: a unit is one of its blocks.
        others: by the number of the group.
    """

    main: int = 0
    others: Mapping[int, OtherGroup] = field(default_factory=dict)

    @property
    def blocks_per_unit(self) -> int:
        """Blocks that a unit takes at most."""
        return 1 + len(self.others)

    def is_worth_keeping(self, tree: KnowledgeTree, group: int, key: Key, is_here: Callable[[Key], bool]) -> bool:
        """Return whether a hit may need the block ``key`` of a group; ``is_here`` tells of the group's other blocks."""
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

    # Below the GPU a block is a chunk, whose key ends with its group

    def is_main(self, key: bytes) -> bool:
        """Return whether a chunk is one of full attention."""
        return not self.others or group_of(key) == self.main

    def offload_key(self, unit: Key) -> bytes:
        """Return the key of a unit's chunk of full attention."""
        return offload_key(unit, self.main)

    def chunk_name(self, key: bytes) -> bytes:
        """Return the name under which a chunk is stored; the unit's where there is one group."""
        return key if self.others else unit_of(key)

    def note_of(self, tree: KnowledgeTree, key: bytes) -> ChunkNote:
        """Return what is stored beside a chunk, whose unit is in ``tree``; its parent is named as chunks are."""
        location = tree.locate(unit_of(key))
        assert location is not None
        note = self.note_at(tree, location)
        return note if self.is_main(key) else ChunkNote(self.offload_key(unit_of(key)), position=note.position)

    def note_at(self, tree: KnowledgeTree, location: Location) -> ChunkNote:
        """Return what is stored beside the chunk of full attention of a unit."""
        note = note_of(tree, location)
        return replace(note, parent=self.offload_key(note.parent)) if self.others and note.parent is not None else note

    def unit_of_entry(self, entry: ChunkEntry) -> tuple[Key, bool]:
        """Return the unit that a stored chunk goes with, and whether it is that unit."""
        key = self.key_of_name(entry.key)
        return unit_of(key), self.is_main(key)

    def key_of_name(self, name: bytes) -> bytes:
        """Undo :meth:`chunk_name`."""
        return name if self.others else self.offload_key(name)


def offload_key(unit: Key, group: int) -> bytes:
    """Return the key of a chunk, as vLLM's offloading has it."""
    return unit + group.to_bytes(_GROUP_BYTES, "big")


def offload_keys(units: Iterable[Key], group: int) -> list[bytes]:
    """Return :func:`offload_key` of each unit."""
    suffix = group.to_bytes(_GROUP_BYTES, "big")
    return [unit + suffix for unit in units]


def unit_of(key: bytes) -> Key:
    """Return the unit that a chunk goes with, by the key of the chunk."""
    return key[:-_GROUP_BYTES]


def units_of(keys: Iterable[bytes]) -> list[Key]:
    """Do :func:`unit_of` with many keys."""
    return [key[:-_GROUP_BYTES] for key in keys]


def group_of(key: bytes) -> int:
    """Return the group that a chunk is of."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


class OtherBlocks(Generic[Slot]):
    """What a tier may evict of other groups than the tree's, each in a slot of its own, by the unit that it goes with.

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
        """Whether the model has other groups at all."""
        return bool(self._groups.others)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._keys

    def __iter__(self) -> Iterator[Slot]:
        """Yield what may be evicted, what came first at the beginning."""
        return iter(self._keys)

    def add(self, slot: Slot, group: int, key: Key, is_here: Callable[[Key], bool]) -> None:
        """Add a block that is no longer used; see :meth:`KVGroups.is_worth_keeping`.

        It is of no use as well where its unit is not in the tier: no hit reaches that far.
        """
        self._keys[slot] = key
        self._slots.setdefault(key, {})[slot] = None
        is_reached = self._tree.is_resident(key, self._tier)
        if not is_reached or not self._groups.is_worth_keeping(self._tree, group, key, is_here):
            self._useless[slot] = None

    def discard(self, slot: Slot) -> None:
        """Remove a block that is used, or has lost its content; does nothing for an unknown one."""
        if (key := self._keys.pop(slot, None)) is None:
            return
        slots = self._slots[key]
        del slots[slot]
        if not slots:
            del self._slots[key]
        self._useless.pop(slot, None)

    def useless(self) -> Iterable[Slot]:
        """Return what no hit will need, what came first at the beginning."""
        return self._useless

    def of_unit(self, key: Hashable) -> list[Slot]:
        """Return what goes with a unit."""
        return list(self._slots.get(key, ()))

    def size_of(self, key: Hashable) -> int:
        """Return how many slots are free once a unit is evicted, besides the useless ones."""
        return 1 + sum(slot not in self._useless for slot in self._slots.get(key, ()))

    def lose_unit(self, key: Key) -> None:
        """Handle a unit that left the tier without eviction."""
        self._useless.update(self._slots.get(key, {}))

    def clear(self) -> None:
        """Forget everything."""
        self._keys.clear()
        self._slots.clear()
        self._useless.clear()
