"""What is expected of a conversation after a turn, by its number and by the tool that it calls, and how soon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import pytest

from ragcache_core.policy.returning import NextTurnModel, Turn


def observed(
    shares: Mapping[int, float], think_requests: Callable[[], int] = lambda: 100, *, num_turns: int = 500
) -> NextTurnModel:
    """Return what is known when the last of that many turns of each number ends, one a request, if a share of them goes
    on."""
    returning = NextTurnModel()
    waiting: list[tuple[int, Turn]] = []
    for now in range(num_turns * len(shares)):
        for _, back in [each for each in waiting if each[0] == now]:
            returning.on_return(back, now - back.num_requests)
        turn = ended(returning, [*shares][now % len(shares)], now)
        number = now // len(shares)
        if int((number + 1) * shares[turn.number]) > int(number * shares[turn.number]):
            waiting.append((now + think_requests(), turn))
        returning.refresh()
    return returning


def ended(returning: NextTurnModel, number: int, now: int, tool: str | None = None) -> Turn:
    """Return a turn that has ended, and is counted."""
    turn = Turn(number, now, returning.kind_of(number, tool))
    returning.on_turn(turn)
    return turn


def with_tools(takes: Mapping[str | None, Callable[[], int] | None], num_turns: int = 2000) -> NextTurnModel:
    """Return what is known after turns that call each tool in rotation, by requests until it returns; None: never."""
    returning, backs = NextTurnModel(), list[tuple[int, Turn]]()
    for now in range(num_turns):
        for _, back in [each for each in backs if each[0] == now]:
            returning.on_return(back, now - back.num_requests)
        tool = [*takes][now % len(takes)]
        turn = ended(returning, 1, now, tool)
        if (requests := takes[tool]) is not None:
            backs.append((now + requests(), turn))
        returning.refresh()
    return returning


def test_the_first_conversation_that_goes_on_makes_every_turn_likely() -> None:
    returning = NextTurnModel()
    returning.on_return(ended(returning, 1, 1), 7)
    ended(returning, 2, 8)
    returning.refresh()
    assert returning.is_likely(1)
    assert returning.is_likely(2)


def test_shares_are_learned_for_each_number_of_a_turn() -> None:
    returning = observed({1: 0.2, 2: 0.5, 3: 0.8})
    assert [returning.probability(turn) for turn in (1, 2, 3)] == pytest.approx([0.2, 0.5, 0.8], abs=0.03)


def test_turns_that_may_still_go_on_do_not_count_as_ended() -> None:
    """Half of all turns go on, but of those of the last 2,000 requests, which are all, only half of that have yet."""
    dice = Random(1)
    returning = observed({1: 0.5}, lambda: dice.randint(1, 2000), num_turns=2000)
    assert returning.probability(1) == pytest.approx(0.5, rel=0.15)


def test_the_rate_is_that_of_the_think_times_that_were_seen() -> None:
    assert NextTurnModel().rate(1, 5) == 0.0, "nothing is known"
    dice = Random(1)
    returning = observed({1: 0.4}, lambda: 1 + int(dice.expovariate(1 / 20)), num_turns=2000)
    assert returning.rate(1, 8) == pytest.approx(0.4 / 20, rel=0.3), "two in five of all come back in 20 requests"
    assert returning.rate(1, 1500) < returning.rate(1, 8) / 20, "what waits as long has ended"
    assert returning.rate(1, 0) == returning.rate(1, 1)


def test_a_history_ranks_the_higher_the_nearer_its_next_turn_is() -> None:
    """Clients that wait at least a minute: a turn that has just ended has to stay in the cache for all of it."""
    dice = Random(1)
    returning = observed({1: 0.5}, lambda: dice.randint(100, 127), num_turns=1500)
    assert returning.rate(1, 2) == pytest.approx(0.5 / 112, rel=0.2), "one in two within about 128 requests"
    rates = [returning.rate(1, age) for age in (2, 40, 70, 100)]
    assert rates == sorted(rates)
    assert rates[-1] > 2 * rates[0]
    assert returning.rate(1, 200) < rates[0] / 5


def test_later_turns_that_go_on_more_often_have_the_higher_rate() -> None:
    rising = observed({turn: 0.2 * turn for turn in range(1, 5)})
    rates = [rising.rate(turn, 10) for turn in range(1, 5)]
    assert rates == sorted(rates)
    assert rates[3] == pytest.approx(4 * rates[0], rel=0.3)


def test_what_was_learned_gives_way_to_what_happens_now() -> None:
    returning = observed({1: 0.9}, num_turns=1000)
    for now in range(1000, 30_000):
        ended(returning, 1, now)
        returning.refresh()
    assert not returning.is_likely(1)


def test_a_turn_ranks_by_the_time_that_its_tool_takes() -> None:
    dice = Random(1)
    known = with_tools({"search": lambda: dice.randint(2, 4), "build": lambda: dice.randint(150, 250)})
    search, build, number = known.kind_of(1, "search"), known.kind_of(1, "build"), 1
    assert known.rate(search, 1) > 10 * known.rate(build, 1), "it is back at once"
    assert known.rate(search, 1) > known.rate(number, 1) > known.rate(build, 1), "an unknown tool may be either"
    assert known.rate(build, 150) > 2 * known.rate(build, 1), "it is due"
    assert known.rate(search, 150) < known.rate(search, 1) / 20, "it should be back for long"


def test_turns_without_a_tool_are_apart_once_others_name_theirs() -> None:
    assert NextTurnModel().kind_of(2) == 2
    known = with_tools({"search": lambda: 3, None: None})
    assert known.rate(known.kind_of(1), 1) < known.rate(known.kind_of(1, "search"), 1) / 20
    assert known.probability(1) == pytest.approx(0.5, abs=0.05), "it is not known yet whether a turn will call one"


def test_a_tool_that_is_new_is_taken_for_any_turn_and_one_beyond_the_limit_for_the_last() -> None:
    known = with_tools({"search": lambda: 3})
    new = known.kind_of(1, "new")
    assert known.rate(new, 1) == known.rate(1, 1) > 0.0, "at once"
    ended(known, 1, 2000, "new")
    for now in range(2001, 2101):
        ended(known, 1, now, "search")
    known.refresh()
    assert known.rate(new, 1) == pytest.approx(known.rate(1, 1), rel=0.3)
    kinds = {known.kind_of(1, f"tool {number}") for number in range(100)}
    assert len(kinds) == 14
    assert known.kind_of(1, "one more") == max(kinds)
