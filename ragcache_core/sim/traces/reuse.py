"""Statistics of a trace: sizes, and how documents recur in time, position and combination."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from ragcache_core.errors import ConfigError
from ragcache_core.sim.traces.trace import Trace

TOP_SHARE = 0.03
TOP_SHARES = (0.01, 0.03, 0.05, 0.1, 0.2, 0.5)
WITHIN_S = (10.0, 60.0, 600.0, 3_600.0, 86_400.0)
QUANTILES = (0.1, 0.5, 0.9, 0.99)
KNOWN_SHARES = (0.01, 0.25, 0.5, 0.75, 1.0)
_POSITIONS = 8


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Counts and means of a trace; document tokens are averaged over retrievals.

    ``top_share`` is what part of all retrievals are of the most popular 3 % of the documents that are retrieved at
    all. ``repeated_retrievals`` is how many are of a document that an earlier request retrieved, and
    ``repeated_prefix`` how many are so after the same documents in the same order: the most that an endless cache of
    prefixes hits. ``history_share`` is the share of all prompts that earlier turns showed.
    """

    num_requests: int
    duration_s: float
    requests_per_s: float
    num_documents: int
    num_retrievals: int
    documents_per_request: float
    mean_document_tokens: float
    median_prompt_tokens: float
    mean_prompt_tokens: float
    max_prompt_tokens: int
    mean_question_tokens: float
    mean_output_tokens: float
    top_share: float
    repeated_retrievals: float
    repeated_prefix: float
    num_conversations: int
    turns_per_conversation: float
    median_think_s: float
    history_share: float


def summarize(trace: Trace) -> TraceSummary:
    """Return the statistics of ``trace``.

    Raises:
        ConfigError: it is empty.
    """
    if not len(trace):
        raise ConfigError("the trace has no requests: there is nothing to say of it")
    num_retrievals = len(trace.docs)
    prompts = trace.document_tokens() + trace.question_tokens + trace.history_tokens
    turns = np.flatnonzero(trace.conversation >= 0)
    turns = turns[np.argsort(trace.conversation[turns], kind="stable")]
    num_conversations = len(np.unique(trace.conversation[turns]))
    think_s = np.diff(trace.arrival_s[turns])[np.diff(trace.conversation[turns]) == 0]
    return TraceSummary(
        num_requests=len(trace),
        duration_s=float(trace.arrival_s[-1]),
        requests_per_s=trace.requests_per_s,
        num_documents=len(trace.doc_ids),
        num_retrievals=num_retrievals,
        documents_per_request=num_retrievals / len(trace),
        mean_document_tokens=float(trace.doc_tokens.mean()) if num_retrievals else 0.0,
        median_prompt_tokens=float(np.median(prompts)),
        mean_prompt_tokens=float(prompts.mean()),
        max_prompt_tokens=int(prompts.max()),
        mean_question_tokens=float(trace.question_tokens.mean()),
        mean_output_tokens=float(trace.output_tokens.mean()),
        top_share=popularity_share(trace, TOP_SHARE),
        repeated_retrievals=1 - len(trace.doc_ids) / num_retrievals if num_retrievals else 0.0,
        num_conversations=num_conversations,
        turns_per_conversation=len(turns) / max(num_conversations, 1),
        median_think_s=float(np.median(think_s)) if len(think_s) else 0.0,
        history_share=float(trace.history_tokens.sum() / max(prompts.sum(), 1)),
        repeated_prefix=1 - _num_prefixes(trace) / num_retrievals if num_retrievals else 0.0,
    )


def popularity_share(trace: Trace, top: float, num_documents: int | None = None) -> float:
    """Return the share of retrievals that the ``top`` share of documents gets.

    All documents are those of the trace, or ``num_documents`` of a corpus.
    """
    counts = np.sort(np.bincount(trace.docs))[::-1]
    num_top = max(1, round(top * (num_documents or len(trace.doc_ids))))
    return float(counts[:num_top].sum() / counts.sum()) if len(counts) else 0.0


