"""Our scheduler over GPU and host memory without workers, and steps as vLLM's engine makes them, two in flight."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from ragcache_core.client.launch import arguments
from ragcache_core.config import CacheConfig as Tiers
from ragcache_core.runtime.shared_memory import EngineFiles, new_engine_id
from ragcache_core.vllm_plugin.offload.layer_loads import LayerLoad, LayerLoadMetadata
from ragcache_core.vllm_plugin.other_connectors import ragcache_connector
from ragcache_core.vllm_plugin.scheduler.scheduler import AsyncTreeScheduler, SyncTreeScheduler
from tests.conftest import DEMO_MODEL
from tests.engine.vllm_plugin.scheduler_scene import scheduler_of

BLOCK = 16
BLOCK_BYTES = 2 * BLOCK * 8 * 4
"""Bytes of a block's keys and values."""
ANSWER = 5
"""The token that is always sampled."""
_WINDOW = 40
_ATTENTION: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**_ATTENTION)
LATENT = MLAAttentionSpec(**{**_ATTENTION, "head_size": 16})
"""As DeepSeek's latent attention has it: one vector for keys and values."""
WINDOW = SlidingWindowSpec(**_ATTENTION, sliding_window=_WINDOW)
STATE = MambaSpec(block_size=BLOCK, shapes=((BLOCK_BYTES // 4,),), dtypes=(torch.float32,), mamba_cache_mode="align")
"""As of a gated delta net: kept where a step ends with a block."""


@contextmanager
def host_scheduler(
    num_blocks: int,
    host_bytes: str,
    emits_events: bool = False,
    is_async: bool = False,
    *,
    files: EngineFiles | None = None,
    most_host_bytes: int | None = None,
    profile: Path | None = None,
    groups: Sequence[KVCacheSpec] = (FULL,),
    **tiers: Any,
) -> Iterator[Any]:
    """Yield our scheduler over GPU and host memory, without an engine that runs its steps.

    One with ``files`` leaves its host memory behind, as an engine that is killed; ``tiers`` are further fields of a
    ``CacheConfig``.
    """
    init_none_hash(sha256)
    own = files or EngineFiles(new_engine_id(os.getpid()), host_bytes=1 << 30)
    own.prepare()
    config, kv_config = engine_config(
        num_blocks,
        host_bytes,
        own.engine_id,
        emits_events=emits_events,
        profile=profile,
        most_host_bytes=most_host_bytes,
        groups=groups,
        **tiers,
    )
    config.scheduler_config.async_scheduling = is_async
    try:
        scheduler = scheduler_of(AsyncTreeScheduler if is_async else SyncTreeScheduler, config, kv_config)
        yield scheduler
        scheduler.shutdown()
    finally:
        if files is None:
            own.remove()


def engine_config(
    num_blocks: int,
    host_bytes: str,
    engine_id: str,
    *,
    emits_events: bool = False,
    profile: Path | None = None,
    most_host_bytes: int | None = None,
    groups: Sequence[KVCacheSpec] = (FULL,),
    max_num_batched_tokens: int = 64,
    **tiers: Any,
) -> tuple[VllmConfig, KVCacheConfig]:
    """Return what vLLM's engine has, of a layer for each of the ``groups``, with ``BLOCK_BYTES`` to a block."""
    page = BLOCK_BYTES
    layers = {f"layer {i}": spec for i, spec in enumerate(groups)}
    tensors = [
        KVCacheTensor(page * num_blocks, [layer], layer_stride=page * num_blocks, block_stride=page) for layer in layers
    ]
    mode = "align" if STATE in groups else "none"
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True, mamba_cache_mode=mode)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=ModelConfig(model=str(DEMO_MODEL), dtype="float32", max_model_len=2048),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=2048,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(
            **arguments.transfer_config(
                Tiers(host_bytes=host_bytes, **tiers).resolved(), engine_id, profile, (), most_host_bytes
            )
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if emits_events else None,
    )
    return config, KVCacheConfig(
        num_blocks, tensors, [KVCacheGroupSpec([layer], spec) for layer, spec in layers.items()]
    )


def request(name: str, tokens: list[int], num_answers: int, *, params: dict[str, Any] | None = None) -> Request:
    """Return a request; ``params`` are its ``kv_transfer_params``."""
    sampling = SamplingParams(max_tokens=num_answers, ignore_eos=True)
    if params:
        sampling.extra_args = {"kv_transfer_params": params}
    return Request(name, tokens, sampling, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


class _HostRows:
    """Host memory, whose bytes go to disk and come back: a row holds the number of some tokens, over and over."""

    numbers: ClassVar[dict[tuple[int, ...], int]] = {}
    tokens: ClassVar[list[tuple[int, ...]]] = []

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def write(self, chunk: int, tokens: tuple[int, ...]) -> None:
        if tokens not in self.numbers:
            self.numbers[tokens] = len(self.tokens)
            self.tokens.append(tokens)
        self._row(chunk)[:] = self.numbers[tokens]

    def read(self, chunk: int) -> tuple[int, ...]:
        (number,) = set(self._row(chunk).tolist())
        return self.tokens[number]

    def _row(self, chunk: int) -> np.ndarray:
        """Return a view that is dropped at once: vLLM cannot unmap host memory that has a view."""
        return np.frombuffer(self._view, np.uint8).reshape(self._view.shape)[chunk].view(np.int64)


@dataclass
class Steps:
    """vLLM's ``EngineCore.step``, or ``step_with_batch_queue`` with two steps in flight, over workers that copy late.

    A store ends ``store_steps`` steps after the one that asked for it, one at least as with vLLM's workers, or with
    the step that needs it to; a load ends at once. A store copies as late as it may: after that step has computed. A
    layer-wise load copies before its step computes, and workers say so with the stores of that step.

    Memory holds what KV stands for: the tokens of a block and all before it. What a step reads is looked at, and so is
    what host memory holds when a store of it is told of.
    """

    scheduler: Any
    is_async: bool
    store_steps: int = 1
    num: int = 0
    num_stored: int = 0
    """Blocks that host memory held when they were said to be stored."""
    num_layer_loads: int = 0
    _loading: dict[int, tuple[int, LayerLoad, list[tuple[int, ...]]]] = field(default_factory=dict)
    _in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)
    _storing: dict[int, int] = field(default_factory=dict)
    _copies: dict[int, Any] = field(default_factory=dict)
    _engine: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _host: _HostRows = field(init=False)
    _tokens_of: ClassVar[dict[bytes, tuple[int, ...]]] = {}
    """Of every engine of this process: what one computed, another finds on disk."""

    def __post_init__(self) -> None:
        tier = ragcache_connector(self.scheduler.connector).tiers.host
        self._host = _HostRows(tier.get_kv_memoryview())
        tier.complete_store = partial(self._on_stored, tier, tier.complete_store)

    def step(self) -> bool:
        """Make one call of the engine's loop; return whether there was anything to do."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.num += 1
            is_computing = output.total_num_scheduled_tokens > 0
            if is_computing or not self.is_async:
                self.scheduler.get_grammar_bitmask(output)
            self._in_flight.append((output, self._run(output)))
            if self.is_async and len(self._in_flight) < 2 and (is_computing or self.scheduler.has_requests()):
                return True
        elif not self._in_flight:
            return False
        self._update(*self._in_flight.popleft())
        return True

    def rest(self, max_steps: int = 200) -> None:
        """Step until there is nothing to do."""
        for _ in range(max_steps):
            if not self.step():
                return
        left = list(self.scheduler.requests), ragcache_connector(self.scheduler.connector).copies.num_jobs
        raise AssertionError(f"the engine goes on stepping: requests and copies left are {left}")

    def _update(self, output: SchedulerOutput, ran: ModelRunnerOutput) -> None:
        self.scheduler.update_from_output(output, ran)

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        meta, others = output.kv_connector_metadata, ()
        if isinstance(meta, MultiKVConnectorMetadata):
            *others, meta = meta.metadata
        self._storing.update(dict.fromkeys(meta.store_jobs, self.num + self.store_steps))
        self._copies.update(meta.store_jobs)
        ended = [job for job in self._storing if job in (meta.jobs_to_flush or ())]
        self._store(ended)
        for other in others:
            self._engine.update(other.loads)
        self._load_layers(meta)
        self._compute(output)
        for job in meta.load_jobs.values():
            for chunk, block in zip(job.src_spec.block_ids.tolist(), job.dst_spec.block_ids.tolist(), strict=True):
                self._engine[block] = self._host.read(chunk)
        due = [job for job, last in self._storing.items() if last <= self.num]
        self._store(due)
        ended += due
        told = OffloadingWorkerMetadata()
        for job in (*ended, *meta.load_jobs, *self._end_layer_loads()):
            told.mark_completed(job)
        said: Any = told if told.completed_jobs else None
        if others and said is not None:
            said = MultiKVConnectorWorkerMetadata((*[None] * len(others), told))
        copied = KVConnectorOutput(
            finished_recving={job.req_id for job in meta.load_jobs.values()}.union(*[o.received for o in others]),
            kv_connector_worker_meta=said,
        )
        ids = list(output.num_scheduled_tokens)
        asked = [self.scheduler.requests[name] for name in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[[] if r.is_prefill_chunk else [ANSWER] for r in asked],
            kv_connector_output=None if copied.is_empty() else copied,  # as workers leave it out
        )

    def _load_layers(self, meta: Any) -> None:
        for load in meta.layer_loads if isinstance(meta, LayerLoadMetadata) else ():
            held = [self._host.read(row) for row in load.rows.tolist()]
            self._engine.update(zip(load.blocks.tolist(), held, strict=True))
            self._loading[load.number] = self.num + self.store_steps - 1, load, held
            self.num_layer_loads += 1

    def _end_layer_loads(self) -> list[int]:
        """Return the layer-wise loads that end in this step; up to now host memory holds what they read."""
        ended = [number for number, (last, _, _) in self._loading.items() if last <= self.num]
        for number in ended:
            _, load, held = self._loading.pop(number)
            assert [self._host.read(row) for row in load.rows.tolist()] == held, "a row that is read was written"
        return ended

    def _compute(self, output: SchedulerOutput) -> None:
        read: list[tuple[str, int, tuple[int, ...]]] = []
        for name, num_tokens in output.num_scheduled_tokens.items():
            asked = self.scheduler.requests[name]
            first, end = asked.num_computed_tokens - num_tokens, asked.num_computed_tokens
            tokens = (*asked.prompt_token_ids, *[ANSWER] * asked.max_tokens)
            for i in range(first // BLOCK, end // BLOCK):
                self._tokens_of.setdefault(_key_of(tokens[: (i + 1) * BLOCK]), tokens[: (i + 1) * BLOCK])
            for i, key in enumerate(asked.block_hashes if asked.lora_request else ()):
                self._tokens_of.setdefault(key, tokens[: (i + 1) * BLOCK])
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            groups = self.scheduler.kv_cache_config.kv_cache_groups
            for number, (group, blocks) in enumerate(zip(groups, tables, strict=True)):
                held = [content(number, tokens[: min(end, (i + 1) * BLOCK)]) for i in range(-(-end // BLOCK))]
                if isinstance(group.kv_cache_spec, MambaSpec):
                    if first:
                        before = self._engine.get(blocks[(first - 1) // BLOCK])
                        assert before == content(number, tokens[:first]), f"{name} goes on from another state"
                    self._engine[blocks[len(held) - 1]] = held[-1]
                    continue
                seen = max(first - _WINDOW + 1, 0) if isinstance(group.kv_cache_spec, SlidingWindowSpec) else 0
                for block, new in zip(blocks[first // BLOCK :], held[first // BLOCK :], strict=False):
                    old = self._engine.get(block, ())
                    if old[: len(new)] != new or (len(old) - 2) // BLOCK != (len(new) - 2) // BLOCK:
                        self._engine[block] = new  # else another has computed more of the same block
                read += [(name, blocks[i], held[i]) for i in range(seen // BLOCK, len(held))]
        for name, block, wanted in read:
            assert self._engine.get(block, ())[: len(wanted)] == wanted, (
                f"{name} reads KV of other tokens in block {block}"
            )

    def _store(self, jobs: list[int]) -> None:
        for number in jobs:
            del self._storing[number]
            job = self._copies.pop(number)
            for block, chunk in zip(job.src_spec.block_ids.tolist(), job.dst_spec.block_ids.tolist(), strict=True):
                self._host.write(chunk, self._engine[block])

    def _on_stored(
        self, tier: Any, complete: Callable[..., None], keys: Any, context: Any, success: bool = True, **readers: int
    ) -> None:
        for key in keys if success else ():
            if (row := tier.row_of(key)) is not None:  # a reset may have dropped it
                stored = self._host.read(row)
                said = content(tier.groups.group_of(key), self._tokens_of[tier.groups.unit_of(key)])
                assert stored == said, "a chunk is not what it is said to be"
                self.num_stored += 1
        complete(keys, context, success, **readers)


def content(group: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return what stands for a block: whose layers it is of, and the tokens up to its end."""
    return (-group, *tokens)


def _key_of(tokens: tuple[int, ...]) -> bytes:
    """Return the hash of the last block of some tokens."""
    key: bytes = request("", list(tokens), 1).block_hashes[-1]
    return key


def tokens(seed: int, count: int) -> list[int]:
    """Return as many tokens, which ``seed`` decides."""
    return random.Random(seed).choices(range(10, 900), k=count)


def serve_at_random(scheduler: Any, steps: Steps, dice: random.Random) -> list[Request]:
    """Serve 120 requests about pairs of six documents, some given up, with resets of host memory; return them.

    In the end nothing is left of them. ``steps`` checks what they read.
    """
    documents = [tokens(100 + i, dice.randrange(20, 70)) for i in range(6)]
    asked = []
    for number in range(120):
        words = [*dice.choice(documents), *dice.choice(documents), *tokens(number, 9)]
        asked.append(request(f"r{number}", words, dice.randrange(1, 40)))
        scheduler.add_request(asked[-1])
        for _ in range(dice.randrange(6)):
            steps.step()
        if number % 7 == 3 and scheduler.requests:
            scheduler.finish_requests(dice.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        if number % 50 == 30:
            scheduler.connector.reset_cache()
    steps.rest(max_steps=5000)
    own = ragcache_connector(scheduler.connector)
    assert not scheduler.requests
    assert not own.copies.num_requests
    assert not any(own._host._num_reads[row] for row in own._host.contents().values())
    return asked
