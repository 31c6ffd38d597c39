"""The engine says which orders of documents are cached, and those who ask know it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.chunkstore.chunks import ChunkEntry
from ragcache_core.chunkstore.regrowing import note_of, regrow
from ragcache_core.ordering import MAX_PATH_DOCUMENTS, CachedPaths, best_order, static_prefix_digest
from ragcache_core.tree import PathSegment, check_invariants
from ragcache_core.types import PromptSegment, Tier
from ragcache_core.vllm_plugin.cache import prefix_publisher
from ragcache_core.vllm_plugin.cache.controller import CacheController
from ragcache_core.vllm_plugin.cache.prefix_publisher import PrefixPublisher
from ragcache_core.wire import RequestMetadata
from tests.unit.vllm_plugin.scene import BLOCK, controller, segments

STATIC = 5
LENGTHS = {"a": 8, "b": 4, "c": 11, "d": 1, "e": 3}
QUESTION = 6


class Engine:
    """A controller, requests that run through it, and a mirror that is told what it tells."""

    def __init__(self, **settings: Any) -> None:
        self.controller: CacheController = controller(**settings)
        self.mirror, self.cursor = CachedPaths(), ""
        self.last: list[Any] = []
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
        keys = [key_of(tokens[: BLOCK * (i + 1)]) for i in range(len(tokens) // BLOCK)]
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

    def publish(self) -> int:
        """Ask until nothing is left to say; return how many answers that took."""
        num_answers = 1
        while not self.publish_a_part():
            num_answers += 1
        return num_answers

    def publish_a_part(self) -> bool:
        answer: Any = json.loads(json.dumps(self.controller.paths.changes(self.cursor)))
        if answer["is_reset"]:
            self.mirror = CachedPaths()
        self.cursor, self.last = answer["cursor"], answer["changes"]
        self.mirror.apply(answer["changes"])
        return bool(answer["is_complete"])

    def check(self) -> None:
        """Compare the mirror with what the tree itself finds."""
        self.publish()
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


def key_of(tokens: list[int]) -> bytes:
    return hashlib.sha256(repr(tokens).encode()).digest()


def prefix_of(static: int = 0) -> bytes:
    found = static_prefix_digest([static] * STATIC, segments(("", STATIC), ("a", STATIC + 1)))
    assert found is not None
    return found


def test_a_prompt_that_was_computed_is_cached_up_to_each_of_its_documents() -> None:
    it = Engine()
    it.ask("ac")
    it.publish()
    cached = [it.mirror.num_cached_tokens(prefix_of(), ids) for ids in ("", "a", "ac", "c", "ca")]
    assert cached == [4, 12, 24, 4, 4]
    assert it.mirror.num_cached_tokens(prefix_of(1), "a") == 0


def restarted(old: Engine, **settings: Any) -> Engine:
    """Return an engine whose tree grew again from all that ``old`` has in any tier, as from a disk."""
    tree, new = old.controller.tree, Engine(**settings)
    places = [
        place
        for node in tree.nodes()
        for key in node.keys
        if (place := tree.locate(key)) and any(tree.resident_mask(node, tier) >> place.unit & 1 for tier in Tier)
    ]
    places.sort(key=lambda place: place.node.start + place.unit)
    notes = [(cast("bytes", place.node.keys[place.unit]), note_of(tree, place)) for place in places]
    entries = [
        ChunkEntry(key, note.parent, note.doc_id, note.position, note.frequency, note.cost, 0.0, note.is_private)
        for key, note in notes
    ]
    regrow(new.controller.tree, entries, Tier.DISK, BLOCK)
    return new


def test_what_the_tree_has_from_before_a_restart_is_known_from_the_first_request_on() -> None:
    old = Engine()
    for documents in ("ac", "bca", "cb"):
        old.ask(documents)
    new = restarted(old)
    new.publish()
    assert new.last == [], "their prefix is not known"
    new.ask("ab")
    new.shown |= old.shown
    new.check()
    assert new.mirror.num_cached_tokens(prefix_of(), "bca") == 28
    assert best_order([new.mirror], "abc", prefix=prefix_of(), keep_first=False) == (1, 2, 0)
    assert new.controller.tree.evict(Tier.DISK, 5) is not None
    new.check()


def test_paths_from_before_a_restart_belong_to_the_static_prefix_in_front_of_them() -> None:
    old = Engine()
    old.ask("ac", static=1)
    new = restarted(old)
    new.ask("b", static=2)
    new.publish()
    assert new.mirror.num_cached_tokens(prefix_of(2), "a") == 4
    new.ask("b", static=1)
    new.publish()
    assert new.mirror.num_cached_tokens(prefix_of(1), "ac") == 24


def test_private_documents_are_not_reported_after_a_restart() -> None:
    old = Engine()
    old.ask("ac")
    new = restarted(old)
    for node in new.controller.tree.nodes():
        node.is_private = node.doc_id == "c"
    new.ask("b")
    new.publish()
    assert new.mirror.num_cached_tokens(prefix_of(), "ac") == new.mirror.num_cached_tokens(prefix_of(), "a") == 12


@pytest.mark.parametrize(
    ("owner", "is_everybodys", "is_acmes"),
    [(None, True, False), ("book", True, False), ("acme", False, True), ("gone", False, False)],
)
def test_after_a_restart_tenants_see_their_own_and_unowned_documents(
    tmp_path: Path, owner: str | None, is_everybodys: bool, is_acmes: bool
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f'[[tenants]]\nname = "acme"\nkeys = ["{"a" * 16}"]\n[[collections]]\nname = "book"\nids = ["c"]\n')
    old = Engine()
    old.ask("ac")
    new = restarted(old, tenants=path)
    for node in new.controller.tree.nodes():
        node.owner = owner if node.doc_id else None
    new.ask("b")
    new.publish()
    assert (new.mirror.num_cached_tokens(prefix_of(), "ac") == 24) == is_everybodys
    acmes, mirror = new.controller.paths_of("acme"), CachedPaths()
    tokens = [0] * STATIC + [ord("b")] * LENGTHS["b"]
    keys = [key_of(tokens[: BLOCK * (i + 1)]) for i in range(len(tokens) // BLOCK)]
    acmes.track(tokens, segments(("", STATIC), ("b", len(tokens))), keys)
    mirror.apply(acmes.changes("")["changes"])
    assert (mirror.num_cached_tokens(prefix_of(), "ac") == 24) == is_acmes


def test_each_of_several_engines_knows_its_own_part_of_a_cursor() -> None:
    engines = [Engine(), Engine()]
    for it, documents in zip(engines, ("ac", "b"), strict=True):
        it.ask(documents)
        it.publish()
    cursor = "-".join(it.cursor for it in engines)
    for it in engines:
        it.ask("e")
        it.cursor = cursor
        it.publish()
        assert [change[1] for change in it.last] == [["e"]], "and nothing of what was told before"


def test_the_tree_is_not_followed_once_no_client_polls() -> None:
    it = Engine()
    it.controller.paths = PrefixPublisher(it.controller.tree, BLOCK, max_unread=5)
    it.ask("a")
    it.publish()
    it.controller.on_step(1.0, 2.0)
    assert it.controller.paths.is_following
    for documents in ("ab", "ac", "bc", "cb"):
        it.ask(documents)
    it.controller.on_step(2.0, 3.0)
    assert not it.controller.paths.is_following
    keys = it.ask("ca")
    it.controller.tree.remove(it.controller.locate_block(keys, 0).node, 1, Tier.GPU)
    it.check()


def test_a_cache_that_is_emptied_at_once_is_reported_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache_core.vllm_plugin.cache.prefix_publisher._MAX_AT_ONCE", 2)
    it = Engine()
    for documents in ("ab", "ba", "ca", "cb", "ac"):
        it.ask(documents)
    assert it.publish() > 2
    it.check()
    it.controller.tree.clear_tier(Tier.GPU)
    assert it.publish() > 2
    assert len(it.mirror) == 0


def test_the_oldest_paths_are_forgotten_and_said_to_be_gone() -> None:
    it = Engine()
    it.controller.paths = PrefixPublisher(it.controller.tree, BLOCK, max_paths=3)
    it.ask("a")
    it.publish()
    assert it.mirror.num_cached_tokens(prefix_of(), "a") == 12
    it.ask("c")
    it.ask("b")
    it.publish()
    assert len(it.controller.paths) == 3
    assert it.mirror.num_cached_tokens(prefix_of(), "a") == 4
    assert it.mirror.num_cached_tokens(prefix_of(), "b") == 8


def test_documents_after_the_last_reported_one_are_not_checked() -> None:
    it = Engine()
    num_documents = 2000
    tokens = list(range((num_documents + 1) * BLOCK))
    tiled = segments(("", BLOCK), *((f"d{i}", (i + 2) * BLOCK) for i in range(num_documents)))
    keys = [str(i).encode() for i in range(num_documents + 1)]
    it.controller.on_new_request("r", RequestMetadata(tiled), keys, len(tokens), 0.0)
    it.controller.paths.track(tokens, tiled, keys)
    assert len(it.controller.paths) == MAX_PATH_DOCUMENTS + 1
    it.publish()
    it.hold(keys, Tier.GPU)
    it.publish()
    assert len(it.last) == MAX_PATH_DOCUMENTS + 1
    prefix = static_prefix_digest(tokens, tiled)
    assert prefix is not None
    shown = tuple(f"d{i}" for i in range(MAX_PATH_DOCUMENTS))
    assert it.mirror.num_cached_tokens(prefix, shown) == (MAX_PATH_DOCUMENTS + 1) * BLOCK


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.permutations("abcde").map(lambda p: "".join(p[:3])), st.integers(0, 2)),
            st.tuples(st.just("evict"), st.sampled_from(list(Tier)), st.integers(1, 12)),
            st.tuples(st.just("last resort"), st.sampled_from(list(Tier)), st.integers(1, 3)),
            st.tuples(st.just("lower"), st.sampled_from([Tier.HOST, Tier.DISK]), st.integers(0, 30)),
            st.tuples(st.just("lose"), st.sampled_from(list(Tier)), st.integers(0, 30)),
            st.tuples(st.just("clear"), st.sampled_from(list(Tier)), st.none()),
            st.tuples(st.just("publish"), st.none(), st.none()),
            st.tuples(st.just("publish a part"), st.none(), st.none()),
        ),
        max_size=40,
    ),
    st.sampled_from([0, 3, 100_000]),
    st.sampled_from([1, 2, 1000]),
    st.sampled_from([3, 50_000]),
)
def test_whatever_happens_the_mirror_reports_what_the_tree_would(
    steps: list[Any], ghost_size: int, num_at_once: int, max_unread: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ragcache_core.vllm_plugin.cache.prefix_publisher._MAX_AT_ONCE", num_at_once)
        it = Engine(ghost_size=ghost_size)
        it.controller.paths = PrefixPublisher(it.controller.tree, BLOCK, max_unread=max_unread)
        run_steps(it, steps)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.permutations("abc").map(lambda p: "".join(p)), st.integers(0, 3)), min_size=1, max_size=6),
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.permutations("abc").map(lambda p: "".join(p[:2])), st.integers(0, 2)),
            st.tuples(st.just("evict"), st.sampled_from(list(Tier)), st.integers(1, 12)),
            st.tuples(st.just("lose"), st.sampled_from(list(Tier)), st.integers(0, 30)),
            st.tuples(st.just("publish a part"), st.none(), st.none()),
        ),
        max_size=20,
    ),
    st.sampled_from([1, 2, 1000]),
)
def test_whatever_happens_after_a_restart_the_mirror_reports_what_the_tree_would(
    before: list[tuple[str, int]], steps: list[Any], num_at_once: int
) -> None:
    old = Engine()
    for documents, question in before:
        old.ask(documents, question, static=question // 2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prefix_publisher, "_MAX_AT_ONCE", num_at_once)
        it = restarted(old)
        it.shown |= old.shown
        run_steps(it, [("ask", "ab", 0), ("ask", "ab", 2), *steps])


def run_steps(it: Engine, steps: list[Any]) -> None:
    asked: list[list[bytes]] = []
    for step, what, number in steps:
        it.controller.on_step(0.0, 1.0)
        match step:
            case "ask":
                asked.append(it.ask(what, question=number, static=number // 2))
            case "evict":
                it.controller.tree.evict_up_to(what, number)
            case "last resort":
                for _ in range(number):
                    it.controller.tree.evict_anything(what)
            case "lower" if asked and it.controller.tree.locate((keys := asked[number % len(asked)])[-1]) is not None:
                it.hold(keys, what)
            case "lose" if nodes := list(it.controller.tree.nodes()):
                node = nodes[number % len(nodes)]
                it.controller.tree.remove(node, it.controller.tree.resident_mask(node, what), what)
            case "clear":
                it.controller.tree.clear_tier(what)
            case "publish a part":
                it.publish_a_part()
            case "publish":
                it.publish()
    it.check()
