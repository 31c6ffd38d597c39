"""The scheduler: vLLM's own, with the knowledge tree's order of eviction, our queue, and idle time for speculation.

A speculative request is sent ahead, while a search goes on, and is real once it is confirmed. It must not delay a real
one: it is admitted while no real request is queued or prefilled, in steps short enough for a real arrival to wait for,
and preempted when one arrives. Its finished blocks stay cached: a real request for the same documents, and itself when
it resumes, find them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import islice
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, cast

from vllm.platforms import current_platform

from ragcache_core.config import keeping
from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of
from ragcache_core.memory import collect_rarely, freeze_survivors
from ragcache_core.runtime.clock import steady_s
from ragcache_core.vllm_plugin.build_context import building
from ragcache_core.vllm_plugin.compat import (
    AsyncScheduler,
    BlockPool,
    RequestStatus,
    Scheduler,
    attach_utilities,
    broadcast_to_api_servers,
    building_pools,
    front_end_of,
    prompt_of_keys,
)
from ragcache_core.vllm_plugin.other_connectors import children, is_own, ragcache_connector
from ragcache_core.vllm_plugin.refusals import check_engine
from ragcache_core.vllm_plugin.scheduler.block_pool import TreeBlockPool, TreeFreeBlockQueue
from ragcache_core.vllm_plugin.scheduler.request_queue import CacheAwareRequestQueue

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.cache.operator_calls import Steps

logger = logger_of(__name__)

_TOKENS_ALONE = 512
"""Tokens of a step that computes speculation only: a real arrival waits for it to end."""
_TOKENS_BESIDE_ANSWERS = 256
"""The same where real requests are being answered in that step: on a GPU these are nearly free then."""


class _TreeScheduling:
    """What RAGCache adds to either of vLLM's schedulers."""

    # vLLM's, as far as they are used here
    connector: Any
    kv_cache_config: Any
    kv_cache_manager: Any
    scheduler_config: Any
    requests: dict[str, Request]
    running: list[Request]
    waiting: Any
    kv_holding_waiting: Any
    deferred_waiting: set[Request]
    prev_step_scheduled_req_ids: set[str]
    block_size: int
    max_num_scheduled_tokens: int
    need_mamba_block_aligned_split: bool
    _inflight_prefills: set[Request]
    _free_request_blocks: Callable[[Request], None]
    _handle_blocked_waiting_request: Callable[[Request], bool]

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        check_engine(vllm_config)
        with (
            building(vllm_config, kv_cache_config, has_room=self.has_room) as context,
            building_pools(BlockPool if context.groups is None else TreeBlockPool),
        ):
            super().__init__(vllm_config, kv_cache_config, *args, **kwargs)  # type: ignore[call-arg]
        self._own_connector = ragcache_connector(self.connector)
        if self._own_connector is not self.connector:
            others = [child for child in children(vllm_config.kv_transfer_config) if not is_own(child)]
            self._own_connector.run_alongside(keeping(others))
        controller = context.controller
        if controller is None:
            raise ConfigError(
                "RAGCacheScheduler needs a connector of RAGCache: set --kv-transfer-config as Engine.launch and "
                "'ragcache serve' do, or leave --scheduler-cls out"
            )
        collect_rarely()
        self._has_own_process = parent_process() is not None
        self._controller = controller
        _, self._num_front_ends = front_end_of(vllm_config)
        self._queue: CacheAwareRequestQueue | None = None
        self._step_began_s = 0.0
        self._has_other_weights = False
        self._outdated_loads: list[Request] = []
        self._speculates_beside_answers = not current_platform.is_cpu()
        self._tree_queue: TreeFreeBlockQueue | None = None
        if context.groups is None and controller.settings.max_age is not None:
            raise ConfigError(
                f"max_age is {controller.settings.max_age:g}, but this model's groups of KV caches are in vLLM's own "
                "order, which knows no ages: leave max_age out"
            )
        if context.groups is not None:
            self._tree_queue = self.kv_cache_manager.block_pool.follow(controller)
        if controller.is_queue_ordered:
            self._take_over_queue()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._step_began_s = time.monotonic()
        self._controller.tick(steady_s())
        if self._outdated_loads:
            self._drop_outdated_loads()
        if self._queue is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._queue.real.reconsider()
        if touched := self._controller.take_touched():
            self._queue.real.touch(*map(self.requests.__getitem__, touched))
        if not self._controller.speculations:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        limit = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = min(limit, self._make_room(self._queue) or limit)
        try:
            output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = limit
        self._count_speculation(output)
        return output

    def has_requests(self) -> bool:
        """Return whether a step has something to do: to tell what left the GPU while nothing was asked is enough."""
        return super().has_requests() or bool(self.kv_cache_manager.block_pool.kv_event_queue)  # type: ignore[misc]

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Answer vLLM, which asks this when the model has begun to compute a step."""
        bitmask: GrammarOutput | None = super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]
        if bitmask is None:  # else the step's tokens wait for it; what is not done now is done when it is needed
            self.on_forward_started()
        return bitmask

    def on_forward_started(self) -> None:
        """Do what no answer waits for while the model computes."""
        if self._tree_queue is not None:
            self._tree_queue.place_returned()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if sampled := model_runner_output.sampled_token_ids:
            self._controller.on_tokens(model_runner_output.req_id_to_index, sampled, time.monotonic())
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        if (
            connector_output := model_runner_output.kv_connector_output
        ) is not None and connector_output.invalid_block_ids:
            self._compute_again(connector_output.invalid_block_ids)
        self._controller.on_step(self._step_began_s, time.monotonic())
        if self._num_front_ends > 1:
            broadcast_to_api_servers(outputs, self._num_front_ends)
        if self._has_own_process:
            freeze_survivors()
        return outputs

    def _compute_again(self, invalid_block_ids: set[int]) -> None:
        """Have every request compute for itself what another connector failed to load, and none find what any has now.

        Of requests that share such a block vLLM has the first compute it, which may end before; it lets later requests
        find the block, and what was computed behind it, meanwhile; and with two steps in flight the second has begun.
        """
        loading = (one for one in self.kv_holding_waiting if one.status == RequestStatus.WAITING_FOR_REMOTE_KVS)
        for request in (*self.running, *loading):
            (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
            first = next((i for i, block_id in enumerate(blocks) if block_id in invalid_block_ids), len(blocks))
            request.num_computed_tokens = min(request.num_computed_tokens, first * self.block_size)
            self._controller.on_approximated(request.request_id, 0, ())
        self.kv_cache_manager.evict_blocks(set(range(self.kv_cache_config.num_blocks)))

    def confirm(self, speculation: str, tenant: str | None = None) -> dict[str, object] | None:
        """Make a tenant's speculation's requests real; None are all other clients.

        Return a report where no request is left, and so no step follows with which to send one.
        """
        for request_id in self._controller.confirm(speculation, tenant):
            if self._queue is not None and self._queue.confirm(self.requests[request_id]):
                self._controller.on_waiting(request_id)
        return self._controller.report() if self._controller.is_idle else None

    def report(self) -> dict[str, object]:
        """Return what is cached and counted, also before the first step with which it is sent."""
        return self._controller.report()

    def forget(self, doc_ids: list[str]) -> dict[str, object]:
        """Delete documents from all tiers, and return the receipt, or why it cannot be done."""
        if self._tree_queue is None:
            return {"refused": "this model's groups of KV caches are in vLLM's own order, which knows no documents"}
        return self._controller.forget(set(doc_ids))

    def act_on_cache(self, action: str, body: dict[str, Any]) -> dict[str, object]:
        """Answer one of the routes of the cache's contents, or why it cannot be done; ``{}`` while it is not ready.

        It is called with the same ``token`` until it is; see :class:`OperatorCalls`.
        """
        controller = self._controller
        controller.tick(steady_s())
        match action:
            case "tick":
                return controller.report()
            case "purge" if self._tree_queue is not None:
                return controller.forget_all()
            case "list":
                call = controller.contents.list(body["sort"], body["limit"])
            case "show":
                call = controller.contents.show(body["ids"])
            case "pin":
                call = controller.pin(body["ids"], dry_run=body["dry_run"])
            case "unpin":
                call = controller.unpin(body["ids"])
            case "prefetch":
                call = self._prefetch_documents(body["ids"])
            case "tree":
                call = controller.tree_view(body["limit"])
            case _:
                return {"refused": f"{action} is unknown with this model's KV cache groups, or in this version"}
        try:
            return controller.operator_calls.advance(body["token"], call, keeps_answer=body["keeps_answer"])
        except ConfigError as error:
            return {"refused": str(error)}

    def left(self) -> dict[str, object]:
        """Return what is left of what was forgotten."""
        return self._controller.forgetting.left()

    def cached_paths(self, cursor: str, tenant: str | None = None) -> dict[str, object]:
        """Return which documents are cached after which others, as far as that has changed since ``cursor``.

        They belong to ``tenant``, or to no tenant.
        """
        return self._controller.paths_of(tenant).changes(cursor)

    def recent_requests(self, limit: int) -> dict[str, object]:
        """Return what becomes of the latest ``limit`` requests."""
        return self._controller.recent_requests(limit, time.monotonic())

    def prefetch(self, prompt: Request) -> dict[str, object]:
        """Prefetch a prompt's KV from disk into host memory; return how much that is.

        vLLM knows nothing of it. More than a quarter of host memory is not read.
        """
        _, num_fast, num_all = self._controller.leading_blocks(self._controller.last_known(prompt.block_hashes))
        num_blocks = num_all - num_fast if self._own_connector.prefetch(prompt) else 0
        return {"num_read_tokens": num_blocks * self._controller.tokens_per_block}

    def _prefetch_documents(self, doc_ids: list[str]) -> Steps:
        """Have the paths of documents that lie on disk read into host memory, as :meth:`prefetch` does."""
        ends, unknown = yield from self._controller.ends_on_disk(doc_ids)
        num_tokens, num_begun = 0, 0
        for end in ends:
            if keys := self._controller.keys_to(end):
                prompt = prompt_of_keys(keys, self._controller.tokens_per_block)
                read = self.prefetch(prompt)["num_read_tokens"]
                num_tokens, num_begun = num_tokens + cast("int", read), num_begun + bool(read)
            yield 1 + len(keys)
        num_left_out = len(ends) - num_begun
        return {
            "num_read_tokens": num_tokens,
            "num_paths": num_begun,
            "num_left_out": num_left_out,
            "unknown": unknown,
        }

    def keeping_weights(self) -> AbstractContextManager[None]:
        """Inside, resets of the caches leave alone what outlives them."""
        context: AbstractContextManager[None] = self._own_connector.keeping_weights()
        return context

    def on_weights_changed(self, why: str) -> None:
        """Forget all KV that outlives a reset of the caches: the model's weights are, or may be, others."""
        if not self._has_other_weights:  # they may come in a hundred pieces
            self._has_other_weights = True
            logger.warning(
                "RC-WEIGHTS-CHANGED: RAGCache empties its disk tier, and keeps nothing that outlives this engine: %s",
                why,
            )
        self._own_connector.forget_weights()

    def on_adapter_loads(self, adapter: LoRARequest) -> None:
        """Renew the identity of an adapter that workers will load, perhaps in place of one with the same id."""
        self.on_adapter_changed(adapter.lora_int_id)
        self._own_connector.adapter_keys.note_load(adapter)

    def on_adapter_changed(self, adapter_id: int | None) -> None:
        """Let no request use KV of an adapter's former weights; ``None`` stands for all adapters.

        Its requests in the engine, waiting and running, compute their prompts again and read no cache: they are named
        after the former weights, and so is what they leave in the cache.
        """
        self._own_connector.adapter_keys.renew(adapter_id)
        affected = [
            request
            for request in self.requests.values()
            if request.lora_request is not None and adapter_id in (None, request.lora_request.lora_int_id)
        ]
        now_s = time.monotonic()
        for request in reversed(affected):
            request.skip_reading_prefix_cache = True
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
                self._preempt_request(request, now_s)
                self.prev_step_scheduled_req_ids.discard(request.request_id)
            elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._outdated_loads.append(request)

    def _drop_outdated_loads(self) -> None:
        """Free blocks that were being loaded when their adapter changed, once vLLM releases them."""
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        for request in self._outdated_loads:
            if request.status == waiting:
                self._set_back(request)
        self._outdated_loads = [request for request in self._outdated_loads if request.status == waiting]

    def has_room(self) -> bool:
        """Return whether a speculative request that arrived now would be admitted at once."""
        if self._queue is None:
            return False
        running = self.running
        if self._controller.speculations:
            running = [request for request in running if not self._is_speculative(request)]
        if self._is_engine_wanted(self._queue, running):
            return False
        num_speculative = len(self.running) - len(running) + self._queue.num_speculative + len(self._loading())
        return num_speculative < self._controller.settings.max_prefill_bs

    def _preempt_request(self, request: Request, timestamp: float, *args: Any, **kwargs: Any) -> None:
        self._controller.insert_answer(request.request_id)
        super()._preempt_request(request, timestamp, *args, **kwargs)  # type: ignore[misc]
        self._controller.on_preempted(request.request_id, timestamp)

    def _take_over_queue(self) -> None:
        self._queue = self.waiting = CacheAwareRequestQueue(self._controller.queue, self._is_speculative)

    def _make_room(self, queue: CacheAwareRequestQueue) -> int | None:
        """Admit or preempt speculative requests; return how many tokens this step may have, None for the usual."""
        real = [request for request in self.running if not self._is_speculative(request)]
        speculative = [request for request in self.running if self._is_speculative(request)]
        loading = self._loading()
        if self._is_engine_wanted(queue, real):
            queue.allow_speculative(0)
            self.running = real
            for request in reversed(speculative):  # the first is the first to resume
                self._preempt_request(request, time.monotonic())
            for request in loading:
                self._set_back(request)
            return None
        self.running = real + speculative  # when memory runs out, the last is preempted
        num_allowed = max(self._controller.settings.max_prefill_bs - len(speculative) - len(loading), 0)
        queue.allow_speculative(num_allowed)
        if not self._may_cut_prefills((*speculative, *loading, *islice(queue, num_allowed))):
            return None
        num_answering = sum(r.num_tokens_with_spec + r.num_output_placeholders - r.num_computed_tokens for r in real)
        return int(num_answering) + (_TOKENS_BESIDE_ANSWERS if real else _TOKENS_ALONE)

    def _loading(self) -> list[Request]:
        """Return the speculative requests whose blocks are being loaded."""
        return [request for request in self.kv_holding_waiting if self._is_speculative(request)]

    def _is_engine_wanted(self, queue: CacheAwareRequestQueue, running: list[Request]) -> bool:
        """Return whether speculation now would delay a real request that is queued, loaded or prefilled.

        Without a GPU each token of a step costs as much as any other, so there an answer in the making counts too.
        """
        return (
            (bool(running) and not self._speculates_beside_answers)
            or self._controller.num_pending_prefills > 0
            or queue.num_real > 0
            or any(
                not self._is_speculative(request) and request.status != RequestStatus.WAITING_FOR_STREAMING_REQ
                for request in self.kv_holding_waiting
            )
        )

    def _set_back(self, request: Request) -> None:
        """Free the blocks that were loaded for a request, once they are: vLLM would admit it at once."""
        if not self._handle_blocked_waiting_request(request):
            return
        self.kv_holding_waiting.remove_request(request)
        self.deferred_waiting.discard(request)
        self._inflight_prefills.discard(request)
        self._free_request_blocks(request)
        request.num_computed_tokens = 0
        self.waiting.prepend_request(request)
        self._controller.on_preempted(request.request_id, time.monotonic())

    def _count_speculation(self, output: SchedulerOutput) -> None:
        for request in self.running:
            num_scheduled = output.num_scheduled_tokens.get(request.request_id, 0)
            if num_scheduled and self._is_speculative(request):
                last = min(request.num_computed_tokens, request.num_prompt_tokens)
                first = min(request.num_computed_tokens - num_scheduled, request.num_prompt_tokens)
                self._controller.on_speculated(request.request_id, last - first)

    def _is_speculative(self, request: Request) -> bool:
        return self._controller.is_speculative(request.request_id)

    def _may_cut_prefills(self, requests: Iterable[Request]) -> bool:
        """Return whether a step may end anywhere in these prompts; a Mamba state or an image is computed as a whole."""
        return (
            self.scheduler_config.enable_chunked_prefill
            and not self.need_mamba_block_aligned_split
            and not any(request.mm_features for request in requests)
        )


class SyncTreeScheduler(_TreeScheduling, Scheduler):
    """Where a step waits for the one before: on a CPU."""


class AsyncTreeScheduler(_TreeScheduling, AsyncScheduler):
    """Where the next step is scheduled while one runs: on CUDA."""


def RAGCacheScheduler(*args: Any, **kwargs: Any) -> Scheduler:  # noqa: N802 (vLLM takes it for a class)
    """Return the scheduler for vLLM's setting of ``async_scheduling``; the name to give to ``--scheduler-cls``."""
    attach_utilities()
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    kind = AsyncTreeScheduler if vllm_config.scheduler_config.async_scheduling else SyncTreeScheduler
    scheduler: Scheduler = kind(*args, **kwargs)
    return scheduler
