"""A reading of an engine's counters as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from ragcache_core.cli.output import printable
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


def watched_lines(
    model: str, address: str, now: datetime, reading: EngineStats, last: Interval | None
) -> Iterator[str]:
    """Yield a reading beside what was counted since the one before: what matters most fits 64 x 16 characters."""
    of_last = None if last is None else last.counted
    kind = "plain vLLM, without RAGCache" if reading.policy is None else f"policy {reading.policy}"
    yield f"{now:%H:%M:%S}  {address}"
    load = f"{reading.num_running:,} running, {reading.num_waiting:,} waiting, KV {reading.kv_cache_usage:.0%} full"
    yield f"{load}; {kind}; {_printable(model)}"
    yield ""
    seconds = "last reading" if last is None else f"last {last.seconds:.1f} s"
    yield from _aligned(iter((("", seconds, "since its start"), *_rates(reading, last))), "<>>")
    if reading.tiers:
        yield ""
        rows = [("tier", "in use", "full", "evicted/s", "hits now", "hits")]
        for tier in reading.tiers:
            evicted, hits = "-", "-"
            if last is not None and of_last is not None:
                (counted,) = (each for each in of_last.tiers if each.name == tier.name)
                evicted = f"{counted.num_evicted_blocks / last.seconds:.3g}"
                hits = f"{of_last.tier_hit_rate(counted):.1%}"
            full = f"{tier.usage:.0%}" if tier.is_enabled else "off"
            used = f"{_size(tier.used_bytes)} of {_size(tier.capacity_bytes)}"
            rows.append((tier.name, used, full, evicted, hits, f"{reading.tier_hit_rate(tier):.1%}"))
        yield from _aligned(iter(rows), "<<>>>>")
    if reading.hottest_documents:
        yield "hottest: " + ", ".join(_printable(document.doc_id) for document in reading.hottest_documents)
    if reading.policy is not None:
        yield ""
        yield from (f"{name:<16} {value}" for name, value in _cache_counters(reading))


def _rates(reading: EngineStats, last: Interval | None) -> Iterator[Sequence[str]]:
    counted, seconds = (None, 1.0) if last is None else (last.counted, last.seconds)
    for name, field in (
        ("answers begun", "num_first_tokens"),
        ("prompt tokens", "num_prompt_tokens"),
        ("output tokens", "num_output_tokens"),
    ):
        rate = "-" if counted is None else f"{_rate(getattr(counted, field) / seconds)}/s"
        yield name, rate, f"{getattr(reading, field):,}"
    yield "TTFT, mean", _milliseconds(counted), _milliseconds(reading)
    shares = (
        "-" if of is None or not of.num_prefix_query_tokens else f"{of.cached_share:.1%}" for of in (counted, reading)
    )
    yield "found in a tier", *shares


@dataclass(frozen=True, slots=True)
class Interval:
    """What was counted between two readings that lie ``seconds`` apart."""

    counted: EngineStats
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {
            "seconds": self.seconds,
            "first_tokens_per_s": self.counted.num_first_tokens / self.seconds,
            "prompt_tokens_per_s": self.counted.num_prompt_tokens / self.seconds,
            "output_tokens_per_s": self.counted.num_output_tokens / self.seconds,
            "mean_ttft_s": self.counted.mean_ttft_s,
            "cached_share": self.counted.cached_share,
        }


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _milliseconds(of: EngineStats | None) -> str:
    return "-" if of is None or of.mean_ttft_s is None else f"{1000 * of.mean_ttft_s:,.1f} ms"


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
    yield "TTFT, mean", f"{_milliseconds(reading)} of {reading.num_first_tokens:,} answers"
    yield "preemptions", f"{reading.num_preemptions:,}"
    yield from _cache_counters(reading)


def _cache_counters(reading: EngineStats) -> Iterator[tuple[str, str]]:
    if reading.policy is not None:
        yield "policy", reading.policy
        yield "ignored", f"metadata of {reading.num_ignored_metadata:,} requests"
        counts = f"{reading.num_corrupt_chunks:,} corrupt, {reading.num_lost_chunks:,} lost"
        yield "disk chunks", f"{counts}, {reading.num_dropped_chunks:,} dropped"
        overtaken = f"a waiting one overtaken {reading.max_overtaken:,} times at most"
        yield "queue", f"{reading.num_reordered_requests:,} requests served early, {overtaken}"
        changed = f"changed in {reading.num_reordered_prompts:,} of {reading.num_requests:,} prompts"
        yield "document order", f"{changed} ({reading.reordered_share:.1%})"
        yield "conversations", f"{reading.num_later_turns:,} of {reading.num_requests:,} prompts go on in one"
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
    shown = printable(doc_id)
    return shown if len(shown) <= _DOC_ID_CHARS else f"{shown[: _DOC_ID_CHARS - 3]}..."
