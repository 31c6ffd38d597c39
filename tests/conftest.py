"""Fixtures that every test may use: the demo model, and one real engine for each process of the session."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# vLLM binds a model's threads to cores: those of engines side by side to the same, where they wait for each other, and
# those of one to all, where its server waits for them and tells nothing of a whole answer until it is over.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from ragcache_core import log
from ragcache_core.client import Engine
from ragcache_core.client.pipeline.histories import HISTORIES
from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_core.client.speculation.speculation import Speculation, SpeculationManager
from ragcache_core.config import CacheConfig
from tests.support.measured import measured

# A test run in the background of a shell has SIGINT ignored, and so would every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Where CI is set, random tests try the same examples in every run; elsewhere new ones. What fails becomes an @example.
hypothesis.settings.register_profile("ragcache", derandomize=bool(os.environ.get("CI")), print_blob=True, deadline=None)
hypothesis.settings.load_profile("ragcache")

ROOT = Path(__file__).resolve().parent.parent
_NUMBERS = itertools.count()
DEMO_MODEL = ROOT / "examples" / "demo_model"
ENGINE_ARGS: dict[str, Any] = {
    "cache": CacheConfig(kv_cache_bytes="1GiB", block_size=32, host_bytes="256MiB"),
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "stream_interval": 8,  # the demo model is faster than the server can send single tokens
}
"""How tests launch the demo model: exact arithmetic, no compilation."""


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(gc.unfreeze)  # modules that count what they leave behind find nothing


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep Python's collector of cycles away from what stays to the end: a million objects, of modules and tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none."""
    if not _has_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists()


@pytest.fixture(autouse=True)
def nothing_learnt_before(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each test begin without what searches of another one, or of the user, have found and taught."""
    RETRIEVED.clear()
    monkeypatch.setattr(HISTORIES, "folder", tmp_path_factory.getbasetemp() / "stages" / str(next(_NUMBERS)))


@pytest.fixture(autouse=True)
def log_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each test begin as if nothing was logged, whatever an engine in this process has done to the log."""
    monkeypatch.setattr(logging.getLogger(log.ROOT), "parent", logging.root)
    log.LIMIT.clear()


@pytest.fixture(scope="session")
def demo_model() -> str:
    """Path of the demo model."""
    return str(DEMO_MODEL)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The one engine of a process that runs tests, over the demo model. Tests must not close or kill it.

    It takes its default times of prefills for measured ones, so that requests may have deadlines.
    """
    folder = tmp_path_factory.mktemp("engine")
    with measured(DEMO_MODEL, folder):
        running = Engine.launch(str(DEMO_MODEL), log_path=folder / "server.log", **ENGINE_ARGS)
    with running:
        yield running


@pytest.fixture
def num_begun(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Of how many speculations the engine has told when it began with them."""
    sent: list[Speculation] = []
    start = SpeculationManager.start

    def noted(*args: Any, **kwargs: Any) -> Speculation:
        sent.append(start(*args, **kwargs))
        return sent[-1]

    monkeypatch.setattr(SpeculationManager, "start", noted)
    return lambda: sum(speculation.started_s is not None for speculation in sent)
