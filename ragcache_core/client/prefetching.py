"""Have the engine read what it has on disk of a prompt into host memory, before anybody asks it.

::

    POST /v1/ragcache/prefetch   {"prompt_token_ids": [1, 17, ...], "cache_salt": ..., "model": ...}
                                 ->  {"num_read_tokens": 4096}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import httpx

from ragcache_core.client.http.attempt import SENT_ONCE
from ragcache_core.client.http.errors import translate_errors

_TIMEOUT_S = 10.0
"""The engine answers between two steps."""


class Prefetching(Protocol):
    """Has what is on disk of a prompt read before it is asked. May be used by any thread and any event loop."""

    def prefetch(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        *,
        model: str | None = None,
        authorization: str | None = None,
    ) -> int:
        """Return for how many tokens KV is being read now.

        Args:
            token_ids: the prompt.
            cache_salt: the salt of the request.
            model: its model, which may be an adapter; ``None`` is the engine's own.
            authorization: its ``Authorization`` header; ``None`` is that of the engine's handle.
        """
        ...

    async def aprefetch(
        self, token_ids: Sequence[int], cache_salt: str | None = None, *, model: str | None = None
    ) -> int: ...


class PrefetchRoute:
    """Asks one server. May be used by any thread and any event loop."""

    def __init__(self, base_url: str, api_key: str, http: httpx.Client, http_async: httpx.AsyncClient) -> None:
        """``base_url`` ends in ``/v1``; the clients stay their owner's."""
        self._url = f"{base_url}/ragcache/prefetch"
        self._authorization = f"Bearer {api_key}"
        self._http = http
        self._http_async = http_async

    def prefetch(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        *,
        model: str | None = None,
        authorization: str | None = None,
    ) -> int:
        """Return for how many tokens KV is being read now; 0 where none is on disk alone, or there is no disk.

        Raises:
            EngineError: the server cannot be asked, or refuses.
        """
        with translate_errors():
            asking = self._asking(token_ids, cache_salt, model, authorization)
            return _num_tokens(self._http.post(self._url, **asking))

    async def aprefetch(
        self, token_ids: Sequence[int], cache_salt: str | None = None, *, model: str | None = None
    ) -> int:
        """Do :meth:`prefetch` without blocking the event loop."""
        with translate_errors():
            asking = self._asking(token_ids, cache_salt, model, None)
            return _num_tokens(await self._http_async.post(self._url, **asking))

    def _asking(
        self, token_ids: Sequence[int], cache_salt: str | None, model: str | None, authorization: str | None
    ) -> dict[str, Any]:
        given = {"cache_salt": cache_salt, "model": model}
        body = {"prompt_token_ids": list(token_ids), **{name: v for name, v in given.items() if v is not None}}
        headers = {"Authorization": authorization or self._authorization}
        return {"json": body, "headers": headers, "timeout": _TIMEOUT_S, "extensions": SENT_ONCE}


def _num_tokens(answer: httpx.Response) -> int:
    if answer.status_code == 404:  # plain vLLM
        return 0
    match answer.raise_for_status().json():
        case {"num_read_tokens": int(num_tokens)}:
            return num_tokens
    return 0
