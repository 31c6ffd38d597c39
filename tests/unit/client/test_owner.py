"""A server and what it has started end with the process that owns it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.support.waiting import until

OWNER = """
import os, signal, sys, time
from pathlib import Path
from ragcache_core.client.launch import process

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, and who is started inherits that
process.SERVER_MODULE = "tests.support.idle_server"
server = process.ServerProcess([], env=os.environ, log_path=Path(sys.argv[1]))
while "serving" not in server.log_text():
    time.sleep(0.05)
print(server.pid, flush=True)
if sys.argv[2] == "an error":
    raise RuntimeError("the owner fails")
time.sleep(600)
"""


def session_members(session_id: int) -> list[int]:
    """Return the processes of a session that still live."""
    alive = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process.pid)
        except (OSError, psutil.Error):
            continue
    return alive


@pytest.mark.slow
@pytest.mark.parametrize("end", ["SIGTERM", "SIGHUP", "SIGKILL", "an error"])
def test_a_server_ends_with_its_owner(end: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "log"), end]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        session = int(owner.stdout.readline())
        assert len(session_members(session)) == 2
        if end != "an error":
            owner.send_signal(signal.Signals[end])
        owner.wait(timeout=60)
    assert until(lambda: not session_members(session), 30), session_members(session)
