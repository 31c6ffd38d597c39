"""vLLM's own scheduler with ours on top, and a model of a worker that knows what each block of KV holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256 as digest
from itertools import count
from typing import Any, cast

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.vllm import set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.vllm_plugin.cache.controller import CacheController
from ragcache_core.vllm_plugin.connector.gpu_connector import DocumentConnector
from ragcache_core.vllm_plugin.scheduler.scheduler import AsyncTreeScheduler, SyncTreeScheduler
from ragcache_core.wire import KEY, encode_kv_transfer_params
from tests.conftest import DEMO_MODEL

BLOCK = 16
_MODULE = "tests.engine.vllm_plugin.scheduler_scene"
init_none_hash(sha256)
block_hasher = get_request_block_hasher(BLOCK, sha256)


_BYTES: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(**_BYTES)
LATENT = MLAAttentionSpec(**{**_BYTES, "head_size": 2})
"""As DeepSeek's latent attention has it: one vector for keys and values."""
WINDOW = SlidingWindowSpec(**_BYTES, sliding_window=64)
STATE = MambaSpec(block_size=BLOCK, shapes=((16,),), dtypes=(torch.float32,), mamba_cache_mode="align")
"""One state of a request that runs, kept where a step ends with a block: as of a gated delta net."""


class LoadingConnector(DocumentConnector):
    """Finds the tokens of some requests elsewhere, and brings them in the background."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_elsewhere: dict[str, int] = {}

    def _match_below(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self.num_elsewhere.get(request.request_id, 0) - num_computed_tokens
        return (num_tokens, True) if num_tokens > 0 else (0, False)

    def _load(self, request: Request, blocks: Any, num_external_tokens: int) -> dict[Any, int]:
        return {}


@dataclass
class Stage:
    """An engine without an engine: requests come, steps run, answers are a digest of everything before a token."""

    num_blocks: int = 400
    is_async: bool = False
    is_gpu: bool = False
    groups: tuple[KVCacheSpec, ...] = (FULL,)
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    settings: Mapping[str, Any] = field(default_factory=dict)
    connector: str = "LoadingConnector"
    policy: str = "fcfs"
    max_loras: int = 0
    """How many LoRA adapters the worker holds at a time; 0: it takes none."""

    def __post_init__(self) -> None:
        groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(self.groups)]
        mode = "align" if STATE in self.groups else "none"
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True, mamba_cache_mode=mode)
        cache.num_gpu_blocks = self.num_blocks
        config = VllmConfig(
            model_config=ModelConfig(model=str(DEMO_MODEL), dtype="float32", max_model_len=2048),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=2048,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=self.is_async,
                policy=self.policy,
            ),
            lora_config=LoRAConfig(max_lora_rank=8, max_loras=self.max_loras) if self.max_loras else None,
            kv_transfer_config=KVTransferConfig(
                kv_connector=self.connector,
                kv_connector_module_path=_MODULE,
                kv_role="kv_both",
                kv_connector_extra_config={"ragcache": {"policy": "pgdsf", **self.settings}},
            ),
        )
        cache.num_gpu_blocks = self.num_blocks
        kind = AsyncTreeScheduler if self.is_async else SyncTreeScheduler
        self.scheduler: Scheduler = scheduler_of(kind, config, KVCacheConfig(self.num_blocks, [], groups))
        self.scheduler._speculates_beside_answers = self.is_gpu
        self.controller: CacheController = self.scheduler._controller
        self.numbers = count()
        self.requests: dict[str, Request] = {}
        self.slots: dict[tuple[int, int], bytes] = {}
        self.weights: dict[int, bytes] = {}  # of adapters by their ids: what their KV begins with
        self.stored: dict[str, bytes] = {}  # the weights whose KV a request finds elsewhere
        self.running: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.loaded: set[str] = set()
        self.answers: dict[str, list[int]] = {}
        self.steps: list[dict[str, int]] = []

    def ask(
        self,
        documents: str,
        *,
        speculation: str | None = None,
        num_tokens: int = 160,
        num_answers: int = 4,
        question: int | None = None,
        is_loaded: bool = False,
        metadata: Mapping[str, object] | None = None,
        salt: str | None = None,
        image: tuple[int, int] | None = None,
        image_hash: str | None = None,
        adapter: LoRARequest | None = None,
    ) -> str:
        """Send a request over documents, each of ``num_tokens`` tokens; a question of its own unless one is given.

        ``metadata`` replaces parts of what it says of itself. One with a ``salt`` shares no KV with others. An
        ``image`` begins at the first of the two numbers, and is as many tokens as the second says; it is another one in
        each request, unless its ``image_hash`` is given.
        """
        number = next(self.numbers)
        tokens: list[int] = []
        segments = []
        for name in documents:
            segments.append(PromptSegment(SegmentKind.DOCUMENT, len(tokens), len(tokens) + num_tokens, name))
            tokens += [ord(name) * 100 + i % 97 for i in range(num_tokens)]
        tokens += [7, 100 + (number if question is None else question), 8, 9]
        params = SamplingParams(max_tokens=num_answers, ignore_eos=True)
        kv_transfer_params: dict[str, Any] = encode_kv_transfer_params(segments, speculation=speculation)
        kv_transfer_params[KEY].update(metadata or {})
        params.extra_args = {"kv_transfer_params": kv_transfer_params}
        images = (
            []
            if image is None
            else [MultiModalFeatureSpec(None, "image", image_hash or f"i{number}", PlaceholderRange(*image))]
        )
        request = Request(
            *(f"r{number}", tokens, params, None),
            mm_features=images,
            lora_request=adapter,
            cache_salt=salt,
            block_hasher=block_hasher,
        )
        self.stored[request.request_id] = self._weights_of(request)
        self.requests[request.request_id] = request
        self.answers[request.request_id] = []
        if is_loaded:
            self.scheduler.connector.num_elsewhere[request.request_id] = len(documents) * num_tokens // BLOCK * BLOCK
        self.scheduler.add_request(request)
        return str(request.request_id)

    def step(self) -> dict[str, int]:
        """Schedule a step and run it, or the one before where two are in flight; return what was scheduled."""
        output = self.scheduler.schedule()
        self.steps.append(dict(output.num_scheduled_tokens))
        if output.total_num_scheduled_tokens or not self.is_async:  # as vLLM's loops ask for it
            self.scheduler.get_grammar_bitmask(output)
        self.running.append((output, self._run(output)))
        if len(self.running) > int(self.is_async):
            self._finish()
        self.check()
        return self.steps[-1]

    def finish_all(self, max_steps: int = 500) -> None:
        """Run until nothing is left, and bring what is found elsewhere at once."""
        for _ in range(max_steps):
            if not (self.scheduler.has_unfinished_requests() or self.loaded):
                break
            self.finish_all_loading()
            self.step()
        while self.running:
            self._finish()
        assert not self.scheduler.has_unfinished_requests(), "it hangs"

    def abort(self, request_id: str) -> None:
        self.finish_all_loading()  # its blocks are its own until then
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.check()

    def expected(self, request_id: str) -> list[int]:
        """Return the answer to a request, whatever happens to it on the way."""
        request = self.requests[request_id]
        tokens = list(request.prompt_token_ids or [])
        for _ in range(request.max_tokens):
            tokens.append(_answer(tokens))
        return tokens[request.num_prompt_tokens :]

    def check(self) -> None:
        """Assert what holds between steps."""
        scheduler = self.scheduler
        waiting = [*scheduler.waiting, *scheduler.kv_holding_waiting]
        assert len(waiting) == len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
        everywhere = [r.request_id for r in (*waiting, *scheduler.running)]
        assert sorted(everywhere) == sorted(set(everywhere)), "a request in two places"
        assert set(everywhere) <= set(scheduler.requests)

    def check_nothing_is_left(self) -> None:
        """Assert that no request, block or protection stays behind."""
        assert not self.scheduler.requests
        assert self.controller.is_idle
        assert not self.controller.tree.protected_keys
        assert self.controller.num_pending_prefills == 0
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks - 1

    @property
    def uses(self) -> dict[str, int]:
        """How often each document was used, as the engine reports it."""
        hottest = cast("list[dict[str, Any]]", self.controller.report()["hottest_documents"])
        return {document["doc_id"]: document["frequency"] for document in hottest}

    @property
    def running_ids(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Write KV for what was scheduled, and answer from the KV: a wrong block gives a wrong answer."""
        sampled: list[list[int]] = []
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            end = request.num_computed_tokens
            first = end - num_scheduled
            known = [*request.all_token_ids, *self._in_flight(request_id)]
            states = [self._weights_of(request)]
            for token in known[:end]:
                states.append(_chain(states[-1], token))
            tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            for group, (spec, block_ids) in enumerate(zip(self.groups, tables, strict=True)):
                held = [bytes([group]) + state for state in states]
                if isinstance(spec, MambaSpec):
                    if first:
                        assert self._slot(block_ids, first - 1) == held[first], f"wrong state for {request_id}"
                    self.slots[block_ids[(end - 1) // BLOCK], (end - 1) % BLOCK] = held[end]
                    continue
                for position in range(first, end):
                    self.slots[block_ids[position // BLOCK], position % BLOCK] = held[position + 1]
                seen = max(first - 63, 0) if isinstance(spec, SlidingWindowSpec) else 0
                for position in range(seen, end):
                    assert self._slot(block_ids, position) == held[position + 1], f"wrong KV for {request_id}"
            sampled.append([_answer(known)] if end >= len(known) else [])
        ids = list(output.num_scheduled_tokens)
        received = KVConnectorOutput(finished_recving=set(self.loaded)) if self.loaded else None
        self.loaded.clear()
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=received,
        )

    def finish_loading(self, request_id: str) -> None:
        """Bring what a request found elsewhere; vLLM hears of it with the next step."""
        request = self.requests[request_id]
        tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        before = self.stored[request_id]
        for position in range(request.num_computed_tokens):
            before = _chain(before, request.all_token_ids[position])
            for group, block_ids in enumerate(tables):
                self.slots[block_ids[position // BLOCK], position % BLOCK] = bytes([group]) + before
        self.loaded.add(request_id)

    def finish_all_loading(self) -> None:
        """Bring what was found elsewhere, if vLLM has not been told so already."""
        told = [ran.kv_connector_output.finished_recving for _, ran in self.running if ran.kv_connector_output]
        written = self.loaded.union(self.scheduler.finished_recving_kv_req_ids, *told)
        for request in self.scheduler.kv_holding_waiting:
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and request.request_id not in written:
                self.finish_loading(request.request_id)

    def _in_flight(self, request_id: str) -> list[int]:
        """Return the answers of steps whose output vLLM has not seen yet."""
        return [
            token
            for _, ran in self.running
            if request_id in ran.req_id_to_index
            for token in ran.sampled_token_ids[ran.req_id_to_index[request_id]]
        ]

    def _weights_of(self, request: Request) -> bytes:
        return b"" if request.lora_request is None else self.weights.get(request.lora_request.lora_int_id, b"")

    def _slot(self, block_ids: list[int], position: int) -> bytes:
        return self.slots.get((block_ids[position // BLOCK], position % BLOCK), b"never written")

    def _finish(self) -> None:
        output, ran = self.running.pop(0)
        for outputs in self.scheduler.update_from_output(output, ran).values():
            for answer in outputs.outputs:
                self.answers[answer.request_id] += answer.new_token_ids


def scheduler_of(kind: Callable[..., Any], config: VllmConfig, kv_config: KVCacheConfig) -> Any:
    """Return a scheduler as vLLM's engine makes it."""
    with set_current_vllm_config(config):
        return kind(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )


def _chain(before: bytes, token: int) -> bytes:
    return digest(before + token.to_bytes(4, "big")).digest()


def _answer(tokens: list[int]) -> int:
    state = b""
    for token in tokens:
        state = _chain(state, token)
    return 1000 + int.from_bytes(state[:2], "big") % 1000
