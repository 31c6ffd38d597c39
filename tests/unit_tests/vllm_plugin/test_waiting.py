"""How the engine's controller ranks the requests that wait, and protects what they will find."""

from __future__ import annotations

from time import perf_counter

from ragcache_core.queueing import CacheAwareQueue
from ragcache_core.tree import check_invariants
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.controller import CacheController
from ragcache_core.wire import RequestMetadata
from tests.unit_tests.vllm_plugin.scene import BLOCK, controller, keys, segments


def wait(it: CacheController, request_id: str, *documents: str, num_blocks: int = 2) -> list[bytes]:
    """Announce a request over documents of ``num_blocks`` blocks, and return its keys."""
    chain, name, ends = [], "", []
    for document in documents:
        name += document
        chain += keys(num_blocks, name + ":")
        ends.append((document, len(chain) * BLOCK))
    parts = segments(*ends, (None, len(chain) * BLOCK + 2))
    it.on_new_request(request_id, RequestMetadata(parts), chain, parts[-1].end, 0.0)
    return chain


def put(it: CacheController, key: bytes, tier: Tier = Tier.GPU) -> None:
    location = it.tree.locate(key)
    assert location is not None
    it.tree.add(location.node, 1 << location.unit, tier)


def test_the_priority_is_cached_over_computed_tokens_and_follows_the_tiers() -> None:
    it = controller()
    chain = wait(it, "r", "a", "b")
    assert it.order_priority("r") == 0
    assert it.take_touched() == set()
    for key in chain[:2]:
        put(it, key)
    put(it, chain[2], Tier.HOST)
    assert it.take_touched() == {"r"}
    assert it.order_priority("r") == 12 / 6
    location = it.tree.locate(chain[0])
    assert location is not None
    it.tree.remove(location.node, 1, Tier.GPU)
    assert it.take_touched() == {"r"}
    assert it.order_priority("r") == 0, "a prefix begins at the beginning"


def test_a_change_touches_those_on_whose_path_it_is_even_after_a_split() -> None:
    it = controller()
    long = wait(it, "long", "a", num_blocks=6)
    wait(it, "other", "z")
    it.take_touched()
    it.on_new_request("short", RequestMetadata(segments(("a", 8), (None, 10))), long[:2], 10, 0.0)
    it.take_touched()
    put(it, long[4])
    assert it.take_touched() == {"long"}
    put(it, long[0])
    assert it.take_touched() == {"long", "short"}
    it.on_admitted("long", long, {}, 1.0)
    put(it, long[1])
    assert it.take_touched() == {"short"}


def test_an_unknown_request_has_no_priority() -> None:
    assert controller().order_priority("nobody") == 0


def test_a_waiting_requests_path_is_protected_until_it_is_admitted_or_ends() -> None:
    it = controller()
    it.waiting.max_protected_units = 8
    first, second = wait(it, "r1", "a"), wait(it, "r2", "a", "b")
    for key in (*first, *second):
        put(it, key)
    assert set(it.tree.protected_keys) == {first[-1], second[-1]}
    it.on_admitted("r1", first, {}, 1.0)
    assert set(it.tree.protected_keys) == {second[-1]}
    it.on_finished("r2")
    it.on_finished("r1")
    assert not it.tree.protected_keys
    check_invariants(it.tree)


def test_no_more_is_protected_than_fits_and_the_next_follow_in_their_turn() -> None:
    it = controller()
    it.waiting.max_protected_units = 5
    chains = [wait(it, f"r{i}", name) for i, name in enumerate("abcd")]
    assert set(it.tree.protected_keys) == {chains[0][-1], chains[1][-1]}
    large = wait(it, "large", "x", "y", "z")
    it.on_finished("r0")
    assert set(it.tree.protected_keys) == {chains[1][-1], chains[2][-1]}
    for i in (1, 2, 3):
        it.on_finished(f"r{i}")
    assert large[-1] not in it.tree.protected_keys, "it alone is more than may be protected"
    it.on_finished("large")
    assert not it.tree.protected_keys


def test_a_speculative_request_is_neither_protected_nor_pending_until_it_is_confirmed() -> None:
    it = controller()
    it.waiting.max_protected_units = 8
    it.on_new_request("r", RequestMetadata(segments(("a", 8), (None, 10)), "s"), keys(2), 10, 0.0)
    assert not it.tree.protected_keys
    assert it.is_speculative("r")
    assert it.num_pending_prefills == 0
    assert it.confirm("s") == ["r"]
    assert set(it.tree.protected_keys) == {keys(2)[-1]}
    assert it.num_pending_prefills == 1
    it.on_admitted("r", keys(2), {}, 1.0)
    it.on_first_token("r", 1.0)
    assert it.num_pending_prefills == 0
    figures = it.on_finished("r")
    assert figures is not None
    assert (figures["is_speculative"], figures["is_confirmed"]) == (True, True)


def test_reordered_prompts_are_counted() -> None:
    it = controller()
    for request_id, is_reordered in (("r1", True), ("r2", False)):
        metadata = RequestMetadata(segments(("a", 8), (None, 10)), None, is_reordered)
        it.on_new_request(request_id, metadata, keys(2), 10, 0.0)
        it.on_admitted(request_id, keys(2), {}, 1.0)
    assert it.report()["num_reordered_prompts"] == 1


def test_ordering_256_waiting_requests_takes_a_fraction_of_a_millisecond_a_step() -> None:
    it = controller()
    it.waiting.max_protected_units = 2000
    queue: CacheAwareQueue[_Request] = CacheAwareQueue(lambda request: it.order_priority(request.name))
    chains: dict[str, list[bytes]] = {}
    waiting: dict[str, _Request] = {}
    for i in range(256):
        name = f"r{i}"
        chains[name] = wait(it, name, "system", *(f"d{(i * k) % 40}" for k in range(1, 5)))
        queue.add(waiting.setdefault(name, _Request(name)))
    queue.peek()
    took = []
    for step in range(100):
        put(it, chains[f"r{step}"][2 + step % 8])
        began = perf_counter()
        queue.reconsider()
        for name in it.take_touched():
            queue.touch(waiting[name])
        chosen = queue.pop()
        took.append(perf_counter() - began)
        it.on_admitted(chosen.name, chains[chosen.name], {}, 1.0)
    assert sorted(took)[len(took) // 2] < 0.001, "0.1 ms on an idle machine"


class _Request:
    def __init__(self, name: str) -> None:
        self.name = name
