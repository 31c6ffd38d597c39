"""A fleet of two real engines: the same answers as one, from caches that add up, and none lost with a replica."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import httpx
import pytest

from examples import fleet as example
from ragcache_core import CacheConfig, Document, Fleet, PromptLayout, RenderedPrompt
from ragcache_core.client import Engine
from ragcache_core.retrieval.sources import StageSource
from ragcache_core.types import RetrievalUpdate
from ragcache_integrations.langchain import ChatRAGCache, RAGCacheRetriever, SpeculativeRAG, prompt_from_layout
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.engine.search_scene import QUESTION, SlowSource, documents
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TOWNS = [f"{first}{last}" for first in ("Ar", "Be", "Co", "Du") for last in ("ville", "ton", "ham", "berg")]
"""Enough for a hash to spread them."""


@pytest.fixture(scope="module")
def second(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("second")
    cache = CacheConfig(
        kv_cache_bytes="256MiB", block_size=32, host_bytes="64MiB", disk_bytes="64MiB", directory=folder / "kv"
    )
    settings = {**ENGINE_ARGS, "cache": cache, "env": {"VLLM_SERVER_DEV_MODE": "1"}, "log_path": folder / "server.log"}
    with Engine.launch(str(DEMO_MODEL), api_key=engine.api_key, max_restarts=0, **settings) as own:
        yield own


@pytest.fixture
def fleet(engine: Engine, second: Engine) -> Iterator[Fleet]:
    with Fleet.connect([engine.base_url, second.base_url], api_key=engine.api_key) as joined:
        yield joined


def prompt(fleet: Fleet, *towns: str, question: str = "Who founded it?") -> RenderedPrompt:
    shown = [Document(f"fleet-{town}", f"{town} was founded by the mayor of {town}. " * 12) for town in towns]
    return PromptLayout().render(fleet.tokenizer, shown, question)


def test_replicas_share_the_documents_and_each_is_found_again_where_it_is(
    fleet: Fleet, engine: Engine, second: Engine
) -> None:
    asked = [prompt(fleet, town) for town in TOWNS]
    cold = [fleet.generate(each, max_tokens=8) for each in asked]
    warm = [fleet.generate(each, max_tokens=8) for each in asked]
    assert [answer.text for answer in warm] == [answer.text for answer in cold]
    assert [answer.text for answer in cold] == [engine.generate(each, max_tokens=8).text for each in asked]
    for answer in warm:
        assert answer.stats.num_cached_tokens > 0.7 * answer.stats.num_prompt_tokens
        assert answer.stats.num_gpu_tokens == answer.stats.num_cached_tokens, "the replica that answered tells"
    assert 0 < second.stats().num_requests < 2 * len(TOWNS)
    assert fleet.stats().num_requests == engine.stats().num_requests + second.stats().num_requests


def test_an_order_is_chosen_by_what_any_replica_has(fleet: Fleet) -> None:
    shown = prompt(fleet, "Gor", "Hul", "Ing")
    fleet.generate(shown, max_tokens=4)
    fleet.arrange_documents([], "cache_aware")  # begins to ask
    assert fleet.integration.ordering.refresh(10.0)
    mixed = [
        Document(f"fleet-{town}", f"{town} was founded by the mayor of {town}. " * 12) for town in ("Ing", "Gor", "Hul")
    ]
    arranged = fleet.arrange_documents(mixed, "cache_aware")
    assert [d.doc_id for d in arranged.documents] == ["fleet-Gor", "fleet-Hul", "fleet-Ing"]
    again = fleet.generate(PromptLayout().render(fleet.tokenizer, arranged.documents, "Why?"), max_tokens=4)
    assert again.stats.num_cached_tokens > 0.7 * again.stats.num_prompt_tokens


def empty_gpu_and_host(replica: Engine) -> None:
    """Make a replica sleep with its weights, and wake up."""
    for route in ("sleep?level=1", "wake_up"):
        url, headers = replica.base_url.removesuffix("v1"), {"Authorization": f"Bearer {replica.api_key}"}
        httpx.post(f"{url}{route}", headers=headers, timeout=30).raise_for_status()


def read_from_disk(replica: Engine) -> int:
    return {tier.name: tier.num_hit_tokens for tier in replica.stats().tiers}["disk"]


@dataclass
class AwaitedSource:
    """Names its documents, and has no more to say before something has happened."""

    found: tuple[Document, ...]
    has_happened: Callable[[], bool]
    is_in_time: bool = False

    async def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        update = RetrievalUpdate(self.found, (1.0,) * len(self.found), 0, False)
        yield update
        self.is_in_time = await asyncio.to_thread(until, self.has_happened, 30.0)
        yield replace(update, stage=1, is_final=True)


def ask_over(engine: Engine, source: StageSource) -> SpeculativeRAG:
    llm = ChatRAGCache(engine=engine, max_tokens=8, temperature=0)
    return SpeculativeRAG(
        retriever=RAGCacheRetriever(store=source, engine=engine), prompt=prompt_from_layout(), llm=llm
    )


async def test_a_searchs_candidates_are_read_from_disk_by_the_replica_that_has_them_before_the_search_ends(
    fleet: Fleet, engine: Engine, second: Engine
) -> None:
    found = documents(2)
    warm = ask_over(second, SlowSource((found,)))
    while (stored := await warm.ainvoke(QUESTION)).response_metadata["ragcache"]["num_stored_bytes"]:
        pass
    num_tokens = stored.response_metadata["ragcache"]["num_prompt_tokens"]
    empty_gpu_and_host(second)
    fleet.arrange_documents([], "cache_aware")  # begins to ask what replicas have
    assert await asyncio.to_thread(fleet.integration.ordering.refresh, 10.0)
    others, num_read = engine.stats().num_requests, read_from_disk(second)
    source = AwaitedSource(found, lambda: read_from_disk(second) >= num_read + num_tokens // 2)
    said = await ask_over(fleet, source).ainvoke(QUESTION)
    assert source.is_in_time
    stats = said.response_metadata["ragcache"]
    assert stats["pipeline"]["is_confirmed"]
    assert stats["num_disk_tokens"] >= num_tokens // 2
    assert engine.stats().num_requests == others


def test_the_example_asks_both_ways(
    engine: Engine, second: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAGCACHE_API_KEY", engine.api_key)
    example.main(["--urls", engine.base_url, second.base_url, "--questions", "6", "--json"])
    ways = json.loads(capsys.readouterr().out)
    assert [(way["way"], way["num_questions"]) for way in ways] == [("round robin", 6), ("fleet", 6)]
    assert all(1.0 <= way["busiest"] <= 2.0 for way in ways), ways
    assert ways[0]["cached_share"] < ways[1]["cached_share"] < 1.0, "these engines have them by then"


def test_no_answer_is_lost_when_a_replica_is_killed_under_load(fleet: Fleet, second: Engine) -> None:
    asked = [prompt(fleet, town, question=f"What of it, {turn}?") for turn in range(2) for town in TOWNS]
    expected = [fleet.generate(each, max_tokens=64, extra_body={"ignore_eos": True}).text for each in asked]
    assert second.pid is not None
    with ThreadPoolExecutor(8) as threads:
        answers = [
            threads.submit(lambda each=each: fleet.generate(each, max_tokens=64, extra_body={"ignore_eos": True}).text)
            for each in asked
        ]
        answers[3].result()
        os.killpg(os.getpgid(second.pid), signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected
