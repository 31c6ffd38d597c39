"""Files and folders that only their owner can read, for documents and their KV."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ragcache_core.errors import ConfigError

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_ROOT = 0
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Return the descriptor of a private file, created if ``flags`` say so.

    It is an ``opener`` for :func:`open`, too. A symbolic link is not followed.

    Raises:
        OSError
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != FILE_MODE:
        with suppress(OSError):  # another user's, or on a file system without modes
            os.fchmod(descriptor, FILE_MODE)
    return descriptor


def check_not_exposed(path: Path) -> None:
    """Reject a file of secrets that other users can read or write.

    A group may: services share files that way, as Kubernetes does with ``fsGroup``. So may everyone where the file is
    mounted read-only, as secrets are in containers, which have one user.

    Raises:
        ConfigError: with the mode, and what to do. OSError: it cannot be looked at.
    """
    path = path.resolve()
    mode = stat.S_IMODE(path.stat().st_mode)
    is_reachable = all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)
    if mode & (stat.S_IROTH | stat.S_IWOTH) and is_reachable and not os.statvfs(path).f_flag & os.ST_RDONLY:
        raise ConfigError(
            f"{path} has mode {mode:04o}, with which every user of this machine can access the secrets in it: run "
            f"chmod 600 {path}, or mount it read-only"
        )


def make_private(path: Path) -> None:
    """Make an existing file private, if this process may change its mode.

    Raises:
        OSError: it cannot be looked at.
    """
    mode = path.lstat().st_mode
    if not stat.S_ISLNK(mode) and mode & OTHERS:
        with suppress(OSError):
            path.chmod(stat.S_IMODE(mode) & ~OTHERS)


def make_private_folder(folder: Path) -> None:
    """Create a private folder with missing private parents; an existing one stays unchanged.

    Raises:
        OSError: also in a world-writable directory such as /tmp, if another user than root owns the folder.
    """
    make_folders(folder)
    parent = folder.parent.stat().st_mode
    if parent & stat.S_IWOTH and (folder.is_symlink() or folder.lstat().st_uid not in (os.geteuid(), _ROOT)):
        raise PermissionError(f"{folder} is another user's, in a folder that everybody may write to")


def make_once(path: Path, make: Callable[[Path], object]) -> Path:
    """Return a folder that ``make`` creates at the first call, atomically.

    Atomic: a folder that is there is whole; where two make it at once, that of the first stays.

    Raises:
        OSError: it cannot be written.
    """
    if not path.is_dir():
        make_folders(path.parent)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=path.parent) as making:
            made = Path(making) / path.name
            make(made)
            try:
                made.rename(path)
            except OSError:
                if not path.is_dir():  # another process was faster
                    raise
    return path


def make_folders(folder: Path) -> None:
    """Create a folder and missing parents, all private; existing ones stay unchanged.

    Raises:
        OSError
    """
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            try:
                path.mkdir(FOLDER_MODE)
                path.chmod(FOLDER_MODE)
            except FileExistsError:
                if not path.is_dir():  # another process was faster
                    raise


@contextmanager
def replacing(path: Path, *, is_waited_for: bool = True) -> Iterator[IO[bytes]]:
    """Yield a private file that replaces ``path`` at the end of the block, durably.

    What was there before stays until then, and when the block raises. A pipe or a terminal is written to as it is.
    Unless the disk ``is_waited_for``, a file that was just written may be damaged after a loss of power.

    Raises:
        OSError: the disk is full, or the folder is not there or cannot be written to.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(temporary, "wb", opener=open_private) as file:
            yield file
            if is_waited_for:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
