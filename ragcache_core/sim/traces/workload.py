"""Seeded request streams with the statistics of published workloads: skewed, clustered, and drifting.

Documents lie on an axis of topics. A request is about one of them, its primary, drawn by popularity; what it retrieves
are documents near by, ordered as a noisy retriever would, so that the primary mostly comes first and the same
documents come back together::

    topics   ... d17  d4  d90  d2  d33 ...
                       ^ primary d90, retrieved (d90, d4)

The order is a draw by Plackett-Luce: a document at distance x from the primary p has the weight
``exp(-beta x) (popularity / popularity of p) ** hub``. The distance between neighbours on the axis is whatever brings
the primary to the first place as often as the workload says.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ragcache_core.errors import ConfigError
from ragcache_core.sim.traces.trace import Trace

_REACH = 4
_CHUNK = 16_384
_NUM_PROBES = 8_192
_MAX_SPACING = 64.0
_TIME_DECIMALS = 6
MAX_TURNS = 64
_AT_ONCE = 1_024
_SHORTEST_THINK_S = 1.0

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Workload:
    """The parameters of a trace, validated on creation.

    Popularity by rank is ``(rank + shift) ** -skew``. Lengths are lognormal; ``*_sigma`` is the deviation of their
    logarithm. ``length_correlation`` is that of a document's logarithmic length with the normal score of its
    popularity. ``primary_first`` is how often the document a request is about comes first. Every ``drift_every``
    requests the ``drift_share`` of the ``num_drifting`` most popular documents swap their popularity (0: never), and
    ``repeat_share`` of the requests are about what one of the last ``session_length`` was about.

    With ``goes_on`` above 0 requests are turns of conversations (:func:`turns_in_time`). ``first_documents`` of the
    first turns and ``later_documents`` of the later ones retrieve documents; those of later ones are ``later_length``
    times as long.
    """

    num_documents: int
    skew: float
    shift: float
    documents_per_request: int = 2
    mean_tokens: float = 1900.0
    sigma: float = 0.7
    least_tokens: int = 64
    most_tokens: int = 16_384
    length_correlation: float = 0.0
    beta: float = 3.0
    hub: float = 0.3
    primary_first: float = 0.75
    drift_every: int = 0
    drift_share: float = 0.25
    num_drifting: int = 3_000
    repeat_share: float = 0.0
    session_length: int = 40
    question_median: float = 32.0
    question_sigma: float = 0.5
    most_question_tokens: int = 512
    mean_output_tokens: float = 1.0
    output_sigma: float = 0.0
    requests_per_s: float = 0.8
    goes_on: float = 0.0
    persistence: float = 0.45
    think_median_s: float = 130.0
    think_sigma: float = 0.98
    first_documents: float = 1.0
    later_documents: float = 1.0
    later_length: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least, most = _LIMITS[field.name]
            is_number = isinstance(value, int if field.type == "int" else int | float) and not isinstance(value, bool)
            if not (is_number and least <= value <= most):
                kind = "a whole number" if field.type == "int" else "a number"
                raise ConfigError(f"{field.name} is {value!r}: it must be {kind} from {least:g} to {most:g}")
        if self.documents_per_request > self.num_documents:
            raise ConfigError(
                f"a request retrieves {self.documents_per_request} documents of {self.num_documents}: "
                "raise num_documents, or lower documents_per_request"
            )
        if not self.least_tokens <= self.mean_tokens <= self.most_tokens:
            raise ConfigError(
                f"documents of {self.mean_tokens:g} tokens on average cannot all have {self.least_tokens} to "
                f"{self.most_tokens}: change mean_tokens, least_tokens or most_tokens"
            )

    def talk(self) -> Talk:
        """Return the conversation parameters."""
        return Talk(self.goes_on, self.persistence, self.think_median_s, self.think_sigma, self.requests_per_s)

    def popularity(self) -> _Floats:
        """Return the share of requests whose primary document has each rank: [num_documents]."""
        weights = np.power(np.arange(1, self.num_documents + 1, dtype=np.float64) + self.shift, -self.skew)
        shares: _Floats = weights / weights.sum()
        return shares

    def offsets(self) -> _Ints:
        """Return the axis positions of retrievable documents, relative to the primary's."""
        reach = max(_REACH, self.documents_per_request)
        if 2 * reach + 1 <= self.num_documents:
            return np.arange(-reach, reach + 1)
        return np.arange(self.num_documents) - self.num_documents // 2  # all of them, each once

    def spacing(self) -> float:
        """Return the axis distance of neighbours for which the primary comes first as often as configured.

        That is a mean over requests: popular primaries are seldom beaten, others by any popular neighbour. Where no
        distance does it (few documents, or one far above all others), it is the one that comes nearest.
        """
        popularity = self.popularity()
        rng = np.random.default_rng(0)
        primary = _draw_ranks(popularity, rng, _NUM_PROBES)
        distance = np.abs(self.offsets())
        near = rng.integers(self.num_documents, size=(_NUM_PROBES, len(distance)))  # neighbours may have any rank
        pull = (popularity[near] / popularity[primary][:, None]) ** self.hub
        pull[:, distance == 0] = 1.0
        low, high = 0.0, _MAX_SPACING
        while high - low > 1e-6:
            middle = (low + high) / 2
            share = np.mean(1 / (pull * np.exp(-self.beta * middle * distance)).sum(axis=1))
            low, high = (middle, high) if share < self.primary_first else (low, middle)
        return high


