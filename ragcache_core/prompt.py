"""Lay a prompt out as static prefix, documents and question, and know which texts are whose.

Documents are found in the messages of a chat by their characters. The server renders and tokenises the chat, and finds
the tokens of their texts::

    chars   <s>Answer from the documents.\\n\\nDocument: Zor is ...\\n\\nDocument: Mel is ...\\n\\nQuestion: Who ...?
    tokens  |------- PREFIX ------------|-------- DOCUMENT ------|-------- DOCUMENT ------|---- QUESTION -----|
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from ragcache_core.errors import ConfigError, PromptError, PromptTooLongError
from ragcache_core.types import DocId, Document, PromptSegment, SegmentKind
from ragcache_core.wire import check_sendable

ChatMessage = Mapping[str, Any]
"""A message of the OpenAI protocol: ``{"role": ..., "content": ...}``."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Token ids of a text."""

    token_ids: tuple[int, ...]


class PromptTokenizer(Protocol):
    """The one way from messages to token ids: the server's own.

    Attributes:
        control_tokens: texts that it takes for a single token which begins or ends a message. They are broken up in
            documents: see :func:`escape_documents`.
        finds_documents: whether it finds documents in a prompt.
    """

    control_tokens: frozenset[str]
    finds_documents: bool

    def encode(self, text: str, *, add_special_tokens: bool = False) -> TokenizedText:
        """Return the token ids of ``text``."""
        ...

    def lay_out(
        self,
        messages: Sequence[ChatMessage],
        documents: Sequence[PromptDocument],
        *,
        other: Sequence[ChatMessage] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Return a chat as token ids, with the spans of ``documents``, which are in its order.

        With ``other`` messages, return the common beginning of both prompts, which has no messages. ``settings`` are
        the other fields of the request.
        """
        ...


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """Characters ``[start, end)`` of a prompt that show a document."""

    doc_id: DocId
    start: int
    end: int


class PromptDocument(NamedTuple):
    """A document as a chat shows it, after ``num_others`` other occurrences of its text since the document before."""

    doc_id: DocId
    text: str
    num_others: int = 0


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt ready to be sent: its messages, its token ids and their segments.

    ``acls`` are those of the documents in it that not everybody may read.
    """

    messages: tuple[ChatMessage, ...]
    token_ids: tuple[int, ...]
    segments: tuple[PromptSegment, ...]
    acls: frozenset[tuple[str, ...]] = frozenset()


def acls_of(documents: Iterable[Document]) -> frozenset[tuple[str, ...]]:
    """Return who may read ``documents``: the groups of each that not everybody may."""
    return frozenset(tuple(document.acl) for document in documents if document.acl is not None)


def locate_documents(
    text: str, documents: Iterable[tuple[DocId, str]], questions: Iterable[str] = ()
) -> list[DocumentSpan]:
    """Return where documents are shown in ``text``, in text order and without overlap.

    Longer documents are placed first, so that one which contains another keeps its characters. A text that is shown
    twice under two ids takes two places, an id with several texts the place of the longest. What one of ``questions``
    quotes of a document is not that document, and a text of a few characters that is a part of a word is none: "no" in
    "know". Documents that ``text`` does not hold are left out.
    """
    ids: dict[str, list[DocId]] = {}
    for doc_id, shown in documents:
        ids.setdefault(shown.strip(), []).append(doc_id)
    ids.pop("", None)
    quoting = (q for q in map(str.strip, questions) if any(len(shown) < len(q) and shown in q for shown in ids))
    places = _Places(text)
    placed: set[DocId] = set()
    for shown in sorted([*ids, *(dict.fromkeys(quoting).keys() - ids.keys())], key=lambda one: (-len(one), one)):
        if shown not in ids:
            places.take_last(shown)
            continue
        wanted = [doc_id for doc_id in ids[shown] if doc_id not in placed]
        placed.update(wanted[: places.take(shown, wanted)])
    return [DocumentSpan(doc_id, start, end) for start, end, doc_id in places.taken if doc_id is not None]


_SHORT_CHARS = 32
"""A document of fewer characters may stand in a prompt as a part of a word."""


class _Places:
    """The places of a text that are taken, in their order; None takes one that is no document's."""

    def __init__(self, text: str) -> None:
        self.taken: list[tuple[int, int, DocId | None]] = []
        self._text = text

    def take(self, shown: str, doc_ids: Sequence[DocId]) -> int:
        """Give the first free places of ``shown`` to ``doc_ids``, in their order; return how many there were."""
        start, num_taken = 0, 0
        while num_taken < len(doc_ids) and (start := self._text.find(shown, start)) >= 0:
            if self._is_within_a_word(start, start + len(shown)):
                start += 1
                continue
            if self._try(start, start + len(shown), doc_ids[num_taken]):
                num_taken += 1
            start = self.taken[self._num_before(start + len(shown)) - 1][1]
        return num_taken

    def _is_within_a_word(self, start: int, end: int) -> bool:
        """Return whether so short a text is a part of a word: a document that says "no" is not shown by "know"."""
        if end - start >= _SHORT_CHARS:
            return False
        return any(0 < edge < len(self._text) and self._text[edge - 1 : edge + 1].isalnum() for edge in (start, end))

    def take_last(self, shown: str) -> None:
        """Keep the last place of ``shown`` from every document, if it is free."""
        if (start := self._text.rfind(shown)) >= 0:
            self._try(start, start + len(shown), None)

    def _try(self, start: int, end: int, doc_id: DocId | None) -> bool:
        before = self._num_before(end)
        if before and self.taken[before - 1][1] > start:
            return False
        self.taken.insert(before, (start, end, doc_id))
        return True

    def _num_before(self, end: int) -> int:
        return bisect_left(self.taken, end, key=lambda place: place[0])


def escape_documents(
    control_tokens: frozenset[str], messages: Sequence[ChatMessage], documents: Sequence[tuple[DocId, str]]
) -> tuple[Sequence[ChatMessage], Sequence[tuple[DocId, str]]]:
    """Return messages and their documents (id, text as shown) without ``control_tokens`` in the documents.

    A document that says ``<|im_end|>`` would end the message that shows it, and could continue in another role:
    there is a space in the word then, ``< |im_end|>``, which makes it text. What is no document stays as it is.
    """
    texts = (text for message in messages for text in texts_of(message.get("content")))
    if not control_tokens or not any(_control_pattern(control_tokens).search(text) for text in texts):
        return messages, documents
    stripped = sorted({shown.strip() for _, shown in documents}, key=len, reverse=True)
    escapes = {shown: escaped for shown in stripped if (escaped := _escaped(shown, control_tokens)) != shown}
    if not escapes:
        return messages, documents
    changed = [
        {**m, "content": _replaced(m["content"], escapes)} if texts_of(m.get("content")) else m for m in messages
    ]
    return changed, [(doc_id, _replaced(shown, escapes)) for doc_id, shown in documents]


def texts_of(content: Any) -> list[str]:
    """Return the texts of a message's content: a string, a list of parts, or nothing."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def has_other_than_text(content: Any) -> bool:
    """Return whether a message's content shows an image, a sound or anything else that is no text."""
    if not isinstance(content, list | tuple):
        return not isinstance(content, str | None)
    return not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)


