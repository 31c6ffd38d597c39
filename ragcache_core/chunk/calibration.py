"""Eq. 12's alpha for a target quality, from measurements of several alphas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AlphaPoint:
    """The result of one alpha on a validation set.

    ``quality`` is whatever is wanted, the higher the better: ROUGE-L F1, exact match, or either as a share of what a
    full prefill reaches. ``recomputed`` is the fraction of the chunks' tokens that was computed, E[CFO].
    ``num_questions`` says how much the point weighs.
    """

    alpha: float
    quality: float
    recomputed: float
    num_questions: int = 1

    def __post_init__(self) -> None:
        if not (self.alpha >= 0.0 and math.isfinite(self.quality) and 0.0 <= self.recomputed <= 1.0):
            raise ConfigError(f"{self}: alpha must be 0 or more, quality finite, recomputed in [0, 1]")
        if self.num_questions < 1:
            raise ConfigError(f"{self}: it was measured with no question")


def choose_alpha(points: Sequence[AlphaPoint], wanted_quality: float) -> AlphaPoint:
    """Return the point with the least recompute that reaches the quality (Cache-Craft §3.2, Eq. 13).

    Unlike the paper, this takes the quality from a curve through all points that never falls with alpha (``smoothed``):
    one lucky draw of questions at a small alpha does not win. The returned point has its measured quality.

    Raises:
        ConfigError: ``points`` is empty, or no alpha reaches that quality; the message has the best one's quality.
    """
    if not points:
        raise ConfigError("nothing was measured, so there is no alpha to choose: calibrate with one alpha at least")
    curve = smoothed(points)
    good = [point for point, quality in curve if quality >= wanted_quality - 1e-9]
    if not good:
        best, quality = curve[-1]
        raise ConfigError(
            f"quality {wanted_quality:g} is wanted; the best measured is {quality:.4g} at alpha {best.alpha:g}: "
            "ask for less, or calibrate with higher alphas"
        )
    return min(good, key=lambda point: (point.recomputed, point.alpha))


def smoothed(points: Sequence[AlphaPoint]) -> list[tuple[AlphaPoint, float]]:
    """Return the points by alpha, with the closest non-decreasing qualities.

    Closest in squares weighed by ``num_questions`` (isotonic regression by pooling adjacent violators).
    """
    ordered = sorted(points, key=lambda point: point.alpha)
    pools: list[tuple[float, int, int]] = []  # mean quality, questions, points
    for point in ordered:
        pools.append((point.quality, point.num_questions, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, many, left), (low, few, right) = pools[-2:]
            pools[-2:] = [((high * many + low * few) / (many + few), many + few, left + right)]
    qualities = [quality for quality, _, count in pools for _ in range(count)]
    return list(zip(ordered, qualities, strict=True))
