"""Time to first token of prompts that are in the host tier alone, against computing prompts of the same length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.device.sizes import DeviceModel, PartTime, model_8b
from benchmarks.engines import BLOCK_SIZE, TokenTexts, block_bytes, launch
from benchmarks.report import BenchmarkPlan, Figure, Part, percentiles_ms
from benchmarks.tiers.idle_overhead import random_texts
from benchmarks.token_client import TokenAnswer, TokenClient
from ragcache_core.bench.prompts import TokenRequest
from ragcache_core.client import Engine
from ragcache_core.client.launch.settings import VLLMOffload
from ragcache_core.config import CacheConfig

_SIDES = ("layerwise", "asynchronous", "vllm_offload")
"""RAGCache with layer-wise loads and without, and vLLM's own offloading."""
_LENGTHS = (1024, 2048, 4096, 8192, 16384)
_NUM_ROUNDS = 5
_NUM_FILLERS = 3
# Tokens of a prompt besides its document, rounded up to blocks.
_REST = 2 * BLOCK_SIZE
_MIN_HIT_SHARE = 0.9


@dataclass(slots=True)
class _Times:
    """Seconds to the first token of prompts of one length, and the cached share of those that are hits."""

    new_s: list[float] = field(default_factory=list)
    hit_s: list[float] = field(default_factory=list)
    hit_shares: list[float] = field(default_factory=list)


def measure_host_hits(plan: BenchmarkPlan) -> Part:
    """Ask for new prompts of each length, evict them from the GPU by long ones, and ask for them again."""
    model = model_8b(plan)
    lengths = [length // 16 if model.is_small else length for length in _LENGTHS]
    figures: list[Figure] = []
    details: dict[str, object] = {}
    for side in _SIDES:
        plan.report(f"host-hits: starting {side}")
        clock = PartTime(1 / len(_SIDES))
        with _launch(side, model, lengths) as engine:
            times = _measure(plan, clock, side, TokenClient(engine), lengths)
        figures += [_figure(side, length, times[length]) for length in lengths]
        details[side] = {length: {"new_s": each.new_s, "hit_s": each.hit_s} for length, each in times.items()}
    return Part("a prompt of each length", tuple(figures), details)


def _launch(side: str, model: DeviceModel, lengths: Sequence[int]) -> Engine:
    token_bytes = block_bytes(model.path, model.dtype) // BLOCK_SIZE
    gpu_tokens = sum(length + _REST for length in lengths)
    fillers = _NUM_FILLERS * (lengths[-1] + _REST)
    host_bytes = token_bytes * ((2 + _NUM_ROUNDS) * gpu_tokens + fillers)
    kv_bytes = token_bytes * gpu_tokens
    arguments = {"dtype": model.dtype, "max_model_len": lengths[-1] + _REST, "max_num_batched_tokens": 8192}
    arguments |= model.launch_args
    if side == "vllm_offload":
        return launch(model.path, VLLMOffload(host_bytes), kv_cache_memory_bytes=kv_bytes, **arguments)
    cache = CacheConfig(
        kv_cache_bytes=kv_bytes, host_bytes=host_bytes, block_size=BLOCK_SIZE, layerwise_loads=side == "layerwise"
    )
    return launch(model.path, cache, **arguments)


def _measure(
    plan: BenchmarkPlan, clock: PartTime, side: str, client: TokenClient, lengths: Sequence[int]
) -> dict[int, _Times]:
    texts, is_plain = random_texts(plan.seed, 0), side == "vllm_offload"
    fillers = [_request(texts, 1_000 + i, lengths[-1]) for i in range(_NUM_FILLERS)]
    times = {length: _Times() for length in lengths}
    for number in clock.rounds(plan.sized(_NUM_ROUNDS, 1)):
        plan.report(f"host-hits: {side}, round {number}")
        prompts = [_request(texts, 10 * number + i, length) for i, length in enumerate(lengths)]
        new = [client.ask(prompt, is_plain=is_plain) for prompt in prompts]
        for filler in fillers:
            client.ask(filler, is_plain=is_plain)
        hits = [client.ask(prompt, is_plain=is_plain) for prompt in prompts]
        if number:
            for each, computed, hit in zip(times.values(), new, hits, strict=True):
                each.new_s.append(computed.total_s)
                each.hit_s.append(hit.total_s)
                each.hit_shares.append(_host_share(hit, is_plain))
    return times


def _host_share(answer: TokenAnswer, is_plain: bool) -> float:
    """Return the share of a prompt's whole blocks that were cached: plain vLLM does not say in which tier."""
    num_tokens = answer.num_cached_tokens if is_plain else answer.tokens_by_tier["host"]
    return num_tokens / (answer.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE)


def _request(texts: TokenTexts, number: int, num_tokens: int) -> TokenRequest:
    return texts.request([(number, num_tokens)], "What is it?", max_tokens=1)


def _figure(side: str, length: int, times: _Times) -> Figure:
    new_ms, hit_ms = (1e3 * median(each) for each in (times.new_s, times.hit_s))
    share = min(times.hit_shares)
    note = f"recompute over hit {new_ms / hit_ms:.2f}, median of {len(times.hit_s)}, at least {share:.0%} cached"
    if share < _MIN_HIT_SHARE:
        note += ": NOT A HOST HIT"
    return Figure(
        f"{side}_host_hit_ttft_ms_{length}", round(hit_ms, 2), round(new_ms, 2), *percentiles_ms(times.hit_s), note
    )
