"""vLLM's own cache manager over a small pool of blocks with ours inside, and what it must always be like."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from ragcache_core.policy import PrefillCostModel
from ragcache_core.tree import check_invariants
from ragcache_core.types import PromptSegment, SegmentKind, Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController, TierReport
from ragcache_core.vllm_plugin.compat import BlockPool, building_pools
from ragcache_core.vllm_plugin.group_specs import read_groups
from ragcache_core.vllm_plugin.scheduler.block_pool import TreeBlockPool, TreeFreeBlockQueue
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import RequestMetadata

BLOCK = 4
LENGTHS = {"A": 6, "B": 12, "C": 9, "D": 20}
POLICIES = ("pgdsf", "lru", "lfu", "mixture")
init_none_hash(sha256)


def full(block_size: int = BLOCK) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)


def window(num_tokens: int, block_size: int = BLOCK) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=num_tokens
    )


def local(num_tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, attention_chunk_size=num_tokens
    )


def state() -> MambaSpec:
    """A state of its own for every block."""
    return MambaSpec(block_size=BLOCK, shapes=((2,),), dtypes=(torch.float32,), mamba_cache_mode="all")


MODELS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (full(),),
    "a window": (full(), window(9)),
    "two windows": (window(6), full(), window(13)),
    "a window of longer blocks": (full(), window(9, 2 * BLOCK)),
    "chunks": (full(), local(8)),
    "states": (state(), full()),
    "full twice": (full(), full(2 * BLOCK)),
}
"""What the layers of each group look at, by what the tests call the model."""
block_hasher = get_request_block_hasher(BLOCK, sha256)


@dataclass
class Running:
    """A request that has blocks, and what it has written into them."""

    request: Request
    is_delayed: bool = False


@dataclass
class Pool:
    """vLLM's cache manager over ``num_blocks`` blocks, its null block included, with our pool inside."""

    num_blocks: int
    policy: str = "pgdsf"
    is_taken_over: bool = True
    max_cached_documents: int | None = None
    model: str = "full"
    content: dict[int, bytes | None] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        config = KVCacheConfig(
            self.num_blocks, [], [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(MODELS[self.model])]
        )
        self.block_sizes = [spec.block_size for spec in MODELS[self.model]]
        with building_pools(TreeBlockPool if self.is_taken_over else BlockPool):
            self.manager = KVCacheManager(
                config, max_model_len=4096, scheduler_block_size=max(self.block_sizes), hash_block_size=BLOCK
            )
        vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(decode_context_parallel_size=1), speculative_config=None
        )
        groups = read_groups(config, vllm_config, BLOCK)
        self.main = groups.main
        self.controller = CacheController(
            PluginSettings(policy=self.policy, ghost_size=3, max_cached_documents=self.max_cached_documents),
            tokens_per_block=BLOCK,
            prefill_cost=PrefillCostModel.default(),
            tiers={Tier.GPU: TierReport(self.num_blocks, 1)},
            groups=groups,
        )
        self.tree = self.controller.tree
        self.pool = self.manager.block_pool
        if isinstance(self.pool, TreeBlockPool):
            self.pool.follow(self.controller)

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
        self.manager.new_step_starts()
        blocks, num_hits, _ = self.manager.get_computed_blocks(request)
        for group, hits in enumerate(blocks.blocks):
            for i, block in enumerate(hits):
                if not block.is_null:
                    expected = self.name(request, group, i)
                    assert self.content[block.block_id] == expected, "a hit on another block's content"
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
        for group, block_ids in enumerate(self.manager.get_block_ids(request.request_id)):
            for i in range(first * BLOCK // self.block_sizes[group], len(block_ids)):
                is_full = (i + 1) * self.block_sizes[group] <= request.num_computed_tokens
                self.content[block_ids[i]] = self.name(request, group, i) if is_full else None

    def name(self, request: Request, group: int, block: int) -> bytes:
        """Return what vLLM calls a full block."""
        last = (block + 1) * self.block_sizes[group] // BLOCK - 1
        return make_block_hash_with_group_id(request.block_hashes[last], group)

    def settle(self) -> None:
        """Do what the scheduler does while a step is computed."""
        self.queue.place_returned()

    def cached_keys(self) -> set[bytes]:
        """Return the full attention's content that the pool can serve."""
        return self.keys_of(self.pool.blocks)

    def keys_of(self, blocks: Iterable[KVCacheBlock]) -> set[bytes]:
        """Return what those of ``blocks`` hold that are full attention's."""
        hashes = [block.block_hash for block in blocks if block.block_hash is not None]
        return {get_block_hash(block_hash) for block_hash in hashes if get_group_id(block_hash) == self.main}

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
        returned = {block.block_id for block in queue._returned}  # asking for free blocks would settle them
        cached = {block.block_id for block in queue._cached()} - returned
        states = [*queue._spare, *queue._other_cached, *cached, *returned]
        assert sorted(states) == [b.block_id for b in blocks if b.ref_cnt == 0], "each free block in one state"
        assert self.pool.get_num_free_blocks() == len(states)
        for block_hash, block_id in queue._other_ids.items():
            assert queue._other_cached[block_id].block_hash == block_hash
        assert len(queue._other_ids) == len(queue._other_cached)
        gpu = self.tree.tiers[Tier.GPU]
        slots = {
            block.block_id: key
            for node in self.tree.nodes()
            for key, block in zip(node.keys, gpu.slots[node.id] or (), strict=False)
            if block is not None
        }
        assert set(slots.values()) == self.resident_keys(), "each unit has its block"
        for block_id, key in slots.items():
            assert get_block_hash(self.pool.blocks[block_id].block_hash) == key
        check_invariants(self.tree, is_connected=False)
        used = self.keys_of(block for block in blocks if block.ref_cnt > 0)
        assert self.held_keys() <= used | self.keys_of(queue._returned), "held, and no request uses it"
        assert used & self.resident_keys() <= self.held_keys(), "used, and not held"
        assert self.resident_keys() <= self.cached_keys(), "the tree knows of content that no block has"
        for block in blocks:
            if block.block_hash is not None:
                assert self.content[block.block_id] == block.block_hash

    def check_nothing_leaks(self) -> None:
        """Assert that every block can be had, one by one, and that nothing is left in the tree then."""
        self.settle()
        assert self.held_keys() == set()
        taken = self.pool.get_new_blocks(self.num_blocks - 1)
        assert len({block.block_id for block in taken}) == self.num_blocks - 1
        assert self.resident_keys() == self.held_keys() == self.cached_keys() == set()
        assert self.tree.tiers[Tier.GPU].num_units == 0
        self.pool.free_blocks(taken)
