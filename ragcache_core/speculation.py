"""When to generate speculatively during a search: RAGCache's Algorithm 2 as a state machine.

Events go in (a stage ended, the engine told its load, a speculation failed, the asker left), actions come out; it reads
no clock and awaits nothing. Theorem 5.1 says what is best after a stage that ends with other documents:

======================  ==============================  =========================================
..                      the engine has room             it has none
======================  ==============================  =========================================
not the final stage     start: only idle time is used   defer until it has room, and search on
the final stage         generate at once                generate at once: the scheduler knows best
======================  ==============================  =========================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

_LEAST_SHARE, _LEAST_SHARE_IDLE = 0.5, 0.1
_LEAST_LEFT_S = 0.01
"""What a start hides of a search is less than this where no more is left of it, and a start costs about as much."""
_WEIGHT = 0.2
_ENOUGH_SEARCHES = 3

D = TypeVar("D")
"""The documents of a stage in prompt order. Equal ones lead to the same prompt."""


@dataclass(frozen=True, slots=True)
class Start(Generic[D]):
    """Start generating from ``candidates``, and hold the answer back."""

    number: int
    candidates: D


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel this speculation, as it was wrong or no client waits for it."""

    number: int


@dataclass(frozen=True, slots=True)
class Confirm:
    """Use this speculation's answer, as it was right."""

    number: int


@dataclass(frozen=True, slots=True)
class Generate(Generic[D]):
    """Generate now, as no speculation was right."""

    candidates: D


Action = Start[D] | Cancel | Confirm | Generate[D]


class SpeculativePipeline(Generic[D]):
    """Decides the next step of one search's speculation (RAGCache §5.3, Algorithm 2).

    At most one speculation lives at a time. After the final stage comes exactly one :class:`Confirm` or
    :class:`Generate`, never before, and a speculation from other candidates than the final ones is never confirmed. We
    differ from Algorithm 2 in that a start for which there was no room is made up for when there is, if its candidates
    still stand: Theorem 5.1 has the search continue "until the pool empties".

    Attributes:
        max_prefill_bs: the pending prefills that leave no room for one more; 0 starts nothing. It may be set when the
            engine has told it.
    """

    def __init__(self, *, max_prefill_bs: int, max_failures: int = 2) -> None:
        """Begin a search. After ``max_failures`` failed speculations no other is started."""
        self.max_prefill_bs = max_prefill_bs
        self._failures_left = max_failures
        self._num_started = 0
        self._live: Start[D] | None = None
        self._deferred: Start[D] | None = None  # numbered when it starts
        self._is_over = False

    @property
    def is_deferred(self) -> bool:
        """Whether a start waits for spare capacity."""
        return self._deferred is not None

    def on_stage(
        self, candidates: D, *, is_final: bool, num_pending: int, is_worthwhile: bool = True
    ) -> list[Action[D]]:
        """Return the actions after a stage that ended with ``candidates``.

        ``num_pending`` prefills wait or run in the engine, this search's own speculation not counted. Nothing is
        started from candidates that are not ``is_worthwhile``: see :class:`StageStabilityStats`.

        Raises:
            ValueError: the search is over: its final stage came, or it was closed.
        """
        if self._is_over:
            raise ValueError(
                f"a stage with {candidates!r} after the end of the search: make a pipeline for each search"
            )
        if self._live is not None and self._live.candidates == candidates:
            return self._confirm(self._live) if is_final else []
        actions = self._cancel()
        if is_final:
            self._end()
            return [*actions, Generate(candidates)]
        self._deferred = None
        if is_worthwhile:
            self._defer(candidates)
        return [*actions, *self.on_load(num_pending)]

    def on_load(self, num_pending: int) -> list[Action[D]]:
        """Return the deferred start, if there is spare capacity."""
        if self._deferred is None or num_pending >= self.max_prefill_bs:
            return []
        self._live, self._deferred = self._deferred, None
        self._num_started += 1
        return [self._live]

    def on_skipped(self) -> None:
        """Drop the deferred start, as its candidates are not worthwhile."""
        self._deferred = None

    def on_failed(self, number: int) -> list[Action[D]]:
        """Return no action; the failed speculation is retried with spare capacity, unless too many failed.

        A speculation that is not the living one may fail late; that changes nothing.
        """
        if self._live is not None and self._live.number == number:
            failed, self._live = self._live, None
            self._failures_left -= 1
            self._defer(failed.candidates)
        return []

    def on_closed(self) -> list[Action[D]]:
        """Return the cancellation of a running speculation, as the client left or the search failed. Idempotent."""
        actions = self._cancel()
        self._end()
        return actions

    def _confirm(self, speculation: Start[D]) -> list[Action[D]]:
        self._end()
        return [Confirm(speculation.number)]

    def _cancel(self) -> list[Action[D]]:
        live, self._live = self._live, None
        return [] if live is None else [Cancel(live.number)]

    def _defer(self, candidates: D) -> None:
        self._deferred = Start(self._num_started, candidates) if self._failures_left > 0 else None

    def _end(self) -> None:
        self._is_over, self._live, self._deferred = True, None, None


