"""Texts of documents as tokens, by the server's own tokenizer."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ragcache_core.recognition import bytes_of_tokens, count_edges, text_forms
from ragcache_core.recognition.hashing import Tokens, as_tokens
from ragcache_core.recognition.token_bytes import TokenKind


@dataclass(frozen=True, slots=True)
class TokenizedForm:
    """A text's tokens, and how many of its first and last depend on the text around."""

    tokens: Tokens
    edges: tuple[int, int]


class DocumentTokenizer:
    """Tokenises documents as they are in prompts. For one thread at a time.

    Args:
        tokenizer: the server's; a copy is used, because others use it in other threads.

    Attributes:
        token_bytes: the bytes of each token id; ``None`` where the tokenizer does not tell them.
        sha256: names the tokenizer: tokens of another one are others.
        control_ids: the ids of control tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = _own_copy(tokenizer)
        self.token_bytes = token_bytes_of(tokenizer)
        vocabulary = sorted(tokenizer.get_vocab().items())
        told = [vocabulary, _backend_of(tokenizer) or type(tokenizer).__name__]
        self.sha256 = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
        self.control_ids = np.array(sorted(getattr(tokenizer, "all_special_ids", ())), np.int32)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def forms_of(self, text: str) -> list[TokenizedForm]:
        """Return each form of a text, the text itself first."""
        return [
            TokenizedForm(as_tokens(self.encode(form)), count_edges(self.encode, form)) for form in text_forms(text)
        ]

    def has_control_tokens(self, form: TokenizedForm) -> bool:
        """Return whether a document holds tokens with which a chat template ends a message."""
        return bool(np.isin(form.tokens, self.control_ids).any())


def token_bytes_of(tokenizer: Any) -> list[bytes] | None:
    """Return the bytes of each token id; ``None`` where the tokenizer does not tell them."""
    read: Callable[[Sequence[str | None], TokenKind], list[bytes]] = bytes_of_tokens
    if (backend := _backend_of(tokenizer)) is None:
        return None
    said = json.loads(backend)
    decoder = json.dumps(said.get("decoder"))
    kinds: dict[str, TokenKind] = {
        '"ByteLevel"': "byte_level",
        '"WordPiece"': "wordpiece",
        "\\u2581": "sentencepiece",
        '"Metaspace"': "sentencepiece",
    }
    kind = next((kind for mark, kind in kinds.items() if mark in decoder), None)
    return None if kind is None else read(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))), kind)


def _backend_of(tokenizer: Any) -> str | None:
    """Return the ``tokenizer.json`` of a fast tokenizer of Hugging Face, without truncation and padding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    said = json.loads(backend.to_str())
    return json.dumps({**said, "truncation": None, "padding": None}, sort_keys=True)


def _own_copy(tokenizer: Any) -> Any:
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # some cannot be copied, and are not changed by encoding either
        return tokenizer
