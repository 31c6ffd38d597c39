"""What of a prompt is known before the question's documents are final: the static part and the documents so far."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Protocol, get_origin

from ragcache_core.client.prompts.chat_request import is_text_only
from ragcache_core.client.prompts.kv_scope import KVScope
from ragcache_core.errors import ConfigError, PromptError
from ragcache_core.ordering import static_prefix_digest
from ragcache_core.prompt import (
    ChatMessage,
    PromptLayout,
    PromptTokenizer,
    RenderedPrompt,
    acls_of,
    num_alike,
    render_known,
)
from ragcache_core.types import DocId, Document

logger = logging.getLogger(__name__)

MIN_PREFILL_TOKENS = 16
"""Shorter beginnings are not worth a request: vLLM caches whole blocks, and this is the smallest usual one."""

_REMADE_AFTER_S = 10.0
"""What a prompt begins with may change (a date, say), and making it may have failed: it is made again then."""

UNKNOWN = ("Xqz", "Jvw kuy")
"""Two texts in place of one that is not known yet: other first characters, other lengths."""

_ROLES = {"human": "user", "ai": "assistant"}
_SHOWN = ("<first>", "another")
_MAX_OPENING_CHARS = 60

FormatDocuments = Callable[[Any], Any]
"""The user's own: the framework's documents as the text that the prompt shows."""

Drafts = tuple[list[ChatMessage], list[ChatMessage]]
"""The messages of a prompt twice; they differ in all that is not known yet, from its first character on."""


class DraftedPrompt(Protocol):
    """A prompt whose messages can be made, but for the question."""

    def drafts(self, shown_documents: Sequence[Any], documents: Sequence[Document]) -> Drafts:
        """Return the messages about these documents, twice."""
        ...

    def texts(self, documents: Sequence[Document]) -> list[tuple[DocId, str]]:
        """Return the documents as the messages show them."""
        ...


class BoundPrompt:
    """The beginning of a chain's prompt, as tokens, while its question's documents are searched. Thread-safe.

    Attributes:
        is_question_first: something that is not known while the search runs (the question, a history of the chat)
            stands before the documents, so that only the static part before it can be prefilled.
        has_documents: whether any of what is known are the documents.
        scope: what separates the KV of the requests that show it; ``None`` where that was not said.
    """

    def __init__(
        self,
        prompt: DraftedPrompt,
        tokenizer: PromptTokenizer | None,
        *,
        max_model_len: int,
        is_question_first: bool = False,
        has_documents: bool = True,
        is_renderable: Callable[[Sequence[ChatMessage]], bool] = is_text_only,
        scope: KVScope | None = None,
    ) -> None:
        """Bind ``prompt``; without a ``tokenizer`` nothing of it is known.

        ``is_renderable`` says whether the server renders messages as ``tokenizer`` does.
        """
        self.is_question_first = is_question_first
        self.has_documents = has_documents and not is_question_first
        self.scope = scope
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._is_renderable = is_renderable
        self._max_model_len = max_model_len
        self._warned = Lock()
        self._made_s = -math.inf
        self._static_prefix: bytes | None = None

    def static_prefix(self, shown_documents: Sequence[Any], documents: Sequence[Document]) -> bytes | None:
        """Return what names the tokens before the documents in the cache, as they were of late; None: not known.

        Cheap: the prompt is made by the first call and every ten seconds or so, of one document, and whenever
        :meth:`prefix` is asked for.
        """
        if time.monotonic() - self._made_s >= _REMADE_AFTER_S:
            self.prefix(shown_documents[:1], documents[:1])
        return self._static_prefix

    def prefix(self, shown_documents: Sequence[Any], documents: Sequence[Document]) -> RenderedPrompt | None:
        """Return the tokens that a request about these documents, in this order, begins with, whatever it asks.

        ``shown_documents`` are the framework's, for the user's own formatting; ``documents`` are the same ones. None
        where nothing is worth a prefill. Never fails: a prompt that cannot be made is not speculated on, and said once.
        """
        self._made_s = time.monotonic()
        if self._tokenizer is None:
            return None
        try:
            one, other = self._prompt.drafts(shown_documents, documents)
            if not (self._is_renderable(one) and self._is_renderable(other)):
                return None  # the server renders it
            known = render_known(self._tokenizer, one, other, self._prompt.texts(documents))
            known = replace(known, acls=acls_of(documents))
        except Exception as error:  # the user's own code may raise anything, and will do so again in the chain itself
            if self._warned.acquire(blocking=False):
                logger.warning(
                    "No prefill while the search runs: the prompt of %d documents cannot be made before its question "
                    "is asked (%s: %s); bind the prompt and the format_docs that the chain uses",
                    len(documents),
                    type(error).__name__,
                    error,
                )
            return None
        self._static_prefix = static_prefix_digest(known.token_ids, known.segments)
        return known if MIN_PREFILL_TOKENS <= len(known.token_ids) < self._max_model_len else None


def bind(
    prompt: Any,
    format_docs: FormatDocuments | None,
    tokenizer: PromptTokenizer | None,
    *,
    max_model_len: int,
    context: str = "context",
    question: str = "question",
    is_prefilled: bool = True,
    scope: KVScope | None = None,
) -> BoundPrompt:
    """Return ``prompt`` bound; a warning says so if its question comes first. See ``Engine.bind_prompt``.

    Raises:
        ConfigError: ``prompt`` is nothing that makes messages, it has no variable ``context``, or no ``format_docs``
            says how it shows documents.
    """
    drafted = _drafted(prompt, format_docs, context, question)
    early = drafted.unknown_before_context(tokenizer.render) if tokenizer is not None else []
    if early and is_prefilled:
        warn_question_first(early)
    return BoundPrompt(drafted, tokenizer, max_model_len=max_model_len, is_question_first=bool(early), scope=scope)


def warn_question_first(names: Sequence[str], *, opening: str = "", retriever: str | None = None) -> None:
    """Warn that a prompt's documents cannot be prefilled, and say why and what to do.

    Args:
        names: the variables before the documents.
        opening: the static text that the prompt begins with, where the prompt was learned from a request.
        retriever: the name of the retriever, where it is known.
    """
    logger.warning(
        "The prompt%s shows %s before the documents%s. They cannot be prefilled during the search, and no other "
        "question can reuse their KV: put the context before the question, and the chat history after it",
        "" if not opening else f" that begins with {opening[:_MAX_OPENING_CHARS]!r}",
        " and ".join(repr(name) for name in names),
        "" if retriever is None else f" of {retriever}",
    )


class _Template:
    """Messages made by a function of the context and of what is not known yet."""

    def __init__(
        self,
        fill: Callable[[str, Mapping[str, int]], list[ChatMessage]],
        unknown: Sequence[str],
        show: Callable[[Sequence[Any], Sequence[Document]], str],
        text_of: Callable[[Document], str],
    ) -> None:
        self._fill = fill
        self._unknown = tuple(unknown)
        self._show = show
        self._text_of = text_of

    def drafts(self, shown_documents: Sequence[Any], documents: Sequence[Document]) -> Drafts:
        context = self._show(shown_documents, documents)
        if not isinstance(context, str):
            raise PromptError(f"format_docs returned {type(context).__name__}, not a string")
        one, other = (self._fill(context, dict.fromkeys(self._unknown, i)) for i in (0, 1))
        return one, other

    def texts(self, documents: Sequence[Document]) -> list[tuple[DocId, str]]:
        return [(d.doc_id, self._text_of(d)) for d in documents]

    def unknown_before_context(self, render: Callable[[Sequence[ChatMessage]], str]) -> list[str]:
        """Return the variables that stand before the context in the rendered prompt."""
        chosen = dict.fromkeys(self._unknown, 0)
        try:
            plain = render(self._fill(_SHOWN[0], chosen))
            start = num_alike(plain, render(self._fill(_SHOWN[1], chosen)))
            if start == len(plain):
                return []
            others = {name: render(self._fill(_SHOWN[0], {**chosen, name: 1})) for name in self._unknown}
        except Exception:  # will be said at the first prefix, with the documents that it is about
            return []
        return [name for name, other in others.items() if num_alike(plain, other) < start]


def _drafted(prompt: Any, format_docs: FormatDocuments | None, context: str, question: str) -> _Template:
    if isinstance(prompt, PromptLayout):
        return _of_layout(prompt, format_docs)
    if format_docs is None:
        raise ConfigError("format_docs is None: pass the function that makes the context of the retrieved documents")
    call: Any = format_docs if callable(format_docs) else getattr(format_docs, "invoke", None)
    if call is None:
        raise ConfigError(f"format_docs is {format_docs!r:.80}: pass a function of the retrieved documents")
    if (make := _maker(prompt)) is not None:
        fill, unknown = _filler(prompt, make, context, question)
    elif callable(prompt):
        fill, unknown = _caller(prompt), [question]
    else:
        raise ConfigError(
            f"{prompt!r:.80} is no prompt: pass a prompt template of LangChain or LlamaIndex, a PromptLayout, or a "
            "function of context and question that returns messages"
        )
    return _Template(fill, unknown, lambda shown, _: call(shown), lambda d: d.text)


def _of_layout(layout: PromptLayout, format_docs: FormatDocuments | None) -> _Template:
    def fill(context: str, unknown: Mapping[str, int]) -> list[ChatMessage]:
        asked = unknown["question"]
        hint = (layout.relevance_hint or "") if asked else ""  # shown where the documents are reordered: not known here
        return layout.messages_of(context, UNKNOWN[asked], hint)

    def show(shown: Sequence[Any], documents: Sequence[Document]) -> Any:
        return format_docs(shown) if format_docs is not None else layout.context(documents)

    return _Template(fill, ["question"], show, layout.document_text)


def _caller(prompt: Callable[..., Any]) -> Callable[[str, Mapping[str, int]], list[ChatMessage]]:
    def fill(context: str, unknown: Mapping[str, int]) -> list[ChatMessage]:
        (asked,) = unknown.values()
        return [_message(m) for m in prompt(context, UNKNOWN[asked])]

    return fill


def _maker(prompt: Any) -> Callable[..., Any] | None:
    """Return what makes messages of a template's variables."""
    if callable(make := getattr(prompt, "format_messages", None)) and not inspect.isclass(prompt):
        return make  # type: ignore[no-any-return]
    if callable(make := getattr(prompt, "format_prompt", None)) and not inspect.isclass(prompt):
        return lambda **variables: make(**variables).to_messages()
    return None


