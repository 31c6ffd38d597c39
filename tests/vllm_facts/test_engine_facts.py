"""What RAGCache relies on inside vLLM. If one of these fails with a new release, it says what the name is for.

The names live in ``ragcache_core/vllm_plugin/compat.py``.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import entry_points
from typing import Any

import pytest

from ragcache_core.client.http.errors import reports_engine_death
from ragcache_core.vllm_plugin.release import SUPPORTED_VLLM
from tests.conftest import ROOT
from tests.vllm_facts.conftest import Since
from tests.vllm_facts.private_names import class_swaps, sources


@pytest.fixture(scope="module")
def facts(all_facts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = all_facts["engine"]
    return found


def test_this_is_a_supported_vllm(release: str, facts: dict[str, Any]) -> None:
    assert release in SUPPORTED_VLLM, "follow docs/dev/vllm-versions.md"
    assert facts["missing"] == [], "an engine checks these when it starts, and has no tiers without them"


def test_an_engine_checks_every_private_name_that_is_used(facts: dict[str, Any]) -> None:
    optional = {"_api_process_count", "_api_process_rank", "_custom_ops"}  # "front_ends", and "copies" of offloading
    assert set(facts["used_private"]) - set(facts["private"]) == optional, "add it to facts.PRIVATE"
    assert set(facts["private"]) <= set(facts["used_private"]), "take it out of facts.PRIVATE"


def test_what_is_private_becomes_less_and_not_more(facts: dict[str, Any]) -> None:
    assert len(facts["used_private"]) <= 10, "say in docs/dev/vllm-versions.md how many there are"
    assert class_swaps(sources()) == []


def test_no_way_to_use_a_private_name_goes_unseen(facts: dict[str, Any]) -> None:
    assert facts["unseen_uses"] == []


@pytest.mark.parametrize(
    "swap",
    [
        "core.__class__ = Other",
        "core.__class__, rest = Other, 1",
        "for core.__class__ in kinds: pass",
        "setattr(core, '__class__', Other)",
        "object.__setattr__(core, '__class__', Other)",
    ],
)
def test_no_way_to_swap_a_class_goes_unseen(swap: str) -> None:
    assert class_swaps({"a.py": swap, "b.py": "name = type(core).__name__, core.__class__"}) == ["a.py"]


def test_every_parser_of_tool_calls_that_the_docs_name_is_there(facts: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "guides" / "tools.md").read_text(encoding="utf-8")
    tools = page.split("## Parsers")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in tools.splitlines() if line.startswith("| ")][1:]
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert len(named) > 10
    assert named - set(facts["tool_parsers"]) == set()


def test_the_connector_has_every_method_that_vllm_asks_for(facts: dict[str, Any]) -> None:
    assert facts["still_abstract"] == [], "implement the new abstract methods in connector/gpu_connector.py"


def test_the_handlers_of_openais_protocol_generate_by_a_method_that_can_be_wrapped(facts: dict[str, Any]) -> None:
    """``server/recognition/wrapper.py``: names and salts of documents are set there."""
    assert facts["wrapped_generate"] == [None, [True, True, True], True, True, ["extra_args"]]


def test_generate_takes_actions_with_a_type_and_a_payload_as_kv_hints(facts: dict[str, Any]) -> None:
    """``hints.py``: the hints of requests are such actions."""
    assert facts["kv_hints"] == [
        True,
        ["protocol_version", "message_id", "actions"],
        ["action_id", "action_type", "action_version", "payload"],
    ]


def test_the_connectors_methods_have_the_arguments_we_implement(facts: dict[str, Any]) -> None:
    assert facts["signatures"] == {
        "on_new_request": ["self", "request"],
        "get_num_new_matched_tokens": ["self", "request", "num_computed_tokens"],
        "update_state_after_alloc": ["self", "request", "blocks", "num_external_tokens"],
        "build_connector_meta": ["self", "scheduler_output"],
        "request_finished": ["self", "request", "block_ids"],
        "start_load_kv": ["self", "forward_context", "kwargs"],
        "save_kv_layer": ["self", "layer_name", "kv_layer", "attn_metadata", "kwargs"],
        "wait_for_layer_load": ["self", "layer_name"],
        "wait_for_save": ["self"],
    }, "follow the change in connector/gpu_connector.py and connector/tiered_connector.py"
    assert facts["hma"] == ["self", "request", "block_ids"], "follow it in DocumentConnector"
    assert facts["requires_kv_delivery"], "DocumentConnector overrides it: a lost transfer is no failure"


def test_workers_say_what_they_have_before_the_first_request(facts: dict[str, Any]) -> None:
    assert facts["handshake"] == [["self"], ["self", "metadata"], True, True], (
        "connector/tiered_connector.py drops tiers by what workers report, by stage and rank"
    )
    assert facts["stages"] == [[], ["world_size", "cpu_group"]], "compat.bytes_of_stages() asks them"


def test_the_server_program_is_where_we_start_it(facts: dict[str, Any]) -> None:
    assert facts["main"] == [], "api_server.run_api_server() calls it without arguments"


def test_an_answer_says_that_the_engine_died(facts: dict[str, Any]) -> None:
    assert reports_engine_death(facts["engine_is_dead"]), (
        "requests are sent again for ENGINE_DEAD_SIGNS: add what it says now"
    )


def test_requests_carry_our_metadata_and_token_ids(facts: dict[str, Any]) -> None:
    assert facts["chat_takes_metadata"], "wire.py needs another channel"
    assert facts["completion_takes_metadata"], "wire.py needs another channel"
    assert facts["chat_takes_token_ids"], "plan_chat sends the prompt's ids in kv_transfer_params"


def test_settings_of_a_chat_become_what_we_make_of_them(facts: dict[str, Any]) -> None:
    effort, told, (tool,), unknown = facts["chat_settings"]
    common = {"add_generation_prompt": True, "continue_final_message": False}
    assert effort == {**common, "reasoning_effort": "low", "enable_thinking": True}, "client/prompts/chat_request.py"
    assert told == {**common, "reasoning_effort": "none", "enable_thinking": True}, "the request's own word wins"
    assert json.dumps(tool) == (
        '{"type": "function", "function": {"name": "search", "description": null, "parameters": {}, "strict": true}}'
    ), "client/prompts/chat_request.py shows templates these fields, in this order"
    assert unknown == [], "/tokenize is asked with them"


def test_streams_name_their_tokens_and_hold_back_what_could_begin_a_stop_string(facts: dict[str, Any]) -> None:
    assert facts["named_tokens"] == [True] * 8, "client/http/resume.py goes on with them"
    assert facts["holds_back"], "client/http/resume.py counts the characters that a server holds back"
    assert facts["continues_text"], "client/http/resume.py cuts sampled answers after a token with text"


def test_answers_end_by_limits_and_defaults_that_the_server_reports(facts: dict[str, Any], since: Since) -> None:
    assert facts["answer_limits"] == [
        16,
        [
            *("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature"),
            *("top_k", "top_p", "min_p", "max_new_tokens"),
            *since("0.33", "skip_special_tokens"),
        ],
        [
            *("max_model_len", "max_tokens", "input_length", "default_sampling_params", "override_max_tokens"),
            "truncate_prompt_tokens",
        ],
        [True, True],
    ], "server/request_defaults.py tells of those on which the rest of an answer depends, client/http/resume.py asks"


def test_prefetch_requests_are_reported_to_vllm_as_finished(facts: dict[str, Any]) -> None:
    assert facts["own_requests"] == [
        ["request_block_hasher"],
        ["cache_salt", "block_hasher"],
        ["finished_req_ids"],
    ], "compat.attach_utilities() makes them to prefetch, and the scheduler tells the connector that they ended"


def test_the_engine_answers_whether_it_sleeps_and_its_processes_have_titles(facts: dict[str, Any]) -> None:
    assert facts["is_sleeping"] == ["self"], "server/progress.py asks it: any call that does nothing will do"
    assert facts["process_titles"] == ["VLLM", 300], "runtime/hangs.py finds the engine's processes by them"


def test_the_server_has_the_tokenizer_that_it_describes(facts: dict[str, Any]) -> None:
    assert facts["tokenization"] == [
        ["renderer", "model_config", "chat_template", "chat_template_content_format"],
        ["default_chat_template_kwargs"],
        [["online_renderer"], ["use_harmony"]],
        True,
        ["tokenizer", "chat_template", "tools", "model_config"],
        ["chat_template", "tools", "given_format", "tokenizer", "model_config"],
        ["self"],
        True,
    ], "prompt_routes reads app.state.serving_tokenization: follow it in compat.chat_template_of()"


def test_vllm_looks_for_plugins_where_we_register_ours(facts: dict[str, Any]) -> None:
    from ragcache_core.vllm_plugin.server import api_server

    assert facts["endpoint_group"] == "vllm.endpoint_plugins", "rename our entry point's group in pyproject.toml"
    assert sorted(facts["plugin_groups"]) == sorted(api_server._PLUGIN_GROUPS), (
        "follow it in api_server._PLUGIN_GROUPS: naming our plugin in VLLM_PLUGINS must not switch others off"
    )
    (point,) = [p for p in entry_points(group="vllm.endpoint_plugins") if p.name == api_server.ENDPOINT_PLUGIN]
    assert point.value == "ragcache_core.vllm_plugin.server.routes:RAGCacheEndpoint", "install the package again"


def test_the_block_pool_is_the_one_that_ours_takes_over(facts: dict[str, Any]) -> None:
    assert facts["free_queue"] == {
        "popleft": ["self"],
        "popleft_n": ["self", "n"],
        "remove": ["self", "block"],
        "append": ["self", "block"],
        "prepend_n": ["self", "blocks"],
        "append_n": ["self", "blocks"],
        "get_all_free_blocks": ["self"],
        "iter_blocks_after": ["self", "cursor"],
    }, "override what is new or different in TreeFreeBlockQueue: the base class's linked list is empty there"
    assert set(facts["free_queue"]) <= set(facts["our_free_queue"]), "override it in TreeFreeBlockQueue"
    assert facts["free_queue_reads"] == ["num_free_blocks"], "keep it up to date in TreeFreeBlockQueue"
    assert facts["pool"] == {
        "cache_full_blocks": [
            *("self", "request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id"),
            "block_mask",
        ],
        "reset_prefix_cache": ["self"],
        "_remove_cached_block_hashes": ["self", "block"],
    }, "follow the change in TreeBlockPool, which learns and forgets what blocks hold there"
    assert facts["pool_attributes"] == [
        *("free_block_queue", "cached_block_hash_to_block", "blocks", "null_block", "kv_event_queue"),
    ], "TreeBlockPool.follow() replaces free_block_queue of a pool that is built: find its new name"
    assert facts["cached_copies"], "compat.cached_copies() reads BlockHashToBlockMap._cache: find its new name"
    assert facts["block"] == ["block_id", "ref_cnt", "block_hash", "is_null"], "follow it in block_pool.py"
    assert facts["hash_of_block"], "a block's hash is no longer key + 4 bytes of group: follow it in block_pool.py"
    assert facts["group_of_block"], "a block's hash no longer names its group: follow it in block_pool.py"


def test_a_group_reports_what_a_hit_needs_of_it(facts: dict[str, Any]) -> None:
    assert facts["groups"] == {
        "FullAttentionSpec": ["block_size", "sliding_window", "attention_chunk_size", "prefix_cacheable"],
        "SlidingWindowSpec": ["block_size", "sliding_window", "extra_retained_tokens", "prefix_cacheable"],
        "ChunkedLocalAttentionSpec": ["block_size", "attention_chunk_size", "prefix_cacheable"],
        "MambaSpec": ["block_size", "prefix_cacheable"],
        "UniformTypeKVCacheSpecs": ["block_size", "kv_cache_specs", "prefix_cacheable"],
    }, "group_specs.py reads from these how far back a hit needs a group's blocks: follow it there"


def test_the_scheduler_is_where_ours_stands(facts: dict[str, Any]) -> None:
    assert facts["scheduler_sets"] == ["connector", "kv_cache_config", "kv_cache_manager"], (
        "_TreeScheduling.__init__() reads them after vLLM's: find their new names"
    )
    assert facts["manager_sets"] == ["block_pool"], "scheduler.py takes over kv_cache_manager.block_pool"
    assert facts["scheduler_output"] == [*([["self", "scheduler_output", "model_runner_output"]] * 2), True], (
        "_TreeScheduling notes a request's first token there: follow it, or find where tokens arrive"
    )
    assert facts["scheduler_cls"] == [["self"], True], "--scheduler-cls takes RAGCacheScheduler: find the new door"
    step = ["scheduler.schedule(", ".execute_model(", ".get_grammar_bitmask(", "future.result("]
    assert facts["forward_started"] == [["self", "scheduler_output"], [step, [*step, ".get_grammar_bitmask("]]], (
        "on_forward_started() is called there, because the model computes a step then and no answer waits: "
        "find the new moment"
    )
    assert facts["scheduler_stats"], "our figures leave with get_kv_connector_stats(): find the new way out"


def test_the_scheduler_asks_its_queue_what_ours_answers(facts: dict[str, Any]) -> None:
    assert facts["queue"] == {
        "add_request": ["self", "request"],
        "pop_request": ["self"],
        "peek_request": ["self"],
        "prepend_request": ["self", "request"],
        "prepend_requests": ["self", "requests"],
        "remove_request": ["self", "request"],
        "remove_requests": ["self", "requests"],
    }, "follow the change in CacheAwareRequestQueue"
    assert facts["queue_is_complete"] == [], "implement the new abstract methods in CacheAwareRequestQueue"


def test_audits_are_kept_out_of_a_schedulers_counts_and_ways_to_stop(facts: dict[str, Any]) -> None:
    assert facts["audits"] == [
        ["connector_prefix_cache_stats"],
        ["prefix_cache_stats"],
        ["self", "request_ids", "finished_status"],
        ["self", "pause_state"],
        ["self", "reset_running_requests", "reset_connector"],
        True,
    ], "_TreeScheduling hides audits from these counts, and ends them in these methods: follow the change"


def test_the_scheduler_makes_room_as_we_ask(facts: dict[str, Any]) -> None:
    assert facts["scheduler_queue"] == [
        *("waiting", "kv_holding_waiting", "deferred_waiting", "running", "requests"),
        *("_inflight_prefills", "max_num_scheduled_tokens", "prev_step_scheduled_req_ids"),
        *("need_mamba_block_aligned_split", "scheduler_config"),
    ], "_TreeScheduling takes over the queue, and preempts speculation: find their new names"
    assert facts["cuts_prefills"], "_TreeScheduling shortens steps only where enable_chunked_prefill lets it"
    assert facts["scheduler_steps"] == {
        "schedule": ["self", "throttle_prefills"],
        "_preempt_request": ["self", "request", "timestamp", "drop_stale_output"],
        "_free_request_blocks": ["self", "request"],
        "_handle_blocked_waiting_request": ["self", "request"],
    }, "_TreeScheduling calls them for speculative requests as vLLM does for others: follow the change"
    assert facts["schedule"] == [True] * 4, (
        "a step's tokens are bounded by max_num_scheduled_tokens, the queue is peeked and asked for its truth value, "
        "and the last running request is the first victim: see where these went"
    )
    assert facts["scheduled"], "speculative tokens are counted from a step's num_scheduled_tokens"
    assert facts["request"] == [
        *("num_prompt_tokens", "num_computed_tokens", "num_output_placeholders", "status", "num_preemptions"),
        "arrival_time",
    ], "_TreeScheduling reads them, the connector the last one: find their new names"
    assert facts["request_reads"] == [
        [
            *("kv_transfer_params", "block_hashes", "prompt_token_ids"),
            *("prompt_embeds", "lora_request", "cache_salt", "mm_features", "skip_reading_prefix_cache"),
        ],
        [["self"], ["self", "request"]],
        [True, True],
    ], "the connector reads them of a request, and num_tokens, the scheduler num_tokens_with_spec: find their new names"
    assert facts["request_states"] == ["PREEMPTED", "WAITING_FOR_STREAMING_REQ"], "see request_queue.py"


def test_what_we_ask_of_the_scheduler_reaches_it_as_a_utility_call(facts: dict[str, Any]) -> None:
    assert facts["utility"] == [
        *(True, ["self", "method", "args"], True, True),
        *(["scheduler"], ["engine_core"]),
    ], "compat.attach_utilities() adds methods to EngineCore, others there call them, of each engine: find the new way"


def test_one_of_several_api_servers_gets_the_statistics_and_its_gauges(facts: dict[str, Any]) -> None:
    is_named, is_one, stats, commands = facts["front_ends"]
    assert is_named, "compat.front_end_of() reads which of how many a process is"
    assert is_one, "vLLM gives a step's statistics to one API server, compat.broadcast_to_api_servers() to the others"
    gauges = {"num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "num_kv_fetch_reqs_by_stage"}
    gauges |= {"kv_cache_usage", "waiting_lora_adapters", "running_lora_adapters"}
    counted = {"step_counter", "current_wave", "iteration_details", "kv_cache_eviction_events", "cudagraph_stats"}
    counted |= {"prefix_cache_stats", "connector_prefix_cache_stats", "spec_decoding_stats", "perf_stats"}
    told = {"kv_connector_stats", "ec_connector_stats"}
    assert set(stats) == gauges | counted | told, "a new gauge belongs into compat.broadcast_to_api_servers()"
    assert commands == [["serve", ["args"]]], "api_server.py starts several as `vllm serve` does"


def test_a_header_takes_a_request_to_one_of_several_engines(facts: dict[str, Any]) -> None:
    assert facts["rank_header"], "server/request_body.py sets it: find its new name"


def test_an_engine_core_resets_its_caches_where_pauses_and_changes_are_distinguished(facts: dict[str, Any]) -> None:
    assert facts["weights"] == [
        [
            ["self", "reset_running_requests", "reset_connector"],
            ["self", "level", "mode"],
            ["self", "method", "timeout", "args", "kwargs"],
            ["self", "lora_request"],
            ["self", "lora_id"],
        ],
        True,
        True,
        [True, False],
    ], "compat.attach_utilities() wraps them: a pause keeps what is on disk, other weights do not: find the new way"


def test_a_server_takes_embeddings_as_configured(facts: dict[str, Any]) -> None:
    assert facts["embeddings"] == [
        True,
        True,
        [["renderer", "vllm_config", "model_config"], ["mm_processor"]],
        True,
        True,
    ], "compat.require_embeddings() sets them back, where a KV connector lets embeddings be left out: find the new way"


def test_the_kv_cache_reports_how_large_its_blocks_are(facts: dict[str, Any]) -> None:
    assert facts["kv_cache_config"] == ["kv_cache_groups", "kv_cache_tensors", "num_blocks"], (
        "compat.kv_bytes_per_block() reads them"
    )
    assert facts["kv_cache_tensor"], "compat.kv_bytes_per_block() takes a tensor's size for the allocation's"
    assert facts["block_sizes"] == ["kv_cache_config", "vllm_config"], "DocumentConnector asks for tokens_per_hash"
    assert facts["seed"] == [True, ["hash_fn"], [["hash_block_size", "caching_hash_fn"], None], True], (
        "compat.hash_seed() says whether another start finds the same keys: without it no cache on disk may be shared"
    )


def test_statistics_travel_as_ours_do(facts: dict[str, Any]) -> None:
    assert facts["prom"] == [
        ["self", "vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"],
        ["_counter_cls", "_gauge_cls", "per_engine_labelvalues"],
        ["self", "transfer_stats_data", "engine_idx"],
    ], "RAGCachePromMetrics makes its series with them"
    assert facts["stats"] == ["data"], "RAGCacheStats keeps everything in data, which vLLM sends"
    assert facts["stats_methods"] == ["aggregate", "is_empty", "reduce", "reset", "to_dict"], (
        "follow it in RAGCacheStats"
    )


def test_the_series_that_the_board_and_the_rules_show_are_there(facts: dict[str, Any]) -> None:
    files = (ROOT / "examples" / "monitoring").glob("ragcache-*")
    named = {name for path in files for name in re.findall(r"vllm:\w+", path.read_text(encoding="utf-8"))}
    assert {re.sub("_(total|bucket)$", "", name) for name in named} - set(facts["series"]) == set()
