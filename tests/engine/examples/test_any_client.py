"""Plain clients, in which only the base URL names RAGCache, have hits, and their documents have names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ragcache_core import CacheConfig
from ragcache_core.cli import cli
from ragcache_core.client import Engine
from tests.conftest import DEMO_MODEL, ENGINE_ARGS, ROOT

FOLDER = ROOT / "examples" / "any_client"
NODE_MODULES = FOLDER / "javascript" / "node_modules"
IDS = [document["id"] for document in json.loads((FOLDER / "documents.json").read_text(encoding="utf-8"))["documents"]]
KEY = "any-client-key"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    cache = CacheConfig(kv_cache_bytes="64MiB", block_size=32, host_bytes="16MiB")
    log_path = tmp_path_factory.mktemp("any-client") / "server.log"
    with Engine.launch(str(DEMO_MODEL), api_key=KEY, log_path=log_path, **{**ENGINE_ARGS, "cache": cache}) as running:
        yield running


def run(engine: Engine, *command: str, folder: Path = ROOT) -> list[dict[str, object]]:
    """Return what a client prints, line by line."""
    environment = {**os.environ, "BASE_URL": engine.base_url, "API_KEY": KEY, "MODEL": engine.model}
    environment |= {"no_proxy": "127.0.0.1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def uses(engine: Engine) -> dict[str, int]:
    """Return how many requests used each document, as ``ragcache stats`` says."""
    result = CliRunner().invoke(cli, ["stats", "--url", engine.base_url, "--api-key", KEY, "--json"])
    assert result.exit_code == 0, result.output
    return {each["doc_id"]: each["frequency"] for each in json.loads(result.stdout)["hottest_documents"]}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_registers_documents_and_has_them_cached_the_second_time(engine: Engine) -> None:
    registered, first, second = run(engine, "sh", "curl.sh", folder=FOLDER)
    assert registered["num_registered"] == len(IDS)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # type: ignore[index]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 100  # type: ignore[index]
    assert second["ragcache"]["num_gpu_tokens"] > 100  # type: ignore[index]
    assert uses(engine) == {IDS[0]: 2, IDS[1]: 2}


@pytest.mark.parametrize("app", ["langchain_app", "llamaindex_app"])
def test_an_app_of_a_framework_has_its_documents_cached_the_second_time(engine: Engine, app: str) -> None:
    before = uses(engine)
    first, second = run(engine, sys.executable, "-m", f"examples.any_client.{app}")
    assert second["input"] == first["input"]
    assert second["cached"] > 100  # type: ignore[operator]
    now = uses(engine)
    assert sum(now.values()) == sum(before.values()) + 4, "two documents in each of two requests"
    assert set(now) <= set(IDS)


@pytest.mark.skipif(not NODE_MODULES.is_dir(), reason="'make test-javascript' installs the packages")
def test_a_chat_in_javascript_has_its_documents_cached_the_second_time(engine: Engine) -> None:
    before = uses(engine)
    first, second = run(engine, "node", "chat.mjs", folder=FOLDER / "javascript")
    assert second["input"] == first["input"]
    assert second["cached"] > 100  # type: ignore[operator]
    assert {doc_id: number - before.get(doc_id, 0) for doc_id, number in uses(engine).items() if doc_id in IDS[2:]} == {
        IDS[2]: 2,
        IDS[3]: 2,
    }
