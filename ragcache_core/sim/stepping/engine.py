"""One engine in steps, as vLLM 0.32 schedules them: who runs, what each step computes, and how long it takes."""

from __future__ import annotations

import math
from dataclasses import replace
from time import perf_counter_ns

from ragcache_core.queueing import CacheAwareQueue, order_priority
from ragcache_core.sim.blocks import BlockCache, Run
from ragcache_core.sim.engine import Job
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.testbeds import Testbed
from ragcache_core.types import Tier


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
        answer   = sequence_s, or what a token more costs behind its context

    T is of one request alone, and so has in it what it takes to send and read it (``request_s``), which is added to the
    time of its first token here. Where transfers are not ``overlaps_transfers``, a step waits for the copies that it
    begins, as on a machine without a GPU; elsewhere they go on beside steps, the link's one after another.

    Attributes:
        running, now_s: who is computed, and the clock.
    """

    def __init__(self, cache: BlockCache, options: SimulationOptions, testbed: Testbed) -> None:
        assert options.max_batched_tokens is not None
        self.cache = cache
        self.running: list[Job] = []
        self.now_s = 0.0
        self._testbed = testbed
        self._max_running = options.max_batch
        self._max_tokens = options.max_batched_tokens
        self._copies_beside = options.overlaps_transfers
        window = options.window if options.queue == "cache-aware" else 0
        self.queue: CacheAwareQueue[Job] = CacheAwareQueue(self._priority, window=window)
        self._is_ordered = bool(window)
        self._runs: dict[Job, Run] = {}
        self._loading: list[tuple[float, Job]] = []
        self._disk_free_s = self._link_free_s = 0.0
        self._num_to_store = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, is loaded or runs."""
        return not (self.running or self._loading or self.queue)

    def begin_anew(self) -> None:
        """Let the clock begin at 0, where nothing is under way."""
        assert self.is_idle
        self.now_s = self._disk_free_s = self._link_free_s = 0.0

    def enqueue(self, job: Job) -> None:
        """Have a job wait for its turn."""
        self._runs[job] = self.cache.enter(job.request, job.number)
        self.queue.add(job)

    def step(self) -> list[Job]:
        """Make a step, and return the jobs that ended with it; the clock is behind it then."""
        self.cache.settle()
        began_s, seconds = self.now_s, 0.0
        copied_s = 0.0 if self._copies_beside else self._testbed.transfer_s(self._num_to_store, 0)
        self._num_to_store = 0
        num_left, computed = self._max_tokens, []
        has_preempted = False
        for job in list(self.running):
            if not num_left or job not in self.running:
                continue
            run = self._runs[job]
            num_tokens = min(run.num_left, num_left) or 1
            while job in self.running and self.cache.num_missing_blocks(run, num_tokens) > 0:
                self._preempt(self.running[-1])
                has_preempted = True
            if job in self.running:
                seconds += self._compute(job, run, num_tokens)
                num_left -= num_tokens
                computed.append(job)
        while not has_preempted and num_left and len(self.running) < self._max_running:
            if (loaded := self._loaded(began_s)) is not None:
                job, run = loaded, self._runs[loaded]
                if self.cache.num_missing_blocks(run, min(run.num_left, num_left)) > 0:
                    break
                self._loading = [(ready_s, other) for ready_s, other in self._loading if other is not job]
            elif self.queue:
                job = self._next()
                run = self._runs[job]
                if not self._begin(job, run, num_left):
                    self.queue.give_back(job)
                    break
                if run.promised:
                    copied_s += self._load(job, run)
                    continue
            else:
                break
            num_tokens = min(run.num_left, num_left)
            seconds += self._compute(job, run, num_tokens)
            num_left -= num_tokens
            self.running.append(job)
            computed.append(job)
        if computed:
            self.now_s = began_s + self._testbed.step_s + seconds + copied_s
        elif copied_s:
            self.now_s = began_s + copied_s
        else:
            self.now_s = max(began_s, min((ready_s for ready_s, _ in self._loading), default=began_s))
        self._loading = [(self.now_s if math.isnan(at_s) else at_s, job) for at_s, job in self._loading]
        return self._end_step(computed)

    def _begin(self, job: Job, run: Run, max_tokens: int) -> bool:
        started_ns = perf_counter_ns()
        has_begun = self.cache.begin(run, max_tokens)
        job.decision_ns += perf_counter_ns() - started_ns
        if has_begun and job.served is None:
            job.served = self.cache.served(run)
        return has_begun

    def _load(self, job: Job, run: Run) -> float:
        """Begin to load what a request hit below the GPU; return the seconds that this step waits for it."""
        testbed = self._testbed
        num_tokens = len(run.promised) * self.cache.block_size
        num_disk_tokens = run.tiers.count(Tier.DISK) * self.cache.block_size
        ready_s = self.now_s
        if num_disk_tokens:
            ready_s = self._disk_free_s = max(self._disk_free_s, ready_s) + testbed.read_s(num_disk_tokens)
        copy_s = testbed.transfer_s(num_tokens, 0)
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

    def _compute(self, job: Job, run: Run, num_tokens: int) -> float:
        """Compute tokens of a request, and return the seconds that they add to the step."""
        testbed, num_context = self._testbed, run.num_computed + run.num_answered
        if not run.num_left:
            self.cache.answer(run)
            return testbed.answer_s(num_context)
        seconds = testbed.chunk_s(run.num_computed, num_tokens)
        job.prefill_s += seconds
        self.cache.compute(run, num_tokens)
        if not run.num_left:
            self._num_to_store += len(run.stored) * self.cache.block_size
            for _ in range(run.num_again):  # it was preempted: what it had answered is computed again
                if self.cache.num_missing_blocks(run, 1) > 0:
                    break  # the rest of it token by token
                self.cache.answer(run)
                seconds += testbed.answer_s(num_context)
        return seconds

    def _end_step(self, computed: list[Job]) -> list[Job]:
        done = []
        for job in computed:
            run = self._runs[job]
            if job not in self.running or run.num_left:
                continue
            job.num_output_tokens = max(job.num_output_tokens, 1 + run.num_answered)
            if job.first_token_s is None:
                job.first_token_s = self.now_s + self._testbed.request_s
            if job.num_output_tokens >= job.request.output_tokens:
                job.done_s = self.now_s + self._testbed.request_s
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
