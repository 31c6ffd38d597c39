"""What a server's door knows of prompts: how they begin, which documents they show, what a request of them carries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ragcache_core.client.ordering.document_order import RememberedOrders
from ragcache_core.client.prompts.bound_prompt import BoundPrompt, FormatDocuments, bind
from ragcache_core.client.prompts.layout_learner import LayoutLearner
from ragcache_core.client.prompts.request_plan import (
    RememberedDocuments,
    RequestPlan,
    changed_messages,
    plan_chat,
    server_renders,
)
from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_core.client.request_scope import current_scope
from ragcache_core.errors import TokenizerUnavailableError
from ragcache_core.prompt import ChatMessage, PromptTokenizer, escape_documents
from ragcache_core.types import Document
from ragcache_core.wire import ChunkReuseOption, check_sendable, read_chunk_reuse


class PromptClient:
    """The part of :class:`~ragcache_core.client.engine_client.EngineClient` that lays prompts out as token ids."""

    max_model_len: int
    _tokenizer: PromptTokenizer | TokenizerUnavailableError
    _remembered: RememberedDocuments
    _reordered: RememberedOrders
    _learner: LayoutLearner
    _bound: BoundPrompt | None

    @property
    def tokenizer(self) -> PromptTokenizer:
        """The model's tokenizer and chat template.

        Raises:
            TokenizerUnavailableError: it is not at hand here.
        """
        if isinstance(self._tokenizer, TokenizerUnavailableError):
            raise self._tokenizer
        return self._tokenizer

    def tokenize(self, prompt: str | Sequence[ChatMessage]) -> list[int]:
        """Return the token ids of a text (with the model's special tokens) or of messages, as the server has them.

        Raises:
            TokenizerUnavailableError: the model's tokenizer is not at hand here.
            ConfigError: it is no Unicode text.
        """
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
        """Note what was retrieved: a later chat request that holds such a text is known to show that document.

        ``documents`` are those of one search, best first, and ``query`` is what was asked: from the request that shows
        them the layout of the prompt is learned, unless one is bound.
        """
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
        """Return the prompt of a chain whose documents may be prefilled while they are still searched for.

        Of one that shows the question before the documents only the static part can be prefilled; a warning says so.

        Args:
            prompt: a prompt template of LangChain or LlamaIndex, a ``PromptLayout``, or a function of context and
                question that returns messages.
            format_docs: makes the context of the framework's documents, as in the chain. A ``PromptLayout`` needs none.
            context: the template's name of the documents (LlamaIndex: ``context_str``).
            question: the template's name of the question (LlamaIndex: ``query_str``).
            is_default: it is the prompt of every retriever that has none of its own.
            is_prefilled: no more than a prefill is asked ahead of a search's end; of a whole answer, no warning.

        Raises:
            ConfigError: ``prompt`` cannot make messages of these variables.
        """
        tokenizer, limit = self._tokenizer_at_hand(), self.max_model_len
        names = {"context": context, "question": question}
        bound = bind(prompt, format_docs, tokenizer, max_model_len=limit, is_prefilled=is_prefilled, **names)
        if is_default:
            self._bound = bound
        return bound

    @property
    def bound_prompt(self) -> BoundPrompt | None:
        """The prompt bound last, or else the one learned from the requests so far."""
        return self._bound or self._learner.prompt

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
            is_prefilled = current_scope() is None  # who asks in a name asks for the whole answer ahead
            self._learner.see(messages, searches, is_prefilled=is_prefilled)
        return plan_chat(
            self._tokenizer,
            messages,
            shown,
            max_model_len=self.max_model_len,
            questions=[search.query for search in (*searches, *RETRIEVED.searches()) if search.query],
            reordered=self._reordered,
            chunk_reuse=chunk_reuse,
        )

    def _tokenizer_at_hand(self) -> PromptTokenizer | None:
        return None if isinstance(self._tokenizer, TokenizerUnavailableError) else self._tokenizer
