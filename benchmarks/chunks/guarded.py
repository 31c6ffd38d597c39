"""What a bound on errors (``ChunkReuse(max_error=...)``) computes, against prefix caching and the fixed default.

The 12-layer demo model answers five kinds of questions in turn, each named to the engine, one after the other. After
each answer the engine is idle until it has audited it. Then the same questions come in another order, and unnamed:
those about documents that depend on the text before them (``continued``) are mixed in from the middle on.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.chunks.ablations import MODEL
from benchmarks.chunks.answers import ALPHA
from benchmarks.engines import BLOCK_SIZE, launch
from benchmarks.report import BenchmarkPlan, Figure, Part
from examples.demo_model_training import recurring
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig, ChunkReuse
from ragcache_core.prompt import PromptLayout
from ragcache_core.quality import Question, read_questions
from ragcache_core.quality.answers import ScoredAnswer, scored
from ragcache_core.runtime.environment import CPU_KV_CACHE_BYTES_ENV

_SEED = 890_000
_NUM_OF_A_KIND = 120
_MIXED_IN = "continued"
_MAX_ERROR = 0.02
_MAX_TOKENS = 32
_PARTS = 6
_LARGEST_PAUSE_S = 0.5
_KV_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _GuardedRun:
    """The answers of one engine, and what its guard found by kind."""

    answers: Sequence[ScoredAnswer]
    kinds: Sequence[dict[str, Any]]

    def differs(self, other: _GuardedRun, first: int, end: int) -> list[bool]:
        """Return for each question of a part whether the answers are different."""
        return [a.text != b.text for a, b in zip(self.answers[first:end], other.answers[first:end], strict=True)]

    def computed(self, first: int, end: int) -> int:
        return sum(answer.num_computed_tokens for answer in self.answers[first:end])


def measure_guarded(plan: BenchmarkPlan) -> Part:
    """Ask the same questions of several engines, and compare computed tokens by sixths of the run, and answers."""
    by_kind = _questions(plan.sized(_NUM_OF_A_KIND, 4))
    in_turn = [question for of_each in zip(*by_kind.values(), strict=True) for question in of_each]
    guard = ChunkReuse(max_error=_MAX_ERROR)
    prefix, guarded, fixed = (
        _ask(plan, name, in_turn, chunks)
        for name, chunks in (
            ("prefix caching", None),
            ("max_error", guard),
            ("fixed default", ChunkReuse(alpha=ALPHA)),
        )
    )
    mixed_in = _from_the_middle_on(by_kind)
    mixed_prefix, unnamed = (
        _ask(plan, f"{name}, mixed in", mixed_in, chunks, is_named=False)
        for name, chunks in (("prefix caching", None), ("max_error", guard))
    )
    num = len(in_turn)
    figures: list[Figure] = []
    for first, end in _spans(num):
        baseline = prefix.computed(first, end)
        ratio, fixed_ratio = (round(run.computed(first, end) / baseline, 4) for run in (guarded, fixed))
        note = "of prefix caching's tokens; baseline: the fixed default"
        figures.append(Figure(f"guarded_computed_{first}_to_{end}", ratio, fixed_ratio, note=note))
    errors, fixed_errors = (fmean(run.differs(prefix, 0, num)) for run in (guarded, fixed))
    figures.append(Figure("guarded_error_share", round(errors, 4), round(fixed_errors, 4), note="not prefix caching's"))
    for first, end in _spans(num):
        ratio = unnamed.computed(first, end) / mixed_prefix.computed(first, end)
        errors = fmean(unnamed.differs(mixed_prefix, first, end))
        note = f"of prefix caching's tokens; {errors:.4f} of the answers differ"
        figures.append(Figure(f"guarded_mixed_in_computed_{first}_to_{end}", round(ratio, 4), note=note))
    errors = fmean(unnamed.differs(mixed_prefix, 0, num))
    figures.append(
        Figure("guarded_mixed_in_error_share", round(errors, 4), note="continued from the middle on, unnamed")
    )
    runs = {
        "prefix caching": prefix,
        "max_error": guarded,
        "fixed default": fixed,
        "prefix caching, mixed in": mixed_prefix,
        "max_error, mixed in": unnamed,
    }
    details = {
        "model": MODEL,
        "kinds": guarded.kinds,
        "kinds_mixed_in": unnamed.kinds,
        "computed_tokens": {name: [answer.num_computed_tokens for answer in run.answers] for name, run in runs.items()},
    }
    return Part("none: each engine begins empty and without evidence", tuple(figures), details)


def _spans(num: int) -> list[tuple[int, int]]:
    ends = [num * part // _PARTS for part in range(_PARTS + 1)]
    return [*itertools.pairwise(ends), (0, num), (num // 2, num)]


def _from_the_middle_on(by_kind: Mapping[str, Sequence[Question]]) -> list[Question]:
    """Return the other kinds in turn, and from the middle on one question of ``continued`` after each of them."""
    others = [
        q for of_each in zip(*(by_kind[kind] for kind in by_kind if kind != _MIXED_IN), strict=True) for q in of_each
    ]
    late = by_kind[_MIXED_IN]
    first = len(others) - len(late)
    pairs = zip(others[first:], late, strict=True)
    return [*others[:first], *(question for pair in pairs for question in pair)]


def _questions(num_of_a_kind: int) -> dict[str, list[Question]]:
    """Return as many questions of each kind."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "questions.jsonl"
        recurring.main(["--deep", "--seed", str(_SEED), "--num-questions", "600", "--out", str(path)])
        by_kind: dict[str, list[Question]] = {}
        for question in read_questions(path):
            by_kind.setdefault(question.kind, []).append(question)
    return {kind: questions[:num_of_a_kind] for kind, questions in by_kind.items()}


