"""Choose how to show a prompt to meet its TTFT SLO: the option with the least change that is predicted to.

A deadline is met by what has to be computed, T(cached, new), behind what the engine has to compute before it. Exact
is the prompt as it is; ``document_order`` shows the same documents so that more of its beginning is cached;
``chunk_reuse`` takes documents as they were computed behind others, as far as that was calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_core.chunk import AlphaPoint, chunk_spans
from ragcache_core.chunk.calibration import smoothed
from ragcache_core.errors import ConfigError, quoted
from ragcache_core.ordering import CachedPaths, best_order, static_prefix_digest
from ragcache_core.policy import PrefillCost
from ragcache_core.stats import DeadlineReport, PlannedPrompt
from ragcache_core.types import PromptSegment, SegmentKind

_NOT_KNOWN = "what the engine has cached is not known (yet)"


@dataclass(frozen=True, slots=True)
class MeasuredReuse:
    """Chunk reuse of an engine: its ``alpha`` of Eq. 12, and the calibration of its model."""

    alpha: float
    points: tuple[AlphaPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptOption:
    """One way to show a prompt of ``num_cached_tokens + num_new_tokens``, the latter computed.

    ``order`` are places of its documents, in another order; ``alpha`` reuses them, with the ``quality`` measured.
    """

    num_cached_tokens: int
    num_new_tokens: int
    order: tuple[int, ...] | None = None
    alpha: float | None = None
    quality: float | None = None

    @property
    def name(self) -> str:
        """``exact``, ``document_order`` or ``chunk_reuse``."""
        if self.alpha is not None:
            return "chunk_reuse"
        return "exact" if self.order is None else "document_order"


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The ways to show a prompt, the least change first (``exact`` always), and why others are ``left_out``."""

    options: tuple[PromptOption, ...]
    left_out: dict[str, str]

    def without_order(self, why: str) -> PromptOptions:
        """Return the options without document orders."""
        kept = tuple(option for option in self.options if option.order is None)
        return PromptOptions(kept, {**self.left_out, "document_order": why})


def check_ttft_slo(ttft_slo: object) -> float:
    """Return a TTFT SLO in seconds.

    Raises:
        ConfigError: it is no positive, finite number.
    """
    is_number = isinstance(ttft_slo, int | float) and not isinstance(ttft_slo, bool)
    if is_number and 0 < ttft_slo < math.inf:  # type: ignore[operator]
        return float(ttft_slo)  # type: ignore[arg-type]
    raise ConfigError(
        f"ttft_slo is {quoted(ttft_slo, 40)}; it must be a number above 0, the seconds until the first token: give "
        "some, 0.8 for example, or leave it out"
    )


def options_of(
    token_ids: Sequence[int],
    segments: Sequence[PromptSegment],
    cached: CachedPaths | None,
    reuse: MeasuredReuse | str,
) -> PromptOptions:
    """Return the options for a prompt with their cached tokens.

    Args:
        token_ids: the prompt.
        segments: which of them are which document.
        cached: what the engine has; None where that is not known, and nothing counts as cached.
        reuse: what was measured of chunk reuse there, or why it is out of the question.
    """
    left_out: dict[str, str] = {}
    documents = [segment for segment in segments if segment.kind is SegmentKind.DOCUMENT]
    prefix = static_prefix_digest(token_ids, segments)
    if cached is None or prefix is None:
        why = "no document was recognised in the prompt" if prefix is None else _NOT_KNOWN
        return PromptOptions((PromptOption(0, len(token_ids)),), {"document_order": why, "chunk_reuse": why})
    ids = [segment.doc_id or "" for segment in documents]
    num_cached = _most_cached(token_ids, cached.num_cached_tokens(prefix, ids))
    options = [PromptOption(num_cached, len(token_ids) - num_cached)]
    order = best_order((cached,), ids, prefix=prefix, keep_first=False)
    num_in_order = _most_cached(token_ids, cached.num_cached_tokens(prefix, [ids[i] for i in order]))
    if num_in_order > num_cached:
        options.append(PromptOption(num_in_order, len(token_ids) - num_in_order, order=order))
    else:
        left_out["document_order"] = "no other order of the documents is cached further"
    if isinstance(reuse, str):
        left_out["chunk_reuse"] = reuse
    elif not reuse.points:
        left_out["chunk_reuse"] = "it was not calibrated on this model and selection: run 'ragcache calibrate'"
    elif num_stored := _num_stored(token_ids, documents, cached, num_cached):
        options += _reusing(len(token_ids), num_cached, num_stored, reuse)
        if len(options) == 1 + ("document_order" not in left_out):
            left_out["chunk_reuse"] = f"no alpha of {reuse.alpha:g}, the engine's, or more was calibrated"
    else:
        left_out["chunk_reuse"] = "none of the documents behind what is cached is stored for reuse"
    return PromptOptions(tuple(options), left_out)


