"""Score-tolerant substitution: show near-tied documents that extend the cached prefix, within a loss of score.

A document of the search's best ``k`` gives its place to another candidate whose score is at most a share
``max_score_loss`` below its own. So the scores of what is shown add up to at least ``1 - max_score_loss`` of those of
the best ``k``. It happens only where more of the prompt is cached then: KV serves a prefix, and a document that is
cached somewhere else is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.ordering import MAX_PATH_DOCUMENTS, Cached, CachedPaths, DocPath, DocumentOrder
from ragcache_core.types import DocId, Swap

CANDIDATES_PER_DOCUMENT = 2
"""The number of candidates per requested document that the search returns."""
_MAX_LOOKUPS = 1_000


def check_max_score_loss(max_score_loss: object, order: DocumentOrder, *, beside: str | None = None) -> None:
    """Reject an invalid bound, or one that this document order cannot keep.

    Raises:
        ConfigError: it is no number from 0 to below 1, or documents are shown by their ids, or chosen by something
            ``beside`` their scores.
    """
    if max_score_loss is None:
        return
    is_number = isinstance(max_score_loss, int | float) and not isinstance(max_score_loss, bool)
    if not is_number or not 0 <= max_score_loss < 1:  # type: ignore[operator]
        raise ConfigError(
            f"max_score_loss is {quoted(max_score_loss, 40)}; it must be a number from 0 to below 1, the share of a "
            "document's score that another one in its place may lack: give some, 0.02 for example, or leave it out"
        )
    if beside is not None:
        raise ConfigError(
            f"max_score_loss is {max_score_loss} beside {beside}, which chooses documents otherwise than by their "
            "scores, so that nothing would bound the loss: leave one of them out"
        )
    if order == "canonical":
        raise ConfigError(
            f"max_score_loss is {max_score_loss}, but document_order is 'canonical', where what is cached decides "
            "nothing: take 'retrieval' or 'cache_aware', or leave max_score_loss out"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen candidates as indices, each in the place of the one that it replaces, or its own."""

    places: tuple[int, ...]
    swaps: tuple[Swap, ...] = ()


def prefer_cached(
    candidates: Sequence[DocId],
    scores: Sequence[float],
    k: int,
    caches: Sequence[CachedPaths],
    *,
    max_score_loss: float,
    order: DocumentOrder = "retrieval",
    keep_first: bool = False,
    prefix: bytes | None = None,
) -> Choice:
    """Return ``k`` of the ``candidates`` (best first) with the longest cached prefix within the loss.

    Args:
        candidates: what was found; all after the first ``k`` may take the place of one of these.
        scores: parallel to them, the larger, the nearer. What is not above 0, or unknown, is not swapped.
        k: how many are shown.
        caches: what each data-parallel engine has cached.
        max_score_loss: the share of a document's score that the one in its place may lack.
        order: how they are shown afterwards; ``cache_aware`` lets them stand anywhere.
        keep_first: the best document is shown, and in front.
        prefix: names what stands before the documents; without it that of any of the last prompts counts.
    """
    if not 0 < k < len(candidates):
        return Choice(tuple(range(min(k, len(candidates)))))
    search = _Walk(candidates, scores, k, max_score_loss, is_free=order == "cache_aware", keep_first=keep_first)
    for num_candidates in (k, len(candidates)):
        for paths in caches:
            for cached in paths.after(prefix):
                search.walk(cached, num_candidates)
    return search.choice()


class _Walk:
    """Traverses cached prefixes depth first, the longest child first, and keeps the best substitutions."""

    def __init__(
        self,
        candidates: Sequence[DocId],
        scores: Sequence[float],
        k: int,
        max_score_loss: float,
        *,
        is_free: bool,
        keep_first: bool,
    ) -> None:
        self._candidates, self._scores = candidates, scores
        self._k = k
        self._least_share = 1.0 - max_score_loss
        self._is_free, self._keep_first = is_free, keep_first
        self._gained = (0, 0, 0.0)  # tokens behind the static prefix; swaps, and what they lose, as less than nothing
        self._swaps: tuple[tuple[int, int], ...] = ()

    def choice(self) -> Choice:
        places = list(range(self._k))
        for out, into in self._swaps:
            places[out] = into
        ids = self._candidates
        swaps = tuple(Swap(ids[out], ids[into], self._loss(out, into)) for out, into in self._swaps)
        return Choice(tuple(places), swaps)

    def walk(self, paths: Mapping[DocPath, Cached], num_candidates: int) -> None:
        """Search ``paths`` for prompts with the first ``num_candidates``."""
        static = paths.get(())
        self._num_static = 0 if static is None else static.num_tokens
        self._num_lookups = 0
        self._num_candidates = num_candidates
        self._visit(paths, (), ())

    def _visit(self, paths: Mapping[DocPath, Cached], path: DocPath, chosen: tuple[int, ...]) -> None:
        found = []
        for index in self._next(chosen):
            if self._num_lookups >= _MAX_LOOKUPS:
                break
            self._num_lookups += 1
            child = (*path, self._candidates[index])
            if (cached := paths.get(child)) is not None:
                found.append((-cached.num_tokens, index, child, cached.is_whole))
        for minus_tokens, index, child, is_whole in sorted(found):
            here = (*chosen, index)
            if (swaps := self._swaps_of(here)) is None:
                continue
            lost = math.fsum(self._loss(out, into) for out, into in swaps)
            gained = (-minus_tokens - self._num_static, -len(swaps), -lost)
            if gained > self._gained:
                self._gained, self._swaps = gained, swaps
            if is_whole and len(here) < min(self._k, MAX_PATH_DOCUMENTS):
                self._visit(paths, child, here)

    def _next(self, chosen: tuple[int, ...]) -> Sequence[int]:
        """Return the candidates that may follow the chosen ones."""
        place, others = len(chosen), range(self._k, self._num_candidates)
        if self._keep_first and place == 0:
            return (0,)
        indices = (*range(self._k), *others) if self._is_free else (place, *others)
        return [index for index in indices if index not in chosen]

    def _swaps_of(self, chosen: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
        """Return (out, in) of the substitutions with the least loss; ``None`` if one loses too much."""
        if self._is_free:
            into = sorted(index for index in chosen if index >= self._k)
            free = [index for index in range(self._k) if index not in chosen]
            if len(into) > len(free):
                return None
            swaps = tuple(zip(free[len(free) - len(into) :], into, strict=True))
        else:
            swaps = tuple((place, index) for place, index in enumerate(chosen) if index >= self._k)
        return swaps if all(self._may_swap(out, into) for out, into in swaps) else None

    def _may_swap(self, out: int, into: int) -> bool:
        return self._scores[out] > 0 and self._scores[into] >= self._least_share * self._scores[out]

    def _loss(self, out: int, into: int) -> float:
        return max(1.0 - self._scores[into] / self._scores[out], 0.0)