def _ask(
    plan: BenchmarkPlan, name: str, questions: Sequence[Question], chunks: ChunkReuse | None, *, is_named: bool = True
) -> _GuardedRun:
    plan.report(f"guarded: {name}")
    cache = (
        None
        if chunks is None
        else CacheConfig(kv_cache_bytes=_KV_BYTES, host_bytes="1GiB", chunk_reuse=chunks, block_size=BLOCK_SIZE)
    )
    plain = (
        {"kv_cache_memory_bytes": _KV_BYTES, "env": {CPU_KV_CACHE_BYTES_ENV: str(4 * _KV_BYTES)}}
        if chunks is None
        else {}
    )
    layout, answers = PromptLayout(), []
    with launch(MODEL, cache, max_model_len=1024, **plain) as engine:
        for number, question in enumerate(questions):
            prompt = layout.render(engine.tokenizer, question.documents, question.text)
            is_guarded = chunks is not None and chunks.max_error is not None
            given: dict[str, Any] = {"chunk_reuse": {"kind": question.kind}} if is_guarded and is_named else {}
            answers.append(scored(question, engine.generate(prompt, max_tokens=_MAX_TOKENS, **given)))
            if is_guarded:
                _wait_for_audits(engine)
            plan.report(f"guarded: {name}, question {number + 1}")
        chunk_stats = engine.stats().chunks
    kinds = [asdict(each) for each in chunk_stats.kinds] if chunk_stats else []
    return _GuardedRun(answers, kinds)


def _wait_for_audits(engine: Engine) -> None:
    """Return once all approximate answers are audited, or no more audits come: a level that holds has few."""
    num_before, ends_s = -1, 0.0
    while True:
        chunks = engine.stats().chunks
        assert chunks is not None
        num_audits = sum(kind.num_audits for kind in chunks.kinds)
        if num_audits != num_before:
            num_before, ends_s = num_audits, time.monotonic() + _LARGEST_PAUSE_S
        if num_audits >= sum(kind.num_approximate for kind in chunks.kinds) or time.monotonic() > ends_s:
            return
        time.sleep(0.02)  # a poll: the engine's idle steps make it true
