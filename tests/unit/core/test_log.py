"""The log: one tree, a declared and documented code for each warning, a limit for those of requests, vLLM's log."""

from __future__ import annotations

import ast
import logging
import runpy
from functools import cache

import pytest

from ragcache_core.log import LIMIT, LOG_EVENTS, join_tree, logger_of, split_code
from ragcache_core.log import ROOT as TREE
from tests.conftest import ROOT

LEVELS = {"warning": "WARNING", "error": "ERROR", "exception": "ERROR", "critical": "ERROR"}
OTHERS = LEVELS.keys() | {"warn", "log", "fatal", "warning_once", "error_once"}
EVENTS = {code: event for group in LOG_EVENTS.values() for code, event in group.items()}


def _owner(method: ast.Attribute) -> str:
    return ast.unparse(method.value).lower()


@cache
def calls() -> tuple[list[tuple[str, ast.Call]], set[tuple[str, str]]]:
    """Return all calls that log a warning or an error, by whatever logger, and all loggers that are made."""
    logged = list[tuple[str, ast.Call]]()
    made = set[tuple[str, str]]()
    for folder in ("ragcache_core", "ragcache_integrations", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            place = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in ("getLogger", "init_logger"):
                    made.add((place, ast.unparse(node.args[0])))
                elif name in OTHERS and isinstance(node.func, ast.Attribute) and "log" in _owner(node.func):
                    logged.append((place, node))
    return logged, made


def test_each_warning_has_a_declared_code_of_its_level_and_each_code_has_a_warning() -> None:
    used, wrong = set[str](), []
    for place, call in calls()[0]:
        assert isinstance(call.func, ast.Attribute)
        text = call.args[0] if call.args else None
        code, _ = split_code(str(text.value)) if isinstance(text, ast.Constant) else (None, "")
        if code not in EVENTS or EVENTS[code].level != LEVELS.get(call.func.attr):
            wrong.append(f"{place}:{call.lineno} {code}")
        used.add(str(code))
    assert wrong == []
    assert used == EVENTS.keys()
    assert len(used) > 50


def test_every_logger_is_of_the_tree() -> None:
    """Else it has no handler in an engine, or is not of those that a user sets the level of."""
    assert {each for each in calls()[1] if each[0] != "ragcache_core/log.py"} == {
        ("ragcache_core/cli/command.py", "LOG_ROOT"),  # a handler for the tree
        ("ragcache_core/ingest/loaders.py", "'pypdf'"),
    }
    assert logger_of("ragcache_core.tree").name == f"{TREE}.core.tree"
    assert logger_of("ragcache_integrations.langchain").name == f"{TREE}.integrations.langchain"


def test_the_reference_is_what_the_declarations_say() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "log_events.py"))
    assert page["PAGE"].read_text(encoding="utf-8") == page["page"](), "run python docs/log_events.py"


def test_what_comes_with_every_request_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("ragcache_core.log.time.monotonic", lambda: now_s)
    logger, other = logger_of("ragcache_core.one"), logger_of("ragcache_core.another")
    for number in range(3):
        logger.warning("RC-REQUEST-RESENT: request %d", number)
        other.warning("RC-REQUEST-RESENT: request %d", number)
        logger.warning("RC-ENGINE-READY: start %d", number)
        logger.warning("RC-SEARCH-BLOCKED: search %d", number)
    now_s += 61
    logger.warning("RC-REQUEST-RESENT: the last")
    assert [record.getMessage() for record in caplog.records] == [
        "RC-REQUEST-RESENT: request 0",
        "RC-ENGINE-READY: start 0",
        "RC-SEARCH-BLOCKED: search 0",
        "RC-ENGINE-READY: start 1",
        "RC-ENGINE-READY: start 2",
        "RC-REQUEST-RESENT: the last",
    ]
    LIMIT.clear()


def test_in_an_engine_the_tree_has_the_handlers_and_the_level_of_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    own, vllm, logger = logging.getLogger(TREE), logging.getLogger("a-vllm"), logger_of("ragcache_core.in_an_engine")
    monkeypatch.setattr(own, "parent", own.parent)
    logger.disabled = True  # as logging.config does with what a user's file does not name
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    vllm.addHandler(handler)
    vllm.setLevel(logging.INFO)
    join_tree("a-vllm")
    logger.info("found 3 blocks")
    logger.debug("nothing of this")
    logger_of("ragcache_core.made_later").warning("RC-TIER-WORKS: again")
    assert said == ["found 3 blocks", "RC-TIER-WORKS: again"]
