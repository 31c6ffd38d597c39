"""The GPU tier: vLLM's blocks of KV, evicted in the order of the knowledge tree.

vLLM keeps KV in free blocks until it allocates them again, the least recently used first. Here the tree chooses
instead. A block is in one of three states::

    in use            by requests; its unit of the tree is held
    free and cached   the tree may evict it
    free and spare    without content, or a copy of another block's: allocated first

Where a model has several groups of KV caches, units are the blocks of full attention. A free block of another group is
evicted with its unit; before all others, if no hit will need it; and after all others, while its unit is in use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, islice
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from ragcache_core.tree import Location, length_of_run
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.forgetting import Forgotten, Freed
from ragcache_core.vllm_plugin.cache.kv_groups import OtherBlocks
from ragcache_core.vllm_plugin.compat import (
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    cached_copies,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ragcache_core.tree import EvictedRun, TreeNode
    from ragcache_core.vllm_plugin.cache.controller import CacheController
    from ragcache_core.vllm_plugin.cache.request_state import Key, RequestState
    from ragcache_core.vllm_plugin.compat import BlockHashWithGroupId


_EVICTED_AHEAD = 32
"""Maximum number of blocks that are evicted before they are needed."""
_CACHED_PER_AHEAD = 128
"""Cached blocks per block that is evicted ahead."""
_IS_NULL = attrgetter("is_null")


class TreeFreeBlockQueue(FreeKVCacheBlockQueue):
    """vLLM's queue of free blocks, with the tree's order of eviction.

    Each unit of the tree that lies on the GPU has one block, its slot in the tree. A block's hash leads to its unit;
    requests use blocks in the order of their path, so one hash leads to all blocks of a node. Another block with the
    same content is a copy: it becomes spare when it is free. ``num_free_blocks`` can be allocated: vLLM reads it for
    each request of each step, so it is counted, not computed. Returned blocks are placed while the model computes a
    step (:meth:`place_returned`), or before any other call.
    """

    def __init__(self, blocks: list[KVCacheBlock], pool: TreeBlockPool, controller: CacheController) -> None:
        self._spare: OrderedDict[int, KVCacheBlock] = OrderedDict()
        self._returned: list[KVCacheBlock] = []
        super().__init__([])
        self._spare.update((block.block_id, block) for block in blocks)
        self.num_free_blocks = len(blocks)
        self._pool = pool
        self._tree = controller.tree
        self._tier = controller.tree.tiers[Tier.GPU]
        self._main = controller.groups.main
        self._copies: set[int] = set()
        self._others: OtherBlocks[int] = OtherBlocks(controller.groups, controller.tree, Tier.GPU)
        self._other_cached: dict[int, KVCacheBlock] = {}
        self._other_ids: dict[BlockHashWithGroupId, int] = {}
        """Free blocks of other groups, and their numbers by content."""

    # As vLLM calls it

    def popleft(self) -> KVCacheBlock:
        """Allocate a block.

        Raises:
            ValueError: none is free.
        """
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Allocate ``n`` blocks: spare ones, then blocks evicted by the tree."""
        assert self.num_free_blocks >= n
        self.place_returned()
        blocks = [self._spare.popitem(last=False)[1] for _ in range(min(n, len(self._spare)))]
        self.num_free_blocks -= n
        if len(blocks) < n:
            blocks += self._evict(n - len(blocks))
            if n < _EVICTED_AHEAD:
                self._evict_ahead()
        return blocks

    def append(self, block: KVCacheBlock) -> None:
        """Free a block that no request uses."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks that no request uses."""
        self.num_free_blocks += len(blocks)
        self._returned += blocks

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks without content, which are allocated next."""
        self.num_free_blocks += len(blocks)
        for block in reversed(blocks):
            self._spare[block.block_id] = block
            self._spare.move_to_end(block.block_id, last=False)

    def remove(self, block: KVCacheBlock) -> None:
        """Take a free block whose KV a request uses."""
        self.take_hits([block])

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return the free blocks; the order of cached ones has no meaning."""
        self.place_returned()
        return [*self._spare.values(), *self._other_cached.values(), *self._cached()]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Yield the free blocks after ``cursor`` in the order of :meth:`get_all_free_blocks`."""
        blocks = self.get_all_free_blocks()
        yield from blocks if cursor is None else blocks[blocks.index(cursor) + 1 :]

    # As the pool calls it

    def place_returned(self) -> None:
        """Sort freed blocks into cached and spare ones; the tree orders the cached ones."""
        if self._returned:
            returned, self._returned = self._returned, []
            resident = self._tier.resident
            masks, others = ({}, returned) if self._copies else self._masks_of(returned)
            for block in others:
                if (place := self._take_back(block)) is not None:
                    masks[place.node] = masks.get(place.node, 0) | 1 << place.unit
            for node, units in masks.items():
                if missing := units & ~resident[node.id]:
                    self._tree.add(node, missing, Tier.GPU)
                self._tree.release_units(node, units, Tier.GPU)
            self._keep_quotas()

    def take_hits(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take several free blocks whose KV a request uses."""
        self.place_returned()
        masks, others = self._masks_of(blocks)
        for block in others:
            if block.block_id in self._other_cached:
                self._take_other(block.block_id)
            elif self._spare.pop(block.block_id, None) is None:
                raise RuntimeError(f"a block that is not free was taken for a hit: {block}")
            elif (block_hash := block.block_hash) is not None and self._is_main(block_hash):  # a copy
                self.cache([block], [get_block_hash(block_hash)])
        for node, mask in masks.items():
            self._tree.acquire_units(node, mask, Tier.GPU)
        self.num_free_blocks -= len(blocks)

    def cache(self, blocks: Sequence[KVCacheBlock], keys: Sequence[Key]) -> None:
        """Hold the units ``keys`` of the tree, whose content is in ``blocks``, one each, which a request uses."""
        self.place_returned()
        for at, (node, first), length in self._tree.runs(keys):
            slots, end = self._tier.slots_of(node), first + length
            if slots[first:end].count(None) == length:
                slots[first:end] = blocks[at : at + length]
            else:
                for unit, block in enumerate(blocks[at : at + length], first):
                    self._add_to_unit(block, slots, unit)
            mask = (1 << end) - (1 << first)
            self._tree.acquire_units(node, mask, Tier.GPU)
            self._tree.add(node, mask, Tier.GPU)

    def spare_others(self, block_hashes: Iterable[BlockHashWithGroupId]) -> None:
        """Drop the content of free blocks of other groups that a request computed again in its own blocks."""
        self.place_returned()
        for block_hash in block_hashes:
            if (block_id := self._other_ids.pop(block_hash, None)) is not None:
                self._others.discard(block_id)
                self._spare[block_id] = self._other_cached.pop(block_id)

    def on_content_lost(self, block: KVCacheBlock, block_hash: BlockHashWithGroupId) -> None:
        """Handle vLLM's removal of ``block_hash`` from a block; a copy replaces it, if there is one."""
        block_id = block.block_id
        self._copies.discard(block_id)
        place = self._unit_of(block, block_hash)
        if place is None:  # the tree evicted it, or knows another block of this unit
            if self._other_cached and self._other_cached.pop(block_id, None) is not None:
                del self._other_ids[block_hash]
                self._others.discard(block_id)
                self._spare[block_id] = block
            return
        if not block.ref_cnt:
            self._spare[block_id] = block
        if not self._copies or not self._replace(place, block_hash):
            if self._others:
                self._others.lose_unit(get_block_hash(block_hash))
            self._tree.release_units(place.node, 1 << place.unit, Tier.GPU)
            self._tree.remove(place.node, 1 << place.unit, Tier.GPU)

    def forget_contents(self) -> None:
        """Make all cached blocks spare: the prefix cache was reset."""
        self._spare.update((block.block_id, block) for block in self._cached())
        self._spare.update(self._other_cached)
        self._other_cached.clear()
        self._other_ids.clear()
        self._others.clear()
        self._copies.clear()

    # Inside

    def _cached(self) -> Iterator[KVCacheBlock]:
        """Yield the free full-attention blocks with cached content."""
        blocks = chain.from_iterable(filter(None, self._tier.slots))
        return (block for block in blocks if block is not None and not block.ref_cnt)

    def _evict_ahead(self) -> None:
        """Make some blocks spare in advance, as decoding requests need them one by one and a batch is cheaper."""
        num_cached = self.num_free_blocks - len(self._spare)
        num_blocks = 0 if self._others.has_groups else min(_EVICTED_AHEAD, num_cached // _CACHED_PER_AHEAD)
        if num_blocks:
            self._make_spare(self._tree.evict_up_to(Tier.GPU, num_blocks))

    def _keep_quotas(self) -> None:
        """Make blocks above their tenants' quotas spare."""
        shares = self._tier.shares
        for owner in shares.quotas:
            if num_units := shares.num_over_quota(owner):
                self._make_spare(self._tree.evict_from_owner(Tier.GPU, owner, num_units))

    def _make_spare(self, evicted: Sequence[EvictedRun]) -> None:
        """Make blocks of evicted tree blocks spare, and clear free copies of them."""
        for unit in _keys_of(evicted) if self._others else ():
            self._others.lose_unit(unit)
        blocks = [*_slots_of(evicted)]
        self._spare.update((block.block_id, block) for block in blocks)
        for block in blocks if self._copies else ():
            copies = cached_copies(self._pool, block.block_hash)
            self._pool.evict_blocks({copy.block_id for copy in copies if copy is not block and not copy.ref_cnt})
        self._pool.drop_contents(blocks)

    def _masks_of(self, blocks: Sequence[KVCacheBlock]) -> tuple[dict[TreeNode, int], list[KVCacheBlock]]:
        """Return the units of blocks, by node, and the blocks that are no unit's.

        O(nodes) and a comparison of lists where blocks are in the order of their path, or against it.
        """
        masks: dict[TreeNode, int] = {}
        others: list[KVCacheBlock] = []
        at = 0
        while at < len(blocks):
            if (place := self._unit_of(blocks[at], blocks[at].block_hash)) is None:
                others.append(blocks[at])
                at += 1
                continue
            node, first = place
            slots, num_left = self._tier.slots_of(node), len(blocks) - at
            if num_left > 1 and first + 1 < len(slots) and slots[first + 1] is blocks[at + 1]:
                length = length_of_run(slots, first, blocks, at)
            else:
                length = length_of_run(slots[first::-1], 0, blocks, at)
                first -= length - 1
            masks[node] = masks.get(node, 0) | (1 << first + length) - (1 << first)
            at += length
        return masks, others

    def _add_to_unit(self, block: KVCacheBlock, slots: list[KVCacheBlock | None], unit: int) -> None:
        """Take in a block in use; where another block has its content, the unit's is one in use."""
        own = slots[unit]
        if own is not None and own is not block:
            if own.ref_cnt:
                self._copies.add(block.block_id)
                return
            self._copies.add(own.block_id)
            self._spare[own.block_id] = own
            self._copies.discard(block.block_id)
        slots[unit] = block

    def _replace(self, place: Location, block_hash: BlockHashWithGroupId) -> bool:
        """Give a tree block without a block one of its copies, preferably one in use; return whether there is one."""
        copies = sorted(cached_copies(self._pool, block_hash), key=lambda copy: not copy.ref_cnt)
        if not copies:
            return False
        (copy, *_) = copies
        self._copies.discard(copy.block_id)
        self._tier.slots_of(place.node)[place.unit] = copy
        if not copy.ref_cnt:
            del self._spare[copy.block_id]
            self._tree.release_units(place.node, 1 << place.unit, Tier.GPU)
        return True

    def _take_back(self, block: KVCacheBlock) -> Location | None:
        """Put a block among the free ones; return its unit where no request uses that any more."""
        if (place := self._unit_of(block, block.block_hash)) is None:
            return self._take_back_unknown(block)
        return None if self._is_used_elsewhere(block, place) else place

    def _take_back_unknown(self, block: KVCacheBlock) -> Location | None:
        """Free a block without a tree block; return its tree block if it gets one."""
        block_hash, block_id = block.block_hash, block.block_id
        place = None if block_hash is None else self._tree.locate(get_block_hash(block_hash))
        if block_hash is None or place is None:
            self._spare[block_id] = block
            self._pool.evict_blocks({block_id})  # else a look-up could hit what the tree cannot delete
            return None
        if not self._is_main(block_hash):
            self._take_back_other(block, block_hash)
            return None
        slots = self._tier.slots_of(place.node)
        is_copy = slots[place.unit] is not None
        if is_copy or any(copy.ref_cnt for copy in cached_copies(self._pool, block_hash)):
            self._copies.add(block_id)
            self._spare[block_id] = block
            return None
        self._copies.discard(block_id)
        slots[place.unit] = block
        return place

    def _is_used_elsewhere(self, block: KVCacheBlock, place: Location) -> bool:
        """Return whether a request uses a copy of a free block, which then represents the tree block."""
        for copy in cached_copies(self._pool, block.block_hash):
            if copy.ref_cnt:
                self._tier.slots_of(place.node)[place.unit] = copy
                self._copies.discard(copy.block_id)
                self._copies.add(block.block_id)
                self._spare[block.block_id] = block
                return True
        return False

    def _take_back_other(self, block: KVCacheBlock, block_hash: BlockHashWithGroupId) -> None:
        """Free a block of another group; a copy of a cached one is spare."""
        copies = [copy for copy in cached_copies(self._pool, block_hash) if copy is not block]
        if any(copy.ref_cnt > 0 or copy.block_id in self._other_cached for copy in copies):
            self._spare[block.block_id] = block
            return
        self._other_cached[block.block_id] = block
        self._other_ids[block_hash] = block.block_id
        group = get_group_id(block_hash)

        def is_here(key: Key) -> bool:
            return bool(cached_copies(self._pool, make_block_hash_with_group_id(key, group)))

        self._others.add(block.block_id, group, get_block_hash(block_hash), is_here)

    def _unit_of(self, block: KVCacheBlock, block_hash: BlockHashWithGroupId | None) -> Location | None:
        """Return the unit whose block this is, by its hash; None where it is no unit's."""
        place = None if block_hash is None else self._tree.locate(get_block_hash(block_hash))
        if place is None or (slots := self._tier.slots[place.node.id]) is None:
            return None
        return place if place.unit < len(slots) and slots[place.unit] is block else None

    def _is_main(self, block_hash: BlockHashWithGroupId) -> bool:
        """Return whether content is that of full attention, which is a unit's."""
        return not self._others.has_groups or get_group_id(block_hash) == self._main

    def _take_other(self, block_id: int) -> KVCacheBlock:
        """Take a free block of another group."""
        block = self._other_cached.pop(block_id)
        assert block.block_hash is not None
        self._other_ids.pop(block.block_hash, None)
        self._others.discard(block_id)
        return block

    def _evict(self, n: int) -> list[KVCacheBlock]:
        """Take ``n`` cached blocks: those without use for hits, then those that the tree evicts, then any."""
        blocks = [self._take_other(block_id) for block_id in list(islice(self._others.useless(), n))]
        if len(blocks) < n:
            size_of = self._others.size_of if self._others else None
            evicted = self._tree.evict_up_to(Tier.GPU, n - len(blocks), size_of=size_of)
            self._pool.drop_contents(_slots_of(evicted))
            blocks += _slots_of(evicted)
            for unit in _keys_of(evicted) if size_of is not None else ():
                for block_id in self._others.of_unit(unit):
                    block = self._take_other(block_id)
                    if len(blocks) < n:
                        blocks.append(block)
                    else:
                        self._spare[block_id] = block
        while len(blocks) < n:
            blocks.append(self._pop_anything())
        return blocks

    def _pop_anything(self) -> KVCacheBlock:
        """Evict a cached block although others depend on it, as an allocation that fits must succeed."""
        if self._others:
            return self._take_other(next(iter(self._others)))
        if (evicted := self._tree.evict_anything(Tier.GPU)) is not None:
            return next(_slots_of([evicted]))
        block = next(self._cached())
        place = self._unit_of(block, block.block_hash)
        assert place is not None
        self._tree.release_units(place.node, 1 << place.unit, Tier.GPU)
        self._tree.remove(place.node, 1 << place.unit, Tier.GPU)
        return block


def _slots_of(evicted: Iterable[EvictedRun]) -> Iterator[KVCacheBlock]:
    """Return the blocks of units that the tree has evicted, which are no unit's any more."""
    return chain.from_iterable(run.slots for run in evicted)


def _keys_of(evicted: Iterable[EvictedRun]) -> Iterator[Key]:
    """Return the keys of units that the tree has evicted."""
    return cast("Iterator[Key]", chain.from_iterable(run.keys for run in evicted))


class TreeBlockPool(BlockPool):
    """vLLM's block pool with the tree's order of eviction, after :meth:`follow`, before any request."""

    controller: CacheController
    free_block_queue: TreeFreeBlockQueue
    enable_kv_cache_events: bool

    def follow(self, controller: CacheController) -> TreeFreeBlockQueue:
        """Let the controller's tree order the free blocks; return their queue."""
        self.controller = controller
        self.free_block_queue = TreeFreeBlockQueue(self.free_block_queue.get_all_free_blocks(), self, controller)
        controller.forgetting.add_holder(self)
        if controller.groups.others:
            controller.tiers[Tier.GPU].num_other_blocks = self.num_other_blocks
        return self.free_block_queue

    def num_other_blocks(self) -> int:
        """Return the number of cached blocks of sliding windows and states."""
        return len(self.cached_block_hash_to_block) - self.controller.tree.tiers[Tier.GPU].num_units

    def emit_cached_block_events(
        self, request: Request, num_cached_blocks: int, block_size: int, kv_cache_group_id: int
    ) -> None:
        state = self.controller.state_of(request.request_id)
        if state is not None and (first_private := state.first_private) is not None:
            num_exact = first_private * self.controller.tokens_per_block // block_size
            num_cached_blocks = min(num_cached_blocks, num_exact)  # approximate blocks have no events
        super().emit_cached_block_events(request, num_cached_blocks, block_size, kv_cache_group_id)

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        state = self.controller.state_of(request.request_id)
        num_exact = num_full_blocks
        if state is not None and (first_private := state.first_private) is not None:
            # Answers after chunk reuse, or deleted blocks, are hidden from look-ups, so they have no content.
            size = self.controller.tokens_per_block
            num_findable = max(first_private, len(state.apart)) * size // block_size
            num_full_blocks = min(num_full_blocks, max(num_findable, num_cached_blocks))
            num_exact = min(num_full_blocks, max(first_private * size // block_size, num_cached_blocks))
        mask = None if block_mask is None else block_mask[: num_exact - num_cached_blocks]
        super().cache_full_blocks(request, blocks, num_cached_blocks, num_exact, block_size, kv_cache_group_id, mask)
        if num_exact < num_full_blocks:  # approximate blocks have no events
            are_events_enabled, self.enable_kv_cache_events = self.enable_kv_cache_events, False
            if block_mask is not None:
                mask = block_mask[num_exact - num_cached_blocks : num_full_blocks - num_cached_blocks]
            super().cache_full_blocks(request, blocks, num_exact, num_full_blocks, block_size, kv_cache_group_id, mask)
            self.enable_kv_cache_events = are_events_enabled
        if kv_cache_group_id != self.controller.groups.main:
            new = blocks[num_cached_blocks:num_full_blocks]
            self.free_block_queue.spare_others(block.block_hash for block in new if block.block_hash is not None)
        elif num_cached_blocks < num_full_blocks:
            has_all = block_mask is None and not any(map(_IS_NULL, blocks[num_cached_blocks:num_full_blocks]))
            self._hold_units(request, state, blocks, num_cached_blocks, num_full_blocks, has_all=has_all)

    def _hold_units(
        self,
        request: Request,
        state: RequestState | None,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        *,
        has_all: bool,
    ) -> None:
        """Hold full-attention blocks that vLLM has just cached, and add new ones to the tree."""
        tree, hashes, first = self.controller.tree, request.block_hashes, num_cached_blocks
        if state is not None and self.controller.defers_answer(state, num_cached_blocks):
            if tree.locate(hashes[num_cached_blocks]) is None:
                state.num_answer_end_blocks = num_full_blocks
                return
            # The tree has this from another request, and would evict it.
            if state.num_answer_end_blocks:
                self.controller.insert_answer(request.request_id)
                first = state.num_prompt_tokens // self.controller.tokens_per_block
                has_all = False  # they may have lost it since
        self.controller.locate_block(hashes, num_full_blocks - 1, request.request_id)
        new, keys = blocks[first:num_full_blocks], hashes[first:num_full_blocks]
        if not has_all:  # vLLM has cached nothing for some
            is_real = [block.block_hash is not None for block in new]
            new, keys = list(compress(new, is_real)), list(compress(keys, is_real))
        self.free_block_queue.cache(new, keys)

    # A holder of what may be forgotten

    def forget(self, forgotten: Forgotten) -> Freed:
        """Hide blocks from look-ups; those in use become free, without content, when their requests end."""
        groups = self.controller.groups
        num_blocks = 0
        for unit in forgotten.units:
            for group in (groups.main, *groups.others):
                copies = cached_copies(self, make_block_hash_with_group_id(unit, group))
                num_blocks += len(copies)
                self.evict_blocks({copy.block_id for copy in copies})
        num_bytes = num_blocks * self.controller.block_bytes
        return Freed({Tier.GPU: num_blocks}, {Tier.GPU: num_bytes})

    def num_pending(self) -> int:
        """Return 0, as blocks in use are hidden."""
        return 0

    def deletion_problem(self) -> None:
        """Return None."""

    def reset_prefix_cache(self) -> bool:
        self.free_block_queue.place_returned()  # while they have their content
        is_reset: bool = super().reset_prefix_cache()
        if is_reset:
            self.free_block_queue.forget_contents()
            self.controller.tree.clear_tier(Tier.GPU)
        return is_reset

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        free = [block for block in blocks if not block.ref_cnt and not block.is_null]
        if free:
            self.free_block_queue.take_hits(free)
        for block in blocks:
            block.ref_cnt += 1
        if self.metrics_collector:
            for block in blocks:
                self.metrics_collector.on_block_accessed(block)

    def drop_contents(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take the content off blocks that were units' until the tree evicted them."""
        if self.enable_kv_cache_events or self.cached_block_hashes_by_block:
            self.evict_blocks({block.block_id for block in blocks})
            return
        drop = self.cached_block_hash_to_block.pop
        for block in blocks:
            drop(block.block_hash, block.block_id)
            block.reset_hash()

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[bytes]:
        block_hash = block.block_hash
        if block_hash is None:  # as of most blocks that are allocated while the cache is not full
            return []
        queue = self.free_block_queue
        queue.place_returned()  # while they have their content
        removed: list[bytes] = super()._remove_cached_block_hashes(block)
        queue.on_content_lost(block, block_hash)
        return removed
