"""Texts of documents, and the layouts in which applications show them."""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Callable, Sequence
from pathlib import Path

_CORPUS = Path(__file__).resolve().parents[2] / "examples" / "demo_corpus"
_CHARS = 1200


def _join(separator: str, before: str = "", after: str = "") -> Callable[[Sequence[str]], str]:
    return lambda texts: separator.join(
        f"{before.replace('#', str(i))}{text}{after.replace('#', str(i))}" for i, text in enumerate(texts, 1)
    )


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


LAYOUTS: dict[str, Callable[[Sequence[str]], str]] = {
    "empty line": _join("\n\n"),
    "line end": _join("\n"),
    "space": _join(" "),
    "nothing": _join(""),
    "Document: text": _join("\n\n", "Document: "),
    "1. text": _join("\n", "#. "),
    "[1] text": _join("\n\n", "[#] "),
    "XML, lines": _join("\n", '<document index="#">\n', "\n</document>"),
    "XML, inline": _join("", "<doc>", "</doc>"),
    "quoted": _join("\n", '- "', '"'),
    "fenced": _join("\n", "```\n", "\n```"),
    "Markdown, source": _join("\n\n---\n\n", "**Source #**\n\n", " (source: a#.md)"),
    "Open WebUI": _join("\n", '<source id="#" name="file#.md">', "</source>"),
    "commas": _join("", "ctx,", ", "),
    "JSON": lambda texts: json.dumps([{"id": i, "text": text} for i, text in enumerate(texts)], ensure_ascii=False),
    "JSON, ASCII": lambda texts: json.dumps({"results": [{"content": text, "score": 0.5} for text in texts]}),
    "JSON in JSON": lambda texts: json.dumps(
        {"content": json.dumps(list(texts), ensure_ascii=False)}, ensure_ascii=False
    ),
}
SHOWN: dict[str, Callable[[str], str]] = {
    "JSON": _escaped,
    "JSON, ASCII": lambda text: json.dumps(text)[1:-1],
    "JSON in JSON": lambda text: _escaped(_escaped(text)),
}
"""How a layout shows a text, where it escapes it."""


def documents() -> list[str]:
    """Return distinct texts of 100 to 1,200 characters: the demo corpus, and Python's help topics in pieces."""
    texts = [path.read_text(encoding="utf-8").strip() for path in sorted(_CORPUS.glob("*.md"))]
    for _, topic in sorted(pydoc_data.topics.topics.items()):
        piece = ""
        for paragraph in topic.split("\n\n"):
            if piece and len(piece) + len(paragraph) > _CHARS:
                texts.append(piece.strip())
                piece = ""
            piece += f"{paragraph}\n\n"
        texts.append(piece.strip())
    return [text for text in dict.fromkeys(texts) if len(text) >= 100]
