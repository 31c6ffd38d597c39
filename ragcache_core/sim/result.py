"""The result of a simulation: its options, a summary, and a record for each request on demand."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from ragcache_core.sim.engine import Job
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.traces.trace import Trace
from ragcache_core.types import Tier

_MISS = "miss"
_CHUNK = "chunk"
_LABELS: dict[Tier | None, str] = {None: _MISS, **{tier: tier.label for tier in Tier}}

_FEWEST_FOR_A_RATE = 100
_SERVED_SHARE = 0.8
"""Of that many requests or more, a smaller share that is served while they arrive is called an overload."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request: its time to first token, and ``gpu``, ``host``, ``disk``, ``chunk`` or ``miss`` for each document.

    Documents are in the trace's order, whatever order the prompt showed. A ``chunk`` is one that is read from a stored
    chunk, but for what is computed again; ``cached_tokens`` are those of exact prefixes alone. ``prefill_s`` is what
    its prefill takes, alone on the engine.
    """

    ttft_s: float
    documents: tuple[str, ...]
    cached_tokens: int
    prefill_s: float

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {**asdict(self), "documents": list(self.documents)}


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of all counted requests.

    Attributes:
        document_hit_rate: share of the retrieved documents that were in some tier, with all documents before them.
        token_hit_rate: the same, of their tokens.
        hits_by_tier, hit_tokens_by_tier: documents, and their tokens, by where they lay.
        throughput_rps: requests by the time from the first arrival to the last completion.
        reordered_share: of requests that showed their documents in another order than they were retrieved.
        max_overtaken: how often the request was overtaken that was overtaken most, of all requests.
        swapped_out_tokens: copied from GPU to host.
        loaded_tokens: copied from host or disk to the GPU.
        computed_tokens: of all prompts.
        prefill_s: seconds of their prefills, each as if alone on the engine.
        chunk_reused_tokens: read from stored chunks, at another position than they were computed at.
        chunk_recomputed_tokens: of the documents that were reused so, computed all the same.
        p50_decision_s, p99_decision_s: real time to choose a replica, look up, count, order, evict and place, for a
            request.
        mean_response_s: from a request's arrival to its last token.
        busiest_over_mean: seconds that the busiest replica computed, over the mean of all; 1 where there is one.
    """

    num_requests: int
    document_hit_rate: float
    token_hit_rate: float
    hits_by_tier: Mapping[str, int]
    hit_tokens_by_tier: Mapping[str, int]
    mean_ttft_s: float
    p50_ttft_s: float
    p99_ttft_s: float
    throughput_rps: float
    reordered_share: float
    max_overtaken: int
    swapped_out_tokens: int
    loaded_tokens: int
    computed_tokens: int
    prefill_s: float
    chunk_reused_tokens: int
    chunk_recomputed_tokens: int
    p50_decision_s: float
    p99_decision_s: float
    p95_ttft_s: float
    busiest_over_mean: float
    mean_response_s: float

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        data: dict[str, object] = {name: getattr(self, name) for name in Summary.__slots__}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}


@dataclass(frozen=True, slots=True)
class ReplicaSummary:
    """Statistics of one replica's counted requests.

    Attributes:
        token_hit_rate: of its own tiers.
        busy_share: of the time from the first counted arrival to the last answer of any replica.
    """

    num_requests: int
    token_hit_rate: float
    mean_ttft_s: float
    p95_ttft_s: float
    busy_share: float

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a run. ``notes`` are remarks for the reader; ``replicas`` are those of a fleet."""

    options: SimulationOptions
    summary: Summary
    notes: tuple[str, ...] = ()
    requests: tuple[RequestRecord, ...] | None = None
    replicas: tuple[ReplicaSummary, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data; ``requests`` only if they were kept."""
        data: dict[str, object] = {
            "options": self.options.to_dict(),
            "summary": self.summary.to_dict(),
            "notes": list(self.notes),
        }
        if self.replicas:
            data["replicas"] = [replica.to_dict() for replica in self.replicas]
        if self.requests is not None:
            data["requests"] = [record.to_dict() for record in self.requests]
        return data