def choose(
    ttft_slo_s: float, ways: PromptOptions, cost: PrefillCost, queue_s: float | None
) -> tuple[PromptOption, DeadlineReport]:
    """Return the first of the ``ways`` predicted to meet the SLO, or else the fastest, with the reason.

    ``queue_s`` is how long the engine computes for requests that came before; None where it does not say.
    """
    waiting_s = queue_s or 0.0
    planned = [
        PlannedPrompt(
            option.name,
            waiting_s + cost.estimate_s(option.num_cached_tokens, option.num_new_tokens),
            option.num_cached_tokens,
            option.num_new_tokens,
            option.alpha,
            option.quality,
        )
        for option in ways.options
    ]
    in_time = next((i for i, each in enumerate(planned) if each.ttft_s <= ttft_slo_s), None)
    chosen = min(range(len(planned)), key=lambda i: planned[i].ttft_s) if in_time is None else in_time
    best, exact = planned[chosen], planned[0]
    if in_time is None:
        why = f"nothing is predicted to meet {ttft_slo_s:.3g} s: {best.name} is the fastest, {best.ttft_s:.3g} s"
    elif chosen == 0:
        why = f"the prompt as it is takes {exact.ttft_s:.3g} s, within {ttft_slo_s:.3g} s"
    else:
        why = (
            f"the prompt as it is takes {exact.ttft_s:.3g} s, more than {ttft_slo_s:.3g} s; {best.name} is the least "
            f"deviation that is in time, {best.ttft_s:.3g} s"
        )
    report = DeadlineReport(
        ttft_slo_s, best.name, in_time is not None, why, exact.ttft_s, queue_s, tuple(planned), ways.left_out
    )
    return ways.options[chosen], report


def unplanned(ttft_slo_s: float, why: str) -> DeadlineReport:
    """Return the report of a prompt that is sent unchanged, as nothing can be predicted."""
    return DeadlineReport(ttft_slo_s, "exact", None, why)


def _most_cached(token_ids: Sequence[int], num_cached: int) -> int:
    return min(num_cached, len(token_ids) - 1)  # the last token is computed


def _num_stored(
    token_ids: Sequence[int], documents: Sequence[PromptSegment], cached: CachedPaths, num_exact: int
) -> int:
    """Return the number of tokens after ``num_exact`` in documents stored for chunk reuse."""
    places = [(each.start, each.end if each.text_end is None else each.text_end) for each in documents]
    return sum(
        span.end - max(span.start, num_exact)
        for span in chunk_spans(token_ids, places)
        if span.end > num_exact and cached.has_chunk(span.key)
    )


def _reusing(num_tokens: int, num_exact: int, num_stored: int, reuse: MeasuredReuse) -> list[PromptOption]:
    """Return the options with chunk reuse by decreasing quality, down to the engine's own alpha."""
    options = []
    for point, quality in reversed(smoothed(reuse.points)):
        if point.alpha >= reuse.alpha:
            num_kept = num_stored - math.ceil(point.recomputed * num_stored)
            num_new = num_tokens - num_exact - num_kept
            options.append(PromptOption(num_tokens - num_new, num_new, alpha=point.alpha, quality=quality))
    return options
