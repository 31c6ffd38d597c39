"""One index of many caches says what a walk over each of them says, whatever has become of them."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragcache_core.ordering import ANYWHERE, CachedPaths, PathChange, longest_cached
from ragcache_core.routing.index import PathIndex

DOCUMENTS = "abcd"
PREFIXES = [b"one", b"other"]
PATHS = st.lists(st.sampled_from(DOCUMENTS), max_size=4, unique=True).map(tuple)
CHANGES = st.builds(
    PathChange, st.sampled_from([*PREFIXES, ANYWHERE]), PATHS, st.sampled_from([0, 0, 5, 10, 20, 30, 40]), st.booleans()
)
SHOWN = st.lists(st.sampled_from(DOCUMENTS), max_size=4, unique=True)


def cached(*changes: PathChange, max_paths: int = 10_000) -> CachedPaths:
    paths = CachedPaths(max_paths)
    for change in changes:
        paths.set(change)
    return paths


def joined(index: PathIndex, paths: CachedPaths) -> CachedPaths:
    for _ in index.join(paths):
        pass
    return paths


def left(index: PathIndex, paths: CachedPaths) -> None:
    for _ in index.leave(paths):
        pass


class Fleet(RuleBasedStateMachine):
    """Caches come, change, begin again and go, in pieces; others are asked meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PathIndex()
        self.caches: list[CachedPaths] = []

    @rule(snapshot=st.lists(CHANGES, max_size=12), max_paths=st.sampled_from([3, 100]))
    def a_replica_comes(self, snapshot: list[PathChange], max_paths: int) -> None:
        self.caches.append(joined(self.index, cached(*snapshot, max_paths=max_paths)))

    @precondition(lambda self: self.caches)
    @rule(place=st.integers(0, 99), changes=st.lists(CHANGES, max_size=6))
    def a_replica_reports(self, place: int, changes: list[PathChange]) -> None:
        paths = self.caches[place % len(self.caches)]
        for change in changes:
            paths.set(change)

    @precondition(lambda self: self.caches)
    @rule(place=st.integers(0, 99))
    def a_replica_goes(self, place: int) -> None:
        paths = self.caches.pop(place % len(self.caches))
        left(self.index, paths)
        paths.set(PathChange(PREFIXES[0], ("a",), 99))  # its replica is gone

    @precondition(lambda self: self.caches)
    @rule(place=st.integers(0, 99), snapshot=st.lists(CHANGES, max_size=12))
    def a_replica_restarts(self, place: int, snapshot: list[PathChange]) -> None:
        place %= len(self.caches)
        before, self.caches[place] = self.caches[place], joined(self.index, cached(*snapshot))
        left(self.index, before)

    @rule(documents=SHOWN, prefix=st.sampled_from([*PREFIXES, None]), keep_first=st.booleans())
    def all_are_asked_for_an_order(self, documents: Sequence[str], prefix: bytes | None, keep_first: bool) -> None:
        found = self.index.longest(self._every(), documents, prefix=prefix, keep_first=keep_first)
        for paths in self.caches:
            alone = longest_cached([paths], documents, prefix=prefix, keep_first=keep_first)
            mine = [(one.num_tokens, one.order) for one in found if one.caches & paths.bit]
            assert mine in ([alone], [] if alone[0] == 0 else [alone])

    @rule(documents=SHOWN, prefix=st.sampled_from([*PREFIXES, None]))
    def all_are_asked_for_this_order(self, documents: Sequence[str], prefix: bytes | None) -> None:
        found = self.index.longest(self._every(), documents, prefix=prefix, keep_order=True)
        for paths in self.caches:
            mine = [one.num_tokens for one in found if one.caches & paths.bit]
            assert (mine or [0]) == [paths.num_document_tokens(prefix, documents)]

    @invariant()
    def it_has_what_they_have(self) -> None:
        theirs = {(prefix, path) for one in self.caches for prefix, path, _ in one.items() if prefix != ANYWHERE}
        assert len(self.index) == len(theirs)
        bits = [one.bit for one in self.caches]
        assert len({*bits, 0}) == len(bits) + 1
        assert all(bit.bit_count() == 1 for bit in bits)

    def _every(self) -> int:
        return sum(paths.bit for paths in self.caches)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_replica_that_joins_in_pieces_disturbs_no_other_and_leaves_nothing() -> None:
    index = PathIndex()
    other = joined(index, cached(PathChange(b"one", ("a",), 10)))
    many = cached(*(PathChange(b"one", (f"document {i}",), 10) for i in range(2_000)))
    for _ in index.join(many):
        assert [found.num_tokens for found in index.longest(other.bit, "a", prefix=b"one")] == [10]
    assert len(index) == 2_001
    pieces = index.leave(many)
    next(pieces)
    assert 1 < len(index) < 2_001
    assert joined(index, cached()).bit not in (many.bit, other.bit), "a bit is free when all of its paths are gone"
    for _ in pieces:
        pass
    assert len(index) == 1


@pytest.mark.parametrize("num_documents", [3, 12, 40])
def test_the_longest_order_is_seen_where_the_search_ends_early(num_documents: int) -> None:
    index, documents = PathIndex(), [f"document {i}" for i in range(num_documents)]
    wide = [PathChange(b"one", (a, b), 10 + i) for i, a in enumerate(documents) for b in documents if a != b]
    wide += [PathChange(b"one", (a,), 5) for a in documents]
    long = [PathChange(b"one", tuple(documents[: n + 1]), 100 * (n + 1)) for n in range(min(num_documents, 30))]
    paths = joined(index, cached(*wide, *long))
    (best,) = index.longest(paths.bit, documents, prefix=b"one")
    assert best.num_tokens == 100 * len(long)
