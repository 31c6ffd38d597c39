"""One engine in virtual time: its queue, its running requests, and the time of an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Protocol

from ragcache_core.ordering import CachedPaths
from ragcache_core.queueing import CacheAwareQueue, order_priority
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.testbeds import Testbed
from ragcache_core.sim.traces.trace import TracedRequest
from ragcache_core.types import Tier

NO_STATIC_PREFIX = b""
"""The static prefix of all simulated prompts: they share one system prompt."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """The chunk reuse of a prompt after its exact prefix.

    Attributes:
        documents: those that are reused, by their places in the prompt.
        first_token: where the first of them begins, or the exact prefix ends. From there on KV is approximate and is
            not shared. None: nothing is reused.
        num_host_tokens, num_disk_tokens: read from there instead of computed.
        num_recomputed_tokens: of the reused documents, computed all the same.
    """

    documents: frozenset[int] = frozenset()
    first_token: int | None = None
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_recomputed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens from chunks."""
        return self.num_host_tokens + self.num_disk_tokens


NO_REUSE = Reuse()


@dataclass(frozen=True, slots=True)
class Served:
    """The hits of a request, and the KV moved for it.

    Attributes:
        tiers: the tier of each document of the prompt, in the prompt's order; None for a miss.
        num_cached_tokens_by_tier: of the prompt, indexed by :class:`~ragcache_core.types.Tier`.
        num_new_tokens: of the prompt, to be computed.
        num_loaded_tokens: copied to the GPU from the tiers below; the request waits for them.
        num_swapped_out_tokens: copied from the GPU to the host.
        reuse: tokens that are read from chunks, neither cached nor computed.
    """

    tiers: tuple[Tier | None, ...]
    num_cached_tokens_by_tier: tuple[int, int, int]
    num_new_tokens: int
    num_loaded_tokens: int
    num_swapped_out_tokens: int
    reuse: Reuse = NO_REUSE

    @property
    def num_cached_tokens(self) -> int:
        """Number of exactly cached prompt tokens."""
        return sum(self.num_cached_tokens_by_tier)


class SimulatedCache(Protocol):
    """The cache of an engine: :class:`~ragcache_core.sim.blocks.BlockCache`, or that of an experiment.

    A request comes with its number in the trace, which tells two questions of the same words apart. Its documents
    are in the prompt's order.
    """

    mirror: CachedPaths
    """Which orders of documents are cached, as of the last :meth:`update_mirror`."""

    def num_cached_tokens(self, request: TracedRequest) -> int:
        """Return the number of cached prompt tokens in any tier, without side effects."""
        ...

    def best_order(self, request: TracedRequest) -> tuple[int, ...]:
        """Return the permutation of documents with the longest cached prefix, without side effects.

        Where nothing is gained, it is the order as it is: the result of :func:`ragcache_core.ordering.arrange` for
        ``cache_aware``, given all that is cached.
        """
        ...

    def serve(self, request: TracedRequest, number: int) -> Served:
        """Return a request's hits; count it, and update the tiers."""
        ...

    def warm(self, request: TracedRequest, expected_uses: int) -> None:
        """Store the documents of a prompt in advance, ranked as if used that many times."""
        ...

    def update_mirror(self) -> None:
        """Update :attr:`mirror` to the present cache."""
        ...


