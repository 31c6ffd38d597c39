"""Dynamo's own KV indexer on the KV events of a real engine: per tier, through evictions and a restart.

It runs where `ai-dynamo-runtime` is installed, in this environment or in the one of RAGCACHE_DYNAMO_PYTHON.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from ragcache_core import CacheConfig
from ragcache_core.client import Engine
from ragcache_core.client.launch.process import free_port
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.waiting import until

PYTHON = os.environ.get("RAGCACHE_DYNAMO_PYTHON") or (sys.executable if importlib.util.find_spec("dynamo") else None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason="there is no ai-dynamo-runtime here")]

KEY = "of-this-test"
BLOCK = 32
BLOCK_BYTES = 128 << 10
NUM_TOKENS = 400
WHOLE_BLOCKS = NUM_TOKENS // BLOCK * BLOCK
DOCUMENTS = range(1, 12)
"""More than the GPU holds, and far more than host memory does."""


class Scene:
    """An engine with three tiers, and the indexer that follows its events."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._events, self._indexer = free_port("127.0.0.1"), free_port("127.0.0.1")
        self._port = free_port("127.0.0.1")
        assert PYTHON is not None
        command = [PYTHON, "-m", "dynamo.indexer", "--port", str(self._indexer), "--block-size", str(BLOCK)]
        log = stack.enter_context((folder / "indexer.log").open("wb"))
        process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
        stack.callback(process.terminate)
        assert until(self._is_up, 30), (folder / "indexer.log").read_text()

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self._indexer}/health", timeout=2).is_success
        except httpx.HTTPError:
            return False

    def launch(self) -> Engine:
        cache = CacheConfig(
            kv_cache_bytes=96 * BLOCK_BYTES,
            block_size=BLOCK,
            host_bytes=48 * BLOCK_BYTES,
            disk_bytes="64MiB",
            directory=self._folder / "kv",
        )
        settings = {**ENGINE_ARGS, "cache": cache, "log_path": self._folder / "server.log"}
        settings["kv_events_config"] = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{self._events}"}
        return Engine.launch(str(DEMO_MODEL), port=self._port, api_key=KEY, max_restarts=0, **settings)

    def post(self, path: str, **body: Any) -> None:
        answer = httpx.post(f"http://127.0.0.1:{self._indexer}/{path}", json={"model_name": "demo_model", **body})
        assert answer.is_success, answer.text

    def register(self) -> None:
        self.post("register", instance_id=1, endpoint=f"tcp://127.0.0.1:{self._events}", block_size=BLOCK)

    def ask(self, document: int) -> dict[str, int]:
        """Ask the engine; return the prompt's tokens by tier."""
        body = {"model": "demo_model", "prompt": tokens(document), "max_tokens": 1}
        headers = {"Authorization": f"Bearer {KEY}", "x-ragcache-stats": "1"}
        base = f"http://127.0.0.1:{self._port}/v1"
        answer = httpx.post(f"{base}/completions", json=body, headers=headers, timeout=60).raise_for_status().json()
        stats: dict[str, int] = answer["ragcache"]
        return stats

    def known(self, document: int) -> tuple[int, int]:
        """Return how many tokens of a prompt the indexer knows on the GPU, and in any tier."""
        body = {"model_name": "demo_model", "token_ids": tokens(document)}
        answer = httpx.post(f"http://127.0.0.1:{self._indexer}/query", json=body).raise_for_status().json()
        match = answer["instances"].get("1", {"gpu": 0, "longest_matched": 0})
        return match["gpu"], match["longest_matched"]


def tokens(document: int) -> list[int]:
    return Random(document).choices(range(100, 900), k=NUM_TOKENS)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack, tmp_path)


def test_the_indexer_knows_what_each_tier_has(scene: Scene) -> None:
    with scene.launch():
        scene.register()
        for document in DOCUMENTS:
            scene.ask(document)
        assert until(lambda: all(scene.known(document)[1] == WHOLE_BLOCKS for document in DOCUMENTS), 30)
        on_gpu = {document: scene.known(document)[0] for document in DOCUMENTS}
        assert 0 < sum(count == WHOLE_BLOCKS for count in on_gpu.values()) < len(DOCUMENTS)
        newest_first = sorted(DOCUMENTS, key=lambda document: on_gpu[document], reverse=True)
        held = {document: scene.ask(document)["num_gpu_tokens"] for document in newest_first}
        assert held == {document: on_gpu[document] for document in newest_first}
    with scene.launch():  # events begin at 0 again, so the indexer must drop what it knows
        scene.post("unregister", instance_id=1)
        scene.register()
        assert {scene.known(document) for document in DOCUMENTS} == {(0, 0)}
        assert scene.ask(3)["num_disk_tokens"] > 0
        assert until(lambda: scene.known(3) == (WHOLE_BLOCKS, WHOLE_BLOCKS), 30)
