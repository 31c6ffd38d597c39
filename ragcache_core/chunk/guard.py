"""A bound on the error rate of approximate answers, kept while they are served: which alpha each kind of document gets.

An *error* is an answer that differs from the exact one, as an audit finds out. A *level* is an alpha. Two parts keep
the bound::

    evidence  the audits of a level -> an upper bound of its error rate, valid at every number of audits
    budget    an answer                   + max_error
              an approximate answer       - the upper bound of its level
              an audit that finds no error    gives that charge back
              an audit that finds an error    gives it back, and costs 1

Without evidence the upper bound is 1. So the first answers are exact, then one approximate answer at a time waits for
its audit. Once the upper bound is below ``max_error``, the budget pays for every answer. The charges never exceed the
budget, so the expected errors do not either, as far as the upper bounds hold.

Audits are chosen without a look at the answer, and a level is judged by its own audits alone, so moving between levels
does not distort a bound. A level is rejected for some time where an alarm (CUSUM) shows that its error rate is too
high, or where it does not come to hold. If it held before, the documents have changed, and all evidence is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MISS_PROBABILITY = 0.05
"""The probability that a level's error rate ever exceeds its upper bound: 95 % confidence."""
MAX_KINDS = 32
DEFAULT_KIND = "default"
OTHER_KIND = "other"
"""The kind of answers whose own kind came after ``MAX_KINDS`` others."""

_LEVELS = (0.0, 0.7, 1.0)  # of the largest alpha; each further level takes a kind some hundred answers to pass
_ROUNDING = 1e-9
_AUDITED_SHARE = 0.2  # of the answers of a level that holds
_MAX_SAVED = 2.0  # errors that a long time without any pays for at once
_ALARM_RATE = 5.0  # times max_error: the error rate for which the alarm is made
_RETRY_ANSWERS = 1_000  # after which a rejected level is tried again; twice as many with every rejection
_MAX_RETRY_ANSWERS = 64_000
_TRIAL_AUDITS = 10  # by 1 / max_error: audits in which a level must come to hold
_MAX_AUDITS = 4_000  # then the counts are halved, so that old audits lose weight


def guarded_alphas(largest: float) -> tuple[float, ...]:
    """Return the levels of an engine, ascending, whose ``largest`` alpha recomputes most."""
    return tuple(share * largest for share in _LEVELS)


def upper_bound(num_errors: float, num_audits: float, max_error: float) -> float:
    """Return the largest error rate that the audits of a level do not refute.

    Clopper and Pearson's interval holds for a number of audits that is fixed in advance, while a level is judged after
    each one. So this is a confidence sequence: a mixture of likelihoods over a Beta distribution is, divided by the
    likelihood of the true rate, a martingale with mean 1. It ever reaches ``1 / MISS_PROBABILITY`` with that
    probability at most (Ville; Robbins 1970). Without an error it takes 206 audits to 2 %, and Clopper-Pearson 149.
    """
    num_equal = num_audits - num_errors
    if num_equal == 0:
        return 1.0
    a, b = 0.5, 0.5 / max_error  # most weight near the bound
    mixture = _log_beta(a + num_errors, b + num_equal) - _log_beta(a, b)
    least = mixture + math.log(MISS_PROBABILITY)
    low, high = num_errors / num_audits, 1.0
    for _ in range(40):
        rate = (low + high) / 2
        likelihood = (num_errors * math.log(rate) if num_errors else 0.0) + num_equal * math.log1p(-rate)
        low, high = (rate, high) if likelihood >= least else (low, rate)
    return high


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


@dataclass(slots=True)
class _Level:
    """The evidence on one alpha. ``alarm`` is the CUSUM of a risen error rate, as a likelihood ratio."""

    alpha: float
    num_audits: float = 0
    num_errors: float = 0
    bound: float = 1.0
    alarm: float = 1.0
    num_rejections: int = 0
    rejected_until: int = 0

    def forget(self) -> None:
        """Judge the level from the next audit on."""
        self.num_audits, self.num_errors, self.bound, self.alarm = 0, 0, 1.0, 1.0


@dataclass(slots=True)
class _Kind:
    levels: list[_Level]
    budget: float = 0.0
    num_answers: int = 0
    num_approximate: int = 0
    num_audits: int = 0
    num_errors: int = 0
    current: int = -1  # of the last approximate answer


@dataclass(frozen=True, slots=True)
class GuardedAnswer:
    """One answer: its alpha, None where it must be exact; the charge, and whether it is to be audited."""

    kind: str
    alpha: float | None
    level: int = -1
    charge: float = 0.0
    is_audited: bool = False


