"""Whether setup.py compiles the tree and the policies."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = ("policy", "tree")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what setup.py compiles."""
    without = shutil.ignore_patterns("__pycache__", "*.so")
    for room in ROOMS:
        shutil.copytree(ROOT / "ragcache_core" / room, tmp_path / "ragcache_core" / room, ignore=without)
    for file in ("ragcache_core/__init__.py", "ragcache_core/errors.py", "ragcache_core/types.py", "setup.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def build(sources: Path, *commands: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py where there is no working C compiler."""
    variables = os.environ | {"RAGCACHE_COMPILE": "", "CC": "false"} | variables
    command = [sys.executable, "setup.py", *commands]
    return subprocess.run(command, cwd=sources, env=variables, capture_output=True, text=True, timeout=300)


def test_without_a_c_compiler_a_wheel_is_python_unless_machine_code_was_asked_for(sources: Path) -> None:
    build_ext = ("build_ext", "--build-lib", "built")
    run = build(sources, *build_ext)
    assert run.returncode == 0, run.stderr
    assert "the tree and the policies stay Python" in run.stderr
    assert not list(sources.rglob("*.so"))
    run = build(sources, *build_ext, RAGCACHE_COMPILE="1")
    assert run.returncode != 0
    assert "false' failed with exit code" in run.stderr


@pytest.mark.parametrize("variables", [{"RAGCACHE_COMPILE": "0"}, {"RAGCACHE_COMPILE": "1", "CC": "false"}])
def test_what_builds_nothing_compiles_nothing(sources: Path, variables: dict[str, str]) -> None:
    command = ("build_ext",) if variables["RAGCACHE_COMPILE"] == "0" else ("egg_info",)
    run = build(sources, *command, **variables)
    assert run.returncode == 0, run.stderr
    assert not (sources / "build" / "mypyc").exists()


@pytest.mark.parametrize("room", ROOMS)
def test_constants_in_compiled_rooms_are_final_because_others_are_looked_up_by_name_each_time(room: str) -> None:
    for file in (ROOT / "ragcache_core" / room).glob("[!_]*.py"):
        for statement in ast.parse(file.read_text()).body:
            names = [name.id for name in ast.walk(statement) if isinstance(name, ast.Name) and name.id.isupper()]
            if isinstance(statement, ast.Assign):
                assert not names, (file.name, ast.unparse(statement))
            elif isinstance(statement, ast.AnnAssign):
                assert ast.unparse(statement.annotation).startswith("Final"), (file.name, ast.unparse(statement))
