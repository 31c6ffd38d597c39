"""A reading of an engine's counters as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ragcache_core.stats import DocumentUse, EngineStats, TierStats

_BAR_CELLS = 20
_DOC_ID_CHARS = 40
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def lines_of(model: str, reading: EngineStats) -> Iterator[str]:
    """Yield the counters, a table of the tiers, and the hottest documents."""
    for name, value in _counters(model, reading):
        yield f"{name:<16} {value}"
    if reading.policy is None:
        yield "plain vLLM: it runs without RAGCache ('ragcache serve' without --no-cache runs it with)"
        return
    if reading.tiers:
        yield ""
        yield from _aligned(_tier_rows(reading), "<><>>>>")
    if reading.hottest_documents:
        yield ""
        yield from _aligned(_document_rows(reading.hottest_documents), "<>><")


def _counters(model: str, reading: EngineStats) -> Iterator[tuple[str, str]]:
    yield "model", model
    yield "requests", f"{reading.num_running} running, {reading.num_waiting} waiting"
    yield "KV cache in use", f"{reading.kv_cache_usage:.1%}"
    yield "prompt tokens", f"{reading.num_prompt_tokens:,}"
    yield "output tokens", f"{reading.num_output_tokens:,}"
    yield (
        "found in cache",
        f"{reading.num_prefix_hit_tokens:,} of {reading.num_prefix_query_tokens:,} tokens "
        f"({reading.prefix_hit_rate:.1%})",
    )
    yield "preemptions", f"{reading.num_preemptions:,}"
    if reading.policy is not None:
        yield "policy", reading.policy
        yield "ignored", f"metadata of {reading.num_ignored_metadata:,} requests"
        counts = f"{reading.num_corrupt_chunks:,} corrupt, {reading.num_lost_chunks:,} lost"
        yield "disk chunks", f"{counts}, {reading.num_dropped_chunks:,} dropped"
        overtaken = f"a waiting one overtaken {reading.max_overtaken:,} times at most"
        yield "queue", f"{reading.num_reordered_requests:,} requests served early, {overtaken}"
        changed = f"changed in {reading.num_reordered_prompts:,} of {reading.num_requests:,} prompts"
        yield "document order", f"{changed} ({reading.reordered_share:.1%})"
        confirmed = f"{reading.num_confirmed_speculations:,} of {reading.num_speculative_requests:,} requests confirmed"
        wasted = f"{reading.num_wasted_tokens:,} of {reading.num_speculative_tokens:,} tokens wasted"
        yield "speculation", f"{confirmed}, {wasted}"
    if (chunks := reading.chunks) is not None:
        reused = f"{chunks.num_reused_chunks:,} chunks of {chunks.num_requests:,} requests"
        tokens = f"{chunks.num_reused_tokens:,} tokens reused, {chunks.num_recomputed_tokens:,} computed anew"
        yield "chunk reuse", f"{reused}: {tokens}; {chunks.num_refused_requests:,} requests refused"
        stored = f"{chunks.num_chunks:,} chunks, {chunks.num_variants:,} variants"
        host = f"{chunks.used_tokens:,} of {chunks.capacity_tokens:,} tokens in host memory"
        disk = f"{chunks.used_disk_tokens:,} of {chunks.disk_capacity_tokens:,} on disk"
        switched_off = (
            "" if chunks.is_disk_enabled or not chunks.disk_capacity_tokens else " (switched off: see the log)"
        )
        yield "stored chunks", f"{stored}; {host}, {disk}{switched_off}"
        unusable = f"{chunks.num_mismatched_chunks:,} mismatched, {chunks.num_too_long_chunks:,} too long"
        gone = f"{chunks.num_crowded_out_chunks:,} crowded out, {chunks.num_evicted_chunks:,} evicted"
        damaged = f"{chunks.num_corrupt_chunks:,} corrupt, {chunks.num_lost_chunks:,} lost"
        yield "unused chunks", f"{unusable}, {gone}, {damaged}, {chunks.num_dropped_chunks:,} dropped"


def _tier_rows(reading: EngineStats) -> Iterator[Sequence[str]]:
    yield "tier", "in use", "", "blocks", "evicted", "hit tokens", "hit rate"
    for tier in reading.tiers:
        yield (
            tier.name,
            f"{_size(tier.used_bytes)} of {_size(tier.capacity_bytes)}",
            _bar(tier) if tier.is_enabled else "switched off: see the log",
            f"{tier.num_blocks:,}",
            f"{tier.num_evicted_blocks:,}",
            f"{tier.num_hit_tokens:,}",
            f"{reading.tier_hit_rate(tier):.1%}",
        )


def _document_rows(documents: Sequence[DocumentUse]) -> Iterator[Sequence[str]]:
    yield "hottest documents", "uses", "tokens", "in"
    for document in documents:
        yield (
            _printable(document.doc_id),
            f"{document.frequency:,.4g}",
            f"{document.num_tokens:,}",
            ", ".join(document.tiers),
        )


def _aligned(rows: Iterator[Sequence[str]], alignment: str) -> Iterator[str]:
    table = list(rows)
    widths = [max(len(row[i]) for row in table) for i in range(len(alignment))]
    for row in table:
        yield "  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, alignment, widths, strict=True)).rstrip()


def _bar(tier: TierStats) -> str:
    num_full = round(min(max(tier.usage, 0.0), 1.0) * _BAR_CELLS)
    return f"[{'#' * num_full}{'.' * (_BAR_CELLS - num_full)}] {tier.usage:4.0%}"


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"


def _printable(doc_id: str) -> str:
    """Return an id that cannot steer a terminal, and fits."""
    shown = "".join(c if c.isprintable() else "?" for c in doc_id)
    return shown if len(shown) <= _DOC_ID_CHARS else f"{shown[: _DOC_ID_CHARS - 3]}..."
