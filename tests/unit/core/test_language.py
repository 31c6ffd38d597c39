"""The words of code and documentation: standard technical English."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.core.test_docs import CARDS, PAGES, ROOT

FOLDERS = ("ragcache_core", "ragcache_integrations", "kernels", "benchmarks", "examples", "tests")
SUFFIXES = {
    *(".py", ".js", ".mjs", ".html", ".css", ".sh"),
    *(".yaml", ".yml", ".tf", ".tfvars", ".tpl", ".json", ".cfg", ".conf"),
}
ROOT_FILES = ("Makefile", "mkdocs.yml", "pyproject.toml")
DENIED = re.compile(
    r"(?<![A-Za-z])(nobody|somebody|whoever|anew|dear|dearer|alike|stands?[\s_]+behind|gives?[\s_]+up|so[\s_]+many"
    r"|of[\s_]+which|as[\s_]+it[\s_]+comes|take[\s_]+note)(?![A-Za-z])",
    re.IGNORECASE,
)
DENIED_NAMES = re.compile(
    r"\b_?(AskedPrompt|OnItsWay|KnownReplica|JoinedServer|SettlingHistory|KeptHistory|RememberedRights|KeptThreads"
    r"|ReturningTurns|SearchPace|TournamentPolicy|GreedyStream|AsyncBegun|LateError)\b"
)
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_VLLMS = "`is_cuda_alike` is vLLM's"
ALLOWED: dict[tuple[str, str], str] = {
    ("ragcache_core/vllm_plugin/offload/layer_load_scheduler.py", "alike"): _VLLMS,
    ("ragcache_core/vllm_plugin/offload/spec.py", "alike"): _VLLMS,
    ("ragcache_core/vllm_plugin/offload/vllm_spec.py", "alike"): _VLLMS,
    ("tests/support/postgres.py", "nobody"): "the name of a user of Unix",
}
"""Denied words that a file needs, with the reason: 40 at most."""


def denied_in(text: str) -> list[str]:
    """Return the denied words of a text, those within identifiers too."""
    return DENIED.findall(HUMP.sub("_", text)) + DENIED_NAMES.findall(text)


@pytest.mark.parametrize(
    "text", ["is_anew", "_give_up()", "giveUp", "NobodyAsks", "so\n    many", "ANEW_S", "_LateError"]
)
def test_a_denied_word_is_seen_within_an_identifier(text: str) -> None:
    assert len(denied_in(text)) == 1


def test_no_file_has_a_denied_word() -> None:
    code = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in SUFFIXES]
    own = Path(__file__).resolve()  # it names the words
    root = [ROOT / name for name in ROOT_FILES]
    files = [path for path in (*PAGES, *CARDS, *root, *code) if "node_modules" not in path.parts and path != own]
    assert len(files) > 400
    found = {
        (path.relative_to(ROOT).as_posix(), word.lower())
        for path in files
        for word in denied_in(path.read_text(encoding="utf-8"))
    }
    assert found == set(ALLOWED)
    assert len(ALLOWED) <= 40
