"""The tokens of every answer, as the server's protocol hands them to LangChain or LlamaIndex: by their ids.

The frameworks show text alone, so the ids are read below them, from the responses of the engine's own HTTP clients: an
answer that was generated ahead passes there like any other. The request has to ask for them, with
:data:`ASK_TOKEN_IDS`, which both frameworks send as vLLM's own field.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from ragcache_core.client import Engine

ASK_TOKEN_IDS: dict[str, Any] = {"return_token_ids": True}
_QUESTION = "Question: "
_END = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class HandedOver:
    """One answer: its prompt as text and as the server's token ids, and the ids of what was generated."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


class AnswerTap:
    """Reads along the chat answers of an engine, and keeps them by the question at the end of their prompt."""

    def __init__(self, engine: Engine) -> None:
        """Read along from now on, as long as the engine is open."""
        self.answers: dict[str, HandedOver] = {}
        engine.http_client().event_hooks["response"].append(self._watch)
        engine.http_async_client().event_hooks["response"].append(self._awatch)

    def _watch(self, response: httpx.Response) -> None:
        if _is_chat(response):
            assert isinstance(response.stream, httpx.SyncByteStream)
            response.stream = _ReadAlong(response.stream, self._keeper(response.request))

    async def _awatch(self, response: httpx.Response) -> None:
        if _is_chat(response):
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _AsyncReadAlong(response.stream, self._keeper(response.request))

    def _keeper(self, request: httpx.Request) -> Callable[[bytes], None]:
        prompt: str = json.loads(request.content)["messages"][-1]["content"]
        question = prompt.rpartition(_QUESTION)[2]

        def keep(body: bytes) -> None:
            if body.startswith(b"{") or _END in body:  # else its reader went away
                self.answers[question] = _parse(prompt, body)

        return keep


def _is_chat(response: httpx.Response) -> bool:
    return response.is_success and response.request.url.path.endswith("/chat/completions")


class _ReadAlong(httpx.SyncByteStream):
    """Hands a body on, and tells of it when it is closed: clients leave a stream at its last event, not at its end."""

    def __init__(self, stream: httpx.SyncByteStream, keep: Callable[[bytes], None]) -> None:
        self._stream, self._keep, self._body = stream, keep, b""

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._body += part
            yield part

    def close(self) -> None:
        self._stream.close()
        self._keep(self._body)


class _AsyncReadAlong(httpx.AsyncByteStream):
    """Does what :class:`_ReadAlong` does in an event loop."""

    def __init__(self, stream: httpx.AsyncByteStream, keep: Callable[[bytes], None]) -> None:
        self._stream, self._keep, self._body = stream, keep, b""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._body += part
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
        self._keep(self._body)


def _parse(prompt: str, body: bytes) -> HandedOver:
    text = body.decode()
    if text.startswith("{"):
        messages: list[dict[str, Any]] = [json.loads(text)]
    else:
        lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
        messages = [json.loads(line) for line in lines if line != "[DONE]"]
    prompt_ids = next((ids for m in messages if (ids := m.get("prompt_token_ids"))), ())
    token_ids = [i for m in messages for choice in m["choices"] for i in choice.get("token_ids") or ()]
    return HandedOver(prompt, tuple(prompt_ids), tuple(token_ids))
