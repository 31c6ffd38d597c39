"""Everything that can be wrong on the command line: one clear error of ours, status 1, and nothing stored is lost."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from ragcache_core.cli import cli
from ragcache_core.client import Engine
from ragcache_core.errors import (
    ConfigError,
    DocumentError,
    DuplicateDocumentError,
    EmptyStoreError,
    EngineAuthError,
    EngineStartError,
    EngineUnreachableError,
    PromptTooLongError,
    RAGCacheError,
    SearchError,
    StoreCorruptError,
    StoreFullError,
    StoreNotFoundError,
    TooFewDocumentsError,
)
from ragcache_core.retrieval import DocumentStore
from ragcache_core.retrieval.storage.manifest import LOCK_NAME
from ragcache_core.types import Document

ROOT = Path(__file__).resolve().parents[3]
WORDS = ("zor", "mel", "tar", "city", "river", "lake", "stone", "bread", "winter", "harbour")


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


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Scene:
    scene = Scene(tmp_path, lambda: request.getfixturevalue("engine"))
    scene.notes.mkdir()
    scene.write("new.txt", "A new document about the harbour of Zor.")
    with DocumentStore.create(scene.store, index="flat") as store:
        store.add(Document(f"doc-{i}", " ".join(WORDS[(i * j) % 10] for j in range(1, 9))) for i in range(12))
    return scene


Case = Callable[[Scene], list[str]]
"""Prepares what is wrong and returns the command line."""


def no_model_to_serve(scene: Scene) -> list[str]:
    return ["serve", str(scene.folder / "no-such-model")]


def no_model_to_ask(scene: Scene) -> list[str]:
    return [*scene.ask(), "--model", str(scene.notes)]


def server_unreachable(scene: Scene) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return [*scene.ask(), "--url", f"http://127.0.0.1:{probe.getsockname()[1]}"]


def server_of_stats_unreachable(scene: Scene) -> list[str]:
    return ["stats", *server_unreachable(scene)[-2:]]


def wrong_key(scene: Scene) -> list[str]:
    return scene.ask_engine(api_key="wrong")


def no_store(scene: Scene) -> list[str]:
    return ["ask", "Where?", "--store", str(scene.notes), "--model", "examples/demo_model"]


def empty_store(scene: Scene) -> list[str]:
    with DocumentStore.open(scene.store) as store:
        store.delete(store.ids())
    return [*scene.ask(), "--model", "examples/demo_model"]


def k_larger_than_the_store(scene: Scene) -> list[str]:
    return [*scene.ask(), "--model", "examples/demo_model", "--k", "13"]


def empty_question(scene: Scene) -> list[str]:
    return [*scene.ask(" "), "--model", "examples/demo_model"]


def question_longer_than_the_window(scene: Scene) -> list[str]:
    return scene.ask_engine("Where is Zor? " * 1000)


def documents_that_do_not_fit(scene: Scene) -> list[str]:
    with DocumentStore.open(scene.store) as store:
        store.add([Document("long", "Zor is a harbour in winter. " * 700)])
    return [*scene.ask_engine(), "--k", "13"]


def answer_that_does_not_fit(scene: Scene) -> list[str]:
    return [*scene.ask_engine(), "--max-tokens", "2048"]


def id_in_the_store_already(scene: Scene) -> list[str]:
    scene.write("bad.jsonl", '{"id": "doc-3", "text": "not what the store has"}\n')
    return scene.index


def nothing_to_read(scene: Scene) -> list[str]:
    return ["index", str(scene.folder / "nowhere"), "--store", str(scene.store)]


def one_bit_flipped(scene: Scene) -> list[str]:
    (path,) = scene.store.glob("documents-*.sqlite")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return scene.index


def another_index_than_the_stores(scene: Scene) -> list[str]:
    return [*scene.index, "--index", "hnsw"]


def store_is_a_file(scene: Scene) -> list[str]:
    return ["index", str(scene.notes), "--store", str(scene.notes / "new.txt")]


CASES: list[tuple[Case, type[RAGCacheError]]] = [
    (no_model_to_serve, EngineStartError),
    (no_model_to_ask, EngineStartError),
    (server_unreachable, EngineUnreachableError),
    (server_of_stats_unreachable, EngineUnreachableError),
    (wrong_key, EngineAuthError),
    (no_store, StoreNotFoundError),
    (empty_store, EmptyStoreError),
    (k_larger_than_the_store, TooFewDocumentsError),
    (empty_question, SearchError),
    (question_longer_than_the_window, PromptTooLongError),
    (documents_that_do_not_fit, PromptTooLongError),
    (answer_that_does_not_fit, PromptTooLongError),
    (id_in_the_store_already, DuplicateDocumentError),
    (nothing_to_read, DocumentError),
    (one_bit_flipped, StoreCorruptError),
    (another_index_than_the_stores, ConfigError),
    (store_is_a_file, ConfigError),
]


@pytest.mark.parametrize(("case", "error"), CASES, ids=[case.__name__ for case, _ in CASES])
def test_one_clear_error_and_nothing_is_lost(scene: Scene, case: Case, error: type[RAGCacheError]) -> None:
    arguments = case(scene)
    before = scene.fingerprint()
    check_error(invoke(arguments), error)
    assert scene.fingerprint() == before


def test_a_disk_that_is_full_while_saving_loses_nothing(scene: Scene) -> None:
    assert run(scene.index).status == 0
    scene.write("new.txt", "What was stored of this file is to be replaced.")
    scene.write("large.txt", " ".join(f"{WORDS[i % 10]}{i}" for i in range(30_000)))
    before = scene.fingerprint()
    done = run([*scene.index, "--update"], largest_file_bytes=100_000)
    check_error(done, StoreFullError)
    assert scene.fingerprint() == before
    assert run([*scene.index, "--update"]).status == 0
    with DocumentStore.open(scene.store, read_only=True) as store:
        assert {f"doc-{i}" for i in range(12)} < set(store.ids())
        assert store.get(["new.txt"])[0].text.startswith("What was stored")


def test_a_disk_that_is_full_leaves_no_half_made_store(scene: Scene) -> None:
    scene.write("large.txt", " ".join(f"{WORDS[i % 10]}{i}" for i in range(30_000)))
    new = scene.folder / "new.store"
    done = run(["index", str(scene.notes), "--store", str(new)], largest_file_bytes=100_000)
    check_error(done, StoreFullError)
    assert not new.exists()


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_named_in_one_line(tmp_path: Path) -> None:
    """With vLLM's build for CUDA, for which this one is taken here."""
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "known = metadata.version\n"
        "metadata.version = lambda name: '0.32.0' if name == 'vllm' else known(name)\n"
    )
    command = [sys.executable, "-m", "ragcache_core", "serve", str(ROOT / "examples" / "demo_model"), "--port", "0"]
    done = subprocess.run(
        [*command, "--host-bytes", "64MiB", "--kv-cache-bytes", "64MiB", "--log", str(tmp_path / "server.log")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith("ragcache: error: vLLM found no GPU here: give the container one")
    assert "Traceback" not in done.stderr
