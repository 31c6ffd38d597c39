"""Read the model's KV cache groups from vLLM's configuration, and reject those that the tree does not support."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.cache.kv_groups import KVGroups, OtherGroup
from ragcache_core.vllm_plugin.compat import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def read_groups(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, tokens_per_hash: int) -> KVGroups:
    """Return the groups of a model.

    Raises:
        ConfigError: the tree cannot follow them; says why.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) <= 1:
        return KVGroups()
    if kv_cache_config.hisparse_host_num_blocks is not None:
        raise ConfigError("some of its blocks lie in a host pool of vLLM's own (HiSparse)")
    if (dcp := vllm_config.parallel_config.decode_context_parallel_size) > 1:
        raise ConfigError(f"decode_context_parallel_size is {dcp}, which gives groups blocks of different lengths")
    specs = {i: _first_spec(group.kv_cache_spec) for i, group in enumerate(groups)}
    cached = {i: spec for i, spec in specs.items() if groups[i].kv_cache_spec.prefix_cacheable}
    full = [i for i, spec in cached.items() if isinstance(spec, FullAttentionSpec)]
    if not full:
        raise ConfigError(f"none of {_names(specs.values())} attends to the whole prefix")
    main = full[0]
    if (size := specs[main].block_size) != tokens_per_hash:
        raise ConfigError(
            f"a block of full attention holds {size} tokens, and hits may end every {tokens_per_hash}: "
            "leave --prefix-match-unit out"
        )
    alignment = math.lcm(*(spec.block_size for spec in cached.values()))
    # A draft is recomputed from one block before the cached KV's end on, so the hit ends a block earlier than that.
    num_dropped = 0 if vllm_config.speculative_config is None else 1
    return KVGroups(main, {i: _other(spec, size, alignment, num_dropped) for i, spec in cached.items() if i != main})


def _first_spec(spec: KVCacheSpec) -> KVCacheSpec:
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _other(spec: KVCacheSpec, tokens_per_unit: int, alignment: int, num_dropped: int) -> OtherGroup:
    """Return how far back a hit needs a group's blocks; hits end at multiples of ``alignment`` tokens."""
    if isinstance(spec, FullAttentionSpec):
        return OtherGroup(math.inf)
    if isinstance(spec, MambaSpec):
        return OtherGroup(1 + num_dropped, is_state=True)
    if isinstance(spec, SlidingWindowSpec):
        num_tokens = spec.sliding_window - 1 + spec.extra_retained_tokens
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        num_tokens = spec.attention_chunk_size
    else:
        raise ConfigError(f"it has {_names([spec])}, and RAGCache does not know when such a layer needs its KV")
    num_blocks = -(-num_tokens // spec.block_size) + num_dropped
    num_tokens = num_blocks * spec.block_size + alignment - tokens_per_unit
    return OtherGroup(-(-num_tokens // tokens_per_unit))


def _names(specs: Iterable[KVCacheSpec]) -> str:
    return ", ".join(sorted({type(spec).__name__.removesuffix("Spec") for spec in specs}))
