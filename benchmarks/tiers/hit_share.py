"""What share of prompt tokens a GPU tier that is too small serves: with our order of eviction and queue, and vLLM's.

All engines get the same requests and the same KV memory: a fifth of what the documents take. Sixty requests are in
flight at any time; a warm-up of as many requests as are counted goes before.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.engines import BLOCK_SIZE, TokenTexts, block_bytes, cached_share, launch
from benchmarks.report import BenchmarkPlan, Figure, Part, percentiles_ms
from benchmarks.token_client import TokenAnswer, TokenClient
from ragcache_core.bench.prompts import TokenRequest
from ragcache_core.config import CacheConfig
from ragcache_core.sim.traces.workload import Workload, document_tokens, draw_retrievals

IN_FLIGHT = 60
WORKLOAD = Workload(
    num_documents=400, skew=1.3, shift=2.0, mean_tokens=160.0, sigma=0.7, least_tokens=32, most_tokens=700
)
_MAX_SEQS = 8
_MAX_MODEL_LEN = 1536


def document_requests(texts: TokenTexts, workload: Workload, seed: int, count: int) -> list[TokenRequest]:
    """Return requests about two documents each, every one with a question of its own."""
    num_tokens = document_tokens(workload, seed).tolist()
    return [
        texts.request([(d, num_tokens[d]) for d in documents], f"Number {seed}-{i}: who founded it?")
        for i, documents in enumerate(draw_retrievals(workload, count, seed).docs.tolist())
    ]


def measure_share(plan: BenchmarkPlan) -> Part:
    """Compare the default policy with plain vLLM seed by seed, on the GPU tier alone, then with host and disk."""
    seeds = range(plan.seed, plan.seed + plan.sized(3, 1))
    stock, ours, ratios, times = [], [], [], []
    for seed in seeds:
        plain = _answers(plan, None, seed)
        tree = _answers(plan, "mixture", seed)
        times += [a.total_s for a in tree]
        stock.append(cached_share(plain))
        ours.append(cached_share(tree))
        ratios.append(ours[-1] / stock[-1])
    tiers = _answers(plan, "mixture", plan.seed, has_tiers=True)
    p50, p99 = percentiles_ms(times)
    spread = f"seeds {', '.join(f'{r:.2f}' for r in ratios)}"
    figures = (
        Figure("cached_share", round(fmean(ours), 4), round(fmean(stock), 4), p50, p99, "GPU tier alone"),
        Figure("cached_share_stock", round(fmean(stock), 4), note="plain vLLM, its own prefix cache"),
        Figure("cached_share_ratio", round(fmean(ours) / fmean(stock), 4), 1.0, note=f"of the means; {spread}"),
        Figure("cached_share_tiers", round(cached_share(tiers), 4), round(stock[0], 4), note="with host and disk"),
    )
    details = {
        "cached_share": ours,
        "cached_share_stock": stock,
        "tokens_by_tier": {t: sum(a.tokens_by_tier[t] for a in tiers) for t in ("gpu", "host", "disk")},
        "workload": _workload(),
    }
    return Part(f"{_count(plan)} requests before as many that count", figures, details)


def _answers(plan: BenchmarkPlan, policy: str | None, seed: int, *, has_tiers: bool = False) -> list[TokenAnswer]:
    """Return the answers that count of one engine; without ``policy`` it is plain vLLM."""
    size, gpu_blocks, count = block_bytes(plan.model), _gpu_blocks(seed), _count(plan)
    name = policy or "plain vLLM"
    plan.report(f"cached share: starting {name}, seed {seed}")
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder:
        settings: dict[str, Any] = {"kv_cache_bytes": gpu_blocks * size, "block_size": BLOCK_SIZE, "policy": policy}
        settings["host_bytes"] = 2 * gpu_blocks * size if has_tiers else 0
        if has_tiers:
            settings |= {"disk_bytes": 10 * gpu_blocks * size, "directory": Path(folder)}
        cache = None if policy is None else CacheConfig(**settings)
        plain = {"kv_cache_memory_bytes": gpu_blocks * size, "enable_prefix_caching": True}
        with _launch(plan, cache, **(plain if cache is None else {})) as engine:
            texts = TokenTexts.read(plan.corpus, engine.tokenizer)
            requests = document_requests(texts, WORKLOAD, seed, 2 * count)
            client = TokenClient(engine)
            plan.report(f"cached share: warming {name} up, seed {seed}")
            client.ask_all(requests[:count], in_flight=IN_FLIGHT, is_plain=cache is None)
            plan.report(f"cached share: asking {name}, seed {seed}")
            return client.ask_all(requests[count:], in_flight=IN_FLIGHT, is_plain=cache is None)


def _launch(plan: BenchmarkPlan, cache: CacheConfig | None, **vllm_args: object) -> Any:
    return launch(plan.model, cache, max_model_len=_MAX_MODEL_LEN, max_num_seqs=_MAX_SEQS, **vllm_args)


def _gpu_blocks(seed: int) -> int:
    """Return a fifth of the blocks that all documents take."""
    return int(document_tokens(WORKLOAD, seed).sum()) // BLOCK_SIZE // 5


def _count(plan: BenchmarkPlan) -> int:
    return plan.sized(400, 60)


def _workload() -> dict[str, object]:
    return {
        "documents": WORKLOAD.num_documents,
        "mean_document_tokens": WORKLOAD.mean_tokens,
        "popularity": f"(rank + {WORKLOAD.shift:g})^-{WORKLOAD.skew:g}",
        "documents_per_request": 2,
        "in_flight": IN_FLIGHT,
        "max_num_seqs": _MAX_SEQS,
    }