def _num_prefixes(trace: Trace) -> int:
    """Return the number of distinct prefixes: nodes of the tree of all requests."""
    numbers: dict[tuple[int, int], int] = {}
    docs, first = trace.docs.tolist(), trace.first.tolist()
    for start, end in pairwise(first):
        node = -1
        for doc in docs[start:end]:
            node = numbers.setdefault((node, doc), len(numbers))
    return len(numbers)


@dataclass(frozen=True, slots=True)
class PositionReuse:
    """Share of documents at one position (the first is 1) that an earlier request retrieved.

    ``anywhere``: at any position; ``same_prefix``: after the same documents in the same order, so that an exact
    prefix cache can hit it, and chunk reuse what is missing to ``anywhere``.
    """

    position: int
    num_retrievals: int
    anywhere: float
    same_prefix: float


@dataclass(frozen=True, slots=True)
class TraceReuse:
    """The papers' statistics of a trace (RAGCache's Figures 3 and 5, Cache-Craft's 1, 3, 5, 6 and 8a).

    Attributes:
        top_documents: pairs of a share of the documents that are retrieved at all, the most popular first, and the
            share of all retrievals that are of them.
        returns_within_s: pairs of seconds and the share of all retrievals whose document was retrieved so shortly
            before.
        return_s: quantiles of the time since a document's last retrieval, of those that have one.
        positions: up to the eighth.
        anywhere_tokens, same_prefix_tokens: of the documents' tokens, the shares as in :class:`PositionReuse`.
        known_documents: pairs of a share of a request's documents and the share of the requests with at least
            that many documents that earlier ones retrieved.
        sources: pairs of a number and the share of requests, of those with two or more documents that all came before,
            whose documents last came in that number of requests; the last pair is for as many or more.
        top_sets: as ``top_documents``, of what is retrieved together, in whatever order, by requests for two or more.
        repeated_sets: the share of those requests whose set an earlier one retrieved.
        repeated_pairs: pairs among the first eight documents of a request that an earlier one had among its own.
        prompt_tokens, document_tokens, output_tokens: quantiles of requests' prompts, of documents as they are
            retrieved, and of answers.
        shares_of_prompts: what part of all prompts is documents, questions and the history of conversations.

    Quantiles are pairs of a share and a number, none where there is nothing.
    """

    top_documents: tuple[tuple[float, float], ...]
    returns_within_s: tuple[tuple[float, float], ...]
    return_s: tuple[tuple[float, float], ...]
    positions: tuple[PositionReuse, ...]
    anywhere_tokens: float
    same_prefix_tokens: float
    known_documents: tuple[tuple[float, float], ...]
    sources: tuple[tuple[int, float], ...]
    top_sets: tuple[tuple[float, float], ...]
    repeated_sets: float
    repeated_pairs: float
    prompt_tokens: tuple[tuple[float, float], ...]
    document_tokens: tuple[tuple[float, float], ...]
    output_tokens: tuple[tuple[float, float], ...]
    shares_of_prompts: dict[str, float]


def reuse_of(trace: Trace) -> TraceReuse:
    """Return how the documents of ``trace`` recur."""
    counts = _count(trace)
    is_prefix, known = counts.is_prefix, np.asarray(counts.known)
    position = np.arange(len(trace.docs)) - np.repeat(trace.first[:-1], np.diff(trace.first))
    since_s = _since_last(trace)
    is_again = np.isfinite(since_s)
    own = trace.document_tokens()
    prompts = own + trace.question_tokens + trace.history_tokens
    num_tokens = max(int(prompts.sum()), 1)
    return TraceReuse(
        top_documents=_top_shares(np.unique(trace.docs, return_counts=True)[1]),
        returns_within_s=tuple((within, _mean(since_s <= within)) for within in WITHIN_S),
        return_s=_quantiles(since_s[is_again]),
        positions=tuple(
            PositionReuse(place + 1, int(here.sum()), _mean(is_again[here]), _mean(is_prefix[here]))
            for place in range(min(int(position.max(initial=-1)) + 1, _POSITIONS))
            if (here := position == place).any()
        ),
        anywhere_tokens=_weighed(is_again, trace.doc_tokens),
        same_prefix_tokens=_weighed(is_prefix, trace.doc_tokens),
        known_documents=tuple((share, _mean(known >= share)) for share in KNOWN_SHARES) if len(known) else (),
        sources=_shares_of(counts.num_sources),
        top_sets=_top_shares(np.fromiter(counts.sets.values(), np.int64, len(counts.sets))),
        repeated_sets=1 - len(counts.sets) / max(counts.sets.total(), 1) if counts.sets else 0.0,
        repeated_pairs=counts.num_repeated_pairs / max(counts.num_pairs, 1),
        prompt_tokens=_quantiles(prompts),
        document_tokens=_quantiles(trace.doc_tokens),
        output_tokens=_quantiles(trace.output_tokens),
        shares_of_prompts={
            "documents": float(own.sum() / num_tokens),
            "questions": float(trace.question_tokens.sum() / num_tokens),
            "history": float(trace.history_tokens.sum() / num_tokens),
        },
    )


