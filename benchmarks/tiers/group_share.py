"""What share of prompt tokens the GPU tier serves of models with windows and states, at equal bytes: ours, and vLLM's.

vLLM's own cache manager hands out blocks as for a model that is served, without the model: which tokens are cached
depends on nothing else. Requests and memory are those of ``hit_share.py``; first come is first served on both sides.
"""

from __future__ import annotations

import random
from collections import deque
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from benchmarks.report import BenchmarkPlan, Figure, Part
from benchmarks.tiers.hit_share import WORKLOAD
from ragcache_core.policy import PrefillCostModel
from ragcache_core.sim.traces.workload import document_tokens, draw_retrievals
from ragcache_core.types import PromptSegment, SegmentKind, Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController, TierReport
from ragcache_core.vllm_plugin.compat import BlockPool, building_pools
from ragcache_core.vllm_plugin.group_specs import read_groups
from ragcache_core.vllm_plugin.scheduler.block_pool import TreeBlockPool
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import RequestMetadata

_BLOCK = 16
_MAX_SEQS = 8
_TOKENS_PER_STEP = 512
_QUESTION, _ANSWER = 20, 16


def _full() -> KVCacheSpec:
    return FullAttentionSpec(block_size=_BLOCK, num_kv_heads=8, head_size=64, dtype=torch.bfloat16)


def _window(num_tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=_BLOCK, num_kv_heads=8, head_size=64, dtype=torch.bfloat16, sliding_window=num_tokens
    )


MODELS = {
    "full attention": (_full(),),
    "gpt-oss": (_window(128), _full()),
    "Gemma 3": (*(_window(1024) for _ in range(5)), _full()),
}
"""Groups of layers of the same bytes, as vLLM makes them."""


class _Engine:
    """Requests on vLLM's cache manager, ``_MAX_SEQS`` at a time."""

    def __init__(self, specs: tuple[KVCacheSpec, ...], num_blocks: int, *, is_ragcache: bool) -> None:
        config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec([f"{i}"], spec) for i, spec in enumerate(specs)])
        with building_pools(TreeBlockPool if is_ragcache else BlockPool):
            self.manager = KVCacheManager(
                config,
                max_model_len=2048,
                scheduler_block_size=_BLOCK,
                hash_block_size=_BLOCK,
                max_in_flight_tokens=_TOKENS_PER_STEP,
            )
        self.hasher = get_request_block_hasher(_BLOCK, sha256)
        vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(decode_context_parallel_size=1), speculative_config=None
        )
        groups = read_groups(config, vllm_config, _BLOCK)
        self.controller: CacheController | None = None
        if is_ragcache:
            self.controller = CacheController(
                PluginSettings(),
                tokens_per_block=_BLOCK,
                prefill_cost=PrefillCostModel.default(),
                tiers={Tier.GPU: TierReport(num_blocks, 1)},
                groups=groups,
            )
            pool = self.manager.block_pool
            assert isinstance(pool, TreeBlockPool)
            self.queue = pool.follow(self.controller)

    def run(self, prompts: list[tuple[list[int], list[PromptSegment]]], count_from: int) -> float:
        """Serve all requests; return the cached share of the prompts from ``count_from`` on."""
        waiting: deque[tuple[int, Any]] = deque(enumerate(prompts))
        running: list[Request] = []
        num_hits = num_tokens = 0
        while waiting or running:
            budget = _TOKENS_PER_STEP
            self.manager.new_step_starts()
            for request in running:
                num_new = min(request.num_tokens - request.num_computed_tokens, budget)
                while request in running and self.manager.allocate_slots(request, num_new) is None:
                    preempted = running.pop()
                    self._free(preempted)
                    waiting.appendleft((-1, preempted))
                if request in running:
                    budget -= num_new
                    request.num_computed_tokens += num_new
            while waiting and len(running) < _MAX_SEQS and budget:
                number, what = waiting[0]
                request = what if isinstance(what, Request) else self._new(number, *what)
                waiting[0] = (number, request)
                blocks, num_cached, _ = self.manager.get_computed_blocks(request)
                num_new = min(request.num_tokens - num_cached, budget)
                fits = self.manager.allocate_slots(request, num_new, num_cached, blocks, full_sequence_must_fit=True)
                if fits is None:
                    break
                waiting.popleft()
                if self.controller is not None:
                    self.controller.on_looked_up(request.request_id, num_cached)
                    self.controller.on_admitted(request.request_id, request.block_hashes, {}, 0.0)
                if number >= count_from:
                    num_hits, num_tokens = num_hits + num_cached, num_tokens + request.num_prompt_tokens
                request.num_computed_tokens = num_cached + num_new
                budget -= num_new
                running.append(request)
            if self.controller is not None:
                self.queue.place_returned()
            for request in list(running):
                if request.num_computed_tokens == request.num_tokens:
                    request.append_output_token_ids(3)
                if request.num_output_tokens == _ANSWER:
                    running.remove(request)
                    self._free(request)
                    if self.controller is not None:
                        self.controller.on_finished(request.request_id)
        return num_hits / num_tokens

    def _new(self, number: int, tokens: list[int], segments: list[PromptSegment]) -> Request:
        request = Request(f"r{number}", tokens, SamplingParams(max_tokens=64), None, block_hasher=self.hasher)
        if self.controller is not None:
            metadata = RequestMetadata(tuple(segments))
            self.controller.on_new_request(request.request_id, metadata, request.block_hashes, len(tokens), 0.0)
        return request

    def _free(self, request: Request) -> None:
        self.manager.free(request)
        request.num_computed_tokens = 0


