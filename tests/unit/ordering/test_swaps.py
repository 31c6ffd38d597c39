"""Nearly equal documents exchanged for cached ones, against all choices that the bound allows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.errors import ConfigError
from ragcache_core.ordering import CachedPaths, DocumentOrder, PathChange, best_order
from ragcache_core.swaps import check_max_score_loss, prefer_cached
from ragcache_core.types import Swap

PREFIX = b"p" * 16
STATIC = 10


def mirror(*paths: str, tokens: int = 100) -> CachedPaths:
    it = CachedPaths()
    it.set(PathChange(PREFIX, (), STATIC))
    for path in paths:
        for end in range(1, len(path) + 1):
            it.set(PathChange(PREFIX, tuple(path[:end]), STATIC + tokens * end))
    return it


def shown(
    found: str, scores: list[float], k: int, paths: CachedPaths, max_score_loss: float = 0.02, **asked: object
) -> tuple[str, tuple[Swap, ...]]:
    choice = prefer_cached(
        tuple(found),
        scores,
        k,
        [paths],
        max_score_loss=max_score_loss,
        prefix=PREFIX,
        **asked,  # type: ignore[arg-type]
    )
    return "".join(found[i] for i in choice.places), choice.swaps


def test_the_cached_one_of_two_nearly_equal_documents_takes_the_place_of_the_other() -> None:
    told, swaps = shown("abcd", [0.9, 0.80, 0.79, 0.4], 2, mirror("ac"))
    assert told == "ac"
    assert swaps == (Swap("b", "c", pytest.approx(1 - 0.79 / 0.8)),)


def test_the_best_document_stays_where_it_is_to_be_kept() -> None:
    assert shown("abc", [0.9, 0.89, 0.89], 2, mirror("cb"))[0] == "cb"
    assert shown("abc", [0.9, 0.89, 0.89], 2, mirror("cb"), keep_first=True) == ("ab", ())
    assert shown("abc", [0.9, 0.89, 0.89], 2, mirror("ac"), keep_first=True, order="cache_aware")[0] == "ac"


def test_an_order_by_ids_leaves_nothing_to_choose() -> None:
    with pytest.raises(ConfigError, match="document_order is 'canonical'"):
        check_max_score_loss(0.1, "canonical")
    for order in ("retrieval", "cache_aware"):
        check_max_score_loss(0, order)  # type: ignore[arg-type]
    check_max_score_loss(None, "canonical")


def allowed(k: int, scores: list[float], loss: float, order: DocumentOrder, *, keep_first: bool) -> Iterator[list[int]]:
    """Yield what may be shown: each place has its own document, or one that is little worse."""
    first = 1 if keep_first else 0
    for num_out in range(k - first + 1):
        for out in combinations(range(first, k), num_out):
            for into in permutations(range(k, len(scores)), num_out):
                if all(scores[i] >= (1 - loss) * scores[o] for o, i in zip(out, into, strict=True)):
                    places = list(range(k))
                    for o, i in zip(out, into, strict=True):
                        places[o] = i
                    if order == "retrieval":
                        yield places
                    else:
                        rest = permutations(places[first:])
                        yield from ([*places[:first], *orders] for orders in rest)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.text("abcdef", min_size=1, max_size=4).filter(lambda path: len(set(path)) == len(path)), max_size=6),
    st.lists(st.sampled_from([0.5, 0.52, 0.8, 0.82, 0.9]), min_size=1, max_size=6).map(lambda s: sorted(s)[::-1]),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.03, 0.4]),
    st.sampled_from(["retrieval", "cache_aware"]),
    st.booleans(),
)
def test_no_allowed_choice_is_cached_further_and_the_bound_holds_for_each_and_for_all(
    cached: list[str], scores: list[float], k: int, loss: float, order: DocumentOrder, keep_first: bool
) -> None:
    paths, found = mirror(*cached), "abcdef"[: len(scores)]
    told, swaps = shown(found, scores, k, paths, loss, order=order, keep_first=keep_first)
    k = min(k, len(scores))
    most = max(
        paths.num_cached_tokens(PREFIX, [found[i] for i in places])
        for places in allowed(k, scores, loss, order, keep_first=keep_first)
    )
    if order == "cache_aware":
        places = best_order([paths], told, prefix=PREFIX, keep_first=keep_first)
        assert paths.num_cached_tokens(PREFIX, [told[i] for i in places]) == most
    else:
        assert paths.num_cached_tokens(PREFIX, told) == most
    assert len(told) == len(set(told)) == k
    assert set(found[:k]) - set(told) == {swap.doc_out for swap in swaps}
    assert set(told) - set(found[:k]) == {swap.doc_in for swap in swaps}
    assert all(swap.score_loss <= loss + 1e-9 for swap in swaps)
    by_id = dict(zip(found, scores, strict=True))
    assert sum(by_id[d] for d in told) >= (1 - loss) * sum(scores[:k]) - 1e-9