class StageRecord(NamedTuple):
    """Recent statistics of a stage: the share of correct candidates, and the time before its search's end."""

    share: float
    left_s: float
    num_searches: int

    @property
    def has_lead_time(self) -> bool:
        """Whether a start from it can gain more than it costs."""
        return self.left_s >= _LEAST_LEFT_S


class StageStabilityStats:
    """How often a stage's candidates were final, and how early, over the searches of one source.

    A start costs the asker and the engine something even in idle time, and is worth it where the candidates tend to
    stand, and the search goes on for longer than a start takes. The share counted is the beginning that candidates and
    final documents have in common, which is what a prefill of the candidates is good for. It is learnt from every
    search, whether or not something was started: so a stage that is not known yet starts something only where the
    engine is idle.

    Attributes:
        num_running: how many searches of the source run now, as those who run them count.
    """

    def __init__(self, learnt: Mapping[int, StageRecord] | None = None) -> None:
        """Start with statistics ``learnt`` earlier."""
        self.num_running = 0
        self._learnt = dict(learnt or {})

    @property
    def learnt(self) -> dict[int, StageRecord]:
        """The statistics of each stage."""
        return dict(self._learnt)

    @property
    def never_worthwhile(self) -> bool:
        """Whether no stage is worth a start. Learned from searches, so it can change without starts."""
        return bool(self._learnt) and not any(self.is_worthwhile(stage, is_idle=True) for stage in self._learnt)

    def is_known(self, stage: int) -> bool:
        """Return whether enough searches had this stage for an estimate."""
        return stage in self._learnt and self._learnt[stage].num_searches >= _ENOUGH_SEARCHES

    def is_worthwhile(self, stage: int, *, is_idle: bool) -> bool:
        """Return whether a start from a stage is worthwhile; if the engine ``is_idle``, a small chance is enough."""
        if not self.is_known(stage):
            return is_idle
        recent = self._learnt[stage]
        return recent.has_lead_time and recent.share >= (_LEAST_SHARE_IDLE if is_idle else _LEAST_SHARE)

    def record(self, stage: int, candidates: Sequence[object], final: Sequence[object], left_s: float) -> None:
        """Record a search that ended with ``final``, ``left_s`` after one of its stages had named ``candidates``."""
        common_prefix_len = next((i for i, (a, b) in enumerate(zip(candidates, final)) if a != b), len(final))  # noqa: B905
        share = min(common_prefix_len, len(candidates)) / len(final) if final else 0.0
        before = self._learnt.get(stage, StageRecord(0.0, 0.0, 0))
        weight = max(_WEIGHT, 1 / (before.num_searches + 1))  # a mean at first, then a moving average
        self._learnt[stage] = StageRecord(
            before.share + weight * (share - before.share),
            before.left_s + weight * (left_s - before.left_s),
            before.num_searches + 1,
        )
