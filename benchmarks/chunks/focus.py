"""Which documents a question's focus keeps, by the widest gap as the engine has it, and by Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from statistics import fmean

import torch

from benchmarks.chunks.ablations import QUESTIONS
from benchmarks.chunks.forward import attended
from benchmarks.chunks.rules import entropy_cut
from benchmarks.report import BenchmarkPlan, Figure, Part
from ragcache_core.chunk import FocusedChunks, focus
from ragcache_core.quality import Question, read_questions

_CUTS: Mapping[str, Callable[[Sequence[float]], int]] = {
    "widest_gap": focus.gap_cut,
    "algorithm_1": entropy_cut,
    "above_gap_of_algorithm_1": partial(entropy_cut, is_above_gap=True),
}


def measure_focus(plan: BenchmarkPlan) -> Part:
    """Have each rule watch the question's attention in a full prefill, layer by layer, with a window of 3 layers."""
    questions = [question for question in read_questions(QUESTIONS) if len(question.documents) > 2]
    Random(plan.seed).shuffle(questions)
    found: dict[str, list[tuple[float, float, int, int]]] = {name: [] for name in _CUTS}
    num_documents: list[int] = []
    for number, question in enumerate(questions[: plan.sized(160, 10)]):
        plan.report(f"focus: question {number + 1}")
        prompt = attended(question)
        rows = prompt.layers[:, prompt.spans[-1].end :]
        masses = torch.stack([rows[:, :, span.start : span.end].sum((1, 2)) for span in prompt.spans], 1).tolist()
        needed = _needed(question)
        num_documents.append(len(prompt.spans))
        for name, cut in _CUTS.items():
            chunks = _watched(masses, cut)
            dropped = (1 - len(chunks.focused) / len(prompt.spans)) * (1 - chunks.num_layers / len(masses))
            kept = len(needed & chunks.focused) / len(needed)
            found[name].append((dropped, kept, len(chunks.focused), chunks.num_layers))
    figures = []
    for name, watched in found.items():
        dropped, kept, num_focused, num_layers = (fmean(each) for each in zip(*watched, strict=True))
        note = f"of documents' layers; settled after {num_layers:.1f} layers; keeps {num_focused:.2f} of "
        note += f"{fmean(num_documents):.2f} documents, {kept:.3f} of those with a part of the answer"
        figures.append(Figure(f"focus_dropped_{name}", round(dropped, 4), note=note))
    return Part("none: a forward pass for each question", tuple(figures), {"num_questions": len(num_documents)})


def _watched(masses: Sequence[Sequence[float]], cut: Callable[[Sequence[float]], int]) -> FocusedChunks:
    ours = focus.gap_cut
    focus.gap_cut = cut  # type: ignore[assignment]
    try:
        chunks = FocusedChunks(len(masses[0]))
        for mass in masses:
            chunks.observe(mass)
    finally:
        focus.gap_cut = ours
    return chunks


def _needed(question: Question) -> frozenset[int]:
    """Return the documents with a part of the answer; that of two hops is "bridge, value"."""
    parts = question.answers[0].split(", ")
    documents = enumerate(question.documents)
    return frozenset(number for number, document in documents if any(part in document.text for part in parts))