def _replaced(content: Any, escapes: Mapping[str, str]) -> Any:
    if not isinstance(content, str):
        return [{**part, "text": _replaced(part["text"], escapes)} if texts_of([part]) else part for part in content]
    for shown, escaped in escapes.items():
        content = content.replace(shown, escaped)
    return content


def _escaped(text: str, control_tokens: frozenset[str]) -> str:
    pattern = _control_pattern(control_tokens)
    while pattern.search(text):  # of two that overlap one may be left
        text = pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
    return text


@lru_cache(maxsize=8)
def _control_pattern(control_tokens: frozenset[str]) -> re.Pattern[str]:
    """Return what finds control tokens; of one character, or with white space in them, they could not be broken up."""
    breakable = (token for token in control_tokens if len(token) > 1 and not re.search(r"\s", token))
    return re.compile("|".join(map(re.escape, sorted(breakable, key=len, reverse=True))) or r"(?!)")


def shown_documents(
    messages: Iterable[ChatMessage], documents: Iterable[tuple[DocId, str]], questions: Iterable[str] = ()
) -> list[PromptDocument]:
    """Return those of ``documents`` (id, text as shown) that a chat shows, in its order.

    They are looked for in every message but the assistant's, once in each: a chat may show one again. What one of
    ``questions`` quotes is not a document.
    """
    documents, questions = list(documents), list(questions)
    return _shown(
        (text, [] if message.get("role") == "assistant" else locate_documents(text, documents, questions))
        for message in messages
        for text in texts_of(message.get("content"))
    )


