"""Forks of a program that has imported what takes long: each prints a line of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any


def print_in_forks(works: Iterable[Callable[[], dict[str, Any]]]) -> None:
    """Print what each of ``works`` returns, one after the other, each in a fork that ends as a program does.

    The first that fails ends the program with its status. No thread may run yet.
    """
    sys.stdout.flush()
    for work in works:
        pid = os.fork()
        if pid == 0:
            print(json.dumps(work()), flush=True)
            sys.exit()
        if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            sys.exit(status)


def printed(output: str) -> list[dict[str, Any]]:
    """Return what a program has printed by :func:`print_in_forks`, among other things."""
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"')]


def in_a_fork(work: Callable[[], object], timeout_s: float = 30.0) -> bool:
    """Return whether ``work`` ends without an error, and in time, in a fork of this process."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = threading.Timer(timeout_s, os.kill, (pid, signal.SIGKILL))
    deadline.start()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        deadline.cancel()
