"""Every name of vLLM 0.32 that is not its public API, in one place.

vLLM's internals move from release to release. A new vLLM means: change this file (and ``api_server.py``, which starts
the server), and the signature tests (``tests/integration_tests/vllm_plugin/test_signatures.py``), which say what each
name is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.distributed import tensor_model_parallel_all_reduce
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
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    OffloadPromMetrics,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    get_block_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferResult,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

SUPPORTED_VLLM = "0.32"
_CONFIRM, _REPORT = "ragcache_confirm", "ragcache_report"

__all__ = [
    "NOTHING_TO_COPY",
    "SUPPORTED_VLLM",
    "AsyncScheduler",
    "BlockPool",
    "CPUPrimaryTierOffloadingManager",
    "CacheHitSource",
    "CachePolicy",
    "CanonicalKVCaches",
    "ChunkStatus",
    "CommonAttentionMetadata",
    "FreeKVCacheBlockQueue",
    "GPULoadStoreSpec",
    "InputProcessor",
    "JobResult",
    "KVCacheBlock",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorModelRunnerMixin",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "LoadStoreSpec",
    "LookupResult",
    "Medium",
    "MsgpackEncoder",
    "NothingToCopy",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadPromMetrics",
    "OffloadingConfig",
    "OffloadingConnector",
    "OffloadingConnectorMetadata",
    "OffloadingConnectorStats",
    "OffloadingManager",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "RequestQueue",
    "RequestStatus",
    "ScheduleEndContext",
    "Scheduler",
    "SecondaryTierManager",
    "SharedOffloadRegion",
    "SupportsHMA",
    "TieringOffloadingManager",
    "TieringOffloadingSpec",
    "TransferJob",
    "TransferResult",
    "adopt_chunks",
    "attach_utilities",
    "build_offloading_config",
    "cached_copies",
    "call_confirm",
    "call_report",
    "connector_of_this_worker",
    "end_quiet_step",
    "get_block_hash",
    "get_forward_context",
    "get_offload_block_hash",
    "has_loaded",
    "has_offloading_news",
    "hash_seed",
    "host_policy_of",
    "in_forward",
    "keep_from_storing",
    "kv_bytes_per_block",
    "needs_steps",
    "newest_copy_below",
    "num_free_chunks",
    "num_open_copies",
    "platform_worker",
    "resolve_kv_cache_block_sizes",
    "stores_from",
    "sum_over_workers",
]


def cached_copies(pool: BlockPool, block_hash: Any) -> list[KVCacheBlock]:
    """Return the blocks that hold the same content; vLLM keeps copies that requests computed at the same time."""
    entry = pool.cached_block_hash_to_block._cache.get(block_hash)
    if entry is None:
        return []
    return list(entry.values()) if isinstance(entry, dict) else [entry]


def host_policy_of(manager: TieringOffloadingManager) -> CachePolicy:
    """Return the policy that vLLM made for the host tier from the names in the configuration."""
    return manager.primary_tier._policy


def kv_bytes_per_block(kv_cache_config: KVCacheConfig) -> int:
    """Return the bytes of a block of KV over all layers, on one worker; 0 where there is no KV memory."""
    if not kv_cache_config.num_blocks or not kv_cache_config.kv_cache_tensors:
        return 0
    total_bytes = kv_cache_config.kv_cache_tensors[0].size  # each tensor names the whole allocation's size
    return int(total_bytes // kv_cache_config.num_blocks)


def adopt_chunks(manager: TieringOffloadingManager, chunks: Mapping[OffloadKey, int]) -> None:
    """Make the host tier, which is empty, hold ``chunks`` of its memory: key -> number of the chunk."""
    tier = manager.primary_tier
    assert not tier._num_allocated_chunks
    for key, chunk_id in chunks.items():
        status = ChunkStatus(chunk_id)
        status.ref_cnt = 0
        tier._policy.insert(key, status)
        tier._policy.mark_evictable(key)
    if chunks:
        used = set(chunks.values())
        tier._num_allocated_chunks = max(used) + 1
        tier._free_list = [chunk_id for chunk_id in range(max(used)) if chunk_id not in used]
        tier._num_evictable_cache_chunks = len(used)


def stores_from(connector: OffloadingConnector, request_id: str) -> float:
    """Return at how many tokens of a running request the offloading has the next chunk to store: never is infinity."""
    offloading = connector.scheduler
    if (state := offloading._req_status.get(request_id)) is None:
        return 0.0
    limit = math.inf if state.max_offload_tokens is None else state.max_offload_tokens
    if offloading.config.offload_prompt_only:
        limit = min(limit, state.req.num_prompt_tokens)
    groups = zip(offloading.config.kv_group_configs, state.group_states, strict=True)
    ends = [(group.next_stored_chunk_idx + 1) * config.tokens_per_chunk for config, group in groups]
    return min((end for end in ends if end <= limit), default=math.inf)


def has_offloading_news(connector: OffloadingConnector, output: SchedulerOutput) -> bool:
    """Return whether a step brings the offloading what no list of requests says: loads, flushes, copies of blocks."""
    offloading, blocks = connector.scheduler, output.kv_connector_block_state
    return bool(
        offloading._current_batch_load_jobs
        or offloading._current_batch_jobs_to_flush
        or offloading._current_batch_allocated_block_ids
        or output.kv_cache_block_copies
        or (blocks is not None and blocks.boundary_state_offloads)
    )


def has_loaded(connector: OffloadingConnector, output: KVConnectorOutput) -> bool:
    """Return whether a copy into the engine's KV memory is among those that workers say have ended."""
    jobs = connector.scheduler._jobs
    ended = (jobs.get(job_id) for job_id in output.kv_connector_worker_meta.completed_jobs)
    return any(job is not None and not job.is_store for job in ended)  # a reset has forgotten the jobs before it


