"""Plans for requests: which stored chunks are reused, once they are sure to stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ragcache_core.chunk.recompute import plan_reuse
from ragcache_core.chunk.selection import make_selection
from ragcache_core.chunk.types import ChunkKey, ChunkVariant, PlannedChunk, ReusePlan
from ragcache_core.vllm_plugin.chunks.manager.manager import ChunkManager
from ragcache_core.vllm_plugin.chunks.messages import FocusRequest, Injection
from ragcache_core.vllm_plugin.chunks.reuse_state import ReuseState


class ChunkPlans:
    """Makes plans and pins what they reuse.

    Args:
        library: which chunks are stored.
        run_tokens: the length of runs of selected tokens, see :func:`plan_reuse`.
    """

    def __init__(self, library: ChunkManager, *, run_tokens: int = 1) -> None:
        self._library = library
        self.run_tokens = run_tokens
        self.least_reused_tokens = 1
        """A plan that saves fewer is none: vLLM prefills such a request."""

    def preload(self, request_id: str, request: ReuseState) -> None:
        """Have read what a request that will wait may reuse and lies on disk alone (Cache-Craft §3.5)."""
        stored = self._stored(request, 0) if request.options.reuses else {}
        if len(self._on_host(stored)) < len(stored):
            self.plan(request_id, request, 0)

    def plan(self, request_id: str, request: ReuseState, num_exact: int) -> ReusePlan | None:
        """Return a plan whose chunks are pinned for the request; None if it reuses nothing."""
        if not request.options.reuses:
            return None
        end = len(request.token_ids) - 1
        stored = self._stored(request, num_exact)
        on_host = self._on_host(stored)
        for candidates in (on_host,) if request.computes_missing else (stored, on_host):
            if not candidates:
                return None
            plan = self._planned(request, candidates, num_exact, end)
            variants = [chunk.variant for chunk in plan.read]
            if plan.num_reused_tokens < self.least_reused_tokens:
                return None
            if self._library.pin(variants, request_id):
                return plan
        return None

    def _stored(self, request: ReuseState, num_exact: int) -> Mapping[ChunkKey, Sequence[ChunkVariant]]:
        ahead = [span for span in request.spans if span.end > num_exact]
        return self._library.find({span.key: request.token_ids[span.start : span.end] for span in ahead})

    def _planned(
        self, request: ReuseState, stored: Mapping[ChunkKey, Sequence[ChunkVariant]], start: int, end: int
    ) -> ReusePlan:
        options = request.options
        return plan_reuse(
            request.spans,
            stored,
            start=start,
            end=end,
            selection=make_selection(options.selection),
            alpha=options.alpha,
            max_recompute=options.max_recompute,
            run_tokens=self.run_tokens,
        )

    def _on_host(self, stored: Mapping[ChunkKey, Sequence[ChunkVariant]]) -> dict[ChunkKey, tuple[ChunkVariant, ...]]:
        on_host = {key: tuple(filter(self._library.is_on_host, variants)) for key, variants in stored.items()}
        return {key: variants for key, variants in on_host.items() if variants}

    def injection(self, chunk: PlannedChunk, plan: ReusePlan) -> Injection:
        """Return how a reused chunk comes into the paged cache."""
        span = chunk.span
        first, last = max(span.start, plan.start), min(span.end, plan.end)
        return Injection(span.start, first, last, self._library.pages(chunk.variant))

    @staticmethod
    def focus(request: ReuseState, plan: ReusePlan, reused: Sequence[PlannedChunk]) -> FocusRequest | None:
        """Return what a question looks at while a job runs; None where it can let nothing go."""
        droppable = tuple(request.spans.index(chunk.span) for chunk in reused if chunk.recomputed)
        question_start = request.spans[-1].end
        window = request.options.focus
        if not window or not droppable or question_start >= plan.end or len(request.spans) < 2:
            return None
        places = tuple((span.start, span.end) for span in request.spans)
        return FocusRequest(question_start, places, droppable, window)
