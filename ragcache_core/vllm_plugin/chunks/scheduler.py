"""The scheduler's side of chunk reuse: selects the chunks to reuse, the work of each step, and the captures.

It imports no vLLM; the connector reports the life of each request. A request takes one of two paths::

    offer -> begin -> slices, step by step -> on_job_done      its tokens but the last are provided
    compute -> captures, step by step                          vLLM prefills it, and new chunks are kept

and may restart at any time, after a preemption.
"""

from __future__ import annotations

import secrets
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ragcache_core.chunk.recompute import losses
from ragcache_core.chunk.selection import make_selection
from ragcache_core.chunk.types import ChunkSpan, ReusePlan, chunk_key
from ragcache_core.policy import PrefillCost
from ragcache_core.types import DocId, Tier
from ragcache_core.vllm_plugin.cache.forgetting import Forgotten, Freed
from ragcache_core.vllm_plugin.chunks.manager.manager import ChunkManager
from ragcache_core.vllm_plugin.chunks.messages import (
    Capture,
    CapturedChunk,
    CaptureId,
    CaptureStep,
    ChunkJob,
    ChunkReport,
    ChunkStep,
    Slice,
)
from ragcache_core.vllm_plugin.chunks.page_layout import digest_of
from ragcache_core.vllm_plugin.chunks.planner import ChunkPlans
from ragcache_core.vllm_plugin.chunks.reuse_state import (
    OpenCapture,
    ReuseFigures,
    ReuseOptions,
    ReuseState,
    statistics_of,
)
from ragcache_core.vllm_plugin.chunks.slices import cut_slices

_MIN_QUESTIONS_PER_STEP = 8
"""A question that fits into a step less often than this is not asked what it looks at."""
_MAX_SHARED = 1 << 16
"""Documents of approximate prefixes whose lost context is kept; others count as having lost all of it."""


