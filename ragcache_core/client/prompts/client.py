"""Prompts for one engine: how they begin, which documents they show, what their requests carry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ragcache_core.client.ordering.document_order import RememberedOrders
from ragcache_core.client.prompts.bound_prompt import BoundPrompt, FormatDocuments, bind
from ragcache_core.client.prompts.layout_learner import LayoutLearner
from ragcache_core.client.prompts.request_plan import (
    RememberedDocuments,
    RequestPlan,
    as_plain_text,
    changed_messages,
    plan_chat,
    plan_rendered,
    server_renders,
)
from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_core.client.request_scope import current_scope
from ragcache_core.errors import TokenizerUnavailableError
from ragcache_core.prompt import ChatMessage, PromptTokenizer, RenderedPrompt, escape_documents
from ragcache_core.types import Document
from ragcache_core.wire import ChunkReuseOption, check_sendable, read_chunk_reuse


class PromptClient:
    """Lays out prompts as one engine's token ids, and finds the documents that they show."""

    def __init__(
        self, tokenizer: PromptTokenizer | TokenizerUnavailableError, *, max_model_len: int, reordered: RememberedOrders
    ) -> None:
        """``tokenizer`` may be the error that says why there is none; ``reordered`` are orders that were changed."""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._reordered = reordered
        self._remembered = RememberedDocuments()
        self._learner = LayoutLearner(self._tokenizer_at_hand(), max_model_len=max_model_len)
        self._bound: BoundPrompt | None = None

    @property
    def tokenizer(self) -> PromptTokenizer:
        """See ``Engine.tokenizer``."""
        if isinstance(self._tokenizer, TokenizerUnavailableError):
            raise self._tokenizer
        return self._tokenizer

    def tokenize(self, prompt: str | Sequence[ChatMessage]) -> list[int]:
        """See ``Engine.tokenize``."""
        tokenizer = self.tokenizer
        check_sendable(prompt, "the prompt")
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt, add_special_tokens=True).token_ids)
        return list(tokenizer.encode(tokenizer.render(prompt)).token_ids)

    def remember_documents(
        self,
        documents: Iterable[Document],
        shown: Callable[[Document], str] | None = None,
        *,
        query: str | None = None,
    ) -> None:
        """See ``Engine.remember_documents``."""
        self._remembered.add(documents, shown, query=query)

    def bind_prompt(
        self,
        prompt: Any,
        format_docs: FormatDocuments | None = None,
        *,
        context: str = "context",
        question: str = "question",
        is_default: bool = True,
        is_prefilled: bool = True,
    ) -> BoundPrompt:
        """See ``Engine.bind_prompt``."""
        tokenizer, limit = self._tokenizer_at_hand(), self._max_model_len
        names = {"context": context, "question": question}
        bound = bind(prompt, format_docs, tokenizer, max_model_len=limit, is_prefilled=is_prefilled, **names)
        if is_default:
            self._bound = bound
        return bound

    @property
    def bound_prompt(self) -> BoundPrompt | None:
        """The prompt bound last, or else the one learned from the requests so far."""
        return self._bound or self._learner.prompt

    def plan_rendered(self, prompt: RenderedPrompt, *, chunk_reuse: ChunkReuseOption = None) -> RequestPlan:
        """Return what a request for a prompt that is laid out carries; with the errors of :meth:`plan_chat`."""
        limit = self._max_model_len
        return plan_rendered(prompt, max_model_len=limit, reordered=self._reordered, chunk_reuse=chunk_reuse)

    def plan_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        documents: Iterable[Document] | None = None,
        settings: Mapping[str, Any] | None = None,
        chunk_reuse: ChunkReuseOption = None,
    ) -> RequestPlan:
        """Return what a chat request carries besides ``messages``: token ids, and the spans of its documents.

        ``documents`` are found by their text, and so are those that were remembered, and those that a framework's
        retrievers returned lately. ``settings`` are the other fields of the request (tools, ``extra_body``, ...).
        Requests with tools or settings of the chat template, messages other than plain text, and engines whose
        tokenizer is not at hand are left to the server: the engine knows no documents of theirs to reuse, and their
        plan is empty, or holds the messages without the documents' control tokens. ``chunk_reuse`` is that of
        ``stream``.

        Raises:
            PromptTooLongError: the prompt does not fit into the context window.
            ConfigError: ``chunk_reuse`` is not what it may be, or a message or setting cannot be sent: text that is no
                Unicode, a number that is not finite or beyond 64 bits.
        """
        chunk_reuse = read_chunk_reuse(chunk_reuse)
        messages = [as_plain_text(message) for message in messages]
        check_sendable({**(settings or {}), "messages": messages}, "the request")
        if isinstance(self._tokenizer, TokenizerUnavailableError):
            return RequestPlan()
        given = [(d.doc_id, d.text) for d in documents or ()]
        known = {doc_id for doc_id, _ in given}
        seen = dict.fromkeys((*self._remembered.shown(), *RETRIEVED.shown()))
        shown = given + [(doc_id, text) for doc_id, text in seen if doc_id not in known]
        if server_renders(messages, settings or {}):
            return RequestPlan(changed_messages(messages, escape_documents(self._tokenizer, messages, shown)))
        searches = self._remembered.searches()
        if self._bound is None:
            is_prefilled = current_scope() is None  # inside a scope the whole answer is asked ahead
            self._learner.see(messages, searches, is_prefilled=is_prefilled)
        return plan_chat(
            self._tokenizer,
            messages,
            shown,
            max_model_len=self._max_model_len,
            questions=[search.query for search in (*searches, *RETRIEVED.searches()) if search.query],
            reordered=self._reordered,
            chunk_reuse=chunk_reuse,
        )

    def _tokenizer_at_hand(self) -> PromptTokenizer | None:
        return None if isinstance(self._tokenizer, TokenizerUnavailableError) else self._tokenizer