_MANY = 1e9
_LIMITS: Mapping[str, tuple[float, float]] = {
    "num_documents": (1, 2**31 - 1),
    "skew": (0, 10),
    "shift": (0, _MANY),
    "documents_per_request": (1, 100),
    "mean_tokens": (1, _MANY),
    "sigma": (0, 5),
    "least_tokens": (1, _MANY),
    "most_tokens": (1, _MANY),
    "length_correlation": (-1, 1),
    "beta": (1e-3, 1_000),
    "hub": (0, 10),
    "primary_first": (0, 1),
    "drift_every": (0, _MANY),
    "drift_share": (0, 1),
    "num_drifting": (0, _MANY),
    "repeat_share": (0, 1),
    "session_length": (1, 1_000_000),
    "question_median": (1, _MANY),
    "question_sigma": (0, 5),
    "most_question_tokens": (1, _MANY),
    "mean_output_tokens": (1, _MANY),
    "output_sigma": (0, 5),
    "requests_per_s": (1e-6, _MANY),
    "goes_on": (0, 0.99),
    "persistence": (0, 10),
    "think_median_s": (1e-3, _MANY),
    "think_sigma": (0, 5),
    "first_documents": (0, 1),
    "later_documents": (0, 1),
    "later_length": (1e-3, 1_000),
}

_MMLU = Workload(num_documents=30_000, skew=1.3, shift=2.0)
_NQ = Workload(num_documents=100_000, skew=0.95, shift=5.0, mean_output_tokens=6.0, output_sigma=0.89)

WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "mmlu": _MMLU,
        "nq": _NQ,
        "nq-small": replace(_NQ, num_documents=400, skew=0.6, sigma=0.9),
        "sysx": Workload(
            num_documents=3_400, skew=2.5, shift=25.0, documents_per_request=5, mean_tokens=770.0, sigma=1.2,
            least_tokens=200, most_tokens=3_900, mean_output_tokens=180.0, output_sigma=0.7,
        ),
        "drift": replace(_MMLU, drift_every=1_500, repeat_share=0.25),
        "conversation": Workload(
            num_documents=1_000_000, skew=0.0, shift=0.0, documents_per_request=1, mean_tokens=12_700.0, sigma=1.25,
            most_tokens=120_000, question_median=20.0, question_sigma=1.0, mean_output_tokens=343.0, output_sigma=0.8,
            requests_per_s=3.4, goes_on=0.275, persistence=0.43, first_documents=0.82, later_documents=0.29,
            later_length=0.34,
        ),
        "agents": Workload(
            num_documents=1_000_000, skew=0.0, shift=0.0, documents_per_request=1, mean_tokens=3_500.0, sigma=0.6,
            most_tokens=30_000, question_median=24.0, question_sigma=0.5, mean_output_tokens=140.0, output_sigma=0.6,
            requests_per_s=4.0, goes_on=0.85, persistence=0.15, think_median_s=5.0, think_sigma=1.8,
            later_length=0.28,
        ),
    }
)  # fmt: skip
"""The workloads of ``ragcache trace make``, by name.

``mmlu``: the top 3 % of the retrieved documents get about 60 % of the retrievals, answers are one token
(RAGCache §3, §7). ``nq``: flatter, answers of 6 tokens on average, 99 % of at most 32. ``nq-small``: a small corpus,
flatter still. ``sysx``: a production system by its published statistics (Cache-Craft §2.2, §2.3, §3.5, §5.1): five
chunks a request, prompts of 1,000 to 20,000 tokens with a median of 3,300, the top 5 % of the chunks get 60 % of the
retrievals and the top 13.5 % get 85 %; how many chunks there are follows from the memory that the top 14.8 % take,
answers from 19.3 times as much work for prompts.
``drift``: ``mmlu`` whose popularity drifts and whose users come back to their topics; no other does either.
``conversation``: turns of conversations about documents of their own, as a production chat service has them (Mooncake,
FAST 2025: 12,031 requests of an hour, whose next turns are known by the beginnings of their prompts). They follow a
system prompt of 870 tokens that all share.
``agents``: loops of tool calls, with documents of their own: some eight turns, each with the tool's result of about
1,000 tokens, after a wait of seconds to minutes. No published trace is behind its numbers.
"""


class Retrievals(NamedTuple):
    """The topics of requests, and their retrieved documents, best first: [n], [n, documents_per_request]."""

    primaries: _Ints
    docs: _Ints


def make_trace(
    workload: Workload, num_requests: int, seed: int, *, progress: Callable[[int], object] | None = None
) -> Trace:
    """Return ``num_requests`` requests, deterministic by seed; a longer trace begins with the shorter.

    Documents are called ``d0``, ``d1``, ... by their place on the axis. ``progress`` receives the number of requests
    drawn since its last call.

    Raises:
        ConfigError: a number of requests or a seed below 0, or a workload that cannot be.
    """
    if num_requests < 1 or seed < 0:
        raise ConfigError(f"{num_requests} requests of seed {seed}: ask for at least 1, with a seed of 0 or more")
    docs = draw_retrievals(workload, num_requests, seed, progress=progress).docs
    lengths = document_tokens(workload, seed)
    rngs = _Streams.of(seed)
    if workload.goes_on:
        turns = turns_in_time(workload.talk(), num_requests, rngs.arrivals)
        arrival_s, conversation, turn = (np.array(column) for column in zip(*turns, strict=True))
    else:
        arrival_s = np.cumsum(rngs.arrivals.exponential(1 / workload.requests_per_s, num_requests))
        conversation, turn = np.full(num_requests, -1), np.zeros(num_requests, np.int64)
    share = np.where(turn == 0, workload.first_documents, workload.later_documents)
    retrieves = rngs.repeats.random(num_requests) < share
    questions = rngs.questions.normal(size=num_requests) * workload.question_sigma + math.log(workload.question_median)
    outputs = rngs.outputs.normal(size=num_requests) * workload.output_sigma
    outputs += math.log(workload.mean_output_tokens) - workload.output_sigma**2 / 2
    doc_tokens = lengths[docs] * np.where(turn == 0, 1.0, workload.later_length)[:, None]
    docs = docs[retrieves].ravel()
    numbers, names = _by_first_appearance(docs)
    return Trace(
        arrival_s=arrival_s.round(_TIME_DECIMALS),
        first=np.concatenate([[0], np.cumsum(retrieves, dtype=np.int64)]) * workload.documents_per_request,
        docs=numbers,
        doc_tokens=doc_tokens[retrieves].ravel().round().clip(min=1).astype(np.int32),
        question_tokens=_whole(questions, 1, workload.most_question_tokens),
        output_tokens=_whole(outputs, 1, _MANY),
        doc_ids=tuple(f"d{name}" for name in names.tolist()),
        conversation=conversation.astype(np.int32),
    )


