"""``ragcache batch`` against a scripted server: order, answers in OpenAI's format, and what goes on after an end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import batch_files, cli
from ragcache_core.cli.batch_files import AnswerFile
from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document
from tests.support.scripted_server import ENGINE_DEAD, Refusal, Reply, ScriptedServer, Seen
from tests.support.waiting import until

TEXTS = {
    "mel": "Mel is a river. It ends in Tar.",
    "tar": "Tar is a lake. It is deep and cold.",
    "zor": "Zor is a city. It was founded by Anna.",
}
QUESTIONS = ["Where does Mel end?", "Who founded Zor?", "Is Mel a river?", "How deep is Tar?", "Is Zor a city?"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batch") / "notes.store"
    with DocumentStore.create(path, index="flat") as made:
        made.add(Document(doc_id, text) for doc_id, text in TEXTS.items())
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write(tmp_path / "questions.jsonl", *({"question": text} for text in QUESTIONS))


def write(path: Path, *lines: Mapping[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def arguments(server: ScriptedServer, questions: Path, store: Path | None, output: Path, *options: str) -> list[str]:
    from_store = [] if store is None else ["--store", str(store)]
    return ["batch", str(questions), *from_store, "--output", str(output), "--url", server.url, *options]


def run(server: ScriptedServer, questions: Path, store: Path | None, output: Path, *options: str) -> Result:
    given = arguments(server, questions, store, output, *options)
    return CliRunner(env={"RAGCACHE_API_KEY": "secret"}).invoke(cli, given)


def records(output: Path) -> dict[str, dict[str, Any]]:
    read = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert len({record["custom_id"] for record in read}) == len(read)
    return {record["custom_id"]: record for record in read}


def text_of(record: Mapping[str, Any]) -> str:
    text: str = record["response"]["body"]["choices"][0]["message"]["content"]
    return text


def chat(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": messages, **body},
    }


def asked(requests: Sequence[Seen]) -> list[str]:
    return [request.user_text for request in requests]


def test_questions_about_the_same_documents_follow_each_other_and_answers_name_their_questions(
    server: ScriptedServer, questions: Path, store: Path, tmp_path: Path
) -> None:
    result = run(server, questions, store, tmp_path / "out.jsonl", "--k", "1", "--max-concurrency", "1", "--json")
    assert result.exit_code == 0, result.stderr
    shown = [[document["id"] for document in request.documents] for request in server.requests]
    assert shown == [["mel"], ["mel"], ["tar"], ["zor"], ["zor"]]
    assert (tmp_path / "out.jsonl").stat().st_mode & 0o777 == 0o600
    found = records(tmp_path / "out.jsonl")
    for number, question in enumerate(QUESTIONS, start=1):
        record = found[f"line-{number}"]
        assert (record["error"], record["response"]["status_code"]) == (None, 200)
        assert text_of(record).endswith(question)
        assert TEXTS[record["documents"][0]] in text_of(record)
    summary = json.loads(result.stdout)
    assert (summary["num_requests"], summary["num_answered"], summary["num_failed"]) == (5, 5, 0)
    assert 0 < summary["num_cached_tokens"] < summary["num_prompt_tokens"]


def test_prompts_are_those_of_the_retrieval_order_unless_documents_may_move(
    server: ScriptedServer, questions: Path, store: Path, tmp_path: Path
) -> None:
    assert run(server, questions, store, tmp_path / "exact.jsonl", "--k", "2").exit_code == 0
    exact = records(tmp_path / "exact.jsonl")
    with DocumentStore.open(store, read_only=True) as opened:
        found = [[d.doc_id for d in opened.search(question, 2).documents] for question in QUESTIONS]
    assert [exact[f"line-{number}"]["documents"] for number in range(1, 6)] == found
    server.clear()
    options = ("--k", "2", "--document-order", "cache_aware", "--max-concurrency", "1")
    assert run(server, questions, store, tmp_path / "moved.jsonl", *options).exit_code == 0
    moved = records(tmp_path / "moved.jsonl")
    assert all(sorted(moved[name]["documents"]) == sorted(exact[name]["documents"]) for name in exact)
    assert len({text.split("\n")[0] for text in asked(server.requests)}) <= len({ids[0] for ids in found})


def test_lines_of_openai_batches_are_sent_as_they_are_in_the_order_of_their_prefixes(
    server: ScriptedServer, tmp_path: Path
) -> None:
    lines = [
        chat("c", "river two"),
        chat("b", "city", max_tokens=7, seed=3),
        chat("a", "river one", model=server.model),
    ]
    batch = write(tmp_path / "batch.jsonl", *lines)
    result = run(server, batch, None, tmp_path / "out.jsonl", "--max-concurrency", "1")
    assert result.exit_code == 0, result.stderr
    assert asked(server.requests) == ["city", "river one", "river two"]
    city = server.requests[0].body
    assert city == {"model": server.model, **lines[1]["body"]}
    found = records(tmp_path / "out.jsonl")
    assert {name: text_of(record) for name, record in found.items()} == {
        "a": "You said: river one", "b": "You said: city", "c": "You said: river two",
    }  # fmt: skip


BROKEN = {
    "{": "no JSON",
    "[1]": "no JSON object",
    '{"id": "x"}': 'neither a "question" nor a "body"',
    '{"question": " "}': "give a text",
    '{"question": "Why?", "id": {}}': "the id is {}",
    '{"question": "Why?", "id": "first"}': "is that of line 1",
    '{"question": "\\ud800?"}': "the question",
    '{"custom_id": "u", "url": "/v1/embeddings", "body": {"messages": [{}]}}': "url is '/v1/embeddings'",
    '{"custom_id": "m", "method": "GET", "body": {"messages": [{}]}}': "method is 'GET'",
    '{"custom_id": "e", "body": {"messages": []}}': "messages is []",
    '{"custom_id": "t", "body": {"messages": ["Why?"]}}': "messages is ['Why?']",
    '{"custom_id": "s", "body": {"messages": [{}], "stream": true}}': "stream is set",
    '{"custom_id": "n", "body": {"messages": [{}], "seed": NaN}}': "must be finite",
}


def test_broken_lines_are_reported_and_the_others_answered(server: ScriptedServer, store: Path, tmp_path: Path) -> None:
    good = [{"question": QUESTIONS[0], "id": "first"}, {"question": QUESTIONS[1], "id": 2}]
    batch = write(tmp_path / "questions.jsonl", good[0], *BROKEN, "", good[1])
    batch.write_bytes(batch.read_bytes() + b'{"question": "K\xf6ln?"}\n')
    result = run(server, batch, store, tmp_path / "out.jsonl", "--k", "1")
    assert result.exit_code == 1
    assert f"{len(BROKEN) + 1} lines of {batch} are broken: line 2: no JSON" in result.stderr
    read = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert {record["custom_id"] for record in read if record["error"] is None} == {"first", "2"}
    errors = [record["error"]["message"] for record in read if record["error"] is not None]
    assert len(errors) == len(BROKEN) + 1
    for number, reason in enumerate([*BROKEN.values()], start=2):
        assert any(f"line {number}: " in error and reason in error for error in errors), reason
    assert any("not UTF-8 (byte 0xf6" in error for error in errors)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (Refusal(400, "no"), "400"),
        (Refusal(200, "no"), "incomplete"),
        (Reply("Mel ends in", finish_reason="abort"), "incomplete"),
    ],
    ids=["refused", "no answer", "cut off"],
)
def test_a_request_that_fails_is_repeated_by_the_next_run_and_answers_stay(
    reply: Refusal | Reply, code: str, server: ScriptedServer, questions: Path, store: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    server.script(reply)
    first = run(server, questions, store, output, "--max-concurrency", "1")
    assert first.exit_code == 1
    assert "1 requests failed" in first.stderr
    (failed,) = [record for record in records(output).values() if record["error"] is not None]
    assert failed["error"]["code"] == code
    assert getattr(reply, "message", "Mel ends in") in failed["error"]["message"]
    answered = {name: record for name, record in records(output).items() if record["error"] is None}
    server.clear()
    assert run(server, questions, store, output).exit_code == 0
    assert len(server.requests) == 1
    assert records(output).items() >= answered.items()
    assert len(records(output)) == len(QUESTIONS)


def test_an_engine_that_ends_ends_the_run_which_continues_later(
    server: ScriptedServer, questions: Path, store: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    server.script(Reply("one"), Reply("two"), Refusal(503, "draining"))
    stopped = run(server, questions, store, output, "--max-concurrency", "1")
    assert stopped.exit_code == 1
    assert f"2 of 5 requests are answered in {output}: run it again to continue" in stopped.stderr
    assert "draining" in stopped.stderr
    server.clear()
    again = run(server, questions, store, output)
    assert again.exit_code == 0
    assert "3 answered" in again.stdout
    assert sorted(map(text_of, records(output).values()))[-2:] == ["one", "two"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_by_a_signal_loses_the_running_requests_alone(
    number: signal.Signals, server: ScriptedServer, questions: Path, store: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    server.script(Reply("one"), Reply("two"), Reply("late", wait_s=60))
    command = arguments(server, questions, store, output, "--max-concurrency", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "ragcache_core", *command],
        env={**os.environ, "RAGCACHE_API_KEY": "secret"},
        stderr=subprocess.PIPE,
    )
    try:
        assert until(lambda: len(server.requests) == 3, timeout_s=60)
        assert until(lambda: output.read_bytes().count(b"\n") == 2)
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert (b"2 of 5 requests are answered" in told) is (number != signal.SIGKILL)
    assert until(lambda: server.num_running == 0)
    server.clear()
    assert run(server, questions, store, output).exit_code == 0
    assert len(server.requests) == 3
    assert sorted(map(text_of, records(output).values()))[-2:] == ["one", "two"]


def test_a_record_that_was_cut_off_is_answered_again(
    server: ScriptedServer, questions: Path, store: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    assert run(server, questions, store, output).exit_code == 0
    whole = output.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    ends = [last[:-1], last[: len(last) // 2], last[:3], bytes(len(last))]
    for end in ends:
        output.write_bytes(whole.removesuffix(last) + end)
        server.clear()
        assert run(server, questions, store, output).exit_code == 0
        assert len(server.requests) == 1
        assert len(records(output)) == len(QUESTIONS)
    server.clear()
    assert "5 earlier" in run(server, questions, store, output).stdout
    assert server.requests == []


def test_more_questions_continue_a_finished_batch(
    server: ScriptedServer, questions: Path, store: Path, tmp_path: Path
) -> None:
    output, options = tmp_path / "out.jsonl", ("--document-order", "cache_aware")
    assert run(server, questions, store, output, *options).exit_code == 0
    with questions.open("a") as file:
        file.write('{"question": "Where is the lake Tar?"}\n')
    server.clear()
    assert run(server, questions, store, output, *options).exit_code == 0
    assert len(server.requests) == 1


def test_an_output_of_something_else_is_left_as_it_is(
    server: ScriptedServer, questions: Path, store: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    assert run(server, questions, store, output).exit_code == 0
    answers = output.read_bytes()
    other = write(tmp_path / "other.jsonl", {"question": "Is Tar cold?"})
    changed = write(tmp_path / "changed.jsonl", *({"question": f"{text} Really?"} for text in QUESTIONS))
    server.clear()
    for given, options in ((other, ()), (changed, ()), (questions, ("--max-tokens", "9")), (questions, ("--k", "1"))):
        result = run(server, given, store, output, *options)
        assert result.exit_code == 1
        assert "holds the answer to another request" in result.stderr
        assert "name another --output" in result.stderr
        assert output.read_bytes() == answers
    for content in (b"my notes\n", b"my notes", b'{"id": "x"}\n', b"[]\n" + answers):
        output.write_bytes(content)
        result = run(server, questions, store, output)
        assert (result.exit_code, output.read_bytes()) == (1, content)
        assert "is no output of a batch (line 1)" in result.stderr
    assert server.requests == []


def test_answers_of_another_model_are_not_continued(
    server: ScriptedServer, questions: Path, store: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    server.script(Reply("one"), Refusal(503, "draining"))
    run(server, questions, store, output, "--max-concurrency", "1")
    answers = output.read_bytes()
    server.model = "another-model"
    result = run(server, questions, store, output)
    assert result.exit_code == 1
    assert "holds answers of the model 'scripted-model', the engine serves 'another-model'" in result.stderr
    assert output.read_bytes() == answers


def test_an_output_that_another_run_writes_is_not_touched(
    server: ScriptedServer, questions: Path, store: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with output.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = run(server, questions, store, output)
    assert result.exit_code == 1
    assert "is written by another run" in result.stderr
    assert server.requests == []


def test_a_run_that_opens_the_output_while_another_replaces_it_loses_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, digests = tmp_path / "out.jsonl", {name: batch_files.digest_of(name) for name in ("one", "two", "three")}

    def answered(name: str) -> dict[str, Any]:
        return batch_files.to_record(name, digests[name], {"status_code": 200, "body": {"model": "m"}})

    failed = batch_files.to_record("two", digests["two"], error={"code": "500", "message": ""})
    write(output, answered("one"), failed)  # which a next run takes out of the file
    first, lock = ExitStack(), fcntl.flock

    def lock_late(file: Any, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.enter_context(AnswerFile.open(output, digests)).append(answered("two"))
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with first, pytest.raises(ConfigError, match="is written by another run"):
        AnswerFile.open(output, digests)
    with AnswerFile.open(output, digests) as answers:
        assert set(answers.models) == {"one", "two"}
        answers.append(answered("three"))
    assert set(records(output)) == {"one", "two", "three"}


def test_what_cannot_work_is_known_before_an_engine_is_started(
    questions: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "launch", lambda *_, **__: pytest.fail("an engine was started"))
    chats = write(tmp_path / "chats.jsonl", chat("a", "b"))
    empty = write(tmp_path / "empty.jsonl")
    out, model = ["--output", str(tmp_path / "out.jsonl")], ["--model", "m"]
    at_store = ["--store", str(store)]
    cases: list[tuple[int, str, list[str]]] = [
        (2, "Missing option '--output'", [str(questions), *at_store, *model]),
        (2, "either --model", [str(questions), *at_store, *out]),
        (2, "Give --store", [str(questions), *out, *model]),
        (2, "leave out --store, --k and --document-order", [str(chats), *at_store, *out, *model]),
        (2, "--document-order", [str(questions), *at_store, *out, *model, "--document-order", "cluster"]),
        (2, "names a running one", [str(questions), *at_store, *out, "--url", "http://x", "--tokenizer", "t"]),
        (1, "holds no request", [str(empty), *out, *model]),
        (1, "cannot be read", [str(tmp_path / "none.jsonl"), *out, *model]),
        (1, "use a smaller --k", [str(questions), *at_store, *out, *model, "--k", "9"]),
        (1, "is no directory", [str(questions), *at_store, "--output", str(questions / "x" / "out"), *model]),
        (1, "would overwrite", [str(questions), *at_store, "--output", str(questions), *model]),
        (1, "is not a regular file", [str(questions), *at_store, "--output", "/dev/null", *model]),
    ]
    before = questions.read_bytes()
    for status, reason, given in cases:
        result = CliRunner().invoke(cli, ["batch", *given])
        assert (result.exit_code, reason in result.stderr) == (status, True), (given, result.stderr)
    assert questions.read_bytes() == before


def test_an_engine_that_died_ends_the_run(server: ScriptedServer, questions: Path, store: Path, tmp_path: Path) -> None:
    server.rules = (lambda _: ENGINE_DEAD,)
    result = run(server, questions, store, tmp_path / "out.jsonl")
    assert (result.exit_code, records(tmp_path / "out.jsonl")) == (1, {})
    assert "0 of 5 requests are answered" in result.stderr
    assert "the engine died" in result.stderr


def test_a_disk_that_is_full_ends_the_run_and_the_next_one_continues(
    server: ScriptedServer, questions: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, num_synced, sync = tmp_path / "out.jsonl", 0, os.fsync

    def fill(descriptor: int) -> None:
        nonlocal num_synced
        num_synced += 1
        if num_synced == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill)
        result = run(server, questions, store, output, "--max-concurrency", "1")
    assert result.exit_code == 1
    assert f"{output} cannot be written (No space left on device)" in result.stderr
    assert "run it again to continue" in result.stderr
    server.clear()
    assert run(server, questions, store, output).exit_code == 0
    assert 0 < len(server.requests) <= 3
    assert len(records(output)) == len(QUESTIONS)
