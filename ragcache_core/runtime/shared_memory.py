"""The files in /dev/shm in which host tiers lie, and those that dead engines left behind.

An engine that is launched names its region after its owner, the process that launched it, so that an engine which the
owner starts again finds the region, and anybody can tell whether the owner still lives::

    /dev/shm/vllm_offload_ragcache-<pid namespace>-<owner pid>-<owner's start, clock ticks>-<random>.mmap

What lies where in it stands in a folder beside it, with the suffix ``.journal``.

Process ids say nothing in another namespace, and containers may share /dev/shm: only regions of one's own are swept.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from ragcache_core.private_files import OTHERS

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (where vLLM keeps its regions)
_ENGINE_ID = r"ragcache-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]+"
_JOURNAL = ".journal"
_NAME = re.compile(rf"vllm_offload_(?P<engine_id>{_ENGINE_ID})(_dp\d+)?\.[\w.-]+")
logger = logging.getLogger(f"vllm.{__name__}")


def new_engine_id(owner_pid: int) -> str:
    """Return a name for the regions of an engine that the process ``owner_pid`` owns."""
    return f"ragcache-{_namespace()}-{owner_pid}-{_started(owner_pid) or 0}-{secrets.token_hex(4)}"


def is_lasting(engine_id: str) -> bool:
    """Return whether another start of the same engine will have the same id."""
    return re.fullmatch(rf"{_ENGINE_ID}(_dp\d+)?", engine_id) is not None


def journal_folder(engine_id: str, folder: Path = SHARED_MEMORY) -> Path:
    """Return where the journal of an engine's region lies."""
    return folder / f"vllm_offload_{engine_id}{_JOURNAL}"


def keep_region(engine_id: str, file: int | None, folder: Path = SHARED_MEMORY) -> None:
    """Give an engine's region a second name, because vLLM removes the first when its worker ends, however it ends.

    ``file`` is the descriptor under which the caller has mapped it, if it knows.

    Raises:
        RuntimeError: the name is another file's, or nobody's: a worker and a scheduler that go on with one each would
            take one's emptiness for the other's KV. Or somebody else may read or write the region.
    """
    region, kept = folder / f"vllm_offload_{engine_id}.mmap", folder / f"vllm_offload_{engine_id}.mmap.kept"
    try:
        with suppress(FileExistsError):
            os.link(region, kept, follow_symlinks=False)
        found = kept.lstat()
        is_one = region.samefile(kept) and (file is None or os.fstat(file).st_ino == found.st_ino)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & OTHERS
    except OSError as error:
        raise RuntimeError(f"{region} cannot be kept ({error}): start the engine again") from error
    if not is_ours:
        raise RuntimeError(f"{region} is not this user's alone: remove it, and start the engine again")
    if not is_one:
        raise RuntimeError(f"somebody removed {region} while the engine was starting: start it again")


def prepare_regions(engine_id: str, folder: Path = SHARED_MEMORY) -> None:
    """Make the regions of an engine what its next start expects; nobody of it may be running.

    One that was kept gets its first name back; one that was not is the rest of a start that was cut short.
    """
    for region in folder.glob(f"vllm_offload_{engine_id}*.mmap"):
        if not region.with_name(region.name + ".kept").exists():
            region.unlink(missing_ok=True)
    for kept in folder.glob(f"vllm_offload_{engine_id}*.mmap.kept"):
        with suppress(FileExistsError):
            os.link(kept, kept.with_suffix(""))


def remove_regions(engine_id: str, folder: Path = SHARED_MEMORY) -> None:
    """Remove what an engine has in shared memory; whoever has it mapped keeps it."""
    for path in folder.glob(f"vllm_offload_{engine_id}*"):
        with suppress(FileNotFoundError):
            _remove(path)


def sweep_shared_memory(own_engine_id: str = "", folder: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the regions of engines whose owners are dead, and return them."""
    removed = []
    for path in folder.glob("vllm_offload_ragcache-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or match["engine_id"] == own_engine_id or int(match["namespace"]) != _namespace():
            continue
        if _started(int(match["pid"])) == int(match["started"]):
            continue
        try:
            _remove(path)
        except OSError as error:  # somebody else's, or swept by somebody else
            logger.debug("%s stays: %s", path, error)
            continue
        logger.warning("Removed %s, which an engine whose owner died left in shared memory", path)
        removed.append(path)
    return removed


def _remove(path: Path) -> None:
    if path.name.endswith(_JOURNAL):
        shutil.rmtree(path)
    else:
        path.unlink()


def _namespace() -> int:
    """Return the number of the namespace in which this process sees process ids."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the machine did; None if there is none, or its end is due.

    One that ended stays listed until its parent takes note, which in a container may be never.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in {"Z", "X"} else int(fields[18])
