"""The server's own tokens of a chat: to see once that ours are the same, and in their place where they are not."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

from ragcache_core.client.prompts.chat_request import ChatRequest
from ragcache_core.errors import RAGCacheError
from ragcache_core.prompt import ChatMessage, PromptTokenizer, locate_documents, texts_of
from ragcache_core.types import DocId, PromptSegment, SegmentKind
from ragcache_core.wire import tile

logger = logging.getLogger(__name__)

AskTokens = Callable[[Sequence[ChatMessage], Mapping[str, Any]], list[int] | None]
"""Returns a server's token ids of messages, given the other fields of ``/tokenize``; ``None`` if it does not say."""

_MAX_SHAPES = 1024
_MAX_ANSWERS = 16
"""Tokens of so many chats are kept: a request that was rehearsed is made again."""
_ASKED_AGAIN_S = 60.0
"""How long a server that did not say is not asked again about chats of the shape."""


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
