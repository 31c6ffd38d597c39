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
TENANT = {
    "num_requests": Series("ragcache_tenant_requests", "Requests of a tenant that were asked for."),
    "num_prompt_tokens": Series("ragcache_tenant_prompt_tokens", "Prompt tokens of these requests."),
}
TENANT_TIER = {
    "num_hit_tokens": Series("ragcache_tenant_hit_tokens", "Prompt tokens of a tenant that came from this tier."),
    "num_evicted_blocks": Series("ragcache_tenant_evicted_blocks", "Blocks of a tenant that were evicted."),
    "used_bytes": Series("ragcache_tenant_used_bytes", "Bytes that a tenant has in this tier.", is_gauge=True),
}
