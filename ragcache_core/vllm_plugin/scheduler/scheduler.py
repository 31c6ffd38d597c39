"""The scheduler: vLLM's, with the knowledge tree's order of eviction, RAGCache's queue, and speculation.

A speculative request is sent ahead, while a search goes on, and is real once it is confirmed. It must not delay a real
one: it is admitted while no real request is queued or prefilled, in steps short enough for a real arrival to wait for,
and preempted when one arrives. Its finished blocks stay cached: a real request for the same documents, and itself when
it resumes, find them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, cast

from vllm.platforms import current_platform

from ragcache_core.config import keeping
from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of
from ragcache_core.memory import collect_rarely, freeze_survivors
from ragcache_core.runtime.clock import steady_s
from ragcache_core.vllm_plugin.build_context import building
from ragcache_core.vllm_plugin.cache.operator_calls import run_slice
from ragcache_core.vllm_plugin.compat import (
    AsyncScheduler,
    BlockPool,
    PauseState,
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
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.cache.operator_calls import Steps
    from ragcache_core.vllm_plugin.chunks.audits import AnswerAudits

logger = logger_of(__name__)

_TOKENS_ALONE = 512
"""Tokens of a step that computes speculation only: a real arrival waits for it to end."""
_TOKENS_BESIDE_ANSWERS = 256
"""The same where real requests are being answered in that step: on a GPU these are nearly free then."""


class _TreeScheduling:
    """RAGCache's additions to either of vLLM's schedulers."""

    # vLLM's, as far as they are used here
    connector: Any
    kv_cache_config: Any
    kv_cache_manager: Any
    scheduler_config: Any
    requests: dict[str, Request]
    running: list[Request]
    waiting: Any
    kv_holding_waiting: Any
    add_request: Callable[[Request], None]
    connector_prefix_cache_stats: Any
    pause_state: Any
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
        self._audits: AnswerAudits | None = self._own_connector.audits
        _, self._num_front_ends = front_end_of(vllm_config)
        self._queue: CacheAwareRequestQueue | None = None
        self._step_began_s = 0.0
        num_units = kv_cache_config.num_blocks // controller.groups.blocks_per_unit
        self._max_speculative_tokens: int = min(self.max_num_scheduled_tokens, num_units * controller.tokens_per_block)
        self._has_other_weights = False
        self._outdated_loads: list[Request] = []
        self._prefetching: Steps | None = None
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
        if self._prefetching is not None or self._controller.hints.prefetches:
            self._advance_prefetches()
        if self._audits is not None and self._is_audit_step(self._audits):
            return self._schedule_audit(self._audits, *args, **kwargs)
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
        """Return whether a step has work, such as unreported changes of the cache, or an audit."""
        if super().has_requests() or self.kv_cache_manager.block_pool.kv_event_queue:  # type: ignore[misc]
            return True
        return self._audits is not None and self._may_begin_audit(self._audits)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Do as vLLM's method, which is called when the model has begun to compute a step."""
        bitmask: GrammarOutput | None = super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]
        if bitmask is None:  # otherwise the step's tokens would wait; the rest is done when needed
            self.on_forward_started()
        return bitmask

    def on_forward_started(self) -> None:
        """Do work during the model's computation that no answer waits for."""
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
        if self._audits is not None and self._audits.running is not None:
            self._follow_audit(self._audits, self._audits.running, outputs)
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

    # Audits

    def _is_audit_step(self, audits: AnswerAudits) -> bool:
        """Begin an audit where the engine is idle, drop it where it is not; return whether the step is for one."""
        if audits.running is not None and len(self.requests) > 1:
            self._drop_audit()
        if audits.running is None and self._may_begin_audit(audits) and not self.requests:
            self.add_request(audits.begin())
        return audits.running is not None

    def _may_begin_audit(self, audits: AnswerAudits) -> bool:
        return audits.has_pending and self.pause_state == PauseState.UNPAUSED

    def _schedule_audit(self, audits: AnswerAudits, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step that computes the audit alone: a short one, which no statistics of vLLM count."""
        assert audits.running is not None
        limit, manager = self.max_num_scheduled_tokens, self.kv_cache_manager
        counts = manager.prefix_cache_stats, self.connector_prefix_cache_stats
        if self._may_cut_prefills([audits.running]):
            self.max_num_scheduled_tokens = min(limit, _TOKENS_ALONE)
        manager.prefix_cache_stats, self.connector_prefix_cache_stats = map(deepcopy, counts)
        try:
            output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = limit
            manager.prefix_cache_stats, self.connector_prefix_cache_stats = counts
        return output

    def _follow_audit(self, audits: AnswerAudits, audit: Request, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Compare what the audit has answered, and tell no client of it."""
        for each in outputs.values():
            each.outputs = [output for output in each.outputs if output.request_id != audit.request_id]
        if audits.is_decided():
            self.finish_requests(audit.request_id, RequestStatus.FINISHED_ABORTED)
            audits.end(begins_again=False)
            self._controller.record_change()

    def _drop_audit(self) -> None:
        if self._audits is not None and self._audits.running is not None:
            super().finish_requests(self._audits.running.request_id, RequestStatus.FINISHED_ABORTED)  # type: ignore[misc]
            self._audits.end(begins_again=True)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        """Finish requests; all of them end the audits as well."""
        if request_ids is None and self._audits is not None:
            self._drop_audit()
            self._audits.clear()
        finished: list[Request] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        return finished

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or resume; no audit keeps a pause from being complete."""
        if pause_state != PauseState.UNPAUSED:
            self._drop_audit()
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Empty the prefix cache, in which an audit holds no block then."""
        self._drop_audit()
        is_reset: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        return is_reset

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Return vLLM's statistics of a step, without the audit."""
        stats: SchedulerStats | None = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None and self._audits is not None and self._audits.running in self.running:
            stats.num_running_reqs -= 1
        return stats

    def _compute_again(self, invalid_block_ids: set[int]) -> None:
        """Let every request compute KV that another connector failed to load, and share none of it.

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
        """Make a tenant's speculative requests real; ``None`` is all other clients.

        Return a report where no request is left, and so no step follows with which to send one.
        """
        for request_id in self._controller.confirm(speculation, tenant):
            if self._queue is not None and self._queue.confirm(self.requests[request_id]):
                self._controller.on_waiting(request_id)
        return self._controller.report() if self._controller.is_idle else None

    def report(self) -> dict[str, object]:
        """Return the present report, also before the first step."""
        return self._controller.report()

    def forget(self, doc_ids: list[str]) -> dict[str, object]:
        """Delete documents from all tiers, and return the receipt, or why it is impossible."""
        if self._tree_queue is None:
            return {"refused": "this model's groups of KV caches are in vLLM's own order, which knows no documents"}
        self._drop_audit()  # it would hold KV of them
        return self._controller.forget(set(doc_ids))

    def act_on_cache(self, action: str, body: dict[str, Any]) -> dict[str, object]:
        """Return the result of a cache route, or why it is impossible; ``{}`` while it runs.

        It is called with the same ``token`` until it is; see :class:`OperatorCalls`.
        """
        controller = self._controller
        controller.tick(steady_s())
        match action:
            case "tick":
                return controller.report()
            case "called":
                return {"is_known": controller.on_called(body["response_id"], body["tool"])}
            case "purge" if self._tree_queue is not None:
                self._drop_audit()
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
        """Return the rest of all deletions."""
        return self._controller.forgetting.left()

    def cached_paths(self, cursor: str, tenant: str | None = None) -> dict[str, object]:
        """Return the changes of cached prefixes since ``cursor``.

        They belong to ``tenant``, or to no tenant.
        """
        return self._controller.paths_of(tenant).changes(cursor)

    def recent_requests(self, limit: int) -> dict[str, object]:
        """Return the state of the latest ``limit`` requests."""
        return self._controller.recent_requests(limit, time.monotonic())

    def prefetch(self, prompt: Request) -> dict[str, object]:
        """Read a prompt's KV from disk into host memory; return the number of tokens.

        vLLM knows nothing of it. More than a quarter of host memory is not read.
        """
        _, num_fast, num_all = self._controller.leading_blocks(self._controller.last_known(prompt.block_hashes))
        num_blocks = num_all - num_fast if self._own_connector.prefetch(prompt) else 0
        return {"num_read_tokens": num_blocks * self._controller.tokens_per_block}

    def _advance_prefetches(self) -> None:
        """Look at some nodes for the documents that requests have read ahead, as their hints say."""
        controller = self._controller
        if self._prefetching is None:
            doc_ids, tenant = controller.hints.prefetches.popleft()
            tenant_of = controller.tenants.tenant_of
            self._prefetching = self._prefetch_documents(doc_ids, lambda owner: tenant_of(owner) == tenant)
        if run_slice(self._prefetching) is not None:
            self._prefetching = None

    def _prefetch_documents(
        self, doc_ids: Collection[str], is_own: Callable[[str | None], bool] = lambda _: True
    ) -> Steps:
        """Have the paths of documents that lie on disk read into host memory, as :meth:`prefetch` does."""
        ends, unknown = yield from self._controller.ends_on_disk(doc_ids, is_own)
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
        """Inside, resets of the caches keep KV that outlives the engine."""
        context: AbstractContextManager[None] = self._own_connector.keeping_weights()
        return context

    def on_weights_changed(self, why: str) -> None:
        """Delete all KV that outlives a reset of the caches, as the model's weights may have changed."""
        if not self._has_other_weights:  # they may come in a hundred pieces
            self._has_other_weights = True
            logger.warning(
                "RC-WEIGHTS-CHANGED: RAGCache empties its disk tier, and keeps nothing that outlives this engine: %s",
                why,
            )
        self._own_connector.forget_weights()

    def on_adapter_loads(self, adapter: LoRARequest) -> None:
        """Change the identity of an adapter that workers will load."""
        self.on_adapter_changed(adapter.lora_int_id)
        self._own_connector.adapter_keys.note_load(adapter)

    def on_adapter_changed(self, adapter_id: int | None) -> None:
        """Stop reuse of KV of an adapter's former weights; ``None`` is all adapters.

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
        """Free blocks in loading when their adapter changed, once vLLM releases them."""
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        for request in self._outdated_loads:
            if request.status == waiting:
                self._set_back(request)
        self._outdated_loads = [request for request in self._outdated_loads if request.status == waiting]

    def has_room(self) -> bool:
        """Return whether a speculative request would be admitted now."""
        if self._queue is None:
            return False
        audit = None if self._audits is None else self._audits.running
        running = self.running
        if audit is not None:
            running = [request for request in running if request is not audit]
        speculative: list[Request] = []
        if self._controller.speculations:
            speculative = [request for request in running if self._is_speculative(request)]
            running = [request for request in running if not self._is_speculative(request)]
        if self._is_engine_wanted(self._queue, running):
            return False
        return self._has_place([*speculative, *self._loading(), *self._queue.speculative])

    def _preempt_request(self, request: Request, timestamp: float, *args: Any, **kwargs: Any) -> None:
        self._controller.insert_answer(request.request_id)
        super()._preempt_request(request, timestamp, *args, **kwargs)  # type: ignore[misc]
        self._controller.on_preempted(request.request_id, timestamp)

    def _take_over_queue(self) -> None:
        self._queue = self.waiting = CacheAwareRequestQueue(self._controller.queue, self._is_speculative)

    def _make_room(self, queue: CacheAwareRequestQueue) -> int | None:
        """Admit or preempt speculative requests; return this step's token limit, ``None`` for the usual."""
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
        present = [*speculative, *loading]
        num_before = len(present)
        for request in queue.speculative:
            if not self._has_place(present):
                break
            present.append(request)
        queue.allow_speculative(len(present) - num_before)
        if not self._may_cut_prefills(present):
            return None
        num_answering = sum(r.num_tokens_with_spec + r.num_output_placeholders - r.num_computed_tokens for r in real)
        return int(num_answering) + (_TOKENS_BESIDE_ANSWERS if real else _TOKENS_ALONE)

    def _has_place(self, present: Collection[Request]) -> bool:
        """Return whether another speculative request may run beside those that are ``present``.

        The paper limits them to the tokens that fit into GPU memory or that occupy the GPU, whichever are fewer
        (RAGCache §5.3). A step of vLLM has at most those that occupy it.
        """
        if (max_requests := self._controller.settings.max_prefill_bs) is not None:
            return len(present) < max_requests
        num_tokens: int = sum(request.num_prompt_tokens for request in present)
        return num_tokens < self._max_speculative_tokens

    def _loading(self) -> list[Request]:
        """Return the speculative requests with blocks in loading."""
        return [request for request in self.kv_holding_waiting if self._is_speculative(request)]

    def _is_engine_wanted(self, queue: CacheAwareRequestQueue, running: list[Request]) -> bool:
        """Return whether speculation would delay a real request that is queued, loaded or prefilled.

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
        """Free the blocks loaded for a request when they are complete, as vLLM would admit it at once."""
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
        """Return whether a step may end anywhere in these prompts; Mamba states and images are computed as a whole."""
        return (
            self.scheduler_config.enable_chunked_prefill
            and not self.need_mamba_block_aligned_split
            and not any(request.mm_features for request in requests)
        )


class SyncTreeScheduler(_TreeScheduling, Scheduler):
    """Scheduler in which a step waits for the previous one: on a CPU."""


class AsyncTreeScheduler(_TreeScheduling, AsyncScheduler):
    """Scheduler that plans the next step while one runs: on CUDA."""


def RAGCacheScheduler(*args: Any, **kwargs: Any) -> Scheduler:  # noqa: N802 (vLLM takes it for a class)
    """Return the scheduler for vLLM's ``async_scheduling``; the class for ``--scheduler-cls``."""
    attach_utilities()
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    kind = AsyncTreeScheduler if vllm_config.scheduler_config.async_scheduling else SyncTreeScheduler
    scheduler: Scheduler = kind(*args, **kwargs)
    return scheduler
