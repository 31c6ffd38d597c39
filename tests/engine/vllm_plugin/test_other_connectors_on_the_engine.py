"""Our connector and vLLM's example connector in one engine: each stores what is computed, and either loads it.

The example keeps whole prompts in files and finds none but the very same ones; what it has it loads before ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ragcache_core import CacheConfig, Document, PromptLayout
from ragcache_core.client import Engine, Generation
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.asking_ahead import speculate
from tests.support.waiting import until

pytestmark = pytest.mark.slow

BLOCK = 32
DOCUMENTS = [Document(f"d{i}", f"Company {i} makes clocks, ships and {i * 7} kinds of tea. " * 12) for i in range(4)]
PAIRS = [DOCUMENTS[:2], DOCUMENTS[2:], [DOCUMENTS[3], DOCUMENTS[0]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beside")


@pytest.fixture(scope="module")
def both(folder: Path) -> Iterator[Engine]:
    example = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
    }
    cache = CacheConfig(
        kv_cache_bytes="64MiB",
        block_size=BLOCK,
        host_bytes="64MiB",
        disk_bytes="64MiB",
        directory=folder / "kv",
        connectors=(example,),
    )
    settings = {**ENGINE_ARGS, "cache": cache, "env": {"VLLM_SERVER_DEV_MODE": "1"}}
    with Engine.launch(str(DEMO_MODEL), log_path=folder / "server.log", **settings) as running:
        yield running


def ask(engine: Engine, shown: list[Document], question: str) -> Generation:
    prompt = PromptLayout().render(engine.tokenizer, shown, question)
    return engine.generate(prompt, max_tokens=12)


def post(engine: Engine, route: str) -> int:
    headers = {"Authorization": f"Bearer {engine.api_key}"}
    return httpx.post(f"{engine.base_url.removesuffix('/v1')}/{route}", headers=headers, timeout=30).status_code


def empty_the_gpu(engine: Engine) -> None:
    assert until(lambda: post(engine, "reset_prefix_cache") == 200, 30)


def empty_gpu_and_host(engine: Engine) -> None:
    """Make the engine sleep with its weights, and wake up."""
    assert [post(engine, route) for route in ("sleep?level=1", "wake_up")] == [200, 200]


def test_answers_equal_plain_vllm_with_any_connector_holding_the_kv(both: Engine, plain: Engine, folder: Path) -> None:
    new = [("What do they make?", shown) for shown in PAIRS]
    other_question = [("How many kinds of tea? " * 20, shown) for shown in PAIRS]  # longer than a block
    found: list[tuple[int, int]] = []
    for asked in (new, other_question, new):
        num_host = num_cached = 0
        for question, shown in asked:
            answer = ask(both, shown, question)
            assert answer.text == ask(plain, shown, question).text
            num_host += answer.stats.num_host_tokens or 0
            num_cached += answer.stats.num_cached_tokens
        found.append((num_host, num_cached))
        empty_the_gpu(both)
    (first, _), (ours, _), (last, everything) = found
    assert first == 0
    assert ours > len(PAIRS) * 2 * BLOCK, "ours has the documents behind another question"
    assert last == 0
    assert everything > len(PAIRS) * 2 * BLOCK, "the example has the prompts, and is asked first"
    kept = list((folder / "example").iterdir())
    assert len(kept) == 2 * len(PAIRS), "the example was given every prompt"
    assert all(any(each.glob("*.safetensors")) for each in kept)


def test_the_server_reports_the_tiers_and_speculates(both: Engine, plain: Engine) -> None:
    shown, question = DOCUMENTS[1:3], "Which company ships tea?"
    expected = ask(plain, shown, question).text
    ahead = speculate(both, lambda: ask(both, shown, question))
    assert ask(both, shown, question).text == expected
    assert not ahead.is_failed
    assert until(lambda: both.stats().num_confirmed_speculations == 1, 30)
    stats = both.stats()
    assert [tier.name for tier in stats.tiers] == ["gpu", "host", "disk"]
    assert stats.num_requests == 10
    host = stats.tiers[1]
    assert host.num_hit_tokens > 0
    text = httpx.get(f"{both.base_url.removesuffix('/v1')}/metrics", timeout=30).text
    assert "ragcache_requests_total" in text
    assert "vllm:kv_offload" in text


def test_ours_has_a_disk_beside_the_other_connector(both: Engine, plain: Engine) -> None:
    shown, questions = DOCUMENTS[:2], [f"{word} is what they make? " * 10 for word in ("Tea", "Clocks", "Which")]
    ask(both, shown, questions[0])
    assert until(lambda: ask(both, shown, questions[0]).stats.num_stored_bytes == 0, 30)
    empty_gpu_and_host(both)
    answer = ask(both, shown, questions[1])
    assert answer.text == ask(plain, shown, questions[1]).text
    assert (answer.stats.num_disk_tokens or 0) > 2 * BLOCK
    assert until(lambda: ask(both, shown, questions[1]).stats.num_stored_bytes == 0, 30)
    empty_gpu_and_host(both)
    prompt = PromptLayout().render(both.tokenizer, shown, questions[2])
    num_read = both.prefetch(prompt)
    assert num_read > 2 * BLOCK
    assert until(lambda: both.prefetch(prompt) == 0, 30), "the other connector was told, and has none of it"
    answer = ask(both, shown, questions[2])
    assert answer.text == ask(plain, shown, questions[2]).text
    assert answer.stats.num_host_tokens == num_read


def test_the_other_connectors_kv_is_not_forgotten_and_that_is_reported(both: Engine) -> None:
    receipt = both.forget(["d0"])
    assert any("ExampleConnector beside RAGCache may keep KV of its own" in problem for problem in receipt.problems)
