"""What it brings that the prefixes of waiting requests are evicted last (RAGCache §5.2), on real engines.

Both engines get the same requests in the same order. 56 are in flight and 8 run, so 48 wait. The other engine is
RAGCache's as well, but protects nothing: a module that Python imports at its start switches it off.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.engines import BLOCK_SIZE, TokenTexts, block_bytes, launch
from benchmarks.pipeline.queue import WORKLOAD
from benchmarks.report import BenchmarkPlan, Figure, Part
from benchmarks.token_client import TokenAnswer, TokenClient
from ragcache_core.config import CacheConfig, QueueOrder
from ragcache_core.sim.traces.workload import document_tokens, draw_retrievals

_MAX_SEQS, _IN_FLIGHT = 8, 56
_GPU_SHARES = (0.1, 0.2)
"""Of what all documents take."""
_QUEUES: tuple[QueueOrder, ...] = ("cache_aware", "fifo")
_SWITCH = """\
from ragcache_core.vllm_plugin.cache.queued_prefixes import QueuedPrefixes
QueuedPrefixes._protect = lambda self, state: None
"""


def measure_lookahead(plan: BenchmarkPlan) -> Part:
    """Compare protected prefixes of waiting requests with prefixes that rank like all others, seed by seed."""
    figures: list[Figure] = []
    details = {}
    seeds = range(plan.seed, plan.seed + plan.sized(3, 1))
    for queue in _QUEUES:
        for share in _GPU_SHARES:
            pairs = []
            for seed in seeds:
                order = (True, False) if seed % 2 else (False, True)
                of = {protects: _answers(plan, queue, share, seed, protects=protects) for protects in order}
                pairs.append((_summary(of[True]), _summary(of[False])))
            name = f"{queue}_{share:.0%}".replace("%", "")
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
    return Part(f"{_count(plan) // 3} requests", tuple(figures), details)


def _answers(plan: BenchmarkPlan, queue: QueueOrder, share: float, seed: int, *, protects: bool) -> list[TokenAnswer]:
    plan.report(f"look-ahead: {queue}, {share:.0%}, seed {seed}, {'on' if protects else 'off'}")
    workload = replace(WORKLOAD, documents_per_request=2)
    sizes = document_tokens(workload, plan.seed).tolist()
    num_blocks = round(sum(sizes) * share / BLOCK_SIZE)
    cache = CacheConfig(
        kv_cache_bytes=num_blocks * block_bytes(plan.model), block_size=BLOCK_SIZE, host_bytes=0, queue=queue
    )
    count = _count(plan)
    with TemporaryDirectory(prefix="ragcache-lookahead-") as folder:
        (Path(folder) / "sitecustomize.py").write_text("" if protects else _SWITCH, encoding="utf-8")
        paths = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        settings = {"max_num_seqs": _MAX_SEQS, "max_num_batched_tokens": 1024, "env": {"PYTHONPATH": paths}}
        with launch(plan.model, cache, **settings) as engine:
            texts = TokenTexts.read(plan.corpus, engine.tokenizer)
            requests = [
                texts.request([(d, sizes[d]) for d in documents], f"Number {seed}-{i}: who founded it?")
                for i, documents in enumerate(draw_retrievals(workload, count, seed).docs.tolist())
            ]
            return TokenClient(engine).ask_all(requests, in_flight=_IN_FLIGHT)[count // 3 :]


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
    """Return the requests of an engine; the first third is its warm-up."""
    return plan.sized(600, 60)
