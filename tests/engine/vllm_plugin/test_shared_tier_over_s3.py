"""Two engines over one bucket of S3: what one computed the other loads, and damaged objects change no answer."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import obstore
import pytest
from obstore.store import S3Store

from ragcache_core import CacheConfig, Document, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.client.generation import Generation
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.shared_stores import S3_ENV, s3_server
from tests.support.waiting import until

pytestmark = pytest.mark.slow

BLOCK = 128
"""Few objects for each prompt: this server of S3 is slow, and what is asked of a store has half a second."""
WORDS = ("Zorval", "Tenrik", "was", "a", "company", "founded", "by", "Anna", "Boris", "in", "1823", "makes", "clocks")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    with s3_server() as endpoint:
        for name, value in {**S3_ENV, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        yield S3Store.from_url("s3://kv-bucket/kv", client_options={"allow_http": True})


def ask(engine: Engine, mark: str) -> Generation:
    documents = [Document(f"{mark}-{i}", " ".join(Random(f"{mark} {i}").choices(WORDS, k=220))) for i in range(2)]
    return engine.generate(PromptLayout().render(engine.tokenizer, documents, "Who founded it?"), max_tokens=8)


def names(bucket: S3Store) -> list[str]:
    return sorted(one["path"] for page in obstore.list(bucket) for one in page)


def is_serving(engine: Engine) -> bool:
    return {tier.name: tier.is_enabled for tier in engine.stats().tiers}["shared"]


def test_two_engines_share_a_bucket_and_give_equal_answers_whatever_is_in_it(bucket: S3Store) -> None:
    cache = CacheConfig(kv_cache_bytes="64MiB", block_size=BLOCK, host_bytes="64MiB", shared="s3://kv-bucket/kv")
    settings = {**ENGINE_ARGS, "cache": cache, "max_restarts": 0}
    with Engine.launch(str(DEMO_MODEL), **settings) as one, Engine.launch(str(DEMO_MODEL), **settings) as other:
        whole, damaged = ([f"{kind}-{i}" for i in range(3)] for kind in ("whole", "damaged"))
        answers = {mark: ask(one, mark) for mark in (*whole, *damaged)}
        num_blocks = sum(answer.stats.num_computed_tokens // BLOCK for answer in answers.values())
        assert until(lambda: len(names(bucket)) >= num_blocks - len(answers), 60.0)

        def ask_again(mark: str) -> int:
            assert until(lambda: is_serving(other), 30.0)  # on a busy machine it may be late, and then rests
            again = ask(other, mark)
            assert again.text == answers[mark].text
            return again.stats.num_shared_tokens or 0

        assert sum(map(ask_again, whole)) >= 4 * BLOCK
        for name in names(bucket):
            obstore.put(bucket, name, bytes(obstore.get(bucket, name).bytes())[:-1])
        assert sum(map(ask_again, damaged)) == 0
        assert other.stats().num_corrupt_blocks > 0
