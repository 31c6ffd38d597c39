"""The plan of a request: the stored version of each chunk, and the tokens to recompute."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ragcache_core.chunk.scores import (
    adjusted_overlap,
    context_impact,
    fix_overhead,
    lost_context,
    neighbour_overlap,
    num_selected,
    outward_attention,
)
from ragcache_core.chunk.selection import SelectableChunk, TokenSelection
from ragcache_core.chunk.types import ChunkKey, ChunkSpan, ChunkVariant, PlannedChunk, ReusePlan
from ragcache_core.errors import ConfigError


def plan_reuse(
    spans: Sequence[ChunkSpan],
    stored: Mapping[ChunkKey, Sequence[ChunkVariant]],
    *,
    start: int,
    end: int,
    selection: TokenSelection,
    alpha: float,
    max_recompute: float = 1.0,
    run_tokens: int = 1,
    counts_unseen: bool = True,
) -> ReusePlan:
    """Return the plan for tokens ``[start, end)`` of a prompt: reuse or recompute (Cache-Craft §3.4.1).

    Each stored chunk uses the variant that has lost least context (§3.3: the lowest ``CCI (1 - beta')``; see
    ``lost_context``), the older of equals. ``selection`` chooses ``ceil(CFO |C|)`` of its tokens to recompute. Tokens
    in no chunk are computed, as are chunks that are not stored. A selection of whole chunks uses the variant that keeps
    most of its neighbours; all tokens of a chunk are computed where ``alpha`` times its lost context reaches 1::

        0 .. start            start                                                    end
        | cached exactly      | chunk 2   : gap : chunk 3, not stored : chunk 4        | the question
        | static, chunk 1     | KV, xx KV : xxx : xxxxxxxxxxxxxxxxxxx : KV, x KV, xx   |

    Args:
        spans: the chunks of the whole prompt in order; those before ``start`` count as prefix. A chunk across a border
            is planned only for its part between the borders.
        stored: the usable variants, by chunk. One of another length than the span is not used.
        start: the first token that is not cached exactly.
        end: one after the last token to plan.
        selection: chooses the tokens, given their number.
        alpha: Eq. 12's factor; see ``calibration.py``.
        max_recompute: at most this fraction of a chunk is computed, whatever its CFO. A selection that moves the
            budget from chunk to chunk keeps to the sum; one that takes whole chunks, to that fraction of them all.
        run_tokens: length of the runs of computed tokens, aligned within their chunk, for kernels that read a stored
            key once a run; as few runs as the selected tokens fill.
        counts_unseen: whether a chunk that came before another and was not there at its capture makes the other fit
            less (see ``adjusted_overlap``); False is the paper's Eq. 6.

    Raises:
        ConfigError: ``alpha``, ``max_recompute`` or ``run_tokens`` cannot work.
        ValueError: spans overlap or are out of order, or ``[start, end)`` is no range.
    """
    if not 0.0 <= max_recompute <= 1.0:
        raise ConfigError(f"max_recompute is {max_recompute!r}; it must lie in [0, 1]")
    if run_tokens < 1:
        raise ConfigError(f"run_tokens is {run_tokens!r}; it must be 1 or more")
    if not 0 <= start <= end:
        raise ValueError(f"a plan for tokens [{start}, {end}): start must lie in [0, end]")
    _check_order(spans)

    chosen: list[tuple[ChunkSpan, ChunkVariant, float]] = []
    for number, span in enumerate(spans):
        if start < span.end and span.start < end:
            usable = [variant for variant in stored.get(span.key, ()) if variant.num_tokens == span.num_tokens]
            if usable:
                if selection.is_all_or_nothing:
                    chosen.append((span, *_best_neighbours(usable, span, spans[:number])))
                else:
                    chosen.append((span, *_best(usable, span, spans[:number], counts_unseen=counts_unseen)))

    overheads = [fix_overhead(lost, alpha) for *_, lost in chosen]
    lengths = [span.num_tokens for span, *_ in chosen]
    if selection.is_all_or_nothing:
        overheads = [float(overhead >= 1.0) for overhead in overheads]
        budgets = _whole_budgets(lengths, overheads, [lost for *_, lost in chosen], max_recompute)
    else:
        shares = [min(overhead, max_recompute) for overhead in overheads]
        budgets = [num_selected(share, length) for share, length in zip(shares, lengths, strict=True)]
    selectable = [
        SelectableChunk(variant=variant, budget=budget) for (_, variant, _), budget in zip(chosen, budgets, strict=True)
    ]
    reused = []
    for (span, variant, lost), overhead, offsets in zip(chosen, overheads, selection.select(selectable), strict=True):
        positions = (span.start + offset for offset in in_runs(offsets, span.num_tokens, run_tokens))
        recomputed = tuple(position for position in positions if start <= position < end)
        reused.append(PlannedChunk(span=span, variant=variant, recomputed=recomputed, lost=lost, overhead=overhead))
    return ReusePlan(start=start, end=end, reused=tuple(reused), recomputed=_all_computed(reused, start, end))


def losses(spans: Sequence[ChunkSpan], known: Sequence[float], start: int, plan: ReusePlan | None) -> list[float]:
    """Return the lost context of each chunk of a prompt, from token ``start`` on.

    What a chunk that is captured there inherits, see :func:`~ragcache_core.chunk.scores.lost_context`. A chunk that is
    computed wholly inherits at most what the worst before it has lost; only what was measured of it says how much.

    Args:
        spans: the chunks of the prompt.
        known: what each had lost so far; 0 for what is cached exactly. It holds for what lies before ``start``.
        start: the first token that was not there.
        plan: what became of the others; None where all of them are computed.
    """
    read = {} if plan is None else {chunk.span: chunk.lost for chunk in plan.read}
    found: list[float] = []
    for span, lost in zip(spans, known, strict=True):
        if span.end > start:
            own = lost if span.start < start else 0.0
            lost = max(own, read.get(span, 0.0), max(found, default=0.0))
        found.append(lost)
    return found


def in_runs(offsets: Sequence[int], num_tokens: int, run_tokens: int) -> tuple[int, ...]:
    """Return about as many offsets in aligned runs of ``run_tokens``, those with the most of ``offsets``.

    ``ceil(len(offsets) / run_tokens)`` runs, of equals the first; a chunk's last run may be shorter.
    """
    if run_tokens == 1 or not offsets:
        return tuple(offsets)
    hits = [0] * -(-num_tokens // run_tokens)
    for offset in offsets:
        hits[offset // run_tokens] += 1
    runs = sorted(range(len(hits)), key=hits.__getitem__, reverse=True)[: -(-len(offsets) // run_tokens)]
    return tuple(
        offset for run in sorted(runs) for offset in range(run * run_tokens, min(num_tokens, (run + 1) * run_tokens))
    )


def _check_order(spans: Sequence[ChunkSpan]) -> None:
    for before, after in itertools.pairwise(spans):
        if after.start < before.end:
            places = f"[{before.start}, {before.end}) and [{after.start}, {after.end})"
            raise ValueError(f"chunks at tokens {places} overlap or are out of order: plan each token in one chunk")


def _best(
    variants: Sequence[ChunkVariant], span: ChunkSpan, before: Sequence[ChunkSpan], *, counts_unseen: bool
) -> tuple[ChunkVariant, float]:
    """Return the version that fits ``span`` best after ``before``, and its lost context."""
    prefix = [each.key for each in before]
    candidates = []
    for variant in variants:
        seen = variant.statistics.prefix
        unseen_tokens = sum(each.num_tokens for each in before if each.key not in seen) if counts_unseen else 0
        overlap = adjusted_overlap(variant.statistics, prefix, unseen_tokens=unseen_tokens)
        impact = context_impact(variant.statistics)
        lost = lost_context(variant.statistics, span.context, weight=impact, overlap=overlap)
        candidates.append((lost, variant.number, variant))
    lost, _, variant = min(candidates, key=lambda candidate: candidate[:2])
    return variant, lost


def _best_neighbours(
    variants: Sequence[ChunkVariant], span: ChunkSpan, before: Sequence[ChunkSpan]
) -> tuple[ChunkVariant, float]:
    """Return the version with the most of its former neighbours before ``span``, and its lost context.

    Of those that keep as much, the one of this very context, or else the one that inherited least, the older of equals.

    How much a chunk looks outwards is a matter of the chunk: what counts is the most that any variant shows. One that
    was captured behind no chunk had nothing to look at, so a chunk known only from there is taken to look outwards
    wholly; it is computed once more where it moves to, and known from then on.
    """
    prefix = [each.key for each in before]
    shown = [outward_attention(variant.statistics) for variant in variants if variant.statistics.prefix]
    outward = max(shown, default=1.0)
    candidates = []
    for variant in variants:
        overlap = neighbour_overlap(variant.statistics, prefix)
        lost = lost_context(variant.statistics, span.context, weight=outward, overlap=overlap)
        is_another = variant.statistics.context != span.context
        candidates.append((-overlap, is_another, lost, variant.number, variant))
    *_, lost, _, variant = min(candidates, key=lambda candidate: candidate[:4])
    return variant, lost


def _whole_budgets(
    lengths: Sequence[int], overheads: Sequence[float], lost: Sequence[float], max_recompute: float
) -> list[int]:
    """Return all or none of each chunk's tokens: all if the CFO is 1, then by lost context within the limit.

    The room is ``max_recompute`` of the tokens of all of them together.
    """
    budgets = [0] * len(lengths)
    room = num_selected(max_recompute, sum(lengths))
    for place in sorted(range(len(lengths)), key=lambda place: -lost[place]):
        if overheads[place] >= 1.0 and lengths[place] <= room:
            budgets[place] = lengths[place]
            room -= lengths[place]
    return budgets


def _all_computed(reused: Sequence[PlannedChunk], start: int, end: int) -> tuple[int, ...]:
    computed: list[int] = []
    place = start
    for chunk in reused:
        computed += range(place, max(place, chunk.span.start))
        computed += chunk.recomputed
        place = chunk.span.end
    computed += range(place, end)
    return tuple(computed)
