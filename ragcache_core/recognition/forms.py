"""The texts with which prompts show a document: plain, and escaped in JSON."""

from __future__ import annotations

import json


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
