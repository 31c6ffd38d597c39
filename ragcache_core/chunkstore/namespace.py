"""Cache namespaces: a folder for each identity, and the lock of the one engine that uses it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import filelock

from ragcache_core.chunkstore.encryption import Keys, key_id
from ragcache_core.errors import CacheCapacityError, CacheDirectoryError, CacheLockedError, CacheVersionError
from ragcache_core.private_files import FILE_MODE, make_private, make_private_folder, open_private

FORMAT = 4  # 4: chunks may be compressed
_CONVERTED_FORMATS = (2, 3)  # the index of a 2 gets columns when it is opened
Identity = Mapping[str, str | int]

IDENTITY_NAME = "identity.json"
MARKER_NAME = "ragcache-namespace"
LOCK_NAME = "writer.lock"
DATA_NAME = "chunks.data"
HEADERS_NAME = "chunks.headers"
_KEY_NAME = "encryption-key"
FILE_NAMES = frozenset(
    (
        *(MARKER_NAME, f"{MARKER_NAME}.new", IDENTITY_NAME, f"{IDENTITY_NAME}.new", _KEY_NAME, f"{_KEY_NAME}.new"),
        *(LOCK_NAME, DATA_NAME, f"{DATA_NAME}.probe", HEADERS_NAME),
        *(f"index.sqlite{suffix}" for suffix in ("", "-wal", "-shm", "-journal")),
    )
)
"""Every file of a namespace: no other file in its folder is ever deleted."""
_DIRECTORY_LOCK_NAME = "directory.lock"
_TIMEOUT_S = 60.0
_ENTRY_TIMEOUT_S = 1.0
_KEY_NAME_TEXT = re.compile(r"[0-9a-f]{8}")
FOLDER_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Namespace:
    """A folder of chunks. ``identity`` is empty and ``format`` 0 when what the folder says of itself is unreadable."""

    path: Path
    identity: Identity
    format: int
    num_bytes: int
    used_s: float = 0.0
    """When a file in it was changed last, in seconds since 1970; an engine's start changes one."""


def list_namespaces(directory: str | os.PathLike[str]) -> list[Namespace]:
    """Return the namespaces in a cache directory, the largest first. Reads no chunk, and needs no lock.

    Other folders and symbolic links are left out, whatever their names.
    """
    try:
        folders = [
            path for path in Path(directory).iterdir() if FOLDER_NAME.fullmatch(path.name) and is_namespace(path)
        ]
    except OSError:
        return []
    found = []
    for folder in folders:
        try:
            version, identity = _read_identity(folder)
            num_bytes, used_s = usage_of(folder)
        except OSError:  # another user's, or just deleted
            version, identity, num_bytes, used_s = 0, {}, 0, time.time()
        found.append(Namespace(folder, identity, version, num_bytes, used_s))
    return sorted(found, key=lambda namespace: (-namespace.num_bytes, namespace.path))


def is_namespace(folder: Path) -> bool:
    """Return whether a folder is a namespace: it has the marker, or is one from before there were markers.

    Those have a readable identity, whose digest is the folder's name, and no file that is not a namespace's.
    """
    try:
        return stat.S_ISDIR(folder.lstat().st_mode) and (has_marker(folder) or _is_older(folder))
    except (OSError, ValueError):
        return False


