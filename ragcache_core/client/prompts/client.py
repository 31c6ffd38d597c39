"""Prompts for one engine: how they begin, which documents they show, what their requests carry."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from threading import Lock
from typing import Any

from ragcache_core.client.ordering.document_order import RememberedOrders
from ragcache_core.client.prompts.bound_prompt import BoundPrompt, FormatDocuments, KVScope, KVScopes, bind
from ragcache_core.client.prompts.chat_request import (
    AskedChat,
    AskTokens,
    ChatRequest,
    ServerTokens,
    read_chat,
    segments_in,
)
from ragcache_core.client.prompts.layout_learner import LayoutLearner, rearranged
from ragcache_core.client.prompts.repeated_documents import without_repeats
from ragcache_core.client.prompts.request_plan import (
    DocumentFacts,
    RememberedDocuments,
    RequestPlan,
    as_plain_text,
    changed_messages,
    plan_chat,
    plan_rendered,
    plan_tokens,
)
from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_core.client.prompts.tokenizer import ModelTokenizer
from ragcache_core.client.prompts.tool_calls import ToolCalls
from ragcache_core.client.speculation.request_capture import current_scope
from ragcache_core.errors import PromptError, TokenizerUnavailableError
from ragcache_core.prompt import (
    ChatMessage,
    PromptTokenizer,
    RenderedPrompt,
    check_prompt_fits,
    escape_documents,
    render_chat,
    texts_of,
)
from ragcache_core.runtime.rights import joined_salt, rights_salt
from ragcache_core.types import DocId, Document, SegmentKind
from ragcache_core.wire import ChunkReuseOption, check_sendable, read_chunk_reuse


class PromptClient:
    """Lays out prompts as one engine's token ids, and finds the documents that they show.

    Attributes:
        facts: access groups and labels of the documents that were seen.
        remembered: the documents that ``Engine.remember_documents`` was told of.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer | TokenizerUnavailableError,
        *,
        max_model_len: int,
        reordered: RememberedOrders,
        ask_tokens: AskTokens,
        scopes: KVScopes,
    ) -> None:
        """``tokenizer`` may be the error that says why there is none; ``reordered`` are orders that were changed.

        ``ask_tokens`` asks the server for its tokens of a chat. ``scopes`` takes note of the requests' KV scopes.
        """
        self._tokenizer = tokenizer
        self._scopes = scopes
        self._max_model_len = max_model_len
        self._reordered = reordered
        self.facts = DocumentFacts(RETRIEVED.facts)
        self.remembered = RememberedDocuments(facts=self.facts)
        self._learner = LayoutLearner(self._tokenizer_at_hand(), max_model_len=max_model_len)
        self._bound: BoundPrompt | None = None
        self._lock = Lock()
        self._num_unnamed_chats = 0
        self._server = ServerTokens(ask_tokens)
        self._tool_calls = ToolCalls(self._server, scopes, max_model_len=max_model_len)

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

    def salt_of(self, prompt: RenderedPrompt, cache_salt: str | None) -> str | None:
        """Return the salt of a request for ``prompt`` with a ``cache_salt`` of its own."""
        salts = (cache_salt, self.facts.body(prompt.segments, prompt.acls).get("cache_salt"))
        return joined_salt(salt for salt in salts if salt is not None)

    def bind_prompt(
        self,
        prompt: Any,
        format_docs: FormatDocuments | None = None,
        *,
        is_default: bool = True,
        settings: Mapping[str, Any] | None = None,
        **how: Any,
    ) -> BoundPrompt:
        """See ``Engine.bind_prompt``; ``how`` are the further arguments of :func:`bind`."""
        tokenizer, scope = self._tokenizer_at_hand(), None if settings is None else self._scopes.read(settings)
        bound = bind(prompt, format_docs, tokenizer, max_model_len=self._max_model_len, scope=scope, **how)
        if is_default:
            self._bound = bound
        return bound

    @property
    def bound_prompt(self) -> BoundPrompt | None:
        """The prompt bound last, or else the one learned from the requests so far."""
        return self._bound or self._learner.prompt

    def prompt_for(self, query: str) -> BoundPrompt | None:
        """Return the prompt that will show what ``query`` finds: an agent's next one, or :attr:`bound_prompt`."""
        return self._tool_calls.prompt_for(query, self.bound_prompt)

    def note_answer(self, plan: RequestPlan, answer: Callable[[], ChatMessage]) -> None:
        """Remember the tool calls with which a model answered the request of ``plan``.

        ``answer`` returns its message as the next request will send it back.
        """
        if plan.asked is not None:
            self._tool_calls.add(plan.asked, answer())

    def plan_rendered(
        self,
        prompt: RenderedPrompt,
        *,
        settings: Mapping[str, Any] | None = None,
        chunk_reuse: ChunkReuseOption = None,
    ) -> RequestPlan:
        """Return what a request for a prompt that is laid out carries; with the errors of :meth:`plan_chat`."""
        limit = self._max_model_len
        plan = plan_rendered(
            prompt, self.facts, max_model_len=limit, reordered=self._reordered, chunk_reuse=chunk_reuse
        )
        return self._noted(plan, settings or {})

    def expect_settings(self, settings: Mapping[str, Any]) -> None:
        """Remember the settings of a framework's model that will send its requests to this engine."""
        self._scopes.expect(settings)

    def scope_of(self, settings: Mapping[str, Any]) -> KVScope:
        """Return what separates the KV of a request with these settings."""
        return self._scopes.read(settings)

    def _noted(self, plan: RequestPlan, settings: Mapping[str, Any]) -> RequestPlan:
        if any(segment.kind is SegmentKind.DOCUMENT for segment in plan.segments):
            self._scopes.note(settings)
        return plan

    def plan_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        documents: Iterable[Document] | None = None,
        settings: Mapping[str, Any] | None = None,
        chunk_reuse: ChunkReuseOption = None,
        deduplicates: bool = False,
    ) -> RequestPlan:
        """Return what a chat request carries besides ``messages``: token ids, and the spans of its documents.

        ``documents`` are found by their text, and so are those that were remembered, and those that a framework's
        retrievers returned lately. ``settings`` are the other fields of the request (tools, ``extra_body``, ...).
        ``chunk_reuse`` is that of ``stream``.

        With tools, or settings of the chat template, the server is asked once for each shape of chat whether it renders
        it in the same way. Where it does not, and where images are shown, it is asked for its tokens of each. What it
        does not tell, or cannot (:func:`read_chat`), is left to it, as is everything without a tokenizer: then no
        documents are known to the engine, and the plan is empty, or holds the messages without the documents' control
        tokens. With ``deduplicates`` a document that an earlier message shows is referred to: the plan holds the
        messages to be sent.

        Raises:
            PromptTooLongError: the prompt does not fit into the context window.
            ConfigError: ``chunk_reuse`` is not what it may be, or a message or setting cannot be sent: text that is no
                Unicode, a number that is not finite or beyond 64 bits.
        """
        chunk_reuse, settings = read_chunk_reuse(chunk_reuse), settings or {}
        messages = [as_plain_text(message) for message in messages]
        check_sendable({**settings, "messages": messages}, "the request")
        searches = self.remembered.searches()
        documents = None if documents is None else list(documents)
        self.facts.add(documents or ())
        shown = self._shown(documents, messages)
        questions = self._questions()
        sent: Sequence[ChatMessage] = without_repeats(messages, shown, questions) if deduplicates else messages
        if isinstance(self._tokenizer, TokenizerUnavailableError):
            return self._unnamed(messages, sent, shown)
        chat = read_chat(sent, settings)
        if chat is not None and chat.is_plain:
            if self._bound is None:
                is_prefilled = current_scope() is None  # inside a scope the whole answer is asked ahead
                self._learner.see(messages, searches, RETRIEVED.searches(), is_prefilled=is_prefilled)
            plan = plan_chat(
                self._tokenizer,
                sent,
                shown,
                self.facts,
                max_model_len=self._max_model_len,
                questions=questions,
                reordered=self._reordered,
                chunk_reuse=chunk_reuse,
            )
            body = {**changed_messages(messages, sent), **plan.extra_body}
            return self._noted(replace(plan, extra_body=body), settings)
        if chat is None or (prompt := self._prompt_of(self._tokenizer, chat, shown, questions)) is None:
            return self._unnamed(messages, escape_documents(self._tokenizer, sent, shown), shown)
        self._tool_calls.see(messages, searches)
        plan = plan_tokens(
            prompt,
            messages,
            self.facts,
            reordered=self._reordered,
            chunk_reuse=chunk_reuse,
            sends_tokens=not chat.has_media,
        )
        self._noted(plan, settings)
        if not (chat.tools and chat.is_ours):
            return plan
        ids = {segment.doc_id for segment in prompt.segments}
        tokenizer = self._tokenizer.of_chat(chat.tools, chat.variables)
        return replace(plan, asked=AskedChat(prompt.messages, settings, tokenizer, [d for d in shown if d[0] in ids]))

    @property
    def num_server_rendered_chats(self) -> int:
        """How many chats were left to the server, which does not say what their tokens are."""
        return self._num_unnamed_chats

    def _unnamed(
        self, messages: Sequence[ChatMessage], sent: Sequence[ChatMessage], shown: Sequence[tuple[DocId, str]]
    ) -> RequestPlan:
        """Return what a chat carries that the server renders: of its documents, who may read them."""
        with self._lock:
            self._num_unnamed_chats += 1
        found = []
        if self.facts.has_acls:
            found = [text for message in messages for text in texts_of(message.get("content"))]
        ids = {doc_id for doc_id, text in shown if text.strip() and any(text.strip() in each for each in found)}
        salt = rights_salt(self.facts.acls_of(ids))
        return RequestPlan({**changed_messages(messages, sent), **({} if salt is None else {"cache_salt": salt})})

    def _shown(self, documents: Iterable[Document] | None, messages: Iterable[ChatMessage]) -> list[tuple[DocId, str]]:
        """Return what documents ``messages`` may show, as they would show them."""
        given = [(d.doc_id, d.text) for d in documents or ()]
        known = {doc_id for doc_id, _ in given}
        seen = dict.fromkeys((*self.remembered.shown(), *RETRIEVED.shown()))
        shown = given + [(doc_id, text) for doc_id, text in seen if doc_id not in known]
        if not any(message.get("role") == "tool" for message in messages):
            return shown
        return shown + [
            (doc_id, as_json) for doc_id, text in shown if (as_json := _as_json(text.strip())) != text.strip()
        ]

    def _prompt_of(
        self,
        tokenizer: ModelTokenizer,
        chat: ChatRequest,
        shown: Sequence[tuple[DocId, str]],
        questions: Sequence[str],
    ) -> RenderedPrompt | None:
        """Return a chat as the server renders it; ``None`` where it does not say how that is.

        Raises:
            PromptTooLongError: the prompt does not fit into the context window.
        """
        if chat.is_ours:
            ours = tokenizer.of_chat(chat.tools, chat.variables)
            try:
                prompt = render_chat(ours, chat.messages, shown, questions=questions)
            except PromptError:
                return None  # the server says why
            check_prompt_fits(len(prompt.token_ids), self._max_model_len)
            if self._server.agrees(chat, prompt.messages, lambda: prompt.token_ids):
                return prompt
        sent = escape_documents(tokenizer, chat.messages, shown)
        if (token_ids := self._server.of(chat, sent)) is None:
            return None
        check_prompt_fits(len(token_ids), self._max_model_len)
        segments = segments_in(token_ids, tokenizer, sent, shown, questions)
        return RenderedPrompt(tuple(sent), "", token_ids, segments)

    def rearranged(
        self, messages: Sequence[ChatMessage], order: Sequence[int], *, documents: Iterable[Document] | None = None
    ) -> list[ChatMessage] | str:
        """Return ``messages`` with their documents in another order, which is remembered as one, or why that cannot be.

        ``order`` are places of the documents that :meth:`plan_chat` finds in them.
        """
        messages = [as_plain_text(message) for message in messages]
        if any(message.get("role") == "tool" for message in messages):
            return "the result of a tool stays as the tool returned it"
        found = rearranged(messages, self._shown(documents, messages), order, self._questions())
        if isinstance(found, str):
            return found
        self._reordered.add(found.doc_ids)
        return found.messages

    def _questions(self) -> list[str]:
        return [search.query for search in (*self.remembered.searches(), *RETRIEVED.searches()) if search.query]

    def _tokenizer_at_hand(self) -> PromptTokenizer | None:
        return None if isinstance(self._tokenizer, TokenizerUnavailableError) else self._tokenizer


@lru_cache(maxsize=2048)
def _as_json(text: str) -> str:
    """Return a text as JSON shows it, between its quotes: a tool may answer so, or a template show a result."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
