"""Simulated runs of a comparison beside the measured ones: ``python -m benchmarks.compare predict``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.simulated.laboratory import LabOptions
from benchmarks.simulated.steps import SteppedCache, StepSimulation
from ragcache_core.bench.comparison import NUM_IN_FLIGHT, Amounts
from ragcache_core.bench.engines import BASELINES, MAX_BATCHED_TOKENS, Baseline
from ragcache_core.bench.load import poisson_arrivals
from ragcache_core.bench.prompts import scaled
from ragcache_core.bench.report import LAUNCH
from ragcache_core.bench.results import Results, TimedRun
from ragcache_core.errors import ConfigError
from ragcache_core.reports.page import MIB, Table
from ragcache_core.sim.testbeds import Testbed
from ragcache_core.sim.traces.trace import TracedRequest, read_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

WITHIN = 0.15
_UNLIMITED_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class Prediction:
    """A measured run, and what the simulator predicts: mean TTFT in seconds, the share of cached prompt tokens."""

    run: TimedRun
    ttft_s: float
    cached_share: float

    @property
    def ratio(self) -> float:
        """The predicted mean TTFT over the measured one."""
        return self.ttft_s / fmean(self.run.ttft_s)

    @property
    def is_within(self) -> bool:
        """Whether the predicted mean TTFT is within 15 % of the measured one."""
        return abs(self.ratio - 1) <= WITHIN


def predict(results: Results, testbed: Testbed) -> Iterator[Prediction]:
    """Yield a prediction for each run of an engine that the simulator knows.

    An engine is simulated as it was measured: first the warm-up, then each rate at the arrival times of its requests,
    on a cache that keeps the KV of the earlier ones.

    Raises:
        ConfigError: the results are of a running server or of a search, or the trace has changed.
    """
    options = results.options
    if options["engine"] != LAUNCH or options.get("search"):
        raise ConfigError("only a comparison of launched engines without a search is predicted")
    amounts = Amounts(options["warm_up"], options["requests"])
    testbed = replace(testbed, tokens_per_gib=(1 << 30) // options["kv_bytes_per_token"])
    sessions: dict[tuple[str, int, int], list[TimedRun]] = {}
    for run in results.runs:
        if run.engine in BASELINES and BASELINES[run.engine].chunk_reuse is None:
            sessions.setdefault((run.engine, run.host_bytes, run.seed), []).append(run)
    for (name, host_bytes, seed), runs in sessions.items():
        requests = _requests(options, seed, len(results.rates_rps))
        yield from _session(BASELINES[name], host_bytes, runs, requests, amounts, options, testbed)


def table(predictions: Sequence[Prediction]) -> Table:
    """Return the predictions, a row for each run."""
    heads = ("engine", "host MiB", "requests/s", "seed", "TTFT ms", "predicted", "ratio", "cached", "predicted", "")
    rows = [
        [
            found.run.engine,
            f"{found.run.host_bytes / MIB:,.0f}" if found.run.host_bytes else "-",
            f"{found.run.requests_per_s:.3g}",
            str(found.run.seed),
            f"{fmean(found.run.ttft_s) * 1000:,.0f}",
            f"{found.ttft_s * 1000:,.0f}",
            f"{found.ratio:.2f}",
            f"{found.run.cached_share:.1%}",
            f"{found.cached_share:.1%}",
            "" if found.is_within else "off",
        ]
        for found in predictions
    ]
    num_within = sum(found.is_within for found in predictions)
    return Table(f"Simulated: mean TTFT within {WITHIN:.0%} in {num_within} of {len(predictions)} runs", heads, rows)


def _requests(options: Mapping[str, Any], seed: int, num_rates: int) -> list[TracedRequest]:
    count, path = options["warm_up"] + num_rates * options["requests"], options["trace"]
    if path is None:
        trace = make_trace(WORKLOADS[options["workload"]], count, seed)
    elif hashlib.sha256(Path(path).read_bytes()).hexdigest() != options["trace_sha256"]:
        raise ConfigError(f"{path} is not the trace that was measured")
    else:
        trace = read_trace(path).head(count)
    requests = list(scaled(trace, options["scale"]))
    if (num_outputs := options["output_tokens"]) is not None:
        requests = [replace(request, output_tokens=num_outputs) for request in requests]
    return [replace(request, question_tokens=max(request.question_tokens, 1)) for request in requests]


def _session(
    baseline: Baseline,
    host_bytes: int,
    runs: Iterable[TimedRun],
    requests: Sequence[TracedRequest],
    amounts: Amounts,
    options: Mapping[str, Any],
    testbed: Testbed,
) -> Iterator[Prediction]:
    settings = simulated(baseline, host_bytes, options)
    assert settings.max_batched_tokens is not None
    cache = SteppedCache(settings, testbed.cost, knows_documents=settings.knows_documents)
    engine = StepSimulation(cache, settings, testbed, settings.max_batched_tokens)
    if not baseline.has_cache:
        requests = [_with_documents_of_its_own(number, request) for number, request in enumerate(requests)]
    num_seen = 0
    for run in sorted(runs, key=lambda run: run.rate):
        before, timed = amounts.before(run.rate, baseline.has_cache)[num_seen:], amounts.timed(run.rate)
        engine.run_through(((number, requests[number]) for number in before), in_flight=NUM_IN_FLIGHT)
        arrivals = poisson_arrivals(len(timed), run.requests_per_s, seed=run.seed * 1_000 + run.rate)
        jobs = engine.replay(((number, requests[number]) for number in timed), arrivals)
        num_seen = timed.stop if baseline.has_cache else len(before)
        served = [job.served for job in jobs if job.served is not None]
        num_cached = sum(one.num_cached_tokens for one in served)
        yield Prediction(
            run,
            fmean(job.first_token_s - at_s for job, at_s in zip(jobs, arrivals, strict=True) if job.first_token_s),
            num_cached / (num_cached + sum(one.num_new_tokens for one in served)),
        )


def simulated(baseline: Baseline, host_bytes: int, options: Mapping[str, Any]) -> LabOptions:
    """Return the settings of an engine of a comparison.

    vLLM's own block pool and host tier are those of an LRU, or an ARC, over blocks that are no documents'.
    """
    bytes_per_token, disk_bytes = options["kv_bytes_per_token"], options["disk_memory_bytes"]
    has_disk = bool(disk_bytes) and baseline.uses_host
    disk_tokens = disk_bytes // bytes_per_token if baseline.is_ragcache else _UNLIMITED_TOKENS
    return LabOptions(
        policy="mixture" if baseline.is_ragcache else baseline.eviction or "lru",
        order=baseline.order,
        queue="cache-aware" if baseline.is_ragcache else "fifo",
        knows_documents=baseline.is_ragcache,
        gpu_tokens=options["kv_memory_bytes"] // bytes_per_token,
        host_tokens=host_bytes // bytes_per_token if baseline.uses_host else 0,
        disk_tokens=disk_tokens if has_disk else 0,
        granularity="block",
        block_size=options["block_size"],
        max_batch=options["max_num_seqs"],
        max_batched_tokens=max(options.get("max_num_batched_tokens", MAX_BATCHED_TOKENS), options["max_num_seqs"]),
        overlaps_transfers=False,
    )


def _with_documents_of_its_own(number: int, request: TracedRequest) -> TracedRequest:
    return replace(request, doc_ids=tuple(f"{number}/{doc_id}" for doc_id in request.doc_ids))