def _filler(
    prompt: Any, make: Callable[..., Any], context: str, question: str
) -> tuple[Callable[[str, Mapping[str, int]], list[ChatMessage]], list[str]]:
    variables, unknown = _variables(prompt)
    if variables and context not in variables:
        raise ConfigError(
            f"the prompt has no variable {context!r}, it has {sorted(variables)}: pass context= with the name of the "
            "variable that holds the documents"
        )
    types: Mapping[str, Any] = getattr(prompt, "input_types", None) or {}
    lists = {name for name, kind in types.items() if get_origin(kind) is list}
    names = sorted((unknown or {question}) - {context})

    def fill(text: str, chosen: Mapping[str, int]) -> list[ChatMessage]:
        values = {name: _history(i) if name in lists else UNKNOWN[i] for name, i in chosen.items()}
        return [_message(m) for m in make(**{context: text, **values})]

    return fill, names


def _variables(prompt: Any) -> tuple[set[str], set[str]]:
    """Return the names that a template takes, and those that the caller of the chain gives."""
    if (inputs := getattr(prompt, "input_variables", None)) is not None:  # LangChain
        partial: Mapping[str, Any] = getattr(prompt, "partial_variables", None) or {}
        optional = {name for name in getattr(prompt, "optional_variables", ()) if not partial.get(name)}
        return {*inputs, *optional, *partial}, {*inputs, *optional}
    names = set(getattr(prompt, "template_vars", None) or ())  # LlamaIndex
    mapped: Mapping[str, str] = getattr(prompt, "template_var_mappings", None) or {}
    made = {*(getattr(prompt, "function_mappings", None) or {}), *(getattr(prompt, "kwargs", None) or {})}
    return {*names, *mapped, *made}, ({*names} - {*mapped.values()} | {*mapped}) - made


def _history(chosen: int) -> list[tuple[str, str]]:
    return [("human", UNKNOWN[1]), ("ai", UNKNOWN[0])] if chosen else []


def _message(message: Any) -> ChatMessage:
    """Return a message of a framework as the OpenAI protocol's, as the framework's own client sends it."""
    if isinstance(message, Mapping):
        return message
    role: Any = getattr(message, "role", None) or getattr(message, "type", None)
    role = getattr(role, "value", role)
    blocks = getattr(message, "blocks", None)  # LlamaIndex
    content = message.content if blocks is None else "".join(block.text for block in blocks)
    extra: Mapping[str, Any] = getattr(message, "additional_kwargs", None) or {}
    role = extra.get("__openai_role__") or _ROLES.get(role, role)
    name = getattr(message, "name", None) or extra.get("name")
    return {"role": role, "content": content, **({"name": name} if name is not None else {})}
