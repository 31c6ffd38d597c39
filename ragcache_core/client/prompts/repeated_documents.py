"""Replace documents that a conversation already shows by references."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.prompt import ChatMessage, common_prefix_len, locate_documents
from ragcache_core.types import DocId

_NUM_WORDS: Final = 8
_LEAST_TIMES: Final = 2
"""A document that is less than twice as long as the reference to it is shown again."""


def check_deduplicate(deduplicate: object) -> bool:
    """Return whether repeated documents are replaced by references.

    Raises:
        ConfigError: it is neither true nor false; ``"no"`` would count as true.
    """
    if isinstance(deduplicate, bool):
        return deduplicate
    raise ConfigError(f"deduplicate is {quoted(deduplicate, 40)}: give True or False")


def without_repeats(
    messages: Sequence[ChatMessage], documents: Iterable[tuple[DocId, str]], questions: Iterable[str] = ()
) -> list[ChatMessage]:
    """Return messages that show each of ``documents`` (id, text) once, in the first message that has it.

    Later messages refer to it by its opening words: ``[shown above: "Zorval was a company ..."]``. A reference depends
    only on the messages before it, and frameworks resend a conversation unchanged. So each prompt begins with the whole
    previous prompt (ContextPilot's deduplication). Quotes in ``questions`` and in the assistant's messages stay.
    """
    documents, questions = list(documents), list(questions)
    seen: set[str] = set()
    return [_changed(message, documents, questions, seen) for message in messages]


def reference_to(text: str, others: Iterable[str] = ()) -> str:
    """Return the reference that replaces a document shown before.

    It quotes the document's opening words, as many as are needed to tell it from ``others`` shown before.
    """
    words = _quotable_words(text)
    different = [other for other in map(_quotable_words, others) if other != words]
    num_words = max([_NUM_WORDS, *(common_prefix_len(words, other) + 1 for other in different)])
    return f'[shown above: "{" ".join(words[:num_words])}{" ..." if len(words) > num_words else ""}"]'


def _quotable_words(text: str) -> list[str]:
    return text.replace('"', "'").split()


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
        if shown in known and len(shown) >= _LEAST_TIMES * len(reference := reference_to(shown, seen)):
            parts += [text[end : span.start], reference]
            end = span.end
    return "".join([*parts, text[end:]])
