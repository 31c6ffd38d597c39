"""A mirror takes in what has changed, and passes itself on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.ordering import CachedPaths, DocPath, PathChange, encode_delta

P, Q = b"p" * 16, b"q" * 16
CHANGES = st.lists(
    st.builds(
        PathChange,
        st.sampled_from([P, Q]),
        st.lists(st.sampled_from("abc"), max_size=3).map(tuple),
        st.integers(0, 3),
    ),
    max_size=30,
)


def contents(it: CachedPaths) -> dict[tuple[bytes, DocPath], int]:
    found = {}
    for delta in it.snapshot():
        for prefix, documents, num_tokens in delta["set"]:  # type: ignore[attr-defined]  (JSON: a list)
            found[bytes.fromhex(prefix), tuple(documents)] = num_tokens
    return found


@given(st.lists(st.tuples(CHANGES, st.booleans()), max_size=6))
def test_a_mirror_holds_the_last_word_on_every_path(deltas: list[tuple[list[PathChange], bool]]) -> None:
    it, model = CachedPaths(), dict[tuple[bytes, DocPath], int]()
    for changes, is_reset in deltas:
        it.apply(json.loads(json.dumps(encode_delta(changes, is_reset=is_reset))))
        model = {} if is_reset else model
        for change in changes:
            model.pop((change.prefix, change.documents), None)
            if change.num_tokens:
                model[change.prefix, change.documents] = change.num_tokens
    assert contents(it) == model
    assert len(it) == len(model)
    copy = CachedPaths()
    copy.set(PathChange(P, ("what was there before",), 9))
    for delta in it.snapshot():
        copy.apply(delta)
    assert contents(copy) == model


def test_a_long_snapshot_comes_in_short_lines() -> None:
    it = CachedPaths()
    for i in range(5000):
        it.set(PathChange(P, (f"{'x' * 50} {i}", "b"), 1))
    lines = [json.dumps(delta) for delta in it.snapshot()]
    assert len(lines) > 10
    assert max(map(len, lines)) < 50_000


def test_a_snapshot_is_of_the_moment_when_it_was_begun() -> None:
    it = CachedPaths()
    it.set(PathChange(P, ("a",), 1))
    snapshot = it.snapshot()
    next(snapshot)
    it.set(PathChange(P, ("a",), 2))
    it.set(PathChange(P, ("b",), 2))
    assert [delta["set"] for delta in snapshot] == [[[P.hex(), ["a"], 1]]]


def test_more_paths_than_it_has_room_for_are_left_out() -> None:
    it = CachedPaths(max_paths=2)
    for name in "abc":
        it.set(PathChange(P, (name,), 1))
    it.set(PathChange(P, ("a",), 7))
    assert contents(it) == {(P, ("a",)): 7, (P, ("b",)): 1}
    it.set(PathChange(P, ("a",), 0))
    it.set(PathChange(P, ("c",), 1))
    assert contents(it) == {(P, ("b",)): 1, (P, ("c",)): 1}


@pytest.mark.parametrize(
    "changes",
    [[["zz", [], 1]], [[P.hex(), [1], 1]], [[P.hex(), ["a"], "many"]], [["", []]], 7, [None], [[P.hex(), None, 1]]],
)
def test_what_is_no_delta_is_refused(changes: object) -> None:
    it = CachedPaths()
    with pytest.raises(ValueError, match="another version"):
        it.apply({"set": changes})
    assert len(it) == 0


def test_paths_of_no_documents_are_the_static_part() -> None:
    it = CachedPaths()
    it.set(PathChange(P, (), 48))
    it.set(PathChange(P, ("a",), 96))
    assert [it.num_cached_tokens(P, ids) for ids in ((), ("a",), ("a", "b"), ("b", "a"))] == [48, 96, 96, 48]
    assert it.num_cached_tokens(Q, ("a",)) == 0
