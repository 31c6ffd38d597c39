"""Measure exact match of greedy answers on held-out prompts.

The language seeds used here are never used in training. A greedy answer equals the expected one exactly
when every expected token, EOS included, is the most likely next token; so one pass per prompt, with the
expected answer appended, decides it without decoding.

Examples:
  python -m examples.demo_model_training.evaluate --checkpoint build/demo.pt
  python -m examples.demo_model_training.evaluate --model examples/demo_model --json --num-questions 200
  python -m examples.demo_model_training.evaluate --checkpoint build/deep.pt --deep
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from tqdm import tqdm

from examples.demo_model_training.batches import BatchSource
from examples.demo_model_training.language import (
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
from examples.demo_model_training.model import DemoLlama
from examples.demo_model_training.tokenizer import BOS_ID, EOS_ID, SYSTEM_PROMPT, Vocabulary

HELD_OUT_SEED: Final = 777_000


_PLAIN: Final = WritingStyle()
_SPLIT: Final = WritingStyle(split_share=1.0)
_IN_PIECES: Final = WritingStyle(split_share=1.0, max_pieces=3)


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: a kind of question over a kind of prompt."""

    name: str
    question_kind: QuestionKind
    num_entities: int
    same_kind: bool = False
    is_chain: bool = False
    num_facts: int = 5
    style: WritingStyle = _PLAIN


CASES: Final = (
    *(Case(f"single, k = {k}", "single", k) for k in (1, 2, 3, 5, 10, 20)),
    *(Case(f"single, same type, k = {k}", "single", k, same_kind=True) for k in (2, 3, 5, 10)),
    *(Case(f"two-hop, k = {k}", "two-hop", k) for k in (2, 3, 5)),
    *(Case(f"continued, k = {k}", "continued", k, style=_SPLIT) for k in (2, 3, 5)),
    *(Case(f"continued, same type, k = {k}", "continued", k, same_kind=True, style=_SPLIT) for k in (2, 3)),
    *(Case(f"reverse, k = {k}", "reverse", k) for k in (1, 2, 3)),
    *(Case(f"yes-no, k = {k}", "yes-no", k) for k in (1, 2, 3)),
    *(Case(f"absent, k = {k}", "absent", k) for k in (2, 3)),
)
"""`num_entities` entries make the prompt; a split entry counts as one."""

DEEP_CASES: Final = (
    *(Case(f"three-hop, k = {k}", "three-hop", k, is_chain=True) for k in (3, 5)),
    *(Case(f"three-hop in pieces, k = {k}", "three-hop", k, is_chain=True, style=_IN_PIECES) for k in (3, 5)),
    *(Case(f"continued two-hop, k = {k}", "continued two-hop", k, is_chain=True, style=_IN_PIECES) for k in (3, 5)),
    *(Case(f"continued in pieces, same type, k = {k}", "continued", k, True, style=_IN_PIECES) for k in (2, 3)),
)
"""What only the deep curriculum teaches."""

