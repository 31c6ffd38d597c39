"""Bars and tables: what a terminal is shown, and that a file gets plain text or nothing."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys

import pytest

from ragcache_core.runtime import terminal
from ragcache_core.runtime.terminal import Bar

COUNTING = """
import sys
from ragcache_core.runtime.terminal import Bar
with Bar("reading", 3, "files") as bar:
    for i in range(3):
        bar.advance()
        print("to standard output", i, flush=True)
        print("beside it", i, file=sys.stderr, flush=True)
    bar.show("read [all]")
"""


def test_nothing_is_drawn_where_standard_error_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with Bar("reading", 2, "files") as bar:
        bar.advance()
        bar.move_to(2, 4)
    assert capfd.readouterr() == ("", "")
    assert (bar.num_done, bar.total) == (2, 4)


def test_a_log_has_a_line_a_minute(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now_s)
    with Bar("reading", 2_000, "files") as bar, Bar("hidden", 2_000, "files", enabled=False) as hidden:
        for num_done in range(1, 1_001):
            now_s = num_done / 4
            bar.move_to(num_done)
            hidden.move_to(num_done)
    lines = [f"reading: {240 * minute} of 2,000 files after {minute} min" for minute in range(1, 5)]
    assert capfd.readouterr().err.splitlines() == lines


def test_a_bar_counts_on_a_terminal_and_leaves_nothing_but_what_was_written() -> None:
    master, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", COUNTING], stdout=subprocess.PIPE, stderr=terminal, env=environment, check=True
    )
    os.close(terminal)
    shown = b""
    while select.select([master], [], [], 0.2)[0]:
        try:
            shown += os.read(master, 65536)
        except OSError:  # all was read, and the terminal is closed
            break
    os.close(master)
    text = shown.decode()
    assert done.stdout.decode() == "".join(f"to standard output {i}\n" for i in range(3)), "a pipe gets what is its own"
    assert "read [all]" in text, "what is said is no markup"
    assert "3/3" in text
    assert text.rstrip().endswith("\x1b[2K"), "the bar is taken away"
    assert [i for i in range(3) if f"beside it {i}" in text] == [0, 1, 2]
