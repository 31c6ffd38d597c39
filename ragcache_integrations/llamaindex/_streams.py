"""Closing a stream that its reader leaves early.

LlamaIndex's streaming generators keep the stream of the ``openai`` package in a local variable, and that stream refers
to itself, so leaving it to the garbage collector keeps a request running in the engine for an unknown time. Here the
streams that a request opened are remembered, and closed when its reader is done.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from openai import AsyncOpenAI, AsyncStream, OpenAI, Stream


class OpenStreams:
    """The streams that one request has opened."""

    def __init__(self) -> None:
        self._streams: list[Any] = []

    def watch(self, client: OpenAI) -> SimpleNamespace:
        """Return what LlamaIndex uses of ``client``; streams that it opens are remembered."""
        return _client(client, self._remembering)

    def awatch(self, client: AsyncOpenAI) -> SimpleNamespace:
        """Return what LlamaIndex uses of ``client``; streams that it opens are remembered."""
        return _client(client, self._aremembering)

    def close(self) -> None:
        """Close the streams; a request that still runs is cancelled. Closing twice is fine."""
        while self._streams:
            self._streams.pop().close()

    async def aclose(self) -> None:
        """Close the streams; a request that still runs is cancelled. Closing twice is fine."""
        while self._streams:
            await self._streams.pop().close()

    def _remembering(self, create: Callable[..., Any]) -> Callable[..., Any]:
        def created(**body: Any) -> Any:
            answer = create(**body)
            if isinstance(answer, Stream):
                self._streams.append(answer)
            return answer

        return created

    def _aremembering(self, create: Callable[..., Any]) -> Callable[..., Any]:
        async def created(**body: Any) -> Any:
            answer = await create(**body)
            if isinstance(answer, AsyncStream):
                self._streams.append(answer)
            return answer

        return created


def _client(
    client: OpenAI | AsyncOpenAI, remembering: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> SimpleNamespace:
    return SimpleNamespace(
        chat=SimpleNamespace(completions=SimpleNamespace(create=remembering(client.chat.completions.create))),
        completions=SimpleNamespace(create=remembering(client.completions.create)),
    )
