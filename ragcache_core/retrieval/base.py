"""The interface of a staged index: search by the unmodified Faiss index, and the same search in stages.

A staged search may be cut anywhere, but its LAST stage returns what ``index.search`` returns, ids and distances, bit
for bit. Earlier stages are guesses. Indexes are immutable once they are published: ``with_added`` and ``without``
return a new one, so that a search which runs keeps the index it began with.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ragcache_core.errors import ConfigError, SearchError

if TYPE_CHECKING:
    from ragcache_core.retrieval.filters import Selection

IndexKind = Literal["ivf", "hnsw", "flat"]
Metric = Literal["l2", "ip"]
Encoding = Literal["flat", "sq8", "pq"]
Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]

DEFAULT_CUTS = (0.05, 0.15, 0.4, 1.0)
"""Shares of the work after which a stage ends. The top documents settle in the first few percent of the work, so the
cuts are geometric."""

MAX_STAGES = 1000
"""Upper bound of the stages of one search: each of them takes memory."""

MULTIPLY_ADDS_PER_MS = 5e6
"""Where a store's pace begins. Measured: one core does 4 to 6 million over vectors that do not fit its caches."""
_PACE_BOUNDS = (MULTIPLY_ADDS_PER_MS / 1000, MULTIPLY_ADDS_PER_MS * 1000)
_MAX_RATIO_UPDATE = 4.0
"""Limit of the ratio of expected to measured time of one search."""
_PACE_WEIGHT = 0.2
_LEAST_TIMED_S = 0.0002
"""A shorter search measures mostly call overhead."""

_NEEDED_BY = {
    "retrieval": "document stores and their search need",
    "qdrant": "stages of a Qdrant collection need",
    "pgvector": "stages of a Postgres table need",
}


def extra_module(name: str, extra: str = "retrieval") -> Any:
    """Import and return a module of an extra.

    Raises:
        ConfigError: the extra is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{(error.name or name).partition('.')[0]} is not installed, which {_NEEDED_BY[extra]}: "
            f'pip install "ragcache[{extra}]"'
        ) from error


class _Faiss:
    """The module ``faiss``, imported at first use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(extra_module("faiss"), name)


