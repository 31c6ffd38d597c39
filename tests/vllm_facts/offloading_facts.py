"""What vLLM's offloading is like where RAGCache relies on it."""

from __future__ import annotations

import inspect
import re

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCacheTensor, TierFilter
from vllm.v1.kv_offload.config import OffloadingParallelConfig
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ragcache_core.vllm_plugin import compat
from ragcache_core.vllm_plugin.lower.manager import TierManager
from ragcache_core.vllm_plugin.offload.cpu_worker import CopyingWorker
from tests.vllm_facts.engine_facts import names, parameters, sets


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
        "offload_key": compat.get_offload_block_hash(b"hash" + bytes(4)) == b"hash",
        "worker": {
            name: parameters(getattr(compat.OffloadingWorker, name))
            for name in ("submit_store", "submit_load", "get_finished", "wait", "shutdown")
        },
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
        "offloading_connector": {
            name: parameters(getattr(compat.OffloadingConnector, name))
            for name in (
                "get_num_new_matched_tokens",
                "update_state_after_alloc",
                "build_connector_meta",
                "request_finished",
                "request_finished_all_groups",
                "reset_cache",
                "get_kv_connector_stats",
                "get_external_cache_hit_sources",
                "on_new_request",
                "take_events",
                "has_pending_push_work",
                "update_connector_output",
                "shutdown",
            )
        },
        "offloading_scheduler": [
            isinstance(inspect.getattr_static(compat.OffloadingConnector, "scheduler"), property),
            sets(offloading.OffloadingConnectorScheduler, "manager"),
            names(offloading.TransferJob),
        ],
        "offloading_state": {
            "states": sets(offloading.OffloadingConnectorScheduler, "_req_status", "config", "_jobs"),
            "fence": "self._current_batch_allocated_block_ids: set[int]" in whole_offloading,
            "pending": [
                "self.manager.has_pending_work()"
                in inspect.getsource(offloading.OffloadingConnectorScheduler.has_pending_push_work),
            ],
            "limits": [
                "max_offload_tokens" in offloading.RequestOffloadState.__annotations__,
                {"kv_group_configs", "blocks_per_chunk"} <= {*offloading.SchedulerOffloadConfig.__annotations__},
                "group_states" in offloading.RequestOffloadState.__annotations__,
            ],
            "group": [
                "tokens_per_chunk" in offloading.GroupOffloadConfig.__annotations__,
                "requires_cow_source" in offloading.GroupOffloadConfig.__annotations__,
                "offload_keys" in offloading.RequestGroupState.__annotations__,
                "next_stored_chunk_idx" in offloading.RequestGroupState.__annotations__,
            ],
            "running": names(compat.CachedRequestData),
        },
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
