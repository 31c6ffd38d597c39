"""GPU, host and disk on the real engine: the same answers from every tier, and figures that add up.

One engine of this module's own, with tiers so small that a few prompts go through all of them. The last tests kill it.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ragcache_core import CacheConfig, Document, PromptLayout, RequestStats
from ragcache_core.chunkstore.compression import is_installed
from ragcache_core.client import Engine
from ragcache_core.client.generation import Generation, join_chunks
from ragcache_core.errors import EngineError, RequestRejectedError
from ragcache_core.prompt import RenderedPrompt
from ragcache_core.types import Tier
from ragcache_core.wire import tile
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.kv_events import KVEvents
from tests.support.waiting import until

LAYOUT = PromptLayout()
BLOCK = 32
NUM_GPU_BLOCKS, NUM_HOST_BLOCKS = 96, 48
BLOCK_BYTES = 128 << 10
WORDS = ("Zorval", "Tenrik", "was", "a", "company", "founded", "by", "Anna", "Boris", "in", "1823", "makes", "clocks")
QUESTION = "Who founded Zorval?"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "server.log"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> CacheConfig:
    return CacheConfig(
        kv_cache_bytes=NUM_GPU_BLOCKS * BLOCK_BYTES,
        block_size=BLOCK,
        host_bytes=NUM_HOST_BLOCKS * BLOCK_BYTES,
        disk_bytes="256MiB",
        directory=tmp_path_factory.mktemp("kv"),
        compression="zstd" if is_installed() else "auto",
        retained_share=0.5,
    )


@pytest.fixture(scope="module")
def kv_events(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVEvents]:
    """What the engine publishes of its blocks, from its start on."""
    with KVEvents(f"ipc://{tmp_path_factory.mktemp('events')}/kv") as events:
        yield events


@pytest.fixture(scope="module")
def tiers(cache: CacheConfig, log_path: Path, kv_events: KVEvents) -> Iterator[Engine]:
    """An engine whose GPU holds four prompts of two documents, and whose host memory holds two."""
    settings: dict[str, Any] = {**ENGINE_ARGS, "cache": cache, "env": {"VLLM_SERVER_DEV_MODE": "1"}}
    settings["kv_events_config"] = {"enable_kv_cache_events": True, "endpoint": kv_events.endpoint}
    with Engine.launch(str(DEMO_MODEL), log_path=log_path, max_restarts=2, **settings) as running:
        yield running


def documents(mark: str, num_documents: int = 2, num_words: int = 220) -> list[Document]:
    """Return documents that no other test has in the cache; two of 220 words are about 760 tokens."""
    return [
        Document(f"{mark}-{i}", " ".join(Random(f"{mark} {i}").choices(WORDS, k=num_words)))
        for i in range(num_documents)
    ]


class Answers:
    """Asks, checks that every answer to the same prompt is the same, and adds the figures up."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.texts: dict[tuple[str, int], str] = {}
        self.num_requests = self.num_prompt_tokens = 0
        self.num_tokens = dict.fromkeys(Tier, 0)

    def ask(self, mark: str, num_documents: int = 2, **settings: Any) -> RequestStats:
        prompt = LAYOUT.render(self.engine.tokenizer, documents(mark, num_documents), QUESTION)
        generation = self.engine.generate(prompt, **{"max_tokens": 8, **settings})
        self.check(mark, num_documents, generation.text, generation.stats)
        return generation.stats

    def check(self, mark: str, num_documents: int, text: str, stats: RequestStats) -> None:
        assert self.texts.setdefault((mark, num_documents), text) == text
        by_tier = {
            Tier.GPU: stats.num_gpu_tokens,
            Tier.HOST: stats.num_host_tokens,
            Tier.DISK: stats.num_disk_tokens,
        }
        assert all(count is not None and count % BLOCK == 0 for count in by_tier.values())
        assert sum(count or 0 for count in by_tier.values()) == stats.num_cached_tokens
        assert stats.num_computed_tokens > 0
        below_the_gpu = stats.num_cached_tokens - (stats.num_gpu_tokens or 0)
        assert stats.num_loaded_bytes is not None
        assert stats.num_loaded_bytes >= below_the_gpu // BLOCK * BLOCK_BYTES, "more, if it was preempted"
        assert stats.queue_s is not None
        assert 0 <= stats.queue_s <= stats.total_s
        assert sum(d.num_cached_tokens for d in stats.documents) <= stats.num_cached_tokens
        self.num_requests += 1
        self.num_prompt_tokens += stats.num_prompt_tokens
        for tier, count in by_tier.items():
            self.num_tokens[tier] += count or 0


