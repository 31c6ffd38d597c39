"""Which replica gets a request, and in which order it shows its documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.ordering import CachedPaths, PathChange, best_order
from ragcache_core.routing import choice
from ragcache_core.routing.choice import WAIT_PER_CACHED_TOKEN, ReplicaState
from ragcache_core.routing.index import PathIndex
from ragcache_core.routing.load import PromptInfo, ReplicaLoad

PREFIX = b"static"
TOKENS = 100
Paths = list[tuple[str, ...]]
PATHS = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True).map(tuple), max_size=6)


def cached(paths: Paths) -> CachedPaths:
    known = CachedPaths()
    known.set(PathChange(PREFIX, (), 10))
    for path in paths:
        for end in range(1, len(path) + 1):
            known.set(PathChange(PREFIX, path[:end], 10 + TOKENS * end))
    return known


def fleet(*caches: Paths | None) -> list[ReplicaState]:
    mirrors = [None if paths is None else (cached(paths),) for paths in caches]
    return [ReplicaState(f"replica-{i}", known, ReplicaLoad()) for i, known in enumerate(mirrors)]


def index_of(replicas: Sequence[ReplicaState]) -> PathIndex:
    index = PathIndex()
    for replica in replicas:
        for paths in replica.caches:
            for _ in index.join(paths):
                pass
    return index


def choose_replica(replicas: Sequence[ReplicaState], prompt: PromptInfo) -> ReplicaState:
    return choice.choose_replica(index_of(replicas), replicas, prompt)


def choose_order(replicas: Sequence[ReplicaState], documents: Sequence[str], **asked: Any) -> tuple[int, ...] | None:
    return choice.choose_order(index_of(replicas), replicas, documents, **asked)


def prompt_info(*documents: str) -> PromptInfo:
    ends = tuple(10 + TOKENS * (n + 1) for n in range(len(documents)))
    return PromptInfo(documents, ends, 10, (ends or (10,))[-1] + 30, PREFIX, documents[0] if documents else "Hello")


def choose(replicas: Sequence[ReplicaState], *documents: str) -> str:
    return choose_replica(replicas, prompt_info(*documents)).name


def test_the_replica_with_the_longest_cached_prefix_gets_the_prompt() -> None:
    replicas = fleet([("a",)], [("a", "b"), ("c",)], [("b", "a")])
    assert choose(replicas, "a", "b") == "replica-1"
    assert choose(replicas, "b", "a") == "replica-2"


def test_order_and_replica_suit_each_other() -> None:
    replicas = fleet([("a",)], [("c", "b")], [("b",)])
    order = choose_order(replicas, ["a", "b", "c"], prefix=PREFIX, keep_first=False)
    assert order == (2, 1, 0)
    assert choose(replicas, "c", "b", "a") == "replica-1"
    kept = choose_order(replicas, ["a", "b", "c"], prefix=PREFIX, keep_first=True)
    assert kept == (0, 1, 2)


def test_a_wait_that_costs_more_than_is_cached_sends_a_request_elsewhere() -> None:
    replicas = fleet([("a",)], [])
    waiting = 0
    while choose(replicas, "a") == "replica-0":
        replicas[0].load.num_waiting_tokens = waiting = waiting + TOKENS
    assert waiting == (WAIT_PER_CACHED_TOKEN + 1) * TOKENS or choose(replicas, "a") == "replica-1"
    assert waiting >= WAIT_PER_CACHED_TOKEN * TOKENS


def test_what_a_replica_was_asked_is_expected_there_until_it_is_over() -> None:
    replicas = fleet([], [], [])
    first = choose_replica(replicas, prompt_info("a", "b"))
    sent = first.load.begin(prompt_info("a", "b"), 0)
    assert choose(replicas, "a", "b") == first.name
    assert choose_order(replicas, ["b", "a"], prefix=PREFIX, keep_first=False) == (1, 0)
    again = first.load.begin(prompt_info("a", "b"), 2 * TOKENS)
    assert first.load.num_waiting_tokens == (2 * TOKENS + 30) + 30
    sent.end()
    assert first.num_cached_tokens(prompt_info("a", "b")) == 2 * TOKENS
    again.answered()
    again.end()
    assert (first.load.num_running, first.load.num_waiting_tokens, len(first.load.expected)) == (0, 0, 0)


def test_without_replica_reports_documents_are_routed_by_bounded_hashing() -> None:
    replicas = fleet(None, None, None)
    home = choose(replicas, "a")
    assert choose_order(replicas, ["b", "a"], prefix=PREFIX, keep_first=False) is None
    assert {choose(replicas, name) for name in "abcdefghijkl"} == {"replica-0", "replica-1", "replica-2"}
    places = []
    for _ in range(6):
        chosen = choose_replica(replicas, prompt_info("a"))
        chosen.load.begin(prompt_info("a"), 0)
        places.append(chosen.name)
    assert places[0] == home
    assert max(places.count(name) for name in places) <= 3
    alone = [replica for replica in fleet(None, None, None) if replica.name != home]
    moved = [name for name in "abcdefghijkl" if choose(fleet(None, None, None), name) != choose(alone, name)]
    assert all(choose(fleet(None, None, None), name) == home for name in moved)


@given(st.lists(PATHS, min_size=1, max_size=4), st.permutations("abcd"))
def test_with_idle_replicas_the_order_is_the_best_that_any_has(caches: list[Paths], documents: Sequence[str]) -> None:
    replicas = fleet(*caches)
    every = [paths for replica in replicas for paths in replica.caches]
    best = best_order(every, documents, prefix=PREFIX, keep_first=False)
    assert choose_order(replicas, documents, prefix=PREFIX, keep_first=False) == best
