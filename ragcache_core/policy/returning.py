"""The rate at which conversations continue, by turn number and time since the turn."""

from __future__ import annotations

from typing import Final

NUM_KINDS: Final = 8
"""Number of turns with separate statistics; the last covers all later turns."""
_NUM_BINS: Final = 24
"""Think times of 2^i requests and more, below 2^(i + 1), are in bin i; the last has all that are longer."""
_PRIOR: Final = 4.0
"""Weight of the previous turn's estimate, in turns. Nothing is expected before a second turn."""
_WINDOW: Final = 1024.0
"""Turns of a kind after which all that was counted of it counts half."""
_LEAST_LIKELY: Final = 0.05
_LEAST_RETURNS: Final = 0.5
"""Returns added to each bin of think times, in which none may have been seen yet."""
_LEAST_LEFT: Final = 1e-6


class NextTurnModel:
    """Learns which conversations continue, and how soon.

    Reuse differs by the number of the turn more than by anything else that an engine sees ("KVCache Cache in the Wild",
    USENIX ATC 2025). Think times are counted in requests of all clients, as in all policies: how many others come in
    between decides whether the history is still cached. Counts fade, since traffic changes.
    """

    def __init__(self) -> None:
        self._num_ended = [0.0] * NUM_KINDS
        self._num_returned = [0.0] * NUM_KINDS
        self._think_times = [0.0] * _NUM_BINS
        self._rates: dict[int, list[float]] = {}

    def on_turn(self, turn: int) -> None:
        """Count a turn (the first is 1) after which a conversation may go on."""
        kind = _kind(turn)
        self._num_ended[kind] += 1.0
        if self._num_ended[kind] >= _WINDOW:
            self._num_ended[kind] /= 2
            self._num_returned[kind] /= 2
        self._rates.clear()

    def on_return(self, turn: int, num_requests: int) -> None:
        """Record that a conversation continued after ``turn``, ``num_requests`` requests later."""
        self._num_returned[_kind(turn)] += 1.0
        self._think_times[_bin(num_requests)] += 1.0
        if sum(self._think_times) >= 2 * _WINDOW:
            self._think_times = [count / 2 for count in self._think_times]
        self._rates.clear()

    def probability(self, turn: int) -> float:
        """Return the probability that a conversation continues after ``turn``."""
        likely = 0.0
        for kind in range(_kind(turn) + 1):
            num_returned = self._num_returned[kind] + _PRIOR * likely
            likely = min(num_returned / (self._num_ended[kind] + _PRIOR), 1.0)
        return likely

    def is_likely(self, turn: int) -> bool:
        """Return whether the KV of ``turn`` should be stored below the GPU."""
        return self.probability(turn) >= _LEAST_LIKELY

    def rate(self, turn: int, num_requests: int) -> float:
        """Return the expected returns per request, ``num_requests`` requests after ``turn``.

        It is the hazard rate of the think times so far, fitted so that it never increases with time: the longer a
        conversation waits, the more likely it has ended.
        """
        kind = _kind(turn)
        if kind not in self._rates:
            self._rates[kind] = self._hazard_rates(self.probability(turn))
        return self._rates[kind][_bin(num_requests)]

    def _hazard_rates(self, likely: float) -> list[float]:
        """Return the rate in each bin of think times, if a conversation continues with probability ``likely``.

        Adjacent bins whose rates increase are pooled, which is the isotonic fit of greatest likelihood.
        """
        num_returns = sum(self._think_times)
        if not num_returns:
            return [0.0] * _NUM_BINS
        pools: list[tuple[float, float, int]] = []  # returns, requests at risk, bins
        num_left = 1.0
        for bin_, count in enumerate(self._think_times):
            returned = likely * (count + _LEAST_RETURNS) / (num_returns + _LEAST_RETURNS * _NUM_BINS)
            pool = returned, 2.0**bin_ * max(num_left - returned / 2.0, _LEAST_LEFT), 1
            num_left -= returned
            while pools and pools[-1][0] / pools[-1][1] <= pool[0] / pool[1]:
                before = pools.pop()
                pool = before[0] + pool[0], before[1] + pool[1], before[2] + pool[2]
            pools.append(pool)
        return [returned / at_risk for returned, at_risk, num_bins in pools for _ in range(num_bins)]


def _kind(turn: int) -> int:
    return min(turn, NUM_KINDS) - 1


def _bin(num_requests: int) -> int:
    return min(max(num_requests, 1).bit_length(), _NUM_BINS) - 1
