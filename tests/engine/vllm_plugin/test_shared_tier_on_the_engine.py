"""Two engines over one Redis: what one computed the other loads, and no answer changes whatever becomes of the store.

Two engines of this module's own. The last test kills the Redis.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from ragcache_core import CacheConfig, Document, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.client.generation import Generation
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.shared_stores import RedisServer, redis_server
from tests.support.waiting import until

pytestmark = pytest.mark.slow

BLOCK = 32
WORDS = ("Zorval", "Tenrik", "was", "a", "company", "founded", "by", "Anna", "Boris", "in", "1823", "makes", "clocks")
QUESTION = "Who founded Zorval?"
BOUND_S = 2.0
"""What a store that dies may cost a request besides computing: its look-up, its load, and a busy machine."""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as running:
        yield running


@pytest.fixture(scope="module")
def pair(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """Two engines. The second encrypts nothing either, and knows the first by their store alone."""
    folder = tmp_path_factory.mktemp("shared")
    cache = CacheConfig(
        kv_cache_bytes="64MiB",
        block_size=BLOCK,
        host_bytes="64MiB",
        shared=server.url,
        shared_ttl=600.0,
        shared_bytes="64MiB",
    )
    settings: dict[str, Any] = {**ENGINE_ARGS, "cache": cache, "max_restarts": 0}
    with (
        Engine.launch(str(DEMO_MODEL), log_path=folder / "one.log", **settings) as one,
        Engine.launch(str(DEMO_MODEL), log_path=folder / "other.log", **settings) as other,
    ):
        yield one, other


def ask(engine: Engine, mark: str) -> Generation:
    documents = [Document(f"{mark}-{i}", " ".join(Random(f"{mark} {i}").choices(WORDS, k=220))) for i in range(2)]
    return engine.generate(PromptLayout().render(engine.tokenizer, documents, QUESTION), max_tokens=8)


def is_stored(engine: Engine, num_blocks: int) -> bool:
    tiers = {tier.name: tier for tier in engine.stats().tiers}
    return tiers["shared"].num_blocks >= num_blocks


def computed(engine: Engine, *marks: str) -> list[Generation]:
    """Compute prompts, and wait until the store has them."""
    before = next(tier.num_blocks for tier in engine.stats().tiers if tier.name == "shared")
    answers = [ask(engine, mark) for mark in marks]
    num_new = sum(answer.stats.num_computed_tokens // BLOCK - 2 for answer in answers)
    assert until(lambda: is_stored(engine, before + num_new), 30.0)
    return answers


def test_what_one_engine_computed_the_other_answers_from_the_store_token_for_token(
    pair: tuple[Engine, Engine],
) -> None:
    one, other = pair
    marks = [f"first-{i}" for i in range(4)]
    for mark, answer in zip(marks, computed(one, *marks), strict=True):
        again = ask(other, mark)
        assert again.text == answer.text
        assert (again.stats.num_shared_tokens or 0) >= answer.stats.num_prompt_tokens - 4 * BLOCK
        assert again.stats.num_cached_tokens == sum(
            (again.stats.num_gpu_tokens or 0, again.stats.num_host_tokens or 0, again.stats.num_shared_tokens or 0)
        )
    tiers = {tier.name: tier for tier in other.stats().tiers}
    assert tiers["shared"].num_hit_tokens > 0
    assert tiers["shared"].is_enabled
    assert list(tiers) == ["gpu", "host", "shared"]


def test_damaged_objects_change_no_answer(pair: tuple[Engine, Engine], server: RedisServer) -> None:
    one, other = pair
    marks = [f"damaged-{i}" for i in range(3)]
    answers = computed(one, *marks)
    client = server.client()
    for number, name in enumerate(sorted(client.keys())):
        if number % 3 == 0:
            client.setrange(name, 2048, os.urandom(512))
    for mark, answer in zip(marks, answers, strict=True):
        assert ask(other, mark).text == answer.text
    assert other.stats().num_corrupt_blocks > 0


def test_the_cache_is_listed_and_forgotten_with_a_shared_store(
    pair: tuple[Engine, Engine], server: RedisServer
) -> None:
    one, other = pair
    computed(one, "listed")
    num_before = len(server.client().keys())
    assert any(document.id == "listed-0" for document in one.cache.ls().documents)
    receipt = one.forget(["listed-0", "listed-1"])
    assert set(receipt.forgotten) == {"listed-0", "listed-1"}
    assert receipt.is_complete
    assert until(lambda: len(server.client().keys()) < num_before, 10.0)
    assert (ask(other, "listed").stats.num_shared_tokens or 0) <= 2 * BLOCK, "its prefix alone"


def test_a_store_that_is_killed_fails_no_request_and_holds_none(
    pair: tuple[Engine, Engine], server: RedisServer
) -> None:
    one, other = pair
    marks = [f"killed-{i}" for i in range(6)]
    answers = computed(one, *marks)
    began_s = time.monotonic()
    new = ask(other, "computed-alone")
    computing_s = time.monotonic() - began_s
    assert new.stats.num_computed_tokens > 100
    for number, (mark, answer) in enumerate(zip(marks, answers, strict=True)):
        if number == 2:
            server.process.kill()
        began_s = time.monotonic()
        assert ask(other, mark).text == answer.text
        assert time.monotonic() - began_s < computing_s + BOUND_S
    stats = other.stats()
    assert stats.num_shared_failures >= 1
    assert not next(tier for tier in stats.tiers if tier.name == "shared").is_enabled
