"""``ragcache serve-store`` as a process, and ``ragcache ask`` of a store that it serves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from ragcache_core.cli import cli
from ragcache_core.errors import StoreAuthError
from ragcache_core.retrieval import DocumentStore, RemoteStore
from ragcache_core.types import Document
from tests.support.scripted_server import Reply, ScriptedServer

QUESTION = "Where does Mel end?"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "notes.store"
    texts = {"zor.md": "Zor is a city.", "mel.txt": "Mel is a river.\nIt ends in Tar.", "tar.md": "Tar is a lake."}
    with DocumentStore.create(path, index="flat") as made:
        made.add(Document(doc_id, text) for doc_id, text in texts.items())
    return path


def start(store: Path, *options: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    main = ["-c", "from ragcache_core.cli import main; main()"]
    command = [sys.executable, *main, "serve-store", str(store), "--port", "0", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


@pytest.fixture(scope="module")
def served(store: Path) -> Iterator[str]:
    process, said = start(store, "--api-key", "of-the-store", "--max-k", "2")
    yield said["url"]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "ragcache: stopping\n")


def test_it_says_where_it_serves_what_and_answers_with_the_key_alone(served: str, store: Path) -> None:
    with pytest.raises(StoreAuthError):
        RemoteStore(served)
    with RemoteStore(served, api_key="of-the-store") as remote, DocumentStore.open(store, read_only=True) as local:
        assert remote.search(QUESTION, 2) == local.search(QUESTION, 2)
    assert httpx.get(f"{served}/health").json()["num_documents"] == 3


def test_sigterm_ends_it_with_status_0(store: Path) -> None:
    process, said = start(store)
    assert said["num_documents"] == 3
    assert said["pid"] == process.pid
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "ragcache: stopping: running searches have 20 s\n")


def test_questions_are_asked_of_a_served_store(served: str, demo_model: str) -> None:
    with ScriptedServer(api_key="secret", root=demo_model) as server:
        server.script(Reply("In Tar."))
        runner = CliRunner(env={"RAGCACHE_API_KEY": "secret", "RAGCACHE_STORE_API_KEY": "of-the-store"})
        result = runner.invoke(cli, ["ask", QUESTION, "--store", served, "--url", server.url])
        assert (result.exit_code, result.stdout) == (0, "In Tar.\n")
        assert "mel.txt" in result.stderr
        documents = server.requests[-1].body["kv_transfer_params"]["ragcache"]["documents"]
        assert documents[0]["id"] == "mel.txt"


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--store-api-key", "wrong"], 1, "refused the API key: pass the service's with --store-api-key"),
        (["--store-api-key", "of-the-store", "--k", "3"], 1, "k is 3, this service finds at most 2: use a smaller --k"),
        (["--store-api-key", "of-the-store", "--embedder", "builtin"], 2, "leave --embedder out"),
    ],
)
def test_what_a_service_refuses_is_said_as_it_is_typed(
    served: str, options: list[str], status: int, message: str
) -> None:
    result = CliRunner().invoke(cli, ["ask", QUESTION, "--store", served, "--url", "http://127.0.0.1:1", *options])
    assert result.exit_code == status
    assert message in result.stderr


def test_a_key_for_a_store_in_a_folder_is_refused(store: Path) -> None:
    arguments = ["ask", QUESTION, "--store", str(store), "--url", "http://127.0.0.1:1", "--store-api-key", "x"]
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code, "--store-api-key is for a service" in result.stderr) == (2, True)


def test_a_store_that_is_not_there_and_a_port_that_is_taken_are_said(store: Path, served: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["serve-store", str(tmp_path / "none")])
    assert (result.exit_code, "holds no document store" in result.stderr) == (1, True)
    result = CliRunner().invoke(cli, ["serve-store", str(store), "--port", served.rpartition(":")[2]])
    assert result.exit_code == 1
    assert "choose another --port, or --port 0 for a free one" in result.stderr
