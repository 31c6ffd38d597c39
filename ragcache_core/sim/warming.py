"""Choose the documents to prefill in advance, after which prefix, and forecast the gain."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate

from ragcache_core.errors import ConfigError
from ragcache_core.policy import PrefillCost, make_policy
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.types import DocId
from ragcache_core.wire import MAX_EXPECTED_USES

NUM_FIRST = 500
"""Requests after a start whose TTFT is forecast."""
LEAST_REQUESTS = 20
"""A forecast needs as many: each half of fewer has less than ten."""


@dataclass(frozen=True, slots=True)
class WarmPath:
    """Documents in prompt order; those before the last are a prefix of their own.

    Attributes:
        doc_ids: from the first of a prompt on.
        doc_tokens: of each.
        expected_uses: how many of the next ``MAX_EXPECTED_USES`` requests begin with them.
    """

    doc_ids: tuple[DocId, ...]
    doc_tokens: tuple[int, ...]
    expected_uses: int

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {"doc_ids": list(self.doc_ids), "num_tokens": self.doc_tokens[-1], "expected_uses": self.expected_uses}


@dataclass(slots=True)
class _CountedPath:
    """A prefix's number of retrievals, and its documents' last lengths."""

    num_uses: int = 0
    doc_tokens: tuple[int, ...] = ()


def pick_paths(
    trace: Trace, budget_tokens: int, cost: PrefillCost, *, system_tokens: int = 0, anywhere: bool = False
) -> list[WarmPath]:
    """Return the prefixes that save the most prefill time for requests like ``trace``; each after its own prefixes.

    A path is worth its uses times the seconds that its last document takes after the others, and costs that document's
    tokens. Of those whose beginning is picked, the one worth most per token is next; what does not fit is passed over,
    with all after it.

    Args:
        trace: requests, their documents in the order in which prompts show them.
        budget_tokens: of KV that may be warmed, in all.
        cost: of a prefill.
        system_tokens: of the prompt, before its documents, which are warmed with the first.
        anywhere: each document is a path by itself, as an engine with chunk reuse has it.
    """
    counted: dict[tuple[DocId, ...], _CountedPath] = {}
    for request in trace:
        for doc_ids, doc_tokens in _paths(request, anywhere=anywhere):
            path = counted.setdefault(doc_ids, _CountedPath())
            path.num_uses += 1
            path.doc_tokens = doc_tokens
    children: dict[tuple[DocId, ...], list[tuple[DocId, ...]]] = {}
    for doc_ids in counted:
        children.setdefault(doc_ids[:-1], []).append(doc_ids)
    charge = make_policy("mixture").cost_per_token_s  # what a hit saves

    def worth(doc_ids: tuple[DocId, ...]) -> float:
        *before, own = counted[doc_ids].doc_tokens
        return counted[doc_ids].num_uses * charge(cost, system_tokens + sum(before), own)

    picked: list[WarmPath] = []
    left = budget_tokens - system_tokens
    waiting = [(-worth(doc_ids), doc_ids) for doc_ids in children.get((), ())]
    heapq.heapify(waiting)
    while waiting:
        _, doc_ids = heapq.heappop(waiting)
        path = counted[doc_ids]
        if path.doc_tokens[-1] > left:
            continue
        left -= path.doc_tokens[-1]
        expected_uses = round(path.num_uses * MAX_EXPECTED_USES / len(trace))
        picked.append(WarmPath(doc_ids, path.doc_tokens, min(max(expected_uses, 1), MAX_EXPECTED_USES)))
        for child in children.get(doc_ids, ()):
            heapq.heappush(waiting, (-worth(child), child))
    return picked


def _paths(request: TracedRequest, *, anywhere: bool) -> Iterator[tuple[tuple[DocId, ...], tuple[int, ...]]]:
    if anywhere:
        yield from {(i,): (n,) for i, n in zip(request.doc_ids, request.doc_tokens, strict=True)}.items()
        return
    for end in range(1, len(request.doc_ids) + 1):
        yield request.doc_ids[:end], request.doc_tokens[:end]


@dataclass(frozen=True, slots=True)
class StartForecast:
    """Statistics of the first requests after a start; ``cached_share`` is that of prompt tokens."""

    mean_ttft_s: float
    cached_share: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """The first ``num_requests`` of a trace on an empty engine, and on one that is warmed with ``num_tokens``."""

    num_requests: int
    num_tokens: int
    cold: StartForecast
    warm: StartForecast

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return asdict(self)


def forecast_later(
    trace: Trace,
    options: SimulationOptions,
    pick: Callable[[Trace], Sequence[WarmPath]],
    *,
    num_parts: int = 1,
    progress: Callable[[int], object] | None = None,
) -> list[Forecast]:
    """Return the effect on the second half of ``trace`` of the paths that are picked from the first half.

    Paths fit the requests that they were picked from better than any later ones, so no request counts for both.

    Args:
        trace: requests as they are expected.
        options: as for :func:`forecast`.
        pick: returns the paths for requests like those of a trace, the best first.
        num_parts: how many forecasts, each for half of the tokens of the next; the last is for all paths.
        progress: as for :func:`forecast`, for ``num_parts`` of them.

    Returns:
        One for each part, the smallest first; none for a trace of less than ``LEAST_REQUESTS``.

    Raises:
        ConfigError: as for :func:`forecast`.
    """
    if len(trace) < LEAST_REQUESTS:
        return []
    requests = list(trace)[(half := len(trace) // 2) :]
    since_s = requests[0].arrival_s
    later = Trace.from_requests(replace(request, arrival_s=request.arrival_s - since_s) for request in requests)
    paths = pick(trace.head(half))
    ends = list(accumulate((path.doc_tokens[-1] for path in paths), initial=options.system_tokens))[1:]
    forecasts = []
    for halvings in reversed(range(num_parts)):
        num_paths = bisect_right(ends, ends[-1] >> halvings) if ends else 0
        forecasts.append(forecast(later, options, paths[:num_paths], progress=progress))
    return forecasts


def forecast(
    trace: Trace,
    options: SimulationOptions,
    paths: Sequence[WarmPath],
    *,
    progress: Callable[[int], object] | None = None,
) -> Forecast:
    """Return the effect of warming ``paths`` on the first requests of ``trace``, by simulation.

    Requests and paths that are too long for the GPU are left out, as the engine leaves them out.

    Args:
        trace: requests as they are expected.
        options: of the engine, whose ``warm_up`` is 0.
        paths: to be warmed.
        progress: receives the number of requests that are done since its last call, of twice as many as are forecast.

    Raises:
        ConfigError: the options do not fit the trace, or no request fits the GPU.
    """
    most = options.longest_prompt_tokens - options.system_tokens
    first = Trace.from_requests(
        request for _, request in zip(range(NUM_FIRST), trace, strict=False) if _num_tokens(request) <= most
    )
    if not len(first):
        raise ConfigError(f"gpu_tokens is {options.gpu_tokens:,}, less than any of the expected prompts: raise it")
    prompts = [(TracedRequest(0.0, path.doc_ids, path.doc_tokens, 0, 1), path.expected_uses) for path in paths]
    warmed = [(prompt, expected_uses) for prompt, expected_uses in prompts if _num_tokens(prompt) <= most]
    num_tokens = int((first.document_tokens() + first.question_tokens + options.system_tokens).sum())

    def start(prompts: Sequence[tuple[TracedRequest, int]]) -> StartForecast:
        result = simulate(first, options, progress=progress, keeps_requests=True, warmed=prompts)
        num_cached = sum(record.cached_tokens for record in result.requests or ())
        num_cached += result.summary.chunk_reused_tokens
        return StartForecast(result.summary.mean_ttft_s, num_cached / max(num_tokens, 1))

    num_warmed = sum(path.doc_tokens[-1] for path in paths) + (options.system_tokens if paths else 0)
    return Forecast(len(first), num_warmed, start([]), start(warmed))


def _num_tokens(request: TracedRequest) -> int:
    return sum(request.doc_tokens) + request.question_tokens + request.output_tokens - 1