def document_tokens(workload: Workload, seed: int) -> npt.NDArray[np.int32]:
    """Return the lengths of all documents for a seed: [num_documents]."""
    rngs = _Streams.of(seed)
    count, share = workload.num_documents, workload.length_correlation
    scores = rngs.lengths.normal(size=count)
    if share:
        by_rank = rngs.places.permutation(count)
        of_popularity = np.empty(count)
        of_popularity[by_rank] = np.sort(rngs.lengths.normal(size=count))[::-1]
        scores = share * of_popularity + math.sqrt(1 - share**2) * scores
    mu = math.log(workload.mean_tokens) - workload.sigma**2 / 2
    return _whole(scores * workload.sigma + mu, workload.least_tokens, workload.most_tokens)


def draw_retrievals(
    workload: Workload, num_requests: int, seed: int, *, progress: Callable[[int], object] | None = None
) -> Retrievals:
    """Return topics and retrieved documents of the requests of :func:`make_trace`, by axis position."""
    rngs = _Streams.of(seed)
    axis = _Axis(workload, rngs)
    ranks = _draw_ranks(workload.popularity(), rngs.primaries, num_requests)
    source = _sources(workload, num_requests, rngs)
    offsets = workload.offsets()
    log_nearness = -workload.beta * workload.spacing() * np.abs(offsets)
    primaries = np.empty(num_requests, np.int64)
    docs = np.empty((num_requests, workload.documents_per_request), np.int64)
    step = workload.drift_every or _CHUNK
    for start in range(0, num_requests, step):
        end = min(start + step, num_requests)
        if start and workload.drift_every:
            axis.drift()
        primaries[start:end] = axis.by_rank[ranks[start:end]]
        primaries[start:end] = primary = primaries[source[start:end]]
        near = (primary[:, None] + offsets) % workload.num_documents
        gain = workload.hub * (axis.log_popularity[near] - axis.log_popularity[primary][:, None])
        keys = gain + log_nearness + rngs.neighbours.gumbel(size=near.shape)  # Gumbel's trick: sorted, they are a draw
        best = np.argsort(-keys, axis=1)[:, : workload.documents_per_request]
        docs[start:end] = np.take_along_axis(near, best, axis=1)
        if progress is not None:
            progress(end - start)
    return Retrievals(primaries, docs)


class _Streams(NamedTuple):
    """A random generator per column, so that columns are independent."""

    places: np.random.Generator
    lengths: np.random.Generator
    primaries: np.random.Generator
    repeats: np.random.Generator
    sessions: np.random.Generator
    neighbours: np.random.Generator
    drifts: np.random.Generator
    arrivals: np.random.Generator
    questions: np.random.Generator
    outputs: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> _Streams:
        return cls(*map(np.random.default_rng, np.random.SeedSequence(seed).spawn(len(cls._fields))))


class _Axis:
    """Positions and popularity of documents; ranks change with time."""

    def __init__(self, workload: Workload, rngs: _Streams) -> None:
        self._workload = workload
        self._rng = rngs.drifts
        popularity = workload.popularity()
        self.log_of_rank = np.log(popularity)
        self.by_rank = rngs.places.permutation(workload.num_documents)  # [rank] -> document, its place on the axis
        self.log_popularity = np.empty(workload.num_documents)
        self.log_popularity[self.by_rank] = self.log_of_rank

    def drift(self) -> None:
        """Swap the popularity of some popular documents."""
        num_hot = min(self._workload.num_drifting, self._workload.num_documents)
        ranks = self._rng.choice(num_hot, size=int(num_hot * self._workload.drift_share), replace=False)
        self.by_rank[ranks] = self.by_rank[self._rng.permutation(ranks)]
        self.log_popularity[self.by_rank[ranks]] = self.log_of_rank[ranks]