def _prompts(seed: int, count: int) -> list[tuple[list[int], list[PromptSegment]]]:
    lengths = document_tokens(WORKLOAD, seed).tolist()
    rng = random.Random(seed)
    documents = [[rng.randrange(1000) for _ in range(length)] for length in lengths]
    prompts = []
    for retrieved in draw_retrievals(WORKLOAD, count, seed).docs.tolist():
        tokens, segments = [1] * _BLOCK, [PromptSegment(SegmentKind.PREFIX, 0, _BLOCK)]
        for document in retrieved:
            segments.append(
                PromptSegment(SegmentKind.DOCUMENT, len(tokens), len(tokens) + lengths[document], f"d{document}")
            )
            tokens += documents[document]
        segments.append(PromptSegment(SegmentKind.QUESTION, len(tokens), len(tokens) + _QUESTION))
        prompts.append((tokens + [rng.randrange(1000) for _ in range(_QUESTION)], segments))
    return prompts


def measure_share_by_groups(plan: BenchmarkPlan) -> Part:
    """Compare the default policy with vLLM's own order, model by model and seed by seed."""
    init_none_hash(sha256)
    count = plan.sized(2000, 60)
    seeds = range(plan.seed, plan.seed + plan.sized(3, 1))
    figures, details = [], {}
    for model, specs in MODELS.items():
        shares: dict[bool, list[float]] = {True: [], False: []}
        for seed in seeds:
            plan.report(f"cached share by groups: {model}, seed {seed}")
            num_blocks = int(document_tokens(WORKLOAD, seed).sum()) // _BLOCK // 5 * len(specs)
            for is_ragcache, measured in shares.items():
                engine = _Engine(specs, num_blocks, is_ragcache=is_ragcache)
                measured.append(engine.run(_prompts(seed, 2 * count), count))
        ours, stock = fmean(shares[True]), fmean(shares[False])
        spread = ", ".join(f"{a / b:.2f}" for a, b in zip(shares[True], shares[False], strict=True))
        name = model.lower().replace(" ", "_").replace("-", "_")
        note = f"{model}: {ours:.3f} of prompt tokens, vLLM's order {stock:.3f}; seeds {spread}"
        figures.append(Figure(f"cached_share_ratio_{name}", round(ours / stock, 4), 1.0, note=note))
        details[model] = {"ours": shares[True], "stock": shares[False]}
    return Part(f"{count} requests before as many that count", tuple(figures), details)
