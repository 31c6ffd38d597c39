"""The names and descriptions of the series at ``/metrics``."""

from __future__ import annotations

_COUNTERS = {
    "num_requests": ("ragcache_requests", "Requests that were asked for and admitted."),
    "num_prompt_tokens": ("ragcache_prompt_tokens", "Prompt tokens of these requests."),
    "num_loaded_bytes": ("ragcache_loaded_bytes", "Bytes of KV copied into GPU memory."),
    "num_stored_bytes": ("ragcache_stored_bytes", "Bytes of KV copied out of GPU memory."),
    "num_ignored_metadata": ("ragcache_ignored_metadata", "Requests whose documents contradicted their prompt."),
    "num_corrupt_chunks": ("ragcache_corrupt_chunks", "Chunks on disk with wrong content; each was a miss."),
    "num_lost_chunks": ("ragcache_lost_chunks", "Chunks found cut off, or without their prefix, at the start."),
    "num_dropped_chunks": ("ragcache_dropped_chunks", "Chunks that were not written to disk: it was full or slow."),
    "num_reordered_prompts": ("ragcache_reordered_prompts", "Requests whose documents do not stand as retrieved."),
    "num_reordered_requests": ("ragcache_reordered_requests", "Requests that were served before an earlier one."),
    "num_speculative_requests": ("ragcache_speculative_requests", "Requests that came before anybody asked for them."),
    "num_confirmed_speculations": ("ragcache_confirmed_speculations", "Of those, the ones that were asked for."),
    "num_speculative_tokens": ("ragcache_speculative_tokens", "Prompt tokens computed before anybody asked for them."),
}
_GAUGES = {
    "num_wasted_tokens": ("ragcache_wasted_tokens", "Of those, the ones of requests that ended unasked for."),
    "max_overtaken": ("ragcache_max_overtaken", "The most later requests that were served before a waiting one."),
}
_TIER_COUNTERS = {
    "num_hit_tokens": ("ragcache_tier_hit_tokens", "Prompt tokens that came from a tier."),
    "num_evicted_blocks": ("ragcache_tier_evicted_blocks", "Blocks that a tier gave up."),
}
_TIER_GAUGES = {
    "capacity_bytes": ("ragcache_tier_capacity_bytes", "Size of a tier."),
    "used_bytes": ("ragcache_tier_used_bytes", "Bytes of cached KV in a tier."),
    "is_enabled": ("ragcache_tier_enabled", "Whether a tier works: 1 or 0."),
}
_CHUNK_COUNTERS = {
    "num_requests": ("ragcache_chunk_requests", "Requests that reused documents behind others."),
    "num_refused_requests": ("ragcache_chunk_refused_requests", "Requests that wanted to and could not."),
    "num_reused_chunks": ("ragcache_chunk_reused", "Documents that they reused."),
    "num_reused_tokens": ("ragcache_chunk_reused_tokens", "Tokens of these that were taken as they were stored."),
    "num_recomputed_tokens": ("ragcache_chunk_recomputed_tokens", "Tokens of these that were computed anew."),
    "num_captured_chunks": ("ragcache_chunk_captured", "Documents whose KV was kept for reuse."),
    "num_evicted_chunks": ("ragcache_chunk_evicted", "Of those, the ones that left host memory for others."),
    "num_mismatched_chunks": ("ragcache_chunk_mismatched", "Documents with other tokens than stored."),
    "num_too_long_chunks": ("ragcache_chunk_too_long", "Documents that were longer than the memory."),
    "num_crowded_out_chunks": ("ragcache_chunk_crowded_out", "Documents for which there was no room."),
    "num_dropped_chunks": ("ragcache_chunk_dropped", "Documents that were not written to disk."),
    "num_corrupt_chunks": ("ragcache_chunk_corrupt", "Documents that were damaged or gone on disk; each was a miss."),
    "num_lost_chunks": ("ragcache_chunk_lost", "Documents that were given up for it."),
}
_CHUNK_GAUGES = {
    "num_chunks": ("ragcache_chunk_stored", "Documents that are kept for reuse."),
    "num_variants": ("ragcache_chunk_variants", "KVs of them that were computed behind different ones."),
    "capacity_tokens": ("ragcache_chunk_capacity_tokens", "Tokens that fit into host memory's share for them."),
    "used_tokens": ("ragcache_chunk_used_tokens", "Tokens of it in use."),
    "disk_capacity_tokens": ("ragcache_chunk_disk_capacity_tokens", "Tokens that fit on the disk's share for them."),
    "used_disk_tokens": ("ragcache_chunk_disk_used_tokens", "Tokens of it in use."),
    "is_disk_enabled": ("ragcache_chunk_disk_enabled", "Whether they are kept on disk: 1 or 0."),
}