class NothingToCopy(OffloadingConnectorMetadata):
    """What workers get in a step in which nothing is copied, or was and is still to be told of."""

    def __init__(self) -> None:
        super().__init__(load_jobs={}, store_jobs={}, jobs_to_flush=None)

    def __reduce__(self) -> str:
        return "NOTHING_TO_COPY"  # by name: it goes to the workers in nearly every step of an answer


NOTHING_TO_COPY = NothingToCopy()
"""The one there is."""


def end_quiet_step(connector: OffloadingConnector) -> OffloadingConnectorMetadata:
    """Do what the offloading does at the end of every step, with news or without; return that there is nothing to do.

    Its manager takes up copies between the tiers that have ended, and begins those that lookups have asked for: where
    there is no tier below host memory, it has nothing to do.
    """
    manager = connector.scheduler.manager
    if manager.secondary_tiers:
        manager.on_schedule_end(ScheduleEndContext((), ()))
    if connector.scheduler._jobs:  # copies that workers have not told the end of
        return OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=set())
    return NOTHING_TO_COPY


def needs_steps(connector: OffloadingConnector) -> bool:
    """Return whether the offloading has something to do that only an engine's step does, with requests or without.

    vLLM steps as well while chunks of host memory wait for a tier below to take them. That may be a slow disk: what
    becomes of them is taken in with the next step, and no step brings it nearer.
    """
    offloading = connector.scheduler
    manager = offloading.manager
    return bool(
        offloading._jobs
        or any(job.transfer_job.is_promotion for job in manager._jobs.values())
        or any(state.pending_cascade_keys for state in manager._req_state.values())
        or any(tier.has_pending_work() for tier in manager.secondary_tiers)
    )


def num_free_chunks(connector: OffloadingConnector) -> int:
    """Return how many chunks fit into host memory without anything going for them."""
    num_free: int = connector.scheduler.manager.primary_tier._get_num_free_chunks()
    return num_free


