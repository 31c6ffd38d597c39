"""Scores of answers: exact match, F1, ROUGE-L and Jaccard over normalised words; and confidence intervals."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """Return the words of a text without case, punctuation, articles and extra white space.

    The normalisation of SQuAD's own evaluation (Rajpurkar et al., 2016), after Unicode's NFKC.
    """
    folded = unicodedata.normalize("NFKC", text).casefold().translate(_PUNCTUATION)
    return _ARTICLES.sub(" ", folded).split()


def exact_match(answer: str, expected: Sequence[str]) -> bool:
    """Return whether the answer equals an expected one, word for word."""
    found = words(answer)
    return any(found == words(text) for text in expected)


def rouge_l(answer: str, expected: Sequence[str]) -> float:
    """Return ROUGE-L F1 in [0, 1] against the best-matching expected answer.

    The harmonic mean of precision and recall of the longest common subsequence of words (Lin, 2004, with beta 1, as
    the ``rouge-score`` package and Cache-Craft §5.2 report it). Two texts without any word score 1.
    """
    found = words(answer)
    return max((_f1(found, words(text)) for text in expected), default=0.0)


def token_f1(answer: str, expected: Sequence[str]) -> float:
    """Return SQuAD's F1 in [0, 1] against the best-matching expected answer, over words in any order.

    Two texts without any word score 1.
    """
    found = Counter(words(answer))
    return max((_overlap_f1(found, Counter(words(text))) for text in expected), default=0.0)


def jaccard(answer: str, expected: Sequence[str]) -> float:
    """Return the Jaccard similarity of distinct words in [0, 1], for the best-matching expected answer.

    Cache-Craft §5.2 reports it. Two texts without any word score 1.
    """
    found = set(words(answer))
    return max((_jaccard(found, set(words(text))) for text in expected), default=0.0)


def is_same_text(one: str, other: str) -> bool:
    """Return whether two answers are equal, word for word."""
    return words(one) == words(other)


def wilson_interval(num_hits: int, num_tries: int) -> tuple[float, float]:
    """Return the 95 % interval of an observed share (Wilson, 1927); [0, 1] without observations."""
    if num_tries == 0:
        return 0.0, 1.0
    share, z = num_hits / num_tries, NormalDist().inv_cdf(0.975)
    middle = share + z * z / (2 * num_tries)
    width = z * sqrt(share * (1 - share) / num_tries + z * z / (4 * num_tries**2))
    scale = 1 + z * z / num_tries
    return max((middle - width) / scale, 0.0), min((middle + width) / scale, 1.0)


def _f1(one: Sequence[str], other: Sequence[str]) -> float:
    if not one or not other:
        return float(one == other)
    return 2.0 * longest_common(one, other) / (len(one) + len(other))


def _overlap_f1(one: Counter[str], other: Counter[str]) -> float:
    if not one or not other:
        return float(one == other)
    return 2.0 * (one & other).total() / (one.total() + other.total())


def _jaccard(one: set[str], other: set[str]) -> float:
    return len(one & other) / len(one | other) if one or other else 1.0


def longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence; memory grows with ``other`` alone."""
    row = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for place, another in enumerate(other, start=1):
            above = row[place]
            row[place] = diagonal + 1 if word == another else max(above, row[place - 1])
            diagonal = above
    return row[-1]
