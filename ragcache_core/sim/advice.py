"""Advice for one's own traffic: the effect of changes to an engine, and the most expensive documents, by simulation.

Every change is a run of :func:`~ragcache_core.sim.simulator.simulate` over the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from ragcache_core.errors import ConfigError
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.result import SimulationResult
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.types import DocId

CHUNK_REUSE = 0.3
"""The fraction of a reused chunk that is recomputed, Cache-Craft's own setting (section 5)."""
_DISK_FOR_HOST = 8  # the disk that is tried where there is none, in sizes of host memory


@dataclass(frozen=True, slots=True)
class ConfigVariant:
    """One difference from the engine as it is now.

    Attributes:
        name: as it is shown.
        options: of the engines.
        num_fewer: documents that each prompt has less, as long as one is left.
        caveat: what the numbers do not say.
    """

    name: str
    options: SimulationOptions
    num_fewer: int = 0
    caveat: str = ""


@dataclass(frozen=True, slots=True)
class AdviceOutcome:
    """The result of a change.

    Attributes:
        mean_ttft_s, p99_ttft_s: seconds from a request's arrival to its first token, its search included.
        token_hit_rate: share of the documents' tokens that lay in some tier.
        prefill_s: GPU seconds in which the prompts of 1,000 requests are computed.
        saved: money that this saves on a million requests, at a price of an hour; None without a price.
    """

    change: ConfigVariant
    mean_ttft_s: float
    p99_ttft_s: float
    token_hit_rate: float
    prefill_s: float
    saved: float | None = None

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data; ``options`` are what ``ragcache simulate`` takes."""
        data = asdict(self)
        del data["change"]
        change = {**asdict(self.change), "options": self.change.options.to_dict()}
        return {**change, **data}


@dataclass(frozen=True, slots=True)
class DocumentCost:
    """A document, how often it was retrieved and how often computed, and the GPU seconds which that took."""

    doc_id: DocId
    num_tokens: int
    num_uses: int
    num_misses: int
    prefill_s: float

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Advice:
    """The engine as it is ``now``, the changes to it, and the documents that cost most now, most expensive first."""

    now: AdviceOutcome
    outcomes: tuple[AdviceOutcome, ...]
    documents: tuple[DocumentCost, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {
            "now": self.now.to_dict(),
            "changes": [outcome.to_dict() for outcome in self.outcomes],
            "documents": [document.to_dict() for document in self.documents],
            "notes": list(self.notes),
        }


def changes(now: SimulationOptions, trace: Trace) -> Iterator[ConfigVariant]:
    """Yield the changes to try on an engine with the options ``now`` that serves ``trace``."""
    if now.host_tokens:
        yield ConfigVariant("GPU memory alone", replace(now, host_tokens=0, disk_tokens=0, chunk_reuse=None))
        for times in (2, 4):
            yield ConfigVariant(f"host memory x {times}", replace(now, host_tokens=times * now.host_tokens))
        disk_tokens = 2 * now.disk_tokens or _DISK_FOR_HOST * now.host_tokens
        name = "disk x 2" if now.disk_tokens else f"a disk of {_DISK_FOR_HOST} x host memory"
        yield ConfigVariant(name, replace(now, disk_tokens=disk_tokens))
    else:
        yield ConfigVariant("host memory as large as the GPU's", replace(now, host_tokens=now.gpu_tokens))
    if now.order != "cache_aware":
        yield ConfigVariant(
            "cache-aware document order", replace(now, order="cache_aware"), caveat="answers may change"
        )
    if now.queue != "cache-aware":
        yield ConfigVariant("cache-aware queue", replace(now, queue="cache-aware"))
    if now.speculation == "none":
        yield ConfigVariant("speculation during the search", replace(now, speculation="dynamic"))
    if now.chunk_reuse is None and now.host_tokens and not (trace.conversation >= 0).any():
        reused = replace(now, chunk_reuse=CHUNK_REUSE)
        yield ConfigVariant(f"chunk reuse, {CHUNK_REUSE:.0%} recomputed", reused, caveat="answers are approximate")
    yield ConfigVariant("a document less in each prompt", now, num_fewer=1, caveat="answers may change")
    if now.replicas == 1 and now.speculation == "none":
        yield ConfigVariant("a second engine", replace(now, replicas=2), caveat="twice the machines")


def advise(
    trace: Trace,
    now: SimulationOptions,
    *,
    price_per_hour: float | None = None,
    num_documents: int = 10,
    progress: Callable[[int], object] | None = None,
) -> Advice:
    """Return what ``trace`` costs on an engine with the options ``now``, and with each of :func:`changes`.

    Args:
        trace: requests, in the order of their arrival.
        now: the engine's options.
        price_per_hour: of an engine's GPUs, in any currency.
        num_documents: the most expensive ones that are named.
        progress: receives the number of requests that are done since its last call, of ``len(trace)`` for each run.

    Raises:
        ConfigError: the options do not fit the trace, or the price is negative.
    """
    if price_per_hour is not None and not 0.0 <= price_per_hour < float("inf"):
        raise ConfigError(f"the price of an hour is {price_per_hour:g}: give 0 or more")
    baseline = simulate(trace, now, progress=progress, keeps_requests=True)
    first = _outcome(ConfigVariant("now", now), baseline)
    outcomes = []
    for change in changes(now, trace):
        requests = _with_fewer_documents(trace, change.num_fewer) if change.num_fewer else trace
        outcome = _outcome(change, simulate(requests, change.options, progress=progress))
        if price_per_hour is not None:
            saved_s = first.prefill_s - outcome.prefill_s  # of 1,000 requests
            outcome = replace(outcome, saved=saved_s * 1000 / 3600 * price_per_hour)
        outcomes.append(outcome)
    return Advice(first, tuple(outcomes), tuple(_most_expensive(trace, baseline, num_documents)), baseline.notes)


def _with_fewer_documents(trace: Trace, num_fewer: int) -> Trace:
    def shortened(request: TracedRequest) -> TracedRequest:
        count = max(len(request.doc_ids) - num_fewer, min(len(request.doc_ids), 1))
        return replace(request, doc_ids=request.doc_ids[:count], doc_tokens=request.doc_tokens[:count])

    return Trace.from_requests(map(shortened, trace))


def _outcome(change: ConfigVariant, result: SimulationResult) -> AdviceOutcome:
    summary = result.summary
    return AdviceOutcome(
        change,
        mean_ttft_s=summary.mean_ttft_s,
        p99_ttft_s=summary.p99_ttft_s,
        token_hit_rate=summary.token_hit_rate,
        prefill_s=1000 * summary.prefill_s / summary.num_requests,
    )


def _most_expensive(trace: Trace, result: SimulationResult, num_documents: int) -> list[DocumentCost]:
    """Return the documents whose tokens took most seconds to compute: each its share of its prompts' prefills."""
    assert result.requests is not None
    costs: dict[DocId, DocumentCost] = {}
    for number, (request, record) in enumerate(zip(trace, result.requests, strict=True)):
        if number < result.options.warm_up:
            continue
        missed = [found == "miss" for found in record.documents]
        num_missed_tokens = sum(n for n, is_missed in zip(request.doc_tokens, missed, strict=True) if is_missed)
        per_token_s = record.prefill_s / max(num_missed_tokens + request.question_tokens, 1)
        for doc_id, num_tokens, is_missed in zip(request.doc_ids, request.doc_tokens, missed, strict=True):
            cost = costs.get(doc_id) or DocumentCost(doc_id, num_tokens, 0, 0, 0.0)
            costs[doc_id] = replace(
                cost,
                num_uses=cost.num_uses + 1,
                num_misses=cost.num_misses + is_missed,
                prefill_s=cost.prefill_s + is_missed * num_tokens * per_token_s,
            )
    return sorted(costs.values(), key=lambda cost: (-cost.prefill_s, cost.doc_id))[:num_documents]
