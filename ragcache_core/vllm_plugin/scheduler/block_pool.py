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
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, cast

from ragcache_core.tree import Location, by_node
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.forgetting import Forgotten, Freed
from ragcache_core.vllm_plugin.cache.kv_groups import OtherBlocks
from ragcache_core.vllm_plugin.compat import (
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    cached_content,
    cached_copies,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.cache.controller import CacheController
    from ragcache_core.vllm_plugin.cache.request_state import Key
    from ragcache_core.vllm_plugin.compat import BlockHashWithGroupId


_EVICTED_AHEAD = 32
"""Blocks that are evicted before they are needed."""
_CACHED_PER_AHEAD = 128
"""One in so many cached blocks is evicted ahead at most."""


class TreeFreeBlockQueue(FreeKVCacheBlockQueue):
    """vLLM's queue of free blocks, with the tree's order of eviction.

    ``num_free_blocks`` can be allocated: vLLM reads it for each request of each step, so it is counted, not computed.
    Returned blocks are placed while the model computes a step (:meth:`place_returned`), or before any other call.
    """

    def __init__(self, blocks: list[KVCacheBlock], pool: TreeBlockPool, controller: CacheController) -> None:
        self._spare: OrderedDict[int, KVCacheBlock] = OrderedDict()
        self._cached: dict[int, KVCacheBlock] = {}
        self._returned: list[KVCacheBlock] = []
        super().__init__([])
        self._spare.update((block.block_id, block) for block in blocks)
        self.num_free_blocks = len(blocks)
        self._pool = pool
        self._tree = controller.tree
        self._main = controller.groups.main
        self._others: OtherBlocks[int] = OtherBlocks(controller.groups, controller.tree, Tier.GPU)
        self._block_ids: dict[BlockHashWithGroupId, int] = {}
        self._evicted: set[int] = set()
        """Blocks that the tree evicted and vLLM is about to empty: the tree does not have them any more."""
        self._hits: set[int] = set()
        """Blocks that are taken out for a hit, before vLLM says so of each."""

    def popleft(self) -> KVCacheBlock:
        """Allocate a block.

        Raises:
            ValueError: none is free.
        """
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Allocate ``n`` blocks: spare ones, then those that the tree evicts."""
        assert self.num_free_blocks >= n
        self.place_returned()
        blocks = [self._spare.popitem(last=False)[1] for _ in range(min(n, len(self._spare)))]
        if len(blocks) < n:
            blocks += self._evict(n - len(blocks))
            self._evict_ahead()
        self.num_free_blocks -= n
        return blocks

    def _evict_ahead(self) -> None:
        """Make some more blocks spare: requests that decode need them one by one, and a batch costs hardly more."""
        num_blocks = 0 if self._others.has_groups else min(_EVICTED_AHEAD, len(self._cached) // _CACHED_PER_AHEAD)
        if not num_blocks:
            return
        allocated = self._evicted
        units = self._tree.evict_up_to(Tier.GPU, num_blocks)
        blocks = {block.block_id: block for unit in units if (block := self._take_unit(unit.key)) is not None}
        self._spare |= blocks
        self._evicted = set(blocks)
        self._pool.evict_blocks(self._evicted.copy())
        self._evicted = allocated

    def append(self, block: KVCacheBlock) -> None:
        """Take back a block that no request uses any more."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Take back blocks that no request uses any more."""
        self.num_free_blocks += len(blocks)
        self._returned += blocks

    def place_returned(self) -> None:
        """Put returned blocks among the cached or the spare ones, and let the tree choose among the cached."""
        if self._returned:
            returned, self._returned = self._returned, []
            tree, tier = self._tree, self._tree.tiers[Tier.GPU]
            for node, units in by_node(self._take_back(returned)):
                if missing := units & ~tier.resident[node.id]:
                    tree.add(node, missing, Tier.GPU)
                tree.let_go(node, units, Tier.GPU)
            self._keep_quotas()

    def _keep_quotas(self) -> None:
        """Make blocks spare that are more than their tenants may have."""
        shares = self._tree.tiers[Tier.GPU].shares
        for owner in shares.quotas:
            if num_units := shares.over_quota(owner):
                for unit in self._tree.evict_own(Tier.GPU, owner, num_units):
                    block_hash = make_block_hash_with_group_id(cast("Key", unit.key), self._main)
                    if (block_id := self._block_ids.get(block_hash)) is not None:
                        self._pool.evict_blocks({block_id})

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Take back blocks without content; they are allocated next."""
        self.num_free_blocks += len(blocks)
        for block in reversed(blocks):
            self._spare[block.block_id] = block
            self._spare.move_to_end(block.block_id, last=False)

    def remove(self, block: KVCacheBlock) -> None:
        """Take a free block out, whose KV a request uses."""
        if block.block_id in self._hits:
            self._hits.remove(block.block_id)
        else:
            self._take_hits([block])

    def expect_hits(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take the free ones of these blocks out at once; vLLM calls :meth:`remove` for each of them next."""
        free = [block for block in blocks if block.ref_cnt == 0 and not block.is_null]
        self._take_hits(free)
        self._hits.update(block.block_id for block in free)

    def _take_hits(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.place_returned()
        for node, units in by_node(self._take_hit_units(blocks)):
            self._tree.hold(node, units, Tier.GPU)
        self.num_free_blocks -= len(blocks)

    def _take_hit_units(self, blocks: Sequence[KVCacheBlock]) -> Iterator[Location]:
        """Yield the units of free blocks that are taken out."""
        for block in blocks:
            if block.block_id in self._cached:
                self._take(block.block_id)
            elif self._spare.pop(block.block_id, None) is None:
                raise RuntimeError(f"a block that is not free was taken for a hit: {block}")
            if (location := self._locate(block)) is not None:
                yield location

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return the free blocks; the order of the cached ones says nothing."""
        self.place_returned()
        return [*self._spare.values(), *self._cached.values()]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Yield the free blocks that :meth:`get_all_free_blocks` has after ``cursor``."""
        blocks = self.get_all_free_blocks()
        yield from blocks if cursor is None else blocks[blocks.index(cursor) + 1 :]

    def forget_contents(self) -> None:
        """Make all cached blocks spare: the prefix cache was reset."""
        self._spare.update(self._cached)
        self._cached.clear()
        self._block_ids.clear()
        self._others.clear()

    def forget_content(self, block: KVCacheBlock, block_hash: BlockHashWithGroupId) -> None:
        """Make a free block spare: it lost its content, which was ``block_hash``."""
        if self._cached.pop(block.block_id, None) is not None:
            self._block_ids.pop(block_hash, None)
            self._others.discard(block.block_id)
            self._spare[block.block_id] = block

    def forget_unit(self, key: Key) -> None:
        """Take note that a unit was lost: no hit needs what other groups have of it."""
        self._others.lose_unit(key)

    def spare_copies(self, block_hashes: Iterable[BlockHashWithGroupId]) -> None:
        """Make free blocks spare that hold one of these: a request computed that again, and uses its own."""
        self.place_returned()
        for block_hash in block_hashes:
            if (block_id := self._block_ids.pop(block_hash, None)) is not None:
                self._others.discard(block_id)
                self._spare[block_id] = self._cached.pop(block_id)

    def was_evicted(self, block: KVCacheBlock) -> bool:
        """Return, once, whether the tree evicted a block that was allocated just now."""
        if block.block_id not in self._evicted:
            return False
        self._evicted.remove(block.block_id)
        return True

    def keep_copy(self, copies: list[KVCacheBlock], block_hash: BlockHashWithGroupId) -> None:
        """Make a free one of ``copies`` the cached block of ``block_hash``, whose block lost it, if there is none."""
        if block_hash in self._block_ids or any(copy.ref_cnt > 0 for copy in copies):
            return
        for copy in copies:
            if self._spare.pop(copy.block_id, None) is not None:
                self.num_free_blocks -= 1
                self.append(copy)
                return

    def _take_back(self, blocks: Sequence[KVCacheBlock]) -> Iterator[Location]:
        """Put blocks among the free ones, and yield the units that no request uses any more."""
        locate, holders = self._tree.locate, cached_content(self._pool)
        has_groups = self._others.has_groups
        for block in blocks:
            block_hash, block_id = block.block_hash, block.block_id
            location = None if block_hash is None else locate(get_block_hash(block_hash))
            if block_hash is None or location is None:
                self._spare[block_id] = block
                continue
            is_main = not has_groups or get_group_id(block_hash) == self._main
            if holders.get(block_hash) is not block:
                copies = [copy for copy in cached_copies(self._pool, block_hash) if copy is not block]
                if any(copy.ref_cnt > 0 for copy in copies):
                    self._spare[block_id] = block
                    continue
                if any(copy.block_id in self._cached for copy in copies):
                    self._spare[block_id] = block
                    if is_main:
                        yield location
                    continue
            self._cached[block_id] = block
            self._block_ids[block_hash] = block_id
            if is_main:
                yield location
            else:
                self._take_back_other(block, block_hash)

    def _take_back_other(self, block: KVCacheBlock, block_hash: BlockHashWithGroupId) -> None:
        group = get_group_id(block_hash)

        def is_here(key: Key) -> bool:
            return bool(cached_copies(self._pool, make_block_hash_with_group_id(key, group)))

        self._others.add(block.block_id, group, get_block_hash(block_hash), is_here)

    def _locate(self, block: KVCacheBlock) -> Location | None:
        """Return a block's unit, if the block is one of full attention."""
        block_hash = block.block_hash
        if block_hash is None or (self._others.has_groups and get_group_id(block_hash) != self._main):
            return None
        return self._tree.locate(get_block_hash(block_hash))

    def _take(self, block_id: int) -> KVCacheBlock:
        """Take a block out of the cached ones."""
        block = self._cached.pop(block_id)
        assert block.block_hash is not None
        self._block_ids.pop(block.block_hash, None)
        if self._others.has_groups:
            self._others.discard(block_id)
        return block

    def _take_unit(self, key: Hashable) -> KVCacheBlock | None:
        assert isinstance(key, bytes)
        block_id = self._block_ids.get(make_block_hash_with_group_id(key, self._main))
        return None if block_id is None else self._take(block_id)

    def _evict(self, n: int) -> list[KVCacheBlock]:
        """Take ``n`` cached blocks: what no hit will need, then what the tree evicts, then anything."""
        blocks = [self._take(block_id) for block_id in list(islice(self._others.useless(), n))]
        self._evicted = set()
        if len(blocks) < n:
            size_of = self._others.size_of if self._others else None
            units = self._tree.evict_up_to(Tier.GPU, n - len(blocks), size_of=size_of)
            chosen = [block for unit in units if (block := self._take_unit(unit.key)) is not None]
            self._evicted.update(block.block_id for block in chosen)
            blocks += chosen
            for unit in units if size_of is not None else ():
                for block_id in self._others.of_unit(unit.key):
                    block = self._take(block_id)
                    if len(blocks) < n:
                        blocks.append(block)
                    else:
                        self._spare[block_id] = block
        while len(blocks) < n:
            blocks.append(self._pop_anything())
        return blocks

    def _pop_anything(self) -> KVCacheBlock:
        """Evict a cached block although others depend on it: an allocation that fits must succeed."""
        if self._others:
            return self._take(next(iter(self._others)))
        evicted = self._tree.evict_anything(Tier.GPU)
        if evicted is not None and (block := self._take_unit(evicted.key)) is not None:
            return block
        return self._take(next(reversed(self._cached)))


class TreeBlockPool(BlockPool):
    """vLLM's block pool with the tree's order of eviction; takes over one that vLLM has built."""

    controller: CacheController
    free_block_queue: TreeFreeBlockQueue
    enable_kv_cache_events: bool

    @classmethod
    def take_over(cls, pool: BlockPool, controller: CacheController) -> TreeFreeBlockQueue:
        """Make ``pool`` one of this class, before its first request; return its queue."""
        free = pool.free_block_queue.get_all_free_blocks()
        pool.__class__ = cls
        assert isinstance(pool, cls)
        pool.controller = controller
        pool.free_block_queue = TreeFreeBlockQueue(free, pool, controller)
        controller.forgetting.add_holder(pool)
        if controller.groups.others:
            controller.tiers[Tier.GPU].num_other_blocks = pool.num_other_blocks
        return pool.free_block_queue

    def num_other_blocks(self) -> int:
        """Return how many blocks of windows and states are cached."""
        return len(self.cached_block_hash_to_block) - self.controller.tree.tiers[Tier.GPU].num_units

    def emit_cached_block_events(
        self, request: Request, num_cached_blocks: int, block_size: int, kv_cache_group_id: int
    ) -> None:
        state = self.controller.state_of(request.request_id)
        if state is not None and (first_private := state.first_private) is not None:
            num_exact = first_private * self.controller.tokens_per_block // block_size
            num_cached_blocks = min(num_cached_blocks, num_exact)  # no event tells of approximate blocks
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
        num_told = num_full_blocks
        if state is not None and (first_private := state.first_private) is not None:
            # Answers behind what chunk reuse provided, or what is forgotten: no look-up finds it, so it is no content.
            size = self.controller.tokens_per_block
            num_findable = max(first_private, len(state.apart)) * size // block_size
            num_full_blocks = min(num_full_blocks, max(num_findable, num_cached_blocks))
            num_told = min(num_full_blocks, max(first_private * size // block_size, num_cached_blocks))
        tells, done = self.enable_kv_cache_events, num_cached_blocks
        for end in sorted({num_told, num_full_blocks}):  # no event tells of approximate blocks
            self.enable_kv_cache_events = tells and end == num_told
            mask = None if block_mask is None else block_mask[done - num_cached_blocks : end - num_cached_blocks]
            super().cache_full_blocks(request, blocks, done, end, block_size, kv_cache_group_id, mask)
            done = end
        self.enable_kv_cache_events = tells
        cached = [i for i in range(num_cached_blocks, num_full_blocks) if blocks[i].block_hash is not None]
        self.free_block_queue.spare_copies(blocks[i].block_hash for i in cached)
        if kv_cache_group_id != self.controller.groups.main:
            return
        tree = self.controller.tree
        hashes, locate = request.block_hashes, tree.locate
        if state is not None and self.controller.defers_answer(state, num_cached_blocks):
            if locate(hashes[num_cached_blocks]) is None:
                state.num_answer_end_blocks = num_full_blocks
                return
            # The tree has this from another request, and would evict it.
            if state.num_answer_end_blocks:
                self.controller.insert_answer(request.request_id)
                first = state.num_prompt_tokens // self.controller.tokens_per_block
                cached = [i for i in range(first, num_full_blocks) if blocks[i].block_hash is not None]
        places = (locate(hashes[i]) or self.controller.locate_block(hashes, i, request.request_id) for i in cached)
        # by_node reads ahead: where that makes the tree cut a node, it is behind the units that were located before
        for node, units in by_node(places):
            tree.hold(node, units, Tier.GPU)
            tree.add(node, units, Tier.GPU)

    # A holder of what may be forgotten

    def forget(self, forgotten: Forgotten) -> Freed:
        """Let no look-up find blocks; those in use are free, and without content, when their requests end."""
        groups = self.controller.groups
        num_blocks = 0
        for unit in forgotten.units:
            for group in (groups.main, *groups.others):
                copies = cached_copies(self, make_block_hash_with_group_id(unit, group))
                num_blocks += len(copies)
                self.evict_blocks({copy.block_id for copy in copies})
        num_bytes = num_blocks * self.controller.block_bytes
        return Freed({Tier.GPU: num_blocks}, {Tier.GPU: num_bytes})

    def num_left(self) -> int:
        """Return 0: what requests keep is theirs alone."""
        return 0

    def why_left(self) -> None:
        """Return None."""

    def reset_prefix_cache(self) -> bool:
        self.free_block_queue.place_returned()  # while they have their content
        is_reset: bool = super().reset_prefix_cache()
        if is_reset:
            self.free_block_queue.forget_contents()
            self.controller.tree.clear_tier(Tier.GPU)
        return is_reset

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.free_block_queue.expect_hits(blocks)
        super().touch(blocks)

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[bytes]:
        queue, tree = self.free_block_queue, self.controller.tree
        queue.place_returned()  # while they have their content
        block_hash = block.block_hash
        removed: list[bytes] = super()._remove_cached_block_hashes(block)
        if block_hash is None:
            return removed
        is_evicted = queue.was_evicted(block)  # then neither the queue nor the tree has it any more
        if not is_evicted:
            queue.forget_content(block, block_hash)
        if copies := cached_copies(self, block_hash):
            queue.keep_copy(copies, block_hash)
        elif not is_evicted and get_group_id(block_hash) == self.controller.groups.main:
            key = get_block_hash(block_hash)
            queue.forget_unit(key)
            if (location := tree.locate(key)) is not None:
                tree.let_go(location.node, 1 << location.unit, Tier.GPU)
                tree.remove(location.node, 1 << location.unit, Tier.GPU)
        return removed
