"""``ragcache index`` and ``ragcache ask`` over a real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.client import Engine

TOPICS = ("zor", "mel", "tar", "oru", "vel", "kin")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notes")
    for topic in TOPICS:
        (folder / f"{topic}.md").write_text(f"# {topic}\n\n" + f"the house of {topic} is near the river. " * 20)
    path = folder / "notes.store"
    result = CliRunner().invoke(cli, ["index", str(folder), "--store", str(path)])
    assert result.exit_code == 0, result.stderr
    return path


def ask(engine: Engine, store: Path, *options: str, question: str, stdin: str | None = None) -> Result:
    arguments = ["ask", question, "--store", str(store), "--url", engine.base_url, "--max-tokens", "8", *options]
    result = CliRunner(env={"RAGCACHE_API_KEY": engine.api_key}).invoke(cli, arguments, input=stdin)
    assert result.exit_code == 0, result.stderr
    return result


def test_a_second_question_about_the_same_document_is_answered_from_the_cache(engine: Engine, store: Path) -> None:
    questions = "where is the house of oru\nwho lives in the house of oru\n"
    lines = ask(engine, store, "--json", "--k", "1", question="-", stdin=questions).stdout.splitlines()
    first, second = (json.loads(line) for line in lines)
    assert first["documents"][0]["id"] == second["documents"][0]["id"] == "oru.md"
    (document,) = second["stats"]["documents"]
    assert second["stats"]["num_cached_tokens"] > first["stats"]["num_cached_tokens"]
    assert document["num_cached_tokens"] >= document["num_tokens"] - 32  # whole blocks of 32 tokens
    assert 0 < second["stats"]["ttft_s"] <= second["stats"]["total_s"]


def test_the_answer_is_the_one_of_the_same_prompt_through_the_engine(engine: Engine, store: Path) -> None:
    from ragcache_core.prompt import PromptLayout
    from ragcache_core.retrieval import DocumentStore

    question = "where is the house of vel"
    with DocumentStore.open(store, read_only=True) as opened:
        documents = opened.search(question, 2).documents
    prompt = PromptLayout().render(engine.tokenizer, documents, question)
    expected = engine.generate(prompt, max_tokens=8).text
    assert ask(engine, store, question=question).stdout == expected + "\n"
    assert ask(engine, store, "--stream", question=question).stdout == expected + "\n"


def test_a_conversation_finds_all_that_was_said_before_in_the_cache(engine: Engine, store: Path) -> None:
    from ragcache_core.cli.commands.ask import Conversation
    from ragcache_core.prompt import PromptLayout, RenderedPrompt
    from ragcache_core.retrieval import DocumentStore

    conversation = Conversation(PromptLayout())
    with DocumentStore.open(store, read_only=True) as opened:
        documents = opened.get(["tar.md", "zor.md"])
    first = conversation.prompt(engine, documents[:1], "where is the house of tar", 8)
    conversation.add(documents[:1], "where is the house of tar", engine.generate(first, max_tokens=8).text)
    second = conversation.prompt(engine, documents, "and the house of zor", 8)
    assert isinstance(first, RenderedPrompt)
    assert isinstance(second, RenderedPrompt)
    assert [s.doc_id for s in second.segments if s.doc_id] == ["tar.md", "zor.md"]
    stats = engine.generate(second, max_tokens=8).stats
    assert stats.num_cached_tokens >= len(first.token_ids) - 32 - 8  # whole blocks of 32; what begins the answer


def test_a_chunk_has_no_more_tokens_than_it_was_split_to_as_the_engine_counts_them(
    engine: Engine, demo_model: str, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "zor.md").write_text("".join(f"Room {i} of Zor is {i * 7} feet long. " for i in range(200)))
    options = ["--store", str(tmp_path / "store"), "--tokenizer", demo_model, "--chunk-tokens", "64"]
    assert CliRunner().invoke(cli, ["index", str(tmp_path / "notes"), *options]).exit_code == 0
    (line,) = ask(engine, tmp_path / "store", "--json", "--k", "3", question="How long is room 20?").stdout.splitlines()
    lengths = [document["num_tokens"] for document in json.loads(line)["stats"]["documents"]]
    num_between = 2  # what the layout puts between two documents counts as a part of one
    assert len(lengths) == 3
    assert 48 < max(lengths) <= 64 + num_between, lengths


def test_stats_count_the_questions(engine: Engine, store: Path) -> None:
    arguments = ["stats", "--url", engine.base_url, "--api-key", engine.api_key, "--json"]
    before = json.loads(CliRunner().invoke(cli, arguments).stdout)
    stats = json.loads(ask(engine, store, "--json", question="where is the house of kin").stdout)["stats"]
    after = json.loads(CliRunner().invoke(cli, arguments).stdout)
    assert after["num_prompt_tokens"] - before["num_prompt_tokens"] == stats["num_prompt_tokens"]
    assert after["num_first_tokens"] - before["num_first_tokens"] == 1
    assert after["sum_ttft_s"] > before["sum_ttft_s"]
    assert after["num_output_tokens"] - before["num_output_tokens"] == stats["num_output_tokens"]
