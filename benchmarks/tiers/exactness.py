"""Exactness: whatever the tiers do, the answers are those of plain vLLM that caches nothing, token by token."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.engines import BLOCK_SIZE, TokenTexts, block_bytes, kill_engine_core, launch
from benchmarks.report import BenchmarkPlan, Figure, Part, percentiles_ms
from benchmarks.token_client import TokenAnswer, TokenClient
from ragcache_core.bench.prompts import TokenRequest
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_core.wire import KEY

NUM_DOCUMENTS = 60
_IN_FLIGHT = 14
_BATCHED_TOKENS = 128
_MAX_MODEL_LEN = 1024
_GPU_BLOCKS, _HOST_BLOCKS, _DISK_BLOCKS = 72, 80, 400
_CONTRADICTIONS: tuple[dict[str, Any], ...] = (
    {"version": 1, "documents": [{"id": "a", "start": 5, "end": 60}, {"id": "b", "start": 40, "end": 90}]},  # overlap
    {"version": 1, "documents": [{"id": "a", "start": 10, "end": 1_000_000}]},
    {"version": 1, "documents": [{"id": "a", "start": 90, "end": 20}]},
    {"version": 1, "documents": [{"id": "a", "start": -7, "end": 20}]},
    {"version": 99, "documents": []},
    {"version": 1, "documents": "all of them"},
)


def exact_requests(texts: TokenTexts, count: int, seed: int) -> list[TokenRequest]:
    """Return requests about overlapping documents in varying orders; some without metadata, some with a wrong one."""
    rng = random.Random(seed)
    lengths = [rng.randint(40, 200) for _ in range(NUM_DOCUMENTS)]
    requests = []
    for i in range(count):
        chosen: list[int] = []
        while len(chosen) < rng.choice((1, 2, 2, 3)):
            number = min(int(rng.paretovariate(0.7)) - 1, NUM_DOCUMENTS - 1)
            if number not in chosen:
                chosen.append(number)
        max_tokens = 96 if i % 4 == 3 else 16  # long ones outgrow their blocks while others wait: preemption
        names = [f"document-{number}" for number in chosen]
        if i % 7 == 0:
            names = []
        elif i % 7 == 5:  # well-formed, but the names are those of other documents
            names = [f"document-{(number + 1) % NUM_DOCUMENTS}" for number in chosen]
        documents = [(number, lengths[number]) for number in chosen]
        asked = texts.request(documents, f"What is number {i}?", max_tokens=max_tokens, names=names)
        if i % 7 == 3:
            asked = TokenRequest(asked.token_ids, {KEY: rng.choice(_CONTRADICTIONS)}, max_tokens)
        requests.append(asked)
    return requests


def mismatches(answers: Sequence[TokenAnswer], expected: Sequence[TokenAnswer]) -> list[int]:
    """Return the numbers of the requests whose answers differ in any token."""
    return [i for i, (a, b) in enumerate(zip(answers, expected, strict=True)) if a.token_ids != b.token_ids]


def measure_exactness(plan: BenchmarkPlan) -> Part:
    """Answer every request with plain vLLM, then with all tiers, killed once and restarted once, and compare."""
    requests, expected = plain_answers(plan, plan.sized(520, 24), enable_prefix_caching=False)
    answers, counts = _answers_of_all_tiers(plan, requests)
    return _part(requests, answers, expected, mismatches(answers, expected), counts)


def measure_exactness_bf16(plan: BenchmarkPlan) -> Part:
    """Do the same in bfloat16, where a token that is computed in another batch may come out another one in vLLM, too.

    So what is held against the tiers is how many answers vLLM's own prefix caching changes.
    """
    requests, expected = plain_answers(plan, plan.sized(520, 24), dtype="bfloat16", enable_prefix_caching=False)
    _, cached = plain_answers(plan, plan.sized(520, 24), dtype="bfloat16")
    answers, counts = _answers_of_all_tiers(plan, requests, dtype="bfloat16")
    differing, num_plain = mismatches(answers, expected), len(mismatches(cached, expected))
    figures = (
        Figure(
            "exact_bf16_mismatches", len(differing), num_plain, note=f"of {len(requests)}; vLLM's own caching beside"
        ),
        Figure("exact_bf16_mismatches_above_vllm", max(len(differing) - num_plain, 0), 0),
    )
    return Part("none: the first request counts", figures, {"counts": dict(counts)})


def plain_answers(
    plan: BenchmarkPlan, num_requests: int, *, dtype: str = "float32", **vllm_args: object
) -> tuple[list[TokenRequest], list[TokenAnswer]]:
    """Return the requests of a measurement, and plain vLLM's answers to them."""
    plan.report("exactness: starting plain vLLM")
    kv_bytes = 400 * block_bytes(plan.model, dtype)
    with launch(
        plan.model, None, dtype=dtype, max_model_len=_MAX_MODEL_LEN, kv_cache_memory_bytes=kv_bytes, **vllm_args
    ) as plain:
        requests = exact_requests(TokenTexts.read(plan.corpus, plain.tokenizer), num_requests, plan.seed)
        plan.report(f"exactness: {num_requests} answers of plain vLLM")
        return requests, TokenClient(plain).ask_all(requests, in_flight=_IN_FLIGHT, is_plain=True)


