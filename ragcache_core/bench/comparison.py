"""Engines side by side: each engine gets the same requests at the same times, one engine after the other.

An engine is opened for one seed and one size of host memory, and serves the rates in ascending order. Each rate has its
own requests after those of the warm-up. Requests before a rate that is not timed again, because an earlier run measured
it, are run through without a pause: the cache has seen the same requests as that of any other engine::

    requests of a seed   | warm-up | rate 1 | rate 2 | rate 3 |
    all rates              fast      timed    timed    timed
    rate 3 alone           fast      fast     fast     timed
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prometheus_client.parser import text_string_to_metric_families

from ragcache_core.bench.engines import Baseline, cpu_time_s
from ragcache_core.bench.load import Load, poisson_arrivals
from ragcache_core.bench.prompts import TracedPrompts
from ragcache_core.bench.results import Results, TimedRun
from ragcache_core.client import Engine, EngineClient
from ragcache_core.errors import ConfigError

NUM_IN_FLIGHT = 8
"""Concurrent requests where nothing is timed."""
_NUM_UNCACHED_WARM_UP = 8
_LAST_STEP_S = 3.0
_EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"

OpenEngine = Callable[[Baseline, int, Path], AbstractContextManager[Engine]]
"""Opens an engine. Arguments: its kind, the bytes of its host tier, a folder for its disk tier."""


@dataclass(frozen=True, slots=True)
class Session:
    """One engine to open, and the numbers of the rates to time. ``host_bytes`` is 0 without a host tier."""

    baseline: Baseline
    host_bytes: int
    seed: int
    rates: tuple[int, ...]

    def __str__(self) -> str:
        host = f", host {self.host_bytes / 2**20:,.0f} MiB" if self.host_bytes else ""
        return f"{self.baseline.name}{host}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Amounts:
    """The number of requests of the warm-up, and of each rate."""

    num_warm_up: int
    num_requests: int

    def timed(self, rate: int) -> range:
        """Return the numbers of the requests of a rate."""
        first = self.num_warm_up + rate * self.num_requests
        return range(first, first + self.num_requests)

    def before(self, rate: int, has_cache: bool) -> range:
        """Return the numbers of the requests before a rate; an engine without a cache needs a few only."""
        end = self.timed(rate).start
        return range(end if has_cache else min(end, _NUM_UNCACHED_WARM_UP))

    def count(self, session: Session) -> int:
        """Return the number of requests of a session."""
        if session.baseline.has_cache:
            return self.timed(session.rates[-1]).stop
        return len(self.before(session.rates[0], False)) + len(session.rates) * self.num_requests


@dataclass(frozen=True, slots=True)
class Comparison:
    """What to compare: engines, sizes of host memory, and rates in requests a second or as shares of a capacity."""

    baselines: tuple[Baseline, ...]
    host_bytes: tuple[int, ...]
    rates: tuple[float, ...]
    are_shares: bool
    seeds: tuple[int, ...]
    amounts: Amounts

    def __post_init__(self) -> None:
        for name, values in (("host memory", self.host_bytes), ("rates", self.rates)):
            if not values or list(values) != sorted(set(values)) or not all(0 < value < math.inf for value in values):
                shown = ", ".join(f"{value:g}" for value in values) or "(none)"
                raise ConfigError(f"{name} {shown}: give finite numbers above 0 in ascending order, each once")
        if len({each.name for each in self.baselines}) != len(self.baselines) or not self.baselines:
            raise ConfigError("name each engine to compare once")

    @property
    def num_trace_requests(self) -> int:
        """The least length of a seed's trace."""
        return self.amounts.num_warm_up + len(self.rates) * self.amounts.num_requests

    def sessions(self, done: set[tuple[str, int, int, int]]) -> Iterator[Session]:
        """Yield the engines to open, without runs that are ``done``. Another engine is the first for each seed."""
        for number, seed in enumerate(self.seeds):
            turn = number % len(self.baselines)
            for baseline in (*self.baselines[turn:], *self.baselines[:turn]):
                for size in self.host_bytes if baseline.uses_host else (0,):
                    keys = ((baseline.name, size, seed, rate) for rate in range(len(self.rates)))
                    if rates := tuple(rate for *_, rate in (key for key in keys if key not in done)):
                        yield Session(baseline, size, seed, rates)


class Progress(Protocol):
    """Shows the progress of a comparison."""

    def plan(self, num_requests: int) -> None:
        """Set the number of requests."""

    def show(self, what: str) -> None:
        """Show the current step."""

    def advance(self) -> None:
        """Count one more answer."""


def run_comparison(
    comparison: Comparison,
    results: Results,
    prompts: Callable[[int], TracedPrompts],
    open_engine: OpenEngine,
    progress: Progress,
) -> None:
    """Measure the missing runs. An engine is closed at the end of its session, also after an error.

    Args:
        comparison: what to compare.
        results: the finished runs; each new one is added.
        prompts: returns the requests of a seed.
        open_engine: opens an engine.
        progress: is told of each step.

    Raises:
        EngineStartError, EngineDiedError, ...: an engine failed; ``results`` has the runs before.
    """
    sessions = list(comparison.sessions({run.key for run in results.runs}))
    progress.plan(sum(comparison.amounts.count(session) for session in sessions))
    if not results.rates_rps:
        results.set_rates(*_rates(comparison, prompts(comparison.seeds[0]), open_engine, progress))
    for number, session in enumerate(sessions, 1):
        where = f"{session}, {number} of {len(sessions)}"
        progress.show(f"{where}: starting")
        with (
            tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder,
            open_engine(session.baseline, session.host_bytes, Path(folder)) as engine,
        ):
            of_seed, amounts = prompts(session.seed), comparison.amounts
            for run in measure(engine, session, of_seed, results.rates_rps, amounts, progress):
                results.add(run)


