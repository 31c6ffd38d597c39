"""Read the server's counters from its Prometheus page."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ragcache_core.stats import EngineStats

_COUNTERS = {
    "num_running": "vllm:num_requests_running",
    "num_waiting": "vllm:num_requests_waiting",
    "num_prompt_tokens": "vllm:prompt_tokens_total",
    "num_output_tokens": "vllm:generation_tokens_total",
    "num_prefix_query_tokens": "vllm:prefix_cache_queries_total",
    "num_prefix_hit_tokens": "vllm:prefix_cache_hits_total",
    "num_preemptions": "vllm:num_preemptions_total",
    "num_first_tokens": "vllm:time_to_first_token_seconds_count",
}


def parse_metrics(page: str, *, num_restarts: int = 0) -> EngineStats:
    """Return the engine's statistics from the text of ``/metrics``, summed over data-parallel engines."""
    totals: dict[str, list[float]] = defaultdict(list)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            totals[sample.name].append(sample.value)
    usage = totals["vllm:kv_cache_usage_perc"]
    counts: dict[str, Any] = {field: int(sum(totals[name])) for field, name in _COUNTERS.items()}
    return EngineStats(
        **counts,
        kv_cache_usage=sum(usage) / len(usage) if usage else 0.0,
        sum_ttft_s=sum(totals["vllm:time_to_first_token_seconds_sum"]),
        num_restarts=num_restarts,
    )


def kv_memory(page: str) -> tuple[int, int]:
    """Return the block size, and how many tokens fit into the KV memory, from the text of ``/metrics``."""
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    (told,) = {sample.name: sample.labels for sample in samples if sample.name == "vllm:cache_config_info"}.values()
    block_size, num_blocks = int(told["block_size"]), int(told["num_gpu_blocks"])
    return block_size, (num_blocks - 1) * block_size  # vLLM keeps one block as "no block"
