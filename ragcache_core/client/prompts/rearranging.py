"""Show the documents of a chat in another order, where what stands around each of them can move with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ragcache_core.prompt import ChatMessage, locate_documents
from ragcache_core.types import DocId

_MARK = "\0doc_id\0"
_SEVERAL = "its documents do not stand in one message of plain text"
_IRREGULAR = (
    "what stands around its documents differs from one to the next (a number, a source): it would stand around another"
)


@dataclass(frozen=True, slots=True)
class Rearranged:
    """Messages, and the ids of their documents as they stand now."""

    messages: list[ChatMessage]
    doc_ids: tuple[DocId, ...]


def rearranged(
    messages: Sequence[ChatMessage],
    shown: Iterable[tuple[DocId, str]],
    order: Sequence[int],
    questions: Iterable[str] = (),
) -> Rearranged | str:
    """Return ``messages`` with the documents at the places ``order``, or why that cannot be.

    ``shown`` are documents (id, text) that they may hold; ``questions`` may quote them. An id that stands before each
    document goes with it. A number or a source does not: an answer may cite it, so nothing is moved then.
    """
    shown, questions = list(shown), list(questions)
    found = [
        (i, spans)
        for i, message in enumerate(messages)
        if message.get("role") != "assistant"
        and isinstance(text := message.get("content"), str)
        and (spans := locate_documents(text, shown, questions))
    ]
    if len(found) != 1:
        return _SEVERAL
    (index, spans), content = found[0], messages[found[0][0]]["content"]
    if sorted(order) != list(range(len(spans))):
        return _SEVERAL
    head, tail = content[: spans[0].start], content[spans[-1].end :]
    gaps = [content[one.end : other.start] for one, other in pairwise(spans)]
    ids = [span.doc_id for span in spans]
    if (frame := _frame(head, gaps, ids)) is None:
        return _IRREGULAR
    head, gap = frame
    text = "".join(
        (gap if i else head).replace(_MARK, ids[place]) + content[spans[place].start : spans[place].end]
        for i, place in enumerate(order)
    )
    moved: ChatMessage = {**messages[index], "content": text + tail}
    return Rearranged([*messages[:index], moved, *messages[index + 1 :]], tuple(ids[place] for place in order))


def _frame(head: str, gaps: Sequence[str], ids: Sequence[DocId]) -> tuple[str, str] | None:
    """Return what stands before the first document and before every other, ids marked; None if no rule says it."""
    marked = {_marked(gap, doc_id) for gap, doc_id in zip(gaps, ids[1:], strict=True)}
    if len(marked) != 1:
        return None
    (gap,) = marked
    between, newline, begins = gap.rpartition("\n")
    if any(character.isalnum() for character in between) and len(gaps) == 1:
        return None  # the end of the one, or the beginning of the other? nobody knows
    marked_head = _marked(head, ids[0]) if _MARK in gap else head
    is_framed = any(character.isalnum() for character in begins)
    if is_framed and (_MARK in gap or len(gaps) == 1) and not f"\n{marked_head}".endswith(newline + begins):
        return None
    return marked_head, gap


def _marked(text: str, doc_id: DocId) -> str:
    """Return ``text`` with a mark in place of the last ``doc_id``, if it stands there as a word of its own."""
    found = list(re.finditer(rf"(?<!\w){re.escape(doc_id)}(?!\w)", text))
    return text[: found[-1].start()] + _MARK + text[found[-1].end() :] if found else text
