"""Send a batch of prompts in the order of their common prefixes, a few at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ragcache_core.batch_order import MAX_CONCURRENCY, PrefixKey, order_requests
from ragcache_core.client.generation import Generation, Prompt, check_prompt
from ragcache_core.errors import ConfigError, quoted
from ragcache_core.prompt import ChatMessage, RenderedPrompt

_BEFORE_MESSAGES = ("model", "cache_salt", "tools", "chat_template", "chat_template_kwargs")


async def answer_batch(
    generate: Callable[..., Awaitable[Generation]],
    prompts: Sequence[Prompt],
    *,
    max_concurrency: int = MAX_CONCURRENCY,
    return_exceptions: bool = False,
    **settings: Any,
) -> list[Generation | Exception]:
    """Return the answers to ``prompts`` in their order; see ``Engine.batch``. ``generate`` answers one of them."""
    if isinstance(prompts, str | RenderedPrompt) or not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts is {quoted(prompts)}: pass a list of prompts")
    if isinstance(max_concurrency, bool) or not isinstance(max_concurrency, int) or max_concurrency < 1:
        raise ConfigError(f"max_concurrency is {quoted(max_concurrency)}: pass 1 or more")
    if not return_exceptions:
        for prompt in prompts:
            check_prompt(prompt)
    answers: dict[int, Generation | Exception] = {}

    async def answer(index: int) -> None:
        try:
            answers[index] = await generate(prompts[index], **settings)
        except Exception as error:
            if not return_exceptions:
                raise
            answers[index] = error

    await run_in_order(order_requests([prefix_key(prompt) for prompt in prompts]), answer, max_concurrency)
    return [answers[i] for i in range(len(prompts))]


async def run_in_order(order: Sequence[int], run: Callable[[int], Awaitable[None]], max_concurrency: int) -> None:
    """Call ``run`` for each index of ``order``, at most ``max_concurrency`` at a time.

    The first exception ends all of them and is raised, as a cancellation does.
    """
    remaining = iter(order)

    async def work() -> None:
        for index in remaining:
            await run(index)

    workers = [asyncio.ensure_future(work()) for _ in range(min(max_concurrency, len(order)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def prefix_key(prompt: Prompt) -> PrefixKey:
    """Return the sort key of a prompt, which groups prompts with a common prefix; empty for an invalid prompt."""
    match prompt:
        case str():
            return ("text", prompt)
        case RenderedPrompt():
            return ("tokens", prompt.token_ids)
        case [*messages] if all(isinstance(message, Mapping) for message in messages):
            return chat_key(messages)
    return ("",)


def chat_key(messages: Sequence[ChatMessage], settings: Mapping[str, Any] | None = None) -> PrefixKey:
    """Return the sort key of a chat: the parts of its prompt, as far as possible in the prompt's order.

    ``settings`` are the other fields of the request. Of these the model, the salt and the tools separate prefixes.
    """
    before = {name: settings[name] for name in _BEFORE_MESSAGES if name in settings} if settings else {}
    parts = ["chat", _as_text(before)]
    for message in messages:
        others = {name: value for name, value in message.items() if name not in ("role", "content")}
        parts += [str(message.get("role")), _as_text(message.get("content")), _as_text(others)]
    return tuple(parts)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str) if value else ""