def measure(
    engine: Engine,
    session: Session,
    prompts: TracedPrompts,
    rates_rps: tuple[float, ...],
    amounts: Amounts,
    progress: Progress,
) -> Iterator[TimedRun]:
    """Warm ``engine`` up, time the session's rates on it, and yield each run as soon as it is finished."""
    baseline = session.baseline
    sends_documents = baseline.is_ragcache
    load = Load(engine, prompts, order=baseline.order, sends_documents=sends_documents, on_answer=progress.advance)
    if baseline.order == "cache_aware":
        engine.arrange_documents([], baseline.order)  # starts the client-side cache index
    num_seen = 0
    for rate in session.rates:
        progress.show(f"{session}: warming up")
        load.run_through(amounts.before(rate, baseline.has_cache)[num_seen:], in_flight=NUM_IN_FLIGHT)
        progress.show(f"{session}: {rates_rps[rate]:.3g} requests/s")
        numbers = amounts.timed(rate)
        arrivals = poisson_arrivals(len(numbers), rates_rps[rate], seed=session.seed * 1_000 + rate)
        cpu_before_s, tiers_before, reused_before = cpu_time_s(engine.pid), _by_tier(engine), _reused_tokens(engine)
        began_s = time.perf_counter()
        answers = load.replay(numbers, arrivals)
        duration_s = time.perf_counter() - began_s - arrivals[0]
        cpu_after_s = cpu_time_s(engine.pid)
        num_cached = sum(answer.num_cached_tokens for answer in answers)
        served = _served_since(engine, tiers_before, num_cached)
        if baseline.chunk_reuse is not None:  # vLLM counts recomputed tokens of reused chunks as cached
            num_cached = min(num_cached, sum(served.values()) + _reused_tokens(engine) - reused_before)
        yield TimedRun(
            baseline.name,
            session.host_bytes,
            session.seed,
            rate,
            rates_rps[rate],
            round(duration_s, 6),
            tuple(round(answer.ttft_s, 6) for answer in answers),
            tuple(round(answer.tpot_s, 6) for answer in answers if answer.tpot_s is not None),
            sum(answer.num_prompt_tokens for answer in answers),
            num_cached,
            sum(answer.num_output_tokens for answer in answers),
            sum(answer.is_reordered for answer in answers),
            served,
            None if cpu_before_s is None or cpu_after_s is None else round(cpu_after_s - cpu_before_s, 3),
        )
        num_seen = numbers.stop if baseline.has_cache else len(amounts.before(rate, has_cache=False))


def _rates(
    comparison: Comparison, prompts: TracedPrompts, open_engine: OpenEngine, progress: Progress
) -> tuple[tuple[float, ...], float | None]:
    """Return the rates in requests a second, and the first engine's capacity where rates are shares of it."""
    if not comparison.are_shares:
        return comparison.rates, None
    first = comparison.baselines[0]
    progress.show(f"{first.name}: measuring its capacity")
    with (
        tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder,
        open_engine(first, comparison.host_bytes[0], Path(folder)) as engine,
    ):
        load = Load(engine, prompts, order=first.order, sends_documents=first.is_ragcache)
        load.run_through(range(NUM_IN_FLIGHT), in_flight=NUM_IN_FLIGHT)
        numbers = range(NUM_IN_FLIGHT, min(len(prompts), NUM_IN_FLIGHT + comparison.amounts.num_requests))
        began_s = time.perf_counter()
        load.run_through(numbers, in_flight=NUM_IN_FLIGHT)
        capacity_rps = len(numbers) / (time.perf_counter() - began_s)
    return tuple(round(share * capacity_rps, 4) for share in comparison.rates), round(capacity_rps, 4)


def read_counter(engine: EngineClient, name: str) -> float:
    """Return the sum of a counter or gauge of a server's Prometheus page."""
    url = f"{engine.base_url.removesuffix('/v1')}/metrics"
    page = engine.http_client().get(url).raise_for_status().text
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == name)


def _by_tier(engine: Engine) -> dict[str, int]:
    """Return the prompt tokens that each tier has served so far; vLLM's own offloading counts as ``host``."""
    stats = engine.stats()
    if stats.policy is not None:
        return {tier.name: tier.num_hit_tokens for tier in stats.tiers}
    return {"gpu": stats.num_prefix_hit_tokens, "host": int(read_counter(engine, _EXTERNAL_HITS))}


def _reused_tokens(engine: Engine) -> int:
    """Return the prompt tokens that chunk reuse has served so far."""
    chunks = engine.stats().chunks
    return 0 if chunks is None else chunks.num_reused_tokens + chunks.num_prefix_tokens


def _served_since(engine: Engine, before: Mapping[str, int], num_cached: int) -> dict[str, int]:
    """Return the tokens that the tiers served since ``before``; the engine reports its last step with a delay."""
    until_s = time.monotonic() + _LAST_STEP_S
    while True:
        served = {tier: count - before.get(tier, 0) for tier, count in _by_tier(engine).items()}
        if sum(served.values()) >= num_cached or time.monotonic() > until_s:
            return served
        time.sleep(0.05)
