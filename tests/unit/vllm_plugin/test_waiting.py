"""How the engine's controller ranks the requests that wait."""

from __future__ import annotations

import random
from statistics import median
from time import process_time

import pytest

from ragcache_core.policy import PrefillCostModel
from ragcache_core.queueing import CacheAwareQueue
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController
from ragcache_core.wire import RequestMetadata
from tests.unit.vllm_plugin.scene import BLOCK, controller, keys, segments


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


def drop(it: CacheController, key: bytes) -> None:
    location = it.tree.locate(key)
    assert location is not None
    for tier in Tier:
        if it.tree.resident_mask(location.node, tier) >> location.unit & 1:
            it.tree.remove(location.node, 1 << location.unit, tier)


def is_cached(it: CacheController, key: bytes) -> bool:
    location = it.tree.locate(key)
    assert location is not None
    return any(it.tree.resident_mask(location.node, tier) >> location.unit & 1 for tier in Tier)


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


def test_a_change_touches_only_prefixes_that_contain_it_even_after_a_split() -> None:
    it = controller()
    long = wait(it, "long", "a", num_blocks=6)
    wait(it, "other", "z")
    it.take_touched()
    it.on_new_request("short", RequestMetadata(segments(("a", 8), (None, 10))), long[:2], 10, 0.0)
    it.take_touched()
    put(it, long[4])
    assert it.take_touched() == set(), "what stands before it is not there"
    for key in long[:2]:
        put(it, key)
    assert it.take_touched() == {"long", "short"}
    put(it, long[2])
    assert it.take_touched() == {"long"}
    it.on_admitted("long", long, {}, 1.0)
    drop(it, long[1])
    assert it.take_touched() == {"short"}
    assert it.order_priority("short") == 4 / 6


def test_priorities_follow_whatever_comes_goes_and_is_cut() -> None:
    rng = random.Random(7)
    it = controller()
    chains: dict[str, list[bytes]] = {}
    known: dict[str, float] = {}
    for step in range(4000):
        match rng.randrange(8):
            case 0 if len(chains) < 20:
                names = rng.choices("abc", k=rng.randint(1, 3))
                chain = wait(it, f"r{step}", *names, num_blocks=3)
                chains[f"r{step}"] = chain
            case 1 if len(chains) > 8:
                gone = rng.choice(list(chains))
                del chains[gone]
                it.on_finished(gone)
            case 2 if chains:
                chain = rng.choice(list(chains.values()))
                cut = rng.randrange(1, len(chain))
                parts = segments(("other", cut * BLOCK), (None, cut * BLOCK + 1))
                it.on_new_request(f"cut{step}", RequestMetadata(parts), chain[:cut], parts[-1].end, 0.0)
                it.on_finished(f"cut{step}")
            case 3 if chains:
                drop(it, rng.choice(rng.choice(list(chains.values()))))
            case _ if chains:
                key = rng.choice(rng.choice(list(chains.values())))
                put(it, key, rng.choice((Tier.GPU, Tier.HOST)))
        if rng.random() < 0.5:
            continue
        touched = it.take_touched()
        for name, chain in chains.items():
            num_cached = next((i for i, key in enumerate(chain) if not is_cached(it, key)), len(chain)) * BLOCK
            assert it.order_priority(name) == num_cached / (len(chain) * BLOCK + 2 - num_cached)
            assert name in touched or it.order_priority(name) == known.get(name, it.order_priority(name))
            known[name] = it.order_priority(name)


def test_what_is_cached_of_a_waiting_request_takes_no_time() -> None:
    it, cost = controller(), PrefillCostModel.default()
    parts = segments(("a", 8), (None, 10))
    for request_id, num_local in (("first", 0), ("second", 8)):
        it.on_new_request(request_id, RequestMetadata(parts), keys(2), 10, 0.0)
        assert it.pending_prefill_s == cost.estimate_s(0, 10), "nothing is cached when they arrive"
        it.on_looked_up(request_id, num_local)
        it.on_admitted(request_id, keys(2), {}, 1.0)
        assert it.pending_prefill_s == pytest.approx(cost.estimate_s(num_local, 10 - num_local))
        it.on_first_token(request_id, 2.0)
        assert it.pending_prefill_s == 0.0


def test_a_speculative_request_is_not_pending_until_it_is_confirmed() -> None:
    it = controller()
    it.on_new_request("r", RequestMetadata(segments(("a", 8), (None, 10)), "s"), keys(2), 10, 0.0)
    assert it.is_speculative("r")
    assert it.num_pending_prefills == 0
    assert it.confirm("s") == ["r"]
    it.on_waiting("r")
    assert it.num_pending_prefills == 1
    it.on_admitted("r", keys(2), {}, 1.0)
    it.on_first_token("r", 1.0)
    assert it.num_pending_prefills == 0
    figures = it.on_finished("r")
    assert figures is not None
    assert (figures["is_speculative"], figures["is_confirmed"]) == (True, True)


def test_a_preempted_speculation_that_is_confirmed_is_watched_until_it_is_admitted_again() -> None:
    it = controller()
    it.on_new_request("r", RequestMetadata(segments(("a", 8), (None, 10)), "s"), keys(2), 10, 0.0)
    it.on_admitted("r", keys(2), {}, 1.0)
    assert it.confirm("s") == ["r"]
    it.on_waiting("r")
    put(it, keys(2)[0])
    assert it.take_touched() == {"r"}
    it.on_admitted("r", keys(2), {}, 2.0)


@pytest.mark.parametrize("block", [50, 99])
def test_a_document_that_256_requests_wait_for_may_lose_a_block_and_get_it_back(block: int) -> None:
    it = controller()
    steps = _Steps(it)
    for i in range(256):
        chain = steps.add(f"r{i}", "hot", f"d{i}", num_blocks=100)
    for key in chain[:100]:
        put(it, key)
    steps.choose()
    for step in range(100):
        (put if step % 2 else drop)(it, chain[block])
        steps.choose()
        num_cached = 400 if step % 2 else block * BLOCK
        assert {it.order_priority(f"r{i}") for i in range(256)} == {num_cached / (802 - num_cached)}
    assert median(steps.duration_s) < 4 * median(steps.all_priorities_s), "1.8 times: 256 priorities have changed"


class _Steps:
    """A queue, and what its steps cost in CPU time: to find whom a change concerns, and with the choice of the next.

    Beside each of them, what a step without marks would take: to ask for every waiting request's priority.
    """

    def __init__(self, it: CacheController) -> None:
        self.queue: CacheAwareQueue[_Request] = CacheAwareQueue(lambda request: it.order_priority(request.name))
        self.found_s: list[float] = []
        self.duration_s: list[float] = []
        self.all_priorities_s: list[float] = []
        self._it = it
        self._waiting: dict[str, _Request] = {}

    def add(self, name: str, *documents: str, num_blocks: int = 2) -> list[bytes]:
        chain = wait(self._it, name, *documents, num_blocks=num_blocks)
        self.queue.add(self._waiting.setdefault(name, _Request(name)))
        return chain

    def choose(self) -> None:
        """Do what a step does before it takes a request from the queue."""
        began_s = process_time()
        self.queue.reconsider()
        touched = self._it.take_touched()
        self.found_s.append(process_time() - began_s)
        self.queue.touch(*map(self._waiting.__getitem__, touched))
        self.queue.peek()
        self.duration_s.append(process_time() - began_s)
        began_s = process_time()
        for i in range(256):
            self._it.order_priority(f"r{i}")
        self.all_priorities_s.append(process_time() - began_s)


class _Request:
    def __init__(self, name: str) -> None:
        self.name = name
