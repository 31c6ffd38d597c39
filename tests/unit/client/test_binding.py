"""The beginning of a prompt before its question is asked: bound, or learned from requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from ragcache_core.client.prompts import bound_prompt as binding
from ragcache_core.client.prompts.bound_prompt import MIN_PREFILL_TOKENS, BoundPrompt, bind
from ragcache_core.client.prompts.layout_learner import LayoutLearner
from ragcache_core.client.prompts.request_plan import RememberedDocuments
from ragcache_core.ordering import static_prefix_digest
from ragcache_core.prompt import ChatMessage, PromptLayout, RenderedPrompt, render_chat
from ragcache_core.types import Document, SegmentKind
from tests.support.local_tokenizer import LocalTokenizer
from tests.support.prefixes import DOCUMENTS, QUESTION, check_prefix
from tests.support.waiting import until

TOKENIZER = LocalTokenizer.of_model(str(Path(__file__).parents[3] / "examples" / "demo_model"))
MAX_MODEL_LEN = 2048

_TEXTS = st.text(min_size=1, max_size=40).filter(lambda text: bool(text.strip()) and "Question:" not in text)
QUESTIONS = _TEXTS | st.sampled_from(
    ["?", "...", "\n\nWho?", "  Who?", "1,234", "Answer:", "sun", "été", "月は?", "[1]", "\u200bZor"]
)
"""None says "Question:": the demo model's chat template writes that word before a message that lacks it."""


def request(messages: Sequence[ChatMessage], documents: Sequence[Document]) -> RenderedPrompt:
    return render_chat(TOKENIZER, messages, [(d.doc_id, d.text) for d in documents])


def numbered(documents: Sequence[Document]) -> str:
    return "\n".join(f"[{i}] {d.text}" for i, d in enumerate(documents, 1))


def joined(documents: Sequence[Document]) -> str:
    return "\n\n".join(d.text for d in documents)


def system_and_user(context: str, question: str) -> list[ChatMessage]:
    return [
        {"role": "system", "content": "Answer the question from the documents, and say no more than they do."},
        {"role": "user", "content": f"Context:\n{context}\n\nQuestion: {question}"},
    ]


def context_in_system(context: str, question: str) -> list[ChatMessage]:
    return [{"role": "system", "content": f"Answer from:\n{context}"}, {"role": "user", "content": question}]


def question_glued(context: str, question: str) -> list[ChatMessage]:
    return [{"role": "user", "content": f"Question: {context}{question}"}]


def question_first(context: str, question: str) -> list[ChatMessage]:
    static = "Answer the question from the documents, and say no more than they do. Do not guess, and be brief."
    return [{"role": "system", "content": static}, {"role": "user", "content": f"Q: {question}\n\n{context}"}]


def bound(prompt: Any, format_docs: Callable[[Any], Any] | None = joined, **names: str) -> BoundPrompt:
    return bind(prompt, format_docs, TOKENIZER, max_model_len=MAX_MODEL_LEN, **names)


# Bound


@pytest.mark.parametrize("prompt", [system_and_user, context_in_system, question_glued])
@pytest.mark.parametrize("format_docs", [joined, numbered])
@settings(max_examples=40, deadline=None)
@given(question=QUESTIONS)
def test_whatever_is_asked_the_prefix_is_the_beginning_of_the_request(
    prompt: Callable[[str, str], list[ChatMessage]], format_docs: Callable[[Sequence[Document]], str], question: str
) -> None:
    whole = request(prompt(format_docs(DOCUMENTS), question), DOCUMENTS)
    check_prefix(bound(prompt, format_docs).prefix(DOCUMENTS, DOCUMENTS), whole, DOCUMENTS)


@pytest.mark.parametrize(
    "layout",
    [
        PromptLayout(),
        PromptLayout(static_prefix=""),
        PromptLayout("Use {braces}.", "[{doc_id}] {text} {x}", "\n--{}--\n", "{{Q}} {question}?"),
    ],
)
@settings(max_examples=40, deadline=None)
@given(question=QUESTIONS)
def test_a_layout_needs_no_function_of_its_own(layout: PromptLayout, question: str) -> None:
    whole = layout.render(TOKENIZER, DOCUMENTS, question)
    check_prefix(bound(layout, None).prefix(DOCUMENTS, DOCUMENTS), whole, DOCUMENTS)


