"""How a prompt lays out its documents: learned from requests, and shown again in another order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Lock
from typing import Any

from ragcache_core.client.prompts.bound_prompt import UNKNOWN, BoundPrompt, Drafts, warn_question_first
from ragcache_core.client.prompts.request_plan import RememberedSearch
from ragcache_core.prompt import ChatMessage, DocumentSpan, PromptTokenizer, common_prefix_len, locate_documents
from ragcache_core.types import DocId, Document

_MAX_GAP_CHARS = 200
"""More between two documents is hardly a separator: a text that was not recognised stands there."""

_MAX_CONTRADICTIONS = 3
"""Contradictions in a row after which nothing is offered until two requests have the same layout."""

_NUMBER, _DOC_ID = "\0number\0", "\0doc_id\0"
_SEVERAL = "its documents do not stand in one message of plain text"
_IRREGULAR = (
    "what stands around its documents differs from one to the next (a number, a source): it would stand around another"
)


@dataclass(frozen=True, slots=True)
class LearnedLayout:
    """What the messages about any documents look like, as one request showed it.

    ::

        before | head DOCUMENT gap DOCUMENT gap ... DOCUMENT tail | after
                 `------- the message that shows documents -----'

    ``head`` and ``gap`` may hold marks for the next document's number and id. ``num_documents`` of them are laid out
    regularly: 0 none, 1 the first, ``None`` all. The question begins at ``tail[question_start]``; ``tail``
    is only rendered.
    """

    before: tuple[ChatMessage, ...]
    message: ChatMessage
    head: str
    gap: str
    first_number: int
    num_documents: int | None
    tail: str
    question_start: int
    after: tuple[ChatMessage, ...]
    without_history: tuple[ChatMessage, ...] = ()
    """What would follow ``before`` if the chat had only begun, where ``message`` is the first of its history."""
    is_question_first: bool = False

    def text(self, documents: Sequence[tuple[DocId, str]]) -> str:
        """Return the message from its start to the last one of ``documents`` whose place is known."""
        known = documents[: self.num_documents]
        if not known:
            return self.head.partition(_DOC_ID)[0]
        text = ""
        for i, (doc_id, shown) in enumerate(known):
            between = self.gap if i else self.head
            text += between.replace(_NUMBER, str(i + self.first_number)).replace(_DOC_ID, doc_id) + shown.strip()
        return text

    def drafts(self, shown_documents: Sequence[Any], documents: Sequence[Document]) -> Drafts:
        """Return the messages about ``documents`` twice, with the rest of those that were seen."""
        text = self.text(self.texts(documents))
        is_whole = self.num_documents is None or len(documents) <= self.num_documents
        question_start = self.question_start if is_whole and documents else 0
        one, other = (
            [
                {
                    **self.message,
                    "content": f"{text}{self.tail[:question_start]}{unknown} {self.tail[question_start:]}",
                },
                *self.after,
            ]
            for unknown in UNKNOWN
        )
        if self.without_history:
            first, *rest = self.without_history
            other = [{**first, "content": f"{UNKNOWN[1]} {first['content']}"}, *rest]
        return [*self.before, *one], [*self.before, *other]

    def texts(self, documents: Sequence[Document]) -> list[tuple[DocId, str]]:
        """Return the documents as they were recognised: by their text."""
        return [(d.doc_id, d.text) for d in documents]

    def matches(self, messages: Sequence[ChatMessage], documents: Sequence[tuple[DocId, str]]) -> bool:
        """Return whether ``messages`` about ``documents`` begin as this layout says."""
        i = len(self.before)
        if len(messages) <= i or tuple(messages[:i]) != self.before or messages[i]["role"] != self.message["role"]:
            return False
        content: str = messages[i]["content"]
        return content.startswith(self.text(documents))

    def has_more_samples_than(self, other: LearnedLayout) -> bool:
        """Return whether more documents can be laid out."""
        return other.num_documents is not None and (
            self.num_documents is None or other.num_documents < self.num_documents
        )


class LayoutLearner:
    """The layout that the last requests had, if they were regular. Thread-safe."""

    def __init__(self, tokenizer: PromptTokenizer | None, *, max_model_len: int = 0) -> None:
        """Know nothing yet; what is learned is tokenised by ``tokenizer``, and makes no prompt without one."""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._lock = Lock()
        self._layout: LearnedLayout | None = None
        self._prompt: BoundPrompt | None = None
        self._num_contradictions = 0
        self._is_warned = False
        self._taught_until = -1

    @property
    def prompt(self) -> BoundPrompt | None:
        """The layout learned, bound; ``None`` while there is none."""
        with self._lock:
            return self._prompt if self._num_contradictions < _MAX_CONTRADICTIONS else None

    @property
    def layout(self) -> LearnedLayout | None:
        """The layout learned; ``None`` while there is none."""
        with self._lock:
            return self._layout if self._num_contradictions < _MAX_CONTRADICTIONS else None

    def observe(
        self,
        messages: Sequence[ChatMessage],
        searches: Sequence[RememberedSearch],
        others: Sequence[RememberedSearch] = (),
        *,
        is_prefilled: bool = True,
    ) -> None:
        """Learn from a request of plain text that shows the result of one of ``searches``.

        A search teaches once: a later prompt that shows its documents may be another chain's.

        Args:
            messages: the request.
            searches: of retrievers that prefill.
            others: of any retriever. A prompt that shows the result of one of these teaches nothing, unless the result
                was made from one of ``searches``.
            is_prefilled: whether the client sends only prefills during the search. No warning if it sends whole
                requests.
        """
        messages = [dict(m) for m in messages]
        if not searches or (shown := _find(messages, [*searches, *others], is_whole=True)) is None:
            return
        claim = shown.search
        sources = [each for each in searches if each.sequence > self._taught_until and _is_source(each, claim)]
        if (shown := _find(messages, sources)) is None:
            return
        seen = _layout_of(messages, shown)
        documents = [shown.search.documents[i] for i in shown.order]
        with self._lock:
            self._taught_until = max(self._taught_until, claim.sequence)
            known = self._layout
            is_foretold = known is not None and known.matches(messages, documents)
            self._num_contradictions = 0 if is_foretold or known is None else self._num_contradictions + 1
            if known is None or not is_foretold:
                layout = seen
            else:  # what stands before the words that were searched for may be a part of a user's question
                question_start = common_prefix_len(known.tail[: known.question_start], seen.tail)
                is_more = seen.has_more_samples_than(known)
                layout = (
                    replace(seen, question_start=min(question_start, seen.question_start))
                    if is_more
                    else replace(known, question_start=question_start)
                )
            if layout != known:
                known = self._layout = layout
                self._prompt = BoundPrompt(
                    layout,
                    self._tokenizer,
                    max_model_len=self._max_model_len,
                    is_question_first=layout.is_question_first,
                    has_documents=layout.num_documents != 0,
                )
            is_new_warning = layout.is_question_first and is_prefilled and not self._is_warned
            self._is_warned |= is_new_warning
        if is_new_warning:
            opening = " ".join([*(message["content"] for message in layout.before), layout.head]).strip()
            warn_question_first(["question"], opening=opening, retriever=claim.retriever)


@dataclass(frozen=True, slots=True)
class _Shown:
    """The message of a request that shows a search's documents, where it shows them, and which they are."""

    search: RememberedSearch
    index: int
    spans: tuple[DocumentSpan, ...]
    order: tuple[int, ...]


def _is_source(search: RememberedSearch, result: RememberedSearch) -> bool:
    """Return whether ``result`` may be made from ``search``, by a reranker or another retriever around it."""
    return search.query == result.query or set(search.documents) <= set(result.documents)


def _find(
    messages: Sequence[ChatMessage], searches: Sequence[RememberedSearch], *, is_whole: bool = False
) -> _Shown | None:
    """Return the search whose documents and query the messages show best; of equal ones the newest.

    ``is_whole``: all documents must be shown, but those of the newest search.
    """
    best: _Shown | None = None
    best_rank = (0, False)
    newest = {(search.query, search.documents): search for search in sorted(searches, key=lambda each: each.sequence)}
    last = max((search.sequence for search in searches), default=None)
    for search in sorted(newest.values(), key=lambda each: -each.sequence):
        query = (search.query or "").strip()
        has_query = bool(query) and any(query in m["content"] for m in messages)
        for index in reversed(range(len(messages))):  # earlier ones may be a history of the chat
            spans = locate_documents(messages[index]["content"], search.documents, [query])
            if is_whole and search.sequence != last and len(spans) < len(search.documents):
                continue
            if spans and (rank := (len(spans), has_query)) > best_rank:
                places = {doc_id: i for i, (doc_id, _) in enumerate(search.documents)}
                best, best_rank = _Shown(search, index, tuple(spans), tuple(places[s.doc_id] for s in spans)), rank
        if best_rank == (len(search.documents), True):
            break
    return best


def _layout_of(messages: Sequence[ChatMessage], shown: _Shown) -> LearnedLayout:
    content: str = messages[shown.index]["content"]
    spans, query = shown.spans, shown.search.query or ""
    head, tail = content[: spans[0].start], content[spans[-1].end :]
    after = tuple(messages[shown.index + 1 :])
    question_start = _place_of(query, tail)
    if query and question_start is None and all(_place_of(query, m["content"]) is None for m in after):
        for i, text in enumerate([*(m["content"] for m in messages[: shown.index]), head]):
            if (place := _place_of(query, text)) is not None:
                return _static_part(messages, i, place, len(query.strip()), is_question_first=True)
    chat = next((i for i, m in enumerate(messages[: shown.index]) if m["role"] in ("user", "assistant")), None)
    if chat is not None:  # a history, which is another one each time
        return replace(_static_part(messages, chat, 0, 0), without_history=tuple(messages[shown.index :]))
    if list(shown.order) != sorted(shown.order):  # the chain has an order of its own
        return _static_part(messages, shown.index, len(head), 0)
    layout = LearnedLayout(
        before=tuple(messages[: shown.index]),
        message=messages[shown.index],
        head=head,
        gap="",
        first_number=0,
        num_documents=1,
        tail=tail,
        question_start=question_start or 0,
        after=after,
    )
    gaps = [content[one.end : other.start] for one, other in pairwise(spans)]
    return _with_gap(layout, gaps, [s.doc_id for s in spans])


def _place_of(query: str, text: str) -> int | None:
    """Return where ``text`` asks ``query``: as words of their own, not as letters of a template's word."""
    if not query.strip():
        return 0
    whole = "|".join(map(re.escape, dict.fromkeys((query, query.strip()))))  # some prompts strip it
    bounds = (rf"(?<!{char})(?:{whole})(?!{char})" for char in (r"\S", r"\w"))
    return next((found.start() for bound in bounds if (found := re.search(bound, text))), None)


def _static_part(
    messages: Sequence[ChatMessage], index: int, start: int, num_chars: int, *, is_question_first: bool = False
) -> LearnedLayout:
    """Return the layout that is not known from character ``start`` of a message on."""
    content: str = messages[index]["content"]
    return LearnedLayout(
        before=tuple(messages[:index]),
        message=messages[index],
        head=content[:start],
        gap="",
        first_number=0,
        num_documents=0,
        tail=content[start + num_chars :],
        question_start=0,
        after=tuple(messages[index + 1 :]),
        is_question_first=is_question_first,
    )


def _with_gap(layout: LearnedLayout, gaps: Sequence[str], doc_ids: Sequence[DocId]) -> LearnedLayout:
    """Return the layout with what stands between documents, if one rule says it of all ``gaps``."""
    head, first = layout.head, doc_ids[0]
    for number in (1, 0):
        rule = {_marked(gap, str(i + number), _NUMBER) for i, gap in enumerate(gaps, 1)}
        if len(rule) == 1 and _has_same_ending(head, next(iter(rule)), str(number), _NUMBER):
            return _regular(layout, head, rule.pop(), number)
    marked_head = _marked(head, first, _DOC_ID)
    rule = {_marked(gap, doc_id, _DOC_ID) for gap, doc_id in zip(gaps, doc_ids[1:], strict=True)}
    if not gaps:  # the separator is not known yet; an id of digits might be a number
        return layout if first.isdigit() else replace(layout, head=marked_head)
    if len(rule) == 1 and _has_same_ending(head, next(iter(rule)), first, _DOC_ID):
        return _regular(layout, marked_head, rule.pop(), 0)
    return _regular(layout, head, gaps[0], 0) if len(set(gaps)) == 1 else layout


def _regular(layout: LearnedLayout, head: str, gap: str, first_number: int) -> LearnedLayout:
    if len(gap) > _MAX_GAP_CHARS:
        return layout
    return replace(layout, head=head, gap=gap, first_number=first_number, num_documents=None)


def _marked(text: str, word: str, mark: str) -> str:
    """Return ``text`` with a mark in place of the last ``word``, if it stands there as a word of its own."""
    found = list(re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text))
    return text[: found[-1].start()] + mark + text[found[-1].end() :] if found else text


def _has_same_ending(head: str, gap: str, first: str, mark: str) -> bool:
    """Return whether the mark of a gap stands for ``first`` before the first document."""
    _, found, end = gap.rpartition(mark)
    return bool(found) and head.endswith(first + end)


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
        (gap if i else head).replace(_DOC_ID, ids[place]) + content[spans[place].start : spans[place].end]
        for i, place in enumerate(order)
    )
    moved: ChatMessage = {**messages[index], "content": text + tail}
    return Rearranged([*messages[:index], moved, *messages[index + 1 :]], tuple(ids[place] for place in order))


def _frame(head: str, gaps: Sequence[str], ids: Sequence[DocId]) -> tuple[str, str] | None:
    """Return what stands before the first document and before every other, ids marked; None if no rule says it."""
    marked = {_marked(gap, doc_id, _DOC_ID) for gap, doc_id in zip(gaps, ids[1:], strict=True)}
    if len(marked) != 1:
        return None
    (gap,) = marked
    between, newline, begins = gap.rpartition("\n")
    if any(character.isalnum() for character in between) and len(gaps) == 1:
        return None  # it may end the one or begin the other
    marked_head = _marked(head, ids[0], _DOC_ID) if _DOC_ID in gap else head
    is_framed = any(character.isalnum() for character in begins)
    if is_framed and (_DOC_ID in gap or len(gaps) == 1) and not f"\n{marked_head}".endswith(newline + begins):
        return None
    return marked_head, gap