@pytest.fixture(scope="module")
def answers(tiers: Engine) -> Answers:
    return Answers(tiers)


def server(engine: Engine) -> str:
    return engine.base_url.removesuffix("/v1")


def authorized(engine: Engine) -> dict[str, str]:
    return {"Authorization": f"Bearer {engine.api_key}"}


def series(engine: Engine) -> dict[tuple[str, str], float]:
    """Return the ``ragcache_*`` series by name and tier."""
    text = httpx.get(f"{server(engine)}/metrics", headers=authorized(engine), timeout=30).text
    return {
        (sample.name, sample.labels.get("tier", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("ragcache_") and not sample.name.endswith("_created")
    }


def empty_the_gpu(engine: Engine) -> None:
    """Make vLLM forget its own KV memory, and nothing else."""
    url = f"{server(engine)}/reset_prefix_cache"
    assert until(lambda: httpx.post(url, headers=authorized(engine), timeout=30).status_code == 200, TIMEOUT_S)


def sleep_and_wake_up(engine: Engine) -> None:
    """Make the engine forget what it has in GPU and host memory, as its weights stay."""
    for route in ("sleep?level=1", "wake_up"):
        httpx.post(f"{server(engine)}/{route}", headers=authorized(engine), timeout=30).raise_for_status()


def are_enabled(engine: Engine) -> dict[str, bool]:
    """Return which tiers the engine tells of, and whether they work; none while it starts again."""
    try:
        return {tier.name: tier.is_enabled for tier in engine.stats().tiers}
    except EngineError:
        return {}


def test_a_ready_server_reports_its_tiers_before_the_first_request(tiers: Engine) -> None:
    assert are_enabled(tiers) == {"gpu": True, "host": True, "disk": True}
    found = series(tiers)
    assert {tier.label: found["ragcache_tier_enabled", tier.label] for tier in Tier} == dict.fromkeys(
        ("gpu", "host", "disk"), 1
    )
    assert found["ragcache_tier_capacity_bytes", "disk"] == 256 << 20


def test_every_tier_serves_the_answers_that_were_computed(tiers: Engine, answers: Answers) -> None:
    marks = [f"tier {i}" for i in range(8)]
    for mark in marks:
        cold = answers.ask(mark)
        assert cold.num_cached_tokens < 2 * BLOCK, "no more than the static prefix"
        assert cold.num_stored_bytes is not None
        warm = answers.ask(mark)
        assert warm.num_gpu_tokens == warm.num_prompt_tokens // BLOCK * BLOCK
        assert (warm.num_loaded_bytes, warm.num_stored_bytes) == (0, 0)
    for mark in [*marks, *marks[::-1]]:
        stats = answers.ask(mark)
        assert stats.num_cached_tokens >= stats.num_prompt_tokens - 2 * BLOCK, "some tier has all of it"
    empty_the_gpu(tiers)
    for mark in marks:
        stats = answers.ask(mark)
        assert stats.num_gpu_tokens is not None
        assert stats.num_gpu_tokens < 2 * BLOCK
        assert stats.num_cached_tokens >= stats.num_prompt_tokens - 2 * BLOCK, "host or disk has all of it"
    assert all(count > 0 for count in answers.num_tokens.values()), "each tier served some of it"


@pytest.mark.skipif(not is_installed(), reason="blosc2 is not installed")
def test_kv_on_disk_is_compressed(tiers: Engine, answers: Answers) -> None:
    answers.ask("compressed")
    assert until(lambda: answers.ask("compressed").num_stored_bytes == 0, TIMEOUT_S)
    (disk,) = (tier for tier in tiers.stats().tiers if tier.name == "disk")
    assert 0 < disk.used_bytes < 0.9 * disk.num_blocks * BLOCK_BYTES
    sleep_and_wake_up(tiers)  # without what GPU and host memory hold
    assert (answers.ask("compressed").num_disk_tokens or 0) > 0


def test_a_prompt_longer_than_the_host_tier_reuses_what_fits(tiers: Engine, answers: Answers) -> None:
    cold = answers.ask("long", num_documents=5)
    assert cold.num_prompt_tokens // BLOCK > NUM_HOST_BLOCKS
    empty_the_gpu(tiers)
    again = answers.ask("long", num_documents=5)
    assert (again.num_host_tokens or 0) + (again.num_disk_tokens or 0) >= (NUM_HOST_BLOCKS - 2) * BLOCK


def test_an_engine_that_slept_with_its_weights_finds_what_is_on_disk(tiers: Engine, answers: Answers) -> None:
    answers.ask("slept")
    assert until(lambda: answers.ask("slept").num_stored_bytes == 0, TIMEOUT_S)
    sleep_and_wake_up(tiers)
    stats = answers.ask("slept")
    assert (stats.num_gpu_tokens, stats.num_host_tokens) == (0, 0)
    assert (stats.num_disk_tokens or 0) >= stats.num_prompt_tokens - 2 * BLOCK
    assert are_enabled(tiers) == {"gpu": True, "host": True, "disk": True}


def test_what_is_prefetched_from_disk_is_in_host_memory_when_it_is_requested(tiers: Engine, answers: Answers) -> None:
    answers.ask("ahead", 1)
    assert until(lambda: answers.ask("ahead", 1).num_stored_bytes == 0, TIMEOUT_S)
    sleep_and_wake_up(tiers)
    prompt = LAYOUT.render(tiers.tokenizer, documents("ahead", 1), QUESTION)
    num_read = tiers.prefetch(prompt)
    assert num_read >= len(prompt.token_ids) - 2 * BLOCK
    assert until(lambda: tiers.prefetch(prompt) == 0, TIMEOUT_S), "an engine that rests reads it all the same"
    stats = answers.ask("ahead", 1)
    assert (stats.num_gpu_tokens, stats.num_host_tokens, stats.num_disk_tokens) == (0, num_read, 0)
    url = f"{tiers.base_url}/ragcache/prefetch"
    assert httpx.post(url, json={"prompt_token_ids": [1]}, timeout=30).status_code == 401
    for ids in (["1"], [1 << 40], [-1], None, [1] * (tiers.max_model_len + 1)):
        refused = httpx.post(url, json={"prompt_token_ids": ids}, headers=authorized(tiers), timeout=30)
        assert refused.status_code == 400


def test_only_the_tenant_finds_blocks_on_disk_stored_with_its_salt(tiers: Engine, answers: Answers) -> None:
    tenant = {"extra_body": {"cache_salt": "of tenant a"}}
    answers.ask("tenant", **tenant)
    assert until(lambda: answers.ask("tenant", **tenant).num_stored_bytes == 0, TIMEOUT_S)
    sleep_and_wake_up(tiers)
    stats = answers.ask("tenant", **tenant)
    assert (stats.num_disk_tokens or 0) >= stats.num_prompt_tokens - 2 * BLOCK
    assert answers.ask("tenant", extra_body={"cache_salt": "of tenant b"}).num_cached_tokens == 0
    assert answers.ask("tenant").num_cached_tokens < 2 * BLOCK, "no more than the static prefix, which has no salt"


def test_forgotten_documents_are_in_no_tier_and_no_file_and_the_next_answer_is_that_of_uncached_ones(
    tiers: Engine, answers: Answers, cache: CacheConfig
) -> None:
    assert cache.directory is not None
    tenant = {"extra_body": {"cache_salt": "of tenant a"}}

    def files() -> bytes:
        return b"".join(path.read_bytes() for path in Path(cache.directory or "").rglob("*") if path.is_file())

    def slots() -> list[bytes]:
        data = b"".join(path.read_bytes() for path in Path(cache.directory or "").rglob("chunks.data"))
        return [data[at : at + 64] for at in range(0, len(data), BLOCK_BYTES)]

    answers.ask("kept")
    assert until(lambda: b"kept-1" in files(), TIMEOUT_S)
    others = set(slots())
    answers.ask("gone", **tenant)
    answers.ask("gone")
    assert until(lambda: files().count(b"gone-1") > 20, TIMEOUT_S)
    kv = set(slots()) - others
    assert len(kv) > 20
    receipt = tiers.forget(["gone-0", "never asked about"])
    assert receipt.is_complete
    assert (receipt.forgotten, receipt.unknown) == (("gone-0",), ("never asked about",))
    assert receipt.num_paths == 2, "with the salt and without"
    assert all(receipt.num_blocks[tier] > 0 < receipt.num_bytes[tier] for tier in ("gpu", "host", "disk"))
    content = files()
    assert b"gone-" not in content
    assert not [each for each in kv if each in content]
    assert answers.ask("kept").num_cached_tokens > 10 * BLOCK
    for asked in (tenant, {}):
        assert answers.ask("gone", **asked).num_cached_tokens < 2 * BLOCK, "no more than the static prefix"
    again = asyncio.run(tiers.aforget(["gone-0", "gone-1"]))
    assert again.is_complete
    assert again.num_paths == 4


def test_the_cache_is_looked_into_and_acted_upon_while_a_request_is_answered(
    tiers: Engine, answers: Answers, cache: CacheConfig
) -> None:
    def files() -> bytes:
        return b"".join(path.read_bytes() for path in Path(cache.directory or "").rglob("*") if path.is_file())

    answers.ask("seen")
    answers.ask("seen")
    answers.ask("secret", extra_body={"cache_salt": "of tenant a"})
    assert until(lambda: tiers.cache.show(["seen-1"]).documents[0].bytes["disk"] > 0, TIMEOUT_S)
    found = {document.id: document for document in tiers.cache.ls(limit=1000).documents}
    assert not [doc_id for doc_id in found if doc_id.startswith("secret")]
    assert (found["seen-0"].paths, found["seen-0"].uses, found["seen-0"].pinned) == (1, 2, False)
    assert found["seen-0"].saved_s > 0
    assert found["seen-0"].bytes["gpu"] >= 10 * BLOCK_BYTES
    assert asyncio.run(tiers.cache.als(sort="uses", limit=2)).total == len(found)
    (shown,) = tiers.cache.show(["seen-1", "never asked about"]).documents
    assert [place.behind for place in shown.places] == [("seen-0",)]

    assert tiers.cache.pin(["seen-0", "never asked about"]).unknown == ("never asked about",)
    with pytest.raises(RequestRejectedError, match="pinned_share"):
        tiers.cache.pin([document.id for document in found.values()])
    for number in range(6):
        answers.ask(f"press {number}")
    assert (answers.ask("seen", 1).num_gpu_tokens or 0) >= 10 * BLOCK
    assert tiers.cache.unpin(["seen-0"]).num_pinned == 0

    empty_the_gpu(tiers)
    assert until(lambda: tiers.cache.prefetch(["seen-1"]).num_paths == 0, TIMEOUT_S), "what is read is there"
    assert tiers.cache.gc(unused_days=0).folders == ()
    url = f"{tiers.base_url}/ragcache"
    assert httpx.get(f"{url}/cache", timeout=30).status_code == 401
    for refused in ("?sort=size", "?limit=0"):
        assert httpx.get(f"{url}/cache{refused}", headers=authorized(tiers), timeout=30).status_code in (400, 422)

    running = tiers.stream(LAYOUT.render(tiers.tokenizer, documents("runs"), QUESTION), max_tokens=40)
    first = next(running)
    receipt = tiers.cache.purge(wait_s=60)
    answer = join_chunks([first, *running])
    answers.check("runs", 2, answer.text, answer.stats)
    assert receipt.is_complete
    assert b"seen-" not in files()
    assert tiers.cache.ls().documents == ()
    assert answers.ask("seen").num_cached_tokens == 0
    assert answers.ask("seen").num_cached_tokens > 0


def test_the_metrics_add_up_to_the_statistics_of_the_requests(tiers: Engine, answers: Answers) -> None:
    for i in range(3):
        answers.ask(f"tier {i}")
    assert until(lambda: series(tiers).get(("ragcache_requests_total", "")) == answers.num_requests, TIMEOUT_S)
    found = series(tiers)
    assert found["ragcache_prompt_tokens_total", ""] == answers.num_prompt_tokens
    for tier, num_tokens in answers.num_tokens.items():
        assert found["ragcache_tier_hit_tokens_total", tier.label] == num_tokens
        assert found["ragcache_tier_enabled", tier.label] == 1
        assert 0 < found["ragcache_tier_used_bytes", tier.label] <= found["ragcache_tier_capacity_bytes", tier.label]
    assert found["ragcache_tier_evicted_blocks_total", "gpu"] > 0
    assert found["ragcache_tier_evicted_blocks_total", "host"] > 0
    below = answers.num_tokens[Tier.HOST] + answers.num_tokens[Tier.DISK]
    assert found["ragcache_loaded_bytes_total", ""] == below // BLOCK * BLOCK_BYTES
    assert found["ragcache_corrupt_blocks_total", "disk"] == found["ragcache_lost_blocks_total", ""] == 0
    stats = tiers.stats()
    assert {tier.name: tier.num_hit_tokens for tier in stats.tiers} == {
        tier.label: num_tokens for tier, num_tokens in answers.num_tokens.items()
    }
    assert any(document.doc_id.startswith("tier ") for document in stats.hottest_documents)


@pytest.mark.parametrize("route", ["stats", "requests/chatcmpl-1"])
def test_our_routes_need_the_api_key(tiers: Engine, route: str) -> None:
    url = f"{tiers.base_url}/ragcache/{route}"
    assert httpx.get(url, timeout=30).status_code == 401
    assert httpx.get(url, timeout=30, headers={"Authorization": "Bearer wrong"}).status_code == 401
    answer = httpx.get(url, timeout=30, headers=authorized(tiers))
    if route == "stats":
        assert answer.status_code == 200
        assert [tier["name"] for tier in answer.json()["tiers"]] == ["gpu", "host", "disk"]
    else:
        assert answer.status_code == 404
        assert (
            "chatcmpl-1" in answer.json()["error"]["message"] if "error" in answer.json() else answer.json()["detail"]
        )


def complete(engine: Engine, kv_transfer_params: dict[str, Any]) -> httpx.Response:
    body = {
        "model": engine.model,
        "prompt": engine.tokenize("Zorval was founded by Anna in 1823. " * 12),
        "max_tokens": 4,
        "temperature": 0,
        "kv_transfer_params": kv_transfer_params,
    }
    headers = {**authorized(engine), "Content-Type": "application/json"}
    return httpx.post(f"{engine.base_url}/completions", headers=headers, content=json.dumps(body), timeout=60)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_contradictory_and_absurd_metadata_is_ignored_and_counted(tiers: Engine, log_path: Path) -> None:
    overlap = {"version": 1, "documents": [{"id": "a", "start": 0, "end": 9}, {"id": "b", "start": 5, "end": 12}]}
    ignored: list[object] = [
        overlap,
        overlap,
        overlap,
        "text",
        [],
        {"version": 99, "documents": []},
        {"version": 1, "documents": [{"id": "a", "start": 0, "end": 10**9}]},
        {"version": 1, "documents": [{"id": "a", "start": 9, "end": 2}]},
        {"version": 1, "documents": [{"id": "a", "start": -2, "end": 2}]},
        {"version": 1, "documents": [{"id": "a", "start": True, "end": 2}]},
        {"version": 1, "documents": [{"id": "x" * (1 << 20), "start": 0, "end": 9}]},
        nested(7),
    ]
    served: list[dict[str, object]] = [
        {"ragcache": {"version": 1, "documents": [{"id": "never seen", "start": 0, "end": 9}]}},
        {"ragcache": None},
        {"max_offload_tokens": "many", "max_load_tokens": -1, "kv_load_tiers": [{"medium": 7}, 8]},
        {"ragcache": {"version": 1, "documents": []}, "max_offload_tokens": True},
    ]
    refused: list[dict[str, object]] = [  # vLLM could not send these to its engine, or would not survive it
        {"ragcache": {"version": 1, "documents": [{"id": "\ud800", "start": 0, "end": 9}]}},
        {"ragcache": {"version": 1, "documents": [{"id": "a", "start": 0, "end": 10**30}]}},
        {"ragcache": nested(700)},
        {"other_client": nested(700)},
        {"other_client": "\ud800", "\udfff": 1},
    ]
    before = tiers.stats().num_ignored_metadata
    texts = set()
    for params in [{"ragcache": metadata} for metadata in ignored] + served:
        answer = complete(tiers, params)
        assert answer.status_code == 200, (repr(params)[:200], answer.text[:500])
        texts.add(answer.json()["choices"][0]["text"])
    assert len(texts) == 1
    assert [complete(tiers, params).status_code for params in refused] == [400] * len(refused)
    too_many = {"version": 1, "documents": [{"id": str(i), "start": i, "end": i + 1} for i in range(10_000)]}
    assert complete(tiers, {"ragcache": too_many}).status_code == 413
    assert until(lambda: tiers.stats().num_ignored_metadata - before == len(ignored), TIMEOUT_S)
    log = log_path.read_text(errors="replace")
    assert log.count("RC-METADATA-IGNORED") == 1, "logged once"
    assert "x" * 500 not in log


async def test_preempted_requests_have_the_answers_that_they_have_alone(tiers: Engine, answers: Answers) -> None:
    """Six requests grow to 30 blocks each where there are 95: some give theirs up and come back."""
    marks = [f"grow {i}" for i in range(6)]
    settings: dict[str, Any] = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
    for mark in marks:
        answers.ask(mark, **settings)
    before = (await tiers.astats()).num_preemptions
    prompts = [LAYOUT.render(tiers.tokenizer, documents(mark), QUESTION) for mark in marks]
    for _ in range(5):  # on a busy machine they may arrive one after the other
        together = await asyncio.gather(*[tiers.agenerate(prompt, **settings) for prompt in prompts])
        for mark, generation in zip(marks, together, strict=True):
            answers.check(mark, 2, generation.text, generation.stats)
        if (await tiers.astats()).num_preemptions > before:
            break
    assert (await tiers.astats()).num_preemptions > before


def test_a_retained_prompt_stays_on_the_gpu_in_a_flood_with_the_same_answer(tiers: Engine, answers: Answers) -> None:
    answers.ask("kept", 1, retain_s=600)
    answers.ask("left", 1)
    assert until(lambda: tiers.stats().num_retained_tokens >= 300, TIMEOUT_S)
    for number in range(12):
        answers.ask(f"flood {number}", demote=number % 4 == 0)
    assert tiers.stats().num_retained_tokens <= NUM_HOST_BLOCKS * BLOCK // 2
    kept, left = answers.ask("kept", 1), answers.ask("left", 1)
    assert (kept.num_gpu_tokens or 0) >= kept.num_prompt_tokens - 2 * BLOCK
    assert (left.num_gpu_tokens or 0) <= 2 * BLOCK, "the static prefix, which the retained prompt has as well"


def test_plain_vllm_has_the_same_answers(plain: Engine, answers: Answers) -> None:
    """All that was asked so far came from some tier of these at least once; what plain vLLM says is computed."""
    growing: dict[str, Any] = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
    lengths: dict[str, dict[str, Any]] = {"grow": growing, "runs": {"max_tokens": 40}}
    answers.ask("grow 0", **growing)  # once more; or now, where the tests that ask first are left out
    for mark in ("tier 0", "tier 1"):
        answers.ask(mark)
    for (mark, num_documents), text in answers.texts.items():
        prompt = LAYOUT.render(plain.tokenizer, documents(mark, num_documents), QUESTION)
        of_plain = plain.generate(prompt, **lengths.get(mark.split()[0], {"max_tokens": 8}))
        assert of_plain.text == text, mark
    assert len(set(answers.texts.values())) > 1, "they do not all say the same"


class Conversation:
    """Turns whose answers are known ahead, for a model may write what its tokenizer would cut otherwise."""

    FORCED = 700
    """The one token that forced answers are made of."""

    def __init__(self, engine: Engine, mark: str, num_words: int = 220) -> None:
        self._engine = engine
        prompt = LAYOUT.render(engine.tokenizer, documents(mark, 1, num_words), QUESTION)
        self._token_ids = prompt.token_ids
        self._spans = [replace(s, end=s.text_end or s.end) for s in prompt.segments if s.doc_id]

    def ask(self, num_answer_tokens: int = 80) -> RequestStats:
        """Ask the next question, have it answered by ``FORCED``, and keep that as history."""
        forced = {"ignore_eos": True, "allowed_token_ids": [self.FORCED]}
        stats = self._generate(max_tokens=num_answer_tokens, extra_body=forced).stats
        more = Random(len(self._token_ids)).choices(range(300, 1000), k=50)
        self._token_ids += (*[self.FORCED] * num_answer_tokens, *more)
        return stats

    def answer(self, **settings: Any) -> Generation:
        """Answer the next question freely; nothing is kept."""
        return self._generate(max_tokens=24, extra_body={"ignore_eos": True, **settings})

    def _generate(self, **settings: Any) -> Generation:
        segments = tile(self._spans, len(self._token_ids))
        return self._engine.generate(RenderedPrompt((), self._token_ids, segments), **settings)


def test_a_second_turn_is_served_with_its_history_from_below_the_gpu(tiers: Engine) -> None:
    for i in range(8):  # it has to see that conversations go on
        earlier = Conversation(tiers, f"earlier {i}", num_words=30)
        earlier.ask(34)
        earlier.ask(34)
    assert until(lambda: tiers.stats().num_followup_turns >= 8, TIMEOUT_S)
    conversation = Conversation(tiers, "talk")
    first = conversation.ask()
    told = first.num_prompt_tokens + 80 - 1  # the last token's KV is not computed
    empty_the_gpu(tiers)
    second = conversation.answer()
    stats = second.stats
    assert stats.num_gpu_tokens == 0
    assert stats.num_cached_tokens == told // BLOCK * BLOCK, "the document, the question, and the answer"
    computed = conversation.answer(cache_salt="recomputed")
    assert computed.stats.num_cached_tokens == 0
    assert computed.text == second.text != ""
    sleep_and_wake_up(tiers)
    slept = conversation.answer()
    assert (slept.stats.num_gpu_tokens, slept.stats.num_host_tokens) == (0, 0)
    assert (slept.stats.num_disk_tokens or 0) >= told // BLOCK * BLOCK
    assert slept.text == second.text


def test_a_consumer_of_its_kv_events_knows_what_the_engine_holds(
    tiers: Engine, answers: Answers, kv_events: KVEvents
) -> None:
    answers.ask("events")

    def holds() -> dict[str, int]:
        return {tier.name: tier.num_blocks for tier in tiers.stats().tiers}

    def is_reported() -> bool:
        told = {medium: len(keys) for medium, keys in kv_events.read().held().items()}
        return {"gpu": told["GPU"], "host": told["CPU"], "disk": told["STORAGE"]} == holds()

    assert until(is_reported, TIMEOUT_S), f"{holds()}, { ({m: len(k) for m, k in kv_events.read().held().items()}) }"
    assert min(holds().values()) > 10
    assert tiers.forget(["events-0"]).is_complete
    assert until(is_reported, TIMEOUT_S), "without any request"


def kill_the_core(engine: Engine) -> None:
    assert engine.pid is not None
    children = psutil.Process(engine.pid).children(recursive=True)
    next(p for p in children if "EngineCore" in " ".join([p.name(), *p.cmdline()])).kill()


def test_after_a_kill_the_next_requests_are_served_from_what_survived(tiers: Engine, answers: Answers) -> None:
    marks = [f"tier {i}" for i in range(8)]
    for mark in marks:
        answers.ask(mark)
    time.sleep(1.0)  # writes behind are written
    num_from_disk = num_cached = num_prompt = 0
    greedy: dict[str, Any] = {"max_tokens": 600, "stop": ["no such word"], "extra_body": {"ignore_eos": True}}
    whole = tiers.generate("Document: Zorval", **greedy)
    stream = tiers.stream("Document: Zorval", **greedy)
    begun = [next(stream)]
    kill_the_core(tiers)
    assert "".join(chunk.text for chunk in [*begun, *stream]) == whole.text, "it goes on in the next engine"
    again = Answers(tiers)
    again.texts = answers.texts
    for mark in marks:
        stats = again.ask(mark)
        num_from_disk += stats.num_disk_tokens or 0
        num_cached += stats.num_cached_tokens
        num_prompt += stats.num_prompt_tokens
    assert tiers.stats().num_restarts == 1
    assert num_from_disk > 0
    assert num_cached >= 0.9 * num_prompt
    report = tiers.stats()
    assert (report.num_corrupt_blocks, report.num_lost_blocks) == (0, 0)
    assert all(tier.is_enabled for tier in report.tiers)
    for mark in marks:
        again.ask(mark)


@pytest.mark.slow
def test_an_engine_that_comes_back_and_finds_no_disk_goes_on_without(
    tiers: Engine, answers: Answers, cache: CacheConfig, log_path: Path
) -> None:
    assert cache.directory is not None
    num_before = tiers.stats().num_restarts
    cache.directory.rename(cache.directory.with_name("taken away"))
    cache.directory.write_text("no directory")
    kill_the_core(tiers)
    assert until(lambda: are_enabled(tiers) == {"gpu": True, "host": True, "disk": False}, TIMEOUT_S), (
        "a tier that is out of service can be seen before anybody asks"
    )
    again = Answers(tiers)
    again.texts = answers.texts
    for mark in [f"tier {i}" for i in range(4)] * 2:
        again.ask(mark)
    report = tiers.stats()
    assert report.num_restarts == num_before + 1
    assert [(tier.name, tier.is_enabled) for tier in report.tiers] == [("gpu", True), ("host", True), ("disk", False)]
    assert again.num_tokens[Tier.GPU] > 0
    assert again.num_tokens[Tier.DISK] == report.tiers[2].num_blocks == 0
    (line,) = [line for line in log_path.read_text(errors="replace").splitlines() if "RC-TIER-OFF" in line]
    assert re.match(r"\(EngineCore\w* pid=\d+\) ERROR .* \[.*:\d+\] RC-TIER-OFF: RAGCache's disk tier is out of ", line)
