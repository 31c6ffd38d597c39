"""``ragcache forget``, and ``ragcache index --forget``, against a scripted server over real HTTP."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.retrieval import DocumentStore
from ragcache_core.stats import ForgetReceipt
from tests.support.scripted_server import ScriptedServer

RECEIPT = ForgetReceipt(
    forgotten=("a", "b"),
    unknown=("c",),
    num_paths=3,
    num_variants=2,
    num_blocks={"gpu": 4, "host": 4},
    num_bytes={"gpu": 4 << 20, "host": 8 << 20},
    duration_s=0.25,
)


@pytest.fixture
def server(server: ScriptedServer) -> ScriptedServer:
    server.receipt = RECEIPT.to_dict()
    return server


def forget(server: ScriptedServer, *arguments: str, typed: str | None = None) -> Result:
    command = ["forget", *arguments, "--url", server.url, "--api-key", "secret"]
    return CliRunner().invoke(cli, command, input=typed)


def test_the_receipt_is_one_line_and_what_is_unknown_another(server: ScriptedServer) -> None:
    result = forget(server, "a", "b", "c")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "forgotten 2 of 3 documents behind 3 prefixes in 0.25 s: gpu 4 blocks (4.0 MiB), host 4 blocks (8.0 MiB), "
        "2 versions for chunk reuse",
        "unknown to this server: c",
    ]
    assert server.forgotten == [["a", "b", "c"]]


def test_what_is_left_is_an_error_that_reports_what_to_do(server: ScriptedServer) -> None:
    server.receipt = replace(RECEIPT, num_requests=2, problems=("the disk tier is out of service",)).to_dict()
    result = forget(server, "a")
    assert result.exit_code == 1
    assert "forgotten 2 of 3" in result.stdout
    assert "2 running requests" in result.stderr
    assert "the disk tier is out of service" in result.stderr


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    for name in ("mel", "tar", "zor"):
        (folder / f"{name}.txt").write_text(f"The river {name} is long.")
    return folder


def index(notes: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["index", str(notes), "--store", str(notes.parent / "s.store"), *options])


def ids(notes: Path) -> set[str]:
    with DocumentStore.open(notes.parent / "s.store", read_only=True) as store:
        return set(store.ids())


def test_prune_removes_the_documents_of_files_that_are_gone_and_of_no_others(notes: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "sea.txt").write_text("The sea is wide.")
    index(notes)
    assert CliRunner().invoke(cli, ["index", str(elsewhere), "--store", str(tmp_path / "s.store")]).exit_code == 0
    (elsewhere / "sea.txt").unlink()
    (notes / "tar.txt").unlink()
    assert "2 unchanged" in index(notes).stdout
    assert ids(notes) == {"mel.txt", "sea.txt", "tar.txt", "zor.txt"}
    result = index(notes, "--prune")
    assert "1 former document removed, 2 unchanged" in result.stdout
    assert ids(notes) == {"mel.txt", "sea.txt", "zor.txt"}
    assert "former" not in index(notes, "--prune").stdout
    (notes / "zor.txt").write_text("Zor has changed.")
    assert "replace them with --update" in index(notes, "--prune").stderr


def test_what_is_replaced_or_removed_is_forgotten_and_nothing_else(notes: Path, server: ScriptedServer) -> None:
    options = ["--update", "--prune", "--forget", server.url, "--api-key", "secret"]
    assert index(notes, *options).exit_code == 0
    assert server.forgotten == [], "all of it is new"
    (notes / "tar.txt").unlink()
    (notes / "mel.txt").write_text("Mel has changed.")
    result = index(notes, *options)
    assert result.exit_code == 0
    assert server.forgotten == [["mel.txt", "tar.txt"]]
    assert f"{server.url}: forgotten 2 of 3" in result.stdout
    (notes / "mel.txt").write_text("Mel has changed again.")
    told = json.loads(index(notes, *options, "--json").stdout)
    assert told["num_replaced"] == 1
    assert told["forgotten"][server.url]["num_paths"] == 3


@pytest.mark.parametrize("command", [["rm", "mel.txt"], ["prune"]])
def test_what_is_taken_out_of_a_store_is_forgotten_where_that_is_requested(
    notes: Path, server: ScriptedServer, command: list[str]
) -> None:
    index(notes)
    (notes / "mel.txt").unlink()
    options = ["--store", str(notes.parent / "s.store"), "--forget", server.url, "--api-key", "secret", "--json"]
    if command == ["prune"]:
        assert CliRunner().invoke(cli, ["store", *command, *options, "--dry-run"]).exit_code == 0
        assert server.forgotten == []
    result = CliRunner().invoke(cli, ["store", *command, *options])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["forgotten"][server.url]["num_paths"] == 3
    assert server.forgotten == [["mel.txt"]]


def test_a_server_that_does_not_answer_leaves_the_store_as_it_was(notes: Path) -> None:
    index(notes)
    (notes / "mel.txt").write_text("Mel has changed.")
    result = index(notes, "--update", "--forget", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "no engine answers" in result.stderr
    assert "1 document added" not in index(notes).stdout
    assert "replace them" in index(notes).stderr


def test_a_failure_after_the_change_is_reported_with_the_command_to_finish_it(
    notes: Path, server: ScriptedServer
) -> None:
    index(notes)
    (notes / "mel.txt").write_text("Mel has changed.")
    server.receipt = None
    result = index(notes, "--update", "--forget", server.url, "--api-key", "secret")
    assert result.exit_code == 1
    assert f"ragcache forget mel.txt --url {server.url}" in result.stderr
    assert "1 document unchanged" not in result.stderr
    assert "3 unchanged" in index(notes).stdout, "the store has it"


def test_index_registers_the_whole_store_and_reports_what_is_not_registered(
    notes: Path, server: ScriptedServer
) -> None:
    index(notes)
    said = [{"id": "mel.txt", "registered": True}, {"id": "tar.txt", "registered": False, "error": "it is too short"}]
    server.cache_answers["documents/register"] = {"documents": said}
    result = index(notes, "--register", server.url, "--api-key", "secret")
    assert result.exit_code == 0
    assert f"{server.url}: 1 document registered" in result.stdout
    assert "not registered: tar.txt: it is too short" in result.stderr
    told = json.loads(index(notes, "--register", server.url, "--api-key", "secret", "--json").stdout)
    assert told["registered"][server.url]["num_registered"] == 1
