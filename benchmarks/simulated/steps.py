"""One engine in steps, as vLLM 0.32 schedules them: running requests, what each step computes, and its time."""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns

from benchmarks.simulated.vllm_host import VLLMHostBlocks
from ragcache_core.ordering import arrange
from ragcache_core.policy import PrefillCost
from ragcache_core.queueing import CacheAwareQueue, order_priority
from ragcache_core.sim.blocks import BlockCache, BlockRun
from ragcache_core.sim.engine import Job
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.result import Recorder, SimulationResult
from ragcache_core.sim.simulator import PROGRESS_EVERY, check_trace, search_s
from ragcache_core.sim.testbeds import Testbed, load_testbed
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.types import Tier


def simulate_steps(
    trace: Trace,
    options: SimulationOptions,
    *,
    max_batched_tokens: int,
    knows_documents: bool = True,
    keeps_requests: bool = False,
    progress: Callable[[int], object] | None = None,
) -> SimulationResult:
    """Return what one engine would have done with ``trace`` in steps.

    Args:
        trace: requests, in the order of their arrival.
        options: of the run; speculation, chunk reuse and replicas are not simulated in steps.
        max_batched_tokens: that a step computes.
        knows_documents: whether blocks are kept as with RAGCache's plugin; False: as vLLM alone keeps them.
        keeps_requests: whether the result has a record for each request.
        progress: receives the number of requests that are done since its last call.

    Raises:
        ConfigError: the testbed is unknown, or the trace does not fit the options.
    """
    testbed = load_testbed(options.cost_model)
    notes = check_trace(trace, options, testbed)
    recorder = Recorder(trace, options, keeps_requests=keeps_requests)
    num_done = 0

    def on_done(job: Job) -> None:
        nonlocal num_done
        recorder.add(job)
        num_done += 1
        if progress is not None and num_done % PROGRESS_EVERY == 0:
            progress(PROGRESS_EVERY)

    cache = SteppedCache(options, testbed.cost, knows_documents=knows_documents)
    simulation = StepSimulation(cache, options, testbed, max_batched_tokens)
    ready_s = trace.arrival_s + search_s(len(trace), options)
    order = ready_s.argsort(kind="stable")
    simulation.replay(((number, trace[number]) for number in order.tolist()), ready_s[order].tolist(), on_done)
    if progress is not None:
        progress(num_done % PROGRESS_EVERY)
    recorder.max_overtaken = simulation.max_overtaken
    return recorder.result(notes)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the steps of an engine cost; where nothing was measured, what its iterations do."""

    testbed: Testbed

    @property
    def request_s(self) -> float:
        """What a request takes beside its steps: to be sent, taken in and answered."""
        steps = self.testbed.steps
        return steps.request_s if steps is not None else 0.0

    @property
    def step_s(self) -> float:
        """What a step takes, whatever it computes."""
        steps = self.testbed.steps
        return steps.step_s if steps is not None else self.testbed.base_s

    def chunk_s(self, num_cached_tokens: int, num_new_tokens: int) -> float:
        """Return what a part of a prefill adds to a step."""
        alone_s = self.testbed.cost.estimate_s(num_cached_tokens, num_new_tokens)
        return max(alone_s - self.request_s - self.step_s, 0.0)

    def answer_s(self, num_context_tokens: int) -> float:
        """Return what a token of an answer adds to a step."""
        if self.testbed.steps is not None:
            return self.testbed.steps.sequence_s
        return max(self.testbed.decode_s(num_context_tokens) - self.testbed.base_s, 0.0)

    def copy_s(self, num_tokens: int) -> float:
        """Return the seconds in which KV is copied between host memory and the GPU."""
        return self.testbed.transfer_s(num_tokens, 0)

    def read_s(self, num_disk_tokens: int) -> float:
        """Return the seconds in which KV comes from the disk to host memory."""
        return num_disk_tokens / self.testbed.tokens_per_gib / self.testbed.disk_gib_per_s


class SteppedCache(BlockCache):
    """Blocks of several requests at the same time: these wait for free ones, and are preempted.

    Without ``knows_documents`` it is vLLM without the plugin: whole prompts and answers are copied to the host.
    """

    def __init__(self, options: SimulationOptions, cost: PrefillCost, *, knows_documents: bool = True) -> None:
        self._knows_documents = knows_documents
        super().__init__(options if knows_documents else replace(options, policy="lru"), cost)
        self._vllm_host: VLLMHostBlocks | None = None
        if not knows_documents and self._host is not None and not options.disk_tokens:
            self._vllm_host = VLLMHostBlocks(self._host.num_blocks, is_arc=options.policy == "arc")
            self._host = self._vllm_host
        self._begun: list[BlockRun] = []
        self._again: dict[BlockRun, int] = {}
        self._found: dict[BlockRun, set[Hashable]] = {}

    def try_begin(self, run: BlockRun, max_tokens: int = sys.maxsize) -> bool:
        """Begin a request, or return False where it must wait.

        It waits until its whole prompt finds free blocks beside what those that have begun will take for theirs.
        """
        num_tokens = run.prompt.num_prompt_tokens
        num_local = self._gpu.num_leading(run.prompt.keys[: (num_tokens - 1) // self.block_size])
        num_free = self._gpu.num_free - sum(map(self._num_missing, self._begun))
        if self._num_missing(run) - self._gpu.num_in_use(run.prompt.keys[:num_local]) > num_free:
            return False
        self.begin(run, max_tokens)
        self._begun.append(run)
        return True

    def load(self, run: BlockRun) -> None:
        self._found.setdefault(run, set()).update(run.promised)
        super().load(run)

    def end(self, run: BlockRun) -> None:
        super().end(run)
        self._again.pop(run, None)
        found = self._found.pop(run, set())
        if self._vllm_host is not None:
            self._vllm_host.on_answered(run.prompt.keys, set(run.stored), found)

    def preempt(self, run: BlockRun) -> None:
        """Take a request's blocks away; it waits again, and hits what is left of them when it begins again."""
        self._free(run)
        self._again[run] = max(self.num_recomputed(run), run.num_answered)

    def num_recomputed(self, run: BlockRun) -> int:
        """Return the tokens of its answer that were on the GPU when a request was preempted."""
        return self._again.get(run, 0)

    def num_missing_blocks(self, run: BlockRun, num_tokens: int) -> int:
        """Return how many free blocks are missing to compute more tokens, of the prompt or the answer."""
        num_needed = -(-(run.num_computed + run.num_answered + num_tokens) // self.block_size)
        return num_needed - run.held.num_blocks - self._gpu.num_free

    def _num_missing(self, run: BlockRun) -> int:
        """Return how many blocks a request does not have yet for its prompt, and what it had answered before."""
        num_tokens = run.prompt.num_prompt_tokens + self.num_recomputed(run)
        return max(-(-num_tokens // self.block_size) - run.held.num_blocks, 0)

    def _store(self, run: BlockRun, keys: Sequence[int]) -> None:
        num_before = len(run.stored)
        super()._store(run, keys)
        self._found.setdefault(run, set()).update(set(keys).difference(run.stored[num_before:]))

    def _free(self, run: BlockRun) -> None:
        super()._free(run)
        self._begun.remove(run)

    def _num_storable_blocks(self, run: BlockRun) -> int:
        if self._knows_documents or self._host is None:
            return super()._num_storable_blocks(run)
        return min(len(run.prompt.keys), self._host.num_blocks)


class StepEngine:
    """Steps of at most ``max_batched_tokens`` tokens of at most ``max_batch`` requests.

    What runs goes on first: an answer by a token, a prompt by as much of it as the step has left. Then those whose KV
    was loaded, then those that wait, while all blocks of their prompts are free; where an answer finds no block, the
    last request is preempted. A request that finds KV below the GPU is in no step until all of it was loaded, which is
    begun when it could have been computed: no layer is computed while the next is loaded::

        request         | waits | blocks, KV loaded | waits for the end of a step | computed ... | first token
        disk            | read, one after another |

    A step takes what each of its requests adds, and what all share::

        step     = step_s + sum of chunks(i) + sum of answers(i)
        chunk    = T(alpha, beta) - request_s - step_s          alpha: computed before it, beta: its own tokens
        answer   = sequence_s, or what a token more costs after its context

    T is of one request alone, and so has in it what it takes to send and read it (``request_s``), which is added to the
    time of its first token here. Where transfers are not ``overlaps_transfers``, a step waits for the copies that it
    begins, as on a machine without a GPU; elsewhere they go on beside steps, the link's one after another.

    Attributes:
        running, now_s: the running requests, and the clock.
    """

    def __init__(
        self, cache: SteppedCache, options: SimulationOptions, testbed: Testbed, max_batched_tokens: int
    ) -> None:
        self.cache = cache
        self.running: list[Job] = []
        self.now_s = 0.0
        self._costs = StepCosts(testbed)
        self._max_running = options.max_batch
        self._max_tokens = max_batched_tokens
        self._copies_beside = options.overlaps_transfers
        window = options.window if options.queue == "cache-aware" else 0
        self.queue: CacheAwareQueue[Job] = CacheAwareQueue(self._priority, window=window)
        self._is_ordered = bool(window)
        self._runs: dict[Job, BlockRun] = {}
        self._loading: list[tuple[float, Job]] = []
        self._disk_free_s = self._link_free_s = 0.0
        self._num_to_store = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, is loaded or runs."""
        return not (self.running or self._loading or self.queue)

    def restart_clock(self) -> None:
        """Set the clock to 0; nothing may wait or run."""
        assert self.is_idle
        self.now_s = self._disk_free_s = self._link_free_s = 0.0

    def enqueue(self, job: Job) -> None:
        """Have a job wait for its turn."""
        self._runs[job] = self.cache.enter(job.request, job.number)
        self.queue.add(job)

    def step(self) -> list[Job]:
        """Make a step, set the clock to its end, and return the jobs that ended with it."""
        self.cache.settle()
        began_s, seconds = self.now_s, 0.0
        copied_s = 0.0 if self._copies_beside else self._costs.copy_s(self._num_to_store)
        self._num_to_store = 0
        num_remaining, computed = self._max_tokens, []
        has_preempted = False
        for job in list(self.running):
            if not num_remaining or job not in self.running:
                continue
            run = self._runs[job]
            num_tokens = min(run.num_remaining, num_remaining) or 1
            while job in self.running and self.cache.num_missing_blocks(run, num_tokens) > 0:
                self._preempt(self.running[-1])
                has_preempted = True
            if job in self.running:
                seconds += self._compute(job, run, num_tokens)
                num_remaining -= num_tokens
                computed.append(job)
        while not has_preempted and num_remaining and len(self.running) < self._max_running:
            if (loaded := self._loaded(began_s)) is not None:
                job, run = loaded, self._runs[loaded]
                if self.cache.num_missing_blocks(run, min(run.num_remaining, num_remaining)) > 0:
                    break
                self._loading = [(ready_s, other) for ready_s, other in self._loading if other is not job]
            elif self.queue:
                job = self._next()
                run = self._runs[job]
                if not self._begin(job, run, num_remaining):
                    self.queue.give_back(job)
                    break
                if run.promised:
                    copied_s += self._load(job, run)
                    continue
            else:
                break
            num_tokens = min(run.num_remaining, num_remaining)
            seconds += self._compute(job, run, num_tokens)
            num_remaining -= num_tokens
            self.running.append(job)
            computed.append(job)
        if computed:
            self.now_s = began_s + self._costs.step_s + seconds + copied_s
        elif copied_s:
            self.now_s = began_s + copied_s
        else:
            self.now_s = max(began_s, min((ready_s for ready_s, _ in self._loading), default=began_s))
        self._loading = [(self.now_s if math.isnan(at_s) else at_s, job) for at_s, job in self._loading]
        return self._end_step(computed)

    def _begin(self, job: Job, run: BlockRun, max_tokens: int) -> bool:
        started_ns = perf_counter_ns()
        has_begun = self.cache.try_begin(run, max_tokens)
        job.decision_ns += perf_counter_ns() - started_ns
        if has_begun and job.served is None:
            job.served = self.cache.served(run)
        return has_begun

    def _load(self, job: Job, run: BlockRun) -> float:
        """Begin to load what a request hit below the GPU; return the seconds that this step waits for it."""
        costs = self._costs
        num_tokens = len(run.promised) * self.cache.block_size
        num_disk_tokens = run.tiers.count(Tier.DISK) * self.cache.block_size
        ready_s = self.now_s
        if num_disk_tokens:
            ready_s = self._disk_free_s = max(self._disk_free_s, ready_s) + costs.read_s(num_disk_tokens)
        copy_s = costs.copy_s(num_tokens)
        if self._copies_beside:
            ready_s = self._link_free_s = max(self._link_free_s, ready_s) + copy_s
            copy_s = 0.0
        elif not num_disk_tokens:
            ready_s = math.nan  # with the end of this step
        self._loading.append((ready_s, job))
        return copy_s

    def _loaded(self, now_s: float) -> Job | None:
        """Return the first of those whose KV is there."""
        job = next((job for ready_s, job in self._loading if ready_s <= now_s), None)
        if job is not None:
            self.cache.load(self._runs[job])
        return job

    def _compute(self, job: Job, run: BlockRun, num_tokens: int) -> float:
        """Compute tokens of a request, and return the seconds that they add to the step."""
        costs, num_context = self._costs, run.num_computed + run.num_answered
        if not run.num_remaining:
            self.cache.answer(run)
            return costs.answer_s(num_context)
        seconds = costs.chunk_s(run.num_computed, num_tokens)
        job.prefill_s += seconds
        self.cache.compute(run, num_tokens)
        if not run.num_remaining:
            self._num_to_store += len(run.stored) * self.cache.block_size
            for _ in range(self.cache.num_recomputed(run)):  # it was preempted: what it had answered is computed again
                if self.cache.num_missing_blocks(run, 1) > 0:
                    break  # the rest of it token by token
                self.cache.answer(run)
                seconds += costs.answer_s(num_context)
        return seconds

    def _end_step(self, computed: list[Job]) -> list[Job]:
        done = []
        for job in computed:
            run = self._runs[job]
            if job not in self.running or run.num_remaining:
                continue
            job.num_output_tokens = max(job.num_output_tokens, 1 + run.num_answered)
            if job.first_token_s is None:
                job.first_token_s = self.now_s + self._costs.request_s
            if job.num_output_tokens >= job.request.output_tokens:
                job.done_s = self.now_s + self._costs.request_s
                self.running.remove(job)
                assert job.served is not None
                job.served = replace(job.served, num_swapped_out_tokens=len(run.stored) * self.cache.block_size)
                self.cache.end(self._runs.pop(job))
                done.append(job)
        return done

    def _preempt(self, job: Job) -> None:
        self.running.remove(job)
        self.cache.preempt(self._runs[job])
        self.queue.put_first(job)

    def _next(self) -> Job:
        if self._is_ordered:
            for job in self.queue:
                self.queue.touch(job)
            self.queue.reconsider()
        return self.queue.pop()

    def _priority(self, job: Job) -> float:
        num_cached, num_prompt = self.cache.num_cached_tokens(job.request), self._runs[job].prompt.num_prompt_tokens
        return order_priority(num_cached, num_prompt - num_cached)


class StepSimulation:
    """An engine that keeps what it has cached from one load to the next."""

    def __init__(
        self, cache: SteppedCache, options: SimulationOptions, testbed: Testbed, max_batched_tokens: int
    ) -> None:
        self._order = options.order
        self._engine = StepEngine(cache, options, testbed, max_batched_tokens)

    @property
    def max_overtaken(self) -> int:
        """How often a request was overtaken at most."""
        return self._engine.queue.max_overtaken

    def replay(
        self,
        requests: Iterable[tuple[int, TracedRequest]],
        ready_s: Sequence[float],
        on_done: Callable[[Job], object] = lambda _: None,
    ) -> list[Job]:
        """Run requests whose documents are known at ``ready_s``, which ascend, and return their jobs in their order.

        The clock starts at 0. ``on_done`` receives each when it has its last token.
        """
        engine = self._engine
        engine.restart_clock()
        jobs: list[Job] = []
        left = zip(requests, ready_s, strict=True)
        following = next(left, None)
        while following is not None or not engine.is_idle:
            if engine.is_idle and following is not None:
                engine.now_s = max(engine.now_s, following[1])
            while following is not None and following[1] <= engine.now_s:
                jobs.append(self._ask(*following[0], following[1]))
                following = next(left, None)
            for job in engine.step():
                on_done(job)
        return jobs

    def run_through(self, requests: Iterable[tuple[int, TracedRequest]], *, in_flight: int) -> None:
        """Run requests, always ``in_flight`` of them at a time."""
        engine = self._engine
        left = iter(requests)
        free_s = [engine.now_s] * in_flight
        following = next(left, None)
        while following is not None or not engine.is_idle:
            if engine.is_idle and free_s:
                engine.now_s = max(engine.now_s, free_s[0])
            while following is not None and free_s and free_s[0] <= engine.now_s:
                self._ask(*following, heapq.heappop(free_s))
                following = next(left, None)
            for job in engine.step():
                assert job.done_s is not None
                heapq.heappush(free_s, job.done_s)

    def _ask(self, number: int, request: TracedRequest, now_s: float) -> Job:
        started_ns = perf_counter_ns()
        if self._order == "cache_aware":
            order = self._engine.cache.best_order(request)
        else:
            order = arrange(request.doc_ids, self._order, None)
        job = Job(number, request.in_order(order), order)
        job.decision_ns = perf_counter_ns() - started_ns
        job.ready_s = now_s
        self._engine.enqueue(job)
        return job
