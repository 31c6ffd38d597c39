"""The bound on errors of approximate answers holds whatever the error rates are, and however few audits there are."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.chunk.guard import MAX_KINDS, MISS_PROBABILITY, OTHER_KIND, ErrorGuard, guarded_alphas, upper_bound

ALPHAS = guarded_alphas(1.7)
Rates = Mapping[float, float]
SELF_CONTAINED: Rates = dict.fromkeys(ALPHAS, 0.0)
DEPENDENT: Rates = dict(zip(ALPHAS, (0.95, 0.1, 0.0), strict=True))
"""As measured of documents that depend on preceding text."""
HOPELESS: Rates = dict.fromkeys(ALPHAS, 0.6)


@dataclass
class Traffic:
    """Answers of an engine with a guard: an approximate one is wrong with the rate of its alpha."""

    max_error: float = 0.02
    seed: int = 0
    lag: int = 0
    """Audits that wait before one ends."""
    idle: float = 1.0
    """Share of moments at which audits run."""
    alphas: list[float | None] = field(default_factory=list)
    errors: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.guard = ErrorGuard(self.max_error, ALPHAS, random.Random(self.seed + 1).random)
        self.pending: deque[Callable[[], None]] = deque()

    def serve(self, num_answers: int, rates: Rates, *, until: Callable[[], bool] = lambda: False) -> int:
        """Serve answers, and return how many it were."""
        for number in range(num_answers):
            if until():
                return number
            answer = self.guard.choose("k", can_audit=len(self.pending) < 16)
            is_wrong = answer.alpha is not None and self.rng.random() < rates[answer.alpha]
            self.guard.on_answered(answer, is_shown=True, is_approximate=answer.alpha is not None)
            if answer.is_audited:
                self.pending.append(
                    lambda answer=answer, is_wrong=is_wrong: self.guard.on_audited(answer, is_equal=not is_wrong)
                )
            while len(self.pending) > self.lag and self.rng.random() < self.idle:
                self.pending.popleft()()
            self.alphas.append(answer.alpha)
            self.errors.append(is_wrong)
        return num_answers

    @property
    def figures(self) -> dict[str, object]:
        """What the guard says of the kind."""
        (figures,) = self.guard.report()
        return figures


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
def test_an_upper_bound_that_is_read_after_every_audit_seldom_ever_falls_below_the_rate(rate: float) -> None:
    rng, num_streams, num_misses = random.Random(1), 300, 0
    for _ in range(num_streams):
        num_errors = 0
        for num_audits in range(1, 160):
            num_errors += rng.random() < rate
            if upper_bound(num_errors, num_audits, 0.05) < rate:
                num_misses += 1
                break
    assert num_misses / num_streams <= MISS_PROBABILITY + 2 * sqrt(MISS_PROBABILITY / num_streams)


def test_an_upper_bound_falls_with_audits_that_agree_and_rises_with_errors() -> None:
    bounds = [upper_bound(0, n, 0.02) for n in range(400)]
    assert bounds[0] == 1.0
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[206] <= 0.02 < bounds[200]
    assert upper_bound(3, 3, 0.02) == 1.0
    assert upper_bound(0, 300, 0.02) < upper_bound(1, 300, 0.02) < upper_bound(30, 300, 0.02)
    assert upper_bound(30, 300, 0.02) > 0.1


@settings(max_examples=60, deadline=None)
@given(
    rates=st.lists(st.sampled_from([0.0, 0.002, 0.01, 0.03, 0.1, 0.5, 1.0]), min_size=3, max_size=3),
    max_error=st.sampled_from([0.01, 0.02, 0.1]),
    lag=st.integers(0, 20),
    idle=st.sampled_from([0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_wrong_answers_are_never_more_than_the_bound_allows(
    rates: list[float], max_error: float, lag: int, idle: float, seed: int
) -> None:
    traffic = Traffic(max_error, seed, lag, idle)
    traffic.serve(2_000, dict(zip(ALPHAS, rates, strict=True)))
    num_wrong = 0
    for number, is_wrong in enumerate(traffic.errors, start=1):
        num_wrong += is_wrong
        allowed = max_error * number
        assert num_wrong <= allowed + 4 * sqrt(allowed) + 3  # chance moves the count around what is charged


def test_the_first_answers_are_exact_and_self_contained_documents_are_soon_recomputed_no_more() -> None:
    traffic = Traffic()
    traffic.serve(1_000, SELF_CONTAINED)
    assert traffic.alphas[:50] == [None] * 50
    assert set(traffic.alphas[50:]) == {0.0}
    assert traffic.figures["error_bound"] <= 0.02  # type: ignore[operator]
    assert traffic.figures["num_audits"] < 500  # type: ignore[operator]


def test_the_smallest_alpha_that_keeps_the_bound_is_found() -> None:
    traffic = Traffic()
    traffic.serve(6_000, DEPENDENT)
    assert traffic.alphas[-500:].count(ALPHAS[-1]) > 400
    assert sum(traffic.errors) <= 0.02 * 6_000


@pytest.mark.parametrize("seed", range(20))
def test_dependent_documents_that_are_mixed_in_halfway_are_found_out_within_thirty_audits(seed: int) -> None:
    traffic = Traffic(seed=seed)
    traffic.serve(1_500, SELF_CONTAINED)
    num_audits = int(traffic.figures["num_audits"])  # type: ignore[call-overload]
    half = {alpha: rate / 2 for alpha, rate in DEPENDENT.items()}
    traffic.serve(5_000, half, until=lambda: traffic.figures["error_bound"] == 1.0)
    assert int(traffic.figures["num_audits"]) - num_audits <= 30  # type: ignore[call-overload]
    last = len(traffic.alphas)
    traffic.serve(500, half)
    assert traffic.alphas[last:].count(0.0) == 0
    assert sum(traffic.errors) <= 0.02 * len(traffic.errors)


def test_reuse_stops_by_itself_and_is_tried_again_with_few_answers() -> None:
    traffic = Traffic()
    traffic.serve(1, HOPELESS)
    traffic.serve(3_000, HOPELESS, until=lambda: bool(traffic.figures["is_stopped"]))
    assert traffic.figures["is_stopped"]
    num_before = sum(alpha is not None for alpha in traffic.alphas)
    traffic.serve(5_000, HOPELESS)
    assert num_before <= 20
    assert 0 < sum(alpha is not None for alpha in traffic.alphas) - num_before <= 40
    traffic.serve(10_000, SELF_CONTAINED)
    assert traffic.alphas[-1] is not None, "the documents are others now"


def test_without_audits_hardly_any_answer_is_approximate() -> None:
    traffic = Traffic(idle=0.0)
    traffic.serve(2_000, SELF_CONTAINED)
    assert sum(alpha is not None for alpha in traffic.alphas) <= 0.02 * 2_000
    sampled = Traffic()
    for _ in range(200):
        answer = sampled.guard.choose("k", can_audit=False)
        assert answer.alpha is None
        sampled.guard.on_answered(answer, is_shown=True, is_approximate=False)


def test_an_answer_without_stored_kv_costs_nothing_and_one_that_is_not_shown_pays_for_none() -> None:
    guard = ErrorGuard(0.5, (0.0,), lambda: 0.0)
    for _ in range(2):
        guard.on_answered(guard.choose("k", can_audit=True), is_shown=True, is_approximate=False)
    for _ in range(3):
        reused = guard.choose("k", can_audit=True)
        assert reused.alpha == 0.0
        guard.on_answered(reused, is_shown=False, is_approximate=False)
    guard.on_answered(guard.choose("k", can_audit=True), is_shown=False, is_approximate=True)
    assert guard.choose("k", can_audit=True).alpha is None, "the budget is spent until an audit gives it back"
    guard.on_audited(reused, is_equal=True)
    assert guard.choose("k", can_audit=True).alpha == 0.0


def test_each_of_a_limited_number_of_kinds_has_evidence_of_its_own() -> None:
    guard = ErrorGuard(0.5, (0.0,), lambda: 0.0)
    for number in range(2 * MAX_KINDS):
        guard.on_answered(guard.choose(f"k{number}", can_audit=True), is_shown=True, is_approximate=False)
    figures = {each["kind"]: each for each in guard.report()}
    assert len(figures) == MAX_KINDS + 1
    assert figures["k0"]["num_answers"] == 1
    assert figures[OTHER_KIND]["num_answers"] == MAX_KINDS
    guard.forget()
    assert guard.report() == []
