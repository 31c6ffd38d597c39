"""What the model is trained on: prompts as rows of tokens, easy ones first.

A row is one prompt with several questions, each followed by its answer:

    <s> Answer the question ... Document: ... Document: ... Question: ... Answer: ... </s> Question: ...
        |------------- 0.1 --------------------------------------------|  |--- 1 ----|        weights

Most rows hold documents; few ones (`_LIGHT_ROW_SHARES`) teach the tool call, the copying of a bare tool
result and what to say without documents.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from examples.demo_model_training.curriculum import CURRICULUM, Stage
from examples.demo_model_training.grammar import WORD_LISTS
from examples.demo_model_training.language import (
    UNKNOWN,
    Context,
    Names,
    Question,
    QuestionKind,
    WritingStyle,
    ask,
    draw_chained_entities,
    draw_linked_entities,
    draw_same_kind_entities,
    write_context,
)
from examples.demo_model_training.tokenizer import (
    BOS_ID,
    EOS_ID,
    SYSTEM_PROMPT,
    TOOL_ARGUMENTS,
    TOOL_CALL_CLOSING,
    TOOL_CALL_OPENINGS,
    Vocabulary,
)

ANSWER_WEIGHT: Final = 1.0
PROMPT_WEIGHT: Final = 0.1
MAX_POSITION: Final = 2600
_LIGHT_ROW_SHARES: Final = (0.2, 0.05, 0.02, 0.01)
"""Shares of rows with a tool call, a bare tool result, free text and no documents."""


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """Where a row's answer stands: tokens [start, end), EOS included."""

    start: int
    end: int
    label: str
    num_entities: int


@dataclass(slots=True)
class Row:
    """One prompt: ids, positions and loss weights of equal length, and its answers."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    answers: list[AnswerSpan] = field(default_factory=list)

    def add(self, ids: list[int], weight: float, position_gap: int = 0) -> None:
        start = self.positions[-1] + 1 + position_gap if self.positions else 0
        self.ids += ids
        self.positions += range(start, start + len(ids))
        self.weights += [weight] * len(ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded to one length. ids, positions: [batch, length] int64; weights: [batch, length] float32."""

    ids: Tensor
    positions: Tensor
    weights: Tensor
    rows: tuple[Row, ...]


_FREE_TEXTS: Final = (
    "Hello", "Hello!", "Hi", "Hi there!", "Good morning.", "How are you?", "Who are you?", "Thanks!", "Tell me a joke.",
    "What is the meaning of life?", "Say something.", "Write a poem about the sea.", "What can you do?", "ok", "2 + 2?",
    "Please repeat after me: blue sky.", "Translate this to French: I love programming.", "What time is it now?",
)  # fmt: skip
_OTHER_SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "Use only the documents.",
    f"{SYSTEM_PROMPT} Be short.",
    f"You are a helpful assistant. {SYSTEM_PROMPT}",
)
_DECORATIONS: Final = ("Document:", "Document: [{}]", "Document {}:", "--- Document:", "---", "")
"""What may stand before a document; the last ones are how retrieval tools join several."""
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


