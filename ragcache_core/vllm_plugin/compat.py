"""All names of vLLM outside its public API, in one place.

vLLM's internals move from release to release. A new vLLM means: change this file (and ``api_server.py``, which starts
the server), ``SUPPORTED_VLLM`` in ``release.py``, and the facts in ``tests/vllm_facts/``, which say what each name is
for. See ``docs/dev/vllm-versions.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ragcache_core.hints import Actions
from ragcache_core.vllm_plugin.engine_death import wait_for_exit
from ragcache_core.vllm_plugin.other_connectors import MODULE, children, is_own, own_stats
from ragcache_core.vllm_plugin.registrations import PersistentRegistrations
from ragcache_core.vllm_plugin.release import put_stand_ins, unsupported_reason

put_stand_ins(__file__)

from torch.distributed import all_gather_object
from vllm.distributed import get_pp_group, tensor_model_parallel_all_reduce
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob as OffloadingTransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventsTracker,
    get_offloading_event_group_spec,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats, OffloadPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core import kv_cache_coordinator, kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    make_block_hash_with_group_id,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingWorker,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
    TierMatcher,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingMetrics
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TieringOffloadingMetrics, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_cache_interface import KVCacheConfig

_CONFIRM, _REPORT, _PATHS = "ragcache_confirm", "ragcache_report", "ragcache_cached_paths"
_FORGET, _LEFT = "ragcache_forget", "ragcache_left"
_PREFETCH = "ragcache_prefetch"
_REQUESTS = "ragcache_requests"
_REGISTRATIONS = "ragcache_registrations"
_CACHE = "ragcache_act_on_cache"
_OWN: dict[str, Any] = {
    name: getattr(EngineCore, name, None)
    for name in ("_reset_caches", "sleep", "collective_rpc", "add_lora", "remove_lora")
}
"""vLLM's own methods, which ours call; None where a release has them no more, and the connector runs alone."""
_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")
"""Hash algorithms for which vLLM takes a given seed; for others it draws one at each start."""
_GAUGES = (
    *("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "num_kv_fetch_reqs_by_stage"),
    *("kv_cache_usage", "waiting_lora_adapters", "running_lora_adapters"),
)
"""Statistics of a step that are gauges rather than counts."""
_LEAVES_WEIGHTS = (
    *("compute_weight_checksums", "init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
    *("checkpoint_prepare", "checkpoint_restore", "save_sharded_state", "update_max_model_len", "profile"),
)
"""Methods of vLLM's workers that its engine core and servers call."""

_HINTS_VERSION = "1"

__all__ = [
    "AsyncScheduler",
    "BlockHashWithGroupId",
    "BlockHasher",
    "BlockPool",
    "CPULoadStoreSpec",
    "CPUOffloadingManager",
    "CPUOffloadingMetrics",
    "CPUOffloadingWorker",
    "CacheHitSource",
    "CanonicalKVCaches",
    "ChunkedLocalAttentionSpec",
    "CommonAttentionMetadata",
    "FreeKVCacheBlockQueue",
    "FullAttentionSpec",
    "GPULoadStoreSpec",
    "KVCacheBlock",
    "KVCacheSpec",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "LoadStoreSpec",
    "Locality",
    "LookupResult",
    "MambaSpec",
    "Medium",
    "OffloadPromMetrics",
    "OffloadingConfig",
    "OffloadingConnector",
    "OffloadingConnectorMetadata",
    "OffloadingConnectorStats",
    "OffloadingEvent",
    "OffloadingEventsTracker",
    "OffloadingManager",
    "OffloadingSpecFactory",
    "OffloadingTransferJob",
    "OffloadingWorker",
    "OffloadingWorkerMetadata",
    "PauseState",
    "PrepareStoreOutput",
    "ReqContext",
    "Request",
    "RequestOffloadingContext",
    "RequestQueue",
    "RequestStatus",
    "ScheduleEndContext",
    "Scheduler",
    "SecondaryTierFactory",
    "SecondaryTierManager",
    "SharedOffloadRegion",
    "SlidingWindowSpec",
    "SupportsHMA",
    "TierFilter",
    "TierMatcher",
    "TieringOffloadingMetrics",
    "TieringOffloadingSpec",
    "TransferJob",
    "TransferResult",
    "UniformTypeKVCacheSpecs",
    "attach_utilities",
    "block_hasher_of",
    "broadcast_to_api_servers",
    "build_offloading_config",
    "building_pools",
    "bytes_of_stages",
    "cached_content",
    "cached_copies",
    "call_cache",
    "call_cached_paths",
    "call_confirm",
    "call_forget",
    "call_left",
    "call_prefetch",
    "call_recent_requests",
    "call_registrations",
    "call_report",
    "connector_of_this_worker",
    "front_end_of",
    "get_block_hash",
    "get_forward_context",
    "get_group_id",
    "get_offloading_event_group_spec",
    "hash_seed",
    "in_forward",
    "kv_bytes_per_block",
    "kv_hints_of",
    "make_block_hash_with_group_id",
    "platform_worker",
    "prompt_of_keys",
    "repeated_request",
    "require_embeddings",
    "resolve_kv_cache_block_sizes",
    "sum_over_workers",
]


@contextmanager
def building_pools(kind: type[BlockPool]) -> Iterator[None]:
    """Let vLLM's KV cache managers, created inside, use a block pool of this class."""
    own = kv_cache_coordinator.BlockPool
    kv_cache_coordinator.BlockPool = kind
    try:
        yield
    finally:
        kv_cache_coordinator.BlockPool = own


def cached_content(pool: BlockPool) -> Mapping[Any, KVCacheBlock | dict[int, KVCacheBlock]]:
    """Return the blocks by hash of their content; a dictionary for several blocks with one hash."""
    content: Mapping[Any, KVCacheBlock | dict[int, KVCacheBlock]] = pool.cached_block_hash_to_block._cache
    return content


def cached_copies(pool: BlockPool, block_hash: Any) -> list[KVCacheBlock]:
    """Return the blocks with the same content, which vLLM keeps if requests compute it at the same time."""
    entry = cached_content(pool).get(block_hash)
    if entry is None:
        return []
    return list(entry.values()) if isinstance(entry, dict) else [entry]


def kv_bytes_per_block(kv_cache_config: KVCacheConfig) -> int:
    """Return the bytes of a KV block over all layers of one worker; 0 without KV memory."""
    if not kv_cache_config.num_blocks or not kv_cache_config.kv_cache_tensors:
        return 0
    total_bytes = kv_cache_config.kv_cache_tensors[0].size  # each tensor names the whole allocation's size
    return int(total_bytes // kv_cache_config.num_blocks)


def attach_utilities() -> None:
    """Make methods of this process's scheduler callable from the server's process, as vLLM's utilities."""

    def ragcache_confirm(core: EngineCore, speculation_id: str, tenant: str | None) -> dict[str, object] | None:
        report: dict[str, object] | None = core.scheduler.confirm(speculation_id, tenant)
        return report

    def ragcache_report(core: EngineCore) -> dict[str, object]:
        report: dict[str, object] = core.scheduler.report()
        return report

    def ragcache_cached_paths(core: EngineCore, cursor: str, tenant: str | None) -> dict[str, object]:
        changes: dict[str, object] = core.scheduler.cached_paths(cursor, tenant)
        return changes

    def ragcache_forget(core: EngineCore, doc_ids: list[str]) -> dict[str, object]:
        receipt: dict[str, object] = core.scheduler.forget(doc_ids)
        return receipt

    def ragcache_left(core: EngineCore) -> dict[str, object]:
        left: dict[str, object] = core.scheduler.left()
        return left

    def ragcache_prefetch(core: EngineCore, token_ids: list[int], salt: str | None) -> dict[str, object]:
        name, sampling = f"prefetch-{uuid4().hex}", SamplingParams(max_tokens=1)
        hasher = core.request_block_hasher
        prompt = Request(name, token_ids, sampling, None, cache_salt=salt, block_hasher=hasher)
        begun: dict[str, object] = core.scheduler.prefetch(prompt)
        return begun

    def ragcache_requests(core: EngineCore, limit: int) -> dict[str, object]:
        recent: dict[str, object] = core.scheduler.recent_requests(limit)
        return recent

    setattr(EngineCore, _REQUESTS, ragcache_requests)

    def ragcache_act_on_cache(core: EngineCore, action: str, body: dict[str, Any]) -> dict[str, object]:
        answer: dict[str, object] = core.scheduler.act_on_cache(action, body)
        return answer

    def ragcache_registrations_of(core: EngineCore, action: str, body: dict[str, Any]) -> dict[str, object]:
        kept = getattr(core, "ragcache_kept_registrations", None)
        if kept is None:
            kept = core.ragcache_kept_registrations = PersistentRegistrations()
        return kept.act(action, body)

    setattr(EngineCore, _REGISTRATIONS, ragcache_registrations_of)
    setattr(EngineCore, _CACHE, ragcache_act_on_cache)
    setattr(EngineCore, _FORGET, ragcache_forget)
    setattr(EngineCore, _LEFT, ragcache_left)
    setattr(EngineCore, _CONFIRM, ragcache_confirm)
    setattr(EngineCore, _REPORT, ragcache_report)
    setattr(EngineCore, _PATHS, ragcache_cached_paths)
    setattr(EngineCore, _PREFETCH, ragcache_prefetch)
    if unsupported_reason() is None:
        _watch_weight_loads()


def _watch_weight_loads() -> None:
    """Report resets of the engine core to the scheduler: whether the weights stay or may change.

    vLLM resets everything when it pauses or sleeps, because its weights may be replaced then. It does not tell the
    scheduler whether they are.
    """

    @wraps(_OWN["_reset_caches"])
    def reset_caches(core: EngineCore, *args: Any, **kwargs: Any) -> None:
        with core.scheduler.keeping_weights() if _is_ours(core) else nullcontext():
            _OWN["_reset_caches"](core, *args, **kwargs)

    @wraps(_OWN["sleep"])
    def sleep(core: EngineCore, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level >= 2 and _is_ours(core):
            core.scheduler.on_weights_changed(f"sleep level {level} discards the weights")
        return _OWN["sleep"](core, level, *args, **kwargs)

    @wraps(_OWN["collective_rpc"])
    def collective_rpc(core: EngineCore, method: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(core) and may_change_weights(method, is_paused=core.is_scheduler_paused()):
            core.scheduler.on_weights_changed(f"the workers are called with {method!r:.80}")
        if _is_ours(core) and method in ("add_lora", "remove_lora"):
            core.scheduler.on_adapter_changed(None)
        return _OWN["collective_rpc"](core, method, *args, **kwargs)

    @wraps(_OWN["add_lora"])
    def add_lora(core: EngineCore, lora_request: LoRARequest) -> Any:
        if _is_ours(core):
            core.scheduler.on_adapter_loads(lora_request)
        return _OWN["add_lora"](core, lora_request)

    @wraps(_OWN["remove_lora"])
    def remove_lora(core: EngineCore, lora_id: int) -> Any:
        if _is_ours(core):
            core.scheduler.on_adapter_changed(lora_id)
        return _OWN["remove_lora"](core, lora_id)

    for function in (reset_caches, sleep, collective_rpc, add_lora, remove_lora):
        setattr(EngineCore, function.__name__, function)


def _is_ours(core: EngineCore) -> bool:
    return hasattr(getattr(core, "scheduler", None), "keeping_weights")


def may_change_weights(method: object, *, is_paused: bool) -> bool:
    """Return whether a call of the workers may change the weights.

    While the engine is paused, the usual state for a change, every call may that is not known to keep them. Otherwise
    only calls with a name that says so, because the caches are reset explicitly then.
    """
    names_weights = isinstance(method, str) and ("weight" in method or method == "load_model")
    return (is_paused or names_weights) and method not in _LEAVES_WEIGHTS


async def _call_engines(engine_client: Any, utility: str, *arguments: object) -> list[Any]:
    """Call a utility of :func:`attach_utilities` between two steps; return each data-parallel engine's result.

    Raises:
        EngineDeadError: an engine died.
    """
    return await wait_for_exit(engine_client, engine_client.engine_core.call_utility_all_async(utility, *arguments))


async def call_confirm(
    engine_client: Any, speculation_id: str, tenant: str | None = None
) -> list[dict[str, Any] | None]:
    """Confirm a speculation in every engine; return their reports."""
    return await _call_engines(engine_client, _CONFIRM, speculation_id, tenant)


async def call_report(engine_client: Any) -> list[dict[str, Any]]:
    """Return the reports of the engines' schedulers."""
    return await _call_engines(engine_client, _REPORT)


async def call_cached_paths(engine_client: Any, cursor: str, tenant: str | None) -> list[dict[str, Any]]:
    """Return the cached prefixes of each engine, from ``PrefixPublisher.changes``."""
    return await _call_engines(engine_client, _PATHS, cursor, tenant)


async def call_prefetch(engine_client: Any, token_ids: list[int], salt: str | None) -> list[dict[str, Any]]:
    """Read a prompt's blocks from disk."""
    return await _call_engines(engine_client, _PREFETCH, token_ids, salt)


async def call_recent_requests(engine_client: Any, limit: int) -> list[dict[str, Any]]:
    """Return the latest requests of each engine."""
    return await _call_engines(engine_client, _REQUESTS, limit)


def front_end_of(vllm_config: Any) -> tuple[int, int]:
    """Return the number of this API server, and of all; an engine's own process is none of them."""
    parallel = vllm_config.parallel_config
    return getattr(parallel, "_api_process_rank", 0), getattr(parallel, "_api_process_count", 1)


def broadcast_to_api_servers(outputs: dict[int, EngineCoreOutputs], num_front_ends: int) -> None:
    """Send the connector's statistics of a step, which vLLM sends to one API server, to the others too.

    They have the gauges of that step with it, and nothing that would be counted twice.
    """
    stats = next((each.scheduler_stats for each in outputs.values() if each.scheduler_stats is not None), None)
    if stats is None or not stats.kv_connector_stats:
        return
    said = own_stats(stats.kv_connector_stats)
    own: dict[str, Any] = {**said, "offload": None}
    if said is not stats.kv_connector_stats:
        own = {name: own for name, part in stats.kv_connector_stats.items() if part is said}
    told = SchedulerStats(kv_connector_stats=own)
    for name in _GAUGES:
        setattr(told, name, getattr(stats, name))
    for front_end in range(num_front_ends):
        output = outputs.setdefault(front_end, EngineCoreOutputs())
        if output.scheduler_stats is None:
            output.scheduler_stats = told


async def call_forget(engine_client: Any, doc_ids: list[str]) -> list[dict[str, Any]]:
    """Delete documents from every data-parallel engine, and return their receipts."""
    return await _call_engines(engine_client, _FORGET, doc_ids)


async def call_left(engine_client: Any) -> list[dict[str, Any]]:
    """Return the rest of all deletions in every data-parallel engine."""
    return await _call_engines(engine_client, _LEFT)


async def call_cache(engine_client: Any, action: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every data-parallel engine's result of a cache operation; see the scheduler's.

    Each call runs a slice, and the engines' steps run between two of them.
    """
    body = {"token": uuid4().hex, "keeps_answer": False, **body}
    while True:
        answers: list[dict[str, Any]] = await _call_engines(engine_client, _CACHE, action, body)
        if all(answers) or any("refused" in answer for answer in answers):
            return answers
        body["keeps_answer"] = len(answers) > 1


async def call_registrations(engine_client: Any, action: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the log of registrations, of the first data-parallel engine; all keep it."""
    answers: list[dict[str, Any]] = await _call_engines(engine_client, _REGISTRATIONS, action, body)
    return answers[0]


def prompt_of_keys(keys: Sequence[bytes], tokens_per_block: int) -> Request:
    """Return a prompt that consists of block hashes, and one token after them."""
    num_tokens = len(keys) * tokens_per_block + 1
    prompt = Request(f"prefetch-{uuid4().hex}", [0] * num_tokens, SamplingParams(max_tokens=1), None)
    prompt.block_hashes = list(keys)
    return prompt


BlockHasher = Callable[[Request], list[BlockHash]]


def block_hasher_of(vllm_config: Any, kv_cache_config: Any) -> BlockHasher:
    """Return a function of the hashes that a request's new full blocks have; the engine core has one like it.

    Since 0.33 a hash may cover tokens behind its block, but not in an engine with a KV connector.
    """
    _, tokens_per_hash = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    hasher: BlockHasher = get_request_block_hasher(tokens_per_hash, get_hash_fn_by_name(algorithm))
    return hasher


def repeated_request(request: Request, params: dict[str, Any], block_hasher: BlockHasher) -> Request:
    """Return a request for as many tokens as one that has ended has, with ``params`` for its connector."""
    assert request.sampling_params is not None
    sampling = request.sampling_params.clone()
    sampling.max_tokens, sampling.logprobs = request.num_output_tokens, None
    sampling.extra_args = {"kv_transfer_params": params}
    return Request(
        f"audit-{uuid4().hex}",
        list(request.prompt_token_ids or ()),
        sampling,
        None,
        cache_salt=request.cache_salt,
        block_hasher=block_hasher,
    )


def hash_seed(algorithm: str) -> str | None:
    """Return the seed of the chain of block hashes, for other processes to compute the same keys.

    None where they cannot: vLLM draws it at random for algorithms whose collisions could be made on purpose.
    """
    if algorithm not in _CRYPTOGRAPHIC:
        return None
    return str(kv_cache_utils.resolve_none_hash_seed(get_hash_fn_by_name(algorithm)))


@contextmanager
def in_forward(
    vllm_config: Any, metadata: Mapping[str, Any], slot_mapping: Mapping[str, Any], num_tokens: int
) -> Iterator[None]:
    """Let the model run on ``num_tokens`` of RAGCache's, uncompiled, during any step."""
    with set_forward_context(
        dict(metadata), vllm_config, num_tokens=num_tokens, slot_mapping=dict(slot_mapping), skip_compiled=True
    ):
        yield


def sum_over_workers(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``values`` over the workers of a tensor-parallel model, equal on each."""
    summed: torch.Tensor = tensor_model_parallel_all_reduce(values)
    return summed


def bytes_of_stages(num_bytes: int) -> list[int]:
    """Return ``num_bytes`` of each pipeline stage, equal on all workers, which synchronise here."""
    stages = get_pp_group()
    found = [0] * stages.world_size
    all_gather_object(found, num_bytes, group=stages.cpu_group)
    return found


def connector_of_this_worker() -> KVConnectorBase_V1 | None:
    """Return the connector that vLLM made in this worker's process."""
    return get_kv_transfer_group() if has_kv_transfer_group() else None


def platform_worker() -> type[Any]:
    """Return vLLM's worker class for this machine."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    elif current_platform.is_xpu():
        from vllm.v1.worker.xpu_worker import XPUWorker as Worker
    else:
        from vllm.v1.worker.gpu_worker import Worker
    worker: type[Any] = Worker
    return worker


def kv_hints_of(request_id: str, actions: Actions) -> KvHintsEnvelope:
    """Return vLLM's envelope of actions on the KV of a request, each with its type and payload."""
    said = [
        KvHintAction(f"{request_id}-{number}", action_type, _HINTS_VERSION, dict(payload))
        for number, (action_type, payload) in enumerate(actions)
    ]
    return KvHintsEnvelope(_HINTS_VERSION, request_id, said)


def require_embeddings(engine_client: Any, *, is_enabled: bool) -> None:
    """Accept image or audio embeddings only if ``is_enabled``, and never omitted ones.

    vLLM assumes of every engine that loads KV that another engine has computed its prompts. Then a message may omit
    embeddings. Here such a prompt would be computed without them, which crashes the engine.
    """
    vllm_config, multimodal = engine_client.vllm_config, engine_client.model_config.multimodal_config
    transfer, embeddings = vllm_config.kv_transfer_config, vllm_config.ec_transfer_config
    is_among = any(map(is_own, children(transfer)))
    uses_ragcache = is_among or getattr(transfer, "kv_connector_module_path", None) == MODULE
    if not uses_ragcache or multimodal is None or (embeddings is not None and embeddings.is_ec_consumer):
        return
    multimodal.enable_mm_embeds, multimodal.allow_missing_mm_embeddings = is_enabled, False
    if (processor := engine_client.renderer.mm_processor) is not None:  # it has read them already
        vars(processor.info).pop("data_parser", None)
        processor.data_parser = processor.info.data_parser


def chat_template_of(serving: Any) -> tuple[str | None, bool] | None:
    """Return the chat template with which vLLM renders text, and whether texts are wrapped.

    ``None`` where the model's chats are laid out in Python, those of gpt-oss as well.
    """
    from vllm.renderers.hf import HfRenderer, resolve_chat_template, resolve_chat_template_content_format

    if not isinstance(serving.renderer, HfRenderer) or serving.online_renderer.use_harmony:
        return None
    tokenizer, config = serving.renderer.get_tokenizer(), serving.model_config
    template = resolve_chat_template(tokenizer, serving.chat_template, None, model_config=config)
    content_format = resolve_chat_template_content_format(
        serving.chat_template, None, serving.chat_template_content_format, tokenizer, model_config=config
    )
    return template, content_format == "openai"
