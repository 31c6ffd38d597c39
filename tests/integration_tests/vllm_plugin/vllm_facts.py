"""Print what vLLM is like where we rely on it, as JSON; a program of its own for test_signatures.py."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields
from typing import Any

import vllm
from vllm import plugins
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, NewRequestData, SchedulerOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, MPClient
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import OffloadingParallelConfig
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ragcache_core.vllm_plugin import compat
from ragcache_core.vllm_plugin.block_pool import TreeFreeBlockQueue
from ragcache_core.vllm_plugin.cpu_worker import CopyingWorker
from ragcache_core.vllm_plugin.disk import DiskTier
from ragcache_core.vllm_plugin.document_connector import DocumentConnector
from ragcache_core.vllm_plugin.host_policy import TreeCachePolicy
from ragcache_core.vllm_plugin.request_queue import CacheAwareRequestQueue


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def methods(cls: type) -> dict[str, list[str]]:
    return {name: parameters(f) for name, f in vars(cls).items() if inspect.isfunction(f) and name[0] != "_"}


def names(cls: Any) -> list[str]:
    return [field.name for field in fields(cls)]


def sets(cls: type, *wanted: str) -> list[str]:
    """Return which of these the constructor of a class, or of one above it, sets."""
    text = "".join(inspect.getsource(c.__init__) for c in cls.__mro__ if "__init__" in vars(c) and c is not object)
    return [name for name in wanted if f"self.{name}:" in text or f"self.{name} =" in text]


def facts() -> dict[str, object]:
    """Return names, signatures and a few measured facts."""
    whole_offloading = inspect.getsource(offloading.OffloadingConnectorScheduler)
    req_data = inspect.getsource(offloading.yield_req_data)
    base = compat.KVConnectorBase_V1
    pool = compat.BlockPool(4, True, 16)
    taken = pool.get_new_blocks(1)
    pool.cached_block_hash_to_block.insert(b"hash", taken[0])
    host = CPUOffloadingManager(4, "lru")
    return {
        "version": vllm.__version__,
        "abstract": sorted(base.__abstractmethods__),
        "still_abstract": sorted(DocumentConnector.__abstractmethods__),
        "signatures": {
            name: list(inspect.signature(getattr(base, name)).parameters)
            for name in (
                "on_new_request",
                "get_num_new_matched_tokens",
                "update_state_after_alloc",
                "build_connector_meta",
                "request_finished",
                "start_load_kv",
                "save_kv_layer",
                "wait_for_layer_load",
                "wait_for_save",
            )
        },
        "requires_kv_delivery": isinstance(inspect.getattr_static(base, "requires_kv_delivery"), property),
        "hma": list(inspect.signature(compat.SupportsHMA.request_finished_all_groups).parameters),
        "main": list(inspect.signature(entry.main).parameters),
        "input": [
            sets(AsyncLLM, "input_processor"),
            parameters(compat.InputProcessor.process_inputs)[:4],
            "self.input_processor.process_inputs(" in inspect.getsource(AsyncLLM.add_request),
            parameters(compat.MsgpackEncoder.encode),
            "self.encoder = MsgpackEncoder(" in inspect.getsource(MPClient),
        ],
        "chat_takes_metadata": "kv_transfer_params" in ChatCompletionRequest.model_fields,
        "completion_takes_metadata": "kv_transfer_params" in CompletionRequest.model_fields,
        "chat_takes_token_ids": "prompt_token_ids" in inspect.getsource(ChatCompletionRequest),
        "plugin_groups": [
            plugins.DEFAULT_PLUGINS_GROUP,
            plugins.PLATFORM_PLUGINS_GROUP,
            plugins.IO_PROCESSOR_PLUGINS_GROUP,
            plugins.STAT_LOGGER_PLUGINS_GROUP,
        ],
        "endpoint_group": plugins.ENDPOINT_PLUGINS_GROUP,
        "free_queue": methods(compat.FreeKVCacheBlockQueue),
        "our_free_queue": sorted(methods(TreeFreeBlockQueue)),
        "pool": {
            name: parameters(getattr(compat.BlockPool, name))
            for name in ("cache_full_blocks", "reset_prefix_cache", "_remove_cached_block_hashes")
        },
        "pool_attributes": [
            name
            for name in ("free_block_queue", "cached_block_hash_to_block", "blocks", "null_block")
            if hasattr(pool, name)
        ],
        "cached_copies": [b.block_id for b in compat.cached_copies(pool, b"hash")] == [taken[0].block_id],
        "block": [name for name in ("block_id", "ref_cnt", "block_hash", "is_null") if hasattr(taken[0], name)],
        "hash_of_block": compat.get_block_hash(b"hash" + bytes(4)) == b"hash",
        "scheduler_sets": sets(compat.Scheduler, "connector", "kv_cache_config", "kv_cache_manager"),
        "scheduler_output": [
            *(parameters(c.update_from_output) for c in (compat.Scheduler, compat.AsyncScheduler)),
            {"sampled_token_ids", "req_id_to_index"} <= set(names(ModelRunnerOutput)),
        ],
        "queue": methods(compat.RequestQueue),
        "queue_is_complete": sorted(CacheAwareRequestQueue.__abstractmethods__),
        "scheduler_queue": sets(
            compat.Scheduler,
            *("policy", "waiting", "kv_holding_waiting", "deferred_waiting", "running", "requests"),
            *("_inflight_prefills", "max_num_scheduled_tokens", "max_num_encoder_input_tokens"),
            "need_mamba_block_aligned_split",
        ),
        "scheduler_steps": {
            name: parameters(getattr(compat.Scheduler, name))
            for name in (
                "schedule",
                "_preempt_request",
                "_free_request_blocks",
                "_handle_blocked_waiting_request",
            )
        },
        "schedule": [
            text in inspect.getsource(compat.Scheduler.schedule)
            for text in (
                "token_budget = self.max_num_scheduled_tokens",
                "request_queue.peek_request()",
                "if not request_queue or",
                "preempted_req = self.running[-1]",
            )
        ],
        "scheduled": "num_scheduled_tokens" in names(SchedulerOutput),
        "request": sets(
            Request,
            *("num_prompt_tokens", "num_computed_tokens", "num_output_placeholders", "status", "num_preemptions"),
            "arrival_time",
        ),
        "request_reads": [
            sets(
                Request,
                *("kv_transfer_params", "block_hashes", "prompt_token_ids"),
                *("prompt_embeds", "lora_request", "cache_salt", "mm_features"),
            ),
            isinstance(inspect.getattr_static(Request, "num_tokens_with_spec"), property),
        ],
        "request_states": [compat.RequestStatus.PREEMPTED.name, compat.RequestStatus.WAITING_FOR_STREAMING_REQ.name],
        "utility": [
            "method(*self._convert_msgspec_args(method, args))" in inspect.getsource(EngineCoreProc),
            parameters(AsyncMPClient.call_utility_async),
            sets(compat.EngineCore, "scheduler"),
            sets(AsyncLLM, "engine_core"),
        ],
        "scheduler_cls": [
            parameters(SchedulerConfig.get_scheduler_cls),
            {"scheduler_cls", "async_scheduling"} <= set(names(SchedulerConfig)),
        ],
        "lull": [
            parameters(compat.Scheduler.get_grammar_bitmask),
            [
                re.findall(r"scheduler\.schedule\(|\.execute_model\(|\.get_grammar_bitmask\(|future\.result\(", source)
                for source in map(inspect.getsource, (compat.EngineCore.step, compat.EngineCore.step_with_batch_queue))
            ],
        ],
        "scheduler_stats": "self.connector.get_kv_connector_stats()" in inspect.getsource(compat.Scheduler),
        "manager_sets": sets(KVCacheManager, "block_pool"),
        "kv_cache_config": sorted({"num_blocks", "kv_cache_tensors", "kv_cache_groups"} & set(names(KVCacheConfig))),
        "kv_cache_tensor": "size" in names(KVCacheTensor),
        "block_sizes": parameters(compat.resolve_kv_cache_block_sizes),
        "seed": [
            compat.hash_seed("sha256") is not None,
            parameters(kv_cache_utils.resolve_none_hash_seed),
            len(kv_cache_utils._NON_CRYPTO_HASH_FUNCTIONS) > 0,
            "prefix_caching_hash_algo" in names(CacheConfig),
        ],
        "policy": {
            name: parameters(getattr(compat.CachePolicy, name))
            for name in (
                "__init__",
                "get",
                "insert",
                "remove",
                "touch",
                "on_store_miss",
                "on_request_finished",
                "evict",
                "clear",
                "mark_evictable",
                "mark_non_evictable",
            )
        },
        "policy_is_complete": [
            sorted(TreeCachePolicy.__abstractmethods__),
            sorted(set(methods(compat.CachePolicy)) - set(methods(TreeCachePolicy))),
        ],
        "policy_by_name": parameters(CachePolicyFactory.get_cache_policy_cls),
        "host": [
            name
            for name in ("_policy", "_num_allocated_chunks", "_free_list", "_num_evictable_cache_chunks")
            if hasattr(host, name)
        ],
        "host_store": [
            parameters(compat.CPUPrimaryTierOffloadingManager.prepare_store),
            parameters(compat.CPUPrimaryTierOffloadingManager.complete_store),
            parameters(compat.CPUPrimaryTierOffloadingManager._get_num_free_chunks),
        ],
        "host_view": parameters(CPUPrimaryTierOffloadingManager.get_kv_memoryview),
        "chunk_status": [compat.ChunkStatus(3).chunk_id, compat.ChunkStatus(3).ref_cnt],
        "tiering_sets": sets(compat.TieringOffloadingManager, "primary_tier", "secondary_tiers"),
        "spec_sets": sets(
            compat.TieringOffloadingSpec,
            "num_chunks",
            "kv_bytes_per_chunk",
            "cpu_page_size_per_worker",
            "_manager",
            "_engine_id",
            "extra_config",
            "config",
            "blocks_per_chunk",
            "tokens_per_hash",
            "eviction_policy",
            "cache_policy_module_path",
            "secondary_tier_configs",
            "_scheduler_mmap",
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
        "tier_is_complete": sorted(DiskTier.__abstractmethods__),
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
                "shutdown",
            )
        },
        "tier_reads": [
            isinstance(inspect.getattr_static(compat.SecondaryTierManager, "block_size_bytes"), property),
            [compat.LookupResult.HIT.name, compat.LookupResult.MISS.name, compat.Medium.STORAGE.name],
            parameters(compat.TieringOffloadingManager.on_schedule_end),
        ],
        "tier_factory": "module_path" in inspect.getsource(SecondaryTierFactory),
        "job": names(compat.TransferJob),
        "result": names(compat.JobResult),
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
        "worker_meta": "kv_connector_worker_meta" in names(KVConnectorOutput),
        "gpu_spec": parameters(compat.GPULoadStoreSpec.__init__),
        "offloading_config": parameters(compat.build_offloading_config),
        "region": [
            parameters(compat.SharedOffloadRegion.__init__)[:6],
            parameters(compat.SharedOffloadRegion.create_next_worker_view),
            parameters(compat.SharedOffloadRegion.cleanup),
        ],
        "region_file": sets(compat.SharedOffloadRegion, "fd"),
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
            )
        },
        "offloading_scheduler": [
            isinstance(inspect.getattr_static(compat.OffloadingConnector, "scheduler"), property),
            sets(offloading.OffloadingConnectorScheduler, "manager"),
            names(offloading.TransferJob),
        ],
        "offloading_progress": {
            "reads": "scheduler_output.num_scheduled_tokens,\n"
            in inspect.getsource(offloading.OffloadingConnectorScheduler._build_store_jobs),
            "shown": {"req_ids", "num_computed_tokens", "new_block_ids"} <= set(names(CachedRequestData)),
            "states": sets(offloading.OffloadingConnectorScheduler, "_req_status", "config", "_jobs"),
            "news": sorted(set(re.findall(r"self\.(_current_batch_\w+)", whole_offloading))),
            "step": sorted(set(re.findall(r"scheduler_output\.(\w+)", whole_offloading))),
            "req_data": sorted(set(re.findall(r"(?:scheduler_output|cached_reqs)\.(\w+)", req_data))),
            "block_state": "boundary_state_offloads" in names(KVConnectorBlockState),
            "end": [list(compat.ScheduleEndContext._fields), names(compat.OffloadingConnectorMetadata)],
            "end_of_manager": sorted(
                set(re.findall(r"self\.(\w+)", inspect.getsource(compat.TieringOffloadingManager.on_schedule_end)))
            ),
            "pending": [
                sorted(set(re.findall(r"self\.(\w+)", inspect.getsource(pending))))
                for pending in (
                    offloading.OffloadingConnectorScheduler.has_pending_push_work,
                    compat.TieringOffloadingManager.has_pending_work,
                )
            ],
            "limits": [
                "max_offload_tokens" in offloading.RequestOffloadState.__annotations__,
                "offload_prompt_only" in offloading.SchedulerOffloadConfig.__annotations__,
                "kv_group_configs" in offloading.SchedulerOffloadConfig.__annotations__,
                {"group_states", "req"} <= offloading.RequestOffloadState.__annotations__.keys(),
            ],
            "group": [
                "next_stored_chunk_idx" in offloading.RequestGroupState.__annotations__,
                "tokens_per_chunk" in offloading.GroupOffloadConfig.__annotations__,
                "offload_keys" in offloading.RequestGroupState.__annotations__,
            ],
        },
        "put_off": [
            "num_tokens_after_batch = req.num_computed_tokens + num_scheduled_tokens"
            in inspect.getsource(offloading.OffloadingConnectorScheduler._build_store_jobs),
            "request.num_computed_tokens += num_scheduled_token"
            in inspect.getsource(compat.Scheduler._update_after_schedule),
            sets(
                offloading.OffloadingConnectorScheduler, "_sliding_window_groups", "_block_id_to_pending_jobs", "config"
            ),
            {"block_ids", "num_computed_tokens"} <= set(names(NewRequestData)),
        ],
        "late_stores": [
            parameters(OffloadingConnectorWorker.prepare_store_kv),
            "self._unsubmitted_store_jobs.append" in inspect.getsource(OffloadingConnectorWorker.prepare_store_kv),
            "self.worker.submit_store" in inspect.getsource(OffloadingConnectorWorker.handle_preemptions),
            "get_kv_transfer_group().handle_preemptions(" in inspect.getsource(GPUModelRunner.execute_model),
            sets(compat.OffloadingConnector, "connector_worker"),
            sets(OffloadingConnectorWorker, "worker"),
        ],
        "spare_time": [
            parameters(compat.platform_worker().execute_model),
            parameters(compat.platform_worker().sample_tokens),
            "model_output = self.model_executor.sample_tokens(" in inspect.getsource(EngineCore.step),
        ],
        "quiet_worker": [
            parameters(compat.platform_worker().initialize_from_config),
            parameters(compat.KVConnectorModelRunnerMixin.maybe_get_kv_connector_output),
            "self.maybe_get_kv_connector_output(" in inspect.getsource(GPUModelRunner.execute_model),
            "if not kv_output:\n                continue" in inspect.getsource(KVOutputAggregator.aggregate),
            "if kv_connector_output:" in inspect.getsource(compat.Scheduler.update_from_output),
        ],
        "offload_limit": 'params.get("max_offload_tokens")' in inspect.getsource(offloading),
        "hit_sources": [compat.CacheHitSource.HOST.name, compat.CacheHitSource.DISK.name],
        "prom": [
            parameters(compat.KVConnectorPromMetrics.__init__),
            sets(compat.KVConnectorPromMetrics, "_counter_cls", "_gauge_cls", "per_engine_labelvalues"),
            parameters(compat.KVConnectorPromMetrics.observe),
        ],
        "stats": sorted(compat.KVConnectorStats.__dataclass_fields__),
        "stats_methods": sorted(methods(compat.KVConnectorStats)),
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
