"""The files in /dev/shm in which host tiers lie, and those that dead engines left behind.

An engine that is launched names its region after its owner, the process that launched it, so that an engine which the
owner starts again finds the region, and anybody can tell whether the owner still lives::

    /dev/shm/vllm_offload_ragcache-<owner pid>-<owner's start, clock ticks>-<random>.mmap
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (where vLLM keeps its regions)
_NAME = re.compile(r"vllm_offload_(?P<engine_id>ragcache-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]+)(_dp\d+)?\.[\w.-]+")
logger = logging.getLogger(f"vllm.{__name__}")


def new_engine_id(owner_pid: int) -> str:
    """Return a name for the regions of an engine that the process ``owner_pid`` owns."""
    return f"ragcache-{owner_pid}-{_started(owner_pid) or 0}-{secrets.token_hex(4)}"


def is_lasting(engine_id: str) -> bool:
    """Return whether another start of the same engine will have the same id."""
    return engine_id.startswith("ragcache-")


def keep_region(engine_id: str, folder: Path = SHARED_MEMORY) -> None:
    """Give an engine's region a second name, because vLLM removes the first when its worker ends, however it ends."""
    with suppress(FileExistsError, FileNotFoundError):
        os.link(_region(engine_id, folder), _kept(engine_id, folder))


def return_region(engine_id: str, folder: Path = SHARED_MEMORY) -> None:
    """Give a kept region its first name back, for the engine that is started again."""
    with suppress(FileExistsError, FileNotFoundError):
        os.link(_kept(engine_id, folder), _region(engine_id, folder))


def remove_regions(engine_id: str, folder: Path = SHARED_MEMORY) -> None:
    """Remove what an engine has in shared memory; whoever has it mapped keeps it."""
    for path in folder.glob(f"vllm_offload_{engine_id}*"):
        path.unlink(missing_ok=True)


def sweep_shared_memory(own_engine_id: str = "", folder: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the regions of engines whose owners are dead, and return them."""
    removed = []
    for path in folder.glob("vllm_offload_ragcache-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or match["engine_id"] == own_engine_id or _started(int(match["pid"])) == int(match["started"]):
            continue
        try:
            path.unlink()
        except OSError as error:  # somebody else's, or swept by somebody else
            logger.debug("%s stays: %s", path, error)
            continue
        logger.warning("Removed %s, which an engine whose owner died left in shared memory", path)
        removed.append(path)
    return removed


def _region(engine_id: str, folder: Path) -> Path:
    return folder / f"vllm_offload_{engine_id}.mmap"


def _kept(engine_id: str, folder: Path) -> Path:
    return folder / f"vllm_offload_{engine_id}.mmap.kept"


def _started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the machine did; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])
