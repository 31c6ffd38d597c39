"""Objects in a Redis or Valkey server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.retry import Retry

from ragcache_core.chunkstore.remote import StoredObject
from ragcache_core.config import SHARED_PASSWORD_ENV

_REFUSALS = (AuthenticationError, AuthorizationError, NoPermissionError)
_NUM_CONNECTIONS = 16
_LISTED_AT_ONCE = 1000


class RedisStore:
    """See :class:`~ragcache_core.chunkstore.remote.RemoteStore`. The server's settings limit memory and evict."""

    def __init__(self, url: str, *, ttl_s: float | None, timeout_s: float) -> None:
        self._redis = redis.Redis.from_url(
            url,
            password=os.environ.get(SHARED_PASSWORD_ENV),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # its user has something better to do: compute
            max_connections=_NUM_CONNECTIONS,
        )
        self._ttl_ms = None if ttl_s is None else max(int(ttl_s * 1000), 1)
        self._timeout_s = timeout_s

    def ping(self) -> None:
        self._redis.exists("ragcache")  # PING is answered to those that may do nothing else

    def check_list(self) -> None:
        self._redis.scan(0, match="ragcache/*", count=1)
        self._sizes_and_idle_s([b"ragcache"])

    def exists(self, names: Sequence[str], *, is_chain: bool) -> list[bool]:
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(name)
            return list(map(bool, pipe.execute()))

    def get(self, names: Sequence[str]) -> list[bytes | memoryview | None]:
        return cast("list[bytes | memoryview | None]", self._redis.mget(names))

    def put(self, objects: Sequence[tuple[str, bytes]]) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            for name, data in objects:
                pipe.set(name, data, px=self._ttl_ms)
            pipe.execute()

    def delete(self, names: Sequence[str]) -> None:
        self._redis.unlink(*names)

    def list_objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        """Yield objects, without counting as a use. Servers with LFU eviction report no time of use."""
        cursor = 0
        while True:
            cursor, keys = cast(
                "tuple[int, list[bytes]]", self._redis.scan(cursor, match=f"{prefix}*", count=_LISTED_AT_ONCE)
            )
            yield [
                StoredObject(key.decode(), size, -float(idle_s) if isinstance(idle_s, int) else 0.0)
                for key, (size, idle_s) in zip(keys, self._sizes_and_idle_s(keys), strict=True)
                if isinstance(size, int)
            ]
            if not cursor:
                return

    def _sizes_and_idle_s(self, keys: Sequence[bytes]) -> Iterator[tuple[object, object]]:
        """Return two numbers per key, size and idle seconds; other values if unknown."""
        with self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.memory_usage(key)
                pipe.object("IDLETIME", key)
            answers = pipe.execute(raise_on_error=False)
        for refusal in answers:
            if isinstance(refusal, _REFUSALS):
                raise refusal
        return zip(answers[::2], answers[1::2], strict=True)

    def cure_of(self, error: Exception) -> str:
        match error:
            case NoPermissionError():
                return "let its user do EXISTS, MGET, SET and UNLINK; with shared_bytes also SCAN, MEMORY and OBJECT"
            case AuthenticationError() | AuthorizationError():
                return f"set {SHARED_PASSWORD_ENV} to its password"
            case OutOfMemoryError():
                return "raise its maxmemory, or set maxmemory-policy to allkeys-lru"
            case ReadOnlyError():
                return "name the primary, not a replica, or set shared_read_only"
            case ResponseError():
                return "correct what it says"
        return f"see that it runs, is reached from here and answers within {self._timeout_s:g} s"

    def is_refused(self, error: Exception) -> bool:
        return isinstance(error, _REFUSALS) or (isinstance(error, ResponseError) and "DB index" in str(error))

    def close(self) -> None:
        self._redis.close()
