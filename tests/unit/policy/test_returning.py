"""What is expected of a conversation after a turn, and how soon."""

from __future__ import annotations

from random import Random

import pytest

from ragcache_core.policy.returning import NextTurnModel


def observed(shares: dict[int, float], num_turns: int = 500, think_requests: int = 100) -> NextTurnModel:
    """Return the knowledge after that many turns of each number, when a share of them went on."""
    returning = NextTurnModel()
    for turn, share in shares.items():
        for i in range(num_turns):
            returning.on_turn(turn)
            if i < share * num_turns:
                returning.on_return(turn, think_requests)
    return returning


def test_the_first_conversation_that_goes_on_makes_every_turn_likely() -> None:
    returning = NextTurnModel()
    returning.on_turn(1)
    returning.on_return(1, 7)
    returning.on_turn(2)
    assert returning.is_likely(1)
    assert returning.is_likely(2)


def test_shares_are_learned_for_each_number_of_a_turn() -> None:
    returning = observed({1: 0.2, 2: 0.5, 3: 0.8})
    assert [returning.probability(turn) for turn in (1, 2, 3)] == pytest.approx([0.2, 0.5, 0.8], abs=0.01)


def test_the_rate_falls_with_time_from_the_think_times_that_were_seen() -> None:
    dice, returning = Random(1), NextTurnModel()
    assert returning.rate(1, 5) == 0.0, "nothing is known"
    for i in range(3000):
        returning.on_turn(1)
        if i % 2:
            returning.on_return(1, 1 + int(dice.expovariate(1 / 20)) if i % 10 else 5000)
    assert returning.rate(1, 8) == pytest.approx(0.5 * 0.8 / 20, rel=0.3), "two in five of all come back in 20 requests"
    assert returning.rate(1, 3000) < returning.rate(1, 8) / 20, "what waits as long has ended, or takes 5,000"
    rates = [returning.rate(1, age) for age in range(0, 20_000, 7)]
    assert rates == sorted(rates, reverse=True)
    assert returning.rate(1, 0) == returning.rate(1, 1)


def test_times_after_which_none_came_back_do_not_lower_the_rate_before_them() -> None:
    """Clients that wait at least a minute: an age of a few requests promises as much as the first possible return."""
    returning = NextTurnModel()
    for i in range(1000):
        returning.on_turn(1)
        if i % 2:
            returning.on_return(1, 100 + i % 28)
    young, ripe = returning.rate(1, 2), returning.rate(1, 120)
    assert young == ripe == pytest.approx(0.5 / 112, rel=0.2), "one in two within about 128 requests"
    assert returning.rate(1, 200) < ripe / 20


def test_later_turns_that_go_on_more_often_have_the_higher_rate() -> None:
    rising = observed({turn: 0.1 * turn for turn in range(1, 9)})
    rates = [rising.rate(turn, 10) for turn in range(1, 9)]
    assert rates == sorted(rates)
    assert rates[4] == pytest.approx(5 * rates[0], rel=0.2)


def test_what_was_learned_gives_way_to_what_happens_now() -> None:
    returning = observed({1: 0.9}, num_turns=1000)
    for _ in range(5000):
        returning.on_turn(1)
    assert not returning.is_likely(1)
