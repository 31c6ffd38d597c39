"""Blocks of KV in their tiers, as vLLM's pool, its offloading and RAGCache's plugin move them.

The tree knows what lies where and chooses what is evicted. What is here is the rest: which blocks are free and without
content, what requests hold, and in which order everything is asked of the tree, because the order decides ties.
Writes take no time, and how long a transfer takes is another's matter.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ragcache_core.tree import KnowledgeTree, Location, admit
from ragcache_core.types import Tier


class _Holds:
    """What requests and copies use in a tier: held in the tree from the first to the last of them."""

    def __init__(self, tree: KnowledgeTree, tier: Tier) -> None:
        self._tree = tree
        self._tier = tier
        self._counts: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._counts

    def hold(self, key: Hashable) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        at = _located(self._tree, key)
        self._tree.hold(at.node, 1 << at.unit, self._tier)

    def let_go(self, key: Hashable) -> None:
        if (num_left := self._counts[key] - 1) > 0:
            self._counts[key] = num_left
            return
        del self._counts[key]
        at = _located(self._tree, key)
        self._tree.let_go(at.node, 1 << at.unit, self._tier)


@dataclass(slots=True, eq=False)
class HeldBlocks:
    """The blocks of a request that runs: those with a content that others can find, those without, and copies."""

    keys: list[Hashable] = field(default_factory=list)
    num_unnamed: int = 0
    copies: list[Hashable] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """All that the request has."""
        return len(self.keys) + self.num_unnamed


class GPUBlocks:
    """vLLM's pool of ``num_blocks``, one of which is its null block, and the blocks of the requests that run.

    A block is in use by requests, free and cached, or spare: free and without content, or with a copy of what
    another block holds. Spare ones are handed out first, copies as the last of them.
    """

    def __init__(self, tree: KnowledgeTree, num_blocks: int, block_size: int) -> None:
        self._tree = tree
        self._tier = tree.tiers[Tier.GPU]
        self._block_size = block_size
        self.num_usable = num_blocks - 1
        self._holds = _Holds(tree, Tier.GPU)
        self._held: list[HeldBlocks] = []
        self._copies: list[Hashable] = []

    @property
    def num_spare(self) -> int:
        """Blocks that are free and that the tree does not count."""
        num_others = sum(held.num_unnamed + len(held.copies) for held in self._held)
        return self.num_usable - self._tier.num_units - num_others

    @property
    def num_free(self) -> int:
        """Blocks that no request uses."""
        num_others = sum(held.num_unnamed + len(held.copies) for held in self._held)
        return self.num_usable - len(self._holds) - num_others

    def num_leading(self, keys: Sequence[Hashable]) -> int:
        """Return how many of ``keys`` are here, up to the first that is not."""
        for i, key in enumerate(keys):
            if not _is_in(self._tree, key, Tier.GPU):
                return i
        return len(keys)

    def num_in_use(self, keys: Sequence[Hashable]) -> int:
        """Return how many of ``keys`` some request uses."""
        return sum(key in self._holds for key in keys)

    def use(self, keys: Sequence[Hashable]) -> HeldBlocks:
        """Let a request use what is here; it gives back what is returned with :meth:`free`."""
        held = HeldBlocks()
        self._held.append(held)
        for key in keys:
            self._hold(held, key)
            if key in self._copies:  # vLLM finds the older block first
                self._copies.remove(key)
                held.copies.append(key)
        return held

    def take(self, held: HeldBlocks, num_blocks: int) -> None:
        """Give a request blocks without content, of the free ones: spare ones, then those that the tree gives up."""
        num_missing = num_blocks - self.num_spare
        if num_missing > 0:
            num_missing -= len(self._tree.evict_up_to(Tier.GPU, num_missing))
            for _ in range(num_missing):  # others depend on what is left: an allocation that fits must succeed
                if self._tree.evict_anything(Tier.GPU) is None:  # of what requests use, the other copy
                    next(other for other in (held, *self._held) if other.copies).copies.pop()
        held.num_unnamed += num_blocks
        del self._copies[: max(len(self._copies) - self.num_spare, 0)]

    def name(self, held: HeldBlocks, keys: Sequence[Hashable], first: int, last: int) -> None:
        """Note that a request's blocks ``[first, last)`` are full: they have a content that others can find."""
        for i in range(first, last):
            at = self._place(keys, i)
            is_used = keys[i] in self._holds
            self._hold(held, keys[i])
            if self._tier.resident[at.node.id] >> at.unit & 1:  # the block that held it before, which others may use
                (held.copies if is_used else self._copies).append(keys[i])
            self._tree.add(at.node, 1 << at.unit, Tier.GPU)
            held.num_unnamed -= 1

    def free(self, held: HeldBlocks) -> None:
        """Take a request's blocks back, the last ones first."""
        for key in reversed(held.keys):
            self._holds.let_go(key)
        self._held.remove(held)
        self._copies += reversed(held.copies)

    def _hold(self, held: HeldBlocks, key: Hashable) -> None:
        self._holds.hold(key)
        held.keys.append(key)

    def _place(self, keys: Sequence[Hashable], index: int) -> Location:
        """Return where block ``index`` stands; an answer's, which the tree does not know, is added to it."""
        if (location := self._tree.locate(keys[index])) is None:
            first = index
            while first > 0 and self._tree.locate(keys[first - 1]) is None:
                first -= 1
            after = keys[first - 1] if first else None
            self._tree.extend(after, keys[first : index + 1], (index + 1 - first) * self._block_size)
            location = self._tree.locate(keys[index])
            assert location is not None
        return location


