"""Memory of the machine or its container limits, and whether there is a GPU.

And how often Python looks for objects that are not needed, and through which.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_DEVICES = Path("/dev")
_NEW_OBJECTS = 10_000


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that processes like this one may use: in total, and now."""

    total: int
    available: int
    is_limited: bool = False
    """Whether the limit is that of a control group rather than the machine's memory."""

    @property
    def whose(self) -> str:
        """The owner of the limit, to begin a clause with."""
        return "this container may use" if self.is_limited else "this machine has"


def read_memory() -> Memory:
    """Return the smallest of the machine's memory and this process's cgroup limits.

    Files that the kernel remembers do not count as taken, for it gives them up first.
    """
    import psutil

    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit, used in _limits():
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return Memory(total, available, is_limited=total < machine.total)


def has_gpu() -> bool:
    """Return whether this process may see a GPU; ``True`` if unknown."""
    patterns = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd", "dri/renderD*")
    return any(next(_DEVICES.glob(pattern), None) for pattern in patterns)


def num_nvidia_gpus() -> int:
    """Return the number of NVIDIA GPUs of this process, which CUDA counts from 0."""
    return sum(1 for _ in _DEVICES.glob("nvidia[0-9]*"))


def collect_rarely() -> None:
    """Let Python's garbage collector wait for 10,000 new objects, unless set higher or off.

    A knowledge tree makes about ten objects that stay for a document of 8 blocks, and hardly a cycle. With Python's 700
    one request in a hundred waits for a collection that finds nothing.
    """
    num_new, *others = gc.get_threshold()
    if 0 < num_new < _NEW_OBJECTS:
        gc.set_threshold(_NEW_OBJECTS, *others)


def freeze_survivors() -> None:
    """Collect garbage, and exclude the remaining objects from further collections, if there are many.

    Many are those of 11 collections of the youngest. Python goes through everything again when it has grown by a
    quarter: 140 ms for a knowledge tree of 150,000 nodes, where this takes 10 ms for 11,000 new ones. A cycle that is
    alive now is not found when it ends, so this is for a process whose objects have none: an engine core's own.
    """
    if gc.get_count()[2]:
        gc.collect()
        gc.freeze()


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes of each cgroup of this process with a limit; version 1 and 2."""
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, names = _CGROUPS, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            root, names = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        own = root / path.lstrip("/")  # in a container that may be a path of the host's: then only the root is here
        for group in (own, *own.parents):
            if found := _limit_of(group, *names):
                yield found
            if group == root:
                break


def _limit_of(group: Path, limit: str, used: str, prefix: str) -> tuple[int, int] | None:
    try:
        num_limit, num_used = int((group / limit).read_text()), int((group / used).read_text())
    except (OSError, ValueError):  # no such group here, or "max"
        return None
    try:
        stats = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
        num_files = sum(int(stats.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    except (OSError, ValueError):
        num_files = 0
    return num_limit, max(num_used - num_files, 0)
