"""Greedy answers of an engine to questions, alone or as turns of conversations, with scores and token counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragcache_core.client.generation import Generation, Prompt
from ragcache_core.client.prompts.repeated_documents import without_repeats
from ragcache_core.errors import ConfigError
from ragcache_core.prompt import ChatMessage, PromptLayout, PromptTokenizer, render_chat
from ragcache_core.quality.questions import Question
from ragcache_core.quality.scores import exact_match, jaccard, rouge_l, token_f1
from ragcache_core.types import Document

MAX_TURNS = 4
_NUM_OPEN = 32


class AnswerSource(Protocol):
    """The part of an :class:`~ragcache_core.client.Engine` that generates answers."""

    @property
    def tokenizer(self) -> PromptTokenizer: ...

    def generate(self, prompt: Prompt, *, max_tokens: int = 256) -> Generation: ...


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """An answer with its scores and token counts.

    Attributes:
        num_reused_tokens: tokens that chunk reuse served.
        num_recomputed_tokens: further tokens of reused chunks, which were recomputed.
        is_changed: the prompt's documents, or their order, differ from the question's.
    """

    kind: str
    text: str
    is_exact: bool
    rouge_l: float
    num_prompt_tokens: int
    num_computed_tokens: int
    num_reused_tokens: int = 0
    num_recomputed_tokens: int = 0
    ttft_s: float | None = None
    is_changed: bool = False
    token_f1: float = 0.0
    jaccard: float = 0.0


Arrange = Callable[[Question], Sequence[Document]]
"""Returns the documents that are shown for a question."""


def answers_of(
    engine: AnswerSource,
    questions: Sequence[Question],
    *,
    layout: PromptLayout = PromptLayout(),  # noqa: B008 (frozen)
    max_tokens: int = 64,
    encodes_independently: bool = False,
    num_shown: int | None = None,
    arrange: Arrange | None = None,
    report: Callable[[int], object] = lambda _: None,
) -> list[ScoredAnswer]:
    """Return greedy answers, one question after another, so that each run has the same cache hits.

    Args:
        engine: answers the questions.
        questions: the questions with their documents.
        layout: of the prompts.
        max_tokens: of an answer.
        encodes_independently: compute each document alone first.
        num_shown: show the first documents of a question; by default all.
        arrange: returns the documents to show instead.
        report: called with 1 after each question.

    Raises:
        PromptTooLongError, RequestRejectedError, EngineDiedError, ...
    """
    tokenizer = engine.tokenizer
    if encodes_independently:
        for document, text in _uses(questions):
            engine.generate(layout.render(tokenizer, [document], text), max_tokens=1)
    answers = []
    for question in questions:
        best = question.documents[:num_shown]
        shown = best if arrange is None else tuple(arrange(question))
        prompt = layout.render(tokenizer, shown, question.text)
        generation = engine.generate(prompt, max_tokens=max_tokens)
        answers.append(scored(question, generation, is_changed=shown != best))
        report(1)
    return answers


def _uses(questions: Sequence[Question]) -> list[tuple[Document, str]]:
    """Return every document once, with a question that retrieved it."""
    found = {document.doc_id: (document, question.text) for question in questions for document in question.documents}
    return list(found.values())


def scored(question: Question, generation: Generation, *, is_changed: bool = False) -> ScoredAnswer:
    """Return an answer with its scores."""
    stats = generation.stats
    chunks = stats.chunk_reuse
    return ScoredAnswer(
        kind=question.kind,
        text=generation.text,
        is_exact=exact_match(generation.text, question.answers),
        rouge_l=rouge_l(generation.text, question.answers),
        num_prompt_tokens=stats.num_prompt_tokens,
        num_computed_tokens=stats.num_computed_tokens,
        num_reused_tokens=chunks.num_reused_tokens if chunks else 0,
        num_recomputed_tokens=chunks.num_recomputed_tokens if chunks else 0,
        ttft_s=stats.ttft_s,
        is_changed=is_changed,
        token_f1=token_f1(generation.text, question.answers),
        jaccard=jaccard(generation.text, question.answers),
    )


def conversations_of(questions: Sequence[Question]) -> list[list[Question]]:
    """Return the questions as conversations: each joins the latest with one of its documents, or begins one.

    A conversation has 4 turns at most, and those of one turn are left out: there nothing comes again.

    Raises:
        ConfigError: no two questions share a document.
    """
    found: list[list[Question]] = []
    open_ones: deque[list[Question]] = deque(maxlen=_NUM_OPEN)
    for question in questions:
        held = {document.doc_id for document in question.documents}
        for turns in reversed(open_ones):
            if len(turns) < MAX_TURNS and held & {d.doc_id for turn in turns for d in turn.documents}:
                turns.append(question)
                break
        else:
            found.append([question])
            open_ones.append(found[-1])
    if not (found := [turns for turns in found if len(turns) > 1]):
        raise ConfigError(
            "no two of the questions share a document, so that none comes again in a conversation: give questions over "
            "the same documents"
        )
    return found


def answers_in_conversations(
    engine: AnswerSource,
    conversations: Sequence[Sequence[Question]],
    *,
    refers: bool,
    layout: PromptLayout = PromptLayout(),  # noqa: B008 (frozen)
    max_tokens: int = 64,
    report: Callable[[int], object] = lambda _: None,
) -> list[ScoredAnswer]:
    """Return greedy answers to all turns but the first; each prompt includes the earlier answers.

    With ``refers`` a document that the conversation shows already is referred to.

    Raises:
        PromptTooLongError, RequestRejectedError, EngineDiedError, ...
    """
    answers = []
    for turns in conversations:
        told: list[ChatMessage] = []
        shown: dict[str, str] = {}
        for number, question in enumerate(turns):
            messages = layout.messages(question.documents, question.text)
            told += messages if not told else messages[-1:]
            shown |= {document.doc_id: document.text for document in question.documents}
            sent = without_repeats(told, shown.items()) if refers else told
            generation = engine.generate(render_chat(engine.tokenizer, sent, shown.items()), max_tokens=max_tokens)
            told.append({"role": "assistant", "content": generation.text})
            if number:
                answers.append(scored(question, generation))
            report(1)
    return answers
