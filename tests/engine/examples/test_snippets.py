"""What README and docs show runs as it stands, twice in a row, and their command lines are understood.

The demo model stands for ``my-model``, and the session's engine for the one that a snippet launches.
"""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ragcache_core.cli import cli
from ragcache_core.client import Engine
from tests.conftest import DEMO_MODEL, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [
    "index docs/ --store my-store",
    'ask "When does the office open?" --store my-store --url http://localhost:8000',
    "trace make --workload mmlu --requests 15000 --seed 1 --output mmlu.jsonl",
    "trace show mmlu.jsonl",
]
"""Command lines that cost a second or two; of the others only the options are read."""
QUICKSTART_ANSWER = "Drumrumges"
"""What the demo corpus says of the question that the README's first program asks."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(program: str) -> list[str]:
    """Return the command lines of a program in the pages' console blocks, without what follows a ``#``."""
    lines = [line for page in PAGES for block in blocks(page, "console") for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines), "a console block holds command lines only"
    called = [line[2:].removeprefix(".venv/bin/").partition("  #")[0].strip() for line in lines]
    return list(dict.fromkeys(line for line in called if line.split()[0] == program))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that the pages name as the reader's own."""
    (tmp_path / "my-model").symlink_to(DEMO_MODEL)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("results", "pictures"))
    (tmp_path / "cache.toml").write_text(
        next(block for block in blocks(ROOT / "docs" / "reference" / "configuration.md", "toml") if "[cache]" in block)
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def launched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Hands out handles of the session's engine where one is launched; the arguments of each launch."""
    signature, seen = inspect.signature(Engine.launch), list[dict[str, Any]]()

    def launch(*args: Any, **kwargs: Any) -> Engine:
        seen.append(signature.bind(*args, **kwargs).arguments)
        return Engine.connect(engine.base_url, api_key=engine.api_key)

    monkeypatch.setattr(Engine, "launch", launch)
    return seen


def run(source: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a part of a program, with the names that its beginning left."""
    exec(compile(source, "snippet", "exec"), names)
    return names


def end(names: dict[str, Any]) -> None:
    """Close what a program leaves open, as its end does."""
    for value in names.values():
        if not isinstance(value, type) and type(value).__name__ in {"DocumentStore", "Engine"}:
            value.close()


def first_of_the_readme() -> str:
    return blocks(ROOT / "README.md", "python")[0]


def test_the_readme_runs_from_top_to_bottom_twice_and_finds_its_documents_cached(
    folder: Path, launched: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        names: dict[str, Any] = {"__name__": "__main__"}
        for number, source in enumerate(blocks(ROOT / "README.md", "python")):
            run(source, names)
            printed = capsys.readouterr().out
            if number == 0:
                _, again = printed.splitlines()
                (shown,) = re.findall(r"(?s)```text\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"))
                assert [line.partition(":")[0] for line in printed.splitlines()] == [QUICKSTART_ANSWER] * 2
                assert [line.partition(":")[0] for line in shown.splitlines()] == [QUICKSTART_ANSWER] * 2
                cached, prompt = map(int, re.findall(r"(\d+) of (\d+) prompt tokens cached", again)[0])
                assert 0 < cached < prompt
        end(names)
    assert {arguments["model"] for arguments in launched} == {"examples/demo_model", "my-model"}


@pytest.mark.parametrize(
    "page", [p for p in PAGES[1:] if blocks(p, "python")], ids=lambda p: p.relative_to(ROOT).with_suffix("").as_posix()
)
def test_a_page_of_the_docs_runs_on_what_the_readme_begins_with(
    page: Path, folder: Path, launched: list[dict[str, Any]]
) -> None:
    names = run(first_of_the_readme(), {"__name__": "__main__"})
    for source in blocks(page, "python"):
        run(source, names)
    end(names)


def test_settings_that_a_page_shows_are_read() -> None:
    for page in PAGES:
        for block in blocks(page, "toml"):
            assert tomllib.loads(block)


@pytest.mark.parametrize("line", commands("ragcache"))
def test_a_command_line_of_the_pages_is_understood(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"[\w-]+\.(?:jsonl|json)", line):
        (folder / name).touch()
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(click.Command, "invoke", lambda self, context: asked.append(context.params))
    done = CliRunner().invoke(cli, shlex.split(line)[1:])
    assert done.exit_code == 0, done.output
    assert asked[-1]
    assert CliRunner().invoke(cli, [*shlex.split(line.partition(" -- ")[0])[1:], "--no-such-option"]).exit_code == 2


def test_cheap_command_lines_of_the_readme_run(folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGCACHE_API_KEY", engine.api_key)
    shown = [line.removeprefix("ragcache ") for line in commands("ragcache")]
    for line in RUN:
        assert line in shown
        arguments = shlex.split(line.replace("http://localhost:8000", engine.base_url))
        for _ in range(2):
            done = CliRunner().invoke(cli, arguments)
            assert done.exit_code == 0, (line, done.output)


def test_what_else_the_pages_call_is_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {line.split()[1] for line in commands("make")} <= targets
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for line in commands("pip"):
        assert {extra for found in re.findall(r"\[([\w,]+)\]", line) for extra in found.split(",")} <= set(extras)
    for line in (*commands("python"), *commands("pytest")):
        for path in re.findall(r"\b(?:kernels|tests)/[\w/.]+", line):
            assert (ROOT / path).exists(), line
