"""What the simulator says of a comparison: its requests on its engines in virtual time, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.simulated.laboratory import LabOptions
from benchmarks.simulated.steps import SteppedCache, StepSimulation
from ragcache_core.bench.compare.load_generator import poisson_arrivals
from ragcache_core.bench.compare.options import traced
from ragcache_core.bench.compare.peers import MAX_BATCHED_TOKENS, PEERS, Peer
from ragcache_core.bench.compare.report import LAUNCH
from ragcache_core.bench.compare.results import Results
from ragcache_core.bench.compare.sessions import NUM_IN_FLIGHT, Amounts, Run
from ragcache_core.bench.page import MIB, Table
from ragcache_core.errors import ConfigError
from ragcache_core.sim.testbeds import Testbed
from ragcache_core.sim.traces.trace import TracedRequest

WITHIN = 0.15
_UNLIMITED_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class Prediction:
    """One engine at one rate with one seed: mean TTFT in seconds and the share of prompt tokens that were cached."""

    peer: str
    host_bytes: int
    seed: int
    rate: int
    requests_per_s: float
    measured_ttft_s: float
    predicted_ttft_s: float
    measured_cached_share: float
    predicted_cached_share: float

    @property
    def ratio(self) -> float:
        """The predicted mean TTFT over the measured one."""
        return self.predicted_ttft_s / self.measured_ttft_s

    @property
    def is_within(self) -> bool:
        """Whether the predicted mean TTFT is as near to the measured one as is asked for."""
        return abs(self.ratio - 1) <= WITHIN

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {**asdict(self), "ratio": round(self.ratio, 4)}


def predict(
    results: Results, testbed: Testbed, *, on_run: Callable[[], object] = lambda: None
) -> tuple[list[Prediction], list[str]]:
    """Return what a simulation says of each run, and why of some engines it says nothing.

    An engine is simulated as it was measured: its warm-up first, always as many requests at a time, then each rate at
    the moments of its arrivals, on a cache that keeps what came before.

    Raises:
        ConfigError: the requests are those of a search, of a server that ran already, or of a trace that has changed.
    """
    options = results.options
    if options["engine"] != LAUNCH:
        raise ConfigError("a server that ran already does not say what memory it had: predict a comparison of launches")
    if options.get("search"):
        raise ConfigError("which documents a search found is not in its results: predict a comparison without --search")
    amounts = Amounts(options["warm_up"], options["requests"])
    testbed = replace(testbed, tokens_per_gib=(1 << 30) // options["kv_bytes_per_token"])
    sessions: dict[tuple[str, int, int], list[Run]] = {}
    for run in results.runs:
        sessions.setdefault((run.peer, run.host_bytes, run.seed), []).append(run)
    unknown = sorted({name for name, _, _ in sessions if not _is_known(name)})
    requests = _requests(options, {seed for _, _, seed in sessions}, len(results.rates_rps))
    predictions = []
    for (name, host_bytes, seed), runs in sessions.items():
        if name in unknown:
            continue
        for prediction in _session(PEERS[name], host_bytes, runs, requests[seed], amounts, options, testbed):
            predictions.append(prediction)
            on_run()
    return predictions, [f"{name} is not simulated with requests that overlap" for name in unknown]


def table(predictions: Sequence[Prediction]) -> Table:
    """Return the predictions, a row for each run."""
    heads = ("engine", "host MiB", "requests/s", "seed", "TTFT ms", "predicted", "ratio", "cached", "predicted", "")
    rows = [
        [
            found.peer,
            f"{found.host_bytes / MIB:,.0f}" if found.host_bytes else "-",
            f"{found.requests_per_s:.3g}",
            str(found.seed),
            f"{found.measured_ttft_s * 1000:,.0f}",
            f"{found.predicted_ttft_s * 1000:,.0f}",
            f"{found.ratio:.2f}",
            f"{found.measured_cached_share:.1%}",
            f"{found.predicted_cached_share:.1%}",
            "" if found.is_within else "off",
        ]
        for found in predictions
    ]
    num_within = sum(found.is_within for found in predictions)
    return Table(f"Simulated: mean TTFT within {WITHIN:.0%} in {num_within} of {len(predictions)} runs", heads, rows)


def _is_known(name: str) -> bool:
    return name in PEERS and PEERS[name].chunk_reuse is None and not PEERS[name].is_lmcache


def _requests(options: Mapping[str, Any], seeds: Iterable[int], num_rates: int) -> dict[int, list[TracedRequest]]:
    count = options["warm_up"] + num_rates * options["requests"]
    num_outputs = options["output_tokens"]
    found = {}
    for seed in seeds:
        requests = list(
            traced(options["workload"], options["trace"], options["trace_sha256"], count, seed, options["scale"])
        )
        if num_outputs is not None:
            requests = [replace(request, output_tokens=num_outputs) for request in requests]
        found[seed] = [replace(request, question_tokens=max(request.question_tokens, 1)) for request in requests]
    return found


def _session(
    peer: Peer,
    host_bytes: int,
    runs: Iterable[Run],
    requests: Sequence[TracedRequest],
    amounts: Amounts,
    options: Mapping[str, Any],
    testbed: Testbed,
) -> Iterator[Prediction]:
    settings = simulated(peer, host_bytes, options)
    assert settings.max_batched_tokens is not None
    cache = SteppedCache(settings, testbed.cost, knows_documents=settings.knows_documents)
    engine = StepSimulation(cache, settings, testbed, settings.max_batched_tokens)
    if not peer.keeps_anything:
        requests = [_with_documents_of_its_own(number, request) for number, request in enumerate(requests)]
    num_seen = 0
    for run in sorted(runs, key=lambda run: run.rate):
        before, timed = amounts.before(run.rate, peer.keeps_anything)[num_seen:], amounts.timed(run.rate)
        engine.run_through(((number, requests[number]) for number in before), in_flight=NUM_IN_FLIGHT)
        arrivals = poisson_arrivals(len(timed), run.requests_per_s, seed=run.seed * 1_000 + run.rate)
        jobs = engine.replay(((number, requests[number]) for number in timed), arrivals)
        num_seen = timed.stop if peer.keeps_anything else len(before)
        served = [job.served for job in jobs if job.served is not None]
        num_cached = sum(one.num_cached_tokens for one in served)
        yield Prediction(
            run.peer,
            run.host_bytes,
            run.seed,
            run.rate,
            run.requests_per_s,
            fmean(run.ttft_s),
            fmean(job.first_token_s - at_s for job, at_s in zip(jobs, arrivals, strict=True) if job.first_token_s),
            run.cached_share,
            num_cached / (num_cached + sum(one.num_new_tokens for one in served)),
        )


def simulated(peer: Peer, host_bytes: int, options: Mapping[str, Any]) -> LabOptions:
    """Return the settings of an engine of a comparison.

    vLLM's own block pool and host tier are those of an LRU, or an ARC, over blocks that are no documents'.
    """
    bytes_per_token, disk_bytes = options["kv_bytes_per_token"], options["disk_memory_bytes"]
    has_disk = bool(disk_bytes) and peer.uses_host
    disk_tokens = disk_bytes // bytes_per_token if peer.is_ragcache else _UNLIMITED_TOKENS
    return LabOptions(
        policy="tournament" if peer.is_ragcache else peer.eviction or "lru",
        order=peer.order,
        queue="cache-aware" if peer.is_ragcache else "fifo",
        knows_documents=peer.is_ragcache,
        gpu_tokens=options["kv_memory_bytes"] // bytes_per_token,
        host_tokens=host_bytes // bytes_per_token if peer.uses_host else 0,
        disk_tokens=disk_tokens if has_disk else 0,
        granularity="block",
        block_size=options["block_size"],
        max_batch=options["max_num_seqs"],
        max_batched_tokens=max(options.get("max_num_batched_tokens", MAX_BATCHED_TOKENS), options["max_num_seqs"]),
        overlaps_transfers=False,
    )


def _with_documents_of_its_own(number: int, request: TracedRequest) -> TracedRequest:
    return replace(request, doc_ids=tuple(f"{number}/{doc_id}" for doc_id in request.doc_ids))
