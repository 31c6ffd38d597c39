"""Prompt layout: documents are found in the prompt, and their tokens are exactly theirs."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import PromptError, PromptTooLongError
from ragcache_core.prompt import (
    ChatMessage,
    DocumentSpan,
    PromptDocument,
    PromptLayout,
    RenderedPrompt,
    TokenizedText,
    locate_documents,
    render_chat,
)
from ragcache_core.recognition import PromptTexts
from ragcache_core.stats import document_stats
from ragcache_core.types import Document, PromptSegment, SegmentKind
from ragcache_core.wire import tile


class WordTokenizer:
    """A tokenizer whose tokens are words with the white space before them, or single other characters."""

    control_tokens: frozenset[str] = frozenset()
    finds_documents = True

    def render(self, messages: Sequence[ChatMessage]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<answer>"

    def encode(self, text: str, *, add_special_tokens: bool = False) -> TokenizedText:
        words = re.findall(r"\s*\w+|\s|[^\w\s]", text)
        assert "".join(words) == text
        return TokenizedText(tuple(_IDS.setdefault(word, len(_IDS)) for word in words))

    def decode(self, token_ids: Sequence[int]) -> str:
        words = list(_IDS)
        return "".join(words[i] for i in token_ids)

    def lay_out(
        self,
        messages: Sequence[ChatMessage],
        documents: Sequence[PromptDocument],
        *,
        other: Sequence[ChatMessage] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        token_ids = self.encode(self.render(messages)).token_ids
        texts = PromptTexts([word.encode() for word in _IDS], lambda text: self.encode(text).token_ids)
        places = zip(documents, texts.find(token_ids, [each[1:] for each in documents]), strict=True)
        found = [PromptSegment(SegmentKind.DOCUMENT, *place, each.doc_id) for each, place in places if place]
        return RenderedPrompt(tuple(messages), token_ids, tile(found, len(token_ids)))


_IDS: dict[str, int] = {}
WORDS = st.lists(st.sampled_from(["zor", "mel", "tak", "Who", "is", "."]), min_size=1, max_size=6).map(" ".join)


@given(st.lists(WORDS, max_size=5), WORDS)
def test_every_document_has_its_own_tokens_and_nothing_else(texts: list[str], question: str) -> None:
    documents = [Document(f"d{i}", text) for i, text in enumerate(texts)]
    layout, tokenizer = PromptLayout(), WordTokenizer()
    prompt = layout.render(tokenizer, documents, question)

    shown: dict[SegmentKind, list[str]] = {}
    for segment in prompt.segments:
        text = tokenizer.decode(prompt.token_ids[segment.start : segment.end])
        shown.setdefault(segment.kind, []).append(text.strip())
    assert sorted(shown.get(SegmentKind.DOCUMENT, [])) == sorted(layout.document_text(d) for d in documents)
    assert shown[SegmentKind.QUESTION][0].endswith("<answer>")
    assert [t for s in prompt.segments for t in range(s.start, s.end)] == list(range(len(prompt.token_ids)))


@given(st.lists(WORDS, min_size=1, max_size=4, unique=True), WORDS, WORDS)
def test_prompts_with_the_same_first_documents_share_their_tokens(texts: list[str], last: str, question: str) -> None:
    layout, tokenizer = PromptLayout(), WordTokenizer()
    shared = [Document(f"d{i}", text) for i, text in enumerate(texts)]
    one = layout.render(tokenizer, shared, question)
    other = layout.render(tokenizer, [*shared, Document("last", last)], "Another " + question)
    end = one.segments[-2].end if len(one.segments) > 1 else 0
    assert one.token_ids[:end] == other.token_ids[:end]


@given(st.text(alphabet="ab ", max_size=40), st.lists(st.text(alphabet="ab ", max_size=6), max_size=6))
def test_located_documents_are_in_the_text_in_order_and_do_not_overlap(text: str, pieces: list[str]) -> None:
    spans = locate_documents(text, [(f"d{i}", piece) for i, piece in enumerate(pieces)])
    assert all(text[s.start : s.end] == pieces[int(s.doc_id[1:])].strip() for s in spans)
    assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    missing = set(range(len(pieces))) - {int(s.doc_id[1:]) for s in spans}
    found = {pieces[int(s.doc_id[1:])].strip() for s in spans}
    assert all(not pieces[i].strip() or _blocked(text, pieces[i], spans) for i in missing)
    assert "" not in found


def _blocked(text: str, piece: str, spans: Sequence[DocumentSpan]) -> bool:
    """Whether every occurrence of a piece is a part of a word, or overlaps a document that was placed."""
    starts = [m.start() for m in re.finditer(rf"(?<!\w)(?={re.escape(piece.strip())}(?!\w))", text)]
    return all(any(s.start < i + len(piece.strip()) and i < s.end for s in spans) for i in starts)


def test_a_document_that_holds_another_keeps_its_characters() -> None:
    spans = locate_documents("zor is big. zor is", [("small", "zor is"), ("large", "zor is big.")])
    assert spans == [DocumentSpan("large", 0, 11), DocumentSpan("small", 12, 18)]


def test_equal_documents_take_time_by_their_number() -> None:
    def seconds(num_documents: int) -> float:
        text, documents = "zor is big. " * num_documents, [(f"d{i}", "zor is big.") for i in range(num_documents)]
        times = []
        for _ in range(3):
            began_s = time.process_time()
            assert len(locate_documents(text, documents)) == num_documents
            times.append(time.process_time() - began_s)
        return min(times)

    assert seconds(4000) < 30 * seconds(500)  # 8 times as many: 64 times as long if each looks at all others


def shown_texts(messages: Sequence[ChatMessage], documents: list[tuple[str, str]], *questions: str) -> list[Any]:
    """The documents of a chat: the message that each stands in, and its id."""
    prompt = render_chat(WordTokenizer(), messages, documents, questions=questions)
    before = [
        WordTokenizer().decode(prompt.token_ids[: s.start]) for s in prompt.segments if s.kind is SegmentKind.DOCUMENT
    ]
    ids = [s.doc_id for s in prompt.segments if s.kind is SegmentKind.DOCUMENT]
    return [
        (len(re.findall("<(?:user|system|assistant)>", text)) - 1, doc_id)
        for text, doc_id in zip(before, ids, strict=True)
    ]


def test_a_document_that_a_later_turn_shows_again_has_a_place_of_its_own_there() -> None:
    documents = [("zor", "zor is big."), ("mel", "mel is red."), ("tak", "tak is old.")]
    messages = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "zor is big. mel is red. Who is big?"},
        {"role": "assistant", "content": "It says: zor is big."},
        {"role": "user", "content": "zor is big. tak is old. And who is old?"},
    ]
    assert shown_texts(messages, documents) == [(1, "zor"), (1, "mel"), (3, "zor"), (3, "tak")]
    prompt = render_chat(WordTokenizer(), messages, documents)
    tokens = len(WordTokenizer().encode("zor is big.").token_ids)
    assert [(d.doc_id, d.num_tokens) for d in document_stats(prompt.segments, 0)] == [
        (doc_id, tokens) for doc_id in ("zor", "mel", "zor", "tak")
    ], "no turn of the chat is counted to the document before it"


@pytest.mark.parametrize(
    ("contents", "places"),
    [
        (["Who says mel is red. Really?\n\nzor is big. mel is red."], [(0, "zor"), (0, "mel")]),
        (["zor is big. mel is red.\n\nWho says mel is red. Really?"], [(0, "zor"), (0, "mel")]),
        (["zor is big. mel is red.", "Who says mel is red. Really?"], [(0, "zor"), (0, "mel")]),
        (["zor is big.", "Who says mel is red. Really?"], [(0, "zor")]),
    ],
)
def test_what_a_question_quotes_of_a_document_is_not_that_document(contents: list[str], places: list[Any]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    documents = [("zor", "zor is big."), ("mel", "mel is red.")]
    assert shown_texts(messages, documents, "Who says mel is red. Really?") == places


@pytest.mark.parametrize("layout", [PromptLayout(), PromptLayout(document_format="\n{text}\n")])
def test_a_question_that_holds_all_documents_does_not_move_them(layout: PromptLayout) -> None:
    documents = [Document("zor", "zor is big."), Document("mel", "mel is red.")]
    plain, quoting = (
        layout.render(WordTokenizer(), documents, question)
        for question in ("Who?", f"Why {layout.context(documents)}?")
    )
    assert [(s.doc_id, s.start) for s in quoting.segments] == [(s.doc_id, s.start) for s in plain.segments]


def test_document_ids_may_be_shown_and_braces_in_documents_are_left_alone() -> None:
    layout = PromptLayout(document_format="[{doc_id}] {text};")
    assert layout.document_text(Document("faq-7", "{question} {text} {")) == "[faq-7] {question} {text} {;"
    assert (
        layout.messages([Document("d", "{question}")], "a {text}?")[1]["content"]
        == "[d] {question};\n\nQuestion: a {text}?"
    )


def test_a_chat_template_that_changes_documents_is_reported() -> None:
    class Shouting(WordTokenizer):
        def render(self, messages: Sequence[ChatMessage]) -> str:
            return super().render(messages).upper()

    with pytest.raises(PromptError, match="does not show document 'd'"):
        PromptLayout().render(Shouting(), [Document("d", "zor is")], "Who?")


def test_documents_that_do_not_fit_are_refused_with_value_limit_and_hint() -> None:
    documents = [Document(f"d{i}", "zor " * 50 + str(i)) for i in range(3)]
    with pytest.raises(PromptTooLongError, match=r"has \d+ tokens .* holds 100: retrieve fewer"):
        PromptLayout().render(WordTokenizer(), documents, "Who?", max_prompt_tokens=100)
