"""Find the chunks to which a question attends, layer by layer; others need no further recomputation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ragcache_core.errors import ConfigError


def gap_cut(descending: Sequence[float]) -> int:
    """Return the number of scores above the widest gap between neighbours; all if no gap is widest.

    Algorithm 1's lines 5 to 8 take the gap that adds most to the entropy of all gaps, with indices that leave the
    first one out. But ``-p log p`` is highest at ``p = 1/e``, not at 1: a gap that makes up 90 % of the spread adds
    less than one that makes up 10 %, so the clearest separations would be cut in the wrong place.
    """
    gaps = [above - below for above, below in itertools.pairwise(descending)]
    widest = max(gaps, default=0.0)
    return gaps.index(widest) + 1 if widest > 0.0 else len(descending)


class FocusedChunks:
    """Algorithm 1 of Cache-Craft (§3.2.2) as a state machine: reads each layer's attention, returns the focused chunks.

    The attention that the question pays to each chunk is summed over the layers so far (Eq. 15) and the chunks with
    high sums are cut off from the others. Once ``window`` layers one after the other cut off the same set, it is
    ``focused``, and tokens of other chunks need not be recomputed in later layers. If that never happens, all are.

    Raises:
        ConfigError: ``window`` is below 1.
    """

    def __init__(self, num_chunks: int, *, window: int = 3) -> None:
        if window < 1:
            raise ConfigError(f"window is {window!r}; it must be 1 or more layers")
        self._cumulated = [0.0] * num_chunks
        self._window = window
        self._candidates: frozenset[int] | None = None
        self._num_equal = 0
        self._num_layers = 0
        self._is_settled = False

    @property
    def focused(self) -> frozenset[int]:
        """The numbers of the focused chunks; all until settled."""
        if self._is_settled and self._candidates is not None:
            return self._candidates
        return frozenset(range(len(self._cumulated)))

    @property
    def is_settled(self) -> bool:
        """Whether the focus is final, so that later layers change nothing."""
        return self._is_settled

    @property
    def num_layers(self) -> int:
        """Number of layers until it settled, or so far (L*)."""
        return self._num_layers

    def observe(self, attention: Sequence[float]) -> frozenset[int]:
        """Process the next layer's attention of the question to each chunk, and return ``focused``.

        Raises:
            ValueError: not one number for each chunk.
        """
        if len(attention) != len(self._cumulated):
            raise ValueError(f"attention to {len(attention)} chunks of {len(self._cumulated)}")
        if self._is_settled:
            return self.focused
        self._num_layers += 1
        self._cumulated = [sum_ + mass for sum_, mass in zip(self._cumulated, attention, strict=True)]
        ranked = sorted(range(len(self._cumulated)), key=self._cumulated.__getitem__, reverse=True)
        high = frozenset(ranked[: gap_cut([self._cumulated[number] for number in ranked])])
        self._num_equal = self._num_equal + 1 if high == self._candidates else 1
        self._candidates = high
        self._is_settled = self._num_equal >= self._window
        return self.focused
