"""Blocks of KV in tiers, as moved by vLLM's pool, its offloading, and RAGCache's plugin.

The tree knows where blocks are and chooses what is evicted. The rest is here: free blocks without content, blocks in
use, and the order of calls to the tree, which decides ties. Writes take no time; loads are timed by the engine.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ragcache_core.tree import KnowledgeTree, Location, admit, total_size
from ragcache_core.types import Tier


class _RefCounts:
    """Counts uses of blocks by requests and copies in a tier; the tree holds them while the count is above 0."""

    def __init__(self, tree: KnowledgeTree, tier: Tier) -> None:
        self._tree = tree
        self._tier = tier
        self._counts: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._counts

    def acquire(self, key: Hashable) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        at = _located(self._tree, key)
        self._tree.acquire_units(at.node, 1 << at.unit, self._tier)

    def release(self, key: Hashable) -> None:
        if (num_remaining := self._counts[key] - 1) > 0:
            self._counts[key] = num_remaining
            return
        del self._counts[key]
        at = _located(self._tree, key)
        self._tree.release_units(at.node, 1 << at.unit, self._tier)


@dataclass(slots=True, eq=False)
class HeldBlocks:
    """The blocks of a running request: with shareable content, without content, and copies."""

    keys: list[Hashable] = field(default_factory=list)
    num_unnamed: int = 0
    copies: list[Hashable] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Number of all blocks of the request."""
        return len(self.keys) + self.num_unnamed


class GPUBlocks:
    """vLLM's pool of ``num_blocks`` including its null block, and the blocks of running requests.

    A block is in use by requests, free and cached, or spare: free and without content, or with a copy of what
    another block holds. Spare ones are handed out first, copies as the last of them.
    """

    def __init__(self, tree: KnowledgeTree, num_blocks: int, block_size: int) -> None:
        self._tree = tree
        self._tier = tree.tiers[Tier.GPU]
        self._block_size = block_size
        self.num_usable = num_blocks - 1
        self._uses = _RefCounts(tree, Tier.GPU)
        self._held: list[HeldBlocks] = []
        self._copies: list[Hashable] = []

    @property
    def num_spare(self) -> int:
        """Number of free blocks that are not in the tree."""
        num_others = sum(held.num_unnamed + len(held.copies) for held in self._held)
        return self.num_usable - self._tier.num_units - num_others

    @property
    def num_free(self) -> int:
        """Number of blocks that no request uses."""
        num_others = sum(held.num_unnamed + len(held.copies) for held in self._held)
        return self.num_usable - len(self._uses) - num_others

    def num_leading(self, keys: Sequence[Hashable]) -> int:
        """Return the number of leading ``keys`` in the tier."""
        for i, key in enumerate(keys):
            if not self._tree.is_resident(key, Tier.GPU):
                return i
        return len(keys)

    def num_in_use(self, keys: Sequence[Hashable]) -> int:
        """Return the number of ``keys`` in use by requests."""
        return sum(key in self._uses for key in keys)

    def use(self, keys: Sequence[Hashable]) -> HeldBlocks:
        """Return the blocks of a request that uses the cached ``keys``; :meth:`free` undoes it."""
        held = HeldBlocks()
        self._held.append(held)
        for key in keys:
            self._hold(held, key)
            if key in self._copies:  # vLLM finds the older block first
                self._copies.remove(key)
                held.copies.append(key)
        return held

    def take(self, held: HeldBlocks, num_blocks: int) -> None:
        """Give a request free blocks without content: spare ones, then evicted ones."""
        num_missing = num_blocks - self.num_spare
        if num_missing > 0:
            num_missing -= total_size(self._tree.evict_up_to(Tier.GPU, num_missing))
            for _ in range(num_missing):  # others depend on what is left: an allocation that fits must succeed
                if self._tree.evict_anything(Tier.GPU) is None:  # of what requests use, the other copy
                    next(other for other in (held, *self._held) if other.copies).copies.pop()
        held.num_unnamed += num_blocks
        del self._copies[: max(len(self._copies) - self.num_spare, 0)]

    def name(self, held: HeldBlocks, keys: Sequence[Hashable], first: int, last: int) -> None:
        """Record that a request's blocks ``[first, last)`` are full, so that others can hit them."""
        for i in range(first, last):
            at = self._place(keys, i)
            is_used = keys[i] in self._uses
            self._hold(held, keys[i])
            if self._tier.resident[at.node.id] >> at.unit & 1:  # the block that held it before, which others may use
                (held.copies if is_used else self._copies).append(keys[i])
            self._tree.add(at.node, 1 << at.unit, Tier.GPU)
            held.num_unnamed -= 1

    def free(self, held: HeldBlocks) -> None:
        """Free a request's blocks, the last ones first."""
        for key in reversed(held.keys):
            self._uses.release(key)
        self._held.remove(held)
        self._copies += reversed(held.copies)

    def _hold(self, held: HeldBlocks, key: Hashable) -> None:
        self._uses.acquire(key)
        held.keys.append(key)

    def _place(self, keys: Sequence[Hashable], index: int) -> Location:
        """Return the location of block ``index``; an answer's block is added to the tree."""
        if (location := self._tree.locate(keys[index])) is None:
            first = index
            while first > 0 and self._tree.locate(keys[first - 1]) is None:
                first -= 1
            after = keys[first - 1] if first else None
            self._tree.extend(after, keys[first : index + 1], (index + 1 - first) * self._block_size)
            location = self._tree.locate(keys[index])
            assert location is not None
        return location


