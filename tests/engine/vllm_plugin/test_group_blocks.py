"""Which blocks of windows and states the GPU tier keeps, on vLLM's own cache manager."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.core.kv_cache_utils import get_group_id, get_kv_cache_groups, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec

from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.group_specs import read_groups
from tests.engine.vllm_plugin.pool_scene import BLOCK, LENGTHS, Pool, full, local, state, window

WINDOWED = "a window"  # of 9 tokens: a hit needs the two blocks before its end


def used_once(it: Pool, documents: str) -> None:
    request = it.new(documents, question=1)
    assert it.start(request) is not None
    it.finish(request)


def num_blocks_of(it: Pool, group: int) -> int:
    """Return how many blocks of a group are cached."""
    hashes = [block.block_hash for block in it.pool.blocks if block.block_hash is not None]
    return sum(get_group_id(block_hash) == group for block_hash in hashes)


def take(it: Pool, num_blocks: int) -> None:
    """Have ``num_blocks`` that hold something evicted, besides all that hold nothing."""
    num_cached = sum(block.block_hash is not None and not block.ref_cnt for block in it.pool.blocks)
    it.pool.free_blocks(it.pool.get_new_blocks(it.pool.get_num_free_blocks() - num_cached + num_blocks))


def hit(it: Pool, documents: str) -> int:
    request = it.new(documents, question=1)
    num_tokens = it.start(request)
    assert num_tokens is not None
    it.finish(request)
    return num_tokens


def test_a_window_amid_a_document_goes_first_and_the_document_is_hit_all_the_same() -> None:
    it = Pool(24, model=WINDOWED)
    used_once(it, "D")
    take(it, 3)
    assert (num_blocks_of(it, 0), num_blocks_of(it, 1)) == (5, 2)
    assert hit(it, "D") == LENGTHS["D"]
    it.check_nothing_leaks()


def test_what_a_running_request_has_passed_goes_after_all_else() -> None:
    """Its units are in use, so that the tree would never evict it."""
    it = Pool(40, model=WINDOWED)
    used_once(it, "B")
    request = it.new("AC", question=1)
    it.start(request)
    for _ in range(12):
        it.advance(request, 7)
    before = num_blocks_of(it, 1)
    while it.resident_keys() - it.held_keys():
        take(it, 1)
    assert num_blocks_of(it, 1) >= before - 3, "B's went, and no others"
    it.pool.free_blocks(it.pool.get_new_blocks(it.pool.get_num_free_blocks()))
    assert it.resident_keys() == it.held_keys()
    it.finish(request)
    it.check_nothing_leaks()


def groups_of(*specs: KVCacheSpec, tokens_per_hash: int = BLOCK, dcp: int = 1, speculative: object = None) -> Any:
    config = KVCacheConfig(8, [], [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)])
    vllm_config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp), speculative_config=speculative
    )
    return read_groups(config, vllm_config, tokens_per_hash)


def test_the_tree_follows_full_attention_wherever_it_stands_and_knows_what_a_hit_needs_of_the_others() -> None:
    groups = groups_of(window(128, 16), full(16), window(1024, 16), local(64), tokens_per_hash=16)
    assert groups.main == 1
    assert {i: other.num_units for i, other in groups.others.items()} == {0: 8, 2: 64, 3: 4}
    drafted = groups_of(full(16), window(128, 16), tokens_per_hash=16, speculative="eagle")
    assert drafted.others[1].num_units == 9, "and one block more where a draft drops the last of a hit"
    assert groups_of(window(128)).others == {}, "one group is followed whatever it is"


def test_the_groups_that_vllm_makes_of_qwen_3_nexts_layers_are_followed() -> None:
    """36 layers of gated delta net, 12 of full attention, whose blocks are as long as a state is large."""
    block_size = 544
    attention = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=256, dtype=torch.bfloat16)
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 16, 32, 128, 128, 4, 0)
    delta_net = MambaSpec(
        block_size=block_size,
        shapes=shapes,
        dtypes=(torch.bfloat16, torch.bfloat16),
        mamba_cache_mode="align",
        page_size_padded=attention.page_size_bytes,
    )
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    cache.kv_cache_layout = "LBHNC"
    config = VllmConfig(device_config=DeviceConfig("cpu"), cache_config=cache)
    layers = {f"layers.{i}": attention if i % 4 == 3 else delta_net for i in range(48)}
    kv_config = KVCacheConfig(8, [], get_kv_cache_groups(config, layers))
    assert [type(group.kv_cache_spec) for group in kv_config.kv_cache_groups].count(MambaSpec) == 3
    _, tokens_per_hash = resolve_kv_cache_block_sizes(kv_config, config)
    groups = read_groups(kv_config, config, tokens_per_hash)
    assert isinstance(kv_config.kv_cache_groups[groups.main].kv_cache_spec, FullAttentionSpec)
    assert [(other.num_units, other.is_state) for other in groups.others.values()] == [(1, True)] * 3


def test_groups_that_no_tree_can_follow_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="none of Mamba, SlidingWindow attends to the whole prefix"):
        groups_of(window(9), state())
    with pytest.raises(ConfigError, match="a block of full attention holds 8 tokens, and hits may end every 4"):
        groups_of(full(8), window(9))
    with pytest.raises(ConfigError, match="decode_context_parallel_size is 2"):
        groups_of(full(), window(9), dcp=2)
