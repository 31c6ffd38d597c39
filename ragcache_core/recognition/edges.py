"""The first and last tokens of a document that depend on the text around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
