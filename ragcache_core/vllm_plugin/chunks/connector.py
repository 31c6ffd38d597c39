"""The connectors of chunk reuse for vLLM: they provide tokens that vLLM need not prefill.

The connector offers a scheduled request with chunk reuse all of its tokens but the last. vLLM lets the request wait
with its blocks, as for remote KV. The workers load stored chunks and compute the rest, in slices during the steps of
other requests. Then vLLM computes the last token and continues as usual. Exact hits in any tier are used first.

These connectors replace :class:`RAGCacheConnector` and :class:`DocumentConnector` where chunk reuse is configured;
an engine without it never loads this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from ragcache_core.chunk.guard import DEFAULT_KIND, ErrorGuard, guarded_alphas
from ragcache_core.chunk.types import chunk_spans
from ragcache_core.config import ChunkReuseRequest
from ragcache_core.errors import ConfigError
from ragcache_core.types import Origin, SegmentKind
from ragcache_core.vllm_plugin.build_context import building
from ragcache_core.vllm_plugin.chunks.audits import AnswerAudits
from ragcache_core.vllm_plugin.chunks.build import build_execution, build_scheduling, check_engine, open_disk
from ragcache_core.vllm_plugin.chunks.messages import ChunkReport, ChunkStep
from ragcache_core.vllm_plugin.chunks.private_hashes import private_hash, private_hashes
from ragcache_core.vllm_plugin.chunks.reuse_state import ReuseOptions
from ragcache_core.vllm_plugin.chunks.scheduler import ChunkScheduling
from ragcache_core.vllm_plugin.chunks.storage.host_pool import PagesPlace
from ragcache_core.vllm_plugin.compat import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    block_hasher_of,
)
from ragcache_core.vllm_plugin.connector.gpu_connector import DocumentConnector, is_identified_by_tokens
from ragcache_core.vllm_plugin.connector.tiered_connector import RAGCacheConnector
from ragcache_core.vllm_plugin.offload.worker_memory import Rank
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import RequestMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.cache.controller import CacheController
    from ragcache_core.vllm_plugin.chunks.compute.executor import ChunkExecutor
    from ragcache_core.vllm_plugin.chunks.manager.manager import ChunkManager
    from ragcache_core.vllm_plugin.chunks.storage.host_pool import ChunkMemory


_MAX_CHUNKS = 128
"""Maximum number of documents of a request with chunk reuse, as attention is measured for each pair; others are
prefilled."""


@dataclass(slots=True)
class ChunkWorker(KVConnectorHandshakeMetadata):
    """A worker's handshake: its pages, and whether it computes scattered rows.

    ``below`` is what the connector below says.
    """

    pages: PagesPlace
    computes_scattered: bool
    below: KVConnectorHandshakeMetadata | None


@dataclass(slots=True)
class ChunkMetadata(KVConnectorMetadata):
    """A step's metadata: of chunk reuse, and of the connector below."""

    step: ChunkStep
    below: KVConnectorMetadata


@dataclass(slots=True)
class ChunkWorkerMetadata(KVConnectorWorkerMetadata):
    """The workers' report: of chunk reuse, and of the connector below."""

    report: ChunkReport
    below: KVConnectorWorkerMetadata | None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ChunkWorkerMetadata:
        """Return the reports of two workers as one."""
        assert isinstance(other, ChunkWorkerMetadata)
        below = self.below or other.below
        if self.below is not None and other.below is not None:
            below = self.below.aggregate(other.below)
        return ChunkWorkerMetadata(self.report.merged(other.report), below)


@dataclass(slots=True)
class _Offer:
    """Tokens offered to a waiting request: ``num_exact`` from the tiers, then ``num_provided``."""

    num_below: int
    num_provided: int