faiss: Any = _Faiss()


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """How a store indexes its vectors, recorded in the manifest.

    ``nlist`` and ``nprobe`` (IVF), ``pq_m`` (bytes of a PQ code): ``None`` chooses from the number of vectors.
    ``ef_search`` (HNSW) is the least number of candidates: ``k`` documents are searched with ``max(ef_search, k)``.
    ``word_weight`` is the share of the words, from 0 to 1, in the score of a document; ``None`` in stores of the first
    format, which have no words.

    Raises:
        ConfigError: a value that cannot work.
    """

    kind: IndexKind = "ivf"
    metric: Metric = "l2"
    encoding: Encoding = "flat"
    nlist: int | None = None
    nprobe: int | None = None
    pq_m: int | None = None
    hnsw_m: int = 32
    ef_construction: int = 80
    ef_search: int = 64
    word_weight: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kind", ("ivf", "hnsw", "flat")),
            ("metric", ("l2", "ip")),
            ("encoding", ("flat", "sq8", "pq")),
        ):
            if getattr(self, name) not in allowed:
                shown = "index" if name == "kind" else name
                raise ConfigError(f"{shown} is {getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        if self.encoding != "flat" and self.kind != "ivf":
            raise ConfigError(f"encoding {self.encoding!r} is for index='ivf', not {self.kind!r}: use encoding='flat'")
        for name, least in (("hnsw_m", 2), ("ef_construction", 1), ("ef_search", 1)):
            check_count(name, getattr(self, name), least)
        for name in ("nlist", "nprobe", "pq_m"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        weight = self.word_weight
        if weight is not None and (
            isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1
        ):
            raise ConfigError(f"word_weight is {weight!r}: give a share from 0 (vectors alone) to 1 (words alone)")

    @property
    def is_similarity(self) -> bool:
        """Whether larger scores mean nearer documents."""
        return self.metric == "ip"


def check_count(name: str, value: object, least: int) -> None:
    """Raise a :class:`ConfigError` unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}: give a whole number of at least {least}")


@dataclass(frozen=True, slots=True)
class Neighbors:
    """Internal ids, best first, with squared L2 distances or inner products, without Faiss's padding ids (-1).

    ``ids: [n] int64``, ``scores: [n] float32`` with ``n <= k``.
    """

    ids: Ids
    scores: Vectors

    @classmethod
    def from_faiss(cls, scores: Vectors, ids: Ids) -> Neighbors:
        found = ids >= 0
        return cls(ids[found], scores[found])


@dataclass(frozen=True, slots=True)
class Stage:
    """The candidates of a search after a stage. The final stage is the unmodified index's result."""

    neighbors: Neighbors
    is_final: bool


@dataclass(slots=True)
class Cancellation:
    """A flag that stops a staged search before its next call of Faiss."""

    is_cancelled: bool = False

    def cancel(self) -> None:
        """Stop the search after its present call."""
        self.is_cancelled = True


class SearchThroughput:
    """Multiply-adds per millisecond of search, learned from earlier searches. Thread-safe.

    A moving geometric mean: one search of a second in the place of a millisecond's moves it by a quarter.
    """

    def __init__(self) -> None:
        self._per_ms = MULTIPLY_ADDS_PER_MS
        self._learning = threading.Lock()

    @property
    def multiply_adds_per_ms(self) -> float:
        """The present throughput."""
        return self._per_ms

    def record(self, work: float, duration_s: float) -> None:
        """Learn from a search of ``work`` multiply-adds."""
        if duration_s < _LEAST_TIMED_S or work <= 0:
            return
        with self._learning:
            surprise = work / (duration_s * 1000) / self._per_ms
            surprise = min(max(surprise, 1 / _MAX_RATIO_UPDATE), _MAX_RATIO_UPDATE)
            slowest, fastest = _PACE_BOUNDS
            self._per_ms = min(max(self._per_ms * surprise**_PACE_WEIGHT, slowest), fastest)


class StagedIndex(Protocol):
    """A published index: immutable and thread-safe."""

    options: IndexOptions
    layout: str
    """How the vectors are indexed now: ``flat`` as long as there are too few to train ``ivf``."""
    trained_on: int
    """Vectors the layout was chosen for; the store rebuilds when it has grown several times since."""
    max_default_stages: int
    """Upper bound on the stages of a search that names none. An index whose stages repeat work has a small one."""

    @property
    def native(self) -> Any:
        """The unmodified Faiss index."""
        ...

    def __len__(self) -> int: ...

    def ids(self) -> Ids:
        """Return the internal ids that the Faiss index holds, in no particular order."""
        ...

    def search(self, query: Vectors, k: int, *, among: Selection | None = None) -> Neighbors:
        """Return ``index.search(query, k)``, or an exact search if that finds fewer than ``k``.

        ``among`` some documents it is Faiss's own search with a selector, and as many of them are looked at as there
        would be of all, so that a search among few is exact. Fewer than ``k`` come back only where there are fewer.
        """
        ...

    def work(self, k: int, among: Selection | None = None) -> float:
        """Return the approximate number of multiply-adds of a search."""
        ...

    def stages(
        self,
        query: Vectors,
        k: int,
        cuts: Sequence[float],
        cancel: Cancellation,
        among: Selection | None = None,
    ) -> Iterator[Stage]:
        """Yield the best documents after each share of the work in ``cuts``; the last equals :meth:`search`.

        Stages that would add no work are left out. A cancelled search ends without its last stage.
        """
        ...

    def with_added(self, ids: Ids, vectors: Vectors) -> StagedIndex:
        """Return a new index that also holds ``vectors: [n, dimension]``."""
        ...

    def without(self, ids: Ids) -> StagedIndex | None:
        """Return a new index that never returns ``ids``; ``None`` if it has to be rebuilt."""
        ...


def stage_cuts(
    stages: int | Sequence[float] | None,
    work: float,
    multiply_adds_per_ms: float = MULTIPLY_ADDS_PER_MS,
    max_default_stages: int = len(DEFAULT_CUTS),
) -> tuple[float, ...]:
    """Return increasing shares of the work, ending in 1.

    ``None`` takes :data:`DEFAULT_CUTS` without the stages that would last less than about a millisecond at the pace of
    ``multiply_adds_per_ms``, and of these the first ``max_default_stages - 1`` and the last; a number takes that many,
    geometrically; a sequence is used as it is.

    Raises:
        SearchError: not a number of stages, more than :data:`MAX_STAGES`, or not increasing shares that end in 1.
    """
    if stages is None:
        *early, last = _worthwhile(DEFAULT_CUTS, work / multiply_adds_per_ms)
        return (*early[: max_default_stages - 1], last)
    if isinstance(stages, int | np.integer):
        if isinstance(stages, bool) or stages < 1:
            raise SearchError(
                f"stages is {stages!r:.80}: give a number of at least 1, or increasing shares that end in 1"
            )
        _check_number_of_stages(num_stages := int(stages), stages)
        return tuple(DEFAULT_CUTS[0] ** ((num_stages - 1 - i) / max(1, num_stages - 1)) for i in range(num_stages))
    try:
        cuts = tuple(float(cut) for cut in stages)
    except (TypeError, ValueError, OverflowError):
        cuts = ()
    _check_number_of_stages(len(cuts), stages)
    increasing = all(a < b for a, b in zip((0.0, *cuts), cuts, strict=False))
    if not cuts or not increasing or not math.isclose(cuts[-1], 1.0):
        raise SearchError(
            f"stages is {stages!r:.80}: give increasing shares of the work that end in 1, as (0.1, 0.5, 1.0)"
        )
    return (*cuts[:-1], 1.0)


def _check_number_of_stages(number: int, stages: object) -> None:
    if number > MAX_STAGES:
        raise SearchError(f"stages is {stages!r:.80}: a search has at most {MAX_STAGES}")


def _worthwhile(cuts: Sequence[float], search_ms: float) -> tuple[float, ...]:
    kept: list[float] = []
    for cut in cuts[:-1]:
        done = kept[-1] if kept else 0.0
        if min(cut - done, 1.0 - cut) * search_ms >= 1.0:
            kept.append(cut)
    return (*kept, 1.0)


def cut_points(cuts: Sequence[float], total: int, least: int = 1) -> list[int]:
    """Return increasing counts ``<= total``, ending in ``total``, for shares of ``total``; each at least ``least``."""
    points = {min(total, max(least, math.ceil(cut * total))) for cut in cuts}
    return sorted(points | {total})


def best_first(scores: Vectors, ids: Ids, is_similarity: bool) -> NDArray[np.intp]:
    """Return the order of a result heap as Faiss reports it: ties by ascending id (L2) or descending id (IP)."""
    order: NDArray[np.intp] = np.lexsort((-ids, -scores) if is_similarity else (ids, scores))
    return order
