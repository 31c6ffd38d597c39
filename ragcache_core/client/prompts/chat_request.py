"""What a chat request's prompt is made of: its messages, its tools, its settings of the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ragcache_core.prompt import ChatMessage, PromptTokenizer, has_other_than_text
from ragcache_core.types import DocId

_PLAIN_ROLES = {"system", "user", "assistant"}
"""vLLM makes another role of ``developer`` where a template does not know it."""
_PLAIN_KEYS = {"role", "content", "name"}
_KNOWN_KEYS = {
    "system": _PLAIN_KEYS,
    "user": _PLAIN_KEYS,
    "assistant": {*_PLAIN_KEYS, "tool_calls", "reasoning", "reasoning_content"},
    "tool": {*_PLAIN_KEYS, "tool_call_id"},
}
"""What of a message is rendered here."""
_OWN_NAMES = {
    *("messages", "tools", "documents", "chat_template", "tokenize", "return_dict"),
    *("add_generation_prompt", "continue_final_message"),
}
"""What ``chat_template_kwargs`` may say otherwise than the request does: the server knows which of them counts."""
_ASKED_OF_THE_SERVER = ("chat_template", "continue_final_message", "add_special_tokens", "add_generation_prompt")
_MEDIA = ("media_io_kwargs", "mm_processor_kwargs")
_NOT_TOLD = ("functions", "truncate_prompt_tokens")
"""Settings that change a prompt, and of which the server's ``/tokenize`` knows nothing."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request, as far as its prompt depends on it.

    Attributes:
        messages: of the OpenAI protocol.
        tools: as the server shows them to the template.
        variables: what the template is told by name, ``enable_thinking``, besides the model's own settings.
        asked: the fields of the server's ``/tokenize`` that say the same, besides the messages.
        is_plain: text alone, and no settings: every server renders it alike.
        is_ours: it can be rendered here.
        has_media: it shows something other than text, for which only the server knows the tokens.
    """

    messages: Sequence[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    is_plain: bool = True
    is_ours: bool = True
    has_media: bool = False

    @property
    def shape(self) -> str | None:
        """What requests have alike that are rendered alike: tools, settings, kinds of messages and which follow which.

        ``None``: it is no JSON, and the server will say so.
        """
        kinds = ["", *map(_kind, self.messages), ""]
        try:
            return json.dumps([sorted(set(pairwise(kinds))), self.tools, self.variables])
        except (TypeError, ValueError, RecursionError):
            return None


@dataclass(frozen=True, slots=True)
class AskedChat:
    """A request that was rendered here, from which the next one of the same chat goes on.

    ``tokenizer`` renders messages with its ``settings``; ``documents`` (id, text as shown) are in its ``messages``.
    """

    messages: Sequence[ChatMessage]
    settings: Mapping[str, Any]
    tokenizer: PromptTokenizer
    documents: Sequence[tuple[DocId, str]]


def read_chat(messages: Sequence[ChatMessage], settings: Mapping[str, Any]) -> ChatRequest | None:
    """Return what the prompt of a request depends on; ``None`` where the server's ``/tokenize`` could not tell it.

    ``settings`` are the other fields of the request, with vLLM's own in ``extra_body``.
    """
    given = {**settings, **(settings.get("extra_body") or {})}
    given = {name: value for name, value in given.items() if value is not None}
    tools, kwargs = given.get("tools"), given.get("chat_template_kwargs") or {}
    if given.keys() & set(_NOT_TOLD) or not isinstance(kwargs, Mapping):
        return None
    if tools and given.get("tool_choice") == "none":
        return None  # whether its tools are shown is an option of the server's
    variables = {**kwargs, **_effort(given, kwargs)}
    if (documents := given.get("documents")) is not None:
        variables["documents"] = documents
    asked = {name: given[name] for name in (*_ASKED_OF_THE_SERVER, *_MEDIA) if name in given}
    has_media = any(has_other_than_text(message.get("content")) for message in messages)
    shown = _shown_tools(tools)
    is_ours = (
        not has_media
        and not asked
        and not kwargs.keys() & _OWN_NAMES
        and (tools is None or shown is not None)
        and all(_is_known(message) for message in messages)
    )
    is_plain = is_ours and tools is None and not variables and all(_is_plain(message) for message in messages)
    if tools is not None:
        asked["tools"] = tools
    if variables:
        asked["chat_template_kwargs"] = variables
    return ChatRequest(messages, shown, variables, asked, is_plain, is_ours, has_media)


def is_text_only(messages: Iterable[ChatMessage]) -> bool:
    """Return whether every message is plain text of a role that chat templates render alike everywhere."""
    return all(map(_is_plain, messages))


def _is_plain(message: ChatMessage) -> bool:
    return (
        message.get("role") in _PLAIN_ROLES
        and isinstance(message.get("content"), str)
        and _PLAIN_KEYS.issuperset(_set_keys(message))
    )


def _is_known(message: ChatMessage) -> bool:
    keys = _KNOWN_KEYS.get(message.get("role") or "")
    calls = message.get("tool_calls") or ()
    return (
        keys is not None
        and keys.issuperset(_set_keys(message))
        and isinstance(calls, list | tuple)
        and all(isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls)
    )


def _effort(given: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the server makes of ``reasoning_effort``: models that think only if told to are told by it, too."""
    effort = given.get("reasoning_effort")
    if effort is None:
        return {}
    thinks = {} if "enable_thinking" in kwargs else {"enable_thinking": effort != "none"}
    return {**thinks, "reasoning_effort": effort}


def _shown_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return tools as the server hands them to a template: known fields alone, in its own order."""
    if not isinstance(tools, list | tuple):
        return None
    shown = []
    for tool in tools:
        match tool:
            case {"function": {"name": str(name)} as function}:
                flags = {flag: function[flag] for flag in ("strict", "defer_loading") if function.get(flag) is not None}
                described = {key: function.get(key) for key in ("description", "parameters")}
                shown.append({"type": "function", "function": {"name": name, **described, **flags}})
            case _:
                return None
    return shown


def _kind(message: ChatMessage) -> str:
    content = message.get("content")
    count = f"{min(len(content), 2)}" if isinstance(content, list) else type(content).__name__
    return f"{message.get('role')} {count} {' '.join(sorted(_set_keys(message)))}"


def _set_keys(message: Mapping[str, Any]) -> set[str]:
    return {key for key, value in message.items() if value is not None}