class ChunkScheduling:
    """Decides for all requests with chunk reuse. Used by one thread.

    Args:
        library: which chunks are stored.
        num_workers: how many workers report on each job.
        max_step_tokens: tokens that a step may compute.
        max_step_runs: runs of neighbouring tokens that its slices may have: the backend's limit of sequences.
        run_tokens: the length of runs of selected tokens, see :func:`plan_reuse`.
        prefill_cost: seconds of a prefill.
        is_eager: whether vLLM computes a prompt without compilation, as a job does: only then is the KV that a job
            computes before the first reused chunk bitwise identical, and other requests may hit it.
        order: which jobs may run in a step, the speculative ones last; all, by arrival, by default.
        is_guess: whether a request is speculative; none is by default.
        page_bytes: of a page, on all workers.
    """

    def __init__(
        self,
        library: ChunkManager,
        *,
        num_workers: int,
        max_step_tokens: int,
        max_step_runs: int = sys.maxsize,
        prefill_cost: PrefillCost,
        run_tokens: int = 1,
        is_eager: bool = True,
        order: Callable[[Iterable[str]], list[str]] = list,
        is_guess: Callable[[str], bool] = lambda _: False,
        page_bytes: int = 0,
    ) -> None:
        self._page_bytes = page_bytes
        self._shares_beginnings = is_eager
        self.library = library
        self._order = order
        self._is_guess = is_guess
        self._num_workers = num_workers
        self._max_step_tokens = max_step_tokens
        self._max_step_runs = max_step_runs
        self._prefill_cost = prefill_cost
        self.plans = ChunkPlans(library, run_tokens=run_tokens)
        self._requests: dict[str, ReuseState] = {}
        self._jobs: dict[str, ChunkJob] = {}
        self._running: dict[str, None] = {}
        self._capturing: set[str] = set()
        self._cancelled: list[str] = []
        self._forgotten: list[str] = []
        self._secret = secrets.token_bytes(32)
        self._lost: OrderedDict[bytes, float] = OrderedDict()
        """How much context a document has lost in the approximate prefix of a namespace, as :func:`losses` says it."""

    def on_new_request(
        self,
        request_id: str,
        token_ids: Sequence[int],
        spans: Sequence[ChunkSpan],
        options: ReuseOptions,
        doc_ids: Sequence[DocId] = (),
    ) -> None:
        """Add a request with chunk reuse; ``token_ids`` grow with its answer, ``doc_ids`` name its ``spans``."""
        documents = tuple(map(digest_of, doc_ids))
        namespace = self._namespace(options, token_ids[spans[-1].end :])
        request = self._requests[request_id] = ReuseState(token_ids, tuple(spans), options, namespace, documents)
        for span, document in zip(spans if documents else (), documents, strict=True):
            self.library.name(span.key, document)
        self.plans.preload(request_id, request)

    def is_known(self, request_id: str) -> bool:
        """Return whether chunk reuse is on for a request."""
        return request_id in self._requests

    def reuses(self, request_id: str) -> bool:
        """Return whether a request takes approximate KV."""
        request = self._requests.get(request_id)
        return request is not None and request.options.reuses

    def namespace(self, request_id: str) -> bytes:
        """Return the bytes that only requests with the same chunk-reuse settings share."""
        return self._requests[request_id].namespace

    def _namespace(self, options: ReuseOptions, question: Sequence[int]) -> bytes:
        selection = make_selection(options.selection)
        depends_on_question = options.focus > 0 and not selection.is_all_or_nothing
        how = f"{options.selection} {options.alpha!r} {options.max_recompute!r} {options.focus}"
        return chunk_key(question if depends_on_question else (), behind=self._secret + how.encode())

    def on_shared(self, request_id: str, first: int, end: int) -> None:
        """Record that a request hit its tokens ``[first, end)`` in KV of a request with the same settings."""
        request = self._requests[request_id]
        request.figures.num_prefix_tokens = end - first
        for number, span in enumerate(request.spans):
            if first < span.end and span.start < end:
                lost = self._lost.get(request.namespace + span.context + span.key, 1.0)
                request.lost[number] = max(request.lost[number], lost)

    def scatter_rows(self) -> None:
        """Lift the limit of runs, as scattered tokens cost the workers no more than contiguous ones.

        Their attention is summed in another order than vLLM's, so no other request may hit the KV of a job.
        """
        self._max_step_runs, self.plans.run_tokens, self._shares_beginnings = sys.maxsize, 1, False

    # A request's turn

    def offer(self, request_id: str, num_exact: int) -> int | None:
        """Return the number of tokens after ``num_exact`` exactly cached ones that can be provided.

        0: vLLM prefills it, because nothing of it is stored. None: ask again, something is being read from disk. For
        that it waits no longer than computing it instead takes.
        """
        request = self._requests[request_id]
        self._restart_reuse(request_id, request)
        self.library.poll()
        plan = request.offered
        if plan is not None and plan.start == num_exact and plan.end == len(request.token_ids) - 1:
            variants = [chunk.variant for chunk in plan.read]
            if not any(map(self.library.is_lost, variants)):
                if all(map(self.library.is_on_host, variants)):
                    return plan.end - plan.start
                request.computes_missing = request.computes_missing or self._waited_long_enough(request, plan)
                if not request.computes_missing:
                    return None
        self.library.release(request_id)
        request.offered = self.plans.plan(request_id, request, num_exact)
        if request.offered is None:
            return 0
        if all(self.library.is_on_host(chunk.variant) for chunk in request.offered.read):
            return request.offered.end - request.offered.start
        self._waited_long_enough(request, request.offered)  # from now on it waits
        return None

    def _waited_long_enough(self, request: ReuseState, plan: ReusePlan) -> bool:
        """Return whether a request has waited for the disk as long as computing its rest takes."""
        if request.waits_since_s is None:
            request.waits_since_s = self.library.now_s
        missing = [chunk for chunk in plan.read if not self.library.is_on_host(chunk.variant)]
        num_tokens = sum(map(plan.num_kept, missing))
        return self.library.now_s - request.waits_since_s >= self._prefill_cost.estimate_s(plan.start, num_tokens)

    def begin(self, request_id: str, block_ids: Sequence[int], *, awaits_load: bool) -> int:
        """Begin to provide the offered tokens; return the first approximate token.

        Args:
            request_id: the request.
            block_ids: all of its blocks.
            awaits_load: whether the tiers below bring exact tokens first, see :meth:`on_report`.
        """
        request = self._requests[request_id]
        plan = request.offered
        assert plan is not None
        reused = plan.read
        for chunk in reused:
            self.library.record_use(chunk.variant, chunk.overhead)
        request.figures = ReuseFigures(
            num_reused_tokens=sum(plan.num_kept(chunk) for chunk in reused),
            num_recomputed_tokens=sum(len(chunk.recomputed) for chunk in plan.reused),
            overheads=[chunk.overhead for chunk in plan.reused],
            variants=[chunk.variant.number for chunk in plan.reused],
            num_prefix_tokens=request.figures.num_prefix_tokens,
        )
        stored = {chunk.span for chunk in reused}
        computed = [span for span in request.spans if span not in stored and plan.start <= span.start]
        request.lost = losses(request.spans, request.lost, plan.start, plan)
        self._record_lost(request)
        self._reserve(request_id, request, [span for span in computed if span.end <= plan.end])
        positions = np.asarray(plan.recomputed, dtype=np.int64)
        focus = self.plans.focus(request, plan, reused)
        num_question_tokens = 0 if focus is None else int((positions >= focus.question_start).sum())
        if (
            num_question_tokens > self._max_step_tokens // _MIN_QUESTIONS_PER_STEP
        ):  # every slice computes the question again
            focus, num_question_tokens = None, 0
        self._jobs[request_id] = ChunkJob(
            request_id,
            block_ids=np.asarray(block_ids, dtype=np.int32),
            positions=positions,
            token_ids=np.asarray([request.token_ids[at] for at in plan.recomputed], dtype=np.int64),
            injections=tuple(self.plans.injection(chunk, plan) for chunk in reused),
            captures=tuple(each.capture for each in request.open.values()),
            focus=focus,
            awaits_load=awaits_load,
            prefill_s=self._prefill_cost.estimate_s(plan.start, len(positions)) if len(positions) else 0.0,
        )
        request.positions, request.num_rows_left = positions, len(positions)
        request.num_question_tokens = num_question_tokens
        request.num_spare_runs = 0 if focus is None else 1 + len(focus.droppable)
        request.is_running, request.num_to_load = True, self._num_workers if awaits_load else 0
        self._running[request_id] = None
        if not self._shares_beginnings:
            return plan.start
        return min((max(chunk.span.start, plan.start) for chunk in reused), default=plan.end)

    def compute(self, request_id: str, num_exact: int) -> None:
        """Capture chunks of a request that vLLM prefills from ``num_exact`` on."""
        request = self._requests[request_id]
        if request.is_running or request.is_tried:
            return
        request.is_tried = True
        self.library.release(request_id)
        request.offered = None
        is_off = {span for span, lost in zip(request.spans, request.lost, strict=True) if lost}
        request.lost = losses(request.spans, request.lost, num_exact, None)
        if any(request.lost):
            self._record_lost(request)
        computed = [span for span in request.spans if 2 * (span.end - num_exact) >= span.num_tokens]
        # The first part of a document may be approximate KV, of the request before it was preempted or of another.
        self._reserve(request_id, request, [s for s in computed if s.start >= num_exact or s not in is_off])
        if request.open:
            self._capturing.add(request_id)

    def on_finished(self, request_id: str) -> ReuseFigures | None:
        """Remove a request, and return its statistics; ``None`` for one without chunk reuse."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.is_running:
            self._cancelled.append(request_id)
            self._end_job(request_id, request)
            for each in request.open.values():
                each.is_awaited = False
        request.is_finished = True
        self._capturing.discard(request_id)
        if not request.awaits_capture:
            self._forget(request_id, request)
        return request.figures

    # A holder of what may be forgotten

    def forget(self, forgotten: Forgotten) -> Freed:
        """Delete the chunks of documents and those computed after them, and store no present capture."""
        digests = {digest_of(doc_id): doc_id for doc_id in forgotten.doc_ids}
        gone = self.library.forget(digests.keys(), is_all=forgotten.is_all)
        for request_id, request in list(self._requests.items()):
            keys = (span.key for span in request.spans)
            if forgotten.is_all or not digests.keys().isdisjoint(request.documents) or not gone.keys.isdisjoint(keys):
                request.is_forgotten = True
                self._stop_capturing(request_id, request)
        num_bytes = {Tier.HOST: gone.num_pages, Tier.DISK: gone.num_disk_pages}
        return Freed(
            {},
            {tier: num_pages * self._page_bytes for tier, num_pages in num_bytes.items() if num_pages},
            gone.num_variants,
            {digests[digest] for digest in gone.documents if digest in digests},
        )

    def num_pending(self) -> int:
        """Return the number of deleted versions in use, and of open scrubs of the disk."""
        return self.library.num_forgotten()

    def deletion_problem(self) -> str | None:
        """Return why a chunk may stay on disk: it is out of service."""
        if not self.library.is_disk_down:
            return None
        return "the disk of chunks is out of service, and may hold it: delete its folder before the next start"

    def clear(self) -> None:
        """Drop all stored chunks and present captures."""
        self.stop_capturing()
        self.library.clear()

    def stop_capturing(self) -> None:
        """Store no present capture, as requests lose their blocks."""
        for request_id, request in list(self._requests.items()):
            self._stop_capturing(request_id, request)

    # Steps

    def take_step(
        self,
        num_scheduled_tokens: int,
        progress: Mapping[str, tuple[int, int]],
        block_ids_of: Callable[[str], Sequence[int]],
    ) -> ChunkStep:
        """Return the workers' chunk-reuse work for a step.

        Args:
            num_scheduled_tokens: those that vLLM computes in it.
            progress: of each request that vLLM computes tokens of, from which on and to which.
            block_ids_of: the blocks of a request.
        """
        step = ChunkStep(
            jobs=list(self._jobs.values()),
            slices=self._slices(max(self._max_step_tokens - num_scheduled_tokens, self._max_step_tokens // 4, 1)),
            cancelled=self._cancelled,
            forgotten=self._forgotten,
            fence=self.library.begin_step(),
        )
        self._jobs, self._cancelled, self._forgotten = {}, [], []
        for request_id in self._capturing & progress.keys():
            start, end = progress[request_id]
            request = self._requests[request_id]
            concerned = [
                each
                for each in request.open.values()
                if not each.is_awaited and each.capture.start < end and start < each.capture.end
            ]
            for each in concerned:
                each.is_awaited = each.capture.end <= end
            if concerned:
                ids = np.asarray(block_ids_of(request_id), dtype=np.int32)
                step.captures.append(CaptureStep(ids, start, end, tuple(each.capture for each in concerned)))
            if all(each.is_awaited for each in request.open.values()):
                self._capturing.discard(request_id)
        return step

    @property
    def wants_progress(self) -> bool:
        """Whether :meth:`take_step` needs the ranges that vLLM computes."""
        return bool(self._capturing)

    def on_report(self, report: ChunkReport) -> None:
        """Process the workers' report."""
        for request_id, num_loaded in report.num_loaded.items():
            request = self._requests.get(request_id)
            if request is not None:
                request.num_to_load -= num_loaded
        for request_id, num_rows in report.computed_rows.items():
            if (request := self._requests.get(request_id)) is not None:
                request.figures.num_computed_rows += num_rows
        for name in report.num_captured:
            self._commit(name, report.captured.get(name))
        self.library.end_step(report.fence)

    def on_job_done(self, request_id: str) -> None:
        """End the job of a request whose tokens are computed."""
        request = self._requests.get(request_id)
        if request is not None and request.is_running:
            self._end_job(request_id, request)
            if not request.awaits_capture:
                self.library.release(request_id)

    def _slices(self, budget: int) -> list[Slice]:
        order = self._order(self._running)
        are_guesses = bool(order) and self._is_guess(order[0])
        return cut_slices(
            [(request_id, self._requests[request_id]) for request_id in order],
            budget,
            max_runs=self._max_step_runs,
            are_guesses=are_guesses,
        )

    def _record_lost(self, request: ReuseState) -> None:
        for span, lost in zip(request.spans, request.lost, strict=True):
            name = request.namespace + span.context + span.key
            self._lost[name] = max(lost, self._lost.get(name, 0.0))  # another's may be there beside it
            self._lost.move_to_end(name)
        while len(self._lost) > _MAX_SHARED:
            self._lost.popitem(last=False)

    # Captures

    def _reserve(self, request_id: str, request: ReuseState, spans: Iterable[ChunkSpan]) -> None:
        for span in () if request.is_forgotten else spans:
            before = request.spans[: request.spans.index(span)]
            lost = tuple(request.lost[: len(before)])
            token_ids = request.token_ids[span.start : span.end]
            inherits = max(lost, default=0.0)
            documents = request.documents[: len(before) + 1]
            reservation = self.library.reserve(
                span.key, token_ids, span.context, request_id, inherits=inherits, documents=documents
            )
            self.library.seed(span.key, span.context, span.num_tokens, request.options.expected_uses)
            if reservation is None:
                continue
            name = (request_id, reservation.key, reservation.number)
            places = tuple((each.start, each.end) for each in before)
            capture = Capture(name, span.start, span.end, places, reservation.pages)
            request.open[name] = OpenCapture(capture, reservation, before, lost)

    def _stop_capturing(self, request_id: str, request: ReuseState) -> None:
        if request.open:
            self._forgotten.append(request_id)
            for each in request.open.values():
                self.library.abandon(each.reservation)
            request.open.clear()
        self._capturing.discard(request_id)
        if not request.is_running:
            request.offered = None
        if request.is_finished:  # it only waited for its captures
            self._forget(request_id, request)

    def _commit(self, name: CaptureId, captured: CapturedChunk | None) -> None:
        request = self._requests.get(name[0])
        each = None if request is None else request.open.pop(name, None)
        if request is None or each is None:
            return
        statistics = None if captured is None else statistics_of(each, captured.mean_of(self._num_workers))
        if statistics is None:
            self.library.abandon(each.reservation)
        else:
            self.library.commit(each.reservation, statistics)
        if request.awaits_capture:
            return
        if request.is_finished:
            self._forget(name[0], request)
        elif not request.is_running and not request.open:
            self.library.release(name[0])

    # Ends

    def _restart_reuse(self, request_id: str, request: ReuseState) -> None:
        """Restart a preempted request."""
        if request.is_tried or request.open:
            request.is_tried = request.computes_missing = False
            request.waits_since_s = None
            request.open.clear()
            request.offered = None
            self._capturing.discard(request_id)
            self._forgotten.append(request_id)
            self.library.release(request_id)

    def _end_job(self, request_id: str, request: ReuseState) -> None:
        request.is_running, request.offered = False, None
        request.is_tried = True
        del self._running[request_id]

    def _forget(self, request_id: str, request: ReuseState) -> None:
        if request.open:
            self._forgotten.append(request_id)
        self.library.release(request_id)
        del self._requests[request_id]
