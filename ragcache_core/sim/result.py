"""What a run says: its options, a summary, and a record for each request if that is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ragcache_core.sim.options import SimulationOptions


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request: its time to first token, and ``gpu``, ``host``, ``disk``, ``chunk`` or ``miss`` for each document.

    Documents stand as in the trace, whatever order the prompt showed. A ``chunk`` is one that is read from a stored
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
    """The numbers of all requests that were counted.

    Attributes:
        document_hit_rate: share of the retrieved documents that lay in some tier, behind documents that did.
        token_hit_rate: the same, of their tokens.
        hits_by_tier, hit_tokens_by_tier: documents, and their tokens, by where they lay.
        throughput_rps: requests by the time from the first arrival to the last completion.
        reordered_share: of requests that showed their documents in another order than they were retrieved.
        max_overtaken: how often the request was overtaken that was overtaken most, of all requests.
        swapped_out_tokens: copied from GPU to host.
        loaded_tokens: copied from host or disk to the GPU.
        computed_tokens: of all prompts.
        prefill_s: seconds of their prefills, each as if alone on the engine.
        chunk_reused_tokens: read from stored chunks, behind other documents than those they were computed behind.
        chunk_recomputed_tokens: of the documents that were reused so, computed all the same.
        p50_decision_s, p99_decision_s: real time to choose a replica, look up, count, order, evict and place, for a
            request.
        mean_response_s: from a request's arrival to its last token.
        shared_hit_tokens: of documents, read from a tier that replicas share; they are in no other figure of hits.
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
    shared_hit_tokens: int
    busiest_over_mean: float
    mean_response_s: float

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        data: dict[str, object] = {name: getattr(self, name) for name in Summary.__slots__}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}


@dataclass(frozen=True, slots=True)
class ReplicaSummary:
    """The requests of one replica that were counted.

    Attributes:
        token_hit_rate: of its own tiers. ``shared_hit_rate``: of the tier that it shares with others.
        busy_share: of the time from the first counted arrival to the last answer of any replica.
    """

    num_requests: int
    token_hit_rate: float
    shared_hit_rate: float
    mean_ttft_s: float
    p95_ttft_s: float
    busy_share: float

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """A run. ``notes`` say what its reader should know, a sentence each; ``replicas`` are those of a fleet."""

    options: SimulationOptions
    summary: Summary
    notes: tuple[str, ...] = ()
    requests: tuple[RequestRecord, ...] | None = None
    replicas: tuple[ReplicaSummary, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data; ``requests`` only where they were kept."""
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
