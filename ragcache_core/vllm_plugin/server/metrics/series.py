"""The series at ``/metrics``, by their figures: those that the engine's statistics declare, and what they leave out."""

from __future__ import annotations

from ragcache_core.stats import ChunkStats, EngineStats, Series, TierStats, series_of

ENGINE = {
    "num_prompt_tokens": Series("ragcache_prompt_tokens", "Prompt tokens of requests that were asked for."),
    "num_loaded_bytes": Series("ragcache_loaded_bytes", "Bytes of KV copied into GPU memory."),
    "num_stored_bytes": Series("ragcache_stored_bytes", "Bytes of KV copied out of GPU memory."),
    **series_of(EngineStats),
}
TIER = series_of(TierStats)
CHUNKS = series_of(ChunkStats)
