"""Everything that can be wrong on the command line: one clear error of ours, status 1, and nothing stored is lost."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.cli.scene import Scene, check_error, invoke, run

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
    StoreVersionError,
    TooFewDocumentsError,
)
from ragcache_core.retrieval import DocumentStore
from ragcache_core.retrieval.storage import manifest as manifest_file
from ragcache_core.types import Document

WORDS = ("zor", "mel", "tar", "city", "river", "lake", "stone", "bread", "winter", "harbour")


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


def truncated(pattern: str) -> Case:
    def case(scene: Scene) -> list[str]:
        path = scene.file_of_store(pattern)
        path.write_bytes(path.read_bytes()[:-7])
        return [*scene.ask(), "--model", "examples/demo_model"]

    return case


def one_bit_flipped(pattern: str) -> Case:
    def case(scene: Scene) -> list[str]:
        path = scene.file_of_store(pattern)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
        return scene.index

    return case


def missing(pattern: str) -> Case:
    def case(scene: Scene) -> list[str]:
        scene.file_of_store(pattern).unlink()
        return [*scene.ask(), "--model", "examples/demo_model"]

    return case


def newer_version(scene: Scene) -> list[str]:
    path = scene.store / manifest_file.MANIFEST_NAME
    content = json.loads(path.read_text())
    content["format"] += 1
    path.write_text(json.dumps(content))
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
    (truncated("index-*.faiss"), StoreCorruptError),
    (one_bit_flipped("documents-*.sqlite"), StoreCorruptError),
    (missing("manifest.json"), StoreCorruptError),
    (newer_version, StoreVersionError),
    (another_index_than_the_stores, ConfigError),
    (store_is_a_file, ConfigError),
]


def name_of(case: Case) -> str:
    """Return what is wrong: ``no_model_to_serve``, ``truncated-index``."""
    made_by, *_ = case.__qualname__.split(".")
    return made_by if case.__closure__ is None else f"{made_by}-{case.__closure__[0].cell_contents.split('-')[0]}"


@pytest.mark.parametrize(("case", "error"), CASES, ids=[name_of(case) for case, _ in CASES])
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
