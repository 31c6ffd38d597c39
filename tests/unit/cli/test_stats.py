"""``ragcache stats`` against a scripted server, over real HTTP: once, again and again, and when the server leaves."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.cli.commands.stats import TEXT, reading_view
from ragcache_core.runtime.terminal import plain
from ragcache_core.stats import DocumentUse, EngineStats, TierStats
from tests.support.scripted_server import THREE_TIERS, ScriptedServer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def server(server: ScriptedServer) -> ScriptedServer:
    server.counters["query"], server.counters["hit"] = 8192, 4096
    return server


def stats(server: ScriptedServer, *options: str) -> Result:
    return CliRunner().invoke(cli, ["stats", "--url", server.url, "--api-key", "secret", *options])


def test_the_table_shows_each_tier_with_its_bytes_and_hits(server: ScriptedServer) -> None:
    server.cache = {**THREE_TIERS, "num_requests": 12, "num_reordered_prompts": 3}
    result = stats(server)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert re.fullmatch(rf"server           {server.base_url}, \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d", lines[0])
    assert "TTFT, mean       - of 0 answers" in lines
    assert "found in cache   4,096 of 8,192 tokens (50.0%)" in lines
    assert "policy           mixture" in lines
    assert "ignored          metadata of 1 requests" in lines
    assert "disk blocks      2 corrupt, 3 lost, 4 dropped" in lines
    assert "queue            0 requests served early, a waiting one overtaken 0 times at most" in lines
    assert "document order   changed in 3 of 12 prompts (25.0%)" in lines
    assert "speculation      0 of 0 requests confirmed, 0 of 0 tokens wasted" in lines
    header = next(i for i, line in enumerate(lines) if line.startswith("tier "))
    gpu, host, disk = (re.split(r"\s{2,}", line) for line in lines[header + 1 : header + 4])
    assert gpu == ["gpu", "512.0 MiB of 1.0 GiB", "50%", "512", "9", "4,096", "50.0%"]
    assert host[1:3] == ["6.0 GiB of 8.0 GiB", "75%"]
    assert disk[1:3] == ["0 B of 1.0 TiB", "switched off: see the log"]


def test_json_is_the_whole_reading(server: ScriptedServer) -> None:
    reading = json.loads(stats(server, "--json").stdout)
    assert reading["model"] == server.model
    assert reading["prefix_hit_rate"] == 0.5
    assert reading["hottest_documents"] == THREE_TIERS["hottest_documents"]
    assert [{**t, "hit_rate": r} for t, r in zip(THREE_TIERS["tiers"], (0.5, 0.25, 0.0), strict=True)] == reading[
        "tiers"
    ]


def test_plain_vllm_is_said_to_run_without_ragcache(server: ScriptedServer) -> None:
    server.cache = None
    result = stats(server)
    assert result.exit_code == 0
    assert "plain vLLM: it runs without RAGCache" in result.stdout
    assert "tier" not in result.stdout
    assert json.loads(stats(server, "--json").stdout)["policy"] is None


def test_a_document_cannot_steer_the_terminal_and_fits_the_table() -> None:
    use = DocumentUse("\x1b[31mred\n" + "x" * 99, 1.0, 5, ("gpu",))
    tier = TierStats("gpu", 100, 250, 1, 0, 0, is_enabled=True)
    reading = EngineStats(0, 0, 0.0, 0, 0, 0, 0, 0, policy="lru", tiers=(tier,), hottest_documents=(use,))
    lines = plain(reading_view("model", "http://here", datetime(2026, 1, 1), reading, TEXT)).split("\n")
    assert all(line.isprintable() and len(line) < 100 for line in lines)
    assert any(line.startswith("?[31mred?xxx") for line in lines)
    assert any(" 250% " in line for line in lines)


@dataclass
class Pauses:
    """What happens in the pauses of a watch: a function is called, an exception raised; after the last, Ctrl-C."""

    events: list[Any] = field(default_factory=list)
    slept_s: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return 100.0 + sum(self.slept_s)

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        event = self.events.pop(0) if self.events else KeyboardInterrupt()
        if isinstance(event, BaseException):
            raise event
        event()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    watched = Pauses()
    monkeypatch.setattr("ragcache_core.cli.commands.stats.time", watched)
    return watched


def test_a_watch_prints_an_object_per_reading_until_ctrl_c(server: ScriptedServer, pauses: Pauses) -> None:
    def work() -> None:
        server.counters["prompt"] += 100

    pauses.events = [work, work]
    result = stats(server, "--watch", "--every", "0.5", "--json")
    readings = [json.loads(line) for line in result.stdout.splitlines()]
    assert [reading.get("interval", {}).get("prompt_tokens_per_s") for reading in readings] == [None, 200.0, 200.0]
    assert readings[0]["url"] == server.base_url
    assert datetime.fromisoformat(readings[0]["time"]).tzinfo is not None
    assert [json.loads(line)["num_prompt_tokens"] for line in result.stdout.splitlines()] == [0, 100, 200]
    assert (result.exit_code, result.stderr) == (0, "ragcache: stopping\n")
    assert pauses.slept_s == [0.5, 0.5, 0.5]


def test_a_server_that_goes_away_ends_the_watch_with_a_hint(server: ScriptedServer, pauses: Pauses) -> None:
    pauses.events = [lambda: None, lambda: leave(server)]
    result = stats(server, "--watch", "--json")
    *readings, said = map(json.loads, result.stdout.splitlines())
    assert (result.exit_code, len(readings)) == (1, 2)
    assert said["error"]["type"] == "EngineUnreachableError"
    assert f"the server at {server.base_url} went away after reading 2: start it again with" in result.stderr


def test_a_watch_into_a_file_says_once_that_the_server_is_away_and_goes_on(
    server: ScriptedServer, pauses: Pauses
) -> None:
    def start_again() -> None:
        again.append(ScriptedServer(api_key="secret", root=server.root, cache=THREE_TIERS, port=port).__enter__())

    again: list[ScriptedServer] = []
    port = int(server.url.rpartition(":")[2])
    pauses.events = [lambda: leave(server), lambda: None, start_again]
    try:
        result = stats(server, "--watch")
    finally:
        for each in again:
            leave(each)
    assert result.exit_code == 0
    assert len(re.findall(r"^\d\d:\d\d:\d\d  http", result.stdout, re.MULTILINE)) == 2
    assert result.stderr.count("went away and is waited for") == 1


def leave(server: ScriptedServer) -> None:
    """Close the port and every connection, as a process that ends does."""
    server.__exit__()


def test_a_watch_shows_what_happened_since_the_last_reading_within_64_by_16(
    server: ScriptedServer, pauses: Pauses
) -> None:
    def work() -> None:
        tiers = [dict(tier) for tier in THREE_TIERS["tiers"]]
        tiers[1] |= {"num_hit_tokens": 2048 + 500, "num_evicted_blocks": 4 + 30}
        server.cache = {**THREE_TIERS, "tiers": tiers}
        for name, more in (("prompt", 4000), ("output", 90), ("query", 2000), ("first", 3), ("ttft_ms", 450)):
            server.counters[name] += more

    server.counters |= {"first": 1, "ttft_ms": 50, "prompt": 8192, "output": 10}
    pauses.events = [work]
    first, second = re.split(r"\n\n(?=\d\d:\d\d:\d\d)", stats(server, "--watch", "--every", "10").stdout)
    shown = second.splitlines()[:14]
    assert all(len(line) < 64 for line in shown if not line.startswith("0 running"))
    assert re.fullmatch(rf"\d\d:\d\d:\d\d  {server.base_url}", shown[0])
    assert shown[1].startswith("0 running, 0 waiting, KV 0% full; policy mixture; ")
    table = {cells[0]: cells[1:] for line in shown[2:13] if len(cells := re.split(r"\s{2,}", line.strip())) > 1}
    assert table["answers begun"] == ["0.3/s", "4"]
    assert table["prompt tokens"] == ["400/s", "12,192"]
    assert table["output tokens"] == ["9/s", "100"]
    assert table["TTFT, mean"] == ["150.0 ms", "125.0 ms"]
    assert table["hit in any tier"] == ["25.0%", f"{(4096 + 2548) / 10192:.1%}"]
    assert table["host"] == ["6.0 GiB of 8.0 GiB", "75%", "3", "25.0%", "25.0%"]
    assert table["disk"][1] == "off"
    assert shown[13] == "hottest: mel.txt, zor.md"
    before = {cells[0]: cells[1:] for line in first.splitlines()[2:9] if len(cells := re.split(r"\s{2,}", line)) > 1}
    assert before["answers begun"] == ["-", "1"], "no rate without a reading before"


def test_restarted_counters_are_not_subtracted() -> None:
    tier = TierStats("gpu", 100, 50, 1, 7, 40, is_enabled=True)
    earlier = EngineStats(0, 0, 0.0, 900, 9, 90, 9, 0, num_first_tokens=5, sum_ttft_s=1.0, policy="lru", tiers=(tier,))
    later = replace(earlier, num_prompt_tokens=1000, num_first_tokens=7, sum_ttft_s=2.0)
    assert later.since(earlier).num_prompt_tokens == 100
    assert later.since(earlier).mean_ttft_s == 0.5
    assert later.since(earlier).tiers[0].num_hit_tokens == 0
    restarted = replace(later, num_prompt_tokens=30)
    assert restarted.since(earlier) == restarted
    assert earlier.since(replace(earlier, policy=None, tiers=())) == earlier, "its cache was not known then"


@pytest.mark.parametrize(("rows", "columns"), [(50, 120), (6, 40)])
def test_a_watch_fills_a_terminal_within_its_size_and_leaves_the_last_reading(
    server: ScriptedServer, rows: int, columns: int
) -> None:
    with watching(server, rows, columns) as watch:
        shown = read_until(watch.terminal, lambda text: text.count(HOME) >= 3)
        os.kill(watch.pid, signal.SIGINT)
        shown += read_until(watch.terminal, lambda _: False)
    assert watch.status == 0
    on_screen, after = shown.split(LEAVE_SCREEN)
    drawing = shown_lines(max(on_screen.split(HOME), key=len))  # Ctrl-C may have cut another off
    assert len(drawing) <= rows
    assert all(len(line) <= columns for line in drawing)
    assert re.match(r"\d\d:\d\d:\d\d  http", drawing[0])
    if rows > 6:
        head = next(i for i, line in enumerate(drawing) if line.startswith("tier "))
        assert [line.split()[0] for line in drawing[head + 1 : head + 4]] == ["gpu", "host", "disk"]
        assert any("mel.txt" in line for line in drawing[head + 4 :])
    assert ("\u2501" in on_screen) == (columns == 120), "bars where there is room"
    assert any(re.match(r"\d\d:\d\d:\d\d  http", line) for line in shown_lines(after))
    assert "ragcache: stopping" in after
    assert SHOW_CURSOR in shown.rpartition(HIDE_CURSOR)[2]


def test_a_watch_on_a_terminal_waits_for_a_server_that_is_started_again(server: ScriptedServer) -> None:
    port = int(server.url.rpartition(":")[2])
    with watching(server, 30, 100) as watch:
        read_until(watch.terminal, lambda text: "policy mixture" in text)
        leave(server)
        said = read_until(watch.terminal, lambda text: "went away and is waited for" in text)
        said += read_until(watch.terminal, lambda text: HOME in text)
        assert "policy mixture" in said, "what it last said stays"
        with ScriptedServer(api_key="secret", root=server.root, cache=THREE_TIERS, port=port) as again:
            again.counters["prompt"] = 123
            shown = read_until(watch.terminal, lambda text: "last reading" in text and "123" in text)
            assert "went away" not in shown.rpartition(HOME)[2]
            os.kill(watch.pid, signal.SIGTERM)
            read_until(watch.terminal, lambda _: False)
    assert watch.status == 143


HOME, LEAVE_SCREEN = "\x1b[H", "\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


@dataclass
class Watch:
    """``ragcache stats --watch`` on a terminal of its own, and with which status it ended."""

    pid: int
    terminal: int
    status: int | None = None


@contextmanager
def watching(server: ScriptedServer, rows: int, columns: int, **environment: str) -> Iterator[Watch]:
    pid, terminal = pty.fork()
    if pid == 0:  # the child: its standard streams are the terminal
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.chdir(ROOT)
        arguments = ["stats", "--url", server.url, "--api-key", "secret", "--watch", "--every", "0.1"]
        # Not the size of another terminal, which readline writes into what is inherited.
        inherited = {name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS", "NO_COLOR")}
        wanted = {**inherited, "TERM": "xterm-256color", **environment}
        os.execve(sys.executable, [sys.executable, "-m", "ragcache_core", *arguments], wanted)
    watch = Watch(pid, terminal)
    try:
        yield watch
    finally:
        os.close(terminal)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        watch.status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def shown_lines(text: str) -> list[str]:
    """Return the lines of what a terminal is told, without colours and other orders."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()]


def read_until(terminal: int, is_enough: Callable[[str], bool]) -> str:
    """Return what a terminal shows until that is enough, or its last program has ended."""
    shown, deadline_s = b"", time.monotonic() + 60
    while time.monotonic() < deadline_s and not is_enough(shown.decode(errors="replace")):
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # how Linux says that the terminal is closed
                break
    return shown.decode(errors="replace")
