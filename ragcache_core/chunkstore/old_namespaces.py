"""Caches of identities that are no more: other weights, another vLLM. Nobody would find them, and they take space."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path

import filelock

from ragcache_core.chunkstore.namespace import (
    FORMAT,
    LOCK_NAME,
    Identity,
    Namespace,
    changing,
    directory_error,
    list_namespaces,
    names_of,
    usage_of,
)
from ragcache_core.private_files import FILE_MODE
from ragcache_core.stats import CollectedFolder, CollectedFolders

_log = logging.getLogger(__name__)

_KEPT_DAYS = 30
_DAY_S = 86_400.0


def delete_old(folder: Path, identity: Identity, *, wanted_bytes: int, kin: Collection[str]) -> None:
    """Delete caches beside ``folder``, which is ours, that no engine has open; the directory's lock must be held.

    Those that were not used for 30 days go, whosesoever they are. Of the others, as many go as it takes for ours to
    have ``wanted_bytes`` of the file system, the longest unused first, and of these only such as agree with
    ``identity`` in all entries that ``kin`` names. What a newer RAGCache wrote stays.
    """
    now_s = time.time()
    others = sorted(
        (n for n in list_namespaces(folder.parent) if n.path != folder and n.format <= FORMAT), key=lambda n: n.used_s
    )
    for old in others:
        if (days := (now_s - old.used_s) / _DAY_S) > _KEPT_DAYS:
            _delete(old, f"it was not used for {days:.0f} days")
        elif _is_kin(old.identity, identity, kin) and _room_for(folder) < wanted_bytes:
            _delete(old, f"its room is needed for capacity_bytes, {wanted_bytes:,}, of {folder}")


def delete_unused(directory: str | os.PathLike[str], *, unused_s: float, is_trial: bool = False) -> CollectedFolders:
    """Delete the caches in a directory, and in its engines' and workers' own, that no engine has open.

    Only those that were not used for ``unused_s`` seconds; a clock that was set back makes none old. With ``is_trial``
    they are only named. What a newer RAGCache wrote stays.

    Raises:
        CacheDirectoryError, CacheLockedError: the directory is not there, or cannot be locked.
    """
    if not Path(directory).is_dir():
        raise directory_error(Path(directory), FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    now_s = time.time()
    found: list[CollectedFolder] = []
    for place in (Path(directory), *sorted(Path(directory).glob("worker-*/")), *Path(directory).glob("**/engine-*/")):
        with changing(place):
            for old in list_namespaces(place):
                days = max(now_s - old.used_s, 0.0) / _DAY_S
                is_old = old.format <= FORMAT and days * _DAY_S >= unused_s
                if is_old and _delete(old, f"it was not used for {days:.1f} days", is_trial=is_trial):
                    whose = names_of(old.identity)
                    found.append(CollectedFolder(str(old.path), old.num_bytes, days, whose))
    return CollectedFolders(tuple(found), is_trial)


def delete_plain(folder: Path) -> None:
    """Delete a cache from before it was encrypted, unless an engine has it open; the directory's lock must be held."""
    for plain in list_namespaces(folder.parent):
        if plain.path == folder:
            _delete(plain, "it is not encrypted, and this engine's is")


def _is_kin(old: Identity, identity: Identity, kin: Collection[str]) -> bool:
    return bool(kin) and all(old.get(name) == identity.get(name) for name in kin)


def _room_for(folder: Path) -> int:
    file_system = os.statvfs(folder)
    num_bytes, _ = usage_of(folder)
    return file_system.f_bavail * file_system.f_frsize + num_bytes


def _delete(old: Namespace, why: str, *, is_trial: bool = False) -> bool:
    """Delete a namespace, unless an engine has it open, or it cannot be deleted; what is left of it is damaged.

    Return whether it was deleted, or would be.
    """
    lock = filelock.FileLock(
        old.path / LOCK_NAME, timeout=0, mode=FILE_MODE, thread_local=False, fallback_to_soft=False
    )
    try:
        with lock:
            if is_trial:
                return True
            shutil.rmtree(old.path)
    except filelock.Timeout:
        return False
    except (OSError, NotImplementedError) as error:
        _log.warning("%s, an old cache, cannot be deleted: %s", old.path, error)
        return False
    _log.warning("%s is deleted, %s: it held %d bytes of %s", old.path, why, old.num_bytes, names_of(old.identity))
    return True
