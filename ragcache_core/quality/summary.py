"""Summaries of answers by method and kind of question, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ragcache_core.quality.answers import ScoredAnswer
from ragcache_core.quality.scores import is_same_text, wilson_interval
from ragcache_core.runtime.terminal import columns, plain

ALL_KINDS = "all"


@dataclass(frozen=True, slots=True)
class QualitySummary:
    """The answers of one method to the questions of one kind: means over them, token counts as sums.

    ``recomputed`` is the fraction of the reused chunks' tokens that was computed all the same, ``changed`` the share of
    prompts that showed other documents, or in another order. ``agreement`` is the share of answers that say what those
    of the reference method say, word for word, with its 95 % interval; ``None`` without one.
    """

    way: str
    kind: str
    num_questions: int
    exact_match: float
    rouge_l: float
    num_prompt_tokens: int
    num_computed_tokens: int
    recomputed: float
    ttft_s: float | None
    changed: float = 0.0
    agreement: float | None = None
    agreement_interval: tuple[float, float] | None = None
    token_f1: float = 0.0
    jaccard: float = 0.0

    def computed_ratio(self, baseline: QualitySummary) -> float:
        """Return the computed tokens as a share of another method's."""
        return self.num_computed_tokens / max(baseline.num_computed_tokens, 1)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return asdict(self)


def summarise(
    way: str, answers: Sequence[ScoredAnswer], reference: Sequence[ScoredAnswer] | None = None
) -> list[QualitySummary]:
    """Return a summary per kind in order, and one of all if there are several.

    ``reference`` are another method's answers to the same questions.
    """
    both = list(zip(answers, reference if reference is not None else [None] * len(answers), strict=True))
    kinds = list(dict.fromkeys(answer.kind for answer in answers))
    summaries = [_of_kind(way, kind, [pair for pair in both if pair[0].kind == kind]) for kind in kinds]
    return summaries if len(kinds) < 2 else [*summaries, _of_kind(way, ALL_KINDS, both)]


def overall(summaries: Sequence[QualitySummary]) -> QualitySummary:
    """Return the summary of all questions of one method."""
    return summaries[-1]


def _of_kind(way: str, kind: str, compared: Sequence[tuple[ScoredAnswer, ScoredAnswer | None]]) -> QualitySummary:
    answers = [answer for answer, _ in compared]
    agree = [is_same_text(answer.text, other.text) for answer, other in compared if other is not None]
    num_recomputed = sum(answer.num_recomputed_tokens for answer in answers)
    num_in_chunks = num_recomputed + sum(answer.num_reused_tokens for answer in answers)
    times_s = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    return QualitySummary(
        way=way,
        kind=kind,
        num_questions=len(answers),
        exact_match=statistics.fmean(answer.is_exact for answer in answers),
        rouge_l=statistics.fmean(answer.rouge_l for answer in answers),
        num_prompt_tokens=sum(answer.num_prompt_tokens for answer in answers),
        num_computed_tokens=sum(answer.num_computed_tokens for answer in answers),
        recomputed=num_recomputed / num_in_chunks if num_in_chunks else 0.0,
        ttft_s=statistics.median(times_s) if times_s else None,
        changed=statistics.fmean(answer.is_changed for answer in answers),
        agreement=statistics.fmean(agree) if agree else None,
        agreement_interval=wilson_interval(sum(agree), len(agree)) if agree else None,
        token_f1=statistics.fmean(answer.token_f1 for answer in answers),
        jaccard=statistics.fmean(answer.jaccard for answer in answers),
    )


def summary_table(by_way: Mapping[str, Sequence[QualitySummary]], baseline: str) -> str:
    """Return a table of each kind of question and method; tokens are compared with those of ``baseline``."""
    head = ("kind", "way", "questions", "exact", "F1", "ROUGE-L", "Jaccard", "computed", f"of {baseline}"[:11],
            "recomputed", "TTFT ms", "changed", "agrees")  # fmt: skip
    expected = {summary.kind: summary for summary in by_way.get(baseline, ())}
    flat = [summary for summaries in by_way.values() for summary in summaries]
    kinds = list(dict.fromkeys(summary.kind for summary in flat))
    by_kind = sorted(flat, key=lambda summary: kinds.index(summary.kind))  # stable: the methods keep their order
    rows = [_cells(summary, expected.get(summary.kind)) for summary in by_kind]
    return plain(columns(rows, "<<" + ">" * (len(head) - 2), head))


def _cells(summary: QualitySummary, baseline: QualitySummary | None) -> tuple[str, ...]:
    return (
        summary.kind,
        summary.way,
        f"{summary.num_questions:,}",
        f"{summary.exact_match:.1%}",
        f"{summary.token_f1:.3f}",
        f"{summary.rouge_l:.3f}",
        f"{summary.jaccard:.3f}",
        f"{summary.num_computed_tokens:,}",
        "" if baseline is None else f"{summary.computed_ratio(baseline):.1%}",
        f"{summary.recomputed:.1%}" if summary.recomputed else "",
        "" if summary.ttft_s is None else f"{1000 * summary.ttft_s:,.1f}",
        f"{summary.changed:.1%}" if summary.changed else "",
        _agreement(summary),
    )


def _agreement(summary: QualitySummary) -> str:
    if summary.agreement is None or summary.agreement_interval is None:
        return ""
    low, high = summary.agreement_interval
    return f"{summary.agreement:.1%} [{low:.0%}, {high:.0%}]"
