"""The order of the tests on engines, which process runs them, and plain vLLM for those that ask it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from ragcache_core.client import Engine
from tests.conftest import DEMO_MODEL, ENGINE_ARGS

LONGEST_FIRST = (
    "vllm_plugin/test_tiers_on_the_engine.py",
    "chunk/test_exact.py",
    "client/test_lifecycle.py",
    "vllm_plugin/test_simulated_engine.py",
    "vllm_plugin/test_model_families.py",
    "chunk/test_launched.py",
    "examples/test_examples.py",
    "cli/test_serve.py",
    "cli/test_in_a_container.py",
    "chunk/test_interleavings.py",
    "llamaindex_integration/test_llamaindex_on_the_engine.py",
)
"""Files that take more than half a minute: with the short ones at the end no process runs on for long by itself."""

ASK_PLAIN = (
    "vllm_plugin/test_tiers_on_the_engine.py",
    "vllm_plugin/test_beside_on_the_engine.py",
    "vllm_plugin/test_unknown_release.py",
    "vllm_plugin/test_recognition_on_the_engine.py",
    "client/test_plain_vllm.py",
)
"""Files whose tests ask ``plain``: one process runs all of them, and starts it once."""

_FOLDER = Path(__file__).parent


class ByEngine(LoadFileScheduling):
    """A file's tests in one process, and those of the files that ask ``plain``."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return ASK_PLAIN[0] if file.endswith(ASK_PLAIN) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByEngine:
    return ByEngine(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    if not item.path.is_relative_to(_FOLDER):
        return -1  # what needs no engine comes before all of them
    name = item.path.relative_to(_FOLDER).as_posix()
    return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)


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