@dataclass(slots=True, weakref_slot=True, eq=False)
class Job:
    """A request in the engine.

    Attributes:
        number: of the request in the trace.
        request: with its documents in the prompt's order; ``order`` gives their places in the trace's.
        is_wrong: it is a misspeculation, from documents that are not the final ones: computed, and never cached.
        ready_s: when its documents were known; None before that.
        served: what it hit, once it was admitted.
        first_token_s, done_s: None until then.
        decision_ns: real time that its decisions took.
        prefill_s: the time of its prefill, had it run alone.
    """

    number: int
    request: TracedRequest
    order: tuple[int, ...]
    is_wrong: bool = False
    ready_s: float | None = None
    served: Served | None = None
    first_token_s: float | None = None
    done_s: float | None = None
    decision_ns: int = 0
    num_output_tokens: int = 0
    prefill_s: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens without the system prompt."""
        return self.request.history_tokens + sum(self.request.doc_tokens) + self.request.question_tokens


@dataclass(slots=True)
class EngineModel:
    """Iterations over at most ``max_batch`` requests.

    Requests are admitted when an iteration begins. In its first one a request is prefilled as a whole, and has its
    first token when that ends; in each later one it gets one token more. An iteration of requests i takes::

        compute  = sum of time(i) - (n - 1) base        time(i) = T(alpha, beta) in the first, decode(context) later
        transfer = host tokens / host link + disk tokens / disk link, of those that are admitted
        iteration = max(compute, transfer) if transfers are overlapped, else compute + transfer

    alpha are the tokens whose KV is cached or read from chunks, beta those that are computed: a partial prefill of
    scattered tokens costs the same as one after all the others. The base, reading the weights, is shared by all. A
    single request thus has its first token T(alpha, beta) after it was admitted, or later by its transfers. Overlapping
    is ideal: the first layer's wait is not counted. Copies to the host take no time, since the link has two directions,
    and the KV of running requests is not counted against the cache.
    """

    testbed: Testbed
    max_batch: int
    overlaps_transfers: bool
    running: list[Job] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        """Whether the next iteration may admit another request."""
        return len(self.running) < self.max_batch

    def iteration_s(self, admitted: Sequence[Job]) -> float:
        """Return the seconds of the next iteration; ``admitted`` requests are prefilled in it."""
        testbed = self.testbed
        compute_s = (1 - len(self.running)) * testbed.base_s
        num_host_tokens = num_disk_tokens = 0
        for job in self.running:
            if (served := job.served) is None or job.num_output_tokens:
                continue
            reuse = served.reuse
            num_known_tokens = served.num_cached_tokens + reuse.num_tokens
            job.prefill_s = testbed.cost.estimate_s(num_known_tokens, max(served.num_new_tokens, 1))
            compute_s += job.prefill_s
            num_host_tokens += served.num_cached_tokens_by_tier[Tier.HOST] + reuse.num_host_tokens
            num_disk_tokens += served.num_cached_tokens_by_tier[Tier.DISK] + reuse.num_disk_tokens
        if len(admitted) < len(self.running):
            for job in self.running:
                if job.num_output_tokens and job.served is not None:
                    served = job.served
                    num_known_tokens = served.num_cached_tokens + served.reuse.num_tokens
                    compute_s += testbed.decode_s(num_known_tokens + served.num_new_tokens + job.num_output_tokens)
        transfer_s = testbed.transfer_s(num_host_tokens, num_disk_tokens)
        return max(compute_s, transfer_s) if self.overlaps_transfers else compute_s + transfer_s

    def end_iteration(self, now_s: float) -> list[Job]:
        """Give every running request a token, and return the finished ones."""
        done = []
        for job in self.running:
            job.num_output_tokens += 1
            if job.first_token_s is None:
                job.first_token_s = now_s
            if job.num_output_tokens >= job.request.output_tokens:
                job.done_s = now_s
                done.append(job)
        if done:
            self.running = [job for job in self.running if job.done_s is None]
        return done


class QueuedEngine:
    """An engine with its cache and RAGCache's queue.

    Attributes:
        cache: the cache, which a starting job uses and changes.
        model: running requests, and the time of iterations.
        queue: waiting jobs.
        speculative: jobs of unfinished searches by number, admitted while no other job waits.
        end_s: end of the present iteration; ``None`` if none runs.
    """

    def __init__(self, cache: SimulatedCache, options: SimulationOptions, testbed: Testbed) -> None:
        self.cache = cache
        self.model = EngineModel(testbed, options.max_batch, options.overlaps_transfers)
        self._system_tokens = options.system_tokens
        self._is_cache_aware = options.queue == "cache-aware"
        self.queue: CacheAwareQueue[Job] = CacheAwareQueue(
            self._priority, window=options.window if self._is_cache_aware else 0
        )
        self.speculative: dict[int, Job] = {}
        self.end_s: float | None = None

    @property
    def num_pending(self) -> int:
        """Number of queued and running requests."""
        return len(self.queue) + len(self.speculative) + len(self.model.running)

    def enqueue(self, job: Job) -> None:
        """Add a job to the queue."""
        self.queue.add(job)

    def begin_iteration(self, now_s: float) -> float:
        """Start queued jobs in free slots, and return the seconds of the iteration; 0 if there is none."""
        admitted = []
        while self.model.has_room and (self.queue or self.speculative):
            started_ns = perf_counter_ns()
            job = self._next() if self.queue else self.speculative.pop(next(iter(self.speculative)))
            job.served = self._serve(job)
            job.decision_ns += perf_counter_ns() - started_ns
            self.model.running.append(job)
            admitted.append(job)
        if not self.model.running:
            return 0.0
        seconds = self.model.iteration_s(admitted)
        self.end_s = now_s + seconds
        return seconds

    def end_iteration(self) -> list[Job]:
        """Return the jobs that finish with the iteration."""
        assert self.end_s is not None
        done = self.model.end_iteration(self.end_s)
        self.end_s = None
        return done

    def _next(self) -> Job:
        if self._is_cache_aware:
            self.queue.touch(*self.queue)
            self.queue.reconsider()
        return self.queue.pop()

    def _serve(self, job: Job) -> Served:
        if not job.is_wrong:
            return self.cache.serve(job.request, job.number)
        return Served((), (self._system_tokens, 0, 0), job.num_prompt_tokens, 0, 0)

    def _priority(self, job: Job) -> float:
        num_cached_tokens = self.cache.num_cached_tokens(job.request)
        return order_priority(num_cached_tokens, job.num_prompt_tokens + self._system_tokens - num_cached_tokens)
