"""The words of code and documentation: standard technical English."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.core.test_docs import CARDS, PAGES, ROOT

FOLDERS = ("ragcache_core", "ragcache_integrations", "kernels", "benchmarks", "examples", "tests")
SUFFIXES = {
    *(".py", ".js", ".mjs", ".html", ".css", ".sh"),
    *(".yaml", ".yml", ".tf", ".tfvars", ".tpl", ".json", ".cfg", ".conf"),
}
ROOT_FILES = ("Makefile", "mkdocs.yml", "pyproject.toml")
DENIED = re.compile(
    r"\b(nobody|somebody|whoever|anew|dear|dearer|alike|stands? behind|gives? up|so many|of which|as it comes|take note"
    r"|AskedPrompt|OnItsWay|KnownReplica|JoinedServer|SettlingHistory|KeptHistory|RememberedRights|KeptThreads"
    r"|ReturningTurns|SearchPace|TournamentPolicy|GreedyStream|AsyncBegun|LateError)\b",
    re.IGNORECASE,
)
ALLOWED: dict[tuple[str, str], str] = {
    ("tests/support/postgres.py", "nobody"): "the name of a user of Unix",
}
"""Denied words that a file needs, with the reason: 40 at most."""


def test_no_file_has_a_denied_word() -> None:
    code = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in SUFFIXES]
    own = Path(__file__).resolve()  # it names the words
    root = [ROOT / name for name in ROOT_FILES]
    files = [path for path in (*PAGES, *CARDS, *root, *code) if "node_modules" not in path.parts and path != own]
    assert len(files) > 400
    found = {
        (path.relative_to(ROOT).as_posix(), word.lower())
        for path in files
        for word in DENIED.findall(path.read_text(encoding="utf-8"))
    }
    assert found == set(ALLOWED)
    assert len(ALLOWED) <= 40
