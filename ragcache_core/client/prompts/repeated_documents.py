"""A document that a conversation shows already is referred to, and not shown again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.prompt import ChatMessage, locate_documents
from ragcache_core.types import DocId

_NUM_WORDS: Final = 8
_LEAST_TIMES: Final = 2
"""A document that is not so many times as long as the reference to it is shown again."""


def check_deduplicate(deduplicate: object) -> bool:
    """Return whether documents are to be referred to.

    Raises:
        ConfigError: it is neither true nor false; ``"no"`` would count as true.
    """
    if isinstance(deduplicate, bool):
        return deduplicate
    raise ConfigError(f"deduplicate is {quoted(deduplicate, 40)}: give True or False")


def without_repeats(
    messages: Sequence[ChatMessage], documents: Iterable[tuple[DocId, str]], questions: Iterable[str] = ()
) -> list[ChatMessage]:
    """Return messages in which each of ``documents`` (id, text as shown) is shown once, by the first that holds it.

    Later ones name it by the words that it begins with, ``[shown above: "Zorval was a company ..."]``. Frameworks keep
    and send a conversation's messages as they were made, so that the same are changed in the same way in every turn:
    each prompt still begins with all of the one before (ContextPilot's deduplication). ``questions`` may quote
    documents, and the assistant may: both stay as they are.
    """
    documents, questions = list(documents), list(questions)
    seen: set[str] = set()
    return [_changed(message, documents, questions, seen) for message in messages]


def reference_to(text: str) -> str:
    """Return what stands in place of a document that was shown before."""
    words = text.split()
    begins = " ".join(words[:_NUM_WORDS]).replace('"', "'")
    return f'[shown above: "{begins}{" ..." if len(words) > _NUM_WORDS else ""}"]'


def _changed(
    message: ChatMessage, documents: list[tuple[DocId, str]], questions: list[str], seen: set[str]
) -> ChatMessage:
    if message.get("role") == "assistant":
        return message
    content = message.get("content")
    if isinstance(content, str):
        changed: Any = _without(content, documents, questions, seen)
    elif isinstance(content, list):
        changed = [
            {**part, "text": _without(part["text"], documents, questions, seen)}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    else:
        return message
    return message if changed == content else {**message, "content": changed}


def _without(text: str, documents: list[tuple[DocId, str]], questions: list[str], seen: set[str]) -> str:
    known, parts, end = set(seen), [], 0
    for span in locate_documents(text, documents, questions):
        shown = text[span.start : span.end]
        seen.add(shown)
        reference = reference_to(shown)
        if shown in known and len(shown) >= _LEAST_TIMES * len(reference):
            parts += [text[end : span.start], reference]
            end = span.end
    return "".join([*parts, text[end:]])
