"""Routes for clients without a tokenizer: the tokens of prompts, and their documents.

::

    GET  /v1/ragcache/tokenizer   ->  {"identity": "3f2a...", "control_tokens": ["</s>", ...],
                                   "finds_documents": true, "names_documents": true}
    POST /v1/ragcache/prompt      {"messages": [...], "documents": [{"id": "faq-7", "text": "How do I ..."}]}
                                  ->  {"token_ids": [1, 17, ...], "documents": [{"id": "faq-7", "start": 5, "end": 90}]}

The body of ``/prompt`` has the fields of vLLM's ``/tokenize`` besides. With ``other`` messages, the answer is the
common beginning of both prompts, which every prompt has that begins with the same text.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

from ragcache_core.prompt import common_prefix_len
from ragcache_core.recognition import PromptTexts
from ragcache_core.vllm_plugin.compat import chat_template_of
from ragcache_core.wire import MAX_DOC_ID_CHARS, MAX_DOCUMENTS

router = APIRouter(prefix="/v1/ragcache", tags=["ragcache"])


class DocumentText(BaseModel):
    """A document with its text as the prompt shows it, after ``skip`` other occurrences of the text."""

    id: str = Field(min_length=1, max_length=MAX_DOC_ID_CHARS)
    text: str
    skip: int = Field(0, ge=0, le=MAX_DOCUMENTS)


class PromptRequest(BaseModel):
    """A chat, its documents in the order of the prompt, and the fields of ``/tokenize``."""

    model_config = ConfigDict(extra="allow")

    messages: list[Any]
    other: list[Any] | None = None
    documents: list[DocumentText] = Field(default=[], max_length=MAX_DOCUMENTS)


@router.get("/tokenizer")
async def tokenizer(request: Request) -> dict[str, Any]:
    """Return the identity of tokenizer and chat template, the control tokens, and whether documents are found by text.

    They are found in prompts of ``/prompt``, and named in all requests unless this vLLM refuses it.
    """
    state = request.app.state
    if not hasattr(state, "ragcache_tokenizer"):
        state.ragcache_tokenizer = await asyncio.to_thread(_described, state.serving_tokenization)
    return {
        **state.ragcache_tokenizer,
        "finds_documents": getattr(state, "ragcache_shown_texts", None) is not None,
        "names_documents": getattr(state, "ragcache_names_documents", False),
    }


@router.post("/prompt")
async def prompt(asked: PromptRequest, request: Request) -> dict[str, Any]:
    """Return the token ids of a chat, and the spans of its documents."""
    if request.app.state.serving_tokenization.online_renderer.use_harmony:
        raise HTTPException(
            400,
            "this model does not use a chat template (Harmony), so its prompt is made with the "
            "request: send messages to /v1/chat/completions",
        )
    token_ids = await _token_ids(request, asked, asked.messages)
    if asked.other is not None:
        num_common = common_prefix_len(token_ids, await _token_ids(request, asked, asked.other))
        token_ids = token_ids[: max(num_common - 1, 0)]  # with what follows, the last one may be another
    texts: PromptTexts | None = getattr(request.app.state, "ragcache_shown_texts", None)
    places = [] if texts is None else texts.find(token_ids, [(each.text, each.skip) for each in asked.documents])
    shown = [
        {"id": document.id, "start": place[0], "end": place[1]}
        for document, place in zip(asked.documents, places, strict=texts is not None)
        if place is not None
    ]
    return {"token_ids": token_ids, "documents": shown}


async def _token_ids(request: Request, asked: PromptRequest, messages: list[Any]) -> list[int]:
    try:
        chat = TokenizeChatRequest(**{**(asked.model_extra or {}), "messages": messages})
        answer = await request.app.state.serving_tokenization.create_tokenize(chat, request)
    except (ValidationError, ValueError, TypeError) as error:
        raise HTTPException(400, f"the prompt cannot be made: {error!s:.400}") from error
    if (refused := getattr(answer, "error", None)) is not None:
        raise HTTPException(refused.code, refused.message)
    token_ids: list[int] = answer.tokens
    return token_ids


def _described(serving: Any) -> dict[str, Any]:
    """Return identity and control tokens of vLLM's ``ServingTokenization``."""
    made = serving.renderer.get_tokenizer()
    backend = getattr(made, "backend_tokenizer", None)
    layout = chat_template_of(serving)
    template = "" if layout is None else layout[0] or ""
    vocabulary = sorted(made.get_vocab().items()) if backend is None else backend.to_str()
    parts = [type(made).__name__, vocabulary, layout, dict(serving.default_chat_template_kwargs)]
    added = getattr(made, "added_tokens_decoder", None) or {}
    control = {token.content for token in added.values() if token.special or token.content in template}
    control |= set(getattr(made, "all_special_tokens", None) or ())
    identity = hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()
    return {"identity": identity, "control_tokens": sorted(control)}
