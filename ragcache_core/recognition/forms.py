"""The texts with which prompts show a document, and its tokens at both ends that depend on the text around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence


def text_forms(text: str) -> tuple[str, ...]:
    """Return the distinct texts with which a prompt may show a document, its own first.

    These are the text without white space around it, as a JSON string with and without non-ASCII characters, and as a
    JSON string inside another. A text without quotes, line ends, backslashes and non-ASCII characters has one form.
    """
    stripped = text.strip()
    escaped = _escaped(stripped)
    return tuple(dict.fromkeys((stripped, escaped, json.dumps(stripped)[1:-1], _escaped(escaped))))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_MAX_CHARS = 120
_BEFORE = (" ", "\n", '"', ">", "1", "a")
_AFTER = ("\n", "\n\n", " ", '"', "<", ",", "1", "a", "\\n")
"""Texts that prompts put before and after documents. Tokenizers merge characters by their kind, and these have all."""


def count_edges(encode: Callable[[str], Sequence[int]], text: str) -> tuple[int, int]:
    """Return how many first and last tokens of a document may differ in a prompt.

    The first and last 120 characters are tokenised again next to typical text.

    Args:
        encode: returns the token ids of a text, without special tokens.
        text: the document.
    """
    head, tail = text[:_MAX_CHARS], text[-_MAX_CHARS:]
    own_head, own_tail = list(encode(head)), list(encode(tail))
    num_first = max(len(own_head) - _common_suffix_len(own_head, list(encode(before + head))) for before in _BEFORE)
    num_last = max(len(own_tail) - _common_prefix_len(own_tail, list(encode(tail + after))) for after in _AFTER)
    return num_first, num_last


def _common_suffix_len(one: list[int], other: list[int]) -> int:
    return _common_prefix_len(one[::-1], other[::-1])


def _common_prefix_len(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
