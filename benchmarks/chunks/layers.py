"""What Eq. 10 changes over all layers of a model, where the engine measures eight: a plain forward pass in torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from statistics import correlation, fmean

import torch

from benchmarks.chunks.ablations import MODEL, QUESTIONS
from benchmarks.chunks.forward import attended
from benchmarks.report import BenchmarkPlan, Figure, Part
from ragcache_core.chunk.scores import neighbour_overlap, outward_attention
from ragcache_core.chunk.selection import CacheCraftSelection, SelectableChunk
from ragcache_core.chunk.types import ChunkSpan, ChunkStatistics, ChunkVariant
from ragcache_core.quality import Question, read_questions
from ragcache_core.vllm_plugin.chunks.compute.attention_mass import measured_layers

_ALPHAS = (1.2, 1.4, 1.7, 2.0)
_RECOMPUTED = 0.3


@dataclass(frozen=True, slots=True)
class _Both:
    """The same capture of a chunk, its attention averaged over the engine's layers and over all."""

    some: ChunkVariant
    every: ChunkVariant


def measure_layers(plan: BenchmarkPlan) -> Part:
    """Capture the documents of questions with both averages, and compare what is recomputed in other prompts."""
    questions = read_questions(QUESTIONS)
    Random(plan.seed).shuffle(questions)
    captures: dict[bytes, list[_Both]] = {}
    for number, question in enumerate(questions[: plan.sized(160, 10)]):
        plan.report(f"layers: question {number + 1}")
        for both in _captured(question):
            captures.setdefault(both.some.key, []).append(both)
    moved = [both for found in captures.values() for both in found if both.some.statistics.prefix]
    outward = [[outward_attention(one.statistics) for one in (both.some, both.every)] for both in moved]
    some, every = zip(*outward, strict=True)
    ratio = fmean(some) / fmean(every)
    figures = [
        Figure("layers_outward", round(fmean(every), 4), round(fmean(some), 4), note=f"{len(moved)} captures"),
        Figure("layers_outward_correlation", round(correlation(some, every), 4)),
        Figure("layers_same_tokens", round(fmean(map(_same_tokens, moved)), 4), note="of the 30 % with most attention"),
    ]
    for alpha in _ALPHAS:
        lost = [pair for found in captures.values() for pair in _losses(found)]
        at_some = [alpha * one >= 1.0 for one, _ in lost]
        at_every, scaled = ([factor * alpha * one >= 1.0 for _, one in lost] for factor in (1.0, ratio))
        note = f"the same choice in {_agreement(at_some, at_every):.4f} of {len(lost)} moves, with alpha "
        note += f"{ratio * alpha:.2f} in {_agreement(at_some, scaled):.4f}"
        key = f"layers_recomputed_alpha_{alpha:g}"
        figures.append(Figure(key, round(fmean(at_every), 4), round(fmean(at_some), 4), note=note))
    return Part("none: every figure is of all layers, its baseline of the engine's", tuple(figures), {"model": MODEL})


def _captured(question: Question) -> Iterator[_Both]:
    prompt = attended(question)
    averages = [prompt.layers[list(measured_layers(len(prompt.layers)))].mean(0), prompt.layers.mean(0)]
    for number, span in enumerate(prompt.spans):
        yield _Both(*(_variant(mass, span, prompt.spans[:number]) for mass in averages))


def _variant(mass: torch.Tensor, span: ChunkSpan, before: Sequence[ChunkSpan]) -> ChunkVariant:
    rows = mass[span.start : span.end]
    inter = [rows[:, each.start : each.end].sum(1) for each in before]
    own = rows[:, span.start : span.end]
    statistics = ChunkStatistics(
        tuple(each.key for each in before),
        tuple(each.num_tokens for each in before),
        tuple(float(one.sum()) for one in inter),
        float(own.sum() - own.diagonal().sum()),
        tuple(sum(inter, torch.zeros(len(rows))).tolist()),
        context=span.context,
    )
    return ChunkVariant(span.key, 0, span.num_tokens, statistics)


def _losses(found: Sequence[_Both]) -> Iterator[tuple[float, float]]:
    """Yield what a chunk loses that moves from one prompt to another, by both averages, as ``whole_chunks`` has it."""
    for one, other in itertools.permutations(found, 2):
        if one.some.statistics.prefix and one.some.statistics.context != other.some.statistics.context:
            prefix = other.some.statistics.prefix
            statistics = one.some.statistics, one.every.statistics
            some, every = (outward_attention(each) * (1 - neighbour_overlap(each, prefix)) for each in statistics)
            yield some, every


def _same_tokens(both: _Both) -> float:
    budget = max(1, round(_RECOMPUTED * both.some.num_tokens))
    chosen = [set(CacheCraftSelection().select([SelectableChunk(one, budget)])[0]) for one in (both.some, both.every)]
    return len(chosen[0] & chosen[1]) / budget


def _agreement(one: Sequence[bool], other: Sequence[bool]) -> float:
    return fmean(a == b for a, b in zip(one, other, strict=True))
