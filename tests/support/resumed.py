"""Streams that are cut: their requests, their events, and the rest, asked for by code that blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from ragcache_core.client.http.network import finish
from ragcache_core.client.http.resume import ResumableStream


def rest_after(stream: ResumableStream, decode: Callable[[Sequence[int]], str] | None = None) -> httpx.Request | None:
    """Return the request for what is missing, where the server decodes tokens, or does not tell their text."""

    async def asked(token_ids: list[int]) -> str | None:
        return None if decode is None else decode(token_ids)

    return finish(stream.rest(asked))


def request_of(body: dict[str, Any]) -> httpx.Request:
    """Return the request of a chat or completion."""
    kind = "chat/completions" if "messages" in body else "completions"
    return httpx.Request("POST", f"http://host/v1/{kind}", json=body)


def stream_of(body: dict[str, Any], defaults: str | None = "{}") -> ResumableStream:
    """Return the stream of an answer, whose first bytes come from a server that adds ``defaults`` to its request."""
    stream = ResumableStream.of(request_of(body))
    assert stream is not None
    stream.set_defaults(defaults)
    return stream


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream without its end mark."""
    return [json.loads(line[6:]) for line in data.decode().split("\n\n") if line.startswith("data: {")]


def text_of(data: bytes) -> str:
    """Return the text of a chat or completion that was streamed."""
    choices = [choice for event in events_of(data) for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
