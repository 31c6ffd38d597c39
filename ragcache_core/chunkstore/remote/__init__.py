"""Shared stores of bytes by name: a Redis or Valkey server, an S3 bucket, a folder.

They keep and evict what they are given; what its bytes mean, and whether they are right, is their user's matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol
from urllib.parse import urlsplit

from ragcache_core.config import REDIS_SCHEMES, check_shared_url
from ragcache_core.errors import ConfigError

TIMEOUT_S = 1.0
"""How long one answer of a store is waited for."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A stored object: its size, and its last use as the store reports it.

    Of two objects the one with the smaller ``used_s`` was used earlier. In a bucket or a folder it is the time of the
    write.
    """

    name: str
    num_bytes: int
    used_s: float


class RemoteStore(Protocol):
    """A shared store. Calls may raise any error, after at most :data:`TIMEOUT_S` per missing response."""

    def ping(self) -> None:
        """Send a query that succeeds only if the store answers and the password is right."""
        ...

    def check_list(self) -> None:
        """Raise if objects cannot be listed with sizes."""
        ...

    def exists(self, names: Sequence[str], *, is_chain: bool) -> list[bool]:
        """Return which objects exist; in a chain only the leading ones."""
        ...

    def get(self, names: Sequence[str]) -> list[bytes | memoryview | None]:
        """Return the objects of names; ``None`` for missing ones."""
        ...

    def put(self, objects: Sequence[tuple[str, bytes]]) -> None:
        """Store objects under their names."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete the existing objects of names."""
        ...

    def list_objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        """Yield all objects whose names begin with ``prefix``, in parts; one may occur in several."""
        ...

    def cure_of(self, error: Exception) -> str:
        """Return a hint for an error of its calls."""
        ...

    def is_refused(self, error: Exception) -> bool:
        """Return whether an error denies access, so that a retry is useless."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


_WRITTEN = "ragcache/check"


def open_remote(
    url: str, *, ttl_s: float | None = None, timeout_s: float = TIMEOUT_S, is_read_only: bool = False
) -> RemoteStore:
    """Return the store at a URL, without sending a request.

    Args:
        url: see :func:`~ragcache_core.config.check_shared_url`.
        ttl_s: after how long the store deletes what it was given; where that can be said with each object.
        timeout_s: for each answer.
        is_read_only: whether nothing is written there: a missing folder is an error, not created.

    Raises:
        ConfigError: it cannot work, or its client is not installed.
    """
    try:
        scheme = urlsplit(check_shared_url(url)).scheme
    except ValueError as error:
        raise ConfigError(str(error)) from None
    package = "redis" if scheme in REDIS_SCHEMES else "obstore"
    if find_spec(package) is None:
        raise ConfigError(
            f"shared is {url!r:.80}, for which {package} is not installed: pip install 'ragcache[shared]'"
        )
    try:
        if scheme in REDIS_SCHEMES:
            from ragcache_core.chunkstore.remote.redis_store import RedisStore

            return RedisStore(url, ttl_s=ttl_s, timeout_s=timeout_s)
        from ragcache_core.chunkstore.remote.object_store import ObjectStore

        return ObjectStore.at(url, timeout_s=timeout_s, is_read_only=is_read_only)
    except ConfigError:
        raise
    except Exception as error:  # whatever the client does not like about it
        raise ConfigError(f"shared is {url!r:.80}, which cannot be used ({error}): correct it") from error


def check_reachable(
    url: str, *, is_limited: bool = False, is_written: bool = False, is_read_only: bool = False
) -> str | None:
    """Send a request to the store at a URL; return why it does not answer, or ``None``.

    Args:
        url: of the store.
        is_limited: whether its objects are to be listed, too.
        is_written: whether it has to take an object, which is deleted again.
        is_read_only: see :func:`open_remote`.

    Raises:
        ConfigError: it cannot work, its client is not installed, or the store refuses us.
    """
    store = open_remote(url, is_read_only=is_read_only)
    try:
        store.ping()
        if is_limited:
            store.check_list()
        if is_written:
            store.put([(_WRITTEN, b"")])
            store.delete([_WRITTEN])
    except Exception as error:  # whatever a client raises
        if store.is_refused(error):
            raise ConfigError(f"the shared store {url} refuses us ({brief(error)}): {store.cure_of(error)}") from error
        return f"{brief(error)}: {store.cure_of(error)}"
    finally:
        store.close()
    return None


def brief(error: Exception) -> str:
    """Return the first line of an error, as some clients' errors have pages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]
