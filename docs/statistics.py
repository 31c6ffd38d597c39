"""Write docs/reference/statistics.md from the fields that declare the statistics: ``python docs/statistics.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from ragcache_core.stats import (
    CHUNK_KIND_SERIES,
    CHUNK_SERIES,
    ENGINE_SERIES,
    TENANT_SERIES,
    TENANT_TIER_SERIES,
    TIER_SERIES,
    EngineStats,
    Series,
    fields_merged_by,
    reported_fields,
    vllm_series_of,
)

_SWITCH = "exist with `RAGCACHE_TENANT_METRICS`"
PAGE = Path(__file__).parent / "reference" / "statistics.md"


def page() -> str:
    """Return the page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Engine statistics"
    yield ""
    yield "This page is written by `python docs/statistics.py` from the declarations in `ragcache_core/stats.py`."
    for title, part, labels, table in (
        ("Engine", "the engine's report", "", ENGINE_SERIES),
        ("Tiers", "each of `tiers`", " They have the label `tier`.", TIER_SERIES),
        ("Chunk reuse", "`chunks`", " They exist only with chunk reuse.", CHUNK_SERIES),
        (
            "Errors of chunk reuse",
            "each of `chunks.kinds`",
            " They have the label `kind`, and exist only with `ChunkReuse.max_error`.",
            CHUNK_KIND_SERIES,
        ),
        ("Tenants", "each of `tenants`", f" They have the label `tenant`, and {_SWITCH}.", TENANT_SERIES),
        (
            "Tiers of tenants",
            "each of a tenant's `tiers`",
            " They have the labels `tenant` and `tier`.",
            TENANT_TIER_SERIES,
        ),
    ):
        yield from ("", f"## {title}", "")
        yield f"Keys of {part} in `GET /v1/ragcache/stats`, and their Prometheus metrics on `/metrics`.{labels}"
        yield from ("", "| key | metric | type | meaning |", "|---|---|---|---|")
        for key, series in table.items():
            yield f"| `{key}` | `{_exported(series)}` | {'gauge' if series.is_gauge else 'counter'} | {series.text} |"
    yield from ("", "## `Engine.stats()`", "")
    yield "An `EngineStats` has these fields. Times are in seconds."
    yield from ("", "| field | source |", "|---|---|")
    of_vllm, reported = vllm_series_of(EngineStats), reported_fields(EngineStats)
    for name in (each.name for each in fields(EngineStats)):
        if name in of_vllm:
            merge = "mean" if name in fields_merged_by("mean", EngineStats) else "sum"
            source = f"vLLM's `{of_vllm[name]}`, the {merge} over engines"
        else:
            source = "RAGCache's report" if name in reported else "the client"
        yield f"| `{name}` | {source} |"


def _exported(series: Series) -> str:
    return series.name if series.is_gauge else f"{series.name}_total"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