class ChunkReuseConnector(KVConnectorBase_V1):
    """Chunk reuse as an addition to a connector, on both sides."""

    audits: AnswerAudits | None

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        assert vllm_config.kv_transfer_config is not None
        settings = PluginSettings.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if settings.chunk_reuse is None:
            raise ConfigError(f"{type(self).__name__} needs the settings of chunk reuse: use Engine.launch")
        check_engine(vllm_config, kv_cache_config)
        self._chunk_settings = settings
        self._reuse = settings.chunk_reuse
        self._chunk_engine = (vllm_config, kv_cache_config)
        self._offers: dict[str, _Offer] = {}
        self._approximate_from: dict[str, int] = {}  # the first such token of the request that is admitted now
        self._borders: set[int] = set()  # with which blocks approximate KV began so far
        self._is_prefilling = False  # whether the step computes a real request's prompt
        self._execution: ChunkExecutor | None = None
        self._memory: ChunkMemory | None = None
        self._library: ChunkManager | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduling: ChunkScheduling = build_scheduling(
                settings,
                vllm_config,
                kv_cache_config,
                order=self._real_ones_first,
                is_guess=self._is_speculative,
            )
            self._library = self.scheduling.library
            if self._reuse.max_error is not None:
                largest = settings.alpha_for(ChunkReuseRequest())
                assert largest is not None
                alphas = guarded_alphas(largest)
                guard = ErrorGuard(self._reuse.max_error, alphas, Random(0).random)  # noqa: S311
                self.audits = AnswerAudits(guard, block_hasher_of(vllm_config, kv_cache_config))
                self._library.guard = guard
        with building(vllm_config, kv_cache_config, chunks=self._library):
            super().__init__(vllm_config, role, kv_cache_config)

    def shutdown(self) -> None:
        if self._execution is not None:
            self._execution.close()
        super().shutdown()
        if self._library is not None:  # last: it may wait for a disk
            self._library.close()
        if self._memory is not None:
            self._memory.close()

    # Scheduler side

    def _begin(self, controller: CacheController) -> None:
        super()._begin(controller)
        controller.forgetting.add_holder(self.scheduling)
        if self.audits is not None:
            controller.forgetting.add_holder(self.audits)

    def _read(self, request: Request, metadata: RequestMetadata) -> None:
        documents = [segment for segment in metadata.segments if segment.kind is SegmentKind.DOCUMENT]
        wanted = metadata.chunk_reuse
        if not documents or wanted is False or (wanted is None and not self._reuse.is_default):
            return
        override = wanted if isinstance(wanted, ChunkReuseRequest) else ChunkReuseRequest()
        options = self._options(request, override, metadata, reuses=wanted != "store")
        if options is None or len(documents) > _MAX_CHUNKS:
            self.scheduling.library.counters.num_refused_requests += 1
            return
        places = [(each.start, each.end if each.text_end is None else each.text_end) for each in documents]
        spans = chunk_spans(request.prompt_token_ids, places)  # without what separates them
        doc_ids = [document.doc_id or "" for document in documents]
        self.scheduling.on_new_request(request.request_id, request.all_token_ids, spans, options, doc_ids)
        self._look_for_shared(request)

    def _options(
        self, request: Request, override: ChunkReuseRequest, metadata: RequestMetadata, *, reuses: bool
    ) -> ReuseOptions | None:
        """Return a request's chunk-reuse settings; ``None`` if none of its chunks can be reused."""
        reuse = self._reuse
        if not is_identified_by_tokens(request) or request.skip_reading_prefix_cache:
            return None
        alpha = self._chunk_settings.alpha_for(override)
        if alpha is None:  # what that quality takes was not measured
            return None
        if self.audits is not None and reuses:
            if override.model_dump(exclude_none=True, exclude={"kind"}):  # the bound holds for the engine's alone
                return None
            guarded = self.audits.alpha_for(request, override.kind or reuse.kind or DEFAULT_KIND)
            reuses, alpha = guarded is not None, alpha if guarded is None else guarded
        return ReuseOptions(
            selection=reuse.selection if override.selection is None else override.selection,
            alpha=alpha,
            max_recompute=reuse.max_recompute if override.max_recompute is None else override.max_recompute,
            focus=reuse.focus if override.focus is None else override.focus,
            reuses=reuses,
            expected_uses=metadata.expected_uses,
        )

    def _look_for_shared(self, request: Request) -> bool:
        """Look up approximate blocks after the exact hit, from requests with the same settings.

        Return whether it looks for anything else than before.
        """
        if not self.scheduling.reuses(request.request_id):
            return False
        controller, namespace = self._controller, self.scheduling.namespace(request.request_id)
        state = controller.state_of(request.request_id)
        assert state is not None
        if state.first_private is not None and not state.apart:  # what it has is forgotten
            return False
        exact = state.keys[: state.first_private]
        num_exact, num_fast, _ = controller.leading_blocks(controller.last_known(exact))
        most = min(len(exact), (request.num_tokens - 1) // controller.tokens_per_block)
        if num_exact < num_fast or num_exact >= most:
            return False
        for first in sorted(self._borders, reverse=True):
            after = range(num_exact, first - 1, -1)  # none where the border lies beyond
            if after and all(controller.is_on_gpu(private_hash(exact[i], first, namespace)) for i in after):
                self._keep_apart(request, first * controller.tokens_per_block)
                return True
        return False

    def _match_below(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.is_audit(request):
            return 0, False
        if self._look_for_shared(request):
            return None, False  # the look-up was for other blocks
        state = self._controller.state_of(request.request_id)
        if state is not None and state.apart:
            assert state.first_private is not None
            first = state.first_private * self._controller.tokens_per_block
            self.scheduling.on_shared(request.request_id, first, max(num_computed_tokens, first))
        num_below, is_async = super()._match_below(request, num_computed_tokens)
        self._offers.pop(request.request_id, None)
        if num_below is None or not self.scheduling.is_known(request.request_id):
            return num_below, is_async
        num_provided = self.scheduling.offer(request.request_id, num_computed_tokens + num_below)
        if num_provided is None:
            return None, False
        if num_provided == 0:
            return num_below, is_async
        self._offers[request.request_id] = _Offer(num_below, num_provided)
        return num_below + num_provided, True

    def _load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> dict[Origin, int]:
        offer = self._offers.pop(request.request_id, None)
        is_taken = offer is not None and num_external_tokens == offer.num_below + offer.num_provided
        num_below = offer.num_below if offer is not None and is_taken else num_external_tokens
        by_tier: dict[Origin, int] = super()._load(request, blocks, num_below)
        if not self.scheduling.is_known(request.request_id):
            return by_tier
        if not is_taken:
            state = self._controller.state_of(request.request_id)
            num_local = 0 if state is None else state.num_local_tokens
            self.scheduling.compute(request.request_id, num_local + num_external_tokens)
            return by_tier
        block_ids = blocks.get_block_ids()[0]
        if isinstance(self, RAGCacheConnector) and self.copies is not None:
            self.copies.fence(block_ids)
        first = self.scheduling.begin(request.request_id, block_ids, awaits_load=num_below > 0)
        self._approximate_from[request.request_id] = first
        return by_tier

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if (first := self._approximate_from.pop(request.request_id, None)) is not None:
            self._keep_apart(request, first)

    def _keep_apart(self, request: Request, first_approximate: int) -> None:
        """Restrict blocks from the first approximate token on to requests with the same settings.

        They are kept in GPU memory alone.
        """
        state = self._controller.state_of(request.request_id)
        assert state is not None
        block_size = self._controller.tokens_per_block
        first_block, first_private = first_approximate // block_size, state.first_private
        if first_private is None or first_block < first_private:
            # A new list: the records of the request's documents keep the exact one.
            exact = [*state.keys, *request.block_hashes[len(state.keys) :]]
            namespace = self.scheduling.namespace(request.request_id)
            request.block_hashes = private_hashes(exact, first_block, namespace)
            self._controller.on_approximated(request.request_id, first_block, request.block_hashes)
            self._borders.add(first_block)
            first_private = first_block
        if isinstance(self, RAGCacheConnector) and self.copies is not None:
            self.copies.keep_from_storing(request.request_id, first_private * block_size)

    @property
    def _controller(self) -> CacheController:
        controller: CacheController = self.controller
        return controller

    def _real_ones_first(self, request_ids: Iterable[str]) -> list[str]:
        """Return the jobs that may run; speculative ones wait while a real request is prefilled.

        One that only waits holds nothing back: what it waits for may be the blocks of such a job, which vLLM takes
        back when the job has ended.
        """
        in_order = sorted(request_ids, key=self._is_speculative)
        real = [request_id for request_id in in_order if not self._is_speculative(request_id)]
        return real if real or self._is_prefilling else in_order

    def _is_speculative(self, request_id: str) -> bool:
        return self._controller.is_speculative(request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        num_by_request = scheduler_output.num_scheduled_tokens
        self._is_prefilling = any(
            num_tokens > 1 and not self._is_speculative(request_id) for request_id, num_tokens in num_by_request.items()
        )
        step = self.scheduling.take_step(
            scheduler_output.total_num_scheduled_tokens,
            _progress(scheduler_output) if self.scheduling.wants_progress else {},
            lambda request_id: state.resolve_block_ids(request_id)[0],
        )
        return ChunkMetadata(step, super().build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        answer = connector_output.kv_connector_worker_meta
        if isinstance(answer, ChunkWorkerMetadata):
            self.scheduling.on_report(answer.report)
            connector_output.kv_connector_worker_meta = answer.below
        for request_id in connector_output.finished_recving or ():
            self.scheduling.on_job_done(request_id)
        super().update_connector_output(connector_output)

    def _finish(
        self, request: Request, outcome: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._offers.pop(request.request_id, None)
        figures = self.scheduling.on_finished(request.request_id)
        is_approximate = figures is not None and bool(figures.num_reused_tokens or figures.num_prefix_tokens)
        if figures is not None and is_approximate:
            self._controller.on_chunks_reused(request.request_id, figures.to_stats())
        state = self._controller.state_of(request.request_id)
        if self.audits is not None and state is not None:
            is_shown = not (state.is_speculative or state.metadata.is_prefill)
            self.audits.on_finished(request, is_shown=is_shown, is_approximate=is_approximate)
        finished: tuple[bool, dict[str, Any] | None] = super()._finish(request, outcome)
        return finished

    def reset_cache(self) -> bool | None:
        self.scheduling.stop_capturing()
        is_reset: bool | None = super().reset_cache()
        return is_reset

    def forget_weights(self) -> None:
        self.scheduling.clear()
        if self.audits is not None:
            self.audits.forget_weights()
        super().forget_weights()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Rank, KVConnectorHandshakeMetadata]) -> None:
        found = {rank: each for rank, each in sorted(metadata.items()) if isinstance(each, ChunkWorker)}
        if found:
            places = [each.pages for each in found.values()]
            open_disk(self.scheduling.library, places, self._chunk_settings, self._chunk_engine[0])
            if all(each.computes_scattered for each in found.values()):
                self.scheduling.scatter_rows()
        super().set_xfer_handshake_metadata_pp_aware(
            {rank: each.below for rank, each in found.items() if each.below is not None}
        )

    # Worker side

    def attach(self, model_runner: Any) -> None:
        """Take the model of this worker, whose KV cache is allocated.

        Raises:
            ConfigError: chunk reuse cannot be done with it.
        """
        self._execution, self._memory = build_execution(self._chunk_settings, *self._chunk_engine, model_runner)

    @property
    def execution(self) -> ChunkExecutor:
        """The worker's side; available after the model."""
        assert self._execution is not None, "chunk reuse needs --worker-cls RAGCacheWorker"
        return self._execution

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._memory is None:
            return None
        below = super().get_handshake_metadata()
        return ChunkWorker(self._memory.place, self.execution.computes_scattered, below)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, ChunkMetadata)
        super().handle_preemptions(kv_connector_metadata.below)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, ChunkMetadata)
        super().bind_connector_metadata(connector_metadata.below)
        self.execution.begin(connector_metadata.step)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self.execution.run_slices()

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self.execution.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, loaded = super().get_finished(finished_req_ids)
        others = {request_id for request_id in loaded or () if not self.execution.on_loaded(request_id)}
        return sent, others | self.execution.take_finished()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        below = super().build_connector_worker_meta()
        report = self.execution.take_report()
        return ChunkWorkerMetadata(report, below) if report or below is not None else None


def _progress(output: SchedulerOutput) -> Mapping[str, tuple[int, int]]:
    """Return the token range of each request in a step."""
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {request_id: (start, start + scheduled[request_id]) for request_id, start in starts.items()}


class ChunkRAGCacheConnector(ChunkReuseConnector, RAGCacheConnector):
    """The connector with GPU, host and disk tier and chunk reuse."""

    @classmethod
    def without_host(cls) -> type[DocumentConnector]:
        return ChunkDocumentConnector


class ChunkDocumentConnector(ChunkReuseConnector, DocumentConnector):
    """The connector with the GPU tier and chunk reuse."""
