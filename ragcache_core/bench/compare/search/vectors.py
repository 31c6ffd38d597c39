"""Vectors of documents that lie in topics, topics in clusters, and of questions near to documents: all made by seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TOPIC_SIZE = 8
"""Documents of one topic, which a question about any of them may find."""
_PART = 8_192
"""Documents that are drawn together; a multiple of a topic."""
_TOPIC_DEVIATION, _DOCUMENT_DEVIATION = 0.6, 0.2
_NUM_PROBES, _LEAST_DEVIATIONS = 8_192, 0.2
_DOCUMENTS, _CENTRES, _QUESTIONS = range(3)

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DocumentVectors:
    """``count`` vectors of ``dim`` numbers: the same ones each time, and the beginning of those of a larger corpus with
    as many clusters.
    """

    count: int
    dim: int

    def draw(self, start: int, stop: int) -> Vectors:
        """Return the vectors of the documents from ``start`` to ``stop``: [stop - start, dim]."""
        centres = self._centres()
        parts = [self._part(number, centres) for number in range(start // _PART, math.ceil(stop / _PART))]
        first = start // _PART * _PART
        drawn: Vectors = np.concatenate(parts)[start - first : stop - first]
        return drawn

    def questions(self, about: NDArray[np.int64], seed: int, primary_first: float) -> Vectors:
        """Return a question about each of the documents ``about``, ``[n, dim]``: near to it, so that among its topic
        it is the nearest in about ``primary_first`` of the cases.
        """
        rng = np.random.default_rng((_QUESTIONS, seed))
        noise = rng.standard_normal((len(about), self.dim), dtype=np.float32) * self._noise(primary_first)
        found = np.empty_like(noise)
        for part in np.unique(about // _PART):
            here = about // _PART == part
            found[here] = self._part(int(part), self._centres())[about[here] - part * _PART]
        near: Vectors = found + noise
        return near

    def _noise(self, primary_first: float) -> np.float32:
        """Return the deviation of a question's numbers: a neighbour is nearer where noise goes half the way to it."""
        apart = np.random.default_rng(0).standard_normal((_NUM_PROBES, TOPIC_SIZE))
        farthest = (apart[:, 1:].max(axis=1) - apart[:, 0]) / math.sqrt(2)
        half_way = _DOCUMENT_DEVIATION * math.sqrt(2 * self.dim) / 2
        return np.float32(half_way / max(float(np.quantile(farthest, primary_first)), _LEAST_DEVIATIONS))

    def _centres(self) -> Vectors:
        rng = np.random.default_rng(_CENTRES)
        centres: Vectors = rng.standard_normal((math.isqrt(self.count) or 1, self.dim), dtype=np.float32)
        return centres

    def _part(self, number: int, centres: Vectors) -> Vectors:
        rng = np.random.default_rng((_DOCUMENTS, number))
        num_topics = _PART // TOPIC_SIZE
        topics = centres[rng.integers(len(centres), size=num_topics)]
        topics = topics + np.float32(_TOPIC_DEVIATION) * rng.standard_normal(topics.shape, dtype=np.float32)
        apart = rng.standard_normal((_PART, self.dim), dtype=np.float32)
        drawn: Vectors = np.repeat(topics, TOPIC_SIZE, axis=0) + np.float32(_DOCUMENT_DEVIATION) * apart
        return drawn
