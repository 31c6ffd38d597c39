"""Render messages with a model's chat template, as vLLM's server does through transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ragcache_core.errors import PromptError
from ragcache_core.prompt import ChatMessage, texts_of


class ChatTemplate:
    """A chat template with its variables. Thread-safe.

    ``variables`` are what templates ask for by name: special tokens as ``bos_token``, settings as ``enable_thinking``.
    ``wraps_text`` hands a message's text over as ``[{"type": "text", "text": ...}]``, which some templates iterate.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], *, wraps_text: bool = False) -> None:
        """Compile the template.

        Raises:
            PromptError: it is no Jinja template.
        """
        try:
            self._template = _compiled(source)
        except TemplateError as error:
            raise PromptError(f"the chat template cannot be read: {error}") from error
        self._variables = dict(variables)
        self._wraps_text = wraps_text

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text that the template makes of ``messages``, ready for the answer.

        ``tools`` are those that the model may call; ``variables`` win over the template's own.

        Raises:
            PromptError: the template refuses the messages.
        """
        asked = {"messages": [self._shown(message) for message in messages], "tools": tools}
        known = {"documents": None, **self._variables, **(variables or {})}
        try:
            return self._template.render({**known, **asked, "add_generation_prompt": True})
        except Exception as error:  # a template calls methods of what it is given: anything can be raised
            raise PromptError(f"the chat template cannot render these messages: {error}") from error

    def _shown(self, message: ChatMessage) -> dict[str, Any]:
        """Return a message as vLLM hands it to a template."""
        shown = {name: value for name, value in message.items() if value is not None}
        shown["content"] = self._content(message)
        if (reasoning := shown.pop("reasoning_content", None) or shown.get("reasoning")) is not None:
            shown |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls := shown.pop("tool_calls", None):
            shown["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}}
                for call in calls
            ]
        return shown

    def _content(self, message: ChatMessage) -> str | list[dict[str, str]]:
        texts = texts_of(message.get("content"))
        if self._wraps_text and message.get("role") != "tool":
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)


def _arguments(given: Any) -> dict[str, Any]:
    """Return a call's arguments as an object; what a model wrote that is none is empty, as for vLLM."""
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        arguments = None
    return dict(arguments) if isinstance(arguments, Mapping) else {}


class _GenerationBlock(Extension):
    """``{% generation %}``, with which templates mark what the model wrote, renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own attribute)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_held"), [], [], body).set_lineno(line)

    def _held(self, caller: Callable[[], str]) -> str:
        return caller()


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    """Return a template; those of several engines are mostly one model's, and it takes 50 ms."""
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda layout: datetime.now().strftime(layout)}
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
