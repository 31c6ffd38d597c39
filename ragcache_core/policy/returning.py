"""The rate at which conversations continue, by turn number and time since the turn."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

NUM_KINDS: Final = 4
"""Number of turns with separate statistics; the last covers all later turns."""
_BINS: Final = (1, *(num_requests for i in range(1, 17) for num_requests in (2**i, 3 * 2 ** (i - 1))), 2**17)
"""Where the bins of think times begin, in requests, and where the last one ends; it has all that are longer."""
_NUM_BINS: Final = len(_BINS) - 1
_WIDTHS: Final = tuple(end - begin for begin, end in pairwise(_BINS))
_MIDDLES: Final = tuple((begin + end) / 2 for begin, end in pairwise(_BINS))
_PRIOR: Final = 4.0
"""Weight of the previous turn's estimate, in turns. Nothing is expected before a second turn."""
_WINDOW: Final = 4096
"""Turns after which all that was counted counts half."""
_TURNS_PER_NEW: Final = 64
"""Counted turns for one new turn or return that the estimates leave out."""
_LEAST_LIKELY: Final = 0.05
_LEAST_RETURNS: Final = 0.25
"""Returns added to each bin of think times, in which none may have been seen yet."""
_LEAST_LEFT: Final = 1e-6


class NextTurnModel:
    """Learns which conversations continue, and how soon.

    Reuse differs by the number of the turn more than by anything else that an engine sees ("KVCache Cache in the Wild",
    USENIX ATC 2025). Think times are counted in requests of all clients, as in all policies: how many others come in
    between decides whether the history is still cached. Counts fade, since traffic changes.

    A turn may still continue, however long it has waited. So the returns of each bin are divided by the turns that are
    old enough for it, as in a life table; others do not count as ended.
    """

    def __init__(self) -> None:
        self._num_returned = [0.0] * NUM_KINDS
        self._think_times = [0.0] * _NUM_BINS
        self._num_aged = [[0.0] * _NUM_BINS for _ in range(NUM_KINDS)]
        self._ageing: list[deque[tuple[int, int]]] = [deque() for _ in range(_NUM_BINS)]
        """Turns, as request and kind, by the first bin whose middle they have not reached."""
        self._num_turns = self._num_new = 0
        self._likely = [0.0] * NUM_KINDS
        self._rates = [[0.0] * _NUM_BINS] * NUM_KINDS

    def refresh(self) -> None:
        """Compute the estimates again, if the counts have grown by enough to change them; once a request.

        All are computed here, so that the time of an eviction within a request does not change what it evicts.
        """
        if self._num_new <= self._num_turns // _TURNS_PER_NEW:
            return
        self._num_new = 0
        shares = self._think_time_shares()
        likely = 0.0
        for kind, num_aged in enumerate(self._num_aged):
            num_old = sum(map(operator.mul, shares, num_aged))
            likely = min((self._num_returned[kind] + _PRIOR * likely) / (num_old + _PRIOR), 1.0)
            self._likely[kind], self._rates[kind] = likely, _highest_rates(shares, likely)

    def on_turn(self, turn: int, num_requests: int) -> None:
        """Count a turn (the first is 1) at the request ``num_requests``, after which a conversation may go on."""
        self._num_turns += 1
        if self._num_turns >= _WINDOW:
            self._num_turns //= 2
            for counts in (self._num_returned, self._think_times, *self._num_aged):
                counts[:] = [count / 2 for count in counts]
        self._ageing[0].append((num_requests, _kind(turn)))
        for bin_, turns in enumerate(self._ageing):
            while turns and turns[0][0] + _MIDDLES[bin_] <= num_requests:
                aged = turns.popleft()
                self._num_aged[aged[1]][bin_] += 1.0
                if bin_ + 1 < _NUM_BINS:
                    self._ageing[bin_ + 1].append(aged)
        self._num_new += 1

    def on_return(self, turn: int, num_requests: int) -> None:
        """Record that a conversation continued after ``turn``, ``num_requests`` requests later."""
        self._num_returned[_kind(turn)] += 1.0
        self._think_times[_bin(num_requests)] += 1.0
        self._num_new += 1

    def probability(self, turn: int) -> float:
        """Return the probability that a conversation continues after ``turn``."""
        return self._likely[_kind(turn)]

    def is_likely(self, turn: int) -> bool:
        """Return whether the KV of ``turn`` should be stored below the GPU."""
        return self.probability(turn) >= _LEAST_LIKELY

    def rate(self, turn: int, num_requests: int) -> float:
        """Return the expected returns per request, ``num_requests`` requests after ``turn``.

        It is the most that the history can earn per request in the cache from now on: the highest mean hazard rate of
        the think times so far, over all ends (the Gittins index). So what has waited for some of a usual think time
        ranks above a turn that has just ended, and what has waited for longer ranks lower and lower.
        """
        return self._rates[_kind(turn)][_bin(num_requests)]

    def _think_time_shares(self) -> list[float]:
        """Return the share of think times in each bin, of all turns that continue."""
        shares = [
            (count + _LEAST_RETURNS) / (num_aged + _PRIOR) if num_aged else 0.0
            for count, num_aged in zip(self._think_times, map(sum, zip(*self._num_aged, strict=True)), strict=True)
        ]
        total = sum(shares) or 1.0
        return [share / total for share in shares]


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


def _kind(turn: int) -> int:
    return min(turn, NUM_KINDS) - 1


def _bin(num_requests: int) -> int:
    return min(max(bisect_right(_BINS, num_requests) - 1, 0), _NUM_BINS - 1)
