"""Convert documents' texts to tokens with the server's tokenizer."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from ragcache_core.recognition import bytes_of_tokens, count_edges, text_forms
from ragcache_core.recognition.hashing import Tokens, as_tokens
from ragcache_core.recognition.token_bytes import TokenKind

_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_KINDS: dict[str, TokenKind] = {
    '"ByteLevel"': "byte_level",
    '"WordPiece"': "wordpiece",
    "\\xe2\\x96\\x81": "sentencepiece",  # U+2581 as str() shows bytes
    '"Metaspace"': "sentencepiece",
}
"""Kinds of vocabularies by the JSON of their decoder."""


@dataclass(frozen=True, slots=True)
class TokenizedForm:
    """A text's tokens, and how many at either end depend on adjacent text."""

    tokens: Tokens
    edges: tuple[int, int]


class DocumentTokenizer:
    """Tokenises documents as they appear in prompts. Not thread-safe.

    Args:
        tokenizer: the server's; a copy is used, because others use it in other threads.
        max_tokens: of a prompt: a longer text is in none. ``None`` is no limit.

    Attributes:
        token_bytes: the bytes of each token id; ``None`` where the tokenizer does not tell them.
        sha256: names the tokenizer: tokens of another one are others.
        control_ids: the ids of control tokens.
    """

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        self._tokenizer = _own_copy(tokenizer)
        self._max_tokens = max_tokens
        self.token_bytes = token_bytes_of(tokenizer)
        parts = [sorted(tokenizer.get_vocab().items()), *(str(_part(tokenizer, name)) for name in _PARTS)]
        self.sha256 = hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()
        self.control_ids = np.array(sorted(getattr(tokenizer, "all_special_ids", ())), np.int32)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def forms_of(self, text: str) -> list[TokenizedForm]:
        """Return each form of a text in prompts, the text itself first.

        Raises:
            ValueError: no prompt can show the text.
        """
        forms: list[TokenizedForm] = []
        for form in text_forms(text):
            tokens = as_tokens(self.encode(form))
            if self._max_tokens is None or len(tokens) <= self._max_tokens:
                forms.append(TokenizedForm(tokens, count_edges(self.encode, form)))
            elif not forms:
                raise ValueError(
                    f"it has {len(tokens)} tokens, and a prompt has at most {self._max_tokens}: split it as prompts "
                    "show it"
                )
        return forms

    def has_control_tokens(self, form: TokenizedForm) -> bool:
        """Return whether a document contains control tokens with which a chat template ends a message."""
        return bool(np.isin(form.tokens, self.control_ids).any())


def token_bytes_of(tokenizer: Any) -> list[bytes] | None:
    """Return the bytes of each token id; ``None`` if the tokenizer does not provide them."""
    tekken: Any = getattr(tokenizer, "tokenizer", None)  # vLLM's wrapper of Mistral's
    if hasattr(tekken, "id_to_byte_piece"):
        num_special, num_tokens = tekken.num_special_tokens, tekken.n_words
        return [b"" if i < num_special else tekken.id_to_byte_piece(i) for i in range(num_tokens)]
    decoder = str(_part(tokenizer, "decoder"))
    kind = next((kind for mark, kind in _KINDS.items() if mark in decoder), None)
    return None if kind is None else bytes_of_tokens(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))), kind)


def _part(tokenizer: Any, name: str) -> object:
    """Return the JSON of a part of a fast Hugging Face tokenizer; ``None`` for another one."""
    part = getattr(getattr(tokenizer, "backend_tokenizer", None), name, None)
    return None if part is None else part.__getstate__()


def _own_copy(tokenizer: Any) -> Any:
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # some cannot be copied, and are not changed by encoding either
        return tokenizer
