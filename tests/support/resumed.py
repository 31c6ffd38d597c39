"""The rest of a stream that was cut, asked for by code that blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import httpx

from ragcache_core.client.http.network import finish
from ragcache_core.client.http.resume import ResumableStream


def rest_after(stream: ResumableStream, decode: Callable[[Sequence[int]], str] | None = None) -> httpx.Request | None:
    """Return the request for what is missing, where the server decodes tokens, or does not tell their text."""

    async def asked(token_ids: list[int]) -> str | None:
        return None if decode is None else decode(token_ids)

    return finish(stream.rest(asked))