def _sources(workload: Workload, num_requests: int, rngs: _Streams) -> _Ints:
    """Return the earlier request whose topic each request repeats; its own number for a new topic."""
    numbers = np.arange(num_requests)
    back = rngs.sessions.random(num_requests) * np.minimum(numbers, workload.session_length)
    repeats = rngs.repeats.random(num_requests) < workload.repeat_share
    source = np.where(repeats & (numbers > 0), numbers - 1 - back.astype(np.int64), numbers)
    while not np.array_equal(source, further := source[source]):  # the source of a source
        source = further
    return source


def _draw_ranks(popularity: _Floats, rng: np.random.Generator, count: int) -> _Ints:
    cumulative = np.cumsum(popularity)
    drawn: _Ints = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right")
    return drawn.clip(max=len(popularity) - 1)


def _by_first_appearance(docs: _Ints) -> tuple[npt.NDArray[np.int32], _Ints]:
    """Return each document's number by first appearance, and the documents in that order."""
    names, first, sorted_number = np.unique(docs, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number_of = np.empty(len(names), np.int32)
    number_of[order] = np.arange(len(names), dtype=np.int32)
    return number_of[sorted_number], names[order]


def _whole(logarithms: _Floats, least: float, most: float) -> npt.NDArray[np.int32]:
    return np.exp(logarithms).round().clip(least, most).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Talk:
    """How conversations continue, and the rate of all their requests per second; see :func:`turns_in_time`."""

    goes_on: float
    persistence: float
    think_median_s: float
    think_sigma: float
    requests_per_s: float


Turn = tuple[float, int, int]
"""(time, number of the conversation, number of the turn from 0 on)."""


def turns_in_time(talk: Talk, num_requests: int, rng: np.random.Generator) -> list[Turn]:
    """Return the first ``num_requests`` turns of all conversations by time; fewer are a prefix of more.

    Conversations begin as a Poisson process. After turn n, from 1 on, one goes on with the probability
    ``1 - (1 - goes_on) * n ** -persistence``: long conversations go on more often. Think times, from turn to turn, are
    lognormal.
    """
    return list(islice(_merged(talk, rng), num_requests))


def _merged(talk: Talk, rng: np.random.Generator) -> Iterator[Turn]:
    waiting: list[Turn] = []
    for begin_s, turns in _conversations(talk, rng):
        while waiting and waiting[0][0] <= begin_s:
            yield heapq.heappop(waiting)
        for turn in turns:
            heapq.heappush(waiting, turn)


def _conversations(talk: Talk, rng: np.random.Generator) -> Iterator[tuple[float, list[Turn]]]:
    """Yield each conversation's start and turns, drawn in batches of fixed size."""
    number = np.arange(1, MAX_TURNS)
    goes_on = 1 - (1 - talk.goes_on) * number**-talk.persistence
    mean_turns = 1 + np.cumprod(goes_on).sum()
    now_s, conversation = 0.0, 0
    while True:
        begin_s = now_s + np.cumsum(rng.exponential(mean_turns / talk.requests_per_s, _AT_ONCE))
        now_s = float(begin_s[-1])
        went_on = rng.random((_AT_ONCE, MAX_TURNS - 1)) < goes_on
        num_turns = 1 + np.cumprod(went_on, axis=1).sum(axis=1)
        think_s = np.exp(rng.normal(math.log(talk.think_median_s), talk.think_sigma, int(num_turns.sum())))
        ends = np.cumsum(num_turns)
        for i, (begin, count, end) in enumerate(zip(begin_s.tolist(), num_turns.tolist(), ends.tolist(), strict=True)):
            waits = np.maximum(think_s[end - count + 1 : end], _SHORTEST_THINK_S)
            times = begin + np.concatenate([[0.0], np.cumsum(waits)])
            yield begin, [(time_s, conversation + i, turn) for turn, time_s in enumerate(times.tolist())]
        conversation += _AT_ONCE