def byte_pairs() -> LocalTokenizer:
    """Return a tokenizer of GPT-2's kind: merges of bytes, within words that take the space before them."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    texts = [d.text for d in DOCUMENTS] + [QUESTION, "\n\nQuestion: Where?\n\n", "believable, unbelievable."]
    trainer = BpeTrainer(vocab_size=600, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts * 3, trainer)

    def render(messages: Sequence[ChatMessage], settings: object) -> str:
        return "".join(f"<{m['role']}>\n{m['content']}\n" for m in messages) + "<assistant>\n"

    return LocalTokenizer(tokenizer, render)


BYTE_PAIRS = byte_pairs()


@pytest.mark.parametrize("end", ["\n\nQuestion: {}", "{}", " {}", "\n{}", " un{}", "\nQuestion:{}?"])
@settings(max_examples=60, deadline=None)
@given(question=_TEXTS | st.sampled_from(["believable", "\n\n", ":", "?", " Where?", "s", "'s", "12"]))
def test_tokens_that_would_merge_with_the_question_are_left_out(end: str, question: str) -> None:
    def prompt(context: str, asked: str) -> list[ChatMessage]:
        return [{"role": "user", "content": context + end.replace("{}", asked)}]

    prefix = bind(prompt, joined, BYTE_PAIRS, max_model_len=MAX_MODEL_LEN).prefix(DOCUMENTS, DOCUMENTS)
    shown = [(d.doc_id, d.text) for d in DOCUMENTS]
    check_prefix(prefix, render_chat(BYTE_PAIRS, prompt(joined(DOCUMENTS), question), shown), DOCUMENTS)


def test_a_stage_shares_its_first_documents_with_the_next() -> None:
    prompt = bound(system_and_user)
    first = prompt.prefix(DOCUMENTS[:2], DOCUMENTS[:2])
    second = prompt.prefix([DOCUMENTS[0], DOCUMENTS[2]], [DOCUMENTS[0], DOCUMENTS[2]])
    assert first is not None
    assert second is not None
    end = first.segments[1].end - 1
    assert first.segments[1].doc_id == "sun"
    assert first.token_ids[:end] == second.token_ids[:end]
    assert first.token_ids != second.token_ids


def test_a_line_that_names_the_order_of_relevance_comes_after_the_prefix() -> None:
    layout = PromptLayout(relevance_hint="Most relevant first: {order}")
    prefix = bound(layout, None).prefix(DOCUMENTS, DOCUMENTS)
    for relevance in (DOCUMENTS, DOCUMENTS[::-1]):
        check_prefix(prefix, layout.render(TOKENIZER, DOCUMENTS, QUESTION, relevance=relevance), DOCUMENTS)


def test_the_users_own_order_is_the_order_of_the_prompt() -> None:
    def by_id(documents: Sequence[Document]) -> str:
        return joined(sorted(documents, key=lambda d: d.doc_id))

    in_order = [DOCUMENTS[2], DOCUMENTS[1], DOCUMENTS[0]]
    whole = request(system_and_user(by_id(DOCUMENTS), QUESTION), DOCUMENTS)
    check_prefix(bound(system_and_user, by_id).prefix(DOCUMENTS, DOCUMENTS), whole, in_order)


def test_a_question_before_the_documents_is_reported_once_and_the_static_part_remains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompt = bound(question_first)
    prefixes = {prompt.prefix(documents, documents) for documents in (DOCUMENTS, DOCUMENTS[:1], DOCUMENTS)}
    assert prompt.is_question_first
    (prefix,) = prefixes
    assert prefix is not None
    whole = request(question_first(joined(DOCUMENTS), QUESTION), DOCUMENTS)
    assert prefix.token_ids == whole.token_ids[: len(prefix.token_ids)]
    assert [s.kind for s in prefix.segments] == [SegmentKind.QUESTION]
    (record,) = caplog.records
    assert "put the context before the question" in record.getMessage()


def test_nothing_found_leaves_the_static_part_with_its_empty_context() -> None:
    static = "Answer the question from the documents, and say no more than they do. Do not guess, and be brief."
    layout = PromptLayout(static)
    prefix = bound(layout, None).prefix([], [])
    assert prefix is not None
    messages = layout.messages([], QUESTION)
    assert prefix.token_ids == request(messages, []).token_ids[: len(prefix.token_ids)]


@pytest.mark.parametrize("fails_in", ["format_docs", "prompt", "type", "later"])
def test_code_of_the_user_that_fails_is_reported_once_and_never_an_error(
    fails_in: str, caplog: pytest.LogCaptureFixture
) -> None:
    def format_docs(documents: Sequence[Document]) -> Any:
        if fails_in == "format_docs":
            raise KeyError("source")
        return None if fails_in == "type" else joined(documents)

    def prompt(context: str, question: str) -> list[ChatMessage]:
        if fails_in == "prompt" or (fails_in == "later" and "sun" in context):
            raise RuntimeError("no template")
        return system_and_user(context, question)

    caplog.set_level(logging.WARNING)
    failing = bound(prompt, format_docs)
    assert [failing.prefix(DOCUMENTS, DOCUMENTS) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert "bind the prompt and the format_docs that the chain uses" in record.getMessage()


def test_documents_that_do_not_fit_are_not_prefilled() -> None:
    many = [Document(f"d{i}", f"{i} " * 400) for i in range(8)]
    assert bound(system_and_user).prefix(many, many) is None
    assert bound(system_and_user).prefix(many[:2], many[:2]) is not None


# Learned


class Chain:
    """Requests of a chain whose retriever tells what it found, and the learner that sees them."""

    def __init__(self, prompt: Callable[[str, str], list[ChatMessage]], format_docs: Callable[[Any], str]) -> None:
        self.learner = LayoutLearner(TOKENIZER, max_model_len=MAX_MODEL_LEN)
        self.remembered = RememberedDocuments()
        self.prompt = prompt
        self.format_docs = format_docs

    def messages(self, documents: Sequence[Document], question: str) -> list[ChatMessage]:
        return self.prompt(self.format_docs(documents), question)

    def ask(
        self,
        documents: Sequence[Document],
        question: str = QUESTION,
        *,
        query: str | None = "",
        is_prefilled: bool = True,
    ) -> None:
        self.remembered.add(documents, query=question if query == "" else query)
        messages = self.messages(documents, question)
        self.learner.observe(messages, self.remembered.searches(), is_prefilled=is_prefilled)

    def check(self, documents: Sequence[Document], question: str = "Which one is red?") -> RenderedPrompt:
        assert self.learner.prompt is not None
        whole = request(self.messages(documents, question), documents)
        return check_prefix(self.learner.prompt.prefix(documents, documents), whole, documents)


def by_id(documents: Sequence[Document]) -> str:
    return "\n".join(f"<doc id={d.doc_id}>{d.text}</doc>" for d in documents)


def from_zero(documents: Sequence[Document]) -> str:
    return " ".join(f"({i}) {d.text}" for i, d in enumerate(documents))


OTHERS = [
    Document("io", "Io is a moon of Jupiter with many volcanoes."),
    Document("7", "Seven sisters are stars."),
    Document("pluto", "Pluto was a planet for a while, 1 of 9."),
    Document("venus", "Venus is hot."),
]
PROMPTS = [system_and_user, context_in_system, question_glued]
FORMATS = [joined, numbered, by_id, from_zero]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("format_docs", FORMATS)
@pytest.mark.parametrize("query", ["", None])
@pytest.mark.parametrize("num_seen", [2, 3])
def test_a_regular_request_teaches_the_layout_of_any_documents(
    prompt: Callable[[str, str], list[ChatMessage]],
    format_docs: Callable[[Any], str],
    query: str | None,
    num_seen: int,
) -> None:
    chain = Chain(prompt, format_docs)
    assert chain.learner.prompt is None
    chain.ask(DOCUMENTS[:num_seen], query=query)
    for documents in (OTHERS, OTHERS[:1], OTHERS[::-1], DOCUMENTS):
        chain.check(documents)


@settings(max_examples=60, deadline=None)
@given(question=QUESTIONS, other=QUESTIONS, query=st.booleans())
@example(question="st", other="?", query=True)
@example(question=":", other="?", query=True)
@example(question="on:", other="?", query=True)
@example(question="Question", other="?", query=True)
def test_whatever_was_asked_what_was_learned_is_the_beginning_of_the_next_request(
    question: str, other: str, query: bool
) -> None:
    chain = Chain(system_and_user, numbered)
    chain.ask(DOCUMENTS, question, query=question if query else None)
    if chain.learner.prompt is not None and not chain.learner.prompt.is_question_first:
        chain.check(OTHERS, other)


def test_one_document_teaches_the_first_one_and_two_teach_the_rest() -> None:
    chain = Chain(system_and_user, joined)
    chain.ask(DOCUMENTS[:1])
    assert chain.learner.prompt is not None
    prefix = chain.learner.prompt.prefix(OTHERS, OTHERS)
    assert prefix is not None
    assert [s.doc_id for s in prefix.segments if s.kind is SegmentKind.DOCUMENT] == ["io"]
    whole = request(chain.messages(OTHERS, "Who?"), OTHERS)
    assert prefix.token_ids == whole.token_ids[: len(prefix.token_ids)]
    chain.ask(DOCUMENTS[1:])
    chain.check(OTHERS)
    chain.ask(OTHERS[:1])
    chain.check(DOCUMENTS)


def test_irregular_separators_teach_no_more_than_the_first_document() -> None:
    def sourced(documents: Sequence[Document]) -> str:
        return "".join(f"{d.text}\nLength: {len(d.text)}\n" for d in documents)

    chain = Chain(system_and_user, sourced)
    chain.ask(DOCUMENTS)
    assert chain.learner.prompt is not None
    prefix = chain.learner.prompt.prefix(OTHERS, OTHERS)
    assert prefix is not None
    assert [s.doc_id for s in prefix.segments if s.kind is SegmentKind.DOCUMENT] == ["io"]
    whole = request(chain.messages(OTHERS, "Who?"), OTHERS)
    assert prefix.token_ids == whole.token_ids[: len(prefix.token_ids)]


def test_documents_in_another_order_than_the_searchs_teach_the_static_part_only() -> None:
    chain = Chain(system_and_user, lambda documents: joined(documents[::-1]))
    chain.ask(DOCUMENTS)
    assert chain.learner.prompt is not None
    prefix = chain.learner.prompt.prefix(OTHERS, OTHERS)
    assert prefix is not None
    assert not [s for s in prefix.segments if s.kind is SegmentKind.DOCUMENT]
    whole = request(chain.messages(OTHERS, "Who?"), OTHERS)
    assert prefix.token_ids == whole.token_ids[: len(prefix.token_ids)]


@pytest.mark.parametrize("query", ["doc", "swer", "mo"])
def test_letters_of_a_templates_words_are_not_taken_for_the_question(query: str) -> None:
    chain = Chain(system_and_user, joined)
    chain.ask(DOCUMENTS, "Which one is red?", query=query)  # a chain may search for other words than it asks
    assert chain.learner.prompt is not None
    assert not chain.learner.prompt.is_question_first
    chain = Chain(question_first, joined)
    chain.ask(DOCUMENTS, query)
    assert chain.learner.prompt is not None
    assert chain.learner.prompt.is_question_first
    known = chain.learner.prompt.prefix(OTHERS, OTHERS)
    assert known is not None
    assert "Do not guess" in TOKENIZER.decode(known.token_ids)


def test_what_two_questions_have_not_in_common_is_no_part_of_the_layout() -> None:
    chain = Chain(system_and_user, joined)
    chain.ask(DOCUMENTS, "Which moon is red?", query="moon")
    chain.ask(OTHERS, "Is the sun hot?", query="sun")
    expect_known_beginning(chain, "Who is tall?")


def expect_known_beginning(chain: Chain, question: str) -> None:
    assert chain.learner.prompt is not None
    known = chain.learner.prompt.prefix(OTHERS, OTHERS)
    assert known is not None
    assert next(s.doc_id for s in known.segments if s.doc_id) == OTHERS[0].doc_id
    whole = request(chain.messages(OTHERS, question), OTHERS)
    assert known.token_ids == whole.token_ids[: len(known.token_ids)]


def test_no_question_first_warning_for_speculative_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chain = Chain(question_first, joined)
    chain.ask(DOCUMENTS, is_prefilled=False)
    assert chain.learner.prompt is not None
    assert chain.learner.prompt.is_question_first
    assert caplog.records == []
    chain.ask(DOCUMENTS)
    (record,) = caplog.records
    assert "put the context before the question" in record.getMessage()


def test_a_history_before_the_documents_is_not_taken_for_a_static_part() -> None:
    static = "Answer the question from the documents, and say no more than they do."
    history = [{"role": "user", "content": "Hello, is anybody there?"}, {"role": "assistant", "content": "Yes."}]

    def chat(context: str, question: str) -> list[ChatMessage]:
        asked = {"role": "user", "content": f"{context}\n\nQuestion: {question}"}
        return [{"role": "system", "content": static}, *history, asked]

    chain = Chain(chat, joined)
    chain.ask(DOCUMENTS)
    history = []
    prompt = chain.learner.prompt
    assert prompt is not None
    known = prompt.prefix(OTHERS, OTHERS)
    assert known is not None
    assert known.token_ids == request(chain.messages(OTHERS, "Who?"), OTHERS).token_ids[: len(known.token_ids)]
    chain.ask(DOCUMENTS)
    chain.check(OTHERS)


def test_a_contradicting_request_restarts_the_learning() -> None:
    chain = Chain(system_and_user, joined)
    chain.ask(DOCUMENTS)
    chain.format_docs = numbered
    chain.ask(DOCUMENTS)
    chain.check(OTHERS)
    chain.prompt = context_in_system
    chain.ask(DOCUMENTS)
    chain.check(OTHERS)


def test_requests_that_contradict_each_other_all_the_time_teach_nothing() -> None:
    chain = Chain(system_and_user, joined)
    for i in range(5):
        chain.prompt = lambda context, question, i=i: system_and_user(f"It is {i} o'clock.\n{context}", question)  # type: ignore[misc]  (mypy infers no lambda with a default)
        chain.ask(DOCUMENTS)
    assert chain.learner.prompt is None
    chain.ask(DOCUMENTS)
    chain.check(OTHERS)


def test_requests_without_remembered_documents_teach_nothing() -> None:
    chain = Chain(system_and_user, joined)
    chain.remembered.add(OTHERS, query=QUESTION)
    chain.learner.observe(chain.messages(DOCUMENTS, QUESTION), chain.remembered.searches())
    assert chain.learner.prompt is None


def test_requests_at_the_same_time_teach_the_layout_that_they_share() -> None:
    chain = Chain(system_and_user, numbered)
    groups = [[Document(f"d{i}-{j}", f"Planet {i} has {j} moons, they say.") for j in range(3)] for i in range(24)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: chain.ask(groups[i], f"How many moons has planet {i}?"), range(24)))
    chain.check(OTHERS)


def test_prefixes_shorter_than_a_block_send_no_request() -> None:
    prefix = bound(PromptLayout("Answer."), None).prefix(DOCUMENTS[:1], DOCUMENTS[:1])
    assert prefix is not None
    assert len(prefix.token_ids) >= MIN_PREFILL_TOKENS
    assert bound(PromptLayout("Answer."), None).prefix([], []) is None


def test_the_static_part_is_rendered_with_one_document() -> None:
    num_shown: list[int] = []

    def counted(documents: Sequence[Document]) -> str:
        num_shown.append(len(documents))
        return joined(documents)

    whole = request(system_and_user(joined(DOCUMENTS), QUESTION), DOCUMENTS)
    prompt = bound(system_and_user, counted)
    assert until(lambda: prompt.static_prefix(DOCUMENTS, DOCUMENTS) is not None)
    known = prompt.static_prefix(DOCUMENTS, DOCUMENTS)
    assert known == static_prefix_digest(whole.token_ids, whole.segments)
    assert num_shown == [1]


def test_what_a_prompt_begins_with_is_made_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    days: list[str] = []

    def prompt(context: str, question: str) -> list[ChatMessage]:
        return [
            {"role": "system", "content": f"Answer in a word or two. Today is {days[0]}."},
            {"role": "user", "content": f"{context}\n\n{question}"},
        ]

    it = bound(prompt, joined)
    assert it.static_prefix(DOCUMENTS, DOCUMENTS) is None, "it cannot be made yet"
    days.append("Monday")
    assert it.static_prefix(DOCUMENTS, DOCUMENTS) is None, "nor is it made for each search"
    monkeypatch.setattr(binding, "_REMADE_AFTER_S", 0.0)
    assert until(lambda: it.static_prefix(DOCUMENTS, DOCUMENTS) is not None)
    monday = it.static_prefix(DOCUMENTS, DOCUMENTS)
    days[0] = "Tuesday"
    assert until(lambda: it.static_prefix(DOCUMENTS, DOCUMENTS) != monday)
