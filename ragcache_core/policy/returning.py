"""The probability that a conversation continues, by turn number, and its time to the next turn."""

from __future__ import annotations

from typing import Final

NUM_KINDS: Final = 8
"""Number of turns with separate statistics; the last covers all later turns."""
_NUM_BINS: Final = 24
"""Think times are counted in powers of two, the last bin has all that are longer."""
_PRIOR: Final = 4.0
"""Weight of the previous turn's estimate, in turns. Nothing is expected before a second turn."""
_WINDOW: Final = 1024.0
"""Turns of a kind after which all that was counted of it counts half."""
_LEAST_LIKELY: Final = 0.05
_MOST_USES: Final = 16.0


class NextTurnModel:
    """Learns which conversations continue, and how soon.

    Reuse differs by the number of the turn more than by anything else that an engine sees ("KVCache Cache in the Wild",
    USENIX ATC 2025). Think times are counted in requests of all clients, as in all policies: how many others come in
    between decides whether the history is still cached. Counts fade, since traffic changes.

    Attributes:
        think_requests: the median think time.
    """

    def __init__(self) -> None:
        self._num_ended = [0.0] * NUM_KINDS
        self._num_returned = [0.0] * NUM_KINDS
        self._think_times = [0.0] * _NUM_BINS
        self.think_requests = 1.0
        self._expected_turns = [0.0] * NUM_KINDS

    def on_turn(self, turn: int) -> None:
        """Count a turn (the first is 1) after which a conversation may go on."""
        kind = _kind(turn)
        self._num_ended[kind] += 1.0
        if self._num_ended[kind] >= _WINDOW:
            self._num_ended[kind] /= 2
            self._num_returned[kind] /= 2
        self._expect()

    def on_return(self, turn: int, num_requests: int) -> None:
        """Record that a conversation continued after ``turn``, ``num_requests`` requests later."""
        self._num_returned[_kind(turn)] += 1.0
        times = self._think_times
        times[min(num_requests.bit_length(), _NUM_BINS - 1)] += 1.0
        half, bin_ = sum(times) / 2, 0
        if half >= _WINDOW:
            self._think_times = [count / 2 for count in times]
        while (half := half - times[bin_]) > 0:
            bin_ += 1
        self.think_requests = max(2.0**bin_ * (1.0 + half / (2.0 * times[bin_])), 1.0)

    def probability(self, turn: int) -> float:
        """Return the probability that a conversation continues after ``turn``."""
        likely = 0.0
        for kind in range(_kind(turn) + 1):
            num_returned = self._num_returned[kind] + _PRIOR * likely
            likely = min(num_returned / (self._num_ended[kind] + _PRIOR), 1.0)
        return likely

    def expected_turns(self, turn: int) -> float:
        """Return the mean number of further turns after ``turn``."""
        return self._expected_turns[_kind(turn)]

    def is_likely(self, turn: int) -> bool:
        """Return whether the KV of ``turn`` should be stored below the GPU."""
        return self.probability(turn) >= _LEAST_LIKELY

    def _expect(self) -> None:
        likely = self.probability(NUM_KINDS)
        expected = self._expected_turns[-1] = min(likely / max(1.0 - likely, 1e-9), _MOST_USES)
        for turn in range(NUM_KINDS - 1, 0, -1):
            expected = self._expected_turns[turn - 1] = self.probability(turn) * (1.0 + expected)


def _kind(turn: int) -> int:
    return min(turn, NUM_KINDS) - 1
