"""What the tiers cost where they bring nothing: throughput with prompts that never repeat, against plain vLLM's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from ragcache_core.bench.compare.random_model import random_model
from ragcache_core.bench.engines import BLOCK_SIZE, TokenClient, TokenRequest, TokenTexts, block_bytes, launch
from ragcache_core.bench.measure import Comparison
from ragcache_core.bench.report import Figure, Part, Plan
from ragcache_core.config import CacheConfig

_IN_FLIGHT = 16
_TOKENS = range(10, 1000)
"""Ids that stand for text in the demo model and in the benchmark model."""
_GPU_BLOCKS = 2048


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of two documents of ``document_tokens`` each, and answers of ``max_tokens``."""

    name: str
    document_tokens: int
    max_tokens: int
    batch: int


_LOADS = (Load("prefill-heavy", 360, 2, 48), Load("decode-heavy", 24, 96, 32))


def unique_requests(texts: TokenTexts, load: Load, first: int, count: int) -> list[TokenRequest]:
    """Return requests of which no two share a document; ``first`` is the number of the first one."""
    size = load.document_tokens
    return [
        texts.request([(2 * i, size), (2 * i + 1, size)], "What is it?", max_tokens=load.max_tokens)
        for i in range(first, first + count)
    ]


def _any_tokens(seed: int) -> TokenTexts:
    """Return documents of random tokens, which any model takes: only how many there are matters."""
    drawn = np.random.default_rng(seed).integers(_TOKENS.start, _TOKENS.stop, 20_000).tolist()

    def encode(text: str) -> tuple[int, ...]:
        return tuple(_TOKENS[crc32(word.encode()) % len(_TOKENS)] for word in text.split())

    return TokenTexts(tuple(drawn[:8]), tuple(drawn), encode)


def throughput_ratio(comparison: Comparison) -> float:
    """Return the throughput of the rival over the baseline's, of the faster batches on each side."""
    return 1 / comparison.undisturbed_ratio


def measure_idle(plan: Plan) -> Part:
    """Run the default configuration and plain vLLM side by side, batch by batch in turn."""
    return _measure(plan, plan.model, "idle_throughput_ratio", plan.sized(24, 2))


def measure_idle_large(plan: Plan) -> Part:
    """Do the same with the benchmark model of 30 million parameters, whose steps take longer."""
    return _measure(plan, str(random_model()), "idle_throughput_ratio_30m", plan.sized(6, 1))


def _measure(plan: Plan, model: str, name: str, pairs: int) -> Part:
    kv_bytes = _GPU_BLOCKS * block_bytes(model)
    cache = CacheConfig(kv_cache_bytes=kv_bytes, block_size=BLOCK_SIZE)
    plan.report("idle throughput: starting plain vLLM and ours")
    with (
        launch(model, None, kv_cache_memory_bytes=kv_bytes) as plain,
        launch(model, cache) as ours,
    ):
        texts = _any_tokens(plan.seed)
        rows = [_compare(plan, texts, load, TokenClient(plain), TokenClient(ours), pairs) for load in _LOADS]
        num_stored = TokenClient(ours).counter("ragcache_stored_bytes_total")
    ratios = [throughput_ratio(row) for row in rows]
    figures = []
    for load, row, ratio in zip(_LOADS, rows, ratios, strict=True):
        d = row.to_dict()
        note = f"{load.batch} requests a batch, {_IN_FLIGHT} in flight, p50 and p99 of a batch; plain "
        note += f"{d['baseline_p50_ms']} | {d['baseline_p99_ms']} ms; by the medians of pairs {1 / row.ratio:.3f}"
        key = f"{name}_{load.name.removesuffix('-heavy')}"
        p50, p99 = float(d["rival_p50_ms"]), float(d["rival_p99_ms"])
        figures.append(Figure(key, round(ratio, 4), 1.0, p50, p99, note))
    lowest = Figure(name, round(min(ratios), 4), 1.0, note="the lower of the two")
    details = {"comparisons": [row.to_dict() for row in rows], "stored_bytes": num_stored}
    return Part("2 batches on each side", (lowest, *figures), details)


def _compare(
    plan: Plan, texts: TokenTexts, load: Load, plain: TokenClient, ours: TokenClient, pairs: int
) -> Comparison:
    times: tuple[list[float], list[float]] = ([], [])
    first = 0
    for i in range(-2, pairs):
        plan.report(f"idle throughput: {load.name}, pair {i + 1} of {pairs}")
        requests = unique_requests(texts, load, first + 1_000_000 * _LOADS.index(load), load.batch)
        first += load.batch
        for side in (0, 1) if i % 2 == 0 else (1, 0):
            seconds = _time(plain if side == 0 else ours, requests, is_plain=side == 0)
            if i >= 0:
                times[side].append(seconds)
    return Comparison(load.name, tuple(times[0]), tuple(times[1]))


def _time(client: TokenClient, requests: Sequence[TokenRequest], *, is_plain: bool) -> float:
    started_s = time.perf_counter()
    client.ask_all(requests, in_flight=_IN_FLIGHT, is_plain=is_plain)
    return time.perf_counter() - started_s
