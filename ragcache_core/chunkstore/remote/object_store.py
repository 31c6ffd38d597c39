"""Objects in an S3 bucket, in a folder, or in another store of obstore (Rust's object_store)."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import NotFoundError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, S3Store

from ragcache_core.chunkstore.remote import StoredObject
from ragcache_core.errors import ConfigError
from ragcache_core.private_files import make_private_folder

_NUM_AT_ONCE = 8
_STAGED = re.compile(r"#\d+$")
"""The end of the names that obstore gives files until they are whole."""
_STAGED_S = 3600.0

_FOLDER_HINT = "see that the folder is mounted and writable, and that its disk has space, or set shared_read_only"


def _folder(path: Path, *, is_read_only: bool) -> LocalStore:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"the shared folder {path} is a file: name a folder")
    if is_read_only and not path.exists():
        raise ConfigError(f"the shared folder {path} does not exist, and is only read: name one that has KV")
    try:
        make_private_folder(path)
        next(path.iterdir(), None)
        return LocalStore(path)
    except OSError as error:
        raise ConfigError(f"the shared folder {path} cannot be used ({error.strerror}): {_FOLDER_HINT}") from error


def _remove_staged(folder: Path, must_end: threading.Event) -> None:
    """Remove what killed processes left half-written: no list shows it, so no limit and no deletion reaches it."""
    before_s = time.time() - _STAGED_S
    with suppress(OSError):  # the rest stays until another start
        for namespace in folder.iterdir():
            with os.scandir(namespace) as entries:
                for entry in entries:
                    if must_end.is_set():
                        return
                    with suppress(FileNotFoundError):  # it has become an object meanwhile
                        if _STAGED.search(entry.name) and entry.stat(follow_symlinks=False).st_mtime < before_s:
                            Path(entry.path).unlink()


def _has_plain_endpoint() -> bool:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    return endpoint.startswith("http://")


class ObjectStore:
    """See :class:`~ragcache_core.chunkstore.remote.RemoteStore`.

    Args:
        store: a store of obstore.
        hint: the hint of errors when the store does not answer.
        folder: of a store in a folder. What killed processes left there half-written is removed, when it is an hour old
            and the first object is put.
    """

    def __init__(self, store: Any, *, hint: str = "see that the store answers", folder: Path | None = None) -> None:
        """Start separate threads for queries, reads and writes."""
        self._store = store
        self._hint = hint
        self._to_tidy = folder
        self._is_closed = threading.Event()
        self._lookup_threads, self._reading, self._writing = (
            ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix=f"ragcache-s3-{what}")
            for what in ("ask", "read", "write")
        )

    @classmethod
    def at(cls, url: str, *, timeout_s: float, is_read_only: bool = False) -> ObjectStore:
        """Return the store at a URL.

        Credentials, region and endpoint of a bucket are those of the environment (``AWS_ACCESS_KEY_ID``,
        ``AWS_ENDPOINT_URL``, ...). A missing folder is created for this user alone.

        Args:
            url: ``s3://bucket/prefix``, or ``file:///folder``.
            timeout_s: for each answer of a bucket.
            is_read_only: whether a missing folder is an error instead.

        Raises:
            ConfigError: the folder cannot be created or read.
        """
        if urlsplit(url).scheme == "file":
            folder = Path(unquote(urlsplit(url).path))
            return cls(_folder(folder, is_read_only=is_read_only), hint=_FOLDER_HINT, folder=folder)
        limit = timedelta(seconds=timeout_s)
        store = S3Store.from_url(
            url,
            client_options={"timeout": limit, "connect_timeout": limit, "allow_http": _has_plain_endpoint()},
            retry_config={"max_retries": 0, "retry_timeout": limit},
        )
        hint = (
            "see that AWS_ENDPOINT_URL is right, the bucket is there, and each request is answered within "
            f"{timeout_s:g} s"
        )
        return cls(store, hint=hint)

    def ping(self) -> None:
        self._has("ragcache")

    def check_list(self) -> None:
        next(iter(obstore.list(self._store, "ragcache/none/")), None)

    def exists(self, names: Sequence[str], *, is_chain: bool) -> list[bool]:
        """Return which objects exist; in a chain, all before the last existing one count."""
        if not is_chain:
            return list(self._lookup_threads.map(self._has, names))
        low, high = 0, len(names)  # those before low are there, high is not
        while low < high:
            step = -(-(high - low) // _NUM_AT_ONCE)
            probes = [*range(low, high - 1, step), high - 1]
            there = list(self._lookup_threads.map(self._has, [names[probe] for probe in probes]))
            num_there = there.index(False) if False in there else len(there)
            low = probes[num_there - 1] + 1 if num_there else low
            high = probes[num_there] if num_there < len(probes) else high
        return [True] * low + [False] * (len(names) - low)

    def get(self, names: Sequence[str]) -> list[bytes | memoryview | None]:
        return list(self._reading.map(self._get, names))

    def put(self, objects: Sequence[tuple[str, bytes]]) -> None:
        list(self._writing.map(self._put, objects))
        if self._to_tidy is not None:
            self._writing.submit(_remove_staged, self._to_tidy / "ragcache", self._is_closed)
            self._to_tidy = None

    def delete(self, names: Sequence[str]) -> None:
        list(self._writing.map(self._delete, names))

    def list_objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        for page in obstore.list(self._store, prefix):
            yield [StoredObject(each["path"], each["size"], each["last_modified"].timestamp()) for each in page]

    def cure_of(self, error: Exception) -> str:
        if self.is_refused(error):
            return "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION to those that may use the bucket"
        return self._hint

    def is_refused(self, error: Exception) -> bool:
        return isinstance(error, PermissionDeniedError | UnauthenticatedError)

    def close(self) -> None:
        self._is_closed.set()
        for threads in (self._lookup_threads, self._reading, self._writing):
            threads.shutdown(wait=False, cancel_futures=True)

    def _has(self, name: str) -> bool:
        try:
            obstore.head(self._store, name)
        except (NotFoundError, FileNotFoundError):
            return False
        return True

    def _get(self, name: str) -> bytes | memoryview | None:
        try:
            return memoryview(obstore.get(self._store, name).bytes())
        except (NotFoundError, FileNotFoundError):
            return None

    def _put(self, named: tuple[str, bytes]) -> None:
        obstore.put(self._store, *named, use_multipart=False)

    def _delete(self, name: str) -> None:
        with suppress(NotFoundError, FileNotFoundError):
            obstore.delete(self._store, name)
