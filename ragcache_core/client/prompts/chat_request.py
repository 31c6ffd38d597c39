"""What a chat request's prompt is made of: messages, tools, template settings; and the server's own tokens of it."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import Any

from ragcache_core.errors import RAGCacheError
from ragcache_core.log import logger_of
from ragcache_core.prompt import ChatMessage, PromptTokenizer, has_other_than_text, locate_documents, texts_of
from ragcache_core.types import DocId, PromptSegment, SegmentKind
from ragcache_core.wire import tile

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
_SERVER_RENDERED_FIELDS = ("chat_template", "continue_final_message", "add_special_tokens", "add_generation_prompt")
_MEDIA = ("media_io_kwargs", "mm_processor_kwargs")
_NOT_TOLD = ("functions", "truncate_prompt_tokens")
"""Settings that change a prompt, and that the server's ``/tokenize`` does not know."""
AskTokens = Callable[[Sequence[ChatMessage], Mapping[str, Any]], list[int] | None]
"""Returns a server's token ids of messages, given the other fields of ``/tokenize``; ``None`` if it does not say."""

_MAX_SHAPES = 1024
_MAX_ANSWERS = 16
"""Chats whose tokens are kept: a request that was rehearsed is made again."""
_ASKED_AGAIN_S = 60.0
"""How long a server that did not say is not asked again about chats of the shape."""
logger = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request, as far as its prompt depends on it.

    Attributes:
        messages: of the OpenAI protocol.
        tools: as the server shows them to the template.
        variables: what the template is told by name, ``enable_thinking``, besides the model's own settings.
        asked: the fields of the server's ``/tokenize`` that say the same, besides the messages.
        is_plain: text alone, and no settings: every server renders it in the same way.
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
        """Common to requests that are rendered in the same way: tools, settings, kinds and order of messages.

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
    asked = {name: given[name] for name in (*_SERVER_RENDERED_FIELDS, *_MEDIA) if name in given}
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
    """Return whether every message is plain text of a role that all servers render in the same way."""
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


class ServerTokens:
    """What one server says of chats. Thread-safe; never fails: what it does not say is not known."""

    def __init__(self, ask: AskTokens) -> None:
        self._ask = ask
        self._lock = Lock()
        self._agrees: OrderedDict[str, bool] = OrderedDict()
        self._silent_until_s: OrderedDict[str, float] = OrderedDict()
        self._answers: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def agrees(self, chat: ChatRequest, messages: Sequence[ChatMessage], ours: Callable[[], Sequence[int]]) -> bool:
        """Return whether the server renders chats of this shape as it is done here; it is asked about the first one.

        ``messages`` are those that will be sent; ``ours`` returns their tokens.
        """
        if (shape := chat.shape) is None:
            return False
        with self._lock:
            if (known := self._agrees.get(shape)) is not None:
                self._agrees.move_to_end(shape)
                return known
        if (theirs := self.of(chat, messages)) is None:
            return False
        is_same = theirs == tuple(ours())
        if not is_same:
            logger.info("Chats of one shape have other tokens here than in the server, which is asked for each of them")
        with self._lock:
            _keep(self._agrees, shape, is_same, _MAX_SHAPES)
        return is_same

    def of(self, chat: ChatRequest, messages: Sequence[ChatMessage]) -> tuple[int, ...] | None:
        """Return the server's tokens of ``chat`` with these messages; ``None`` where it does not say."""
        if (shape := chat.shape) is None:
            return None
        try:
            asked = json.dumps([list(messages), dict(chat.asked)]).encode()
        except (TypeError, ValueError, RecursionError):
            return None
        key = hashlib.sha256(asked).digest()
        with self._lock:
            if (answer := self._answers.get(key)) is not None:
                return answer
            if time.monotonic() < self._silent_until_s.get(shape, 0.0):
                return None
        try:
            told = self._ask(messages, chat.asked)
        except RAGCacheError:  # the request itself will say so
            told = None
        with self._lock:
            if told is None:
                _keep(self._silent_until_s, shape, time.monotonic() + _ASKED_AGAIN_S, _MAX_SHAPES)
                return None
            answer = tuple(told)
            _keep(self._answers, key, answer, _MAX_ANSWERS)
        return answer


def segments_in(
    token_ids: Sequence[int],
    tokenizer: PromptTokenizer,
    messages: Iterable[ChatMessage],
    documents: Iterable[tuple[DocId, str]],
    questions: Iterable[str] = (),
) -> tuple[PromptSegment, ...]:
    """Return the segments of a prompt that was tokenised elsewhere.

    ``documents`` (id, text as shown) are looked for in the messages, but the assistant's, and what is found by its
    tokens in the prompt. A document's first and last token may be others there: they have merged with what is beside.
    """
    documents, questions = list(documents), list(questions)
    haystack = array("I", token_ids).tobytes()
    found: list[PromptSegment] = []
    for message in messages:
        if message.get("role") == "assistant":
            continue
        for text in texts_of(message.get("content")):
            for span in locate_documents(text, documents, questions):
                ids = tokenizer.encode(text[span.start : span.end]).token_ids
                if (place := _place(haystack, ids, token_ids, found)) is not None:
                    found.append(PromptSegment(SegmentKind.DOCUMENT, *place, span.doc_id))
    return tile(sorted(found, key=lambda segment: segment.start), len(token_ids))


def _place(
    haystack: bytes, ids: Sequence[int], token_ids: Sequence[int], taken: Sequence[PromptSegment]
) -> tuple[int, int] | None:
    """Return the first free place ``[start, end)`` of a document's tokens."""
    edge = 1 if len(ids) > 4 else 0
    core = array("I", ids[edge : len(ids) - edge]).tobytes()
    if not core:
        return None
    size, at = array("I").itemsize, haystack.find(core)
    while at >= 0:
        start, end = at // size, (at + len(core)) // size
        start -= bool(edge and start and token_ids[start - 1] == ids[0])
        end += bool(edge and end < len(token_ids) and token_ids[end] == ids[-1])
        if at % size == 0 and all(end <= other.start or other.end <= start for other in taken):
            return start, end
        at = haystack.find(core, at + 1)
    return None


def _keep(kept: OrderedDict[Any, Any], key: object, value: object, capacity: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > capacity:
        kept.popitem(last=False)
