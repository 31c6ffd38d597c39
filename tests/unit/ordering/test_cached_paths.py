"""Cached paths take in what has changed."""

from __future__ import annotations

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.ordering import CachedPaths, DocPath, PathChange, encode_changes

P, Q = b"p" * 16, b"q" * 16
CHANGES = st.lists(
    st.builds(
        PathChange,
        st.sampled_from([P, Q]),
        st.lists(st.sampled_from("abc"), max_size=3).map(tuple),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=30,
)


def num_cached_tokens(model: dict[tuple[bytes, DocPath], PathChange], prefix: bytes, documents: DocPath) -> int:
    """Return the most that is cached on the way from the static prefix to the first path that has a hole."""
    num_tokens = [model[prefix, ()].num_tokens] if (prefix, ()) in model else [0]
    for end in range(1, len(documents) + 1):
        if (here := model.get((prefix, documents[:end]))) is None:
            break
        num_tokens.append(here.num_tokens)
        if not here.is_whole:
            break
    return max(num_tokens)


@pytest.mark.parametrize("documents", [("a",) * 33, ("a", "x" * 1025)], ids=["too many documents", "too long an id"])
def test_a_path_beyond_the_limits_is_ignored_and_the_next_one_is_not(documents: DocPath) -> None:
    paths = CachedPaths()
    paths.apply(encode_changes([PathChange(P, documents, 5), PathChange(P, ("a",), 3)]))
    assert [path for _, path, _ in paths.items()] == [("a",)]


@given(st.lists(CHANGES, max_size=6))
def test_the_last_word_on_every_path_counts(answers: list[list[PathChange]]) -> None:
    it, model = CachedPaths(), dict[tuple[bytes, DocPath], PathChange]()
    for changes in answers:
        it.apply(json.loads(json.dumps(encode_changes(changes))))
        for change in changes:
            model.pop((change.prefix, change.documents), None)
            if change.num_tokens:
                model[change.prefix, change.documents] = change
    assert len(it) == len(model)
    for prefix, documents in product((P, Q), [d for n in range(4) for d in product("abc", repeat=n)]):
        assert it.num_cached_tokens(prefix, documents) == num_cached_tokens(model, prefix, documents)


@pytest.mark.parametrize(
    "changes",
    [
        [["zz", [], 1, True]],
        [[P.hex(), [1], 1, True]],
        [[P.hex(), ["a"], "many", True]],
        [[P.hex(), ["a"], 1]],
        [["", []]],
        7,
        [None],
        [[P.hex(), None, 1, True]],
    ],
)
def test_what_is_no_change_is_refused(changes: object) -> None:
    it = CachedPaths()
    with pytest.raises(ValueError, match="another version"):
        it.apply(changes)
    assert len(it) == 0
