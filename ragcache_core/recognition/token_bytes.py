"""The bytes of each token, by which a document's span ends where its text ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

TokenKind = Literal["byte_level", "sentencepiece", "wordpiece"]
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_of_tokens(tokens: Sequence[str | None], kind: TokenKind) -> list[bytes]:
    """Return the bytes of each token id; empty for unknown ones.

    Args:
        tokens: the vocabulary's texts, by token id.
        kind: ``byte_level`` writes each byte as one printable character (GPT-2), ``sentencepiece`` a space as U+2581,
            ``wordpiece`` the continuation of a word with ``##``.
    """
    read = {"byte_level": _of_byte_level, "sentencepiece": _of_sentencepiece, "wordpiece": _of_wordpiece}[kind]
    return [b"" if token is None else read(token) for token in tokens]


def _of_byte_level(token: str) -> bytes:
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode("utf-8", "replace")


def _of_sentencepiece(token: str) -> bytes:
    if (byte := _BYTE.fullmatch(token)) is not None:
        return bytes([int(byte[1], 16)])
    return token.replace("▁", " ").encode("utf-8", "replace")


def _of_wordpiece(token: str) -> bytes:
    return token.removeprefix("##").encode("utf-8", "replace")


def _byte_characters() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
