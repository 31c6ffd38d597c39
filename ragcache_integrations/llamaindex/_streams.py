"""The streams between LlamaIndex and the openai client: closed with their reader, and cut as LlamaIndex reads them.

LlamaIndex's streaming generators keep the stream of the ``openai`` package in a local variable, and that stream refers
to itself, so leaving it to the garbage collector keeps a request running in the engine for an unknown time. Here the
streams that a request opened are remembered, and closed when its reader is done.

LlamaIndex (0.14) also reads the first tool call delta of a chunk only, where vLLM sends a call's name and the beginning
of its arguments as two deltas of one chunk. Here each gets a chunk of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
            if not isinstance(answer, Stream):
                return answer
            self._streams.append(answer)
            return (part for chunk in answer for part in one_call_each(chunk))

        return created

    def _aremembering(self, create: Callable[..., Any]) -> Callable[..., Any]:
        async def created(**body: Any) -> Any:
            answer = await create(**body)
            if not isinstance(answer, AsyncStream):
                return answer
            self._streams.append(answer)
            return (part async for chunk in answer for part in one_call_each(chunk))

        return created


def one_call_each(chunk: Any) -> Iterator[Any]:
    """Yield a chunk as chunks with at most one tool call delta; the text is in the first, the finish in the last.

    A chunk of another answer than the first (``n`` above 1) is left out: LlamaIndex would read both as one text.
    """
    if chunk.choices and chunk.choices[0].index:
        return
    delta = getattr(chunk.choices[0], "delta", None) if chunk.choices else None
    calls = delta.tool_calls if delta is not None else None
    if calls is None or len(calls) < 2:
        yield chunk
        return
    for i, call in enumerate(calls):
        part = chunk.model_copy(deep=True)
        choice = part.choices[0]
        choice.delta.tool_calls = [call]
        if i:
            choice.delta.content = None
        if i < len(calls) - 1:
            choice.finish_reason = None
        yield part


def _client(
    client: OpenAI | AsyncOpenAI, remembering: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> SimpleNamespace:
    return SimpleNamespace(
        chat=SimpleNamespace(completions=SimpleNamespace(create=remembering(client.chat.completions.create))),
        completions=SimpleNamespace(create=remembering(client.completions.create)),
    )