def _answers_of_all_tiers(
    plan: BenchmarkPlan, requests: Sequence[TokenRequest], dtype: str = "float32"
) -> tuple[list[TokenAnswer], Counter[str]]:
    counts: Counter[str] = Counter()
    size = block_bytes(plan.model, dtype)
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder:
        cache = CacheConfig(
            kv_cache_bytes=_GPU_BLOCKS * size,
            block_size=BLOCK_SIZE,
            host_bytes=_HOST_BLOCKS * size,
            disk_bytes=_DISK_BLOCKS * size,
            directory=Path(folder),
            layerwise_loads=True,
        )
        half = len(requests) * 2 // 3
        answers = _answers_of_a_killed_engine(plan, cache, dtype, requests[:half], counts)
        plan.report("exactness: starting again in good order")
        with _launch(plan, cache, dtype) as engine:
            client = TokenClient(engine)
            answers += client.ask_all(requests[half:], in_flight=_IN_FLIGHT)
            _count(engine, counts)
            counts["restarts"] += 1
    return answers, counts


def _launch(plan: BenchmarkPlan, cache: CacheConfig, dtype: str) -> Engine:
    return launch(plan.model, cache, dtype=dtype, max_model_len=_MAX_MODEL_LEN, max_num_batched_tokens=_BATCHED_TOKENS)


def _answers_of_a_killed_engine(
    plan: BenchmarkPlan, cache: CacheConfig, dtype: str, requests: Sequence[TokenRequest], counts: Counter[str]
) -> list[TokenAnswer]:
    plan.report("exactness: starting the engine with all tiers")
    half = len(requests) // 2
    with _launch(plan, cache, dtype) as engine:
        client = TokenClient(engine)
        plan.report("exactness: asking all tiers")
        answers = client.ask_all(requests[:half], in_flight=_IN_FLIGHT)
        _count(engine, counts)
        plan.report("exactness: killing the engine's core")
        killed_at = max(len(requests) // 8, 1)
        answers += client.ask_all(
            requests[half:],
            in_flight=_IN_FLIGHT,
            on_answer=lambda count: kill_engine_core(engine) if count == killed_at else None,
        )
        _count(engine, counts)
        counts["restarts"] += engine.num_restarts()
    return answers


def _count(engine: Engine, counts: Counter[str]) -> None:
    """Add up what the engine says of itself since its last start."""
    stats = engine.stats()
    counts["preemptions"] += stats.num_preemptions
    counts["ignored_metadata"] += stats.num_ignored_metadata
    for tier in stats.tiers:
        counts[f"evicted_{tier.name}"] += tier.num_evicted_blocks
        counts[f"hits_{tier.name}"] += tier.num_hit_tokens


def _part(
    requests: Sequence[TokenRequest],
    answers: Sequence[TokenAnswer],
    expected: Sequence[TokenAnswer],
    differing: Sequence[int],
    counts: Counter[str],
) -> Part:
    hits = {tier: sum(1 for a in answers if a.tokens_by_tier[tier]) for tier in ("gpu", "host", "disk")}
    num_chunked = sum(1 for a in answers if a.num_prompt_tokens - a.num_cached_tokens > _BATCHED_TOKENS)
    num_evicted = sum(counts[f"evicted_{tier}"] for tier in ("gpu", "host", "disk"))
    p50, p99 = percentiles_ms([a.total_s for a in answers])
    plain_p50, plain_p99 = percentiles_ms([a.total_s for a in expected])
    figures = (
        Figure("exact_requests", len(answers), len(expected), p50, p99, f"{_IN_FLIGHT} in flight, float32, greedy"),
        Figure("exact_mismatches", len(differing), 0, note="answers that differ from plain vLLM's in any token"),
        Figure("exact_gpu_hits", hits["gpu"], 0, note="requests that a tier served part of"),
        Figure("exact_host_hits", hits["host"], 0),
        Figure("exact_disk_hits", hits["disk"], 0),
        Figure("exact_evicted_blocks", num_evicted, note="of all tiers, as reported before kill and end"),
        Figure("exact_preemptions", counts["preemptions"]),
        Figure("exact_chunked_prefills", num_chunked, note=f"prompts longer than a step of {_BATCHED_TOKENS} tokens"),
        Figure("exact_ignored_metadata", counts["ignored_metadata"], note="requests with contradictory metadata"),
        Figure("exact_restarts", counts["restarts"], note="one after kill -9 of the core, one in good order"),
    )
    lengths = [len(request.token_ids) for request in requests]
    repeats = sum(1 for a, b in pairwise(requests) if a.token_ids == b.token_ids)
    details = {
        "counts": dict(counts),
        "differing": [
            {
                "request": i,
                "answer": list(answers[i].token_ids),
                "expected": list(expected[i].token_ids),
                "tokens_by_tier": dict(answers[i].tokens_by_tier),
                "num_cached_tokens": answers[i].num_cached_tokens,
            }
            for i in differing[:20]
        ],
        "prompt_tokens": {"min": min(lengths), "max": max(lengths)},
        "repeated": repeats,
        "blocks": {"gpu": _GPU_BLOCKS, "host": _HOST_BLOCKS, "disk": _DISK_BLOCKS},
        "plain_p50_ms": plain_p50,
        "plain_p99_ms": plain_p99,
    }
    return Part("none: the first request counts", figures, details)