@dataclass(slots=True)
class ErrorGuard:
    """Chooses the alpha of each answer, and learns from audits. One thread calls it.

    Args:
        max_error: the largest share of the answers of a kind that may differ from exact ones.
        alphas: the levels, ascending: the more is recomputed, the fewer errors are expected.
        random: returns numbers in [0, 1); chooses answers to audit, without a look at them.
    """

    max_error: float
    alphas: Sequence[float]
    random: Callable[[], float]
    _kinds: dict[str, _Kind] = field(default_factory=dict)

    def choose(self, kind: str, *, can_audit: bool) -> GuardedAnswer:
        """Return the next answer of a kind, at the smallest alpha that its budget pays for.

        The caller tells :meth:`on_answered` of its end. Without ``can_audit`` it gets levels that hold already.
        """
        kind = self._known_kind(kind)
        state = self._kinds[kind]
        for number, level in enumerate(state.levels):
            holds = level.bound <= self.max_error
            if (
                state.num_answers >= level.rejected_until
                and level.bound <= state.budget + _ROUNDING
                and (holds or can_audit)
            ):
                state.budget -= level.bound
                is_audited = can_audit and (not holds or self.random() < _AUDITED_SHARE)
                return GuardedAnswer(kind, level.alpha, number, level.bound, is_audited)
        return GuardedAnswer(kind, None)

    def on_answered(self, answer: GuardedAnswer, *, is_shown: bool, is_approximate: bool) -> None:
        """Count an answer that has ended.

        One with no stored KV in it costs nothing; one that is not shown, so far, adds nothing to the budget.
        """
        if (state := self._kinds.get(answer.kind)) is None:
            return
        if is_shown:
            state.num_answers += 1
            state.budget += self.max_error
        if not is_approximate:
            state.budget += answer.charge
        else:
            state.num_approximate += 1
            state.current = answer.level
        state.budget = min(state.budget, _MAX_SAVED)

    def on_audited(self, answer: GuardedAnswer, *, is_equal: bool) -> None:
        """Learn whether an approximate answer is the exact one."""
        if (state := self._kinds.get(answer.kind)) is None:
            return
        level = state.levels[answer.level]
        state.num_audits += 1
        state.num_errors += not is_equal
        state.budget = min(state.budget + answer.charge - (not is_equal), _MAX_SAVED)
        held = level.bound <= self.max_error
        level.num_audits += 1
        level.num_errors += not is_equal
        if level.num_audits >= _MAX_AUDITS:
            level.num_audits, level.num_errors = level.num_audits / 2, level.num_errors / 2
        level.bound = upper_bound(level.num_errors, level.num_audits, self.max_error)
        raised = min(_ALARM_RATE * self.max_error, (1 + self.max_error) / 2)
        ratio = (1 - raised) / (1 - self.max_error) if is_equal else raised / self.max_error
        level.alarm = max(level.alarm, 1.0) * ratio
        is_futile = level.bound > self.max_error and level.num_audits >= _TRIAL_AUDITS / self.max_error
        if level.alarm >= 1 / MISS_PROBABILITY or is_futile:
            self._reject(state, level)
            if held:  # the documents are others now: what was learned on them is worth nothing
                for other in state.levels:
                    other.forget()

    def _known_kind(self, kind: str) -> str:
        if kind not in self._kinds:
            if len(self._kinds) >= MAX_KINDS:
                kind = OTHER_KIND
            self._kinds.setdefault(kind, _Kind([_Level(alpha) for alpha in sorted(self.alphas)]))
        return kind

    def _reject(self, state: _Kind, level: _Level) -> None:
        retry = min(_RETRY_ANSWERS << level.num_rejections, _MAX_RETRY_ANSWERS)
        level.num_rejections += 1
        level.rejected_until = state.num_answers + retry
        level.forget()

    def forget(self) -> None:
        """Know nothing any more: the model is another one."""
        self._kinds.clear()

    def report(self) -> list[dict[str, object]]:
        """Return the figures of each kind; see :class:`~ragcache_core.stats.ChunkKindStats`."""
        return [
            {
                "kind": name,
                "num_answers": state.num_answers,
                "num_approximate": state.num_approximate,
                "num_audits": state.num_audits,
                "num_errors": state.num_errors,
                **self._level_report(state),
            }
            for name, state in self._kinds.items()
        ]

    def _level_report(self, state: _Kind) -> dict[str, object]:
        holding = [level for level in state.levels if level.bound <= self.max_error]
        level = holding[0] if holding else state.levels[max(state.current, 0)]
        is_stopped = all(state.num_answers < each.rejected_until for each in state.levels)
        return {
            "alpha": level.alpha,
            "error_rate": level.num_errors / level.num_audits if level.num_audits else 0.0,
            "error_bound": level.bound,
            "is_stopped": is_stopped,
        }