class Recorder:
    """Records finished requests; those of the warm-up are not counted.

    Attributes:
        max_overtaken: of the queue, once the run is over.
    """

    def __init__(self, trace: Trace, options: SimulationOptions, *, keeps_requests: bool) -> None:
        self.max_overtaken = 0
        self._options = options
        self._arrival_s = trace.arrival_s.tolist()
        self._ttft_s, self._decision_ns = array("d"), array("q")
        self._num_documents = self._num_document_tokens = 0
        self._hits = [0] * len(Tier)
        self._hit_tokens = [0] * len(Tier)
        self._num_reordered = self._swapped_out_tokens = self._loaded_tokens = 0
        self._computed_tokens = self._chunk_reused_tokens = self._chunk_recomputed_tokens = 0
        self._prefill_s = self._response_s = 0.0
        self._last_s = -math.inf
        self._records: list[RequestRecord | None] | None = [None] * len(trace) if keeps_requests else None

    def add(self, job: Job) -> None:
        """Record a finished request."""
        served = job.served
        assert served is not None
        assert job.first_token_s is not None
        assert job.ready_s is not None
        assert job.done_s is not None
        ttft_s = max(job.first_token_s, job.ready_s) - self._arrival_s[job.number]
        if self._records is not None:
            documents = [_MISS] * len(job.order)
            for place, (index, tier) in enumerate(zip(job.order, served.tiers, strict=True)):
                documents[index] = _CHUNK if tier is None and place in served.reuse.documents else _LABELS[tier]
            self._records[job.number] = RequestRecord(ttft_s, tuple(documents), served.num_cached_tokens, job.prefill_s)
        if job.number < self._options.warm_up:
            return
        self._ttft_s.append(ttft_s)
        self._response_s += max(job.done_s, job.ready_s) - self._arrival_s[job.number]
        self._decision_ns.append(job.decision_ns)
        self._num_documents += len(served.tiers)
        self._num_document_tokens += sum(job.request.doc_tokens) + job.request.history_tokens
        for tier in served.tiers:
            if tier is not None:
                self._hits[tier] += 1
        num_system_tokens = self._options.system_tokens
        for i, num_tokens in enumerate(served.num_cached_tokens_by_tier):
            self._hit_tokens[i] += max(num_tokens - num_system_tokens, 0)
            num_system_tokens = max(num_system_tokens - num_tokens, 0)
        self._num_reordered += any(i != index for i, index in enumerate(job.order))
        self._swapped_out_tokens += served.num_swapped_out_tokens
        self._loaded_tokens += served.num_loaded_tokens
        self._computed_tokens += served.num_new_tokens
        self._prefill_s += job.prefill_s
        self._chunk_reused_tokens += served.reuse.num_tokens
        self._chunk_recomputed_tokens += served.reuse.num_recomputed_tokens
        self._last_s = max(self._last_s, job.done_s)

    def of_replica(self, busy_s: float, seconds: float) -> ReplicaSummary:
        """Return the summary of a replica, from its own requests and its busy time (``busy_s`` of ``seconds``)."""
        ttft_s, num_tokens = np.frombuffer(self._ttft_s), max(self._num_document_tokens, 1)
        return ReplicaSummary(
            num_requests=len(ttft_s),
            token_hit_rate=sum(self._hit_tokens) / num_tokens,
            mean_ttft_s=float(ttft_s.mean()) if len(ttft_s) else 0.0,
            p95_ttft_s=float(np.percentile(ttft_s, 95)) if len(ttft_s) else 0.0,
            busy_share=busy_s / seconds if seconds > 0.0 else 0.0,
        )

    @property
    def counted_s(self) -> float:
        """Seconds from the first counted arrival to the last answer."""
        return max(self._last_s - float(self._arrival_s[self._options.warm_up]), 0.0)

    def result(self, notes: tuple[str, ...], replicas: tuple[ReplicaSummary, ...] = ()) -> SimulationResult:
        """Return the result, after all requests have finished."""
        num_requests = len(self._ttft_s)
        ttft_s = np.frombuffer(self._ttft_s)
        decision_s = np.frombuffer(self._decision_ns, np.int64) / 1e9
        seconds = self.counted_s
        shares = [replica.busy_share for replica in replicas]
        summary = Summary(
            num_requests=num_requests,
            document_hit_rate=sum(self._hits) / max(self._num_documents, 1),
            token_hit_rate=sum(self._hit_tokens) / max(self._num_document_tokens, 1),
            hits_by_tier={tier.label: self._hits[tier] for tier in Tier},
            hit_tokens_by_tier={tier.label: self._hit_tokens[tier] for tier in Tier},
            mean_ttft_s=float(ttft_s.mean()),
            p50_ttft_s=float(np.percentile(ttft_s, 50)),
            p99_ttft_s=float(np.percentile(ttft_s, 99)),
            throughput_rps=num_requests / seconds if seconds > 0.0 else 0.0,
            reordered_share=self._num_reordered / num_requests,
            max_overtaken=self.max_overtaken,
            swapped_out_tokens=self._swapped_out_tokens,
            loaded_tokens=self._loaded_tokens,
            computed_tokens=self._computed_tokens,
            prefill_s=self._prefill_s,
            chunk_reused_tokens=self._chunk_reused_tokens,
            chunk_recomputed_tokens=self._chunk_recomputed_tokens,
            p50_decision_s=float(np.percentile(decision_s, 50)),
            p99_decision_s=float(np.percentile(decision_s, 99)),
            p95_ttft_s=float(np.percentile(ttft_s, 95)),
            busiest_over_mean=max(shares) * len(shares) / sum(shares) if sum(shares) else 1.0,
            mean_response_s=self._response_s / num_requests,
        )
        records = None if self._records is None else tuple(r for r in self._records if r is not None)
        return SimulationResult(self._options, summary, (*notes, *self._overload(summary)), records, replicas)

    def _overload(self, summary: Summary) -> Iterator[str]:
        """Return a note if requests arrive faster than they can be served."""
        first_s, last_s = self._arrival_s[self._options.warm_up], self._arrival_s[-1]
        arriving_rps = (summary.num_requests - 1) / (last_s - first_s) if last_s > first_s else 0.0
        if summary.num_requests >= _FEWEST_FOR_A_RATE and summary.throughput_rps < _SERVED_SHARE * arriving_rps:
            yield (
                f"{arriving_rps:.2f} requests a second arrive and {summary.throughput_rps:.2f} are served: the queue "
                "only grows, and TTFT says little of the cache; raise max-batch, or lower the trace's rate"
            )
