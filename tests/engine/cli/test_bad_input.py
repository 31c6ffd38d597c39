"""Everything that can be wrong on the command line: one clear error of ours, status 1, and nothing stored is lost."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ragcache_core.errors import (
    ConfigError,
    DocumentError,
    DuplicateDocumentError,
    EmbedderMismatchError,
    EmptyStoreError,
    EngineAuthError,
    EngineStartError,
    EngineUnreachableError,
    PromptTooLongError,
    RAGCacheError,
    SearchError,
    StoreCorruptError,
    StoreFullError,
    StoreLockedError,
    StoreNotFoundError,
    StoreVersionError,
    TooFewDocumentsError,
)
from ragcache_core.retrieval import DocumentStore, TfidfSvdEmbedder
from ragcache_core.retrieval.storage import manifest as manifest_file
from ragcache_core.types import Document
from tests.engine.cli.scene import ROOT, Scene, check_error, invoke, run

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


def empty_document(scene: Scene) -> list[str]:
    scene.write("bad.txt", " \n")
    return scene.index


def binary_document(scene: Scene) -> list[str]:
    scene.write("bad.md", b"\x7fELF\x02\x01\x01\0\0")
    return scene.index


def document_that_is_not_utf8(scene: Scene) -> list[str]:
    scene.write("bad.html", "<p>M\u00e4rz</p>".encode("latin-1"))
    return scene.index


def broken_line_of_json(scene: Scene) -> list[str]:
    scene.write("bad.jsonl", '{"text": "Zor"}\n{"text": "Mel"\n')
    return scene.index


def ids_twice_in_the_files(scene: Scene) -> list[str]:
    scene.write("bad.jsonl", '{"id": "a", "text": "Zor"}\n{"id": "a", "text": "Mel"}\n')
    return scene.index


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


def embedder_of_another_dimension(scene: Scene) -> list[str]:
    scene.store.rename(scene.folder / "other.store")
    with DocumentStore.create(scene.store, embedder=TfidfSvdEmbedder(64)) as store:
        store.add([Document("a", "Zor is a city."), Document("b", "Mel is a river.")])
    return [*scene.index, "--embedder", "builtin"]


def another_index_than_the_stores(scene: Scene) -> list[str]:
    return [*scene.index, "--index", "hnsw"]


def store_is_a_file(scene: Scene) -> list[str]:
    return ["index", str(scene.notes), "--store", str(scene.notes / "new.txt")]


CASES: list[tuple[Case, type[RAGCacheError], str]] = [
    (no_model_to_serve, EngineStartError, "no-such-model.*name a folder with a model"),
    (no_model_to_ask, EngineStartError, "holds no config.json.*name a folder with a model"),
    (server_unreachable, EngineUnreachableError, "no engine answers at http://127.0.0.1:.*is the server running"),
    (server_of_stats_unreachable, EngineUnreachableError, "no engine answers at http://127.0.0.1:"),
    (wrong_key, EngineAuthError, "http://127.0.0.1:.* refused the API key: pass the server's with --api-key"),
    (no_store, StoreNotFoundError, "holds no document store: make one with 'ragcache index"),
    (empty_store, EmptyStoreError, "the store holds no documents yet: add some"),
    (k_larger_than_the_store, TooFewDocumentsError, "13 documents .* holds 12: use a smaller --k"),
    (empty_question, SearchError, "ask something"),
    (question_longer_than_the_window, PromptTooLongError, r"prompt has \d+ tokens .* window holds 2048: .*shorten"),
    (documents_that_do_not_fit, PromptTooLongError, r"prompt has \d+ tokens .* window holds 2048: retrieve fewer"),
    (answer_that_does_not_fit, PromptTooLongError, "asks for 2048 more, .* window holds 2048"),
    (id_in_the_store_already, DuplicateDocumentError, "'doc-3' is in .* with --update"),
    (nothing_to_read, DocumentError, "nothing is at .*nowhere"),
    (truncated("index-*.faiss"), StoreCorruptError, r"has \d+ bytes, the manifest records \d+: .*--rebuild-index"),
    (truncated("documents-*.sqlite"), StoreCorruptError, r"has \d+ bytes, the manifest records \d+: restore"),
    (truncated("embedder-*.npz"), StoreCorruptError, r"has \d+ bytes, the manifest records \d+: restore"),
    (truncated("manifest.json"), StoreCorruptError, "manifest.json is damaged: restore"),
    (one_bit_flipped("index-*.faiss"), StoreCorruptError, "has SHA-256 .*, the manifest records .*--rebuild-index"),
    (one_bit_flipped("documents-*.sqlite"), StoreCorruptError, "has SHA-256 .*, the manifest records .*: restore"),
    (one_bit_flipped("embedder-*.npz"), StoreCorruptError, "has SHA-256 .*, the manifest records .*: restore"),
    (one_bit_flipped("manifest.json"), StoreCorruptError, "manifest.json is damaged: restore"),
    (missing("index-*.faiss"), StoreCorruptError, "is missing: .*--rebuild-index"),
    (missing("manifest.json"), StoreCorruptError, "manifest.json is missing: restore"),
    (newer_version, StoreVersionError, "store format 4, this RAGCache reads up to 3: upgrade RAGCache"),
    (embedder_of_another_dimension, EmbedderMismatchError, "'tfidf-svd-64', not 'tfidf-svd-128': "),
    (another_index_than_the_stores, ConfigError, "made with --index flat, not hnsw: leave the option out"),
    (store_is_a_file, ConfigError, "new.txt is a file: choose a folder for the store"),
]  # fmt: skip


UNREADABLE: list[tuple[Case, str]] = [
    (empty_document, "'bad.txt' holds 2 characters, none of them text: "),
    (binary_document, "'bad.md' is binary .*offset 7"),
    (document_that_is_not_utf8, "'bad.html' is not UTF-8 .byte 0xe4 at offset 4.*UTF-8"),
    (broken_line_of_json, "line 2 of 'bad.jsonl' is not JSON .*write"),
    (ids_twice_in_the_files, "'a' is in .*bad.jsonl:1 and again in .*bad.jsonl:2: give"),
]


def name_of(case: Case) -> str:
    """Return what is wrong: ``no_model_to_serve``, ``truncated-index``."""
    made_by, *_ = case.__qualname__.split(".")
    return made_by if case.__closure__ is None else f"{made_by}-{case.__closure__[0].cell_contents.split('-')[0]}"


@pytest.mark.parametrize(("case", "error", "message"), CASES, ids=[name_of(case) for case, _, _ in CASES])
def test_one_clear_error_and_nothing_is_lost(
    scene: Scene, case: Case, error: type[RAGCacheError], message: str
) -> None:
    arguments = case(scene)
    before = scene.fingerprint()
    check_error(invoke(arguments), error, message)
    assert scene.fingerprint() == before


@pytest.mark.parametrize(("case", "message"), UNREADABLE, ids=[name_of(case) for case, _ in UNREADABLE])
def test_a_document_that_cannot_be_read_is_named_and_the_others_are_stored(
    scene: Scene, case: Case, message: str
) -> None:
    done = invoke(case(scene))
    assert done.status == 1
    assert re.search(f"left out: .*{message}", done.err)
    assert "error: 1 document could not be read" in done.err
    with DocumentStore.open(scene.store, read_only=True) as store:
        assert "new.txt" in store


def test_a_port_that_is_taken(scene: Scene) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(["serve", str(ROOT / "examples" / "demo_model"), "--port", str(port)])
    check_error(done, EngineStartError, rf"port {port} of 127.0.0.1 cannot be used .*: choose another --port")


def test_a_disk_that_is_full_while_saving_loses_nothing(scene: Scene) -> None:
    assert run(scene.index).status == 0
    scene.write("new.txt", "What was stored of this file is to be replaced.")
    scene.write("large.txt", " ".join(f"{WORDS[i % 10]}{i}" for i in range(100_000)))
    before = scene.fingerprint()
    done = run([*scene.index, "--update"], largest_file_bytes=100_000)
    check_error(done, StoreFullError, "no space left to save .*: free some and try again, nothing was lost")
    assert scene.fingerprint() == before
    assert run([*scene.index, "--update"]).status == 0
    with DocumentStore.open(scene.store, read_only=True) as store:
        assert {f"doc-{i}" for i in range(12)} < set(store.ids())
        assert store.get(["new.txt"])[0].text.startswith("What was stored")


def test_a_disk_that_is_full_leaves_no_half_made_store(scene: Scene) -> None:
    scene.write("large.txt", " ".join(f"{WORDS[i % 10]}{i}" for i in range(100_000)))
    new = scene.folder / "new.store"
    done = run(["index", str(scene.notes), "--store", str(new)], largest_file_bytes=100_000)
    check_error(done, StoreFullError, "no space left")
    assert not new.exists()


def test_a_store_that_is_being_written_is_not_written_twice(scene: Scene) -> None:
    with DocumentStore.open(scene.store):
        before = scene.fingerprint()
        check_error(run(scene.index), StoreLockedError, "is being written .*: wait until it is done")
        assert scene.fingerprint() == before
