"""Questions from a file, scores of answers, ways to answer, and what they add up to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.client.generation import Generation, Prompt
from ragcache_core.config import CacheConfig
from ragcache_core.errors import ConfigError
from ragcache_core.prompt import RenderedPrompt
from ragcache_core.quality import (
    REFERRED_TO,
    SHOWN_AGAIN,
    Question,
    ScoredAnswer,
    answers_of,
    conversations_of,
    exact_match,
    jaccard,
    order_methods,
    read_questions,
    rouge_l,
    summarise,
    summary_table,
    token_f1,
)
from ragcache_core.quality.answers import MAX_TURNS, answers_in_conversations
from ragcache_core.quality.scores import longest_common, wilson_interval
from ragcache_core.stats import ChunkReuseStats, RequestStats
from ragcache_core.types import Document, SegmentKind
from tests.support.local_tokenizer import LocalTokenizer

LINE = {
    "question": "Who founded Zorval?",
    "answer": "Anna Krenvi",
    "documents": ["Zorval is.", "Mel is."],
    "kind": "one",
}


def written(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def brute_force_common(one: list[str], other: list[str]) -> int:
    if not one or not other:
        return 0
    if one[-1] == other[-1]:
        return brute_force_common(one[:-1], other[:-1]) + 1
    return max(brute_force_common(one[:-1], other), brute_force_common(one, other[:-1]))


WORDS = st.lists(st.sampled_from(["zor", "mel", "kel"]), max_size=6)


@given(WORDS, WORDS)
def test_the_longest_common_subsequence_is_that_of_trying_all(one: list[str], other: list[str]) -> None:
    assert longest_common(one, other) == brute_force_common(one, other)


@given(WORDS, WORDS)
def test_rouge_lies_between_nothing_and_all_and_is_all_for_equal_words_alone(one: list[str], other: list[str]) -> None:
    score = rouge_l(" ".join(one), [" ".join(other)])
    assert 0.0 <= score <= 1.0
    assert (score == 1.0) == (one == other)


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [("Anna Krenvi", True), ("the  anna krenvi.", True), ("Anna", False), ("Anna Krenvi Tolmar", False), ("", False)],
)
def test_an_exact_match_overlooks_case_punctuation_and_articles_alone(answer: str, is_right: bool) -> None:
    assert exact_match(answer, ["Boris Mel", "Anna Krenvi"]) is is_right


@pytest.mark.parametrize(
    ("answer", "f1", "shared"),
    [
        ("Krenvi Anna", 1.0, 1.0),
        ("Anna Krenvi Anna", 0.8, 1.0),
        ("Anna Tolmar", 0.5, 1 / 3),
        ("Boris", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_f1_counts_words_and_jaccard_distinct_ones_in_whichever_order(answer: str, f1: float, shared: float) -> None:
    expected = ["Anna Krenvi", "Mel"]
    assert (token_f1(answer, expected), jaccard(answer, expected)) == (pytest.approx(f1), pytest.approx(shared))


def test_documents_may_be_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "zor.md").write_text("Zorval is.", encoding="utf-8")
    (read,) = read_questions(written(tmp_path / "q.jsonl", {**LINE, "documents": ["zor.md"]}), tmp_path)
    assert read.documents == (Document("zor.md", "Zorval is."),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no JSON"),
        ({"question": "Who?"}, "line 2: it must have question, answer and documents"),
        ([1], "line 2: it must have question"),
        ({**LINE, "documents": []}, "line 2: question, answer and documents must not be empty"),
        ({**LINE, "answer": []}, "must not be empty"),
        ({**LINE, "documents": ["a", 1]}, "must be texts"),
        ({**LINE, "kind": 3}, "must be texts"),
        ({**LINE, "documents": ["a", "a"]}, "there twice"),
        ({**LINE, "documents": [" "]}, "a document without text"),
        ({**LINE, "scores": [0.9]}, "line 2: scores must be 2 numbers"),
        ({**LINE, "scores": [0.9, "0.8"]}, "scores must be 2 numbers"),
        ({**LINE, "scores": [0.9, float("nan")]}, "scores must be 2 numbers"),
        ({**LINE, "scores": 0.9}, "scores must be 2 numbers"),
    ],
)
def test_a_line_that_is_no_question_is_refused_with_its_number(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_questions(written(tmp_path / "q.jsonl", LINE, line))


def test_orders_and_nearly_equal_documents_are_audited_alone_and_together() -> None:
    ways = order_methods(["cache_aware", "canonical", "cache_aware"], 0.02)
    assert [way.name for way in ways] == [
        *("canonical", "cache_aware", "score loss 0.02", "cache_aware, score loss 0.02")
    ]
    sizes = CacheConfig(host_bytes="64MiB")
    caches = [way.cache(sizes) for way in ways]
    assert caches == [None, sizes, sizes, sizes], "only what is cached needs an engine that tells it"
    assert order_methods([], None) == []


class Reader:
    """Answers with the first document's first word; its cache holds what the statistics say."""

    def __init__(self, tokenizer: LocalTokenizer) -> None:
        self.tokenizer = tokenizer
        self.asked: list[tuple[list[str], int]] = []

    def generate(self, prompt: Prompt, *, max_tokens: int = 256) -> Generation:
        assert isinstance(prompt, RenderedPrompt)
        shown = [s.doc_id or "" for s in prompt.segments if s.kind is SegmentKind.DOCUMENT]
        self.asked.append((shown, max_tokens))
        reuse = ChunkReuseStats(2, 30, 10, 15, 0.25, (1, 2)) if len(shown) > 1 else None
        stats = RequestStats(100, 45, 1, 0.5, 0.6, chunk_reuse=reuse)
        return Generation("Zorval", "stop", stats)


