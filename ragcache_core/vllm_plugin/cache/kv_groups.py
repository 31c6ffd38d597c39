"""The groups of a model's KV caches: which of them the knowledge tree follows, and what of the others is worth keeping.

A group is layers that share their blocks. A hit needs the full-attention blocks of the whole prefix, but of a window's
group only the last ones, and of a state's only the last. So a unit of the tree is a full-attention block, and a block of
another group with the same key goes when that goes, or before it, if no hit will end where it would be needed. Hits end
where requests part from one another: where nodes end, and where prompts that are in the engine now end::

    node      [------------- document --------------]
    full       #  #  #  #  #  #  #  #  #  #  #  #  #
    window     .  .  .  .  .  .  .  .  .  #  #  #  #     # worth keeping
    state               .           .              #     . not
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from ragcache_core.tree import KnowledgeTree
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.request_state import Key

Slot = TypeVar("Slot")


@dataclass(frozen=True, slots=True)
class OtherGroup:
    """A group beside the one that the tree follows.

    Attributes:
        num_units: units before a hit's end, the last one included, whose blocks a hit needs; infinite: all.
        is_state: a block is the state after all before it, and stands for no tokens of its own.
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

    def is_worth_keeping(
        self, tree: KnowledgeTree, tier: Tier, group: int, key: Key, is_here: Callable[[Key], bool]
    ) -> bool:
        """Return whether a hit may need the block ``key`` of another group; ``is_here`` tells of that group's blocks.

        Not where the unit has left ``tier``: no hit reaches that far.
        """
        location = tree.locate(key)
        if location is None:
            return False
        node, unit = location.node, location.unit
        if not tree.resident_mask(node, tier) >> unit & 1:
            return False
        other = self.others[group]
        if other.num_units == math.inf:
            return True
        num_units = int(other.num_units)
        if other.is_state:
            is_last = not any(is_here(cast("Key", later)) for later in node.keys[unit + 1 :])
        else:
            is_last = len(node.keys) - unit <= num_units
        # A prompt that is sent again is hit up to its last token but one, which may be a unit before its end.
        return is_last or any(tree.is_retained(near) for near in node.keys[unit : unit + num_units + 1])


class OtherBlocks(Generic[Slot]):
    """What a tier may evict of other groups than the tree's, each in a slot of its own, by the unit that it goes with.

    Without other groups it stays empty.
    """

    def __init__(self, groups: KVGroups, tree: KnowledgeTree, tier: Tier) -> None:
        self._groups = groups
        self._tree = tree
        self._tier = tier
        self._keys: dict[Slot, Key] = {}
        self._slots: dict[Key, dict[Slot, None]] = {}
        self._useless: dict[Slot, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._keys

    def add(self, slot: Slot, group: int, key: Key, is_here: Callable[[Key], bool]) -> None:
        """Take in a block that nobody uses any more; see :meth:`KVGroups.is_worth_keeping`."""
        self._keys[slot] = key
        self._slots.setdefault(key, {})[slot] = None
        if not self._groups.is_worth_keeping(self._tree, self._tier, group, key, is_here):
            self._useless[slot] = None

    def discard(self, slot: Slot) -> None:
        """Let go of a block that is used, or has lost its content; does nothing for one that is not here."""
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

    def oldest(self) -> Slot | None:
        """Return the slot that came first; None where there is none."""
        return next(iter(self._keys), None)

    def of_unit(self, key: Key) -> list[Slot]:
        """Return what goes with a unit."""
        return list(self._slots.get(key, ()))

    def size_of(self, key: Key) -> int:
        """Return how many slots are free once a unit is evicted."""
        return 1 + len(self._slots.get(key, ()))

    def lose_unit(self, key: Key) -> None:
        """Take note that a unit has left the tier, and not by eviction."""
        self._useless.update(self._slots.get(key, {}))

    def clear(self) -> None:
        """Forget everything."""
        self._keys.clear()
        self._slots.clear()
        self._useless.clear()