class DiskBlocks:
    """The disk tier: blocks that enter the host are also written here, if their prefix is."""

    def __init__(self, tree: KnowledgeTree, num_blocks: int) -> None:
        self._tree = tree
        self._num_blocks = num_blocks

    def has(self, key: Hashable) -> bool:
        """Return whether ``key`` is stored."""
        return self._tree.is_resident(key, Tier.DISK)

    def store(self, keys: Sequence[Hashable]) -> None:
        """Write blocks that are not stored; drop those that do not fit, the last first."""
        new: dict[Hashable, Location] = {}
        for key in keys:
            location = self._tree.locate(key)
            if location is None or self.has(key):
                continue
            before = self._tree.key_before(location)
            if before is None or before in new or self.has(before):
                new[key] = location
        num_missing = len(new) - (self._num_blocks - self._tree.tiers[Tier.DISK].num_units)
        if num_missing > 0:
            num_missing -= total_size(self._tree.evict_up_to(Tier.DISK, num_missing, self._tree.shielded(new)))
            for _ in range(num_missing):
                new.popitem()
        for at in new.values():
            self._tree.acquire_units(at.node, 1 << at.unit, Tier.DISK)
            self._tree.add(at.node, 1 << at.unit, Tier.DISK)
        for at in new.values():
            self._tree.release_units(at.node, 1 << at.unit, Tier.DISK)


class HostBlocks:
    """The host tier: write-through offload of the blocks that a request computes.

    Blocks that are being written stay until :meth:`settle`. Hits on the disk are promoted to the host.
    """

    def __init__(self, tree: KnowledgeTree, num_blocks: int, disk: DiskBlocks | None) -> None:
        self._tree = tree
        self._tier = tree.tiers[Tier.HOST]
        self._uses = _RefCounts(tree, Tier.HOST)
        self._disk = disk
        self.num_blocks = num_blocks
        self._writing: list[Hashable] = []

    def look_up(self, keys: Sequence[Hashable]) -> list[Tier]:
        """Return the tiers of the leading ``keys``, up to the first miss.

        They are held here until they are given to :meth:`release`.
        """
        sources: dict[Hashable, Tier] = {}
        promised: list[Hashable] = []
        num_promoted = -1
        while len(sources) != num_promoted:  # vLLM looks up again after all loads have ended
            num_promoted = len(sources)
            self.release(promised)
            promised = []
            for key in keys:
                if self._tree.is_resident(key, Tier.HOST):
                    self._uses.acquire(key)
                elif self._disk is not None and self._disk.has(key) and self._make_room(1, [key]):
                    self._insert(key)
                    sources[key] = Tier.DISK
                else:
                    break
                promised.append(key)
        return [sources.get(key, Tier.HOST) for key in promised]

    def release(self, keys: Sequence[Hashable]) -> None:
        """Record that looked-up blocks are on the GPU, or not needed."""
        for key in keys:
            self._uses.release(key)

    def store(self, keys: Sequence[Hashable]) -> list[Hashable]:
        """Copy new blocks, and return them; none if not all fit.

        A selective policy admits only blocks of higher priority than those that would be evicted. With a disk below it
        admits all, since blocks reach the disk through the host.
        """
        new = [key for key in keys if not self._tree.is_resident(key, Tier.HOST)]
        if self._tree.policy.is_selective and self._disk is None:
            num_free = self.num_blocks - self._tier.num_units
            new = new[: admit(self._tree, Tier.HOST, new, num_free, self._tree.shielded(keys)).num_admitted]
        if not self._make_room(len(new), keys):
            return []
        for key in new:
            self._insert(key)
        self._writing += new
        return new

    def settle(self) -> None:
        """Record that the written blocks are stored, also on the disk."""
        if self._disk is not None:
            self._disk.store(self._writing)
        self.release(self._writing)
        self._writing.clear()

    def _make_room(self, num_blocks: int, keys: Sequence[Hashable]) -> bool:
        num_missing = num_blocks - (self.num_blocks - self._tier.num_units)
        if num_missing <= 0:
            return True
        return self._tree.evict(Tier.HOST, num_missing, self._tree.shielded(keys)) is not None

    def _insert(self, key: Hashable) -> None:
        self._uses.acquire(key)
        at = _located(self._tree, key)
        self._tree.add(at.node, 1 << at.unit, Tier.HOST)


def _located(tree: KnowledgeTree, key: Hashable) -> Location:
    location = tree.locate(key)
    assert location is not None, key
    return location