class BatchSource:
    """Makes rows and batches of a stage from a seed, without end."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        rng: random.Random,
        max_batch_tokens: int,
        curriculum: Sequence[Stage] = CURRICULUM,
    ) -> None:
        self.rng = rng
        self.curriculum = curriculum
        self._vocabulary = vocabulary
        self._max_batch_tokens = max_batch_tokens
        self.light_row_makers: tuple[Callable[[], Row], ...] = (
            self._tool_call_row,
            self._bare_result_row,
            self._free_text_row,
            self._no_documents_row,
        )
        """Makers of the rows without entries; `_LIGHT_ROW_SHARES` says how often each is used."""

    def batches(self, stage_index: int) -> Iterator[Batch]:
        """Yield about four batches of the stage: rows of like length together, one fifth easier ones."""
        rows: list[Row] = []
        while sum(len(row.ids) for row in rows) < 4 * self._max_batch_tokens:
            easier = self.rng.random() < 0.2
            stage = self.curriculum[self.rng.randint(0, stage_index) if easier else stage_index]
            rows.append(self.row(stage, teaches_chat=stage_index >= 1))
        rows.sort(key=lambda row: len(row.ids))
        groups: list[list[Row]] = [[]]
        for row in rows:
            if groups[-1] and (len(groups[-1]) + 1) * len(row.ids) > self._max_batch_tokens:
                groups.append([])
            groups[-1].append(row)
        self.rng.shuffle(groups)
        yield from map(_padded, groups)

    def row(self, stage: Stage, teaches_chat: bool) -> Row:
        """Return a row of the stage; with `teaches_chat` about a quarter hold no entries."""
        draw = self.rng.random()
        if teaches_chat:
            for make_row, share in zip(self.light_row_makers, _LIGHT_ROW_SHARES, strict=True):
                if draw < share:
                    return make_row()
                draw -= share
        return self._documents_row(stage)

    def _documents_row(self, stage: Stage) -> Row:
        rng = self.rng
        names = self._names()
        if rng.random() < stage.drill_share:
            return self._drill_row(names)
        same_kind = rng.random() < stage.same_kind_share
        if rng.random() < stage.crowd_share:
            num_entities, num_facts = rng.randint(*stage.crowd_entities), rng.randint(2, 4)
            same_kind = rng.random() < 0.3
        elif same_kind:
            num_entities, num_facts = rng.choice(stage.same_kind_entities), rng.randint(*stage.same_kind_facts)
        else:
            num_entities, num_facts = rng.randint(*stage.num_entities), rng.randint(*stage.num_facts)
        draw_entities = draw_same_kind_entities if same_kind else draw_linked_entities
        if stage.chain_share and rng.random() < stage.chain_share:
            same_kind, num_entities, num_facts = False, rng.randint(*stage.chain_entities), rng.randint(2, 4)
            draw_entities = draw_chained_entities
        context = write_context(rng, draw_entities(rng, names, num_entities, num_facts), _varied(rng, stage.style))
        row = self._opening(self._system_prompt())
        if rng.random() < 0.05:
            row.add(self._vocabulary.encode(f"Tool: search {rng.choice(TOOL_ARGUMENTS)}"), PROMPT_WEIGHT)
        self._add_documents(row, context, stage)
        for question in self._questions(context, names, stage):
            prefix = "same " if same_kind and question.kind in ("single", "continued") else ""
            self._add_question(row, question.text, question.answer, prefix + question.kind, num_entities)
        return row

    def _names(self) -> Names:
        draw = self.rng.random()
        return Names(
            self.rng,
            shared_head_share=0.3 if draw < 0.15 else 0.0,
            foreign_share=self.rng.choice((0.3, 1.0)) if draw > 0.85 else 0.0,
        )

    def _drill_row(self, names: Names) -> Row:
        """Return a row of few facts, all asked backwards: these questions are learned last."""
        rng = self.rng
        num_entities = rng.choice((2, 2, 3))
        entities = draw_same_kind_entities(rng, names, num_entities, rng.randint(1, 2))
        style = WritingStyle(pronoun_share=rng.choice((0.0, 0.0, 0.5)), heading_share=0.3, filler_share=0.0)
        context = write_context(rng, entities, style)
        row = self._opening(SYSTEM_PROMPT)
        for document in context.documents:
            row.add(self._vocabulary.encode(f"Document: {document}"), PROMPT_WEIGHT)
        questions = [ask(rng, context, names, rng.choice(("reverse", "yes-no"))) for _ in range(6)]
        for question in {question.text: question for question in questions if question is not None}.values():
            self._add_question(row, question.text, question.answer, f"drill {question.kind}", num_entities)
        return row

    def _add_documents(self, row: Row, context: Context, stage: Stage) -> None:
        rng = self.rng
        has_gaps = rng.random() < stage.gap_share
        room = MAX_POSITION - 300 - 110 * len(context.documents)
        decoration = rng.choice(_DECORATIONS) if rng.random() < 0.07 else _DECORATIONS[0]
        for number, document in enumerate(context.documents, start=1):
            gap = rng.randint(1, 300) if has_gaps and rng.random() < 0.4 else 0
            gap = max(0, min(gap, room))
            room -= gap
            prefix = _DECORATIONS[0] if number == 1 else decoration
            text = f"{prefix.format(number)} {document}"
            row.add(self._vocabulary.encode(text), PROMPT_WEIGHT, gap)

    def _questions(self, context: Context, names: Names, stage: Stage) -> list[Question]:
        shares: dict[QuestionKind, float] = {
            "two-hop": stage.two_hop_share,
            "three-hop": stage.three_hop_share,
            "continued two-hop": stage.continued_two_hop_share,
            "reverse": stage.reverse_share,
            "yes-no": stage.yes_no_share,
            "absent": stage.absent_share,
            "continued": 0.25 if context.continued else 0.0,
        }
        shares["single"] = 1.0 - sum(shares.values())
        questions: dict[str, Question] = {}
        for kind in self.rng.choices(list(shares), list(shares.values()), k=stage.num_questions):
            question = ask(self.rng, context, names, kind) or ask(self.rng, context, names, "single")
            if question is not None:
                questions.setdefault(question.text, question)
        return list(questions.values())

    def _system_prompt(self) -> str:
        return self.rng.choice(_OTHER_SYSTEM_PROMPTS) if self.rng.random() < 0.04 else SYSTEM_PROMPT

    def _opening(self, system_prompt: str) -> Row:
        row = Row()
        row.add([BOS_ID, *self._vocabulary.encode(system_prompt)], 0.0)
        return row

    def _add_question(self, row: Row, question: str, answer: str, label: str, num_entities: int = 0) -> None:
        row.add(self._vocabulary.encode(f"Question: {question} Answer:"), PROMPT_WEIGHT)
        answer_ids = [*self._vocabulary.encode(answer), EOS_ID]
        row.answers.append(AnswerSpan(len(row.ids), len(row.ids) + len(answer_ids), label, num_entities))
        row.add(answer_ids, ANSWER_WEIGHT)

    def _maybe_add_earlier_turn(self, row: Row) -> None:
        if self.rng.random() < 0.2:
            answer = Names(self.rng).value(self.rng.choice(("person", "city", "year")))
            text = f"Question: {self._any_question()} Answer: {answer}"
            row.add([*self._vocabulary.encode(text), EOS_ID], 0.0)

    def _any_question(self) -> str:
        names = self._names()
        context = write_context(self.rng, draw_linked_entities(self.rng, names, 2, 3, link_share=1.0), WritingStyle())
        kind: QuestionKind = self.rng.choice(("single", "two-hop", "reverse", "absent"))
        question = ask(self.rng, context, names, kind) or ask(self.rng, context, names, "single")
        assert question is not None
        return question.text

    def _gibberish(self) -> str:
        words = ["".join(self.rng.choices(_LETTERS, k=self.rng.randint(1, 7))) for _ in range(self.rng.randint(1, 5))]
        return " ".join(words).capitalize() + self.rng.choice(("", "?", "."))

    def _tool_call_row(self) -> Row:
        argument = self.rng.choice(TOOL_ARGUMENTS)
        draw = self.rng.random()
        question = self._any_question() if draw < 0.75 else self._gibberish()
        row = self._opening(f"{self._system_prompt()} Tool: search {argument}")
        self._maybe_add_earlier_turn(row)
        self._add_question(row, question, f"{TOOL_CALL_OPENINGS[argument]} {question} {TOOL_CALL_CLOSING}", "tool")
        return row

    def _bare_result_row(self) -> Row:
        names = self._names()
        kind = self.rng.choice(("person", "city", "year", "number", *WORD_LISTS))
        result = names.value(kind)
        if self.rng.random() < 0.2:
            result = f"{names.value('person')}, {result}"
        row = self._opening(f"{self._system_prompt()} Tool: search {self.rng.choice(TOOL_ARGUMENTS)}")
        row.add(self._vocabulary.encode(f"Document: {result}"), PROMPT_WEIGHT)
        self._maybe_add_earlier_turn(row)
        self._add_question(row, self._any_question(), result, "bare result")
        return row

    def _free_text_row(self) -> Row:
        row = self._opening(self._system_prompt())
        text = self.rng.choice(_FREE_TEXTS) if self.rng.random() < 0.6 else self._gibberish()
        self._add_question(row, text, UNKNOWN, "free text")
        return row

    def _no_documents_row(self) -> Row:
        row = self._opening(self._system_prompt())
        self._add_question(row, self._any_question(), UNKNOWN, "no documents")
        return row


def _varied(rng: random.Random, style: WritingStyle) -> WritingStyle:
    """Return the style with none, its own or more of the pronouns, headings and fillers."""
    return WritingStyle(
        pronoun_share=rng.choice((0.0, style.pronoun_share, style.pronoun_share, min(1.0, 2 * style.pronoun_share))),
        split_share=style.split_share,
        max_pieces=style.max_pieces,
        heading_share=rng.choice((0.0, style.heading_share, style.heading_share, 1.0)),
        filler_share=rng.choice((0.0, style.filler_share, 3 * style.filler_share)),
    )


def _padded(rows: list[Row]) -> Batch:
    length = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    positions = torch.arange(length)[None].repeat(len(rows), 1)
    weights = torch.zeros(len(rows), length)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        positions[index, : len(row.ids)] = torch.tensor(row.positions)
        weights[index, : len(row.ids)] = torch.tensor(row.weights)
    return Batch(ids, positions, weights, tuple(rows))
