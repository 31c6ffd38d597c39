"""What it brings that the prefixes of waiting requests are evicted last (RAGCache §5.2), on real engines.

Both engines get the same requests in the same order. 56 are in flight and 8 run, so 48 wait. The other engine is
RAGCache's as well, but protects nothing: a module that Python imports at its start switches it off.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.engines import BLOCK_SIZE, TokenTexts, block_bytes, launch
from benchmarks.pipeline.queue import WORKLOAD
from benchmarks.report import BenchmarkPlan, Figure, Part
from benchmarks.token_client import TokenAnswer, TokenClient
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig, QueueOrder
from ragcache_core.sim.traces.workload import document_tokens, draw_retrievals

_MAX_SEQS, _IN_FLIGHT = 8, 56
_SETTINGS: tuple[tuple[QueueOrder, float], ...] = (("cache_aware", 0.1), ("cache_aware", 0.2), ("fifo", 0.1))
"""The order of the queue, and the GPU KV cache as a share of what all documents take."""
_SWITCH = """\
from ragcache_core.vllm_plugin.cache.queued_prefixes import QueuedPrefixes
QueuedPrefixes._protect = lambda self, state: None
"""


def measure_lookahead(plan: BenchmarkPlan) -> Part:
    """Compare protected prefixes of waiting requests with prefixes that rank like all others, seed by seed."""
    figures: list[Figure] = []
    details = {}
    for queue, share in _SETTINGS:
        pairs = _pairs(plan, queue, share)
        name = f"{queue}_{100 * share:.0f}"
        details[name] = [{"protected": on, "others": off} for on, off in pairs]
        figures += [
            Figure(
                f"lookahead_{key}_{name}",
                round(fmean(on[key] for on, _ in pairs), 4),
                round(fmean(off[key] for _, off in pairs), 4),
                note="ratios by seed " + ", ".join(f"{on[key] / off[key]:.3f}" for on, off in pairs),
            )
            for key in ("cached_share", "computed_tokens", "mean_ttft_s", "p99_ttft_s")
        ]
    return Part(f"{_count(plan) // 3} requests of each seed", tuple(figures), details)


def _pairs(plan: BenchmarkPlan, queue: QueueOrder, share: float) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Return, for each seed, what an engine with look-ahead and one without it do."""
    with TemporaryDirectory(prefix="ragcache-lookahead-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SWITCH, encoding="utf-8")
        with _launch(plan, queue, share) as on, _launch(plan, queue, share, folder) as off:
            pairs = []
            for seed in range(plan.seed, plan.seed + plan.sized(3, 1)):
                plan.report(f"look-ahead: {queue}, {share:.0%}, seed {seed}")
                of = {engine: _summary(_answers(plan, engine, seed)) for engine in ((on, off), (off, on))[seed % 2]}
                pairs.append((of[on], of[off]))
    return pairs


def _launch(plan: BenchmarkPlan, queue: QueueOrder, share: float, *folders: str) -> Engine:
    num_blocks = round(sum(_sizes(plan)) * share / BLOCK_SIZE)
    cache = CacheConfig(
        kv_cache_bytes=num_blocks * block_bytes(plan.model), block_size=BLOCK_SIZE, host_bytes=0, queue=queue
    )
    paths = os.pathsep.join(filter(None, (*folders, os.environ.get("PYTHONPATH"))))
    return launch(plan.model, cache, max_num_seqs=_MAX_SEQS, max_num_batched_tokens=1024, env={"PYTHONPATH": paths})


def _answers(plan: BenchmarkPlan, engine: Engine, seed: int) -> list[TokenAnswer]:
    """Return the answers of a seed that count; the first third is warm-up."""
    texts, sizes, count = TokenTexts.read(plan.corpus, engine.tokenizer), _sizes(plan), _count(plan)
    requests = [
        texts.request([(d, sizes[d]) for d in documents], f"Number {seed}-{i}: who founded it?")
        for i, documents in enumerate(draw_retrievals(WORKLOAD, count, seed).docs.tolist())
    ]
    return TokenClient(engine).ask_all(requests, in_flight=_IN_FLIGHT)[count // 3 :]


def _sizes(plan: BenchmarkPlan) -> list[int]:
    sizes: list[int] = document_tokens(WORKLOAD, plan.seed).tolist()
    return sizes


def _summary(answers: Sequence[TokenAnswer]) -> dict[str, float]:
    num_prompt = sum(answer.num_prompt_tokens for answer in answers)
    num_cached = sum(answer.num_cached_tokens for answer in answers)
    ttft_s = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    return {
        "cached_share": num_cached / num_prompt,
        "computed_tokens": num_prompt - num_cached,
        "mean_ttft_s": fmean(ttft_s),
        "p99_ttft_s": float(np.percentile(ttft_s, 99)),
    }


def _count(plan: BenchmarkPlan) -> int:
    return plan.sized(450, 60)