LIGHT_CASES: Final = ("tool call", "bare tool result", "free text", "no documents")


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """Token ids of a prompt and of the expected answer, EOS included."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CaseResult:
    name: str
    num_questions: int
    exact_match: float
    mean_prompt_tokens: float


def draw_question(rng: random.Random, case: Case) -> tuple[Context, Question]:
    """Return a held-out context of the case and one question about it."""
    draw_entities = draw_same_kind_entities if case.same_kind else draw_linked_entities
    if case.is_chain:
        draw_entities = draw_chained_entities
    while True:
        names = Names(rng)
        num_facts = rng.randint(2, case.num_facts)
        style = replace(case.style, pronoun_share=rng.choice((0.0, 0.5, 1.0)))
        context = write_context(rng, draw_entities(rng, names, case.num_entities, num_facts), style)
        question = ask(rng, context, names, case.question_kind)
        if question is not None:
            return context, question


def prompt_text(documents: tuple[str, ...], question: str) -> str:
    """Return the prompt in the format the model was trained on."""
    parts = [SYSTEM_PROMPT, *(f"Document: {document}" for document in documents), f"Question: {question} Answer:"]
    return " ".join(parts)


def held_out_prompts(vocabulary: Vocabulary, case: Case, seed: int) -> Iterator[HeldOutPrompt]:
    """Yield prompts of a case without end."""
    rng = random.Random(seed)
    while True:
        context, question = draw_question(rng, case)
        prompt_ids = [BOS_ID, *vocabulary.encode(prompt_text(context.documents, question.text))]
        yield HeldOutPrompt(tuple(prompt_ids), (*vocabulary.encode(question.answer), EOS_ID))


def held_out_light_prompts(vocabulary: Vocabulary, name: str, seed: int) -> Iterator[HeldOutPrompt]:
    """Yield prompts without entries: tool calls, bare tool results, free text, no documents."""
    source = BatchSource(vocabulary, random.Random(seed), max_batch_tokens=1)
    make_row = dict(zip(LIGHT_CASES, source.light_row_makers, strict=True))[name]
    while True:
        row = make_row()
        start = row.answers[0].start
        yield HeldOutPrompt(tuple(row.ids[:start]), tuple(row.ids[start:]))


@torch.no_grad()
def answers_exactly(model: DemoLlama, prompt: HeldOutPrompt) -> bool:
    """Return whether greedy decoding would give exactly the expected answer."""
    ids = torch.tensor([prompt.prompt_ids + prompt.answer_ids])
    hidden = model.hidden(ids, torch.arange(ids.shape[1])[None])
    first = len(prompt.prompt_ids) - 1
    predicted = model.head(hidden[0, first:-1]).argmax(-1)
    return bool((predicted == torch.tensor(prompt.answer_ids)).all())


@torch.no_grad()
def greedy_answer(model: DemoLlama, vocabulary: Vocabulary, prompt: str, max_new_tokens: int = 32) -> str:
    """Return the greedily decoded answer to a prompt text."""
    ids = [BOS_ID, *vocabulary.encode(prompt)]
    num_prompt_tokens = len(ids)
    while len(ids) < num_prompt_tokens + max_new_tokens:
        hidden = model.hidden(torch.tensor([ids]), torch.arange(len(ids))[None])
        token_id = int(model.head(hidden[0, -1]).argmax())
        if token_id == EOS_ID:
            break
        ids.append(token_id)
    return vocabulary.decode(ids[num_prompt_tokens:])


def measure(model: DemoLlama, name: str, prompts: Iterator[HeldOutPrompt], num_questions: int) -> CaseResult:
    """Return the exact match over the first `num_questions` prompts."""
    num_right = num_tokens = 0
    for _ in range(num_questions):
        prompt = next(prompts)
        num_right += answers_exactly(model, prompt)
        num_tokens += len(prompt.prompt_ids)
    return CaseResult(name, num_questions, num_right / num_questions, num_tokens / num_questions)


def evaluate(
    model: DemoLlama, num_questions: int, seed: int = HELD_OUT_SEED, deep_cases: Sequence[Case] = ()
) -> list[CaseResult]:
    """Return one result per case; each case draws its questions from a seed of its own."""
    vocabulary = Vocabulary()
    lines: dict[str, Callable[[int], Iterator[HeldOutPrompt]]] = {
        **{case.name: partial(held_out_prompts, vocabulary, case) for case in CASES},
        **{name: partial(held_out_light_prompts, vocabulary, name) for name in LIGHT_CASES},
        **{case.name: partial(held_out_prompts, vocabulary, case) for case in deep_cases},
    }
    return [
        measure(model, name, prompts_of(seed + index), num_questions)
        for index, (name, prompts_of) in enumerate(tqdm(lines.items(), unit="case"))
    ]


def _load(arguments: argparse.Namespace) -> DemoLlama:
    if arguments.checkpoint:
        from examples.demo_model_training.train import load_model

        return load_model(arguments.checkpoint)
    from examples.demo_model_training.export import load_exported

    return load_exported(arguments.model)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--checkpoint", type=Path, help="checkpoint written by train")
    which.add_argument("--model", type=Path, help="folder written by export")
    parser.add_argument("--num-questions", type=int, default=200, help="questions per line of the table")
    parser.add_argument("--deep", action="store_true", help="ask what only the deep curriculum teaches as well")
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED, help="first held-out language seed")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    deep_cases = DEEP_CASES if arguments.deep else ()
    results = evaluate(_load(arguments), arguments.num_questions, arguments.seed, deep_cases)
    if arguments.json:
        report = {
            "metric": "exact match of the greedy answer",
            "num_questions_per_case": arguments.num_questions,
            "seed": arguments.seed,
            "cases": [
                {
                    "name": result.name,
                    "exact_match": round(result.exact_match, 4),
                    "mean_prompt_tokens": round(result.mean_prompt_tokens, 1),
                }
                for result in results
            ],
        }
        print(json.dumps(report, indent=2))
        return
    print("| prompt | exact match | mean prompt tokens |\n|---|---|---|")
    for result in results:
        print(f"| {result.name} | {100 * result.exact_match:.1f} % | {result.mean_prompt_tokens:.0f} |")


if __name__ == "__main__":
    main()