def test_every_question_is_asked_in_order_and_every_document_alone_first(demo_model: str) -> None:
    one, two, three = (Document(name, f"{name} is a city.") for name in ("Zorval", "Melvi", "Kelsa"))
    questions = [Question("Who?", ("Zorval",), (one, two), "a"), Question("Which?", ("Melvi",), (two, three), "b")]
    reader, counted = Reader(LocalTokenizer.of_model(demo_model)), []
    answers = answers_of(reader, questions, max_tokens=7, encodes_independently=True, report=counted.append)
    alone, together = reader.asked[:3], reader.asked[3:]
    assert sorted(shown for (shown,), _ in alone) == ["Kelsa", "Melvi", "Zorval"]
    assert together == [(["Zorval", "Melvi"], 7), (["Melvi", "Kelsa"], 7)]
    assert counted == [1, 1]
    assert [answer.is_exact for answer in answers] == [True, False]
    assert (answers[0].num_prompt_tokens, answers[0].num_computed_tokens) == (100, 55)
    assert (answers[0].num_reused_tokens, answers[0].num_recomputed_tokens) == (30, 10)


LONG = {name: Document(name, f"{name} is a city, and about it " + f"{name} tells very much, " * 9) for name in "ABCDE"}


def about(*names: str) -> Question:
    return Question(f"What of {names[0]}?", ("Zorval",), tuple(LONG[name] for name in names), names[0])


def test_questions_that_share_documents_are_turns_of_a_conversation() -> None:
    questions = [about("A", "B"), about("C"), about("B", "D"), about("E"), about("C"), about("D")]
    assert conversations_of(questions) == [[questions[0], questions[2], questions[5]], [questions[1], questions[4]]]
    long = conversations_of([about("A")] * (MAX_TURNS + 2))
    assert [len(turns) for turns in long] == [MAX_TURNS, 2]


def test_later_turns_are_asked_with_all_that_was_said_and_refer_where_they_are_to(demo_model: str) -> None:
    turns = [about("A", "B"), about("B", "C"), about("A")]
    prompts = {}
    for way in (SHOWN_AGAIN, REFERRED_TO):
        reader, counted = Reader(LocalTokenizer.of_model(demo_model)), []
        assert way.refers is not None
        answers = answers_in_conversations(reader, [turns], refers=way.refers, max_tokens=5, report=counted.append)
        assert [answer.kind for answer in answers] == ["B", "A"], "of later turns"
        assert counted == [1, 1, 1]
        prompts[way.name] = [shown for shown, _ in reader.asked]
    assert prompts["shown again"] == [["A", "B"], ["A", "B", "B", "C"], ["A", "B", "B", "C", "A"]]
    assert prompts["referred to"] == [["A", "B"], ["A", "B", "C"], ["A", "B", "C"]]


def test_what_is_shown_is_what_was_arranged_of_more(demo_model: str) -> None:
    documents = tuple(Document(name, f"{name} is a city.") for name in ("Zorval", "Melvi", "Kelsa"))
    reader = Reader(LocalTokenizer.of_model(demo_model))
    for arrange, shown in (
        (None, ["Zorval", "Melvi"]),
        (lambda question: question.documents[:2], ["Zorval", "Melvi"]),
        (lambda question: question.documents[::-2], ["Kelsa", "Zorval"]),
    ):
        (answered,) = answers_of(reader, [Question("Who?", ("x",), documents)], num_shown=2, arrange=arrange)
        assert reader.asked[-1][0] == shown
        assert answered.is_changed == (shown != ["Zorval", "Melvi"])


@pytest.mark.parametrize(
    ("hits", "tries", "low", "high"),
    [(10, 10, 0.7225, 1.0), (0, 10, 0.0, 0.2775), (50, 100, 0.4038, 0.5962), (1, 1, 0.2065, 1.0), (0, 0, 0.0, 1.0)],
)
def test_the_interval_of_a_share_is_wilsons(hits: int, tries: int, low: float, high: float) -> None:
    assert wilson_interval(hits, tries) == pytest.approx((low, high), abs=1e-4)


def test_agreement_is_with_the_answers_to_the_same_questions_kind_by_kind() -> None:
    def said(kind: str, text: str, *, is_changed: bool = False) -> ScoredAnswer:
        return ScoredAnswer(kind, text, True, 1.0, 100, 50, is_changed=is_changed)

    reference = [said("a", "The Sun."), said("b", "moon"), said("b", "mars")]
    answers = [said("a", "sun"), said("b", "moon", is_changed=True), said("b", "venus", is_changed=True)]
    of_a, of_b, of_all = summarise("other", answers, reference)
    assert [of_a.agreement, of_b.agreement, of_all.agreement] == [1.0, 0.5, pytest.approx(2 / 3)]
    assert of_b.agreement_interval == wilson_interval(1, 2)
    assert [of_a.changed, of_b.changed] == [0.0, 1.0]
    row = summary_table({"other": [of_b]}, "other").splitlines()[1]
    assert "50.0% [9%, 91%]" in row
    assert summarise("first", reference)[0].agreement is None


def answer(kind: str, *, is_exact: bool = True, computed: int = 10, reused: int = 0, again: int = 0) -> ScoredAnswer:
    return ScoredAnswer(kind, "x", is_exact, float(is_exact), 100, computed, reused, again, ttft_s=0.25)
