"""The engine tells which orders of documents are cached, and those who listen know it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.ordering import MAX_PATH_DOCUMENTS, CachedPaths, PathChange, encode_delta, static_prefix_digest
from ragcache_core.tree import PathSegment, TreeNode, check_invariants
from ragcache_core.types import PromptSegment, Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController
from ragcache_core.vllm_plugin.cache.prefix_publisher import _MAX_VISITS_PER_DELTA, PrefixPublisher
from ragcache_core.vllm_plugin.connector.step_stats import RAGCacheStats
from ragcache_core.vllm_plugin.server.engine_view import Received
from ragcache_core.vllm_plugin.server.prefix_feed import HEARTBEAT, PrefixFeed
from ragcache_core.wire import RequestMetadata
from tests.unit.vllm_plugin.scene import BLOCK, controller, segments

STATIC = 5
LENGTHS = {"a": 8, "b": 4, "c": 11, "d": 1, "e": 3}
QUESTION = 6


class Engine:
    """A controller, requests that run through it, and a mirror that is told what it tells."""

    def __init__(self, **settings: Any) -> None:
        self.controller: CacheController = controller(**settings)
        self.mirror = CachedPaths()
        self.shown: dict[tuple[bytes, tuple[str, ...]], tuple[list[bytes], int]] = {}
        self._num_requests = 0

    def ask(self, documents: str, question: int = 0, static: int = 0) -> list[bytes]:
        """Let a request come, be computed and end; return its blocks' keys."""
        parts: list[tuple[str | None, int]] = [("", STATIC)]
        tokens = [static] * STATIC
        for name in documents:
            tokens += [ord(name)] * LENGTHS[name]
            parts.append((name, len(tokens)))
        tokens += [1000 + question] * QUESTION
        parts.append((None, len(tokens)))
        tiled = segments(*parts)
        keys = [repr(tokens[: BLOCK * (i + 1)]).encode() for i in range(len(tokens) // BLOCK)]
        self._num_requests += 1
        name = f"r{self._num_requests}"
        it = self.controller
        it.on_new_request(name, RequestMetadata(tiled), keys, len(tokens), 0.0)
        it.paths.track(tokens, tiled, keys)
        it.on_admitted(name, keys, {}, 0.0)
        self.hold(keys, Tier.GPU)
        it.on_finished(name)
        self._note(tokens, tiled, keys)
        return keys

    def hold(self, keys: list[bytes], tier: Tier) -> None:
        for i in range(len(keys)):
            location = self.controller.locate_block(keys, i)
            self.controller.tree.add(location.node, 1 << location.unit, tier)

    def tell(self) -> None:
        while self.controller.paths.has_news:
            self.tell_a_part()

    def tell_a_part(self) -> None:
        self.mirror.apply(json.loads(json.dumps(self.controller.paths.take_delta() or {})))

    def check(self) -> None:
        """Compare the mirror with what the tree itself finds."""
        self.tell()
        check_invariants(self.controller.tree, is_connected=False)
        for (prefix, documents), (keys, num_tokens) in self.shown.items():
            match = self.controller.tree.match_prefix([PathSegment(keys, num_tokens)])
            assert self.mirror.num_cached_tokens(prefix, documents) == match.num_tokens, documents

    def _note(self, tokens: list[int], tiled: tuple[PromptSegment, ...], keys: list[bytes]) -> None:
        prefix = static_prefix_digest(tokens, tiled)
        assert prefix is not None
        documents: tuple[str, ...] = ()
        for segment in tiled[:-1]:
            documents = (*documents, segment.doc_id) if segment.doc_id else documents
            num_units = segment.end // BLOCK
            self.shown[prefix, documents] = keys[:num_units], num_units * BLOCK


def prefix_of(static: int = 0) -> bytes:
    found = static_prefix_digest([static] * STATIC, segments(("", STATIC), ("a", STATIC + 1)))
    assert found is not None
    return found


def test_a_prompt_that_was_computed_is_cached_up_to_each_of_its_documents() -> None:
    it = Engine()
    it.ask("ac")
    it.tell()
    cached = [it.mirror.num_cached_tokens(prefix_of(), ids) for ids in ("", "a", "ac", "c", "ca")]
    assert cached == [4, 12, 24, 4, 4]
    assert it.mirror.num_cached_tokens(prefix_of(1), "a") == 0


def test_what_was_evicted_is_not_cached_any_more_and_what_came_back_is() -> None:
    it = Engine()
    keys = it.ask("ac")
    it.tell()
    tree = it.controller.tree
    assert tree.evict(Tier.GPU, 5) is not None
    it.tell()
    assert it.mirror.num_cached_tokens(prefix_of(), "ac") == 8
    it.hold(keys, Tier.DISK)
    it.tell()
    assert it.mirror.num_cached_tokens(prefix_of(), "ac") == 24


def test_nothing_is_told_while_nothing_changes() -> None:
    it = Engine()
    assert it.controller.paths.take_delta() is None
    it.ask("ab")
    it.tell()
    keys = it.ask("ab", question=1)
    delta = it.controller.paths.take_delta()
    assert delta is None, "the question's blocks are nobody's document"
    it.hold(keys, Tier.HOST)
    assert it.controller.paths.take_delta() is None, "it was cached already"


def test_the_first_word_voids_what_was_said_before() -> None:
    it = Engine()
    it.ask("a")
    first = it.controller.paths.take_delta()
    assert first is not None
    assert first["reset"] is True
    it.ask("b")
    second = it.controller.paths.take_delta()
    assert second is not None
    assert "reset" not in second


def test_requests_without_documents_are_not_tracked() -> None:
    it = controller()
    it.paths.track(list(range(8)), segments((None, 8)), [b"0", b"1"])
    assert len(it.paths) == 0
    assert it.paths.take_delta() is None


def test_a_cache_that_is_emptied_at_once_is_told_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache_core.vllm_plugin.cache.prefix_publisher._MAX_VISITS_PER_DELTA", 2)
    it = Engine()
    for documents in ("ab", "ba", "ca", "cb", "ac"):
        it.ask(documents)
    it.check()
    it.controller.tree.clear_tier(Tier.GPU)
    sizes = [len(it.mirror)]
    while it.controller.paths.has_news:
        if (delta := it.controller.paths.take_delta()) is not None:
            it.mirror.apply(delta)
            sizes.append(len(it.mirror))
    assert len(sizes) > 2
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0


def test_the_oldest_paths_are_forgotten_and_said_to_be_gone() -> None:
    it = Engine()
    it.controller.paths = PrefixPublisher(it.controller.tree, BLOCK, max_paths=3)
    it.ask("a")
    it.tell()
    assert it.mirror.num_cached_tokens(prefix_of(), "a") == 12
    it.ask("c")
    it.ask("b")
    it.tell()
    assert len(it.controller.paths) == 3
    assert it.mirror.num_cached_tokens(prefix_of(), "a") == 4
    assert it.mirror.num_cached_tokens(prefix_of(), "b") == 8


def test_the_same_ids_with_other_texts_are_what_was_seen_last() -> None:
    it = controller()
    parts = segments(("", 4), ("a", 12), (None, 16))
    for mark in "xy":
        keys = [b"static", *(f"{mark}{i}".encode() for i in range(3))]
        it.on_new_request(mark, RequestMetadata(parts), keys, 16, 0.0)
        it.paths.track([1] * 16, parts, keys)
        if mark == "x":
            for key in keys:
                location = it.tree.locate(key)
                assert location is not None
                it.tree.add(location.node, 1 << location.unit, Tier.GPU)
            it.paths.take_delta()
    delta: Any = it.paths.take_delta()
    assert [documents for _, documents, num_tokens in delta["set"] if not num_tokens or documents] == [["a"], ["a"]]
    assert delta["set"][-1][2] == 4, "the static part"


class CountedLooks:
    """How often the tracker looks at a node, in all and for one delta at most."""

    def __init__(self, it: CacheController, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_looks = 0
        self.max_for_a_delta = 0
        look, take = it.paths._lead_on, it.paths.take_delta

        def counted_look(node: TreeNode, num_before: int, is_whole: bool) -> tuple[int, bool]:
            self.num_looks += 1
            return look(node, num_before, is_whole)

        def counted_take() -> dict[str, object] | None:
            before = self.num_looks
            delta = take()
            self.max_for_a_delta = max(self.max_for_a_delta, self.num_looks - before)
            return delta

        monkeypatch.setattr(it.paths, "_lead_on", counted_look)
        monkeypatch.setattr(it.paths, "take_delta", counted_take)


def compute(it: CacheController, num_documents: int) -> tuple[list[int], tuple[PromptSegment, ...], list[bytes]]:
    """Let documents of one block each be computed, one behind the other; return tokens, segments and keys."""
    tokens = list(range((num_documents + 1) * BLOCK))
    tiled = segments(("", BLOCK), *((f"d{i}", (i + 2) * BLOCK) for i in range(num_documents)))
    keys = [str(i).encode() for i in range(num_documents + 1)]
    it.on_new_request("r", RequestMetadata(tiled), keys, len(tokens), 0.0)
    deepest = it.tree.locate(keys[-1])
    assert deepest is not None
    for node in deepest.node.path():
        it.tree.add(node, node.full_mask, Tier.GPU)
    return tokens, tiled, keys


def test_nobody_looks_at_thousands_of_documents_behind_the_last_that_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it, mirror = controller(), CachedPaths()
    tokens, tiled, keys = compute(it, 2000)
    it.paths.track(tokens, tiled, keys)
    assert len(it.paths) == MAX_PATH_DOCUMENTS + 1
    looks = CountedLooks(it, monkeypatch)
    while it.paths.has_news:
        mirror.apply(it.paths.take_delta() or {})
    assert looks.num_looks < 40 * MAX_PATH_DOCUMENTS
    prefix = static_prefix_digest(tokens, tiled)
    assert prefix is not None
    shown = tuple(f"d{i}" for i in range(MAX_PATH_DOCUMENTS))
    assert mirror.num_cached_tokens(prefix, shown) == (MAX_PATH_DOCUMENTS + 1) * BLOCK


def test_thousands_of_documents_are_looked_at_piece_by_piece_where_another_path_ends_as_far_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_documents = 3000
    it = controller()
    tokens, _, _ = compute(it, num_documents)
    others = [f"x{i}".encode() for i in range(num_documents + 1)]
    it.paths.track(tokens, segments(("", BLOCK), ("long", len(tokens))), others)
    looks = CountedLooks(it, monkeypatch)
    while it.paths.has_news:
        it.paths.take_delta()
    assert looks.max_for_a_delta <= 2 * max(_MAX_VISITS_PER_DELTA, num_documents + 1)
    assert looks.num_looks < 60 * num_documents, "once each, and a way down for some"


def test_what_is_lost_while_nobody_tracks_it_is_told_of_what_stands_on_it() -> None:
    it = Engine()
    keys = it.ask("ab")
    it.tell()
    tokens, shown = [0] * STATIC + [ord("a")] * LENGTHS["a"], segments(("", STATIC), ("a", STATIC + LENGTHS["a"]))
    it.controller.paths.track(tokens, shown, [keys[0], b"another text", b"of the same name"])
    for key in keys[:2]:
        location = it.controller.tree.locate(key)
        assert location is not None
        it.controller.tree.remove(location.node, location.node.full_mask, Tier.GPU)
    it.controller.paths.track(tokens, shown, keys[:3])
    it.tell()
    assert len(it.mirror) == 0


def test_nothing_waits_to_be_looked_at_where_no_document_is_known() -> None:
    it = controller()
    keys = [b"0", b"1"]
    it.on_new_request("r", RequestMetadata(segments((None, 8))), keys, 8, 0.0)
    location = it.tree.locate(keys[0])
    assert location is not None
    it.tree.add(location.node, location.node.full_mask, Tier.GPU)
    assert it.paths.has_news
    assert it.paths.take_delta() is None
    assert not it.paths.has_news


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.permutations("abcde").map(lambda p: "".join(p[:3])), st.integers(0, 2)),
            st.tuples(st.just("evict"), st.sampled_from(list(Tier)), st.integers(1, 12)),
            st.tuples(st.just("last resort"), st.sampled_from(list(Tier)), st.integers(1, 3)),
            st.tuples(st.just("lower"), st.sampled_from([Tier.HOST, Tier.DISK]), st.integers(0, 30)),
            st.tuples(st.just("lose"), st.sampled_from(list(Tier)), st.integers(0, 30)),
            st.tuples(st.just("clear"), st.sampled_from(list(Tier)), st.none()),
            st.tuples(st.just("tell"), st.none(), st.none()),
            st.tuples(st.just("tell a part"), st.none(), st.none()),
        ),
        max_size=40,
    ),
    st.sampled_from([0, 3, 100_000]),
    st.sampled_from([1, 2, 512]),
)
def test_whatever_happens_the_mirror_says_what_the_tree_would(
    steps: list[Any], ghost_size: int, visits_per_delta: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ragcache_core.vllm_plugin.cache.prefix_publisher._MAX_VISITS_PER_DELTA", visits_per_delta)
        run_steps(Engine(ghost_size=ghost_size), steps)


def run_steps(it: Engine, steps: list[Any]) -> None:
    asked: list[list[bytes]] = []
    for step, what, number in steps:
        match step:
            case "ask":
                asked.append(it.ask(what, question=number, static=number // 2))
            case "evict":
                it.controller.tree.evict_up_to(what, number)
            case "last resort":
                for _ in range(number):
                    it.controller.tree.evict_anything(what)
            case "lower" if asked:
                it.hold(asked[number % len(asked)], what)
            case "lose" if nodes := list(it.controller.tree.nodes()):
                node = nodes[number % len(nodes)]
                it.controller.tree.remove(node, it.controller.tree.resident_mask(node, what), what)
            case "clear":
                it.controller.tree.clear_tier(what)
            case "tell a part":
                it.tell_a_part()
            case "tell":
                it.tell()
    it.check()


# The feed


def delta_of(name: str, num_tokens: int, *, is_reset: bool = False) -> dict[str, object]:
    return encode_delta([PathChange(b"p" * 16, (name,), num_tokens)], is_reset=is_reset)


async def next_message(lines: AsyncGenerator[bytes]) -> Any:
    return json.loads(await asyncio.wait_for(anext(lines), 2))


async def read_snapshot(lines: AsyncGenerator[bytes], into: CachedPaths) -> None:
    while not (message := await next_message(lines)).get("ready"):
        into.apply(message)


async def test_a_reader_gets_what_is_there_and_then_what_changes() -> None:
    feed, copy = PrefixFeed(), CachedPaths()
    feed.add([delta_of("a", 16, is_reset=True), delta_of("b", 32)])
    async with aclosing(feed.lines()) as lines:
        await read_snapshot(lines, copy)
        assert [copy.num_cached_tokens(b"p" * 16, ids) for ids in ("a", "b")] == [16, 32]
        feed.add([delta_of("a", 0), delta_of("c", 48)])
        for line in (await asyncio.wait_for(anext(lines), 2)).splitlines():
            copy.apply(json.loads(line))
        assert [copy.num_cached_tokens(b"p" * 16, ids) for ids in "abc"] == [0, 32, 48]
        assert feed.num_readers == 1
    assert feed.num_readers == 0


async def test_changes_during_the_snapshot_come_after_it() -> None:
    feed, copy = PrefixFeed(), CachedPaths()
    feed.add([delta_of(f"{'x' * 100} {i}", 16) for i in range(1000)])
    async with aclosing(feed.lines()) as lines:
        copy.apply(await next_message(lines))
        feed.add([delta_of(f"{'x' * 100} 999", 0), delta_of("new", 16)])
        await read_snapshot(lines, copy)
        assert len(copy) == 1000
        for line in (await asyncio.wait_for(anext(lines), 2)).splitlines():
            copy.apply(json.loads(line))
    assert len(copy) == len(feed) == 1000
    assert copy.num_cached_tokens(b"p" * 16, ("new",)) == 16


async def test_an_engine_that_was_started_again_resets_its_readers() -> None:
    feed, copy = PrefixFeed(), CachedPaths()
    feed.add([delta_of("a", 16, is_reset=True)])
    async with aclosing(feed.lines()) as lines:
        await read_snapshot(lines, copy)
        feed.add([delta_of("b", 16, is_reset=True)])
        copy.apply(await next_message(lines))
    assert (len(copy), len(feed)) == (1, 1)


async def test_a_reader_that_hears_nothing_hears_a_heartbeat() -> None:
    feed = PrefixFeed(heartbeat_s=0.3)
    async with aclosing(feed.lines()) as lines:
        await read_snapshot(lines, CachedPaths())
        assert await asyncio.wait_for(anext(lines), 2) == HEARTBEAT


async def test_a_slow_reader_is_cut_off_and_holds_nothing() -> None:
    feed, copy = PrefixFeed(max_backlog_bytes=10_000), CachedPaths()
    async with aclosing(feed.lines()) as slow, aclosing(feed.lines()) as quick:
        await read_snapshot(slow, CachedPaths())
        await read_snapshot(quick, copy)
        for i in range(1000):
            feed.add([delta_of(f"d{i}", 16)])
            for line in (await asyncio.wait_for(anext(quick), 2)).splitlines():
                copy.apply(json.loads(line))
        assert feed.num_readers == 1
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(slow), 2)
    assert len(copy) == 1000


async def test_a_server_that_ends_does_not_wait_for_readers() -> None:
    feed, is_ending = PrefixFeed(), False
    async with aclosing(feed.lines(lambda: is_ending)) as lines:
        await read_snapshot(lines, CachedPaths())
        is_ending = True
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(lines), 2)


async def test_a_feed_may_be_fed_by_another_thread() -> None:
    feed = PrefixFeed()
    async with aclosing(feed.lines()) as lines:
        await read_snapshot(lines, CachedPaths())
        await asyncio.to_thread(feed.add, [delta_of("a", 16)])
        assert (await next_message(lines))["set"]


# On the way from the engine to the server


def stats_of(*deltas: dict[str, object]) -> RAGCacheStats:
    return RAGCacheStats.of(requests={}, engine=None, offload=None, paths=deltas)


def test_changes_of_several_steps_are_taken_in_in_their_order() -> None:
    first, second, third = delta_of("a", 16, is_reset=True), delta_of("a", 0), delta_of("b", 16)
    together = stats_of(first).aggregate(stats_of()).aggregate(stats_of(second, third))
    assert together.data["paths"] == [first, second, third]
    assert not together.is_empty()
    assert stats_of().is_empty()
    received = Received()
    received.add(together.data, 0)
    assert len(received.paths) == 1


def test_of_several_engines_only_the_first_is_mirrored() -> None:
    received = Received()
    received.add(stats_of(delta_of("a", 16)).data, 1)
    assert len(received.paths) == 0
