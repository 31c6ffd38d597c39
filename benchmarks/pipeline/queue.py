"""Time to first token near saturation, by the order of the queue.

Both engines get the same requests at the same moments: Poisson arrivals at 1.05 times what the one that serves them
first in, first out can serve (RAGCache §7.3, Figure 18).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.engines import BLOCK_SIZE, TokenTexts, block_bytes, cached_share, launch
from benchmarks.report import BenchmarkPlan, Figure, Part, percentiles_ms
from benchmarks.token_client import TokenAnswer, TokenClient
from ragcache_core.bench.prompts import TokenRequest
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_core.sim.traces.workload import Workload, document_tokens, draw_retrievals

WORKLOAD = Workload(
    num_documents=300, skew=1.0, shift=2.0, mean_tokens=320.0, sigma=0.6, least_tokens=64, most_tokens=800
)
OVERLOAD = 1.05
_WINDOW = 32
_MAX_SEQS = 8


@dataclass(frozen=True, slots=True)
class QueueRun:
    """Seconds to the first token of every request, in the order of arrival, and how the queue behaved."""

    ttft_s: tuple[float, ...]
    num_reordered: int
    max_overtaken: int
    cached_share: float


def measure_reordering(plan: BenchmarkPlan) -> Part:
    """Serve the same arrivals first in, first out, and in the order the cache likes."""
    count, seeds = plan.sized(400, 20), plan.sized(3, 1)
    plan.report("reordering: what first in, first out can serve")
    capacity = _capacity(plan, plan.sized(200, 10))
    means, tails, runs = [], [], []
    for seed in range(plan.seed, plan.seed + seeds):
        gaps = np.random.default_rng(seed).exponential(1 / (OVERLOAD * capacity), count).tolist()
        by_queue = {}
        for queue in ("fifo", "cache_aware") if seed % 2 == 0 else ("cache_aware", "fifo"):
            plan.report(f"reordering: {queue}, seed {seed}")
            with _launch(plan, queue) as engine:
                by_queue[queue] = _serve(plan, engine, seed, gaps)
        fifo, ours = by_queue["fifo"], by_queue["cache_aware"]
        means.append(fmean(fifo.ttft_s) / fmean(ours.ttft_s))
        tails.append(float(np.percentile(ours.ttft_s, 99) / np.percentile(fifo.ttft_s, 99)))
        runs.append((fifo, ours))
    p50, p99 = percentiles_ms([t for _, ours in runs for t in ours.ttft_s])
    base50, base99 = percentiles_ms([t for fifo, _ in runs for t in fifo.ttft_s])
    spread = f"seeds {', '.join(f'{r:.2f}' for r in means)}; {OVERLOAD * capacity:.1f} requests/s"
    note = f"p50 and p99 of TTFT; first in, first out: {base50:.0f} | {base99:.0f} ms"
    shares = [(fifo.cached_share, ours.cached_share) for fifo, ours in runs]
    figures = (
        Figure("reorder_ttft_ratio", round(median(means), 3), 1.0, p50, p99, f"mean TTFT, median of {spread}"),
        Figure("reorder_p99_ratio", round(median(tails), 3), 1.0, p50, p99, note),
        Figure("max_overtaken", max(ours.max_overtaken for _, ours in runs), note=f"window {_WINDOW}"),
        Figure(
            "reorder_cached_share",
            round(fmean(ours for _, ours in shares), 4),
            round(fmean(fifo for fifo, _ in shares), 4),
            note="cached share of prompt tokens",
        ),
    )
    details = {
        "ttft_ratios": means,
        "p99_ratios": tails,
        "num_reordered": [ours.num_reordered for _, ours in runs],
        "capacity": capacity,
    }
    return Part(f"{_num_warm_up(plan)} requests", figures, details)


def _serve(plan: BenchmarkPlan, engine: Engine, seed: int, gaps_s: Sequence[float]) -> QueueRun:
    client = TokenClient(engine)
    requests = _requests(plan, engine, seed, _num_warm_up(plan) + len(gaps_s))
    client.ask_all(requests[: _num_warm_up(plan)], in_flight=_MAX_SEQS)
    answers = _open_loop(client, requests[_num_warm_up(plan) :], gaps_s)
    stats = engine.stats()
    ttft_s = tuple(_known(a.ttft_s) for a in answers)
    return QueueRun(ttft_s, stats.num_reordered_requests, stats.max_overtaken, cached_share(answers))


def _open_loop(client: TokenClient, requests: Sequence[TokenRequest], gaps_s: Sequence[float]) -> list[TokenAnswer]:
    """Send each request when its time has come, whatever became of those before."""
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = []
        due_s = time.perf_counter()
        for request, gap_s in zip(requests, gaps_s, strict=True):
            due_s += gap_s
            time.sleep(max(0.0, due_s - time.perf_counter()))  # arrivals of an open loop
            futures.append(pool.submit(client.ask, request))
        return [future.result() for future in futures]


def _capacity(plan: BenchmarkPlan, count: int) -> float:
    with _launch(plan, "fifo") as engine:
        client = TokenClient(engine)
        requests = _requests(plan, engine, plan.seed + 1000, _num_warm_up(plan) + count)
        client.ask_all(requests[: _num_warm_up(plan)], in_flight=_MAX_SEQS)
        began_s = time.perf_counter()
        client.ask_all(requests[_num_warm_up(plan) :], in_flight=4 * _MAX_SEQS)
        return count / (time.perf_counter() - began_s)


def _launch(plan: BenchmarkPlan, queue: Any) -> Engine:
    tokens = int(document_tokens(WORKLOAD, plan.seed).sum())
    cache = CacheConfig(
        kv_cache_bytes=tokens // BLOCK_SIZE // 5 * block_bytes(plan.model),
        block_size=BLOCK_SIZE,
        host_bytes=0,
        queue=queue,
        queue_window=_WINDOW,
    )
    return launch(plan.model, cache, max_num_seqs=_MAX_SEQS, max_num_batched_tokens=1024)


def _requests(plan: BenchmarkPlan, engine: Engine, seed: int, count: int) -> list[TokenRequest]:
    texts = TokenTexts.read(plan.corpus, engine.tokenizer)
    sizes = document_tokens(WORKLOAD, plan.seed).tolist()
    return [
        texts.request([(d, sizes[d]) for d in documents], f"Number {seed}-{i}: who founded it?")
        for i, documents in enumerate(draw_retrievals(WORKLOAD, count, seed).docs.tolist())
    ]


def _num_warm_up(plan: BenchmarkPlan) -> int:
    return plan.sized(100, 8)


def _known(ttft_s: float | None) -> float:
    assert ttft_s is not None, "the engine did not tell the time to the first token of a request"
    return ttft_s
