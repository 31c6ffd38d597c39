"""Engines whose tokens chunk reuse could not provide are refused by the name of what stands against it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.vllm import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention

from ragcache_core.config import ChunkReuse
from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.chunks.build import check_engine
from ragcache_core.vllm_plugin.chunks.connector import ChunkDocumentConnector, ChunkRAGCacheConnector
from ragcache_core.vllm_plugin.chunks.model.attention_layers import attention_layers
from ragcache_core.vllm_plugin.compat import KVConnectorRole
from ragcache_core.vllm_plugin.scheduler.scheduler import RAGCacheScheduler
from tests.engine.vllm_plugin.storing_scene import FULL, LATENT, STATE, WINDOW, engine_config

pytestmark = pytest.mark.slow

_ONE_GROUP = SimpleNamespace(kv_cache_groups=[object()])


def _config(**changes: Any) -> Any:
    """Return of vLLM's configuration what is looked at; names of ``changes`` are those of its parts and fields."""
    parts: dict[str, Any] = {
        "parallel_config": SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_size=1,
        ),
        "scheduler_config": SimpleNamespace(
            enable_chunked_prefill=True, get_scheduler_cls=lambda: changes.get("scheduler", RAGCacheScheduler)
        ),
        "cache_config": SimpleNamespace(enable_prefix_caching=True),
        "speculative_config": changes.get("speculative_config"),
        "lora_config": changes.get("lora_config"),
    }
    for part in ("parallel_config", "scheduler_config", "cache_config"):
        vars(parts[part]).update({name: value for name, value in changes.items() if hasattr(parts[part], name)})
    return SimpleNamespace(**parts)


def test_an_engine_as_it_is_launched_is_taken() -> None:
    check_engine(_config(), _ONE_GROUP)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"prefill_context_parallel_size": 2}, "context parallelism"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA adapters"),
        ({"enable_chunked_prefill": False}, "prefill that is not chunked"),
        ({"enable_prefix_caching": False}, "prefix caching switched off"),
        ({"scheduler": object}, "another scheduler than RAGCacheScheduler"),
    ],
)
def test_another_engine_is_refused_with_what_stands_against_it(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"chunk reuse does not work with {said}.*leave CacheConfig.chunk_reuse out"):
        check_engine(_config(**changes), _ONE_GROUP)


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE)])
def test_an_engine_with_several_groups_is_refused_by_scheduler_and_workers(groups: Any) -> None:
    config, kv_config = engine_config(32, "1MiB", "", groups=groups, chunk_reuse=ChunkReuse())
    config.scheduler_config.scheduler_cls = RAGCacheScheduler
    for role in KVConnectorRole:
        with set_current_vllm_config(config), pytest.raises(ConfigError, match="several groups of KV caches"):
            ChunkRAGCacheConnector(config, role, kv_config)


def test_vllms_latent_attention_is_refused_by_its_worker() -> None:
    config, kv_config = engine_config(32, "1MiB", "", groups=(LATENT,))
    check_engine(_config(), kv_config)
    with set_current_vllm_config(config):
        attention = MLAAttention(
            num_heads=2,
            scale=1.0,
            qk_nope_head_dim=16,
            qk_rope_head_dim=64,
            v_head_dim=16,
            q_lora_rank=None,
            kv_lora_rank=512,
            kv_b_proj=torch.nn.Linear(512, 64),
            cache_config=config.cache_config,
            prefix="layers.0.attn",
        )
    assert attention.get_kv_cache_spec(config).head_size == 512 + 64, "a latent row, and one rotated key for all heads"
    with pytest.raises(ConfigError, match="chunk reuse does not work with layers of type MLAAttention"):
        attention_layers(attention, {"layers.0.attn": attention})


def test_vllms_attention_with_kv_of_8_bits_is_refused_by_its_worker() -> None:
    config, _ = engine_config(32, "1MiB", "")
    with set_current_vllm_config(config):
        attention = Attention(2, 16, 1.0, cache_config=config.cache_config, prefix="layers.0.attn")
    attention.kv_cache_dtype = "fp8_e4m3"  # a CPU without AVX-512 lets none be asked for
    with pytest.raises(ConfigError, match="chunk reuse does not work with a KV cache of dtype fp8_e4m3"):
        attention_layers(attention, {"layers.0.attn": attention})


@pytest.mark.parametrize("connector", [ChunkDocumentConnector, ChunkRAGCacheConnector])
def test_a_connector_is_not_built_for_an_engine_that_is_refused(connector: Any) -> None:
    config = _config(enable_prefix_caching=False)
    extra = {"ragcache": {"host_bytes": 1 << 20, "chunk_reuse": {"is_default": False}}}
    config.kv_transfer_config = SimpleNamespace(kv_connector_extra_config=extra)
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match="prefix caching switched off"):
            connector(config, role, _ONE_GROUP)
