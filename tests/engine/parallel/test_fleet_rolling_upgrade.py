"""Real engines behind one name start, are drained and are killed while a fleet asks them; no answer is lost."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ragcache_core import CacheConfig, Document, Fleet, PromptLayout, RenderedPrompt
from ragcache_core.client import Engine
from ragcache_core.client.launch.process import free_port
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.waiting import until

pytestmark = pytest.mark.slow

KEY = "of-all-replicas"
OLD, NEW = "127.0.1.1", "127.0.1.2"
LATER_TOWNS = [
    f"New {first}stead" for first in ("Ar", "Be", "Co", "Du", "Ev", "Fa", "Go", "Hu", "Il", "Jo", "Ka", "Lu")
]
"""Enough for a hash to spread them over two replicas."""
TOWNS = [f"{first}{last}" for first in ("Ar", "Be", "Co") for last in ("ville", "ton", "ham", "berg")]


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of ``replicas.test``."""
    told: list[str] = []
    resolve = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *rest: Any, **named: Any) -> Any:
        if host != "replicas.test":
            return resolve(host, port, *rest, **named)
        if not told:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in told]

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    return told


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def launch(host: str, port: int, folder: Path) -> Engine:
    settings = {**ENGINE_ARGS, "cache": CacheConfig(kv_cache_bytes="128MiB", block_size=32, host_bytes="64MiB")}
    log = folder / f"{host}.log"
    return Engine.launch(str(DEMO_MODEL), host=host, port=port, api_key=KEY, max_restarts=0, log_path=log, **settings)


def prompt(fleet: Fleet, town: str) -> RenderedPrompt:
    shown = [Document(town, f"{town} was founded by the mayor of {town}. " * 12)]
    return PromptLayout().render(fleet.tokenizer, shown, "Who founded it?")


def test_an_upgrade_of_all_replicas_loses_no_answer(addresses: list[str], stack: ExitStack, tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    with ThreadPoolExecutor(9) as threads:
        joining = threads.submit(
            Fleet.connect, f"dns+http://replicas.test:{port}", api_key=KEY, refresh_s=0.2, restart_timeout_s=120.0
        )
        addresses.append(OLD)  # the application starts while its only replica still loads
        old = stack.enter_context(launch(OLD, port, tmp_path))
        fleet = stack.enter_context(joining.result())

        def ask(town: str) -> str:
            return fleet.generate(prompt(fleet, town), max_tokens=32, extra_body={"ignore_eos": True}).text

        expected = [ask(town) for town in TOWNS]
        new = stack.enter_context(launch(NEW, port, tmp_path))
        addresses.append(NEW)
        assert until(lambda: len(fleet.engines) == 2)
        later = [*threads.map(ask, LATER_TOWNS)]
        assert new.stats().num_requests > 0, "what no replica has cached is spread over both"
        expected += later

        asked = [threads.submit(ask, town) for town in (TOWNS + LATER_TOWNS) * 2]
        asked[2].result()
        draining = threads.submit(old.drain, 60.0)
        addresses.remove(OLD)
        assert [answer.result() for answer in asked] == expected * 2
        assert draining.result(), "it has ended what it was asked"
        old.close()
        assert until(lambda: len(fleet.engines) == 1)
        assert [*threads.map(ask, TOWNS + LATER_TOWNS)] == expected

        assert new.pid is not None
        os.killpg(os.getpgid(new.pid), signal.SIGKILL)
        new.close()
        waiting = threads.submit(ask, TOWNS[0])
        addresses[:] = [OLD]
        stack.enter_context(launch(OLD, port, tmp_path))
        assert waiting.result() == expected[0], "it has waited for a replica at another address"
