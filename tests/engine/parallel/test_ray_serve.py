"""Two engines on Ray Serve, asked at its one address: who answers what, and what becomes of it when one is killed."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from examples import fleet_ray as example
from examples._shared import open_demo_store
from ragcache_core import Engine, PromptLayout, RenderedPrompt
from tests.conftest import DEMO_MODEL
from tests.engine.parallel.scene import BLOCK, QUESTION, TIMEOUT_S, documents
from tests.support.asking_ahead import speculate
from tests.support.waiting import until

pytest.importorskip("ray.serve", reason="ray[serve] is not installed")

MARKS = [f"ray {i}" for i in range(10)]
RESTART_S = 400.0
"""Seconds in which another replica has started, on two cores that others use as well."""


@pytest.fixture(scope="module")
def together() -> Iterator[Engine]:
    """What the example's replicas are together. Nothing of Ray is left behind, and nothing is told to its makers."""
    folder = tempfile.mkdtemp(prefix="ray-")  # sockets lie there, whose names must be short
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = argparse.Namespace(model=str(DEMO_MODEL), replicas=2, address=None, port=port)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_TMPDIR", folder)
        patched.setenv("RAY_AUTH_MODE", "disabled")  # else it keeps a token in the home folder
        with example.served(options) as engine:
            yield engine
            engines = servers()
    assert not psutil.wait_procs(engines, timeout=TIMEOUT_S)[1], "engines end with their replicas"
    shutil.rmtree(folder)


def servers() -> list[psutil.Process]:
    """Return the engines' servers, each a child of its replica."""
    workers = [each for each in psutil.Process().children(recursive=True) if "ragcache-replica" in name_of(each)]
    return [server for worker in workers for server in worker.children()]


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def prompt(engine: Engine, mark: str) -> RenderedPrompt:
    return PromptLayout().render(engine.tokenizer, documents(mark), QUESTION)


def first_tokens(engine: Engine) -> dict[str, float]:
    """Return how many requests each replica has answered."""
    page = httpx.get(f"{engine.base_url.removesuffix('/v1')}/metrics", timeout=RESTART_S).text
    lines = [line for line in page.splitlines() if line.startswith("vllm:time_to_first_token_seconds_count{")]
    return {line.partition('replica="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_documents_are_asked_about_where_they_are_cached(together: Engine) -> None:
    for mark in MARKS:
        together.generate(prompt(together, mark), max_tokens=4)
    assert together.integration.cached_prefixes.refresh(TIMEOUT_S), "all replicas' mirrors are there, as one's"
    for mark in MARKS:
        shown = list(reversed(documents(mark)))
        assert list(together.arrange_documents(shown, "cache_aware").documents) == documents(mark)
        again = together.generate(prompt(together, mark), max_tokens=4).stats
        assert again.num_gpu_tokens == again.num_cached_tokens >= again.num_prompt_tokens - 2 * BLOCK
    served = first_tokens(together)
    assert len(served) == 2
    assert all(served.values()), "else one of them gets all"
    assert sum(served.values()) == 2 * len(MARKS)
    assert together.stats().num_first_tokens == 2 * len(MARKS)


def test_a_speculation_is_confirmed_at_the_replica_that_has_it(together: Engine) -> None:
    before = together.stats().num_confirmed_speculations
    for mark in ("ahead 1", "ahead 2", "ahead 3"):
        shown = prompt(together, mark)
        ahead = speculate(together, lambda shown=shown: together.generate(shown, max_tokens=4))
        assert until(lambda ahead=ahead: ahead.started_s is not None, TIMEOUT_S), "the engine told of it"
        assert together.generate(shown, max_tokens=4).text
        assert not ahead.is_failed
    assert until(lambda: together.stats().num_confirmed_speculations == before + 3, TIMEOUT_S)


def test_what_is_forgotten_is_forgotten_by_all(together: Engine) -> None:
    names = [document.doc_id for mark in MARKS[:4] for document in documents(mark)]
    receipt = together.forget(names)
    assert set(receipt.forgotten) == set(names)
    assert receipt.is_complete
    for mark in MARKS[:4]:
        assert together.generate(prompt(together, mark), max_tokens=4).stats.num_cached_tokens <= 2 * BLOCK


def test_the_example_asks_them(together: Engine, tmp_path: Path) -> None:
    with open_demo_store(tmp_path / "store") as store:
        first, again = (example.ask(together, store, 8) for _ in range(2))
    assert again["cached_share"] > max(first["cached_share"], 0.8), "the same questions"
    assert again["num_first_tokens"] == first["num_first_tokens"] + 8


def test_when_a_replica_is_killed_every_request_is_answered_as_before_and_another_one_starts(together: Engine) -> None:
    def ask(mark: str) -> str:
        return "".join(chunk.text for chunk in together.stream(prompt(together, mark), max_tokens=24))

    expected = {mark: ask(mark) for mark in MARKS}
    num_submitted = 60
    victim, *_ = before = servers()
    assert len(before) == 2
    replica = victim.parent()
    assert replica is not None
    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(ask, MARKS[i % len(MARKS)]) for i in range(num_submitted)]
        assert until(lambda: sum(one.done() for one in asked) >= num_submitted // 4, RESTART_S)
        os.kill(replica.pid, signal.SIGKILL)
        answers = [one.result(timeout=RESTART_S) for one in asked]
    assert answers == [expected[MARKS[i % len(MARKS)]] for i in range(num_submitted)]
    assert not psutil.wait_procs([victim], timeout=TIMEOUT_S)[1], "an engine does not outlive its replica"
    assert until(lambda: len(first_tokens(together)) == 2, RESTART_S), "Serve has started another one"
    assert ask(MARKS[0]) == expected[MARKS[0]]
