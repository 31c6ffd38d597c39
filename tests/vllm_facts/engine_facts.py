"""What vLLM's engine and server are like where RAGCache relies on them."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import vllm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import TokenizersBackend
from vllm import SamplingParams, envs, plugins
from vllm.config import CacheConfig, ModelConfig, MultiModalConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.entrypoints.cli import serve
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.launchers.api_server import app_state, entry
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponseStreamChoice
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.multimodal.processing import BaseMultiModalProcessor, BaseProcessingInfo
from vllm.renderers import BaseRenderer, hf
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import detokenizer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.metrics import loggers
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu_worker import Worker

from ragcache_core.vllm_plugin import compat
from ragcache_core.vllm_plugin.connector.gpu_connector import DocumentConnector
from ragcache_core.vllm_plugin.facts import PRIVATE, missing_facts
from ragcache_core.vllm_plugin.scheduler.block_pool import TreeFreeBlockQueue
from ragcache_core.vllm_plugin.scheduler.request_queue import CacheAwareRequestQueue
from ragcache_core.vllm_plugin.server.recognition.wrapper import why_refused
from tests.vllm_facts.private_names import sources, used_private_names, with_every_kind_of_use

_TOOL = {"type": "function", "function": {"strict": True, "parameters": {}, "name": "search"}}
_ASKED = (
    *("chat_template", "continue_final_message", "add_special_tokens", "add_generation_prompt"),
    *("media_io_kwargs", "mm_processor_kwargs"),
)
"""Fields of ``/tokenize`` that our client sends."""


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


def chat(**settings: Any) -> dict[str, Any]:
    """Return what a chat template is told by name of a request with these settings."""
    request = ChatCompletionRequest(messages=[], **settings)
    told: dict[str, Any] = request.build_chat_params(None, "auto").chat_template_kwargs
    return told


def continues_text(text: str) -> bool:
    """Return whether a token with text ends a character, and an answer that is cut after it continues its text.

    A token is one byte here.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    ids = tokenizer.encode(text).ids

    def texts_of(prompt: list[int], answer: list[int]) -> list[str]:
        request = SimpleNamespace(sampling_params=SamplingParams(), request_id="a", prompt_token_ids=prompt)
        decoder = detokenizer.FastIncrementalDetokenizer(SimpleNamespace(_tokenizer=tokenizer), request)
        return [decoder.decode_next(token) for token in answer]

    whole = texts_of(ids, ids)
    return "".join(whole) == text and all(
        texts_of(ids + ids[:cut], ids[cut:]) == whole[cut:] for cut in range(1, len(ids)) if whole[cut - 1]
    )


