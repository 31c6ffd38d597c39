"""What RAGCache relies on inside vLLM's offloading."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm_facts.conftest import Since


@pytest.fixture(scope="module")
def facts(all_facts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = all_facts["offloading"]
    return found


def test_the_manager_of_tiers_answers_what_vllms_offloading_asks(facts: dict[str, Any], since: Since) -> None:
    assert facts["manager_is_complete"] == [], "implement the new abstract methods in lower/manager.py"
    assert facts["manager_asks"] == [], "vLLM's scheduler of copies asks for these: follow it in lower/manager.py"
    assert facts["manager"] == {
        "lookup": ["self", "key", "req_context"],
        "get_load_source": ["self", "key", "req_context"],
        "prepare_load": ["self", "keys", "req_context"],
        "touch": ["self", "keys", "req_context"],
        "complete_load": ["self", "keys", "req_context"],
        "prepare_store": ["self", "keys", "req_context"],
        "complete_store": ["self", "keys", "req_context", "success"],
        "on_new_request": ["self", "req_context"],
        "on_request_finished": ["self", "req_context"],
        "take_events": ["self"],
        "on_schedule_end": ["self", "context"],
        "has_pending_work": ["self"],
        "reset_cache": ["self"],
        "get_stats": ["self"],
        "shutdown": ["self"],
    }, "follow the change in lower/manager.py"
    assert facts["host_event"] == [], "HostTier makes events with them"
    assert facts["host_metrics"] == [
        *("CPU_ALLOCATION_SIZE", "CPU_CACHE_READ_USAGE_PERC", "CPU_CACHE_USAGE_PERC", "CPU_CACHE_WRITE_USAGE_PERC"),
        "STORES_SKIPPED",
    ], "HostStats tells all but the last: nothing is skipped by a threshold"
    assert facts["tiering_metrics"] == [
        *("ACTIVE_CASCADE_JOBS", "ACTIVE_PROMOTION_JOBS", "BACKPRESSURE_BLOCKS_DROPPED"),
        *("BACKPRESSURE_STORES_DROPPED", "BACKPRESSURE_STORE_LATENCY_EMA", "CASCADE_JOB_FAILURES", "CHUNK_HITS"),
        *("CHUNK_QUERIES", "LOOKUP_ASYNC_DELAY", "LOOKUP_SYNC_DELAY", "PRIMARY_READ_USAGE_PERC"),
        *("PRIMARY_WRITE_USAGE_PERC", "PROMOTION_ALLOCATION_FAILURES", "PROMOTION_JOB_FAILURES"),
        *since("0.33", "PROMOTION_LATENCY"),
        *("READ_BYTES", "READ_TIME", "WRITE_BYTES", "WRITE_TIME"),
    ], "JobStats reports lower tiers under these names"


def test_the_offloading_spec_has_what_ours_builds_from(facts: dict[str, Any]) -> None:
    assert facts["spec_sets"] == [
        *("num_chunks", "kv_bytes_per_chunk", "cpu_page_size_per_worker", "extra_config"),
        *("config", "kv_events_config", "blocks_per_chunk", "tokens_per_hash"),
        "secondary_tier_configs",
    ], "RAGCacheSpec uses them: find their new names"
    assert facts["spec"] == [["self"], ["self", "kv_caches"]], "follow it in RAGCacheSpec"
    missing = {"groups", "worker_kv_bytes_per_block", "extra_config", "engine_id", "model", "cache", "parallel"} | {
        "kv_cache_layout"
    }
    missing -= set(facts["offload_config"])
    assert not missing, "kv_identity() puts them into the identity of a cache on disk: find their new names"
    assert facts["identity"] == [[], [], [], [], [], True, [], True, True], (
        "identity.py puts these into the identity of a cache on disk: find their new names"
    )


def test_vllms_own_tiers_take_what_ours_asks(facts: dict[str, Any]) -> None:
    assert facts["tier_init"] == [
        *("self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"),
    ], "RAGCacheSpec has vLLM's factory make them"
    assert facts["tier"] == {
        "on_new_request": ["self", "req_context"],
        "lookup": ["self", "key", "req_context"],
        "submit_store": ["self", "job_metadata"],
        "submit_load": ["self", "job_metadata"],
        "get_finished_jobs": ["self"],
        "has_pending_work": ["self"],
        "drain_jobs": ["self"],
        "on_schedule_end": ["self", "context"],
        "on_request_finished": ["self", "req_context"],
        "serve_external_requests": ["self", "parent"],
        "take_events": ["self"],
        "get_stats": ["self"],
        "shutdown": ["self"],
    }, "follow the change in lower/vllm_tier.py"
    assert facts["tier_reads"] == [
        *(True, ["HIT", "MISS", "STORAGE"], True, ["self", "medium", "locality"]),
    ], "VLLMTier reads the first; TierManager asks with the last two which tiers a request may load from"
    assert facts["req_context"] == ["kv_transfer_params", "req_id"], (
        "HostTier reads them: without the first, what an adapter computed would outlive the engine"
    )
    assert facts["tier_factory"], "a tier of neither vLLM nor RAGCache is named by type and module_path"
    assert facts["job"] == ["job_id", "keys", "chunk_ids", "is_promotion", "req_context", "submit_time"], (
        "VLLMTier makes jobs"
    )
    assert facts["result"] == ["job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"], (
        "VLLMTier reads results"
    )
    assert facts["offload_key"], "a key is no longer hash + 4 bytes of group: see KVGroups.offload_keys()"


def test_the_copying_worker_stands_in_for_vllms(facts: dict[str, Any], since: Since) -> None:
    assert facts["worker_is_complete"] == [], "implement the new abstract methods in cpu_worker.py"
    assert facts["worker"] == {
        "submit_store": ["self", "job_id", "src_spec", "dst_spec"],
        "submit_load": ["self", "job_id", "src_spec", "dst_spec", *since("0.33", "expedited")],
        "get_finished": ["self"],
        "wait": ["self", "job_ids"],
        "shutdown": ["self"],
    }, "follow the change in cpu_worker.py"
    assert facts["copies"] == [*("src_ptrs", "dst_ptrs", "sizes"), "is_src_access_order_any"], (
        "DeviceCopies calls it: no public function of vLLM copies between given addresses"
    )
    assert facts["transfer_result"] == ["job_id", "success", "transfer_size", "transfer_time"], "see _finish()"
    assert facts["caches"] == ["tensors", "group_data_refs"], "CopyingWorker makes its views from them"
    assert facts["cache"] == [["page_size_bytes", "tensor"], True], "and copies rows of them, for each layer's ref"
    assert facts["gpu_spec"] == ["self", "block_ids", "group_sizes", "block_indices"], "see _transfers()"
    assert facts["offloading_config"] == ["vllm_config", "kv_cache_config"], (
        "spec.why_no_host() asks with it how many blocks a host tier would hold: find the new way"
    )
    assert facts["region"] == [
        ["self", "engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size"],
        ["self"],
        ["self", "tensor_page_size"],
        ["self"],
    ], "RAGCacheSpec makes the region, HostTier and CopyingWorker its views"
    assert facts["region_is_one_file"], "runtime/shared_memory.py keeps and restores one file of each region"
    assert facts["region_path"], "runtime/shared_memory.py lays host memory, by a link, where vLLM looks for it"


def test_messages_to_and_from_workers_are_those_of_vllms_offloading(facts: dict[str, Any], since: Since) -> None:
    assert facts["connector_below"] == [True, ["connector_worker"], ["spec"]], (
        "RAGCacheConnector has vLLM's connector copy on each worker, and reads whether its spec loads by layer"
    )
    assert facts["step"] == {
        "metadata": ["load_jobs", "store_jobs", "jobs_to_flush"],
        "job": ["req_id", "src_spec", "dst_spec", *since("0.33", "sync")],
        "told": ["completed_jobs", "transfer_stats"],
        "cached": [
            *("req_ids", "resumed_req_ids", "new_token_ids", "all_token_ids", "new_block_ids"),
            *("num_computed_tokens", "num_output_tokens"),
        ],
        "block_state": ["req_ids", "resolve_block_ids", "boundary_state_offloads"],
    }, "CopyScheduler makes the first two and reads the others"
    assert facts["key_groups"] == [[], True, True, []], "read_key_groups() reads them; vLLM's KV events read ours"
    assert facts["key_events"] == [
        ["self", "req", "group_config", "chunk_idx", "offload_key"],
        ["self", "req", "group_config", "chunk_idx", "offload_key"],
        ["self", "events"],
    ], "CopyScheduler has the payloads of KV events built by vLLM"
    assert facts["copy_metrics"] == [], "CopyStats counts under these names"


def test_prompts_and_limits_are_as_the_tiers_need_them(facts: dict[str, Any]) -> None:
    assert facts["seeded_prefill"] == [
        *(["self", "grammar_output"], ["input_batch", "discard_request_mask"], ["generators"], True, True),
    ], "SparingSeeds takes the generators of prompts that are cut out while vLLM samples"
    assert facts["worker_meets"], "PrivateRendezvous moves the file at which workers meet first"
    assert facts["offload_limit"], "RAGCacheConnector says by max_offload_tokens how much of a prompt is stored"
    assert facts["offload_answers"], "RAGCacheSpec has answers stored as well, by its offload_prompt_only"
    assert facts["hit_sources"] == ["HOST", "DISK"], "connector._TIER_OF_SOURCE tells the tiers of a hit apart"
