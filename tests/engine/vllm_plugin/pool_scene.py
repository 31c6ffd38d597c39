"""vLLM's own cache manager over a small pool of blocks with ours inside, and what it must always be like."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from ragcache_core.policy import PrefillCostModel
from ragcache_core.tree import check_invariants
from ragcache_core.types import PromptSegment, SegmentKind, Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController
from ragcache_core.vllm_plugin.scheduler.block_pool import TreeBlockPool, TreeFreeBlockQueue
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import RequestMetadata

BLOCK = 4
LENGTHS = {"A": 6, "B": 12, "C": 9, "D": 20}
POLICIES = ("pgdsf", "lru", "lfu", "tournament")
init_none_hash(sha256)
block_hasher = get_request_block_hasher(BLOCK, sha256)


@dataclass
class Running:
    """A request that has blocks, and what it has written into them."""

    request: Request
    is_delayed: bool = False


@dataclass
class Pool:
    """vLLM's cache manager over ``num_blocks`` blocks, one of which is its null block, with our pool inside."""

    num_blocks: int
    policy: str = "pgdsf"
    is_taken_over: bool = True
    max_cached_documents: int | None = None
    content: dict[int, bytes | None] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.manager = KVCacheManager(
            KVCacheConfig(self.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=4096,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        self.controller = CacheController(
            PluginSettings(policy=self.policy, ghost_size=3, max_cached_documents=self.max_cached_documents),
            tokens_per_block=BLOCK,
            shadow_blocks=self.num_blocks,
            prefill_cost=PrefillCostModel.default(),
        )
        self.tree = self.controller.tree
        self.pool = self.manager.block_pool
        if self.is_taken_over:
            TreeBlockPool.take_over(self.pool, self.controller)

    @property
    def queue(self) -> TreeFreeBlockQueue:
        queue = self.pool.free_block_queue
        assert isinstance(queue, TreeFreeBlockQueue)
        return queue

    def new(self, documents: str, question: int = 3, seed: int = 0) -> Request:
        """Announce a request over documents, whose tokens are their letter's."""
        tokens: list[int] = []
        segments = []
        for name in documents:
            segments.append(PromptSegment(SegmentKind.DOCUMENT, len(tokens), len(tokens) + LENGTHS[name], name))
            tokens += [ord(name) * 100 + i for i in range(LENGTHS[name])]
        if question:
            segments.append(PromptSegment(SegmentKind.QUESTION, len(tokens), len(tokens) + question))
            tokens += [seed * 1000 + i for i in range(question)]
        request = Request(
            f"r{next(self.numbers)}", tokens, SamplingParams(max_tokens=64), None, block_hasher=block_hasher
        )
        self.controller.on_new_request(
            request.request_id, RequestMetadata(tuple(segments)), request.block_hashes, len(tokens), 0.0
        )
        return request

    def start(self, request: Request, *, num_tokens: int | None = None, delays: bool = False) -> int | None:
        """Give a request what is cached and blocks for the rest; None where they do not fit, else the hit tokens."""
        blocks, num_hits, _ = self.manager.get_computed_blocks(request)
        for i, block in enumerate(blocks.blocks[0]):
            assert self.content[block.block_id] == request.block_hashes[i], "a hit on another block's content"
        num_new = (
            request.num_tokens - num_hits if num_tokens is None else min(num_tokens, request.num_tokens - num_hits)
        )
        if self.manager.allocate_slots(request, num_new, num_hits, blocks, delay_cache_blocks=delays) is None:
            return None
        self.controller.on_admitted(request.request_id, request.block_hashes, {Tier.GPU: num_hits}, 1.0)
        request.num_computed_tokens = num_hits + num_new
        self.write(request, first=num_hits // BLOCK)
        return num_hits

    def advance(self, request: Request, token: int) -> bool:
        """Give a running request one more token, computed or answered; False where there is no block for it."""
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(token)
        if self.manager.allocate_slots(request, 1) is None:
            return False
        request.num_computed_tokens += 1
        self.write(request, first=(request.num_computed_tokens - 1) // BLOCK)
        return True

    def finish(self, request: Request) -> None:
        self.manager.free(request)
        self.controller.on_finished(request.request_id)

    def preempt(self, request: Request) -> None:
        self.manager.free(request)
        request.num_computed_tokens = 0

    def write(self, request: Request, first: int) -> None:
        """Note what the request's blocks hold from block ``first`` on; a block that is not full holds nothing yet."""
        (block_ids,) = self.manager.get_block_ids(request.request_id)
        for i in range(first, len(block_ids)):
            is_full = (i + 1) * BLOCK <= request.num_computed_tokens
            self.content[block_ids[i]] = request.block_hashes[i] if is_full else None

    def settle(self) -> None:
        """Do what the scheduler does while a step is computed."""
        self.queue.place_returned()

    def cached_keys(self) -> set[bytes]:
        """Return the content that the pool can serve."""
        return {get_block_hash(block.block_hash) for block in self.pool.blocks if block.block_hash is not None}

    def held_keys(self) -> set[bytes]:
        """Return the units of the tree that are in use on the GPU."""
        in_use = self.tree.tiers[Tier.GPU].in_use
        return {key for node in self.tree.nodes() for i, key in enumerate(node.keys) if in_use.get(node.id, 0) >> i & 1}

    def resident_keys(self) -> set[bytes]:
        return {
            key
            for node in self.tree.nodes()
            for i, key in enumerate(node.keys)
            if self.tree.resident_mask(node, Tier.GPU) >> i & 1
        }

    def check(self) -> None:
        """Assert what holds between steps."""
        blocks = [block for block in self.pool.blocks if not block.is_null]
        queue = self.queue
        free = [*queue._spare.values(), *queue._cached.values(), *queue._returned]  # asking for them would settle them
        assert sorted(block.block_id for block in free) == [b.block_id for b in blocks if b.ref_cnt == 0]
        assert self.pool.get_num_free_blocks() == len(free)
        assert not set(queue._spare) & set(queue._cached), "a block in two states"
        assert not queue._evicted, "a block that is not handed out just now"
        for key, block_id in queue._block_ids.items():
            block_hash = queue._cached[block_id].block_hash
            assert block_hash is not None
            assert get_block_hash(block_hash) == key
        assert len(queue._block_ids) == len(queue._cached)
        check_invariants(self.tree, is_connected=False)
        used = {get_block_hash(b.block_hash) for b in blocks if b.ref_cnt > 0 and b.block_hash is not None}
        returned = {get_block_hash(b.block_hash) for b in queue._returned if b.block_hash is not None}
        assert self.held_keys() <= used | returned, "held, and nobody uses it"
        assert used & self.resident_keys() <= self.held_keys(), "used, and nobody holds it"
        assert self.resident_keys() <= self.cached_keys(), "the tree knows of content that no block has"
        for block in blocks:
            if block.block_hash is not None:
                assert self.content[block.block_id] == get_block_hash(block.block_hash)

    def check_nothing_leaks(self) -> None:
        """Assert that every block can be had, one by one, and that nothing is left in the tree then."""
        self.settle()
        assert self.held_keys() == set()
        taken = self.pool.get_new_blocks(self.num_blocks - 1)
        assert len({block.block_id for block in taken}) == self.num_blocks - 1
        assert self.resident_keys() == self.held_keys() == self.cached_keys() == set()
        assert self.tree.tiers[Tier.GPU].num_units == 0
        self.pool.free_blocks(taken)
