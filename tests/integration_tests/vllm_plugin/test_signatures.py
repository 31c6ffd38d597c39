"""What we rely on inside vLLM 0.32. If one of these fails after an upgrade, it says what the name is for.

The names live in ``ragcache_core/vllm_plugin/compat.py``; they are read in a child process, because importing vLLM
takes seconds and sets process-wide state.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def vllm_facts() -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.integration_tests.vllm_plugin.vllm_facts"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    facts: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return facts


def test_this_is_the_supported_vllm(vllm_facts: dict[str, object]) -> None:
    assert str(vllm_facts["version"]).startswith("0.32"), "support a new vLLM in compat.py, then change SUPPORTED_VLLM"


def test_the_connector_has_every_method_that_vllm_asks_for(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["still_abstract"] == [], "implement the new abstract methods in document_connector.py"


def test_the_connectors_methods_have_the_arguments_we_implement(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["signatures"] == {
        "on_new_request": ["self", "request"],
        "get_num_new_matched_tokens": ["self", "request", "num_computed_tokens"],
        "update_state_after_alloc": ["self", "request", "blocks", "num_external_tokens"],
        "build_connector_meta": ["self", "scheduler_output"],
        "request_finished": ["self", "request", "block_ids"],
        "start_load_kv": ["self", "forward_context", "kwargs"],
        "save_kv_layer": ["self", "layer_name", "kv_layer", "attn_metadata", "kwargs"],
        "wait_for_layer_load": ["self", "layer_name"],
        "wait_for_save": ["self"],
    }, "follow the change in document_connector.py and connector.py"
    assert vllm_facts["hma"] == ["self", "request", "block_ids"], "follow it in DocumentConnector"
    assert vllm_facts["requires_kv_delivery"], "DocumentConnector overrides it: a lost transfer is no failure"


def test_the_server_program_is_where_we_start_it(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["main"] == [], "api_server.run_api_server() calls it without arguments"


def test_requests_carry_our_metadata_and_token_ids(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["chat_takes_metadata"], "wire.py needs another channel"
    assert vllm_facts["completion_takes_metadata"], "wire.py needs another channel"
    assert vllm_facts["chat_takes_token_ids"], "plan_chat sends the prompt's ids in kv_transfer_params"


def test_a_request_passes_the_input_processor_before_it_is_sent(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["input"] == [
        ["input_processor"],
        ["self", "request_id", "prompt", "params"],
        True,
        ["self", "obj"],
        True,
    ], "SendingInputProcessor sees metadata there before it is encoded: find the new place, and the new encoder"


def test_vllm_looks_for_plugins_where_we_register_ours(vllm_facts: dict[str, object]) -> None:
    from ragcache_core.vllm_plugin import api_server

    assert vllm_facts["endpoint_group"] == "vllm.endpoint_plugins", "rename our entry point's group in pyproject.toml"
    assert sorted(vllm_facts["plugin_groups"]) == sorted(api_server._PLUGIN_GROUPS), (
        "follow it in api_server._PLUGIN_GROUPS: naming our plugin in VLLM_PLUGINS must not switch others off"
    )
    (point,) = [p for p in entry_points(group="vllm.endpoint_plugins") if p.name == api_server.ENDPOINT_PLUGIN]
    assert point.value == "ragcache_core.vllm_plugin.routes:RAGCacheEndpoint", "install the package again"


def test_the_block_pool_is_the_one_that_ours_takes_over(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["free_queue"] == {
        "popleft": ["self"],
        "popleft_n": ["self", "n"],
        "remove": ["self", "block"],
        "append": ["self", "block"],
        "prepend_n": ["self", "blocks"],
        "append_n": ["self", "blocks"],
        "get_all_free_blocks": ["self"],
        "iter_blocks_after": ["self", "cursor"],
    }, "override what is new or different in TreeFreeBlockQueue: the base class's linked list is empty there"
    assert set(vllm_facts["free_queue"]) <= set(vllm_facts["our_free_queue"]), "override it in TreeFreeBlockQueue"
    assert vllm_facts["pool"] == {
        "cache_full_blocks": [
            *("self", "request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id"),
            "block_mask",
        ],
        "reset_prefix_cache": ["self"],
        "_remove_cached_block_hashes": ["self", "block"],
    }, "follow the change in TreeBlockPool, which learns and forgets what blocks hold there"
    assert vllm_facts["pool_attributes"] == [
        *("free_block_queue", "cached_block_hash_to_block", "blocks", "null_block"),
    ], "TreeBlockPool.take_over() replaces free_block_queue of a pool that is built: find its new name"
    assert vllm_facts["cached_copies"], "compat.cached_copies() reads BlockHashToBlockMap._cache: find its new name"
    assert vllm_facts["block"] == ["block_id", "ref_cnt", "block_hash", "is_null"], "follow it in block_pool.py"
    assert vllm_facts["hash_of_block"], "a block's hash is no longer key + 4 bytes of group: follow it in block_pool.py"


def test_the_scheduler_is_where_ours_stands(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["scheduler_sets"] == ["connector", "kv_cache_config", "kv_cache_manager"], (
        "_TreeScheduling.__init__() reads them after vLLM's: find their new names"
    )
    assert vllm_facts["manager_sets"] == ["block_pool"], "scheduler.py takes over kv_cache_manager.block_pool"
    assert vllm_facts["scheduler_output"] == [*([["self", "scheduler_output", "model_runner_output"]] * 2), True], (
        "_TreeScheduling notes a request's first token there: follow it, or find where tokens arrive"
    )
    assert vllm_facts["scheduler_cls"] == [["self"], True], "--scheduler-cls takes RAGCacheScheduler: find the new door"
    step = ["scheduler.schedule(", ".execute_model(", ".get_grammar_bitmask(", "future.result("]
    assert vllm_facts["lull"] == [["self", "scheduler_output"], [step, [*step, ".get_grammar_bitmask("]]], (
        "use_lull() is called there, because the model computes a step then and nobody waits: find the new moment"
    )
    assert vllm_facts["scheduler_stats"], "our figures leave with get_kv_connector_stats(): find the new way out"


def test_the_scheduler_asks_its_queue_what_ours_answers(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["queue"] == {
        "add_request": ["self", "request"],
        "pop_request": ["self"],
        "peek_request": ["self"],
        "prepend_request": ["self", "request"],
        "prepend_requests": ["self", "requests"],
        "remove_request": ["self", "request"],
        "remove_requests": ["self", "requests"],
    }, "follow the change in CacheAwareRequestQueue"
    assert vllm_facts["queue_is_complete"] == [], "implement the new abstract methods in CacheAwareRequestQueue"


def test_the_scheduler_makes_room_as_we_ask(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["scheduler_queue"] == [
        *("policy", "waiting", "kv_holding_waiting", "deferred_waiting", "running", "requests"),
        *("_inflight_prefills", "max_num_scheduled_tokens", "max_num_encoder_input_tokens"),
        "need_mamba_block_aligned_split",
    ], "_TreeScheduling takes over the queue, and preempts speculation: find their new names"
    assert vllm_facts["scheduler_steps"] == {
        "schedule": ["self", "throttle_prefills"],
        "_preempt_request": ["self", "request", "timestamp", "drop_stale_output"],
        "_free_request_blocks": ["self", "request"],
        "_handle_blocked_waiting_request": ["self", "request"],
    }, "_TreeScheduling calls them for speculative requests as vLLM does for others: follow the change"
    assert vllm_facts["schedule"] == [True] * 4, (
        "a step's tokens are bounded by max_num_scheduled_tokens, the queue is peeked and asked for its truth value, "
        "and the last running request is the first victim: see where these went"
    )
    assert vllm_facts["scheduled"], "speculative tokens are counted from a step's num_scheduled_tokens"
    assert vllm_facts["request"] == [
        *("num_prompt_tokens", "num_computed_tokens", "num_output_placeholders", "status", "num_preemptions"),
        "arrival_time",
    ], "_TreeScheduling reads them, the connector the last one: find their new names"
    assert vllm_facts["request_reads"] == [
        [
            *("kv_transfer_params", "block_hashes", "prompt_token_ids"),
            *("prompt_embeds", "lora_request", "cache_salt", "mm_features"),
        ],
        True,
    ], "the connector reads them of a request, the scheduler its num_tokens_with_spec: find their new names"
    assert vllm_facts["request_states"] == ["PREEMPTED", "WAITING_FOR_STREAMING_REQ"], "see request_queue.py"


def test_what_we_ask_of_the_scheduler_reaches_it_as_a_utility_call(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["utility"] == [True, ["self", "method", "args"], ["scheduler"], ["engine_core"]], (
        "compat.attach_utilities() adds methods to EngineCore, others there call them: find the new way"
    )


def test_the_kv_cache_says_how_large_its_blocks_are(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["kv_cache_config"] == ["kv_cache_groups", "kv_cache_tensors", "num_blocks"], (
        "compat.kv_bytes_per_block() reads them"
    )
    assert vllm_facts["kv_cache_tensor"], "compat.kv_bytes_per_block() takes a tensor's size for the allocation's"
    assert vllm_facts["block_sizes"] == ["kv_cache_config", "vllm_config"], "DocumentConnector asks for tokens_per_hash"
    assert vllm_facts["seed"] == [True, ["hash_fn"], True, True], (
        "compat.hash_seed() says whether another start finds the same keys: without it no cache on disk may be shared"
    )


def test_the_host_tiers_policy_is_asked_what_ours_answers(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["policy"] == {
        "__init__": ["self", "cache_capacity"],
        "get": ["self", "key"],
        "insert": ["self", "key", "chunk"],
        "remove": ["self", "key"],
        "touch": ["self", "keys", "req_context"],
        "on_store_miss": ["self", "keys", "req_context"],
        "on_request_finished": ["self", "key_groups", "insertion_only_keys", "reused_keys", "req_context"],
        "evict": ["self", "n", "protected"],
        "clear": ["self"],
        "mark_evictable": ["self", "key"],
        "mark_non_evictable": ["self", "key"],
    }, "follow the change in host_policy.py"
    assert vllm_facts["policy_is_complete"] == [[], []], "answer the new hooks in TreeCachePolicy"
    assert vllm_facts["policy_by_name"] == ["name", "module_path"], "arguments.py names TreeCachePolicy and its module"
    assert vllm_facts["host"] == ["_policy", "_num_allocated_chunks", "_free_list", "_num_evictable_cache_chunks"], (
        "compat_offloading.host_policy_of() and compat_offloading.adopt_chunks() need them"
    )
    assert vllm_facts["host_store"] == [
        ["self", "keys", "req_context"],
        ["self", "keys", "req_context", "success"],
        ["self"],
    ], "follow it in SelectiveHostTier"
    assert vllm_facts["host_view"] == ["self"], "offload.py restores host memory through it"
    assert vllm_facts["chunk_status"] == [3, -1], "a new chunk is not ready: adopt_chunks() sets its ref_cnt to 0"
    assert vllm_facts["tiering_sets"] == ["primary_tier", "secondary_tiers"], (
        "compat_offloading.host_policy_of() and RAGCacheConnector.reset_cache() reach the tiers through them"
    )


def test_the_offloading_spec_has_what_ours_builds_from(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["spec_sets"] == [
        *("num_chunks", "kv_bytes_per_chunk", "cpu_page_size_per_worker", "_manager", "_engine_id", "extra_config"),
        *("config", "blocks_per_chunk", "tokens_per_hash"),
        *("eviction_policy", "cache_policy_module_path", "secondary_tier_configs", "_scheduler_mmap"),
    ], "RAGCacheSpec uses them: find their new names"
    assert vllm_facts["spec"] == [["self"], ["self", "kv_caches"]], "follow it in RAGCacheSpec"
    missing = {"groups", "worker_kv_bytes_per_block", "extra_config", "engine_id", "model", "cache", "parallel"} | {
        "kv_cache_layout"
    }
    missing -= set(vllm_facts["offload_config"])
    assert not missing, "kv_identity() puts them into the identity of a cache on disk: find their new names"
    assert vllm_facts["identity"] == [[], [], [], [], [], True, [], True, True], (
        "identity.py puts these into the identity of a cache on disk: find their new names"
    )


def test_the_disk_tier_is_asked_what_ours_answers(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["tier_init"] == [
        *("self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"),
    ], "follow it in DiskTier.__init__()"
    assert vllm_facts["tier_is_complete"] == [], "implement the new abstract methods in disk.py"
    assert vllm_facts["tier"] == {
        "on_new_request": ["self", "req_context"],
        "lookup": ["self", "key", "req_context"],
        "submit_store": ["self", "job_metadata"],
        "submit_load": ["self", "job_metadata"],
        "get_finished_jobs": ["self"],
        "has_pending_work": ["self"],
        "drain_jobs": ["self"],
        "on_schedule_end": ["self", "context"],
        "shutdown": ["self"],
    }, "follow the change in disk.py: of a hook that has another name it would never hear"
    assert vllm_facts["tier_reads"] == [True, ["HIT", "MISS", "STORAGE"], ["self", "context"]], (
        "DiskTier reads the first and answers with the second; compat_offloading.end_quiet_step() calls the third"
    )
    assert vllm_facts["tier_factory"], "arguments.py names DiskTier by type and module_path: find the new way"
    assert vllm_facts["job"] == ["job_id", "keys", "chunk_ids", "is_promotion", "req_context", "submit_time"], (
        "DiskTier reads jobs"
    )
    assert vllm_facts["result"] == ["job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"], (
        "DiskTier makes results"
    )
    assert vllm_facts["offload_key"], "a key is no longer hash + 4 bytes of group: see host_policy.FIRST_GROUP"


def test_the_copying_worker_stands_in_for_vllms(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["worker_is_complete"] == [], "implement the new abstract methods in cpu_worker.py"
    assert vllm_facts["worker"] == {
        "submit_store": ["self", "job_id", "src_spec", "dst_spec"],
        "submit_load": ["self", "job_id", "src_spec", "dst_spec"],
        "get_finished": ["self"],
        "wait": ["self", "job_ids"],
        "shutdown": ["self"],
    }, "follow the change in cpu_worker.py"
    assert vllm_facts["transfer_result"] == ["job_id", "success", "transfer_size", "transfer_time"], "see _finish()"
    assert vllm_facts["caches"] == ["tensors", "group_data_refs"], "CopyingWorker makes its views from them"
    assert vllm_facts["cache"] == [["page_size_bytes", "tensor"], True], "and copies rows of them, for each layer's ref"
    assert vllm_facts["gpu_spec"] == ["self", "block_ids", "group_sizes", "block_indices"], "see _transfers()"
    assert vllm_facts["offloading_config"] == ["vllm_config", "kv_cache_config"], (
        "offload.why_no_host() asks with it how many blocks a host tier would hold: find the new way"
    )
    assert vllm_facts["region"] == [
        ["self", "engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size"],
        ["self", "tensor_page_size"],
        ["self"],
    ], "RAGCacheSpec.get_worker() makes the region, CopyingWorker its views"
    assert vllm_facts["region_file"] == ["fd"], "RAGCacheSpec keeps the file that is mapped under another name as well"
    assert vllm_facts["region_path"], "client/shared_memory.py sweeps and keeps these files by their names"


def test_the_offloading_connector_is_the_one_that_ours_extends(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["offloading_connector"] == {
        "get_num_new_matched_tokens": ["self", "request", "num_computed_tokens"],
        "update_state_after_alloc": ["self", "request", "blocks", "num_external_tokens"],
        "build_connector_meta": ["self", "scheduler_output"],
        "request_finished": ["self", "request", "block_ids"],
        "request_finished_all_groups": ["self", "request", "block_ids"],
        "reset_cache": ["self"],
        "get_kv_connector_stats": ["self"],
        "get_external_cache_hit_sources": ["self", "request", "num_external_tokens"],
        "on_new_request": ["self", "request"],
        "take_events": ["self"],
    }, "follow the change in RAGCacheConnector"
    assert vllm_facts["offloading_scheduler"] == [True, ["manager"], ["req_id", "src_spec", "dst_spec"]], (
        "RAGCacheConnector reads scheduler.manager, and counts the bytes of store_jobs"
    )
    assert vllm_facts["offloading_progress"] == {
        "reads": True,
        "shown": True,
        "states": ["_req_status", "config", "_jobs"],
        "pending": [["_jobs", "manager"], ["_jobs", "_req_state", "secondary_tiers"]],
        "limits": [True, True, True, True],
        "group": [True, True, True],
        "news": ["_current_batch_allocated_block_ids", "_current_batch_jobs_to_flush", "_current_batch_load_jobs"],
        "step": [
            "finished_req_ids",
            "kv_cache_block_copies",
            "kv_connector_block_state",
            "num_scheduled_tokens",
            "preempted_req_ids",
            "scheduled_new_reqs",
        ],
        "req_data": [
            "new_block_ids",
            "req_ids",
            "resumed_req_ids",
            "scheduled_cached_reqs",
            "scheduled_new_reqs",
        ],
        "block_state": True,
        "end": [["new_req_ids", "preempted_req_ids"], ["load_jobs", "store_jobs", "jobs_to_flush"]],
        "end_of_manager": [
            "_flush_pending_cascades",
            "_flush_pending_promotions",
            "_maybe_process_finished_jobs",
            "_metrics",
            "_processed_jobs_this_step",
            "_req_state",
            "_tier_parents",
            "secondary_tiers",
        ],
    }, (
        "StoringSteps says which requests, and which steps, build_connector_meta need not look into; end_quiet_step() "
        "holds that where there are no secondary tiers the manager has nothing to do at a step's end; needs_steps() is "
        "what vLLM has pending, without stores that wait for a tier"
    )
    assert vllm_facts["worker_meta"], "update_connector_output() looks there for copies that have ended: find it again"
    assert vllm_facts["quiet_worker"] == [
        ["self", "kv_cache_config"],
        ["scheduler_output", "defer_finalize"],
        True,
        True,
        True,
    ], "QuietWorker leaves the connector alone in quiet steps, and workers then report nothing of it"
    assert vllm_facts["put_off"] == [
        True,
        True,
        ["_sliding_window_groups", "_block_id_to_pending_jobs", "config"],
        True,
    ], "can_be_put_off() reads these; StoringSteps.catch_up() shows a step whose tokens vLLM counts as computed already"
    assert vllm_facts["late_stores"] == [["self", "metadata"], True, True, True, ["connector_worker"], ["worker"]], (
        "take_late_stores() puts stores among those that handle_preemptions() begins with in each step"
    )
    assert vllm_facts["spare_time"] == [["self", "scheduler_output"], ["self", "grammar_output"], True], (
        "CopyingInSpareTime gives time away when one of them has the answer, and takes it back with the next step"
    )
    assert vllm_facts["offload_limit"], "RAGCacheConnector says by max_offload_tokens how much of a prompt is stored"
    assert vllm_facts["hit_sources"] == ["HOST", "DISK"], "connector._TIER_OF_SOURCE tells the tiers of a hit apart"


def test_statistics_travel_as_ours_do(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["prom"] == [
        ["self", "vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"],
        ["_counter_cls", "_gauge_cls", "per_engine_labelvalues"],
        ["self", "transfer_stats_data", "engine_idx"],
    ], "RAGCachePromMetrics makes its series with them"
    assert vllm_facts["stats"] == ["data"], "RAGCacheStats keeps everything in data, which vLLM sends"
    assert vllm_facts["stats_methods"] == ["aggregate", "is_empty", "reduce", "reset", "to_dict"], (
        "follow it in RAGCacheStats"
    )
