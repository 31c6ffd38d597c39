"""Throughput of many short requests at once: RAGCache and vLLM's own offloading against plain vLLM, by turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median

from benchmarks.device.sizes import DeviceModel, PartTime, model_30m
from benchmarks.engines import BLOCK_SIZE, ONE_CORE, block_bytes, launch
from benchmarks.report import BenchmarkPlan, Figure, Part, percentiles_ms
from benchmarks.tiers.idle_overhead import IdleLoad, random_texts, unique_requests
from benchmarks.token_client import TokenClient
from ragcache_core.client import Engine
from ragcache_core.client.launch.settings import VLLMOffload
from ragcache_core.config import CacheConfig

_SIDES = ("vllm", "vllm_offload", "ragcache")
_BATCHES = (32, 256)
_DOCUMENT_TOKENS = 120
_NUM_ROUNDS = 7
_HOST_BYTES = 4 << 30


def measure_steps(plan: BenchmarkPlan) -> Part:
    """Answer 32 and 256 requests at once on three engines; a batch's time is that of its last answer.

    Documents never return: what differs from plain vLLM is the cost of a step.
    """
    clock, model = PartTime(), model_30m(plan)
    most, max_tokens = plan.sized(max(_BATCHES), 8), plan.sized(256, 8)
    figures: list[Figure] = []
    details: dict[str, object] = {}
    with ExitStack() as running:
        clients = {}
        for side in _SIDES:
            plan.report(f"steps: starting {side}")
            clients[side] = TokenClient(running.enter_context(_launch(plan, side, model, most, max_tokens)))
        for name in _BATCHES:
            batch = plan.sized(name, name * most // max(_BATCHES))
            load = IdleLoad("steps", _DOCUMENT_TOKENS, max_tokens, batch)
            times_s = _time_batches(plan, clock, clients, load)
            figures += _figures(name, batch, times_s)
            details[f"batches_s_{name}"] = times_s
    return Part("1 batch of each size on each engine", tuple(figures), details)


def _launch(plan: BenchmarkPlan, side: str, model: DeviceModel, most: int, max_tokens: int) -> Engine:
    blocks = -(-(2 * _DOCUMENT_TOKENS + max_tokens) // BLOCK_SIZE) + 2
    kv_bytes = most * blocks * block_bytes(model.path, model.dtype)
    host_bytes = plan.sized(_HOST_BYTES, 2 * kv_bytes)
    arguments = {"dtype": model.dtype, "max_num_seqs": most, "env": ONE_CORE, **model.launch_args}
    if side == "ragcache":
        own = CacheConfig(kv_cache_bytes=kv_bytes, host_bytes=host_bytes, block_size=BLOCK_SIZE)
        return launch(model.path, own, **arguments)
    cache = VLLMOffload(host_bytes) if side == "vllm_offload" else None
    return launch(model.path, cache, kv_cache_memory_bytes=kv_bytes, **arguments)


def _time_batches(
    plan: BenchmarkPlan, clock: PartTime, clients: Mapping[str, TokenClient], load: IdleLoad
) -> Mapping[str, Sequence[float]]:
    """Return the seconds of each batch by engine; those of one number ran one after the other."""
    texts = random_texts(plan.seed, load.batch)
    times_s: dict[str, list[float]] = {side: [] for side in clients}
    for number in clock.rounds(plan.sized(_NUM_ROUNDS, 1)):
        plan.report(f"steps: {load.batch} requests, round {number}")
        requests = unique_requests(texts, load, number * load.batch, load.batch)
        for side in _SIDES if number % 2 else reversed(_SIDES):
            answers = clients[side].ask_all(requests, in_flight=load.batch, is_plain=side != "ragcache")
            if number:
                times_s[side].append(max(answer.total_s for answer in answers))
    return times_s


def _figures(name: int, batch: int, times_s: Mapping[str, Sequence[float]]) -> list[Figure]:
    figures = []
    for side in _SIDES[1:]:
        ratios = [plain / own for plain, own in zip(times_s["vllm"], times_s[side], strict=True)]
        note = f"median of {len(ratios)} batches of {batch} requests, {min(ratios):.3f} to {max(ratios):.3f}"
        key = f"{'step' if side == 'ragcache' else side}_throughput_ratio_{name}"
        figures.append(Figure(key, round(median(ratios), 4), 1.0, *percentiles_ms(times_s[side]), note))
    return figures
