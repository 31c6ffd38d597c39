"""The cache key of a prompt: its question, its documents, and a hash of everything else."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ragcache_core.prompt import ChatMessage, DocumentSpan, locate_documents
from ragcache_core.types import DocId

# Embedders place "where was she born" near "when was she born", and one year near another.
_DISTINGUISHING_WORDS = re.compile(
    r"\d+(?:[.,:]\d+)*|\b(?:who|whom|whose|what|which|when|where|why|how)\b", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class QuestionKey:
    """The question of a prompt, the (id, content hash) of its documents, and a hash of what must be equal.

    The hash covers model, settings, instructions, conversation, documents and their order, and the numbers and English
    question words of the question. Where a prompt shows no known query ``question`` is ``None``, and all is hashed.
    """

    context_hash: str
    question: str | None
    documents: tuple[tuple[DocId, str], ...]


def parse_question(
    messages: Sequence[ChatMessage], settings: str, shown: Iterable[tuple[DocId, str]], queries: Iterable[str]
) -> QuestionKey:
    """Return the cache key of ``messages``.

    The question is the longest query in the last user message outside of its documents. An answer depends on the whole
    prompt, so all other text is hashed.

    Args:
        messages: the chat.
        settings: the model and its settings, serialised.
        shown: (id, text as shown) of documents that the messages may contain.
        queries: recent queries of retrievers.
    """
    shown, queries = list(shown), sorted({q for query in queries if (q := query.strip())}, key=len, reverse=True)
    context = [dict(message) for message in messages]
    texts = [_text_of(message) for message in context]
    spans = [locate_documents(text, shown, queries) if text else [] for text in texts]
    last = max((i for i, message in enumerate(context) if message.get("role") == "user"), default=None)
    question, words = None, []
    if last is not None and (place := _place_of(texts[last], queries, spans[last])) is not None:
        start, end = place
        question = texts[last][start:end]
        words = sorted(word.lower() for word in _DISTINGUISHING_WORDS.findall(question))
        context[last]["content"] = [texts[last][:start], texts[last][end:]]
    documents = dict.fromkeys(
        (span.doc_id, content_hash(text[span.start : span.end]))
        for text, found in zip(texts, spans, strict=True)
        for span in found
    )
    rest = json.dumps([settings, context, question is None, words], sort_keys=True, default=str)
    return QuestionKey(_sha256(rest), question, tuple(documents))


def content_hash(text: str) -> str:
    """Return the hash that identifies a version of a document."""
    return _sha256(text.strip())


def _text_of(message: Mapping[str, object]) -> str:
    match message.get("content"):
        case str(text) | [{"type": "text", "text": str(text)}]:
            return text
    return ""


def _place_of(text: str, queries: Iterable[str], spans: Sequence[DocumentSpan]) -> tuple[int, int] | None:
    """Return the last place outside of documents of the first query that ``text`` contains there."""
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
