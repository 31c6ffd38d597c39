"""Engines whose tokens chunk reuse could not provide are refused by the name of what stands against it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.chunks.build import check_engine
from ragcache_core.vllm_plugin.chunks.connector import ChunkDocumentConnector, ChunkRAGCacheConnector
from ragcache_core.vllm_plugin.compat import KVConnectorRole
from ragcache_core.vllm_plugin.scheduler.scheduler import RAGCacheScheduler

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


@pytest.mark.parametrize("connector", [ChunkDocumentConnector, ChunkRAGCacheConnector])
def test_a_connector_is_not_built_for_an_engine_that_is_refused(connector: Any) -> None:
    config = _config(enable_prefix_caching=False)
    extra = {"ragcache": {"host_bytes": 1 << 20, "chunk_reuse": {"is_default": False}}}
    config.kv_transfer_config = SimpleNamespace(kv_connector_extra_config=extra)
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match="prefix caching switched off"):
            connector(config, role, _ONE_GROUP)