class DiskChunks:
    """The disk tier: what arrives on the host is written here as well, where all before it is."""

    def __init__(self, tree: KnowledgeTree, num_chunks: int) -> None:
        self._tree = tree
        self._num_chunks = num_chunks

    def has(self, key: Hashable) -> bool:
        """Return whether ``key`` is here."""
        return _is_in(self._tree, key, Tier.DISK)

    def store(self, keys: Sequence[Hashable]) -> None:
        """Write what is not here yet; what does not fit is dropped, the last of it first."""
        new: dict[Hashable, Location] = {}
        for key in keys:
            location = self._tree.locate(key)
            if location is None or self.has(key):
                continue
            before = self._tree.key_before(location)
            if before is None or before in new or self.has(before):
                new[key] = location
        num_missing = len(new) - (self._num_chunks - self._tree.tiers[Tier.DISK].num_units)
        if num_missing > 0:
            num_missing -= len(self._tree.evict_up_to(Tier.DISK, num_missing, self._tree.shielded(new)))
            for _ in range(num_missing):
                new.popitem()
        for at in new.values():
            self._tree.hold(at.node, 1 << at.unit, Tier.DISK)
            self._tree.add(at.node, 1 << at.unit, Tier.DISK)
        for at in new.values():
            self._tree.let_go(at.node, 1 << at.unit, Tier.DISK)


class HostChunks:
    """The host tier, written through: what a request computes and is worth it is copied here at once.

    What is being written is held until :meth:`settle`. With a disk below, what is looked up there is brought here.
    """

    def __init__(self, tree: KnowledgeTree, num_chunks: int, disk: DiskChunks | None) -> None:
        self._tree = tree
        self._tier = tree.tiers[Tier.HOST]
        self._holds = _Holds(tree, Tier.HOST)
        self._disk = disk
        self.num_chunks = num_chunks
        self._writing: list[Hashable] = []

    def look_up(self, keys: Sequence[Hashable]) -> list[Tier]:
        """Return where the first of ``keys`` come from, up to the first that is nowhere.

        They are held here until they are given to :meth:`let_go`.
        """
        sources: dict[Hashable, Tier] = {}
        promised: list[Hashable] = []
        num_promoted = -1
        while len(sources) != num_promoted:  # vLLM asks again once all that it had brought is there
            num_promoted = len(sources)
            self.let_go(promised)
            promised = []
            for key in keys:
                if _is_in(self._tree, key, Tier.HOST):
                    self._holds.hold(key)
                elif self._disk is not None and self._disk.has(key) and self._make_room(1, [key]):
                    self._insert(key)
                    sources[key] = Tier.DISK
                else:
                    break
                promised.append(key)
        return [sources.get(key, Tier.HOST) for key in promised]

    def let_go(self, keys: Sequence[Hashable]) -> None:
        """Note that what was looked up lies on the GPU now, or is not wanted."""
        for key in keys:
            self._holds.let_go(key)

    def store(self, keys: Sequence[Hashable]) -> list[Hashable]:
        """Copy what is not here yet, and return it; nothing where not all of it fits.

        A selective policy keeps out what is not worth its space, and with a disk below nothing: what does not come here
        does not get there.
        """
        new = [key for key in keys if not _is_in(self._tree, key, Tier.HOST)]
        if self._tree.policy.is_selective and self._disk is None:
            num_free = self.num_chunks - self._tier.num_units
            new = new[: admit(self._tree, Tier.HOST, new, num_free, self._tree.shielded(keys)).num_admitted]
        if not self._make_room(len(new), keys):
            return []
        for key in new:
            self._insert(key)
        self._writing += new
        return new

    def settle(self) -> None:
        """Note that what was being written is here."""
        self.let_go(self._writing)
        if self._disk is not None:
            self._disk.store(self._writing)
        self._writing.clear()

    def _make_room(self, num_chunks: int, keys: Sequence[Hashable]) -> bool:
        num_missing = num_chunks - (self.num_chunks - self._tier.num_units)
        if num_missing <= 0:
            return True
        return self._tree.evict(Tier.HOST, num_missing, self._tree.shielded(keys)) is not None

    def _insert(self, key: Hashable) -> None:
        self._holds.hold(key)
        at = _located(self._tree, key)
        self._tree.add(at.node, 1 << at.unit, Tier.HOST)


def _located(tree: KnowledgeTree, key: Hashable) -> Location:
    location = tree.locate(key)
    assert location is not None, key
    return location


def _is_in(tree: KnowledgeTree, key: Hashable, tier: Tier) -> bool:
    location = tree.locate(key)
    return location is not None and bool(tree.resident_mask(location.node, tier) >> location.unit & 1)