def _shown(parts: Iterable[tuple[str, Sequence[DocumentSpan]]]) -> list[PromptDocument]:
    """Return the documents of a chat, whose texts have them at the spans."""
    shown: list[PromptDocument] = []
    between = ""
    for text, spans in parts:
        end = 0
        for span in spans:
            between += text[end : span.start]
            of_document = text[span.start : span.end]
            shown.append(PromptDocument(span.doc_id, of_document, between.count(of_document)))
            between, end = "", span.end
        between += text[end:]
    return shown


def render_chat(
    tokenizer: PromptTokenizer,
    messages: Sequence[ChatMessage],
    documents: Iterable[tuple[DocId, str]],
    *,
    questions: Iterable[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> RenderedPrompt:
    """Return a chat as tokens with the spans of those ``documents`` (id, text as shown) that it shows.

    See :func:`shown_documents` for ``questions``; ``settings`` are the other fields of the request.
    """
    check_sendable(list(messages), "the prompt")
    messages, shown = escape_documents(tokenizer.control_tokens, messages, list(documents))
    return tokenizer.lay_out(messages, shown_documents(messages, shown, questions), settings=settings)


def render_known(
    tokenizer: PromptTokenizer,
    one: Sequence[ChatMessage],
    other: Sequence[ChatMessage],
    documents: Iterable[tuple[DocId, str]],
    settings: Mapping[str, Any] | None = None,
) -> RenderedPrompt:
    """Return the common beginning of two prompts, as tokens that every prompt with that beginning begins with.

    ``one`` and ``other`` differ in all that is not known yet, from its first character on.
    """
    given = list(documents)
    check_sendable([list(one), list(other)], "the prompt")
    one, shown = escape_documents(tokenizer.control_tokens, one, given)
    other, _ = escape_documents(tokenizer.control_tokens, other, given)
    return tokenizer.lay_out(one, shown_documents(one, shown), other=other, settings=settings)


def common_prefix_len(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def check_prompt_fits(num_prompt_tokens: int, max_model_len: int, num_output_tokens: int = 1) -> None:
    """Refuse a prompt that leaves no room for ``num_output_tokens`` in a context window of ``max_model_len`` tokens.

    Raises:
        PromptTooLongError: with the value, the limit and the cure.
    """
    if num_prompt_tokens + num_output_tokens > max_model_len:
        num_remaining = max_model_len - num_prompt_tokens
        fix = f"lower max_tokens to at most {num_remaining}, " if 0 < num_remaining < num_output_tokens else ""
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens and asks for {num_output_tokens} more, the model's context "
            f"window holds {max_model_len}: {fix}retrieve fewer or shorter documents, shorten the question, keep less "
            "of the conversation's history, or launch the engine with a larger max_model_len"
        )


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """How a prompt is laid out: ``static_prefix`` is the system message, documents and question are the user's.

    The documents come before the question, so that requests about the same documents share a prefix of tokens.
    ``document_format`` holds ``{text}`` (and may hold ``{doc_id}``), ``question_format`` holds ``{question}``.
    ``relevance_hint``, ``"Most relevant first: {order}"``, is shown before the question where the documents do not
    stand in the order of their relevance; it names them by ``{doc_id}`` where the prompt does, else by their number.

    A document is all of its ``document_format`` here, "Document: " too: that comes and goes with the document, and with
    a ``{doc_id}`` in it belongs to no other. Where documents are recognised by their text alone, as in a chain, their
    frame is unknown: they count a few tokens less.

    Raises:
        ConfigError: a format lacks its placeholder.
    """

    static_prefix: str = "Answer the question from the documents."
    document_format: str = "Document: {text}"
    document_separator: str = "\n\n"
    question_format: str = "Question: {question}"
    relevance_hint: str | None = None

    def __post_init__(self) -> None:
        if self.relevance_hint is not None and self.relevance_hint.count("{order}") != 1:
            raise ConfigError(f"relevance_hint is {self.relevance_hint!r}; it must hold {{order}} once")
        for name, placeholder in (("document_format", "{text}"), ("question_format", "{question}")):
            if (value := getattr(self, name)).count(placeholder) != 1:
                raise ConfigError(f"{name} is {value!r}; it must hold {placeholder} once")

    def document_text(self, document: Document) -> str:
        """Return a document as the prompt shows it."""
        before, after = self.document_format.split("{text}")
        text = document.text.strip()
        return f"{before.replace('{doc_id}', document.doc_id)}{text}{after.replace('{doc_id}', document.doc_id)}"

    def context(self, documents: Iterable[Document]) -> str:
        """Return all documents as the prompt shows them."""
        return self.document_separator.join(self.document_text(d) for d in documents)

    def hint(self, documents: Sequence[Document], relevance: Sequence[Document] | None) -> str:
        """Return the line that names ``documents`` by ``relevance``, most relevant first; empty where it says nothing.

        That is without a ``relevance_hint``, and where they stand in that order already.
        """
        if self.relevance_hint is None or relevance is None:
            return ""
        places = {document.doc_id: i for i, document in enumerate(documents)}
        order = [places[document.doc_id] for document in relevance if document.doc_id in places]
        if order == sorted(order):
            return ""
        is_named = "{doc_id}" in self.document_format
        return self.relevance_hint.replace(
            "{order}", ", ".join(documents[i].doc_id if is_named else str(i + 1) for i in order)
        )

    def messages(
        self, documents: Sequence[Document], question: str, *, relevance: Sequence[Document] | None = None
    ) -> list[ChatMessage]:
        """Return the messages of the OpenAI protocol: the static prefix, then documents and question.

        ``relevance`` are the documents as they were retrieved, for the ``relevance_hint``.

        Raises:
            PromptError: the question is empty.
        """
        return self.messages_of(self.context(documents), question, self.hint(documents, relevance))

    def messages_of(self, context: str, question: str, hint: str = "") -> list[ChatMessage]:
        """Return the messages about documents that are a text already; see :meth:`messages`."""
        if not question.strip():
            raise PromptError("the question is empty: ask something")
        asked = self.question_format.replace("{question}", question.strip())
        content = self.document_separator.join(part for part in (context, hint, asked) if part)
        prefix: list[ChatMessage] = [{"role": "system", "content": self.static_prefix}] if self.static_prefix else []
        return [*prefix, {"role": "user", "content": content}]

    def render(
        self,
        tokenizer: PromptTokenizer,
        documents: Sequence[Document],
        question: str,
        *,
        relevance: Sequence[Document] | None = None,
        max_prompt_tokens: int | None = None,
    ) -> RenderedPrompt:
        """Return the prompt as token ids, with the span of every document; see :meth:`messages`.

        The ``tokenizer`` is an engine's, which asks its server. One without RAGCache tells no spans.

        Raises:
            PromptError: the question is empty, or the chat template does not show a document as it was given.
            PromptTooLongError: more than ``max_prompt_tokens`` tokens.
        """
        messages: Sequence[ChatMessage] = self.messages(documents, question, relevance=relevance)
        check_sendable(list(messages), "the prompt")
        shown: Sequence[tuple[DocId, str]] = [(d.doc_id, self.document_text(d)) for d in documents]
        messages, shown = escape_documents(tokenizer.control_tokens, messages, shown)
        *before, (last,) = (texts_of(message["content"]) for message in messages)
        context = self.document_separator.join(text for _, text in shown)
        spans = locate_documents(last[: len(context)], shown)
        prompt = tokenizer.lay_out(messages, _shown([*((text, []) for (text,) in before), (last, spans)]))
        if max_prompt_tokens is not None:
            check_prompt_fits(len(prompt.token_ids), max_prompt_tokens, num_output_tokens=0)
        found = {s.doc_id for s in prompt.segments if s.kind is SegmentKind.DOCUMENT}
        if tokenizer.finds_documents and (missing := {d.doc_id for d in documents} - found):
            raise PromptError(
                f"the chat template does not show document {min(missing)!r} as it was given: use a "
                "document_format of plain text, and documents that are not empty"
            )
        labels = {document.doc_id: document.label for document in documents}
        segments = tuple(replace(segment, label=labels.get(segment.doc_id or "")) for segment in prompt.segments)
        return replace(prompt, segments=segments, acls=acls_of(documents))