def num_open_copies(connector: OffloadingConnector) -> int:
    """Return how many copies between the tiers are under way, as far as the scheduler was told."""
    return len(connector.scheduler._jobs) + len(connector.scheduler.manager._jobs)


def newest_copy_below(connector: OffloadingConnector) -> int | None:
    """Return the number of the latest open copy between host memory and a tier below; None where there is none."""
    newest: int | None = max(connector.scheduler.manager._jobs, default=None)
    return newest


def attach_utilities() -> None:
    """Let the server's process call ``confirm`` and ``report`` of this one's scheduler, as vLLM's own utilities."""

    def ragcache_confirm(core: EngineCore, speculation_id: str) -> dict[str, object] | None:
        report: dict[str, object] | None = core.scheduler.confirm(speculation_id)
        return report

    def ragcache_report(core: EngineCore) -> dict[str, object]:
        report: dict[str, object] = core.scheduler.report()
        return report

    setattr(EngineCore, _CONFIRM, ragcache_confirm)
    setattr(EngineCore, _REPORT, ragcache_report)


async def call_confirm(engine_client: Any, speculation_id: str) -> dict[str, Any] | None:
    """Call what :func:`attach_utilities` attached in the engine's process; it answers when the running step is done.

    Of several data-parallel engines the answer is the first one's.
    """
    report: dict[str, Any] | None = await engine_client.engine_core.call_utility_async(_CONFIRM, speculation_id)
    return report


async def call_report(engine_client: Any) -> dict[str, Any]:
    """Return the report of the engine's scheduler, as :func:`call_confirm` gets one."""
    report: dict[str, Any] = await engine_client.engine_core.call_utility_async(_REPORT)
    return report


def hash_seed(algorithm: str) -> str | None:
    """Return what the chain of block hashes begins with, for other processes to find the same keys.

    None where they cannot: vLLM draws it at random for algorithms whose collisions could be made on purpose.
    """
    function = get_hash_fn_by_name(algorithm)
    if function in kv_cache_utils._NON_CRYPTO_HASH_FUNCTIONS:
        return None
    return str(kv_cache_utils.resolve_none_hash_seed(function))


@contextmanager
def in_forward(
    vllm_config: Any, metadata: Mapping[str, Any], slot_mapping: Mapping[str, Any], num_tokens: int
) -> Iterator[None]:
    """Let the model run inside on ``num_tokens`` of our own, uncompiled, whatever step is going on around."""
    with set_forward_context(
        dict(metadata), vllm_config, num_tokens=num_tokens, slot_mapping=dict(slot_mapping), skip_compiled=True
    ):
        yield


def sum_over_workers(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``values`` over the workers of a tensor-parallel model, the same on each of them."""
    summed: torch.Tensor = tensor_model_parallel_all_reduce(values)
    return summed


def connector_of_this_worker() -> KVConnectorBase_V1 | None:
    """Return the connector that vLLM made in this worker's process."""
    return get_kv_transfer_group() if has_kv_transfer_group() else None


def keep_from_storing(connector: OffloadingConnector, request_id: str, num_tokens: int) -> None:
    """Make the offloading store no more than the first ``num_tokens`` of a request, and forget the keys beyond."""
    offloading = connector.scheduler
    if (state := offloading._req_status.get(request_id)) is None:
        return
    limit = state.max_offload_tokens
    state.max_offload_tokens = num_tokens if limit is None else min(limit, num_tokens)
    for config, group in zip(offloading.config.kv_group_configs, state.group_states, strict=True):
        del group.offload_keys[num_tokens // config.tokens_per_chunk :]


def fence_blocks(connector: OffloadingConnector, block_ids: Sequence[int]) -> None:
    """Have stores out of these blocks end before this step writes to them, as vLLM does for blocks that it computes."""
    connector.scheduler._current_batch_allocated_block_ids.update(block_ids)


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
