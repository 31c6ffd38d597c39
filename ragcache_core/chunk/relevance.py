"""How much a question asks for each token of its chunks, guessed from the words they have in common."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def lexical_relevance(
    chunks: Sequence[Sequence[int]], question: Sequence[int], *, reach: int = 16
) -> list[tuple[float, ...]]:
    """Return the relevance of every token of ``chunks`` (token ids), parallel to them, in [0, 1].

    A token that the question has too counts the more, the fewer of the chunks have it, and lends its weight to the
    ``reach`` tokens on either side, less with the distance: an answer stands beside the words of its question. The
    most relevant token of all has 1. Stands in for the question's attention where no keys are at hand.
    """
    asked = set(question)
    num_with = Counter(token for chunk in chunks for token in asked.intersection(chunk))
    weight = {token: math.log1p(len(chunks) / count) for token, count in num_with.items()}
    relevance = [_spread([weight.get(token, 0.0) for token in chunk], reach) for chunk in chunks]
    highest = max((score for scores in relevance for score in scores), default=0.0)
    return [tuple(score / highest for score in scores) if highest else tuple(scores) for scores in relevance]


def _spread(weights: Sequence[float], reach: int) -> list[float]:
    spread = list(weights)
    for place, weight in enumerate(weights):
        if not weight:
            continue
        for other in range(max(0, place - reach), min(len(weights), place + reach + 1)):
            if other != place:
                spread[other] += weight * (1.0 - abs(other - place) / (reach + 1))
    return spread
