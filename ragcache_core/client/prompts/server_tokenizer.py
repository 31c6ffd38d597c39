"""A server's tokenizer and chat template, asked over HTTP: nothing is rendered or tokenised in the client.

::

    GET  /v1/ragcache/tokenizer   control tokens, and whether the server finds documents by their texts
    POST /v1/ragcache/prompt      a chat as token ids, and the spans of its documents
    POST /tokenize                vLLM's own, for texts, and for chats of a server without RAGCache
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import httpx

from ragcache_core.client.server_api import Call, ServerAPI, json_object
from ragcache_core.errors import PromptError, PromptTooLongError, TokenizerUnavailableError
from ragcache_core.prompt import ChatMessage, PromptDocument, RenderedPrompt, TokenizedText
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.wire import MAX_DOCUMENTS, tile

_OF_TOKENIZE = (
    *("tools", "chat_template", "continue_final_message", "add_special_tokens", "add_generation_prompt"),
    *("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"),
)
"""Fields of a request on which its prompt depends, and which ``/tokenize`` has as well."""
_NOT_OF_TOKENIZE = ("functions", "truncate_prompt_tokens")
_MAX_KEPT = 16
"""Chats whose tokens are kept: a request that is planned again is the same."""
_TIMEOUT_S = 30.0


class ServerTokenizer:
    """A :class:`~ragcache_core.prompt.PromptTokenizer` that asks one server. May be used by any thread; it blocks.

    Args:
        api: asks the server.
        model: the served model.

    Attributes:
        control_tokens: what begins and ends messages, and is broken up in documents, where it must not. An empty set
            leaves documents as they are.
        finds_documents: whether the server finds documents by their texts in prompts that it lays out.
        names_documents: whether it does so in requests. If not, their documents are found before, with one question.
        identity: names the tokenizer and the chat template; ``None`` for a server without RAGCache.
    """

    def __init__(self, api: ServerAPI, model: str) -> None:
        self.control_tokens: frozenset[str] = frozenset()
        self.finds_documents = self.names_documents = False
        self.identity: str | None = None
        self._api = api
        self._model = model
        self._kept: OrderedDict[bytes, RenderedPrompt] = OrderedDict()
        self._lock = Lock()

    def connect(self) -> None:
        """Ask the server about its tokenizer.

        Raises:
            EngineError: it cannot be asked.
        """
        match self._api.ask(Call("/v1/ragcache/tokenizer", json_object)):
            case {
                "identity": str(identity),
                "control_tokens": [*tokens],
                "finds_documents": bool(finds),
                "names_documents": bool(names),
            }:
                self.identity, self.finds_documents, self.names_documents = identity, finds, names
                self.control_tokens = frozenset(map(str, tokens))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> TokenizedText:
        """Return the token ids of ``text``.

        Raises:
            TokenizerUnavailableError: the server does not tell them. EngineError: it cannot be asked.
        """
        return TokenizedText(self._tokenized({"prompt": text, "add_special_tokens": add_special_tokens}))

    def lay_out(
        self,
        messages: Sequence[ChatMessage],
        documents: Sequence[PromptDocument],
        *,
        other: Sequence[ChatMessage] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Return a chat as token ids, with the spans of ``documents``, which are in its order.

        A server without RAGCache tells no spans. With ``other`` messages, return the common beginning of both prompts.

        Raises:
            PromptError: the server cannot make a prompt of the messages.
            TokenizerUnavailableError: it does not tell the tokens. EngineError: it cannot be asked.
        """
        body: dict[str, Any] = {**fields_of(settings or {}), "messages": list(messages)}
        if not self.finds_documents:
            return RenderedPrompt(tuple(messages), self._tokenized(body), ())
        named = documents[:MAX_DOCUMENTS]
        body["documents"] = [{"id": doc_id, "text": text, "skip": skip} for doc_id, text, skip in named]
        if other is not None:
            body["other"] = list(other)
        key = hashlib.sha256(json.dumps(body, default=repr).encode("utf-8", "replace")).digest()
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                return kept
        call = Call(
            "/v1/ragcache/prompt", _read, method="POST", body={**body, "model": self._model}, timeout=_TIMEOUT_S
        )
        token_ids, segments = self._api.ask(call)
        prompt = RenderedPrompt(tuple(messages) if other is None else (), token_ids, segments)
        with self._lock:
            self._kept[key] = prompt
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return prompt

    def _tokenized(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        call = Call("/tokenize", _read_tokens, method="POST", body={**body, "model": self._model}, timeout=_TIMEOUT_S)
        return self._api.ask(call)


def fields_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``/tokenize`` that say how a request with these ``settings`` is rendered.

    Args:
        settings: the fields of the request besides its messages, with vLLM's own in ``extra_body``.
    """
    given = {**settings, **(settings.get("extra_body") or {})}
    fields = {name: given[name] for name in _OF_TOKENIZE if given.get(name) is not None}
    variables = fields.get("chat_template_kwargs") or {}
    if (effort := given.get("reasoning_effort")) is not None and isinstance(variables, Mapping):
        # As the server does: models that think only if told to are told by the effort, too.
        variables = {"enable_thinking": effort != "none", **variables, "reasoning_effort": effort}
    if given.get("documents") is not None and isinstance(variables, Mapping):
        variables = {**variables, "documents": given["documents"]}
    return {**fields, "chat_template_kwargs": variables} if variables else fields


def can_use_tokenize_route(settings: Mapping[str, Any]) -> bool:
    """Return whether ``/tokenize`` knows all that the prompt of a request with these ``settings`` depends on."""
    given = {**settings, **(settings.get("extra_body") or {})}
    if any(given.get(name) is not None for name in _NOT_OF_TOKENIZE):
        return False
    return not given.get("tools") or given.get("tool_choice") != "none"  # the server may leave them out


def _read(answer: httpx.Response) -> tuple[tuple[int, ...], tuple[PromptSegment, ...]]:
    match _accepted(answer):
        case {"token_ids": [*token_ids], "documents": [*documents]}:
            segments = [PromptSegment(SegmentKind.DOCUMENT, d["start"], d["end"], d["id"]) for d in documents]
            return tuple(token_ids), tile(segments, len(token_ids))
    raise TokenizerUnavailableError("the server does not tell the tokens of a prompt: install the same release there")


def _read_tokens(answer: httpx.Response) -> tuple[int, ...]:
    match _accepted(answer):
        case {"tokens": [*tokens]}:
            return tuple(tokens)
    raise TokenizerUnavailableError(
        f"the server does not tell the tokens of a prompt (status {answer.status_code} of /tokenize): use vLLM's own "
        "server, or send the messages or the text instead of their tokens"
    )


def _accepted(answer: httpx.Response) -> dict[str, Any] | None:
    """Return the object that a route answers.

    Raises:
        PromptError: the server cannot make the prompt.
    """
    if answer.status_code in (400, 413, 422):
        if "maximum context length" in answer.text:
            raise PromptTooLongError(f"the prompt does not fit into the context window: {answer.text:.400}")
        raise PromptError(f"the server cannot make a prompt of these messages: {answer.text:.400}")
    return json_object(answer)