@dataclass(slots=True)
class _Counts:
    """Counts over a trace, request by request.

    ``is_prefix``: which retrievals follow the same documents as an earlier one; ``known``: of each request with
    documents the share that came before; ``num_sources``: from how many requests those of two or more last came, if all
    did; ``sets``: how often each set of two or more came.
    """

    is_prefix: npt.NDArray[np.bool_]
    known: list[float] = field(default_factory=list)
    num_sources: list[int] = field(default_factory=list)
    sets: Counter[frozenset[int]] = field(default_factory=Counter)
    num_pairs: int = 0
    num_repeated_pairs: int = 0


def _count(trace: Trace) -> _Counts:
    counts = _Counts(np.zeros(len(trace.docs), np.bool_))
    nodes: dict[tuple[int, int], int] = {}
    pairs: set[tuple[int, int]] = set()
    last: dict[int, int] = {}
    docs = trace.docs.tolist()
    for number, (start, end) in enumerate(pairwise(trace.first.tolist())):
        node = -1
        for i in range(start, end):
            num_nodes = len(nodes)
            node = nodes.setdefault((node, docs[i]), num_nodes)
            counts.is_prefix[i] = node < num_nodes
        together = frozenset(docs[start:end])
        sources = [last[doc] for doc in together if doc in last]
        last.update(dict.fromkeys(together, number))
        if together:
            counts.known.append(len(sources) / len(together))
        if len(together) < 2:
            continue
        if len(sources) == len(together):
            counts.num_sources.append(len(set(sources)))
        own = set(combinations(sorted(set(docs[start : min(end, start + _POSITIONS)])), 2))
        counts.num_pairs += len(own)
        counts.num_repeated_pairs += len(own & pairs)
        pairs |= own
        counts.sets[together] += 1
    return counts


def _since_last(trace: Trace) -> npt.NDArray[np.float64]:
    """Return the seconds since each document's previous retrieval; infinite for the first."""
    times = np.repeat(trace.arrival_s, np.diff(trace.first))
    order = np.argsort(trace.docs, kind="stable")
    since_s = np.full(len(order), math.inf)
    is_same = np.diff(trace.docs[order]) == 0
    since_s[order[1:][is_same]] = np.diff(times[order])[is_same]
    return since_s


def _top_shares(counts: npt.NDArray[np.int64]) -> tuple[tuple[float, float], ...]:
    if not len(counts):
        return ()
    ranked = np.sort(counts)[::-1]
    return tuple((top, float(ranked[: max(1, round(top * len(ranked)))].sum() / ranked.sum())) for top in TOP_SHARES)


def _shares_of(numbers: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Return the frequency of each number; the eighth entry is for 8 and more."""
    counts = Counter(min(number, _POSITIONS) for number in numbers)
    return tuple((number, count / counts.total()) for number, count in sorted(counts.items()))


def _mean(values: npt.NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _weighed(values: npt.NDArray[np.bool_], tokens: npt.NDArray[np.int32]) -> float:
    return float((values * tokens.astype(np.int64)).sum() / max(int(tokens.sum(dtype=np.int64)), 1))


def _quantiles(values: Sequence[float] | npt.NDArray[np.generic]) -> tuple[tuple[float, float], ...]:
    array = np.asarray(values, np.float64)
    if not len(array):
        return ()
    return tuple(zip(QUANTILES, np.quantile(array, QUANTILES).tolist(), strict=True))
