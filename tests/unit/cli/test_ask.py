"""``ragcache ask`` against a scripted server, over real HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document
from tests.support.scripted_server import Reply, ScriptedServer

QUESTION = "Where does Mel end?"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ask") / "notes.store"
    texts = {"zor.md": "Zor is a city.", "mel.txt": "Mel is a river.\nIt ends in Tar.", "tar.md": "Tar is a lake."}
    with DocumentStore.create(path, index="flat") as made:
        made.add(Document(doc_id, text) for doc_id, text in texts.items())
    return path


def ask(server: ScriptedServer, store: Path, *options: str, question: str = QUESTION, **settings: str) -> Result:
    arguments = ["ask", question, "--store", str(store), "--url", server.url, *options]
    return CliRunner(env={"RAGCACHE_API_KEY": "secret"}).invoke(cli, arguments, **settings)  # type: ignore[arg-type]


def test_the_answer_goes_to_standard_output_and_what_it_cost_to_standard_error(
    server: ScriptedServer, store: Path
) -> None:
    server.script(Reply("In Tar."))
    result = ask(server, store)
    assert (result.exit_code, result.stdout) == (0, "In Tar.\n")
    assert "mel.txt" in result.stderr
    assert "0 of them cached; first token after" in result.stderr


def test_the_second_question_from_standard_input_finds_the_documents_cached(
    server: ScriptedServer, store: Path
) -> None:
    result = ask(server, store, "--json", question="-", input=f"{QUESTION}\n\n  {QUESTION}\n")
    first, second = (json.loads(line)["stats"] for line in result.stdout.splitlines())
    assert first["num_cached_tokens"] == 0
    assert second["num_cached_tokens"] > 0


def test_a_store_that_cannot_answer_is_known_before_a_model_is_loaded(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*_: object, **__: object) -> Engine:
        pytest.fail("a model was loaded")

    monkeypatch.setattr(Engine, "launch", launch)
    result = CliRunner().invoke(cli, ["ask", QUESTION, "--store", str(store), "--model", "m", "--k", "4"])
    assert result.exit_code == 1
    assert "4 documents were asked for, the store holds 3: use a smaller --k" in result.stderr


def test_an_engine_that_was_launched_is_closed_whatever_happens(
    server: ScriptedServer, store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings: dict[str, object] = {}
    closed = []

    def launch(model: str, **given: object) -> Engine:
        settings.update(given, model=model)
        engine = Engine.connect(server.url, api_key="secret")
        monkeypatch.setattr(engine, "close", lambda: closed.append(engine))
        monkeypatch.setattr(engine, "stream", interrupted)
        return engine

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "launch", launch)
    (tmp_path / "cache.toml").write_text('[cache]\nhost_bytes = "2GiB"\n')
    arguments = ["ask", QUESTION, "--store", str(store), "--model", "m", "--cache-config", str(tmp_path / "cache.toml")]
    assert CliRunner().invoke(cli, [*arguments, "--", "--max-model-len", "512"]).exit_code == 130
    assert settings["cache"] == CacheConfig(host_bytes="2GiB")
    assert settings["model"] == "m"
    assert settings["extra_args"] == ("--max-model-len", "512")
    assert len(closed) == 1


def test_a_question_that_is_not_utf8_is_reported_by_its_line_after_those_before_it(
    server: ScriptedServer, store: Path
) -> None:
    questions = f"{QUESTION}\n\nWo ist Köln?\n".encode("latin-1")
    result = ask(server, store, question="-", input=questions)  # type: ignore[arg-type]
    assert (result.exit_code, len(server.requests)) == (1, 1)
    assert "error: question in line 3 is not UTF-8 (byte 0xf6 at offset 8): save the file as text" in result.stderr


def test_shown_documents_do_not_steer_the_terminal(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "notes.store"
    with DocumentStore.create(path, index="flat") as made:
        made.add([Document("mel\x1b[2J", "Mel\tis \x1b]0;a river\x07 é.")])
    told = ask(server, path, "--show-documents").stderr
    assert "[mel?[2J] distance " in told
    assert "  Mel     is ?]0;a river? é.\n" in told
    assert "\x1b" not in told
