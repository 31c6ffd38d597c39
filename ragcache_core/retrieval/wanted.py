"""What a search shall find: how many documents, which may be among them, how near, how different from each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ragcache_core.errors import ConfigError, SearchError
from ragcache_core.retrieval.base import Vectors
from ragcache_core.retrieval.filters import AllOf, AnyOf, FieldCondition, Not, Where, parse_filter
from ragcache_core.retrieval.selection import Mask
from ragcache_core.types import Document

Filter = Where | Mapping[str, Any] | Callable[[Document], bool]
"""An expression (``retrieval.filters``), the same as LangChain writes it, or a function of a document."""


@dataclass(frozen=True, slots=True)
class MMR:
    """Maximal marginal relevance: of the ``fetch_k`` best documents those that are near to the question and far from
    each other. With a ``lambda_mult`` of 1 only the first counts, with 0 only the second.

    Raises:
        ConfigError: a value that cannot work.
    """

    fetch_k: int = 20
    lambda_mult: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.fetch_k, bool) or not isinstance(self.fetch_k, int) or self.fetch_k < 1:
            raise ConfigError(f"fetch_k is {self.fetch_k!r}: give a whole number of at least 1")
        if not _is_number(self.lambda_mult) or not 0 <= self.lambda_mult <= 1:
            raise ConfigError(
                f"lambda_mult is {self.lambda_mult!r}: give a number from 0 (different documents) to 1 (near ones)"
            )

    def choose(self, question: Vectors, vectors: Vectors, k: int) -> list[int]:
        """Return which ``k`` rows of ``vectors: [n, dimension]`` are chosen, in the order in which they are."""
        rows = _unit(vectors.astype(np.float64))
        near = rows @ _unit(question.astype(np.float64))
        chosen: list[int] = []
        overlap = np.full(len(rows), -np.inf)
        while len(chosen) < min(k, len(rows)):
            worth = self.lambda_mult * near - (1 - self.lambda_mult) * overlap if chosen else near.copy()
            worth[chosen] = -np.inf
            chosen.append(int(np.argmax(worth)))
            overlap = np.maximum(overlap, rows @ rows[chosen[-1]])
        return chosen


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a search shall find. Make one with :meth:`of`, which checks it."""

    k: int
    where: Where | Callable[[Document], bool] | None = None
    score_threshold: float | None = None
    mmr: MMR | None = None

    @classmethod
    def of(cls, k: int, where: Filter | None, score_threshold: float | None, mmr: MMR | None) -> Wanted:
        """Return what is wanted.

        Raises:
            ConfigError: a filter or a threshold that is none.
        """
        if where is not None and not callable(where) and not isinstance(where, FieldCondition | AllOf | AnyOf | Not):
            where = parse_filter(where) if where != {} else None
        if score_threshold is not None and not _is_number(score_threshold):
            raise SearchError(f"score_threshold is {score_threshold!r}: give a number, or None for all documents")
        if mmr is not None and not isinstance(mmr, MMR):
            raise ConfigError(f"mmr is {mmr!r:.80}: give MMR(fetch_k=20, lambda_mult=0.5)")
        return cls(int(k), where, score_threshold, mmr)

    @property
    def num_candidates(self) -> int:
        """How many documents are searched for."""
        return self.k if self.mmr is None else max(self.k, self.mmr.fetch_k)

    def is_near(self, scores: Vectors, *, is_similarity: bool) -> Mask:
        """Return which scores are not beyond the threshold: ``[n]``."""
        if self.score_threshold is None:
            return np.ones(len(scores), np.bool_)
        near: Mask = scores >= self.score_threshold if is_similarity else scores <= self.score_threshold
        return near


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _unit(rows: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    unit: np.ndarray[Any, np.dtype[np.float64]] = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return unit
