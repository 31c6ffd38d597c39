"""Questions with known answers and documents, as JSON lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from ragcache_core.errors import ConfigError
from ragcache_core.types import Document

EXAMPLE = (
    '{"question": "Who founded Zorval?", "answer": "Anna Krenvi", "documents": ["Zorval is ..."], "kind": "single"}'
)
ALL_KINDS = "all"


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its right answers, its documents in prompt order, and its kind.

    ``scores`` are parallel to the documents, the larger, the nearer; empty where they are not known.
    """

    text: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]
    kind: str = ALL_KINDS
    scores: tuple[float, ...] = ()


def questions_of(text: str, path: Path, corpus: Path | None = None) -> list[Question]:
    """Return the questions of a file's text, one JSON object a line.

    ``documents`` are texts; with ``corpus`` they are names of files below that folder. ``answer`` is a text or a list
    of texts, each a right answer. ``kind`` and ``scores`` may be left out.

    Raises:
        ConfigError: a line is no question; with its number and an example.
    """
    texts: dict[str, str] = {}
    return [
        _question(line, f"{path}, line {number}", corpus, texts)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]


def _question(line: str, place: str, corpus: Path | None, texts: dict[str, str]) -> Question:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: no JSON ({error}): one question a line, as {EXAMPLE}") from error
    match raw:
        case {"question": str(text), "answer": str() | list() as answer, "documents": [*documents]}:
            answers = (answer,) if isinstance(answer, str) else tuple(answer)
            kind = raw.get("kind", ALL_KINDS)
        case _:
            raise ConfigError(f"{place}: it must have question, answer and documents, as {EXAMPLE}")
    if not text.strip() or not answers or not documents:
        raise ConfigError(f"{place}: question, answer and documents must not be empty")
    if not (isinstance(kind, str) and all(isinstance(item, str) for item in (*answers, *documents))):
        raise ConfigError(f"{place}: answers, documents and kind must be texts, as {EXAMPLE}")
    if len(set(documents)) < len(documents):
        raise ConfigError(f"{place}: a document is there twice: leave one out")
    scores = raw.get("scores", [])
    is_scored = isinstance(scores, list) and all(type(score) in (int, float) and isfinite(score) for score in scores)
    if not is_scored or len(scores) not in (0, len(documents)):
        raise ConfigError(f"{place}: scores must be {len(documents)} numbers, one for each document, or be left out")
    shown = tuple(_document(item, place, corpus, texts) for item in documents)
    return Question(text, answers, shown, kind, tuple(map(float, scores)))


def _document(item: str, place: str, corpus: Path | None, texts: dict[str, str]) -> Document:
    if corpus is None:
        if not item.strip():
            raise ConfigError(f"{place}: a document without text: leave it out")
        return text_document(item)
    if item not in texts:
        try:
            texts[item] = (corpus / item).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{place}: the document {item!r:.80} cannot be read from {corpus}: {error}") from error
    return Document(item, texts[item])


def text_document(text: str) -> Document:
    """Return a document whose id is derived from its text, so that equal texts are one document."""
    return Document(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16], text)


def share(questions: Sequence[Question], limit: int) -> list[Question]:
    """Return at most ``limit`` questions in order, equally many of each kind if possible."""
    left: dict[str, int] = {}
    for question in questions:
        left[question.kind] = left.get(question.kind, 0) + 1
    wanted = dict.fromkeys(left, 0)
    for _ in range(min(limit, len(questions))):
        kind = min((kind for kind in wanted if wanted[kind] < left[kind]), key=wanted.__getitem__)
        wanted[kind] += 1
    taken: list[Question] = []
    for question in questions:
        if wanted[question.kind] > 0:
            wanted[question.kind] -= 1
            taken.append(question)
    return taken


def to_line(question: Question) -> str:
    """Return the line of a file for :func:`read_questions` without ``corpus``."""
    answer: Any = question.answers[0] if len(question.answers) == 1 else list(question.answers)
    documents = [document.text for document in question.documents]
    fields: dict[str, Any] = {"question": question.text, "answer": answer, "documents": documents}
    if question.scores:
        fields["scores"] = list(question.scores)
    fields["kind"] = question.kind
    return json.dumps(fields, ensure_ascii=False)
