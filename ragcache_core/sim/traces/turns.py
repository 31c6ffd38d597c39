"""Requests as turns of conversations: how many each has, when they come, and which of them bring documents."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

MAX_TURNS = 64
_AT_ONCE = 1_024
_SHORTEST_THINK_S = 1.0


@dataclass(frozen=True, slots=True)
class Talk:
    """How conversations go on, and how many requests of all of them come in a second; see :func:`turns_in_time`."""

    goes_on: float
    persistence: float
    think_median_s: float
    think_sigma: float
    requests_per_s: float


Turn = tuple[float, int, int]
"""(time, number of the conversation, number of the turn from 0 on)."""


def turns_in_time(talk: Talk, num_requests: int, rng: np.random.Generator) -> list[Turn]:
    """Return the first ``num_requests`` turns of all conversations, sorted by time; fewer are the first of more.

    Conversations begin as a Poisson process. After turn n, from 1 on, one goes on with the probability
    ``1 - (1 - goes_on) * n ** -persistence``: who has asked often asks again. Think times, from turn to turn, are
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
    """Yield when each conversation begins, and its turns; they are drawn many at once, always as many."""
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
