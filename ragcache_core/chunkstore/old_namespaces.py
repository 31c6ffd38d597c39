"""Namespaces that no engine reads any more: of other weights, another vLLM, or from before encryption.

Only namespaces are deleted (:func:`~ragcache_core.chunkstore.namespace.is_namespace`), only their own files, and no
symbolic link is followed. The marker is the last file to go, so the next call ends a deletion that a crash has
interrupted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from ragcache_core.chunkstore.namespace import (
    DATA_NAME,
    FILE_NAMES,
    FOLDER_NAME,
    FORMAT,
    HEADERS_NAME,
    IDENTITY_NAME,
    LOCK_NAME,
    MARKER_NAME,
    Identity,
    Namespace,
    changing,
    directory_error,
    has_marker,
    is_namespace,
    list_namespaces,
    mark,
    names_of,
    usage_of,
)
from ragcache_core.errors import CacheDirectoryError
from ragcache_core.log import logger_of
from ragcache_core.stats import CollectedFolder, CollectedFolders

logger = logger_of(__name__)

_KEPT_DAYS = 30
_DAY_S = 86_400.0
_SUBDIRECTORY_NAME = re.compile(r"(worker|engine)-\d+")
_DELETED_LAST = (IDENTITY_NAME, LOCK_NAME, MARKER_NAME)
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def delete_old(folder: Path, identity: Identity, *, wanted_bytes: int, match_keys: Collection[str]) -> None:
    """Delete namespaces beside ``folder``, which is ours, that no engine has open; the directory's lock must be held.

    All namespaces that were not used for 30 days are deleted. Of the others, the longest unused are deleted until ours
    can have ``wanted_bytes`` of the file system, and only those that agree with ``identity`` in all entries that
    ``match_keys`` names. A namespace of a newer RAGCache stays. Namespaces from before there were markers get one.
    """
    now_s = time.time()
    others = sorted(
        (n for n in list_namespaces(folder.parent) if n.path != folder and n.format <= FORMAT), key=lambda n: n.used_s
    )
    for old in others:
        why = None
        if (days := (now_s - old.used_s) / _DAY_S) > _KEPT_DAYS:
            why = f"it was not used for {days:.0f} days"
        elif _is_same_model(old.identity, identity, match_keys) and _room_for(folder) < wanted_bytes:
            why = f"its space is needed for capacity_bytes, {wanted_bytes:,}, of {folder}"
        if why is not None and _try_to_delete(old, why):
            continue
        with suppress(OSError):  # a full disk, or another user's
            if not has_marker(old.path):
                mark(old.path)


def delete_unused(directory: str | os.PathLike[str], *, unused_s: float, dry_run: bool = False) -> CollectedFolders:
    """Delete the namespaces in a directory, and in its engines' and workers' own, that no engine has open.

    Only those that were not used for ``unused_s`` seconds; a clock that was set back makes none old. With ``dry_run``
    they are only named, and nothing on the disk changes. A namespace of a newer RAGCache stays.

    Raises:
        CacheDirectoryError, CacheLockedError: the directory is not there, or cannot be locked.
    """
    if not Path(directory).is_dir():
        raise directory_error(Path(directory), FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    now_s = time.time()

    def unused_days(namespace: Namespace) -> float | None:
        days = max(now_s - namespace.used_s, 0.0) / _DAY_S
        return days if namespace.format <= FORMAT and days * _DAY_S >= unused_s else None

    found: list[CollectedFolder] = []
    for place in _places(Path(directory)):
        if all(unused_days(namespace) is None for namespace in list_namespaces(place)):
            continue  # nor is a lock made there
        with nullcontext() if dry_run else changing(place):
            for old in list_namespaces(place):
                days = unused_days(old)
                if days is not None and _try_to_delete(old, f"it was not used for {days:.1f} days", dry_run=dry_run):
                    found.append(CollectedFolder(str(old.path), old.num_bytes, days, names_of(old.identity)))
    return CollectedFolders(tuple(found), dry_run)


def delete_plaintext(folder: Path) -> None:
    """Delete what a directory, with its engines' and workers' own, holds unencrypted; its lock must be held.

    ``folder`` is the caller's namespace, which is encrypted. What another engine has open, what a newer RAGCache wrote,
    and what cannot be told from another program's folder stays, with a warning that names it.

    Raises:
        CacheDirectoryError: one cannot be deleted. CacheLockedError: a worker's directory is locked.
    """
    directory = folder.parent
    for place in _places(directory):
        plain = [path for path in _folders_of(place) if path != folder and _is_plaintext(path)]
        if not plain:
            continue
        with nullcontext() if place == directory else changing(place):
            namespaces = {namespace.path: namespace for namespace in list_namespaces(place)}
            for path in plain:
                if (why := _why_plaintext_stays(path, namespaces.get(path))) is not None:
                    logger.warning(
                        "RC-PLAINTEXT-KEPT: %s has KV that is not encrypted, and is not deleted: %s", path, why
                    )


def _why_plaintext_stays(path: Path, namespace: Namespace | None) -> str | None:
    """Delete a namespace that is not encrypted and return None, or return why it stays and what to do.

    Raises:
        CacheDirectoryError: it cannot be deleted.
    """
    if namespace is None:
        return "it has no marker of RAGCache, and files that are not RAGCache's: if you do not need it, delete it"
    if namespace.format > FORMAT:
        return "a newer RAGCache wrote it: start that one with a key, or delete the folder"
    try:
        is_deleted = _delete(namespace, "it is not encrypted, and this engine's is")
    except OSError as error:
        raise CacheDirectoryError(
            f"{path} holds KV from before encryption was switched on, and cannot be deleted ({error.strerror or error})"
            ": delete it, or name another cache directory"
        ) from error
    return None if is_deleted else "an engine has it open: start that one with a key, or in a directory of its own"


def _places(directory: Path, depth: int = 2) -> Iterator[Path]:
    """Yield a cache directory, and those in it that engines and workers have for themselves; links are not followed."""
    yield directory
    for path in _folders_of(directory, _SUBDIRECTORY_NAME) if depth else ():
        yield from _places(path, depth - 1)


def _folders_of(directory: Path, name: re.Pattern[str] = FOLDER_NAME) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            found = [each.name for each in entries if name.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
    except OSError:  # another user's, or just deleted
        return []
    return [directory / each for each in sorted(found)]


def _is_plaintext(folder: Path) -> bool:
    """Return whether a folder holds chunks that are not encrypted; one that is just being made holds none."""
    try:
        return (folder / DATA_NAME).lstat().st_size > 0 and not os.path.lexists(folder / HEADERS_NAME)
    except OSError:  # there are none, or they are another user's
        return False


def _is_same_model(old: Identity, identity: Identity, match_keys: Collection[str]) -> bool:
    return bool(match_keys) and all(old.get(name) == identity.get(name) for name in match_keys)


def _room_for(folder: Path) -> int:
    file_system = os.statvfs(folder)
    num_bytes, _ = usage_of(folder)
    return file_system.f_bavail * file_system.f_frsize + num_bytes


def _try_to_delete(old: Namespace, why: str, *, dry_run: bool = False) -> bool:
    """Return whether a namespace was deleted, or would be; why it cannot be is logged."""
    try:
        return _delete(old, why, dry_run=dry_run)
    except OSError as error:
        logger.warning("RC-OLD-CACHE-KEPT: %s, an old cache, cannot be deleted: %s", old.path, error)
        return False


def _delete(old: Namespace, why: str, *, dry_run: bool = False) -> bool:
    """Delete a namespace's files, and its folder if nothing else is in it, unless an engine has it open.

    Return whether it was deleted, or would be. What a failure leaves is still a namespace.

    Raises:
        OSError: it cannot be deleted.
    """
    descriptor = os.open(old.path, _OPEN_FOLDER)
    try:
        with _held(descriptor, dry_run=dry_run) as is_unused:
            if not is_unused or dry_run:
                return is_unused
            if not is_namespace(old.path):  # another program has changed it since it was listed
                return False
            with os.scandir(descriptor) as entries:
                names = [entry.name for entry in entries]
            ours = [name for name in names if name in FILE_NAMES and _is_file(name, descriptor)]
            for name in sorted(ours, key=lambda name: _DELETED_LAST.index(name) if name in _DELETED_LAST else -1):
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    if foreign := sorted(set(names) - set(ours)):
        logger.warning(
            "RC-FOREIGN-FILES: %s has files that are not RAGCache's, which stay: %s", old.path, ", ".join(foreign[:3])
        )
    else:
        old.path.rmdir()
    held = names_of(old.identity)
    logger.warning(
        "RC-OLD-CACHE-DELETED: RAGCache's files in %s are deleted, %s: %d bytes of %s",
        old.path,
        why,
        old.num_bytes,
        held,
    )
    return True


@contextmanager
def _held(folder: int, *, dry_run: bool) -> Iterator[bool]:
    """Hold the lock of the namespace that is open as ``folder``; yield whether no engine has it.

    A trial holds it for reading: that writes nothing, not even the time of a file.
    """
    access, kind = (os.O_RDONLY, fcntl.LOCK_SH) if dry_run else (os.O_RDWR, fcntl.LOCK_EX)
    try:
        lock = os.open(LOCK_NAME, access | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:  # an engine that enters holds the directory's lock until it has made this one
        yield True
        return
    try:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            is_unused = True
        except BlockingIOError:
            is_unused = False
        yield is_unused
    finally:
        os.close(lock)


def _is_file(name: str, folder: int) -> bool:
    return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
