"""What vLLM is like where chunk reuse relies on it."""

from __future__ import annotations

import dataclasses
import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm.forward_context import ForwardContext
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import AttentionGroup

from ragcache_core.vllm_plugin import compat
from ragcache_core.vllm_plugin.chunks.model import rope


def _arguments(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _sets(kind: Any, name: str) -> bool:
    return f"self.{name}" in inspect.getsource(kind)


def _order(function: Any, *parts: str) -> bool:
    source = inspect.getsource(function)
    places = [source.index(part) for part in parts]
    return places == sorted(places)


def _source(module: str) -> str:
    """Return the text of a module that can be imported on a GPU alone."""
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text(encoding="utf-8")


def facts() -> dict[str, Any]:
    """Return them."""
    connector = compat.KVConnectorBase_V1
    names = ("bind_connector_metadata", "handle_preemptions", "get_finished", "build_connector_worker_meta")
    names += (
        "get_handshake_metadata",
        "set_xfer_handshake_metadata_pp_aware",
        "update_connector_output",
        "reset_cache",
    )
    flash_attention = _source("vllm.v1.attention.backends.flash_attn")
    begin = inspect.getsource(KVConnectorModelRunnerMixin._get_kv_connector_output)
    return {
        "connector": {name: _arguments(getattr(connector, name)) for name in names},
        "aggregate": _arguments(compat.KVConnectorWorkerMetadata.aggregate),
        "steps": _order(
            KVConnectorModelRunnerMixin._get_kv_connector_output,
            "bind_connector_metadata(",
            "yield output",
            "if start_after_forward:\n                kv_connector.start_load_kv",
            "wait_for_save()",
            "get_transfer_results(",
            "build_connector_worker_meta()",
        ),
        "steps_v2": _order(
            ActiveKVConnector.post_forward, "_start_load_kv()", "wait_for_save()", "get_transfer_results("
        ),
        "sync_first": "not scheduler_output.has_sync_kv_loads" in begin,
        "common": sorted(_fields(compat.CommonAttentionMetadata)),
        "group": _fields(AttentionGroup)[:3],
        "forward_context": [
            name in _fields(ForwardContext) for name in ("attn_metadata", "slot_mapping", "skip_compiled")
        ],
        "set_forward_context": [
            name in _arguments(compat.set_forward_context) for name in ("num_tokens", "slot_mapping", "skip_compiled")
        ],
        "builder": [
            _arguments(CPUAttentionBackend.get_builder_cls().__init__),
            _arguments(CPUAttentionBackend.get_builder_cls().build),
        ],
        "unplanned": "self.aot_schedule and not fast_build" in flash_attention,
        "reordered": "reorder_batch_threshold" in AttentionMetadataBuilder.__annotations__,
        "runners": [
            _sets(kind, "attn_groups") and hasattr(kind, "get_model") for kind in (GPUModelRunner, GPUModelRunnerV2)
        ],
        "worker": _arguments(compat.platform_worker().initialize_from_config),
        "attention": [
            _sets(Attention, name)
            for name in ("impl", "head_size", "num_heads", "num_kv_heads", "kv_cache_dtype", "kv_cache", "head_size_v")
        ],
        "refused_attention": [
            *(_sets(Attention, name) for name in ("kv_sharing_target_layer_name", "sliding_window")),
            *(
                f"self.{name} = " in source
                for source in (inspect.getsource(CPUAttentionBackendImpl), flash_attention)
                for name in ("alibi_slopes", "sinks", "logits_soft_cap", "scale")
            ),
        ],
        "write": _arguments(CPUAttentionBackendImpl.do_kv_cache_update),
        "forward": _arguments(CPUAttentionBackendImpl.forward)[:3],
        "updates_before": CPUAttentionBackend.forward_includes_kv_cache_update,
        "rope": [
            _sets(rotary_embedding.RotaryEmbedding.__mro__[1], n)
            for n in ("cos_sin_cache", "rotary_dim", "is_neox_style", "head_size")
        ],
        "refused": sorted(
            name
            for name in rope._REFUSED
            if not hasattr(rotary_embedding, name) and name != "Ernie4_5_VLRotaryEmbedding"
        ),
        "block_state": _fields(KVConnectorBlockState)[:2],
        "output": [
            name in _fields(SchedulerOutput) for name in ("kv_connector_block_state", "total_num_scheduled_tokens")
        ],
        "request": [
            _sets(Request, name)
            for name in ("block_hashes", "all_token_ids", "prefill_stats", "num_preemptions", "prompt_embeds")
        ],
        "skips": _sets(Request, "skip_reading_prefix_cache"),
        "hashes_grow": "self.block_hashes.extend(" in inspect.getsource(Request.update_block_hashes),
        "prefill_stats": _arguments(PrefillStats.set),
        "delayed": "delay_cache_blocks=load_kv_async" in inspect.getsource(Scheduler.schedule)
        and "if delay_cache_blocks:" in inspect.getsource(KVCacheManager.allocate_slots),
        "waits": "finished_recving_kv_req_ids" in inspect.getsource(Scheduler.finish_requests),
        "loaded": "finished_recving" in _fields(KVConnectorOutput),
        "allocated": _arguments(KVCacheBlocks.get_block_ids)[:2],
        "all_reduce": _arguments(compat.tensor_model_parallel_all_reduce),
    }
