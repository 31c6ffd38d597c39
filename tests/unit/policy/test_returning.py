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


def test_turns_that_are_expected_are_those_of_all_to_come() -> None:
    shares = dict.fromkeys(range(1, 9), 0.5)
    returning = observed(shares)
    assert returning.expected_turns(1) == pytest.approx(1.0, rel=0.05), "1/2 + 1/4 + ..."
    assert returning.expected_turns(8) == pytest.approx(1.0, rel=0.05)
    rising = observed({turn: 0.1 * turn for turn in range(1, 9)})
    expected = [rising.expected_turns(turn) for turn in range(1, 9)]
    assert expected == sorted(expected)


def test_what_was_learned_gives_way_to_what_happens_now() -> None:
    returning = observed({1: 0.9}, num_turns=1000)
    for _ in range(5000):
        returning.on_turn(1)
    assert not returning.is_likely(1)


def test_the_median_think_time_is_found_within_a_power_of_two() -> None:
    dice, returning = Random(1), NextTurnModel()
    for _ in range(3000):
        returning.on_turn(1)
        returning.on_return(1, round(dice.lognormvariate(5.0, 1.0)))
    assert 148 / 1.5 < returning.think_requests < 148 * 1.5
    for _ in range(3000):
        returning.on_return(1, 9)
    assert 8 <= returning.think_requests < 16
