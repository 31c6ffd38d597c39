"""The processes of a session: ended without leaving anything behind, and looked at for signs of work."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

import psutil

_KILL_POLL_S = 0.05


def kill_session(session_id: int, timeout_s: float = 10.0) -> None:
    """Kill every process of a session but the calling one, and wait until they are gone.

    Resource trackers are left to end by themselves: they do so when the others are gone (the calling one too, if it is
    of that session), after they have unlinked their shared memory. Those that are left after ``timeout_s`` are killed.
    """
    deadline_s = time.monotonic() + timeout_s
    while members := _session_members(session_id):
        has_timed_out = time.monotonic() > deadline_s
        doomed = members if has_timed_out else [p for p in members if not _is_resource_tracker(p)]
        if not doomed and os.getsid(0) == session_id:
            return
        _signal_all(doomed, signal.SIGKILL)
        if has_timed_out:
            return
        time.sleep(_KILL_POLL_S)


def terminate_session(session_id: int, grace_s: float) -> None:
    """Ask every process of a session but the calling one to end; return when they have, or after ``grace_s``."""
    deadline_s = time.monotonic() + grace_s
    _signal_all([p for p in _session_members(session_id) if not _is_resource_tracker(p)], signal.SIGTERM)
    while time.monotonic() < deadline_s:
        if all(map(_is_resource_tracker, _session_members(session_id))):
            return
        time.sleep(_KILL_POLL_S)


def num_bytes_moved(session_id: int) -> int:
    """Return how many bytes the living processes of a session have read from and written to storage."""
    num_bytes = 0
    for process in _session_members(session_id):
        with contextlib.suppress(OSError, psutil.Error):
            counters = process.io_counters()
            num_bytes += counters.read_bytes + counters.write_bytes
    return num_bytes


def other_listener(session_id: int, port: int) -> int | None:
    """Return the id of a process that listens on ``port``, while neither this one nor one of the session does.

    None where there is none, or where the owner of a socket is hidden from this user.
    """
    try:
        sockets = psutil.net_connections("tcp")
    except (OSError, psutil.Error):
        return None
    listeners = {
        each.pid for each in sockets if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    }
    own = {os.getpid(), *(process.pid for process in _session_members(session_id))}
    if None in listeners or listeners & own:
        return None
    return min((pid for pid in listeners if pid is not None), default=None)


def _signal_all(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _session_members(session_id: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if (
                process.pid != os.getpid()
                and os.getsid(process.pid) == session_id
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                members.append(process)
    return members


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return True  # it is gone
