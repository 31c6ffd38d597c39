"""In which order documents are shown, against all permutations of them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.ordering import CachedPaths, DocPath, PathChange, arrange, static_prefix_digest
from ragcache_core.types import PromptSegment, SegmentKind

HERE, ELSEWHERE = b"p" * 16, b"q" * 16
IDS = "abcde"


def mirror(
    *paths: Mapping[DocPath, int], prefix: bytes = HERE, broken: Container[DocPath] = frozenset()
) -> CachedPaths:
    it = CachedPaths()
    for tree in paths:
        for documents, num_tokens in tree.items():
            it.set(PathChange(prefix, documents, num_tokens, documents not in broken))
    return it


def best(documents: str, paths: CachedPaths, *, prefix: bytes | None = HERE, keep_first: bool = False) -> str:
    order = arrange(tuple(documents), "cache_aware", paths, prefix=prefix, keep_first=keep_first)
    assert sorted(order) == list(range(len(documents)))
    return "".join(documents[i] for i in order)


@st.composite
def cached(draw: st.DrawFn) -> dict[DocPath, int]:
    """Return paths as an engine has them: what lies deeper is cached at least as far, up to a hole."""
    paths: dict[DocPath, int] = {(): draw(st.integers(1, 3))}
    for path in draw(st.lists(st.permutations(IDS + "z"), max_size=12)):
        depth = draw(st.integers(0, 5))
        for end in range(1, depth + 1):
            at = tuple(path[:end])
            paths.setdefault(at, paths[at[:-1]] + draw(st.integers(0, 2)))
    return paths


@given(cached(), st.data(), st.permutations(IDS), st.integers(0, 5), st.booleans())
def test_the_order_is_the_best_of_all_permutations_and_the_first_of_equal_ones(
    paths: dict[DocPath, int], data: st.DataObject, retrieved: list[str], num_documents: int, keep_first: bool
) -> None:
    broken = data.draw(st.sets(st.sampled_from(sorted(paths)), max_size=3))
    it, documents = mirror(paths, broken=broken), tuple(retrieved[:num_documents])

    def worth(order: tuple[int, ...]) -> int:
        return it.num_cached_tokens(HERE, [documents[i] for i in order])

    all_orders = [o for o in permutations(range(num_documents)) if not keep_first or o[:1] in ((), (0,))]
    oracle = min(all_orders, key=lambda order: (-worth(order), order))
    assert arrange(documents, "cache_aware", it, prefix=HERE, keep_first=keep_first) == oracle


@given(cached(), cached(), st.permutations(IDS))
def test_without_a_prefix_the_best_after_any_of_them_is_taken_static_parts_apart(
    some: dict[DocPath, int], others: dict[DocPath, int], retrieved: list[str]
) -> None:
    it, documents = mirror(some), tuple(retrieved)
    for path, num_tokens in others.items():
        it.set(PathChange(ELSEWHERE, path, num_tokens + 100))

    def worth(order: tuple[int, ...]) -> int:
        ids = [documents[i] for i in order]
        return max(it.num_cached_tokens(p, ids) - it.num_cached_tokens(p, ()) for p in (HERE, ELSEWHERE))

    oracle = min(permutations(range(5)), key=lambda order: (-worth(order), order))
    assert arrange(documents, "cache_aware", it, prefix=None) == oracle


def test_a_longer_prefix_that_begins_with_a_less_relevant_document_wins() -> None:
    it = mirror({(): 8, ("a",): 100, ("b",): 60, ("b", "c"): 140})
    assert best("abc", it) == "bca"
    assert best("abc", it, keep_first=True) == "abc"


def test_very_many_cached_orders_end_the_search_early_with_a_good_one() -> None:
    ids = [f"d{i}" for i in range(9)]
    paths: dict[DocPath, int] = {}
    for path in permutations(ids, 4):
        for end in range(1, 5):
            paths[path[:end]] = 10 * end
    best_path = tuple(reversed(ids))
    for end in range(1, 10):
        paths[best_path[:end]] = 11 * end
    order = arrange(ids, "cache_aware", mirror(paths), prefix=HERE)
    assert tuple(ids[i] for i in order) == best_path


@given(st.permutations(IDS))
def test_canonical_is_the_same_for_the_same_documents(retrieved: list[str]) -> None:
    order = arrange(retrieved, "canonical", None)
    assert [retrieved[i] for i in order] == sorted(retrieved)
    kept = arrange(retrieved, "canonical", None, keep_first=True)
    assert [retrieved[i] for i in kept] == [retrieved[0], *sorted(retrieved[1:])]


def test_retrieval_order_and_an_unknown_cache_keep_the_order_of_the_search() -> None:
    it = mirror({("b",): 5})
    assert arrange("ab", "retrieval", it, prefix=HERE) == (0, 1)
    assert arrange("ab", "cache_aware", None, prefix=HERE) == (0, 1)


# The static prefix


def prompt_of(num_static: int) -> list[PromptSegment]:
    static = [PromptSegment(SegmentKind.PREFIX, 0, num_static)] if num_static else []
    document = PromptSegment(SegmentKind.DOCUMENT, num_static, 20, "a")
    return [*static, document, PromptSegment(SegmentKind.QUESTION, 20, 22)]


def test_the_static_prefix_is_named_by_its_tokens_alone() -> None:
    one = static_prefix_digest(list(range(22)), prompt_of(4))
    other = static_prefix_digest([0, 1, 2, 3, *[9] * 18], prompt_of(4))
    assert one is not None
    assert one == other
    assert one != static_prefix_digest(list(range(22)), prompt_of(5))
    assert one != static_prefix_digest([0, 1, 2, 4, *[9] * 18], prompt_of(4))
