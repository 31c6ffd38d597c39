"""The order of a batch, against what a small cache computes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.batch_order import arrange_documents, order_requests, tree_size

PATHS = st.lists(st.lists(st.sampled_from("abcdef"), max_size=5, unique=True).map(tuple), max_size=20)
NUM_TOKENS = st.fixed_dictionaries({doc_id: st.integers(1, 9) for doc_id in "abcdef"})
LONGEST = 5


def num_computed(paths: Sequence[tuple[str, ...]], capacity: int) -> int:
    """Return how many documents are computed with an LRU cache of prefixes that evicts leaves first."""
    cache: OrderedDict[tuple[str, ...], None] = OrderedDict()
    computed = 0
    for path in paths:
        prefixes = [path[:end] for end in range(1, len(path) + 1)]
        computed += sum(prefix not in cache for prefix in prefixes)
        for prefix in reversed(prefixes):  # the longest prefix is the least recent, and so the first to be evicted
            cache[prefix] = None
            cache.move_to_end(prefix)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return computed


@given(PATHS)
def test_the_order_is_a_permutation_and_keeps_equal_prompts_in_place(paths: list[tuple[str, ...]]) -> None:
    order = order_requests(paths)
    assert sorted(order) == list(range(len(paths)))
    assert all(i < j for i, j in pairwise(order) if paths[i] == paths[j])


@given(PATHS, st.integers(0, 30))
def test_a_cache_of_one_prompt_computes_each_prefix_once_as_no_order_can_beat(
    paths: list[tuple[str, ...]], more: int
) -> None:
    ordered = [paths[i] for i in order_requests(paths)]
    least = len({path[:end] for path in paths for end in range(1, len(path) + 1)})
    assert num_computed(ordered, LONGEST + more) == least <= num_computed(paths, LONGEST + more)


@given(PATHS, NUM_TOKENS)
def test_arranged_documents_are_the_retrieved_ones_in_a_tree_that_is_not_larger(
    paths: list[tuple[str, ...]], num_tokens: dict[str, int]
) -> None:
    arranged = arrange_documents(paths, num_tokens)
    assert [sorted(path) for path in arranged] == [sorted(path) for path in paths]
    assert tree_size(arranged, num_tokens) <= tree_size(paths, num_tokens)
    assert arranged == arrange_documents(paths, num_tokens)


@given(PATHS, NUM_TOKENS, st.randoms())
def test_the_tree_does_not_depend_on_the_order_of_the_requests(
    paths: list[tuple[str, ...]], num_tokens: dict[str, int], random: object
) -> None:
    shuffled = list(range(len(paths)))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    arranged = arrange_documents(paths, num_tokens)
    assert arrange_documents([paths[i] for i in shuffled], num_tokens) == [arranged[i] for i in shuffled]


def test_documents_that_most_requests_share_come_first_weighed_by_their_length() -> None:
    retrieved = [("b", "a", "x"), ("a", "b"), ("c", "a"), ("c", "b", "a")]
    one_each = dict.fromkeys("abcx", 1)
    assert arrange_documents(retrieved, one_each) == [("a", "b", "x"), ("a", "b"), ("a", "c"), ("a", "b", "c")]
    assert arrange_documents(retrieved, {**one_each, "c": 9})[2:] == [("c", "a"), ("c", "a", "b")]


def test_an_order_that_would_not_help_changes_nothing() -> None:
    retrieved = [("b", "a"), ("b", "c"), ("e", "d")]
    assert arrange_documents(retrieved, dict.fromkeys("abcde", 1)) == retrieved
