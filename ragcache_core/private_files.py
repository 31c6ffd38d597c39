"""Files and folders that their owner alone may read, whatever the umask: they hold documents, or KV made of them."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_ROOT = 0
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Return the descriptor of a file that is its owner's alone from now on, made where ``flags`` say so.

    It is an ``opener`` for :func:`open`, too. A symbolic link is not followed.

    Raises:
        OSError
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != FILE_MODE:
        with suppress(OSError):  # another user's, or on a file system without modes
            os.fchmod(descriptor, FILE_MODE)
    return descriptor


def make_private(path: Path) -> None:
    """Let nobody but its owner read a file that is there already; or leave it, where that is not ours to say.

    Raises:
        OSError: it cannot be looked at.
    """
    mode = path.lstat().st_mode
    if not stat.S_ISLNK(mode) and mode & OTHERS:
        with suppress(OSError):
            path.chmod(stat.S_IMODE(mode) & ~OTHERS)


def make_private_folder(folder: Path) -> None:
    """Make a folder that is its owner's alone, and the parents that are missing; one that is there is left as it is.

    Raises:
        OSError: also where anybody may make it, as in /tmp, and somebody else has who is not root.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(FOLDER_MODE)
        folder.chmod(FOLDER_MODE)
    except FileExistsError:
        if not folder.is_dir():
            raise
    parent = folder.parent.stat().st_mode
    if parent & stat.S_IWOTH and (folder.is_symlink() or folder.lstat().st_uid not in (os.geteuid(), _ROOT)):
        raise PermissionError(f"{folder} is another user's, in a folder that everybody may write to")
