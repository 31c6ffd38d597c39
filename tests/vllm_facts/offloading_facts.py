"""What vLLM's offloading is like where RAGCache relies on it."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from vllm import _custom_ops
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config, events, metrics, worker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCacheTensor, TierFilter, get_offload_block_hash
from vllm.v1.kv_offload.config import OffloadingGroupConfig, OffloadingParallelConfig
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ragcache_core.vllm_plugin import compat
from ragcache_core.vllm_plugin.lower.manager import TierManager
from ragcache_core.vllm_plugin.offload.copied_requests import KeyGroup, _num_window_blocks
from ragcache_core.vllm_plugin.offload.copy_stats import (
    ALLOCATION_FAILURE,
    DIRECTIONS,
    LOOKUP_ASYNC_DELAY,
    LOOKUP_SYNC_DELAY,
)
from ragcache_core.vllm_plugin.offload.cpu_worker import CopyingWorker
from tests.vllm_facts.engine_facts import names, parameters, sets

_ATTENTION: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
_SPECS = [
    FullAttentionSpec(**_ATTENTION),
    *(SlidingWindowSpec(**_ATTENTION, sliding_window=tokens) for tokens in (1, 16, 17, 40)),
    ChunkedLocalAttentionSpec(**_ATTENTION, attention_chunk_size=64),
    MambaSpec(block_size=16, shapes=((16,),), dtypes=(torch.float32,)),
]
_KEY_GROUP = KeyGroup(0, 16, 1, None, _SPECS[0], False, False, None)
_window_of_vllm = getattr(
    offloading, "get_sliding_window_size_in_chunks", getattr(config, "get_sliding_window_size_in_chunks", None)
)
assert _window_of_vllm is not None, "lookups.py has windows as vLLM has them"


def facts() -> dict[str, object]:
    """Return names, signatures and a few measured facts."""
    whole_offloading = inspect.getsource(offloading.OffloadingConnectorScheduler)
    return {
        "manager": {
            name: parameters(getattr(compat.OffloadingManager, name))
            for name in sorted(vars(TierManager))
            if inspect.isfunction(getattr(compat.OffloadingManager, name, None)) and not name.startswith("_")
        },
        "manager_is_complete": sorted(TierManager.__abstractmethods__),
        "manager_asks": sorted(set(re.findall(r"self\.manager\.(\w+)", whole_offloading)) - set(dir(TierManager))),
        "host_event": sorted({"keys", "medium", "removed"} - set(names(compat.OffloadingEvent))),
        "host_metrics": sorted(name for name in vars(compat.CPUOffloadingMetrics) if name.isupper()),
        "tiering_metrics": sorted(name for name in vars(compat.TieringOffloadingMetrics) if name.isupper()),
        "spec_sets": sets(
            compat.TieringOffloadingSpec,
            "num_chunks",
            "kv_bytes_per_chunk",
            "cpu_page_size_per_worker",
            "extra_config",
            "config",
            "kv_events_config",
            "blocks_per_chunk",
            "tokens_per_hash",
            "secondary_tier_configs",
        ),
        "spec": [
            parameters(compat.TieringOffloadingSpec.get_manager),
            parameters(compat.TieringOffloadingSpec.get_worker),
        ],
        "offload_config": names(compat.OffloadingConfig),
        "identity": [
            sorted(
                {"tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_index"}
                - set(names(OffloadingParallelConfig))
            ),
            sorted({"kv_cache_dtype_skip_layers", "prefix_caching_hash_algo"} - set(CacheConfig.__dataclass_fields__)),
            sorted({"method", "draft_model_config"} - set(SpeculativeConfig.__dataclass_fields__)),
            sorted(
                {"speculative_config", "attention_config", "load_config", "model_config", "cache_config"}
                - set(VllmConfig.__dataclass_fields__)
            ),
            sorted(
                {
                    "model_impl",
                    "model_class_overrides",
                    "disable_sliding_window",
                    "quantization_config",
                    "max_model_len",
                }
                - set(ModelConfig.__dataclass_fields__)
            ),
            "original_max_model_len" in inspect.getsource(ModelConfig.__post_init__),
            sorted({"load_format", "download_dir", "model_loader_extra_config"} - set(LoadConfig.__dataclass_fields__)),
            "cp_kv_cache_interleave_size" in ParallelConfig.__dataclass_fields__,
            "backend" in AttentionConfig.__dataclass_fields__,
        ],
        "tier_init": parameters(compat.SecondaryTierManager.__init__),
        "tier": {
            name: parameters(getattr(compat.SecondaryTierManager, name))
            for name in (
                "on_new_request",
                "lookup",
                "submit_store",
                "submit_load",
                "get_finished_jobs",
                "has_pending_work",
                "drain_jobs",
                "on_schedule_end",
                "on_request_finished",
                "serve_external_requests",
                "take_events",
                "get_stats",
                "shutdown",
            )
        },
        "tier_reads": [
            isinstance(inspect.getattr_static(compat.SecondaryTierManager, "block_size_bytes"), property),
            [compat.LookupResult.HIT.name, compat.LookupResult.MISS.name, compat.Medium.STORAGE.name],
            "load_tier_filter" in names(compat.ReqContext),
            parameters(TierFilter.allows),
        ],
        "req_context": sorted({"req_id", "kv_transfer_params"} & set(names(compat.ReqContext))),
        "tier_factory": "module_path" in inspect.getsource(SecondaryTierFactory),
        "job": names(compat.TransferJob),
        "result": names(JobResult),
        "offload_key": get_offload_block_hash(b"hash" + bytes(4)) == b"hash",
        "worker": {
            name: parameters(getattr(compat.OffloadingWorker, name))
            for name in ("submit_store", "submit_load", "get_finished", "wait", "shutdown")
        },
        "copies": parameters(_custom_ops.swap_blocks_batch),
        "worker_is_complete": sorted(CopyingWorker.__abstractmethods__),
        "transfer_result": names(compat.TransferResult),
        "caches": names(compat.CanonicalKVCaches),
        "cache": [
            sorted({"tensor", "page_size_bytes"} & set(names(CanonicalKVCacheTensor))),
            "tensor_idx" in names(CanonicalKVCacheRef),
        ],
        "gpu_spec": parameters(compat.GPULoadStoreSpec.__init__),
        "offloading_config": parameters(compat.build_offloading_config),
        "region": [
            parameters(compat.SharedOffloadRegion.__init__)[:6],
            parameters(compat.SharedOffloadRegion.create_kv_memoryview),
            parameters(compat.SharedOffloadRegion.create_next_worker_view),
            parameters(compat.SharedOffloadRegion.cleanup),
        ],
        "region_is_one_file": "num_segments" not in inspect.getsource(compat.TieringOffloadingSpec),
        "region_path": "/dev/shm/vllm_offload_{engine_id}.mmap"
        in inspect.getsource(compat.SharedOffloadRegion.__init__),
        "connector_below": [
            issubclass(compat.OffloadingConnector, compat.KVConnectorBase_V1),
            sets(compat.OffloadingConnector, "connector_worker"),
            sets(worker.OffloadingConnectorWorker, "spec"),
        ],
        "step": {
            "metadata": names(compat.OffloadingConnectorMetadata),
            "job": names(compat.OffloadingTransferJob),
            "told": names(compat.OffloadingWorkerMetadata),
            "cached": names(CachedRequestData),
            "block_state": names(KVConnectorBlockState),
        },
        "key_groups": [
            sorted({"group_id", "tokens_per_block"} - set(names(OffloadingGroupConfig))),
            "is_eagle_group" in names(KVCacheGroupSpec),
            [_num_window_blocks(spec, 16) for spec in _SPECS] == [_window_of_vllm(spec, 16) for spec in _SPECS],
            sorted(set(re.findall(r"group_config\.(\w+)", inspect.getsource(events))) - set(dir(_KEY_GROUP))),
        ],
        "key_events": [
            parameters(compat.OffloadingEventsTracker.record_store),
            parameters(compat.OffloadingEventsTracker.record_lookup),
            parameters(compat.OffloadingEventsTracker.take_events),
        ],
        "copy_metrics": sorted(
            {
                getattr(kind, name)
                for kind in (metrics._TransferMetricName, metrics._ConnectorMetricName)
                for name in vars(kind)
                if name.isupper()
            }
            ^ {LOOKUP_SYNC_DELAY, LOOKUP_ASYNC_DELAY, ALLOCATION_FAILURE}
            ^ {f"vllm:kv_offload_{each}_{what}" for each in DIRECTIONS for what in ("bytes", "time", "size")}
        ),
        "seeded_prefill": [
            parameters(compat.platform_worker().sample_tokens),
            sets(GPUModelRunner, "input_batch", "discard_request_mask"),
            sets(InputBatch, "generators"),
            "self.discard_request_mask.np[:num_reqs]" in inspect.getsource(GPUModelRunner._bookkeeping_sync),
            "generators=self.generators" in inspect.getsource(InputBatch._make_sampling_metadata),
        ],
        "worker_meets": "distributed_init_method" in parameters(compat.platform_worker().__init__),
        "offload_limit": 'params.get("max_offload_tokens")' in inspect.getsource(offloading),
        "offload_answers": "offload_prompt_only=spec.offload_prompt_only" in inspect.getsource(offloading),
        "hit_sources": [compat.CacheHitSource.HOST.name, compat.CacheHitSource.DISK.name],
    }
