"""The rate at which conversations continue, by turn number, the tool that is called, and time since the turn."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

_NUM_NUMBERS: Final = 4
"""Number of turns with separate statistics; the last covers all later turns."""
_MAX_TOOLS: Final = 16
"""Number of tools with separate statistics; the last covers all later names."""
_BINS: Final = (1, *(num_requests for i in range(1, 17) for num_requests in (2**i, 3 * 2 ** (i - 1))), 2**17)
"""Where the bins of think times begin, in requests, and where the last one ends; it has all that are longer."""
_NUM_BINS: Final = len(_BINS) - 1
_WIDTHS: Final = tuple(end - begin for begin, end in pairwise(_BINS))
_MIDDLES: Final = tuple((begin + end) / 2 for begin, end in pairwise(_BINS))
_PRIOR: Final = 4.0
"""Weight of the estimate of the previous turn, or of turns whose tool is any, in turns. Nothing is expected before a
second turn."""
_WINDOW: Final = 4096
"""Turns after which all that was counted counts half."""
_TURNS_PER_NEW: Final = 64
"""Counted turns for one new turn or return that the estimates leave out."""
_LEAST_LIKELY: Final = 0.05
_LEAST_RETURNS: Final = 0.25
"""Returns added to each bin of think times, in which none may have been seen yet."""
_LEAST_LEFT: Final = 1e-6


@dataclass(slots=True)
class Turn:
    """A turn of a conversation: its number from 1 on, the tree's request count at its answer, and its kind.

    ``kind`` names the statistics by which it ranks; see :class:`NextTurnModel`.
    """

    number: int
    num_requests: int
    kind: int
    has_returned: bool = False


class NextTurnModel:
    """Learns which conversations continue, and how soon.

    Reuse differs by the number of the turn more than by anything else that an engine sees ("KVCache Cache in the Wild",
    USENIX ATC 2025). Think times are counted in requests of all clients, as in all policies: how many others come in
    between decides whether the history is still cached. Counts fade, since traffic changes.

    A turn may still continue, however long it has waited. So the returns of each bin are divided by the turns that are
    old enough for it, as in a life table; others do not count as ended.

    A turn that calls a tool continues when the tool ends. Where clients name tools, each has a kind of its own, and so
    have turns of each number without one. Until their turns are many, their estimates are near those of all turns::

        kind 1 to 4      all turns, by number: as long as it is unknown whether one calls a tool, and which
             5 to 8      turns without a tool, by number
             9 to 24     turns by the tool that they call
    """

    def __init__(self) -> None:
        num_kinds = 1 + 2 * _NUM_NUMBERS  # there is no kind 0
        self._tools: dict[str, int] = {}
        self._num_returned = [[0.0] * _NUM_BINS for _ in range(num_kinds)]
        self._num_aged = [[0.0] * _NUM_BINS for _ in range(num_kinds)]
        self._ageing: list[deque[Turn]] = [deque() for _ in range(_NUM_BINS)]
        """Turns by the first bin whose middle they have not reached."""
        self._num_turns = self._num_new = 0
        self._likely = [0.0] * (1 + _NUM_NUMBERS)
        self._rates = [[0.0] * _NUM_BINS] * num_kinds

    def refresh(self) -> None:
        """Compute the estimates again, if the counts have grown by enough to change them; once a request.

        All are computed here, so that the time of an eviction within a request does not change what it evicts.
        """
        if self._num_new <= self._num_turns // _TURNS_PER_NEW:
            return
        self._num_new = 0
        by_number = slice(1, 1 + _NUM_NUMBERS)
        num_returned, num_aged = _sums(self._num_returned[by_number]), _sums(self._num_aged[by_number])
        shares = _think_time_shares(num_returned, num_aged)
        likely = 0.0
        for kind in range(1, 1 + _NUM_NUMBERS):
            likely = _likely(self._num_returned[kind], self._num_aged[kind], shares, likely)
            self._likely[kind] = likely
            self._rates[kind] = self._rates[kind + _NUM_NUMBERS] = _highest_rates(shares, likely)
        if self._tools:
            likely_at_all = _likely(num_returned, num_aged, shares, 0.0)
            for kind in range(1 + _NUM_NUMBERS, len(self._rates)):
                likely = likely_at_all if kind > 2 * _NUM_NUMBERS else self._likely[kind - _NUM_NUMBERS]
                self._rates[kind] = self._rates_near([likely * share for share in shares], kind)

    def kind_of(self, number: int, tool: str | None = None) -> int:
        """Return the kind of a turn with this number that calls ``tool``, or None."""
        if tool is None:
            return kind_by_number(number) + (_NUM_NUMBERS if self._tools else 0)
        if (kind := self._tools.get(tool)) is not None:
            return kind
        if len(self._tools) < _MAX_TOOLS:
            self._tools[tool] = len(self._rates)
            self._rates.append(self._rates[kind_by_number(number)])
            for rows in (self._num_returned, self._num_aged):
                rows.append([0.0] * _NUM_BINS)
        return self._tools.get(tool, len(self._rates) - 1)

    def on_turn(self, turn: Turn) -> None:
        """Count a turn after which a conversation may go on; its kind may still change."""
        self._num_turns += 1
        if self._num_turns >= _WINDOW:
            self._num_turns //= 2
            for counts in (*self._num_returned, *self._num_aged):
                counts[:] = [count / 2 for count in counts]
        self._ageing[0].append(turn)
        for bin_, turns in enumerate(self._ageing):
            while turns and turns[0].num_requests + _MIDDLES[bin_] <= turn.num_requests:
                aged = turns.popleft()
                _count(self._num_aged, aged, bin_)
                if bin_ + 1 < _NUM_BINS:
                    self._ageing[bin_ + 1].append(aged)
        self._num_new += 1

    def on_return(self, turn: Turn, num_requests: int) -> None:
        """Record that a conversation continued after ``turn``, ``num_requests`` requests later."""
        _count(self._num_returned, turn, _bin(num_requests))
        self._num_new += 1

    def probability(self, number: int) -> float:
        """Return the probability that a conversation continues after a turn with this number."""
        return self._likely[kind_by_number(number)]

    def is_likely(self, number: int) -> bool:
        """Return whether the KV of a turn with this number should be stored below the GPU."""
        return self.probability(number) >= _LEAST_LIKELY

    def rate(self, kind: int, num_requests: int) -> float:
        """Return the expected returns per request, ``num_requests`` requests after a turn of ``kind``.

        It is the most that the history can earn per request in the cache from now on: the highest mean hazard rate of
        the think times so far, over all ends (the Gittins index). So what has waited for some of a usual think time
        ranks above a turn that has just ended, and what has waited for longer ranks lower and lower.
        """
        return self._rates[kind][_bin(num_requests)]

    def _rates_near(self, expected: Sequence[float], kind: int) -> list[float]:
        """Return the rates of a kind; the prior ``expected`` is the probability of a return by bin."""
        returns = [
            (count + _PRIOR * prior) / (num_old + _PRIOR)
            for count, num_old, prior in zip(self._num_returned[kind], self._num_aged[kind], expected, strict=True)
        ]
        likely = sum(returns) or 1.0
        return _highest_rates([each / likely for each in returns], min(likely, 1.0))


def kind_by_number(number: int) -> int:
    """Return the kind of all turns with this number; 0 for 0."""
    return min(number, _NUM_NUMBERS)


def _count(rows: Sequence[list[float]], turn: Turn, bin_: int) -> None:
    """Count a turn in a bin, for all turns with its number and for its own kind."""
    by_number = kind_by_number(turn.number)
    rows[by_number][bin_] += 1.0
    if turn.kind != by_number:
        rows[turn.kind][bin_] += 1.0


def _sums(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _think_time_shares(num_returned: Sequence[float], num_aged: Sequence[float]) -> list[float]:
    """Return the share of think times in each bin, of all turns that continue, from counts by bin."""
    shares = [
        (count + _LEAST_RETURNS) / (num_old + _PRIOR) if num_old else 0.0
        for count, num_old in zip(num_returned, num_aged, strict=True)
    ]
    total = sum(shares) or 1.0
    return [share / total for share in shares]


def _likely(num_returned: Sequence[float], num_aged: Sequence[float], shares: Sequence[float], prior: float) -> float:
    """Return the probability that a conversation continues, from counts by bin, near ``prior`` while they are few."""
    num_old: float = sum(map(operator.mul, shares, num_aged))
    return min((sum(num_returned) + _PRIOR * prior) / (num_old + _PRIOR), 1.0)


def _highest_rates(shares: Sequence[float], likely: float) -> list[float]:
    """Return the highest mean rate of returns from each bin of think times on, over all later ends.

    Args:
        shares: of returns, by bin; their sum is 1.
        likely: the probability that a conversation continues.
    """
    num_left = 1.0
    bins: list[tuple[float, float]] = []  # returns, requests at risk
    for share, width in zip(shares, _WIDTHS, strict=True):
        returned = likely * share
        bins.append((returned, width * max(num_left - returned / 2.0, _LEAST_LEFT)))
        num_left -= returned
    rates: list[float] = []
    pools: list[tuple[float, float]] = []
    for returned, at_risk in reversed(bins):
        while pools and pools[-1][0] * at_risk > returned * pools[-1][1]:
            later = pools.pop()
            returned, at_risk = returned + later[0], at_risk + later[1]
        pools.append((returned, at_risk))
        rates.append(returned / at_risk)
    return rates[::-1]


def _bin(num_requests: int) -> int:
    return min(max(bisect_right(_BINS, num_requests) - 1, 0), _NUM_BINS - 1)
