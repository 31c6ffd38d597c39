"""Distinguish a hung process from a working one: a hung one uses no CPU time.

A step of an engine may take minutes, where a CPU reads a long prompt. So a time limit alone would end engines that
work. A hung process is stopped, or waits for a lock or for a device that does not answer. It uses next to no CPU time:
a worker without work polls for some now and then (measured: 0.2 s in 30 s). A working process on a machine without a
spare core may use as little, but it is ready to run, and does not sleep. A process that polls a device uses CPU time
even if the device hangs: for it there is a limit of the step's time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil

_STOPPED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})
_UNREADABLE = (psutil.Error, OSError)
"""It has ended, or there are no files left to open /proc with: what is not known does not hang."""
_NO_ENGINE = ("APIServer", "DPCoordinator")
"""How titles go on of what works with no step, and is there where there are several API servers or engines."""
_NEXT_TO_NONE = 0.05
"""Of the time between two looks."""


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """The CPU time of a process and its children, and its present state.

    ``is_asleep``: it waits for something but a disk. ``is_worker``: it works in every step.
    """

    title: str
    cpu_s: float
    is_stopped: bool = False
    is_asleep: bool = False
    is_worker: bool = True


def read_use(pid: int) -> dict[int, ProcessUse]:
    """Return the usage of one process; empty if it is gone."""
    try:
        process = psutil.Process(pid)
        return {pid: ProcessUse(_title(process), _cpu_s(process), *_state(process))}
    except _UNREADABLE:
        return {}


def read_engine_use(server_pid: int, prefix: str = "VLLM") -> dict[int, ProcessUse]:
    """Return the usage of the engine processes below a server: engine cores and workers.

    Their titles begin with ``prefix``. Where they have none, or run on other machines, nothing is known.
    """
    found: dict[int, ProcessUse] = {}
    try:
        for child in psutil.Process(server_pid).children():
            _add(child, found, f"{prefix}::")
    except _UNREADABLE:
        pass
    return found


def _add(process: psutil.Process, found: dict[int, ProcessUse], prefix: str) -> float:
    """Add a process and its descendants to ``found``; return the CPU seconds that belong to its parent."""
    try:
        title, own_s, state = _title(process), _cpu_s(process), _state(process)
        if title.startswith(tuple(prefix + name for name in _NO_ENGINE)):
            return 0.0
        before = len(found)
        cpu_s = own_s + sum(_add(child, found, prefix) for child in process.children())
    except _UNREADABLE:  # it has ended
        return 0.0
    if not title.startswith(prefix):
        return cpu_s
    found[process.pid] = ProcessUse(title, cpu_s, *state, is_worker=len(found) == before)
    return 0.0


def _title(process: psutil.Process) -> str:
    return (process.cmdline() or [process.name()])[0]


def _state(process: psutil.Process) -> tuple[bool, bool]:
    status = process.status()
    return status in _STOPPED, status == psutil.STATUS_SLEEPING


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


class HangDetector:
    """Detects hangs of processes that owe an answer; one instance per answer.

    Args:
        limit_s: how long a process may use no CPU time.
        look_s: the time between two looks; a longer gap counts as at most two of them. While this process itself was
            stopped, or waited for a core, others may have been, too.
        step_limit_s: how long the answer may take in any case.
        all_work: whether every worker works in every step; then one idle worker is enough.
    """

    def __init__(
        self, *, limit_s: float, look_s: float, step_limit_s: float | None = None, all_work: bool = True
    ) -> None:
        self._limit_s = limit_s
        self._longest_s = 2 * look_s
        self._step_limit_s = step_limit_s
        self._all_work = all_work
        self._looked_s: float | None = None
        self._waited_s = 0.0
        self._still_s: dict[int, float] = {}
        self._before: Mapping[int, ProcessUse] = {}

    def look(self, now_s: float, uses: Mapping[int, ProcessUse]) -> str | None:
        """Return why they hang; ``None`` while they may be working. Call it every ``look_s`` seconds."""
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, self._longest_s)
        self._looked_s = now_s
        self._waited_s += passed_s
        self._still_s = {
            pid: self._still_s.get(pid, 0.0) + passed_s if self._stands_still(pid, use, passed_s) else 0.0
            for pid, use in uses.items()
        }
        self._before = uses
        still = [pid for pid, seconds in self._still_s.items() if seconds >= self._limit_s]
        workers = [pid for pid, use in uses.items() if use.is_worker]
        idle = [pid for pid in still if uses[pid].is_worker]
        if not self._all_work and len(idle) < len(workers):
            idle = []
        guilty = [pid for pid in still if uses[pid].is_stopped] + idle
        if guilty:
            pid = guilty[0]
            how = "has been stopped" if uses[pid].is_stopped else "has used no processor time to speak of"
            return f"{uses[pid].title} (process {pid}) {how} for {self._still_s[pid]:.0f} s, and owes an answer"
        if self._step_limit_s is not None and self._waited_s >= self._step_limit_s:
            return f"the engine's step has not ended after {self._waited_s:.0f} s"
        return None

    def _stands_still(self, pid: int, use: ProcessUse, passed_s: float) -> bool:
        if (before := self._before.get(pid)) is None:
            return False
        used_s = use.cpu_s - before.cpu_s
        return used_s == 0 or (use.is_asleep and used_s < _NEXT_TO_NONE * passed_s)
