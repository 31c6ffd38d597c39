"""Ask every question of an engine, one after the other, and keep what was answered and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragcache_core.client.generation import Generation, Prompt
from ragcache_core.prompt import PromptLayout, PromptTokenizer
from ragcache_core.quality.questions import Question
from ragcache_core.quality.scores import exact_match, jaccard, rouge_l, token_f1
from ragcache_core.types import Document


class Asked(Protocol):
    """What is needed of an :class:`~ragcache_core.client.Engine`."""

    @property
    def tokenizer(self) -> PromptTokenizer: ...

    def generate(self, prompt: Prompt, *, max_tokens: int = 256) -> Generation: ...


@dataclass(frozen=True, slots=True)
class AskedAnswer:
    """An answer, how right it is, and its cost.

    ``num_reused_tokens`` were served from chunks, of whose tokens ``num_recomputed_tokens`` more were computed all the
    same; both 0 where no chunk was reused. ``is_changed``: documents stood in another order than the question's, or
    were others.
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
    engine: Asked,
    questions: Sequence[Question],
    *,
    layout: PromptLayout = PromptLayout(),  # noqa: B008 (frozen)
    max_tokens: int = 64,
    reads_alone: bool = False,
    num_shown: int | None = None,
    arrange: Arrange | None = None,
    report: Callable[[int], object] = lambda _: None,
) -> list[AskedAnswer]:
    """Return the greedy answers, in order; each question waits for the one before it, so that every run is alike.

    With ``reads_alone`` each document is asked about by itself first. The first ``num_shown`` documents of a question
    are shown, or those that ``arrange`` returns. ``report`` is told of every question asked.

    Raises:
        PromptTooLongError, RequestRejectedError, EngineDiedError, ...
    """
    tokenizer = engine.tokenizer
    if reads_alone:
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
    """Return every document once, with a question that it was retrieved for."""
    found = {document.doc_id: (document, question.text) for question in questions for document in question.documents}
    return list(found.values())


def scored(question: Question, generation: Generation, *, is_changed: bool = False) -> AskedAnswer:
    """Return an answer with how right it is."""
    stats = generation.stats
    chunks = stats.chunk_reuse
    return AskedAnswer(
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
