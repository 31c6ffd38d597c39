"""The order of the tests on engines, which of them share a process, and plain vLLM for those that ask it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from ragcache_core.client import Engine
from tests.conftest import DEMO_MODEL, ENGINE_ARGS, ROOT

LONGEST_FIRST = (
    "engine",
    "plain",
    "test_exact.py",
    "test_lifecycle.py",
    "test_upgrade.py",
    "test_interleavings.py",
    "test_model_families.py",
    "test_in_a_container.py",
    "test_simulated_engine.py",
    "test_shared_tier_on_the_engine.py",
    "test_shared_tier_over_s3.py",
    "test_serve.py",
    "facts",
)
"""Groups that take more than half a minute: with the short ones at the end no process runs on for long by itself."""


@pytest.fixture
def plugin_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the plugin logs, however an engine in this process has set vLLM's loggers."""
    with (
        pytest.MonkeyPatch.context() as patch,
        caplog.at_level(logging.INFO, logger="vllm"),
        caplog.at_level(logging.INFO, logger="ragcache"),
    ):
        for name in [name for name in logging.root.manager.loggerDict if name.startswith(("ragcache", "vllm"))]:
            patch.setattr(logging.getLogger(name), "disabled", False)
            patch.setattr(logging.getLogger(name), "propagate", True)
        yield caplog


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Plain vLLM, and without tools. Tests must not close or kill it."""
    with Engine.launch(
        str(DEMO_MODEL),
        cache=None,
        dtype="float32",
        enforce_eager=True,
        max_model_len=ENGINE_ARGS["max_model_len"],
        block_size=32,
        log_path=tmp_path_factory.mktemp("plain") / "server.log",
    ) as running:
        yield running


@cache
def _group_of(file: str) -> str:
    """Return the engine of the session that a file's tests ask, which then is started in one process; else the file."""
    if file.startswith("tests/vllm_facts"):
        return "facts"
    text = (ROOT / file).read_text(encoding="utf-8")
    for name in ("plain", "engine"):
        asks = rf"(@pytest\.fixture[^\n]*\n\s*(async )?def |def test_)[^)]*\b{name}: Engine\b"
        sends_late = f'getfixturevalue("{name}")'
        if (re.search(asks, text) or sends_late in text) and f"def {name}(" not in text:
            return name
    return Path(file).name


class ByEngine(LoadFileScheduling):
    """A file's tests in one process, and those of all files that share an engine."""

    def _split_scope(self, nodeid: str) -> str:
        return _group_of(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByEngine:
    return ByEngine(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest groups first."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    group = _group_of(item.path.relative_to(ROOT).as_posix())
    return LONGEST_FIRST.index(group) if group in LONGEST_FIRST else len(LONGEST_FIRST)