def has_marker(folder: Path) -> bool:
    """Return whether a folder has the marker of a namespace, made for this folder.

    Raises:
        OSError: it cannot be read.
    """
    try:
        descriptor = os.open(folder / MARKER_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return os.read(descriptor, 128) == _marker_of(folder)
    finally:
        os.close(descriptor)


def mark(folder: Path) -> None:
    """Write the marker, without which no engine deletes the folder, and leave the folder's age as it is.

    Raises:
        OSError
    """
    status = folder.stat()
    temporary = folder / f"{MARKER_NAME}.new"
    with open(temporary, "wb", opener=open_private) as file:
        file.write(_marker_of(folder))
    times = (status.st_atime_ns, status.st_mtime_ns)
    os.utime(temporary, ns=times)
    temporary.replace(folder / MARKER_NAME)
    os.utime(folder, ns=times)


def _marker_of(folder: Path) -> bytes:
    return f"RAGCache made the folder {folder.name}, and may delete its files.\n".encode()


def _is_older(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        if not all(entry.name in FILE_NAMES and entry.is_file(follow_symlinks=False) for entry in entries):
            return False
    version, identity = _read_identity(folder)
    return 0 < version <= FORMAT and namespace_path(folder.parent, identity) == folder


def namespace_path(directory: Path, identity: Identity) -> Path:
    """Return the folder of an identity.

    Raises:
        ValueError: a name that is not a text, or a value that is neither text nor whole number.
    """
    odd = {name: v for name, v in identity.items() if not isinstance(name, str) or not isinstance(v, (str, int))}
    if odd:
        raise ValueError(f"identity has {odd!r:.120}: use texts and whole numbers")
    canonical = json.dumps(dict(identity), sort_keys=True, separators=(",", ":"))
    return directory / hashlib.sha256(canonical.encode("ascii")).hexdigest()[:32]


@contextmanager
def changing(directory: Path) -> Iterator[None]:
    """Hold a cache directory's lock while namespaces are entered or deleted: none is deleted while it is entered.

    Raises:
        CacheDirectoryError, CacheLockedError
    """
    try:
        make_private_folder(directory)
        lock = filelock.FileLock(
            directory / _DIRECTORY_LOCK_NAME, timeout=_TIMEOUT_S, mode=FILE_MODE, fallback_to_soft=False
        )
        lock.acquire()
        make_private(directory / _DIRECTORY_LOCK_NAME)  # by any process
    except filelock.Timeout:
        raise CacheLockedError(
            f"another engine has been busy with {directory}, the cache directory, for {_TIMEOUT_S:g} s: start again "
            "when it is done, or give each engine a directory of its own"
        ) from None
    except (OSError, NotImplementedError) as error:  # the latter where the file system has no locks
        raise directory_error(directory, error) from error
    try:
        yield
    finally:
        lock.release()


def enter(folder: Path) -> filelock.BaseFileLock:
    """Make a namespace's folder where it is missing, mark it, and return its lock, held. The system frees it on death.

    Raises:
        CacheDirectoryError, CacheLockedError
    """
    directory = folder.parent
    try:
        make_private_folder(folder)
        if not has_marker(folder):
            with suppress(OSError):  # a full disk: the identity still shows that the folder is ours
                mark(folder)
        # No lock by the file's existence where the system has none: it would outlive the engine.
        # The timeout outlasts a dry run of `gc`, which holds the lock for a moment.
        lock = filelock.FileLock(
            folder / LOCK_NAME, timeout=_ENTRY_TIMEOUT_S, mode=FILE_MODE, thread_local=False, fallback_to_soft=False
        )
        lock.acquire()
        os.utime(folder / LOCK_NAME)
        make_private(folder)  # a version before made it as the umask said
        for path in folder.iterdir():
            if path.name in FILE_NAMES:
                make_private(path)
    except filelock.Timeout:
        raise CacheLockedError(
            f"{directory} is the cache directory of another engine that is running with the same model: stop that one, "
            "or give each engine a directory of its own"
        ) from None
    except (OSError, NotImplementedError) as error:  # the latter where the file system has no locks
        raise directory_error(directory, error) from error
    return lock


def is_identity(folder: Path, identity: Identity) -> bool:
    """Return whether the folder says of itself that it holds chunks of that identity, in a format that is read here.

    Raises:
        CacheVersionError: a newer RAGCache wrote it. OSError: it cannot be read at the moment.
    """
    version, found = _read_identity(folder)
    if version > FORMAT:
        raise CacheVersionError(
            f"{folder} was written in cache format {version}, this RAGCache reads up to {FORMAT}: "
            "upgrade RAGCache, use another cache directory, or delete the folder"
        )
    return version in (FORMAT, *_CONVERTED_FORMATS) and found == dict(identity)


def has_older_format(folder: Path) -> bool:
    """Return whether a folder is in a format that is converted when it is opened.

    Raises:
        OSError: it cannot be read at the moment.
    """
    return _read_identity(folder)[0] in _CONVERTED_FORMATS


def write_identity(folder: Path, identity: Identity) -> None:
    """Write the identity of a folder's chunks.

    Raises:
        OSError
    """
    temporary = folder / f"{IDENTITY_NAME}.new"
    with open(temporary, "w", encoding="ascii", opener=open_private) as file:
        json.dump({"format": FORMAT, "identity": dict(identity)}, file, indent=1)
    temporary.replace(folder / IDENTITY_NAME)


def check_key_in_use(folder: Path, keys: Keys) -> None:
    """Refuse keys among which that is not with which the folder's chunks were encrypted last.

    Raises:
        CacheDirectoryError: it is not. OSError: it cannot be read.
    """
    path = folder / _KEY_NAME
    names = [key_id(secret).hex() for secret in keys.secrets]
    try:
        last = path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        last = ""
    if _KEY_NAME_TEXT.fullmatch(last) and last not in names:  # nonsense, as after a power cut, says nothing
        raise CacheDirectoryError(
            f"{folder} is encrypted with the key {last:.8}, and the keys that were given are {', '.join(names)}: give "
            "that one as a further line, behind the key to use from now on, or delete the folder, which is a cache"
        )


def note_key_in_use(folder: Path, keys: Keys) -> None:
    """Note which key encrypts the folder's chunks from now on, when nothing else can refuse the folder any more.

    Raises:
        OSError
    """
    path = folder / _KEY_NAME
    temporary = path.with_name(f"{_KEY_NAME}.new")
    with open(temporary, "w", encoding="ascii", opener=open_private) as file:
        file.write(keys.encryption_key_id)
    temporary.replace(path)


def check_capacity(folder: Path, capacity_bytes: object, slot_bytes: int) -> int:
    """Return how many slots the capacity is good for.

    Raises:
        CacheCapacityError: none, or more than the file system has room for.
    """
    if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int):
        raise CacheCapacityError(f"capacity_bytes is {capacity_bytes!r}: give a whole number of bytes")
    if capacity_bytes < slot_bytes:
        raise CacheCapacityError(
            f"capacity_bytes is {capacity_bytes:,} (it comes from disk_bytes), a chunk takes {slot_bytes:,} on disk: "
            "raise it to at least one chunk, or switch the disk tier off"
        )
    try:
        file_system = os.statvfs(folder)
    except OSError as error:
        raise directory_error(folder.parent, error) from error
    free_bytes = file_system.f_bavail * file_system.f_frsize
    used_bytes, _ = usage_of(folder)
    if capacity_bytes > free_bytes + used_bytes:
        others = [n for n in list_namespaces(folder.parent) if n.path != folder and n.num_bytes]
        caches = "".join(f"; {n.path} holds {n.num_bytes:,} of {names_of(n.identity)}" for n in others[:3])
        raise CacheCapacityError(
            f"capacity_bytes is {capacity_bytes:,} (it comes from disk_bytes), the file system of {folder.parent} has "
            f"{free_bytes:,} free and this cache {used_bytes:,}: lower it to their sum, or delete what is not needed"
            f"{caches}"
        )
    return capacity_bytes // slot_bytes


def directory_error(directory: Path, error: Exception) -> CacheDirectoryError:
    """Return what to raise when the directory cannot be used."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return CacheDirectoryError(
        f"the cache directory {directory} cannot be used ({reason}): see to that, or name one that this user may "
        "write to"
    )


def _read_identity(folder: Path) -> tuple[int, dict[str, str | int]]:
    """Return format and identity, 0 and nothing where the folder does not say or says nonsense; or raise OSError."""
    try:
        content = json.loads((folder / IDENTITY_NAME).read_bytes())
        version, identity = content["format"], content["identity"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return 0, {}
    if not isinstance(version, int) or not isinstance(identity, dict):
        return 0, {}
    return version, identity


def usage_of(folder: Path) -> tuple[int, float]:
    """Return the bytes that a folder's files take on disk, and when one was changed last, in seconds since 1970.

    Raises:
        OSError
    """
    num_bytes, used_s = 0, folder.stat().st_mtime
    for path in folder.iterdir():
        try:
            status = path.lstat()
        except FileNotFoundError:  # a log that has just been merged
            continue
        num_bytes, used_s = num_bytes + status.st_blocks * 512, max(used_s, status.st_mtime)
    return num_bytes, used_s


def names_of(identity: Identity) -> str:
    """Return the identity as text, for a message."""
    return ", ".join(f"{name} {value!r:.60}" for name, value in identity.items()) or "unknown origin"
