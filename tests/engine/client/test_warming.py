"""What a forecast has warmed is found by the first request that asks for it; the engine counts it for no client."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from click.testing import CliRunner

from ragcache_core import Document, PromptLayout
from ragcache_core.cli import cli
from ragcache_core.client import Engine
from ragcache_core.client.warming import WarmingReceipt
from ragcache_core.retrieval import DocumentStore

LAYOUT = PromptLayout()


def documents(mark: str) -> list[Document]:
    """Three documents that no other test has put in the cache."""
    names = ("Zorval", "Tenrik", "Quimby")
    return [
        Document(f"{name}-{mark}", f"{name} is a company. {name} was founded by Anna {mark}. {name} makes clocks. " * 4)
        for name in names
    ]


def test_the_first_request_finds_what_was_warmed_and_a_second_warming_finds_all_of_it(engine: Engine) -> None:
    zorval, tenrik, quimby = documents("Warmed")
    shown = engine.bind_prompt(LAYOUT, is_default=False)
    before = engine.stats()
    paths: list[tuple[Sequence[Document], int]] = [([zorval], 40), ([zorval, tenrik], 25), ([quimby], 5)]
    told: list[WarmingReceipt] = []
    receipt = engine.warm_paths(paths, prompt=shown, on_path=told.append)
    assert (receipt.num_warmed, receipt.num_cached, receipt.num_left_out) == (3, 0, 0)
    assert [each.num_done for each in told] == [1, 2, 3]
    assert engine.stats().num_requests == before.num_requests, "no client has sent a request"
    assert not {use.doc_id for use in engine.stats().hottest_documents} & {zorval.doc_id, tenrik.doc_id}
    again = engine.warm_paths(paths, prompt=shown)
    assert (again.num_warmed, again.num_cached) == (0, 3)
    prompt = LAYOUT.render(engine.tokenizer, [zorval, tenrik], "Who founded Tenrik?")
    asked = engine.generate(prompt, max_tokens=8)
    assert [document.num_cached_tokens > 0.7 * document.num_tokens for document in asked.stats.documents] == [
        True,
        True,
    ]
    other = LAYOUT.render(engine.tokenizer, [tenrik, zorval], "Who founded Tenrik?")
    assert engine.generate(other, max_tokens=8).stats.num_cached_tokens < asked.stats.num_cached_tokens


def test_a_store_is_warmed_from_the_command_line_by_the_questions_of_a_log(engine: Engine, tmp_path: Path) -> None:
    with DocumentStore.create(tmp_path / "s.store") as store:
        store.add(documents("Asked"))
    (tmp_path / "log.txt").write_text("Who founded Zorval?\nWhat does Zorval make?\nWho founded Quimby?\n")
    command = ["warm", "--store", str(tmp_path / "s.store"), "--url", engine.base_url, "--api-key", engine.api_key]
    command += ["--from-log", str(tmp_path / "log.txt"), "-k", "1", "--json", "--wait-ready"]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {tuple(path["doc_ids"]): path["expected_uses"] for path in told["paths"]} == {
        ("Zorval-Asked",): 667,
        ("Quimby-Asked",): 333,
    }
    assert told["receipt"]["num_warmed"] == 2
    again = json.loads(CliRunner().invoke(cli, command).stdout)
    assert (again["receipt"]["num_warmed"], again["receipt"]["num_cached"]) == (0, 2)
