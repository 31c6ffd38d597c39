"""``ragcache ask`` without a question: on a real terminal, against a scripted server."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.cli.commands.ask import Conversation
from ragcache_core.client import Engine
from ragcache_core.prompt import PromptLayout, RenderedPrompt
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document
from tests.support.scripted_server import Reply, ScriptedServer

MEL, TAR, ZOR = (Document(f"{name}.md", f"{name} is a {kind}.") for name, kind in
                 (("Mel", "river"), ("Tar", "lake"), ("Zor", "city")))  # fmt: skip
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ask") / "notes.store"
    with DocumentStore.create(path, index="flat") as made:
        made.add([MEL, TAR, ZOR])
    return path


class Terminal:
    """``ragcache ask`` as it runs in a terminal: what is typed reaches it, Ctrl-C as a signal."""

    def __init__(self, server: ScriptedServer, store: Path, *options: str, stdout: int | None = None) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "ragcache_core", "ask", "--store", str(store), "--url", server.url, *options]
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs if stdout is None else stdout,
            stderr=theirs,
            env={**os.environ, "RAGCACHE_API_KEY": "secret", "TERM": "dumb"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, *, presses_enter: bool = False) -> str:
        """Return what was shown until ``text`` was, and forget it.

        With Ctrl-C a terminal drops what it has not shown yet, which may be the prompt: ``presses_enter`` for another.
        """
        deadline = time.monotonic() + TIMEOUT_S
        pressed_s = time.monotonic()
        while text not in self.shown:
            if presses_enter and time.monotonic() > pressed_s + 2.0:
                self.type("\n")
                pressed_s = time.monotonic()
            assert time.monotonic() < deadline, f"{text!r} is not in {self.shown!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self.shown += os.read(self._ours, 10_000).decode()
        before, _, self.shown = self.shown.partition(text)
        return before

    def leave(self) -> int:
        self.type("\x04")
        return self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(server: ScriptedServer, store: Path) -> Iterator[Terminal]:
    terminal = Terminal(server, store)
    yield terminal
    terminal.close()


def test_a_conversation_goes_on_where_it_was_and_ends_with_ctrl_d(server: ScriptedServer, terminal: Terminal) -> None:
    server.script(Reply("In Tar."), Reply("A lake."), Reply("A city."))
    terminal.wait_for("Ctrl-D leaves")
    terminal.wait_for("> ")
    terminal.type("Where does Mel end?\n")
    terminal.wait_for("In Tar.")
    terminal.wait_for("0 of them cached")
    terminal.wait_for("> ")
    terminal.type("What is that?\n")
    terminal.wait_for("A lake.")
    terminal.wait_for("> ")
    terminal.type("/new\n")
    terminal.type("What is Zor?\n")
    terminal.wait_for("A city.")
    terminal.wait_for("> ")
    assert terminal.leave() == 0
    first, second, third = (request.body["prompt"] for request in server.requests if "prompt" in request.body)
    assert len(second) > len(first)
    assert second[: len(first) - 20] == first[:-20]  # all but what asks for the answer
    assert len(third) <= len(first) + 5


def test_ctrl_c_stops_an_answer_and_not_the_conversation(server: ScriptedServer, terminal: Terminal) -> None:
    server.script(Reply("one two three four five six " * 200, token_wait_s=0.1), Reply("In Tar."))
    terminal.wait_for("> ")
    terminal.type("Where does Mel end?\n")
    terminal.wait_for("two three")
    terminal.type("\x03")
    terminal.wait_for("ragcache: stopped")
    deadline = time.monotonic() + TIMEOUT_S
    while server.num_running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.num_running == 0
    terminal.wait_for("> ", presses_enter=True)
    terminal.type("half a line\x03")  # gives the line up
    terminal.wait_for("> ", presses_enter=True)
    terminal.type("Where does Mel end?\n")
    terminal.wait_for("In Tar.")
    terminal.wait_for("> ")
    assert terminal.leave() == 0


def piped(server: ScriptedServer, store: Path, *arguments: str, text: str) -> Result:
    command = ["ask", "--store", str(store), "--url", server.url, *arguments]
    return CliRunner(env={"RAGCACHE_API_KEY": "secret"}).invoke(cli, command, input=text)


def test_piped_questions_are_asked_one_by_one_each_by_itself(server: ScriptedServer, store: Path) -> None:
    result = piped(server, store, "--json", text="Where does Mel end?\n\nWhere does Mel end?\n")
    assert [json.loads(line)["question"] for line in result.stdout.splitlines()] == ["Where does Mel end?"] * 2
    first, second = (request.body["prompt"] for request in server.requests if "prompt" in request.body)
    assert first == second


def test_a_document_is_shown_once_and_where_the_tokens_are_is_known(engine: Engine) -> None:
    conversation = Conversation(PromptLayout())
    conversation.add([MEL, TAR], "Where does Mel end?", "In Tar.")
    prompt = conversation.prompt(engine, [TAR, ZOR], "What is Zor?", None)
    assert isinstance(prompt, RenderedPrompt)
    assert [message["role"] for message in prompt.messages] == ["system", "user", "assistant", "user"]
    assert prompt.messages[2]["content"] == "In Tar."
    assert str(prompt.messages).count(TAR.text) == 1
    assert [s.doc_id for s in prompt.segments if s.doc_id] == ["Mel.md", "Tar.md", "Zor.md"]


def test_a_conversation_longer_than_the_window_forgets_its_beginning(engine: Engine) -> None:
    conversation = Conversation(PromptLayout())
    for number in range(40):
        conversation.add([Document(f"{number}.md", "Mel is a river. " * 20)], f"What is {number}?", "A river. " * 10)
    prompt = conversation.prompt(engine, [MEL], "Where does Mel end?", 16)
    assert isinstance(prompt, RenderedPrompt)
    assert len(prompt.token_ids) + 16 <= engine.max_model_len
    assert 0 < len(conversation) < 40
    assert prompt.messages[0]["role"] == "system"
    assert prompt.messages[-2]["content"] == "A river. " * 10