def facts() -> dict[str, object]:
    """Return names, signatures and a few measured facts."""
    base = compat.KVConnectorBase_V1
    pool = compat.BlockPool(4, True, 16)
    taken = pool.get_new_blocks(1)
    changed, put_in = with_every_kind_of_use(sources())
    pool.cached_block_hash_to_block.insert(b"hash", taken[0])
    return {
        "version": vllm.__version__,
        "missing": missing_facts(),
        "private": sorted(name for names in PRIVATE.values() for name in names),
        "used_private": sorted(used := used_private_names(sources())),
        "unseen_uses": sorted(put_in - (set(used_private_names(changed)) - set(used))),
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
        "handshake": [
            parameters(base.get_handshake_metadata),
            parameters(base.set_xfer_handshake_metadata_pp_aware),
            "kv_connector.set_xfer_handshake_metadata_pp_aware(content)" in inspect.getsource(EngineCore),
            "return {(pp_rank, tp_rank): metadata}" in inspect.getsource(Worker.get_kv_connector_handshake_metadata),
        ],
        "stages": [parameters(compat.get_pp_group), sets(GroupCoordinator, "world_size", "cpu_group")],
        "hma": list(inspect.signature(compat.SupportsHMA.request_finished_all_groups).parameters),
        "main": list(inspect.signature(entry.main).parameters),
        "engine_is_dead": create_error_response(EngineDeadError()).error.message,
        "tool_parsers": sorted(ToolParserManager.list_registered()),
        "named_tokens": [
            name in model.model_fields
            for name, model in (
                ("return_token_ids", ChatCompletionRequest),
                ("request_id", ChatCompletionRequest),
                ("prompt_token_ids", ChatCompletionStreamResponse),
                ("token_ids", ChatCompletionResponseStreamChoice),
                ("return_token_ids", CompletionRequest),
                ("request_id", CompletionRequest),
                ("prompt_token_ids", CompletionResponseStreamChoice),
                ("token_ids", CompletionResponseStreamChoice),
            )
        ],
        "holds_back": "self.stop_buffer_length = max(len(s) for s in self.stop) - 1" in inspect.getsource(detokenizer),
        "continues_text": continues_text("A 日本語 text, é😀 ok 😀😀."),
        "answer_limits": [
            CompletionRequest.model_fields["max_tokens"].default,
            re.findall(r'^ +"(\w+)",$', inspect.getsource(ModelConfig.get_diff_sampling_param), re.MULTILINE),
            parameters(get_max_tokens),
            [
                'if mc.generation_config not in ("auto", "vllm")' in source
                and 'getattr(mc, "override_generation_config", {}).get("max_new_tokens")' in source
                for source in map(inspect.getsource, (OpenAIServingChat.__init__, OpenAIServingCompletion.__init__))
            ],
        ],
        "own_requests": [
            sets(EngineCore, "request_block_hasher"),
            [name for name in ("cache_salt", "block_hasher") if name in parameters(Request)],
            sets(compat.Scheduler, "finished_req_ids"),
        ],
        "is_sleeping": parameters(AsyncLLM.is_sleeping),
        "wrapped_generate": [
            why_refused(AsyncLLM.__new__(AsyncLLM)),
            [
                "self.engine_client.generate(" in inspect.getsource(handler)
                for handler in (OpenAIServingChat, OpenAIServingCompletion, OpenAIServingResponses)
            ],
            '"kv_transfer_params"' in inspect.getsource(Request.__init__),
            'cache_salt=decoder_input.get("cache_salt")' in inspect.getsource(InputProcessor),
            [name for name in ("extra_args",) if name in SamplingParams.__struct_fields__],
        ],
        "kv_hints": [
            "kv_hints" in parameters(AsyncLLM.generate),
            list(compat.KvHintsEnvelope.__struct_fields__),
            list(compat.KvHintAction.__struct_fields__),
        ],
        "process_titles": [envs.VLLM_PROCESS_NAME_PREFIX, envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS],
        "chat_takes_metadata": "kv_transfer_params" in ChatCompletionRequest.model_fields,
        "completion_takes_metadata": "kv_transfer_params" in CompletionRequest.model_fields,
        "chat_takes_token_ids": "prompt_token_ids" in inspect.getsource(ChatCompletionRequest),
        "chat_settings": [
            chat(reasoning_effort="low"),
            chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}),
            [tool.model_dump() for tool in ChatCompletionRequest(messages=[], tools=[_TOOL]).tools or []],
            sorted({"tools", "chat_template_kwargs", *_ASKED} - TokenizeChatRequest.model_fields.keys()),
        ],
        "tokenization": [
            sets(ServingTokenization, "renderer", "model_config", "chat_template", "chat_template_content_format"),
            sets(ServingTokenization, "default_chat_template_kwargs"),
            [sets(ServingTokenization, "online_renderer"), sets(OnlineRenderer, "use_harmony")],
            "state.serving_tokenization = ServingTokenization(" in inspect.getsource(app_state),
            parameters(hf.resolve_chat_template),
            parameters(hf.resolve_chat_template_content_format),
            parameters(hf.HfRenderer.get_tokenizer),
            isinstance(inspect.getattr_static(TokenizersBackend, "backend_tokenizer"), property),
        ],
        "plugin_groups": [
            plugins.DEFAULT_PLUGINS_GROUP,
            plugins.PLATFORM_PLUGINS_GROUP,
            plugins.IO_PROCESSOR_PLUGINS_GROUP,
            plugins.STAT_LOGGER_PLUGINS_GROUP,
        ],
        "endpoint_group": plugins.ENDPOINT_PLUGINS_GROUP,
        "free_queue": methods(compat.FreeKVCacheBlockQueue),
        "our_free_queue": sorted(methods(TreeFreeBlockQueue)),
        "free_queue_reads": sorted(
            set(re.findall(r"self\.free_block_queue\.(\w+)(?!\w|\()", inspect.getsource(compat.BlockPool)))
        ),
        "pool": {
            name: parameters(getattr(compat.BlockPool, name))
            for name in ("cache_full_blocks", "reset_prefix_cache", "_remove_cached_block_hashes")
        },
        "pool_attributes": [
            name
            for name in ("free_block_queue", "cached_block_hash_to_block", "blocks", "null_block", "kv_event_queue")
            if hasattr(pool, name)
        ],
        "cached_copies": [b.block_id for b in compat.cached_copies(pool, b"hash")] == [taken[0].block_id],
        "block": [name for name in ("block_id", "ref_cnt", "block_hash", "is_null") if hasattr(taken[0], name)],
        "hash_of_block": compat.get_block_hash(b"hash" + bytes(4)) == b"hash",
        "group_of_block": compat.get_group_id(compat.make_block_hash_with_group_id(b"hash", 3)) == 3,
        "groups": {
            spec.__name__: [
                name
                for name in (
                    *("block_size", "sliding_window", "extra_retained_tokens"),
                    *("attention_chunk_size", "kv_cache_specs", "prefix_cacheable"),
                )
                if name in names(spec) or isinstance(inspect.getattr_static(spec, name, None), property)
            ]
            for spec in (
                *(compat.FullAttentionSpec, compat.SlidingWindowSpec, compat.ChunkedLocalAttentionSpec),
                *(compat.MambaSpec, compat.UniformTypeKVCacheSpecs),
            )
        },
        "scheduler_sets": sets(compat.Scheduler, "connector", "kv_cache_config", "kv_cache_manager"),
        "scheduler_output": [
            *(parameters(c.update_from_output) for c in (compat.Scheduler, compat.AsyncScheduler)),
            {"sampled_token_ids", "req_id_to_index"} <= set(names(ModelRunnerOutput)),
        ],
        "queue": methods(compat.RequestQueue),
        "queue_is_complete": sorted(CacheAwareRequestQueue.__abstractmethods__),
        "scheduler_queue": sets(
            compat.Scheduler,
            *("waiting", "kv_holding_waiting", "deferred_waiting", "running", "requests"),
            *("_inflight_prefills", "max_num_scheduled_tokens", "prev_step_scheduled_req_ids"),
            *("need_mamba_block_aligned_split", "scheduler_config"),
        ),
        "audits": [
            sets(compat.Scheduler, "connector_prefix_cache_stats"),
            sets(KVCacheManager, "prefix_cache_stats"),
            *(
                parameters(getattr(compat.Scheduler, name))
                for name in ("finish_requests", "set_pause_state", "reset_prefix_cache")
            ),
            {"num_running_reqs"} <= set(names(SchedulerStats)),
        ],
        "cuts_prefills": "enable_chunked_prefill" in names(SchedulerConfig),
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
                *("prompt_embeds", "lora_request", "cache_salt", "mm_features", "skip_reading_prefix_cache"),
            ),
            [parameters(Request.update_block_hashes), parameters(compat.KVConnectorBase_V1.on_new_request)],
            [
                isinstance(inspect.getattr_static(Request, name, None), property)
                for name in ("num_tokens", "num_tokens_with_spec")
            ],
        ],
        "request_states": [compat.RequestStatus.PREEMPTED.name, compat.RequestStatus.WAITING_FOR_STREAMING_REQ.name],
        "utility": [
            "method(*self._convert_msgspec_args(method, args))" in inspect.getsource(EngineCoreProc),
            parameters(AsyncMPClient.call_utility_all_async),
            "for engine in self.core_engines" in inspect.getsource(AsyncMPClient.call_utility_all_async),
            "engine_idxs=self.engine_core.engine_ranks_managed" in inspect.getsource(AsyncLLM.__init__),
            sets(compat.EngineCore, "scheduler"),
            sets(AsyncLLM, "engine_core"),
        ],
        "front_ends": [
            {"_api_process_rank", "_api_process_count"} <= {field.name for field in fields(ParallelConfig)},
            "eco := next(iter(engine_core_outputs.values()), None)"
            in inspect.getsource(compat.Scheduler.update_from_output),
            sorted(field.name for field in fields(SchedulerStats)),
            [[command.name, parameters(command.cmd)] for command in serve.cmd_init()],
        ],
        "rank_header": 'raw_request.headers.get("X-data-parallel-rank")' in inspect.getsource(GenerateBaseServing),
        "weights": [
            [
                parameters(getattr(compat.EngineCore, name))
                for name in ("_reset_caches", "sleep", "collective_rpc", "add_lora", "remove_lora")
            ],
            "self._reset_caches()" in inspect.getsource(compat.EngineCore._finish_pause),
            "self.pause_scheduler(" in inspect.getsource(compat.EngineCore.sleep),
            [hasattr(compat.EngineCore, "is_scheduler_paused"), "_reset_caches" in vars(EngineCoreProc)],
        ],
        "embeddings": [
            "mm_config.allow_missing_mm_embeddings = " in inspect.getsource(VllmConfig._resolve_mm_embedding_inputs),
            {"enable_mm_embeds", "allow_missing_mm_embeddings"} <= set(names(MultiModalConfig)),
            [sets(AsyncLLM, "renderer", "vllm_config", "model_config"), sets(BaseRenderer, "mm_processor")],
            "self.data_parser = self.info.get_data_parser()" in inspect.getsource(BaseMultiModalProcessor.__init__),
            isinstance(inspect.getattr_static(BaseProcessingInfo, "data_parser"), cached_property),
        ],
        "scheduler_cls": [
            parameters(SchedulerConfig.get_scheduler_cls),
            {"scheduler_cls", "async_scheduling"} <= set(names(SchedulerConfig)),
        ],
        "forward_started": [
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
            [parameters(compat.get_request_block_hasher)[:2], compat.hash_seed("xxhash")],
            "prefix_caching_hash_algo" in names(CacheConfig),
        ],
        "prom": [
            parameters(compat.KVConnectorPromMetrics.__init__),
            sets(compat.KVConnectorPromMetrics, "_counter_cls", "_gauge_cls", "per_engine_labelvalues"),
            parameters(compat.KVConnectorPromMetrics.observe),
        ],
        "series": re.findall(r'name="(vllm:\w+)"', inspect.getsource(loggers)),
        "stats": sorted(compat.KVConnectorStats.__dataclass_fields__),
        "stats_methods": sorted(methods(compat.KVConnectorStats)),
    }
