"""Streamed answers: pieces of text; the last one has the request's statistics."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ragcache_core.client.prompts.request_plan import RequestPlan, merge_bodies
from ragcache_core.errors import ConfigError, EngineDiedError, quoted
from ragcache_core.hints import HINTS
from ragcache_core.prompt import ChatMessage, RenderedPrompt
from ragcache_core.stats import RequestStats

Prompt = str | RenderedPrompt | Sequence[ChatMessage]
"""A raw text to be continued, a prompt that a :class:`~ragcache_core.prompt.PromptLayout` rendered, or messages."""


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """A piece of an answer. The last one has ``finish_reason`` and ``stats``, and may have no text."""

    text: str
    finish_reason: str | None = None
    stats: RequestStats | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer."""

    text: str
    finish_reason: str
    stats: RequestStats


def check_settings(names: Iterable[str], *, is_chat: bool) -> None:
    """Reject request settings that the OpenAI SDK does not have, and list those that it has.

    Raises:
        ConfigError: there are some.
    """
    if unknown := sorted(set(names) - (known := _settings_of(is_chat))):
        raise ConfigError(
            f"a request has no setting {unknown[0]!r}: vLLM's own (top_k, min_p, cache_salt, ...) go into "
            f"extra_body={{{unknown[0]!r}: ...}}, the others are {', '.join(sorted((*known, *HINTS)))}"
        )


def check_prompt(prompt: object) -> None:
    """Reject anything but one prompt.

    Raises:
        ConfigError: it is neither a text, nor a rendered prompt, nor messages.
    """
    match prompt:
        case str() | RenderedPrompt():
            return
        case [*messages] if messages and all(isinstance(message, Mapping) for message in messages):
            return
        case [*texts] if texts and all(isinstance(text, str) for text in texts):
            raise ConfigError(f"the prompt is a list of {len(texts)} texts: send one request for each")
    raise ConfigError(
        f"the prompt is {quoted(prompt)}: pass a text, what PromptLayout.render returns, or messages like "
        "[{'role': 'user', 'content': 'Who?'}]"
    )


def check_one_answer(settings: Mapping[str, Any]) -> None:
    """Reject a request for several answers where one text is returned.

    Raises:
        ConfigError: ``n`` is larger than 1, or ``extra_body`` is not a mapping.
    """
    for given in (settings, merge_bodies(settings.get("extra_body"))):
        if (n := given.get("n")) not in (None, 1):
            raise ConfigError(f"n is {quoted(n)}, but one text is returned: leave n out, and send {quoted(n)} requests")


def first_choice(choices: Sequence[Any]) -> Any | None:
    """Return the choice with index 0 of a streamed event; ``None`` if the event has only other choices."""
    return next((choice for choice in choices if not choice.index), None)


@cache
def _settings_of(is_chat: bool) -> frozenset[str]:
    from openai.resources import Completions, chat

    asking = chat.Completions if is_chat else Completions
    return frozenset(inspect.signature(asking.create).parameters) - {"self"}


def streamed_body(prompt: Prompt, plan: RequestPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a streamed request to the OpenAI SDK: a chat with ``messages``, else a completion."""
    body: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        **settings,
        "extra_body": merge_bodies(plan.extra_body, settings.get("extra_body")),
    }
    match prompt:
        case str():
            body["prompt"] = prompt
        case RenderedPrompt():
            body["prompt"] = list(prompt.token_ids)
        case _:
            body["messages"] = list(prompt)
    return body


class AnswerReader:
    """Reads the events of one streamed completion or chat; records times, usage and id."""

    def __init__(self, plan: RequestPlan) -> None:
        self.response_id: str | None = None
        self._plan = plan
        self._started_s = time.perf_counter()
        self._ttft_s: float | None = None
        self._usage: dict[str, Any] | None = None
        self._finish_reason: str | None = None

    def read(self, event: Any) -> GenerationChunk | None:
        """Return the text of an event of the OpenAI SDK; ``None`` if it has none."""
        self.response_id = event.id
        if event.usage is not None:
            self._usage = event.usage.model_dump()
        if (choice := first_choice(event.choices)) is None:
            return None
        if choice.finish_reason:
            self._finish_reason = choice.finish_reason
        text = choice.delta.content if hasattr(choice, "delta") else choice.text
        if not text:
            return None
        if self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self._started_s
        return GenerationChunk(text)

    def stats(self) -> RequestStats:
        """Return the measured times and the server's counts of the answer.

        Raises:
            EngineDiedError: the stream ended before the answer did.
        """
        if self._finish_reason is None:
            raise EngineDiedError("the engine ended the answer early: send the request again")
        total_s = time.perf_counter() - self._started_s
        return self._plan.stats(self._usage, ttft_s=self._ttft_s, total_s=total_s)

    def last(self, stats: RequestStats) -> GenerationChunk:
        """Return the last chunk of the answer."""
        return GenerationChunk("", self._finish_reason, stats)


def join_chunks(chunks: Sequence[GenerationChunk]) -> Generation:
    """Return the whole answer of a finished stream."""
    last = chunks[-1]
    assert last.stats is not None, "the stream was not read to its end"
    assert last.finish_reason is not None
    return Generation("".join(c.text for c in chunks), last.finish_reason, last.stats)
