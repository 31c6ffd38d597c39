"""One engine in virtual time: what waits for it, what runs in it, and how long an iteration takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

from ragcache_core.queueing import CacheAwareQueue, order_priority
from ragcache_core.sim.cache import Served, SimulatedCache
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.testbeds import Testbed
from ragcache_core.sim.traces.trace import TracedRequest
from ragcache_core.types import Tier


@dataclass(slots=True, weakref_slot=True, eq=False)
class Job:
    """A request on its way through the engine.

    Attributes:
        number: of the request in the trace.
        request: with its documents in the order in which the prompt shows them, as ``order`` has them of the trace's.
        is_wrong: it is a speculation from documents that are not the final ones: computed, and never cached.
        ready_s: when its documents were known; None while that is not so.
        served: what it found, once it was admitted.
        first_token_s, done_s: None until then.
        decision_ns: real time that was spent on its decisions.
        prefill_s: what its prefill took, had it run alone.
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
        """Tokens of the prompt, without those that all requests share."""
        return self.request.history_tokens + sum(self.request.doc_tokens) + self.request.question_tokens


@dataclass(slots=True)
class EngineModel:
    """Iterations over at most ``max_batch`` requests.

    Requests are admitted when an iteration begins. In its first one a request is prefilled as a whole, and has its
    first token when that ends; in each later one it gets one token more. An iteration of requests i takes::

        compute  = sum of time(i) - (n - 1) base        time(i) = T(alpha, beta) in the first, decode(context) later
        transfer = host tokens / host link + disk tokens / disk link + shared tokens / link, of those that are admitted
        iteration = max(compute, transfer) if transfers are overlapped, else compute + transfer

    alpha are the tokens whose KV is there, cached or read from chunks or a shared tier, beta those that are computed: a
    partial prefill of tokens that lie scattered costs what one behind everything else would. The base, reading the
    weights, is shared by all. A single request thus has its first token T(alpha, beta) after it was admitted, or later
    by its transfers. Overlapping is ideal: layers are loaded while those before are computed,
    and the first layer's wait is not counted. Copies to the host take no time, since the link has two directions, and
    the KV of what runs is not counted against the cache.
    """

    testbed: Testbed
    max_batch: int
    overlaps_transfers: bool
    link_gib_per_s: float | None = None
    running: list[Job] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        """Whether a further request may be admitted to the next iteration."""
        return len(self.running) < self.max_batch

    def iteration_s(self, admitted: Sequence[Job]) -> float:
        """Return the seconds of the next iteration; ``admitted`` are those of the running ones that are prefilled."""
        testbed = self.testbed
        compute_s = (1 - len(self.running)) * testbed.base_s
        num_host_tokens = num_disk_tokens = num_shared_tokens = 0
        for job in self.running:
            if (served := job.served) is None or job.num_output_tokens:
                continue
            reuse = served.reuse
            num_known_tokens = served.num_cached_tokens + reuse.num_tokens + served.num_shared_tokens
            job.prefill_s = testbed.cost.estimate_s(num_known_tokens, max(served.num_new_tokens, 1))
            compute_s += job.prefill_s
            num_host_tokens += served.num_cached_tokens_by_tier[Tier.HOST] + reuse.num_host_tokens
            num_disk_tokens += served.num_cached_tokens_by_tier[Tier.DISK] + reuse.num_disk_tokens
            num_shared_tokens += served.num_shared_tokens
        if len(admitted) < len(self.running):
            for job in self.running:
                if job.num_output_tokens and job.served is not None:
                    served = job.served
                    num_known_tokens = served.num_cached_tokens + served.reuse.num_tokens + served.num_shared_tokens
                    compute_s += testbed.decode_s(num_known_tokens + served.num_new_tokens + job.num_output_tokens)
        transfer_s = testbed.transfer_s(num_host_tokens, num_disk_tokens)
        if self.link_gib_per_s is not None:
            transfer_s += num_shared_tokens / testbed.tokens_per_gib / self.link_gib_per_s
        return max(compute_s, transfer_s) if self.overlaps_transfers else compute_s + transfer_s

    def end_iteration(self, now_s: float) -> list[Job]:
        """Give every running request a token, and return those that are done; they run no longer."""
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
    """An engine with its cache and the project's own queue in front of it; the clock is its owner's.

    Attributes:
        cache: what is asked and changed when a job starts.
        model: how long iterations take, and what runs in them.
        queue: what waits.
    """

    def __init__(self, cache: SimulatedCache, options: SimulationOptions, testbed: Testbed) -> None:
        self.cache = cache
        self.model = EngineModel(testbed, options.max_batch, options.overlaps_transfers, options.link_gib_per_s)
        self._system_tokens = options.system_tokens
        self._is_cache_aware = options.queue == "cache-aware"
        self.queue: CacheAwareQueue[Job] = CacheAwareQueue(
            self._priority, window=options.window if self._is_cache_aware else 0
        )
        self._waiting_for: dict[tuple[str, ...], set[Job]] = {}

    def enqueue(self, job: Job) -> None:
        """Have a job wait for its turn."""
        self.queue.add(job)
        if self._is_cache_aware:
            for end in range(1, len(job.request.doc_ids) + 1):
                self._waiting_for.setdefault(job.request.doc_ids[:end], set()).add(job)

    def next(self) -> Job:
        """Take out the job whose turn it is; one must wait."""
        if not self._is_cache_aware:
            return self.queue.pop()
        changed = self.cache.changed_prefixes()
        for waiting in [self.queue] if changed is None else map(self._waiting_for.get, changed):
            for job in waiting or ():
                self.queue.touch(job)
        self.queue.reconsider()
        job = self.queue.pop()
        for end in range(1, len(job.request.doc_ids) + 1):
            prefix = job.request.doc_ids[:end]
            waiting_for = self._waiting_for[prefix]
            waiting_for.discard(job)
            if not waiting_for:
                del self._waiting_for[prefix]
        return job

    def start(self, job: Job) -> None:
        """Let a job run from the next iteration on."""
        started_ns = perf_counter_ns()
        job.served = self._serve(job)
        job.decision_ns += perf_counter_ns() - started_ns
        self.model.running.append(job)

    def admit(self) -> list[Job]:
        """Start what waits while there is room, and return it."""
        admitted = []
        while self.model.has_room and self.queue:
            started_ns = perf_counter_ns()
            job = self.next()
            job.decision_ns += perf_counter_ns() - started_ns
            self.start(job)
            admitted.append(job)
        return admitted

    def _serve(self, job: Job) -> Served:
        if not job.is_wrong:
            return self.cache.serve(job.request, job.number)
        return Served((), (self._system_tokens, 0, 0), job.num_prompt_tokens, 0, 0)

    def _priority(self, job: Job) -> float:
        num_cached_tokens = self.cache.num_cached_tokens(job.request)
        return order_priority(num_cached_tokens, job.num_prompt_tokens + self._system_tokens - num_cached_tokens)
