"""Whether starts are worth it at all: what is not hidden with them, beside whole searches without."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ragcache_core.speculation import StartsTrial


def searched(
    trial: StartsTrial, count: int, with_start: Callable[[], tuple[float, float]], alone_s: float
) -> list[bool]:
    """Let so many searches run, each as long as it takes then; return which of them might start something."""
    turns = []
    for _ in range(count):
        turns.append(trial.allows_next())
        if turns[-1]:
            trial.record_with(*with_start())
        else:
            trial.record_without(alone_s)
    return turns


def slowed() -> tuple[float, float]:
    """Return how long a search takes with a start on shared processors, and what is not hidden of it."""
    return 0.107, 0.082


@pytest.mark.parametrize("unhidden_s", [0.0, 0.01, 0.05])
def test_while_half_of_a_search_is_hidden_every_search_starts(unhidden_s: float) -> None:
    assert all(searched(StartsTrial(), 50, lambda: (0.1, unhidden_s), 0.1))


def test_where_starts_make_searches_longer_than_they_hide_fifteen_of_sixteen_go_without() -> None:
    trial = StartsTrial()
    assert searched(trial, 3, slowed, 0.028) == [True] * 3
    assert searched(trial, 5, slowed, 0.028) == [False, True, False, True, False]
    assert sum(searched(trial, 160, slowed, 0.028)) == 10


def test_where_little_is_hidden_but_nothing_lost_fifteen_of_sixteen_start() -> None:
    trial = StartsTrial()
    searched(trial, 8, lambda: (0.1, 0.07), 0.1)
    assert sum(searched(trial, 160, lambda: (0.1, 0.07), 0.1)) == 150


def test_what_is_hidden_of_a_longer_search_is_held_against_what_a_search_takes_alone() -> None:
    trial = StartsTrial()
    searched(trial, 200, slowed, 0.028)
    assert sum(searched(trial, 160, lambda: (0.107, 0.05), 0.028)) == 10, "half of it is hidden, and it is late"


def test_what_has_changed_is_noticed_whichever_way() -> None:
    trial = StartsTrial()
    searched(trial, 40, slowed, 0.028)
    searched(trial, 160, lambda: (0.1, 0.01), 0.1)  # at night the engine is idle
    assert all(searched(trial, 40, lambda: (0.1, 0.01), 0.1))
    searched(trial, 160, slowed, 0.028)
    assert sum(searched(trial, 160, slowed, 0.028)) == 10


def test_the_first_searches_of_all_which_are_slow_decide_nothing() -> None:
    trial = StartsTrial()
    searched(trial, 1, lambda: (5.0, 4.9), 0.1)
    assert all(searched(trial, 100, lambda: (0.1, 0.02), 0.1))


def test_a_search_that_was_quick_by_chance_does_not_decide() -> None:
    trial, dice = StartsTrial(), random.Random(0)

    def noisy() -> tuple[float, float]:
        return 0.107, 0.082 * dice.choice((0.3, 0.8, 1.3))

    searched(trial, 10, noisy, 0.028)
    assert sum(searched(trial, 1600, noisy, 0.028)) < 150
