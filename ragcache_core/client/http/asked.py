"""What of a request for a completion decides who should answer it, of several servers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import httpx
from pydantic_core import from_json

from ragcache_core.ordering import MAX_PATH_DOCUMENTS, static_prefix_digest
from ragcache_core.routing.load import AskedPrompt
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.wire import KEY

_OPENING = 64
"""Tokens by which prompts without documents are told apart."""
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """What the body of a request says of it: its prompt, its speculation, and the id that a header would hide."""

    prompt: AskedPrompt
    speculation: str | None = None
    request_id: str | None = None

    @classmethod
    def of(cls, request: httpx.Request) -> Asked:
        """Read it from the body; what is no JSON of ours goes by nothing, and the server refuses it."""
        try:
            body = _read(request.content)
            params = body.get("kv_transfer_params") or {}
            said = params.get(KEY) or {}
            speculation, request_id = said.get("speculation"), body.get("request_id")
            return cls(
                _prompt(body, said.get("documents") or (), params.get("prompt_token_ids") or body.get("prompt")),
                speculation if isinstance(speculation, str) else None,
                request_id.strip() if is_sendable(request_id) else None,
            )
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            return cls(AskedPrompt((), (), 0, 0, None, ""))


def _read(content: bytes) -> Any:
    try:
        return from_json(content)  # thousands of token ids in half the time
    except ValueError:
        return json.loads(content)  # reads halves of surrogate pairs as well


def is_sendable(value: object) -> TypeGuard[str]:
    """Return whether a header can hold this."""
    return isinstance(value, str) and value.isascii() and value.isprintable()


def _prompt(body: Mapping[str, Any], named: Sequence[Any], token_ids: object) -> AskedPrompt:
    """Return what decides who gets a request; its documents' places are known where its prompt is tokens."""
    spans = [(str(each["id"]), int(each["start"]), int(each.get("end", 0))) for each in named][:MAX_PATH_DOCUMENTS]
    documents = tuple(name for name, _, _ in spans)
    key = f"{body.get('cache_salt')}\0{documents[0] if documents else _opening(body)}"
    if not isinstance(token_ids, list):
        shown = body.get("prompt") or body.get("messages")
        return AskedPrompt(documents, (), 0, len(str(shown)) // _CHARACTERS_PER_TOKEN, None, key)
    if not spans:
        return AskedPrompt((), (), 0, len(token_ids), None, key)
    first = PromptSegment(SegmentKind.DOCUMENT, spans[0][1], len(token_ids), spans[0][0])
    prefix = static_prefix_digest(token_ids, [first])
    return AskedPrompt(documents, tuple(end for _, _, end in spans), first.start, len(token_ids), prefix, key)


def _opening(body: Mapping[str, Any]) -> str:
    """Return how a prompt without documents begins: the turns of a conversation begin alike."""
    if messages := body.get("messages"):
        ends = next((i for i, message in enumerate(messages) if message.get("role") == "user"), len(messages))
        return json.dumps(messages[: ends + 1])
    prompt = body.get("prompt")
    return prompt[: _CHARACTERS_PER_TOKEN * _OPENING] if isinstance(prompt, str) else str(list(prompt or ())[:_OPENING])
