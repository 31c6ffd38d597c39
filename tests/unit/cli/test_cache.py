"""``ragcache cache``, against a scripted server over real HTTP."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ragcache_core.chunkstore import ChunkStore
from ragcache_core.cli import cli
from ragcache_core.stats import ForgetReceipt
from tests.support.scripted_server import THREE_TIERS, ScriptedServer

DOCUMENT = {
    "id": "terms.md",
    "paths": 2,
    "tokens": 512,
    "variants": 1,
    "bytes": {"gpu": 4 << 20, "host": 8 << 20, "disk": 0},
    "uses": 1200,
    "saved_s": 3.25,
    "age_s": 7200.0,
    "pinned": True,
}
PLACES = [{"behind": ["a.md"], "tokens": 512, "bytes": {"gpu": 0, "host": 8 << 20, "disk": 0}, "uses": 7}]
PINNED = {"changed": ["terms.md"], "unknown": [], "num_pinned": 1, "num_bytes": 1 << 20, "limit_bytes": 4 << 20}


@pytest.fixture
def server(demo_model: str) -> Iterator[ScriptedServer]:
    with ScriptedServer(api_key="secret", root=demo_model, cache=THREE_TIERS) as running:
        running.cache_answers = {
            "cache": {"documents": [DOCUMENT], "total": 7},
            "documents/show": {"documents": [{**DOCUMENT, "places": PLACES}], "total": 1},
            "documents/pin": PINNED,
            "documents/unpin": {**PINNED, "num_pinned": 0},
            "documents/prefetch": {"num_read_tokens": 4096, "num_paths": 2, "num_left_out": 1},
            "cache/purge": ForgetReceipt(forgotten=("terms.md",), num_paths=2).to_dict(),
            "cache/gc": {"folders": [{"path": "/kv/ab", "num_bytes": 2048, "days": 8.5, "of": "x"}], "dry_run": True},
        }
        yield running


def run(server: ScriptedServer, *arguments: str, typed: str | None = None) -> Result:
    command = ["cache", *arguments, "--url", server.url, "--api-key", "secret"]
    return CliRunner().invoke(cli, command, input=typed)


def asked(server: ScriptedServer) -> tuple[str, object]:
    return server.cache_requests[-1]


def test_documents_are_a_table_with_sizes_for_a_person_and_json_has_the_numbers(server: ScriptedServer) -> None:
    result = run(server, "ls", "--sort", "saved", "--limit", "1")
    assert result.exit_code == 0, result.output
    head, row, more = result.stdout.splitlines()
    assert head.split() == ["gpu", "host", "disk", "paths", "variants", "uses", "saved", "age", "document"]
    assert row.split("  ")[-1] == "terms.md (pinned)"
    assert all(word in row for word in ("4.0 MiB", "8.0 MiB", " - ", "1,200", "3.25 s", "2.0 h"))
    assert more.startswith("1 of 7 documents")
    assert asked(server) == ("cache", {"sort": "saved", "limit": "1"})
    told = json.loads(run(server, "ls", "--json").stdout)
    assert (told["total"], told["documents"][0]["bytes"]["host"]) == (7, 8 << 20)
    server.cache_answers["cache"] = {"documents": [], "total": 0}
    assert run(server, "ls").stdout == "no document is cached\n"
    assert run(server, "ls", "--limit", "0").exit_code == run(server, "ls", "--sort", "size").exit_code == 2


UNKNOWN = ["no such\x1b", *(f"x{number}" for number in range(11))]


@pytest.mark.parametrize("action", ["show", "pin", "unpin", "prefetch", "forget"])
def test_unknown_ids_are_reported_once_and_are_no_error(server: ScriptedServer, action: str) -> None:
    for route in ("show", "pin", "unpin", "prefetch"):
        answer = server.cache_answers[f"documents/{route}"]
        assert isinstance(answer, dict)
        server.cache_answers[f"documents/{route}"] = {**answer, "unknown": UNKNOWN}
    server.receipt = ForgetReceipt(forgotten=("terms.md",), unknown=tuple(UNKNOWN)).to_dict()
    result = run(server, action, "terms.md", *UNKNOWN)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].startswith("unknown to this server: no such")
    assert result.stdout.endswith("x8, ...\n")
    assert "\x1b" not in result.stdout
    told = run(server, action, "terms.md", *UNKNOWN, "--json")
    assert (told.exit_code, told.stderr) == (0, "")
    assert json.loads(told.stdout)["unknown"] == UNKNOWN, "one document"


def test_pins_are_reported_with_their_limit_and_what_cannot_be_pinned_is_an_error(server: ScriptedServer) -> None:
    result = run(server, "pin", "terms.md")
    assert result.stdout == "pinned 1 documents; 1 are pinned, with 1.0 MiB of at most 4.0 MiB\n"
    assert run(server, "unpin", "terms.md").stdout.startswith("unpinned 1 documents; 0 are pinned")
    server.cache_answers["documents/pin"] = "the limit is 4.0 MiB"
    result = run(server, "pin", "terms.md")
    assert result.exit_code == 1
    assert "the limit is 4.0 MiB" in result.stderr


def test_nothing_is_purged_without_confirmation(server: ScriptedServer) -> None:
    result = run(server, "purge")
    assert result.exit_code == 2
    assert "--yes" in result.output
    assert not server.cache_requests
    result = run(server, "purge", "--yes", "--wait", "5")
    assert result.exit_code == 0
    assert result.stdout.startswith("forgotten 1 of 1 documents behind 2 prefixes")
    assert asked(server) == ("cache/purge", {"wait_s": 5.0})


def test_forget_is_the_same_command_here(server: ScriptedServer) -> None:
    server.receipt = ForgetReceipt(forgotten=("a",)).to_dict()
    assert run(server, "forget", "a").exit_code == 0
    assert server.forgotten == [["a"]]


def test_folders_are_collected_through_a_server_or_in_a_directory(server: ScriptedServer, tmp_path: Path) -> None:
    result = run(server, "gc", "--unused-days", "8", "--dry-run")
    assert result.stdout.splitlines() == ["   2.0 KiB  8.5 days  /kv/ab", "1 folders with 2.0 KiB would be deleted"]
    assert asked(server) == ("cache/gc", {"unused_days": 8.0, "dry_run": True})
    assert run(server, "gc", "--cache-dir", str(tmp_path)).exit_code == 2
    with ChunkStore(tmp_path, {"model": "m"}, chunk_bytes=4096, capacity_bytes=1 << 20) as store:
        pass
    then = time.time() - 9 * 86_400
    for path in (*store.path.iterdir(), store.path):
        os.utime(path, (then, then))
    for days, is_left in (("10", True), ("8", False)):
        result = CliRunner().invoke(cli, ["cache", "gc", "--cache-dir", str(tmp_path), "--unused-days", days])
        assert result.exit_code == 0
        assert store.path.exists() == is_left
    result = CliRunner().invoke(cli, ["cache", "gc", "--cache-dir", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert "nowhere" in result.stderr
