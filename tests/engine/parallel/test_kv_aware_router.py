"""vllm-router's policy `kv_aware` over real engines: it follows the KV events of three tiers, also after a restart."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import httpx
import pytest

from ragcache_core import CacheConfig
from ragcache_core.client import Engine
from ragcache_core.client.launch.process import free_port
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.local_tokenizer import LocalTokenizer
from tests.support.waiting import until

ROUTER = shutil.which("vllm-router")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(ROUTER is None, reason="there is no vllm-router here")]

KEY = "of-both-engines"
BLOCK = 32
BLOCK_BYTES = 128 << 10
WORDS = ("Zorval", "Tenrik", "was", "a", "company", "founded", "by", "Anna", "Boris", "in", "1823", "makes", "clocks")


TOKENIZER = LocalTokenizer.of_model(str(DEMO_MODEL))


class Replicas:
    """Two engines that publish events, with tiers of a few prompts."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._ports = [(free_port("127.0.0.1"), free_port("127.0.0.1")) for _ in range(2)]
        self.engines = [self.launch(place) for place in range(2)]

    def launch(self, place: int) -> Engine:
        port, events = self._ports[place]
        cache = CacheConfig(
            kv_cache_bytes=96 * BLOCK_BYTES,
            block_size=BLOCK,
            host_bytes=48 * BLOCK_BYTES,
            disk_bytes="64MiB",
            directory=self._folder / str(place),
        )
        settings = {**ENGINE_ARGS, "cache": cache, "log_path": self._folder / f"{place}.log"}
        settings["kv_events_config"] = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}"}
        launched = Engine.launch(str(DEMO_MODEL), port=port, api_key=KEY, max_restarts=0, **settings)
        return self._stack.enter_context(launched)

    def arguments(self) -> list[str]:
        """Return what vllm-router must be told of them."""
        urls = [engine.base_url.removesuffix("/v1") for engine in self.engines]
        sources = [f"{url}=tcp://127.0.0.1:{events}" for url, (_, events) in zip(urls, self._ports, strict=True)]
        told = [text for source in sources for text in ("--kv-event-source", source)]
        return [*told, "--kv-event-block-size", str(BLOCK), "--kv-event-model", "demo_model", "--worker-urls", *urls]

    def num_requests(self) -> list[int]:
        return [engine.stats().num_requests for engine in self.engines]


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(stack, tmp_path)


@pytest.fixture
def router(replicas: Replicas, tmp_path: Path) -> Iterator[str]:
    assert ROUTER is not None
    port, metrics = free_port("127.0.0.1"), free_port("127.0.0.1")
    command = [ROUTER, "--policy", "kv_aware", "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY]
    command += ["--prometheus-port", str(metrics), *replicas.arguments()]
    with (tmp_path / "router.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            assert until(lambda: is_up(url), 60), (tmp_path / "router.log").read_text()
            yield url
        finally:
            process.terminate()
            process.wait(10)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def text(name: str) -> str:
    return f"Document {name}: " + " ".join(Random(name).choices(WORDS, k=150))


def ask(url: str, name: str) -> None:
    body = {"model": "demo_model", "prompt": [*TOKENIZER.encode(text(name)).token_ids], "max_tokens": 1}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    assert answer.status_code == 200, answer.text


def places(replicas: Replicas, router: str, names: list[str]) -> list[int]:
    """Ask through the router, and return which engine answered each."""
    found = []
    for name in names:
        before = replicas.num_requests()
        ask(router, name)
        assert until(lambda before=before: sum(replicas.num_requests()) == sum(before) + 1)
        found.append(next(i for i, (a, b) in enumerate(zip(before, replicas.num_requests(), strict=True)) if b > a))
    return found


def test_requests_go_to_the_engine_that_has_their_prompt_in_any_tier(replicas: Replicas, router: str) -> None:
    names = [f"document-{i}" for i in range(12)]
    homes = [i % 2 for i in range(12)]  # more than the GPU of each holds: the first are in host memory or on disk
    for name, home in zip(names, homes, strict=True):
        ask(replicas.engines[home].base_url.removesuffix("/v1"), name)
    for engine in replicas.engines:
        assert until(lambda engine=engine: all(tier.num_blocks for tier in engine.stats().tiers))
    assert places(replicas, router, names) == homes
    replicas.engines[0].close()
    replicas.engines[0] = replicas.launch(0)  # its events begin at 0 again
    later = [f"later-{i}" for i in range(6)]
    for name, home in zip(later, homes, strict=False):
        ask(replicas.engines[home].base_url.removesuffix("/v1"), name)
    assert places(replicas, router, later) == homes[: len(later)]
