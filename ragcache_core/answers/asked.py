"""A prompt as a question, the documents that it shows, and a key of everything but the question."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ragcache_core.prompt import ChatMessage, DocumentSpan, locate_documents
from ragcache_core.types import DocId

_TELLING = re.compile(r"\d+(?:[.,:]\d+)*|\b(?:who|whom|whose|what|which|when|where|why|how)\b", re.IGNORECASE)
"""Where and when somebody was born are near to each other for an embedder, and so are two years."""


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """What two prompts have in common if one may get the other's answer.

    ``key`` is a hash of all that must be the same: model, settings, instructions, documents and their order, the
    conversation so far, and the numbers and (English) question words of the question. ``question`` is compared by its
    meaning; ``None`` where it cannot be told from the rest, which is part of the key then. ``documents`` are ids and
    hashes of what is shown.
    """

    key: str
    question: str | None
    documents: tuple[tuple[DocId, str], ...]


def ask(
    messages: Sequence[ChatMessage], settings: str, shown: Iterable[tuple[DocId, str]], queries: Iterable[str]
) -> AskedPrompt:
    """Return ``messages`` as a question about documents.

    ``shown`` are documents (id, text as shown) that the messages may hold, ``queries`` what was searched for lately:
    the longest of them that the user's last message holds, beside its documents, is the question. A prompt is laid out
    as anybody likes, and an answer depends on all of it: so nothing else is taken for the question.
    """
    shown, queries = list(shown), sorted({q for query in queries if (q := query.strip())}, key=len, reverse=True)
    asked = [dict(message) for message in messages]
    texts = [_text_of(message) for message in asked]
    spans = [locate_documents(text, shown, queries) if text else [] for text in texts]
    last = max((i for i, message in enumerate(asked) if message.get("role") == "user"), default=None)
    question, telling = None, []
    if last is not None and (place := _place_of(texts[last], queries, spans[last])) is not None:
        start, end = place
        question = texts[last][start:end]
        telling = sorted(word.lower() for word in _TELLING.findall(question))
        asked[last]["content"] = [texts[last][:start], texts[last][end:]]
    rest = json.dumps([settings, asked, question is None, telling], sort_keys=True, default=str)
    documents = dict.fromkeys(
        (span.doc_id, content_hash(text[span.start : span.end]))
        for text, found in zip(texts, spans, strict=True)
        for span in found
    )
    return AskedPrompt(_sha256(rest), question, tuple(documents))


def content_hash(text: str) -> str:
    """Return what names a version of a document."""
    return _sha256(text.strip())


def _text_of(message: Mapping[str, object]) -> str:
    match message.get("content"):
        case str(text):
            return text
        case [{"type": "text", "text": str(text)}]:
            return text
    return ""


def _place_of(text: str, queries: Iterable[str], spans: Sequence[DocumentSpan]) -> tuple[int, int] | None:
    """Return where the first of ``queries`` that ``text`` holds beside its documents stands last."""
    for query in queries:
        start = text.rfind(query)
        while start >= 0:
            end = start + len(query)
            if not any(span.start < end and start < span.end for span in spans):
                return start, end
            start = text.rfind(query, 0, end - 1)
    return None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
