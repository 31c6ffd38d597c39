"""Prompts for one engine: how they begin, which documents they show, what their requests carry."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ragcache_core.client.ordering.document_order import RememberedOrders
from ragcache_core.client.prompts.bound_prompt import BoundPrompt, FormatDocuments, KVScope, KVScopes, bind
from ragcache_core.client.prompts.layout_learner import LayoutLearner, rearranged
from ragcache_core.client.prompts.repeated_documents import without_repeats
from ragcache_core.client.prompts.request_plan import (
    ChatWithTools,
    DocumentFacts,
    RememberedDocuments,
    RequestPlan,
    as_plain_text,
    changed_messages,
    plan_rendered,
    plan_texts,
    plan_tokens,
)
from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_core.client.prompts.server_tokenizer import ServerTokenizer, can_use_tokenize_route, fields_of
from ragcache_core.client.prompts.tool_calls import ToolCalls
from ragcache_core.client.speculation.request_capture import current_scope
from ragcache_core.errors import EngineError, PromptError, PromptTooLongError
from ragcache_core.prompt import (
    ChatMessage,
    PromptDocument,
    RenderedPrompt,
    check_prompt_fits,
    escape_documents,
    has_other_than_text,
    shown_documents,
    texts_of,
)
from ragcache_core.runtime.rights import joined_salt
from ragcache_core.types import DocId, Document
from ragcache_core.wire import ChunkReuseOption, check_sendable, read_chunk_reuse

_PLAIN_ROLES = {"system", "user", "assistant"}
_PLAIN_KEYS = {"role", "content", "name"}


class PromptClient:
    """Finds the documents that prompts for one engine show, by their text.

    Attributes:
        tokenizer: the server's, asked over HTTP.
        facts: access groups and labels of the documents that were seen.
        remembered: the documents that ``Engine.remember_documents`` was told of.
    """

    def __init__(
        self, tokenizer: ServerTokenizer, *, max_model_len: int, reordered: RememberedOrders, scopes: KVScopes
    ) -> None:
        """``reordered`` are orders that were changed. ``scopes`` takes note of the requests' KV scopes."""
        self.tokenizer = tokenizer
        self._scopes = scopes
        self._max_model_len = max_model_len
        self._reordered = reordered
        self.facts = DocumentFacts(RETRIEVED.facts)
        self.remembered = RememberedDocuments(facts=self.facts)
        self._learner = LayoutLearner(tokenizer, max_model_len=max_model_len)
        self._bound: BoundPrompt | None = None
        self._tool_calls = ToolCalls(tokenizer, scopes, max_model_len=max_model_len)

    def tokenize(self, prompt: str | Sequence[ChatMessage]) -> list[int]:
        """See ``Engine.tokenize``."""
        check_sendable(prompt, "the prompt")
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt, add_special_tokens=True).token_ids)
        return list(self.tokenizer.lay_out(prompt, ()).token_ids)

    def cache_salt_for(self, prompt: RenderedPrompt, cache_salt: str | None) -> str | None:
        """Return the salt of a request for ``prompt`` with a ``cache_salt`` of its own."""
        ids = (segment.doc_id for segment in prompt.segments)
        salts = (cache_salt, self.facts.body(ids, prompt.acls).get("cache_salt"))
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
        scope = None if settings is None else self._scopes.read(settings)
        bound = bind(prompt, format_docs, self.tokenizer, max_model_len=self._max_model_len, scope=scope, **how)
        if is_default:
            self._bound = bound
        return bound

    def tokens_of(self, body: Mapping[str, Any]) -> Sequence[int] | None:
        """Return the tokens of a request for a completion, given its body; ``None`` where they are not known.

        Raises:
            EngineError: the server cannot be asked.
        """
        prompt_tokens = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or body.get("prompt")
        if isinstance(prompt_tokens, list) and all(isinstance(token, int) for token in prompt_tokens):
            return prompt_tokens
        try:
            if isinstance(messages := body.get("messages"), list) and messages and self.tokenizer.finds_documents:
                return self.tokenizer.lay_out(messages, (), settings=body).token_ids
        except PromptError:  # the request itself will say so
            return None
        return None

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
        if plan.tool_chat is not None:
            self._tool_calls.add(plan.tool_chat, answer())

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
        if plan.doc_ids:
            self._scopes.note(settings or {})
        return plan

    def expect_settings(self, settings: Mapping[str, Any]) -> None:
        """Remember the settings of a framework's model that will send its requests to this engine."""
        self._scopes.expect(settings)

    def scope_of(self, settings: Mapping[str, Any]) -> KVScope:
        """Return what separates the KV of a request with these settings."""
        return self._scopes.read(settings)

    def plan_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        documents: Iterable[Document] | None = None,
        settings: Mapping[str, Any] | None = None,
        chunk_reuse: ChunkReuseOption = None,
        deduplicates: bool = False,
        needs_tokens: bool = False,
    ) -> RequestPlan:
        """Return what a chat request carries besides ``messages``: the documents that it shows, and their rights.

        ``documents`` are found by their text, and so are those that were remembered, and those that a framework's
        retrievers returned lately. The server finds their tokens. ``settings`` are the other fields of the request
        (tools, ``extra_body``, ...). ``chunk_reuse`` is that of ``stream``.

        Control tokens in documents are broken up. With ``deduplicates`` a document that an earlier message shows is
        referred to: the plan holds the messages to be sent. With ``needs_tokens`` the server is asked for the tokens,
        which the plan holds if it tells them.

        Raises:
            PromptTooLongError: the prompt does not fit into the context window, as far as its tokens are known.
            ConfigError: ``chunk_reuse`` is not what it may be, or a message or setting cannot be sent: text that is no
                Unicode, a number that is not finite or beyond 64 bits.
        """
        chunk_reuse, settings = read_chunk_reuse(chunk_reuse), settings or {}
        messages = [as_plain_text(message) for message in messages]
        check_sendable({**settings, "messages": messages}, "the request")
        searches = self.remembered.searches()
        documents = None if documents is None else list(documents)
        self.facts.add(documents or ())
        candidates = self._shown(documents, messages)
        questions = self._questions()
        sent: Sequence[ChatMessage] = without_repeats(messages, candidates, questions) if deduplicates else messages
        sent, escaped = escape_documents(self.tokenizer.control_tokens, sent, candidates)
        shown = shown_documents(sent, escaped, questions)
        fields = fields_of(settings)
        if not fields and all(map(_is_plain, sent)):
            if self._bound is None:
                is_prefilled = current_scope() is None  # inside a scope the whole answer is asked ahead
                self._learner.observe(messages, searches, RETRIEVED.searches(), is_prefilled=is_prefilled)
        else:
            self._tool_calls.observe(messages, searches)
        if shown:
            self._scopes.note(settings)
        needs_tokens |= bool(shown) and not self.tokenizer.names_documents
        prompt = self._laid_out(sent, shown, settings) if needs_tokens else None
        if prompt is None:
            plan = plan_texts(
                shown,
                self.facts,
                reordered=self._reordered,
                chunk_reuse=chunk_reuse,
                names_documents=self.tokenizer.names_documents,
            )
        else:
            has_media = any(has_other_than_text(message.get("content")) for message in sent)
            plan = plan_tokens(
                prompt, self.facts, reordered=self._reordered, chunk_reuse=chunk_reuse, sends_tokens=not has_media
            )
        return replace(
            plan,
            # Rights are those of all documents that are shown here, also if the server does not find one of them.
            extra_body={
                **plan.extra_body,
                **self.facts.body(each.doc_id for each in shown),
                **changed_messages(messages, sent),
            },
            num_chars=sum(len(text) for message in sent for text in texts_of(message.get("content"))),
            tool_chat=ChatWithTools(sent, settings, list(dict.fromkeys(each[:2] for each in shown)))
            if fields.get("tools")
            else None,
        )

    def _laid_out(
        self, messages: Sequence[ChatMessage], shown: Sequence[PromptDocument], settings: Mapping[str, Any]
    ) -> RenderedPrompt | None:
        """Return a chat with its tokens; ``None`` where the server does not tell them, or names no documents.

        Raises:
            PromptTooLongError: it does not fit into the context window.
        """
        if not self.tokenizer.finds_documents or not can_use_tokenize_route(settings):
            return None
        try:
            prompt = self.tokenizer.lay_out(messages, shown, settings=settings)
        except PromptTooLongError:
            raise
        except (EngineError, PromptError):  # the request itself will say so
            return None
        check_prompt_fits(len(prompt.token_ids), self._max_model_len)
        return prompt

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


def _is_plain(message: ChatMessage) -> bool:
    """Return whether a message is plain text of a role that all servers render in the same way."""
    keys = {key for key, value in message.items() if value is not None}
    return (
        message.get("role") in _PLAIN_ROLES and isinstance(message.get("content"), str) and _PLAIN_KEYS.issuperset(keys)
    )


@lru_cache(maxsize=2048)
def _as_json(text: str) -> str:
    """Return a text as JSON shows it, between its quotes: a tool may answer so, or a template show a result."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
