"""Several API servers in front of one engine: whichever answers has the statistics, the paths and the speculations."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import psutil
import pytest

from ragcache_core import CacheConfig, PromptLayout
from ragcache_core.client import Engine
from tests.engine.parallel.scene import BLOCK, QUESTION, TIMEOUT_S, ask, documents, launched
from tests.support.asking_ahead import speculate
from tests.support.waiting import until

MARKS = [f"front {i}" for i in range(4)]
ENOUGH = 24
"""Connections: all go to one of two API servers once in eight million runs."""


@pytest.fixture(scope="module")
def fronted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    cache = CacheConfig(kv_cache_bytes="32MiB", block_size=BLOCK, host_bytes="16MiB")
    folder = tmp_path_factory.mktemp("fronted")
    with launched(folder, cache, extra_args=["--api-server-count", "2"]) as running:
        yield running


def get(engine: Engine, path: str) -> list[httpx.Response]:
    """Ask the same of the server over many connections, each perhaps to another process."""
    headers = {"Authorization": f"Bearer {engine.api_key}"}
    return [httpx.get(f"{engine.base_url}/ragcache/{path}", headers=headers, timeout=30) for _ in range(ENOUGH)]


def test_both_have_the_figures_of_a_request_whichever_served_it(fronted: Engine) -> None:
    assert fronted.pid is not None
    names = [" ".join([p.name(), *p.cmdline()]) for p in psutil.Process(fronted.pid).children(recursive=True)]
    assert sum("ApiServer" in name or "APIServer" in name for name in names) == 2, names
    for mark in MARKS:
        ask(fronted, documents(mark))
        _, again = ask(fronted, documents(mark))
        assert again.num_gpu_tokens == again.num_cached_tokens >= again.num_prompt_tokens - 2 * BLOCK
    prompt = PromptLayout().render(fronted.tokenizer, documents(MARKS[0]), QUESTION)
    headers = {"Authorization": f"Bearer {fronted.api_key}"}
    body = {"model": fronted.model, "prompt": list(prompt.token_ids), "max_tokens": 4}
    answer = httpx.post(f"{fronted.base_url}/completions", json=body, headers=headers, timeout=30).json()
    answers = get(fronted, f"requests/{answer['id']}")
    assert {response.status_code for response in answers} == {200}
    assert len({response.text for response in answers}) == 1


def test_both_report_the_same_engine_and_its_series_count_once(fronted: Engine) -> None:
    stats = fronted.stats()
    assert stats.num_requests == 2 * len(MARKS) + 1
    reports = get(fronted, "stats")
    assert len({response.json()["num_requests"] for response in reports}) == 1

    def counted() -> set[str]:
        url = f"{fronted.base_url.removesuffix('/v1')}/metrics"
        lines = [line for _ in range(ENOUGH // 2) for line in httpx.get(url, timeout=30).text.splitlines()]
        return {line.rpartition(" ")[2] for line in lines if line.startswith("ragcache_requests_total{")}

    assert until(lambda: counted() == {f"{stats.num_requests}.0"}, TIMEOUT_S), counted()


def test_both_report_what_is_cached_and_how_long_a_speculation_waited(fronted: Engine) -> None:
    told = get(fronted, "cached_paths")
    assert all(documents(mark)[0].doc_id in answer.text for answer in told for mark in MARKS)
    cursor = told[0].json()["cursor"]
    nothing_new = {**told[0].json(), "engines": [{"is_reset": False, "changes": []}]}
    assert [answer.json() for answer in get(fronted, f"cached_paths?cursor={cursor}")] == [nothing_new] * ENOUGH
    before = fronted.stats().num_confirmed_speculations
    prompt = PromptLayout().render(fronted.tokenizer, documents("ahead"), QUESTION)
    ahead = speculate(fronted, lambda: fronted.generate(prompt, max_tokens=8))
    assert until(lambda: ahead.started_s is not None, TIMEOUT_S), "the engine told of it"
    assert fronted.generate(prompt, max_tokens=8).text
    assert not ahead.is_failed
    assert fronted.stats().num_confirmed_speculations == before + 1


def test_both_recognise_what_was_registered_with_one_of_them(fronted: Engine) -> None:
    headers = {"Authorization": f"Bearer {fronted.api_key}"}
    text = "Zorval was founded in 1823 by Anna and Boris, who made clocks of wood and of brass in Tenrik for years."
    record = {"id": "zorval", "text": text, "acl": ["hr"]}
    url = f"{fronted.base_url}/ragcache/documents/register"
    assert httpx.post(url, json={"documents": [record]}, headers=headers, timeout=60).json()["num_registered"] == 1
    body = {"model": fronted.model, "prompt": f"{text} {text} {text}", "max_tokens": 2}
    for _ in range(ENOUGH):
        httpx.post(f"{fronted.base_url}/completions", json=body, headers=headers, timeout=60).raise_for_status()

    def is_counted() -> bool:
        told = [answer.json()["recognition"] for answer in get(fronted, "stats")]
        return all((each["num_documents"], each["num_recognised"]) == (1, 3 * ENOUGH) for each in told)

    assert until(is_counted, TIMEOUT_S)
