"""The order of the tests on engines, which of them share a process, and plain vLLM for those that ask it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache_core.client import Engine
from tests.conftest import DEMO_MODEL, ENGINE_ARGS

LONGEST_FIRST = ("engine", "plain", "chunk/test_exact.py", "client/test_lifecycle.py", "cli/test_serve.py", "facts")
"""Groups that take more than half a minute: with the short ones at the end no process runs on for long by itself."""

_FOLDER = Path(__file__).parent


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


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what shares a file or an engine in one process, where the engine is started once; the longest come first."""
    shared: dict[Path, set[str]] = defaultdict(set)
    for item in items:
        shared[item.path] |= _shared_by(item)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item.path, shared[item.path])))
    items.sort(key=_rank)


def _shared_by(item: pytest.Item) -> set[str]:
    """Return which engines of the session a test asks; a file may have another fixture of the same name."""
    homes = {"engine": "tests", "plain": "tests/engine"}
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 (pytest shows it nowhere else)
    return {name for name, home in homes.items() if name in fixtures and fixtures[name][-1].baseid == home}


def _group(path: Path, engines: set[str]) -> str:
    if not path.is_relative_to(_FOLDER):
        return "facts"
    return min(engines) if engines else path.relative_to(_FOLDER).as_posix()


def _rank(item: pytest.Item) -> int:
    (group,) = item.get_closest_marker("xdist_group").args  # type: ignore[union-attr]
    return LONGEST_FIRST.index(group) if group in LONGEST_FIRST else len(LONGEST_FIRST)
