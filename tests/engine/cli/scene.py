"""A store, files and ways to run the command line over them, for tests of what goes wrong."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from ragcache_core.cli import cli
from ragcache_core.client import Engine
from ragcache_core.errors import RAGCacheError
from ragcache_core.retrieval.storage.manifest import LOCK_NAME

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Scene:
    """Files, a store of 12 documents, and a way to a running engine."""

    folder: Path
    start_engine: Callable[[], Engine]

    @property
    def store(self) -> Path:
        return self.folder / "notes.store"

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    @property
    def index(self) -> list[str]:
        return ["index", str(self.notes), "--store", str(self.store)]

    def ask(self, question: str = "Where is Zor?") -> list[str]:
        return ["ask", question, "--store", str(self.store)]

    def ask_engine(self, question: str = "Where is Zor?", *, api_key: str | None = None) -> list[str]:
        engine = self.start_engine()
        return [*self.ask(question), "--url", engine.base_url, "--api-key", api_key or engine.api_key]

    def write(self, name: str, content: str | bytes) -> None:
        (self.notes / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def file_of_store(self, pattern: str) -> Path:
        (path,) = self.store.glob(pattern)
        return path

    def fingerprint(self) -> dict[str, str]:
        """Return the hash of every file of the store that holds something of its state."""
        paths = (path for path in self.store.rglob("*") if path.is_file() and path.name != LOCK_NAME)
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@dataclass(frozen=True)
class Done:
    """What a finished command line left: its exit status, standard output and standard error."""

    status: int
    out: str
    err: str


def invoke(arguments: list[str]) -> Done:
    """Run the command line with ``--json`` in this process, which has loaded everything already."""
    result = CliRunner().invoke(cli, [arguments[0], "--json", *arguments[1:]])
    return Done(result.exit_code, result.stdout, result.stderr)


def run(arguments: list[str], *, largest_file_bytes: int | None = None) -> Done:
    """Run the command line with ``--json`` in a process of its own."""

    def limit() -> None:
        if largest_file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes, largest_file_bytes))

    command, *rest = arguments
    done = subprocess.run(
        [sys.executable, "-m", "ragcache_core", command, "--json", *rest],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=limit,
        timeout=240,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def check_error(done: Done, error: type[RAGCacheError]) -> None:
    """Check the status, the one line on standard error, and the object on standard output."""
    assert done.status == 1, done.err
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith("ragcache: error: ")
    told = json.loads(done.out)["error"]
    assert told == {"type": error.__name__, "message": lines[0].removeprefix("ragcache: error: ")}
