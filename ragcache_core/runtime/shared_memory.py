"""Files of engines in /dev/shm: host memory, its index, sockets; and remains of crashed engines.

A launched engine names them after its owner, the process that launched it. An engine that the owner restarts finds them
by this name, and every process can tell whether the owner still lives::

    /dev/shm/vllm_offload_<engine id>.mmap      where vLLM looks for host memory: a link to /proc/<owner>/fd/<number>
    /dev/shm/vllm_offload_<engine id>.journal/  the index of it
    /dev/shm/<engine id>/                       vLLM's sockets
    /dev/shm/<engine id>.vllm_dist_...          messages of several workers without a GPU

    engine id   ragcache-<pid namespace>-<owner pid>-<owner's start, clock ticks>-<random>

Host memory itself is a memfd of the owner. It takes no space in /dev/shm, which has 64 MiB in most containers. It
outlives a killed engine, and ends with owner and engine, however they end.

Process ids are meaningless in another namespace, and containers may share /dev/shm: only files of the own namespace are
swept.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import shutil
import weakref
from contextlib import suppress
from pathlib import Path

from ragcache_core.errors import EngineStartError
from ragcache_core.log import logger_of
from ragcache_core.private_files import FILE_MODE, FOLDER_MODE

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (where vLLM looks for its regions)
_ENGINE_ID = r"ragcache-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]+"
_JOURNAL = ".journal"
_NAME = re.compile(rf"(vllm_offload_)?(?P<engine_id>{_ENGINE_ID})(_dp\d+)?(?P<suffix>\..+)?")
logger = logger_of(__name__)


def new_engine_id(owner_pid: int) -> str:
    """Return a name for the shared-memory files of an engine owned by the process ``owner_pid``."""
    return f"ragcache-{_namespace()}-{owner_pid}-{_started(owner_pid) or 0}-{secrets.token_hex(4)}"


class EngineFiles:
    """The shared-memory files of a launched engine, held by the launching process until :meth:`remove`.

    Attributes:
        sockets: a folder of the engine's own.
    """

    def __init__(self, engine_id: str, *, host_bytes: int, num_replicas: int = 1, folder: Path = SHARED_MEMORY) -> None:
        """Hold host memory for each data-parallel replica of an engine; pages are allocated when written."""
        self.engine_id = engine_id
        self.sockets = folder / engine_id
        self._folder = folder
        self._memory: dict[Path, int] = {}
        _held.add(self)
        for suffix in [""] if num_replicas == 1 else [f"_dp{i}" for i in range(num_replicas)]:
            if host_bytes:
                file = self._memory[_region(engine_id + suffix, folder)] = os.memfd_create(engine_id + suffix)
                os.fchmod(file, FILE_MODE)
                os.ftruncate(file, host_bytes)

    def prepare(self) -> None:
        """Reset the files for the next start, with no process of the engine running.

        Raises:
            EngineStartError: the folder cannot be written to.
        """
        try:
            shutil.rmtree(self.sockets, ignore_errors=True)
            self.sockets.mkdir(FOLDER_MODE)
            for region in self._folder.glob(f"vllm_offload_{self.engine_id}*.mmap*"):
                region.unlink()
            for region, file in self._memory.items():
                region.symlink_to(f"/proc/{os.getpid()}/fd/{file}")
        except OSError as error:
            raise EngineStartError(
                f"{self._folder}, through which an engine's processes speak, cannot be written to ({error}): mount a "
                "tmpfs there, 64 MiB are enough"
            ) from error

    def remove(self) -> None:
        """Remove all files; processes that have mapped them keep the memory. Idempotent."""
        remove_files(self.engine_id, self._folder)
        self._close()

    def _close(self) -> None:
        while self._memory:
            os.close(self._memory.popitem()[1])


_held: weakref.WeakSet[EngineFiles] = weakref.WeakSet()


def outlives_engine(engine_id: str, folder: Path = SHARED_MEMORY) -> bool:
    """Return whether an engine's host memory survives its restart."""
    return _region(engine_id, folder).is_symlink()


def journal_folder(engine_id: str, folder: Path = SHARED_MEMORY) -> Path:
    """Return the folder of an engine's host memory journal."""
    return folder / f"vllm_offload_{engine_id}{_JOURNAL}"


def region_place(engine_id: str, folder: Path = SHARED_MEMORY) -> tuple[str, int, int] | None:
    """Return the identity of an engine's host memory, which differs between hosts and containers.

    None where there is none.
    """
    try:
        found = _region(engine_id, folder).stat()
        host = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return host, found.st_dev, found.st_ino


def empty_region(engine_id: str, folder: Path = SHARED_MEMORY) -> None:
    """Free the memory of an unused host tier."""
    with (
        suppress(OSError, ValueError),
        _region(engine_id, folder).open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as rows,
    ):
        rows.madvise(mmap.MADV_REMOVE)


def remove_files(engine_id: str, folder: Path = SHARED_MEMORY) -> None:
    """Remove an engine's files in shared memory."""
    for path in folder.glob(f"*{engine_id}*"):
        with suppress(OSError):  # still in use, or removed elsewhere; what stays is swept later
            _remove(path)


def sweep_shared_memory(own_engine_id: str = "", folder: Path = SHARED_MEMORY) -> list[Path]:
    """Remove shared-memory files of engines whose owners are dead, and return their paths."""
    removed = []
    for path in (*folder.glob("vllm_offload_ragcache-*"), *folder.glob("ragcache-*")):
        match = _NAME.fullmatch(path.name)
        if match is None or match["engine_id"] == own_engine_id or int(match["namespace"]) != _namespace():
            continue
        if _started(int(match["pid"])) == int(match["started"]):
            continue
        try:
            _remove(path)
        except OSError as error:  # another user's, or swept by another process
            logger.debug("%s stays: %s", path, error)
            continue
        logger.warning("RC-MEMORY-REMOVED: removed %s, which an engine whose owner died left in shared memory", path)
        removed.append(path)
    return removed


def _region(engine_id: str, folder: Path) -> Path:
    """Return the path of an engine's host memory in vLLM."""
    return folder / f"vllm_offload_{engine_id}.mmap"


def _remove(path: Path) -> None:
    match = _NAME.fullmatch(path.name)
    if match is not None and match["suffix"] in (None, _JOURNAL):
        shutil.rmtree(path)
    else:
        path.unlink()


def _namespace() -> int:
    """Return the pid namespace of this process."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _started(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot; ``None`` if it does not exist or is ending.

    An ended process stays listed until its parent reaps it, which in a container may be never.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in {"Z", "X"} else int(fields[18])


def _close_all() -> None:
    """Close all held memory in a fork, which must not keep its parent's memory."""
    for files in _held:
        files._close()


os.register_at_fork(after_in_child=_close_all)
