"""The first 500 requests after a start: of an engine that starts empty, and of one that was warmed by forecast.

What is expected is learned from 500 other requests of the same kind. Two engines are started, and asked by turns, one
request after the other: a question about two of 160 documents, the first by a Zipf law, the second one of three that
are near to it. GPU and host memory hold about a third of the documents.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from ragcache_core.client import Engine
from ragcache_core.client.generation import Generation
from ragcache_core.client.profiling import tier_sizes
from ragcache_core.config import CacheConfig
from ragcache_core.policy import PrefillCostModel
from ragcache_core.prompt import PromptLayout
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.testbeds import load_testbed
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace
from ragcache_core.sim.warming import NUM_FIRST, WarmPath, forecast, pick_paths
from ragcache_core.types import Document
from tests.benchmarks.engines import BLOCK_SIZE, ONE_CORE, block_bytes, launch
from tests.benchmarks.report import Figure, Part, Plan, percentiles_ms

_LAYOUT = PromptLayout()
_NUM_DOCUMENTS = 160
_DOCUMENT_CHARS = 600
_NUM_NEAR = 3
_GPU_BLOCKS, _HOST_BLOCKS = 160, 256
_MAX_SEQS = 2

_Asked = list[tuple[int, int]]


def measure_warming(plan: Plan) -> Part:
    """Measure a cold start beside a warmed one."""
    cold, warmed, note = _side_by_side(plan, "cold", "warmed")
    figures = (
        _ttft("warm_ttft_ms", warmed, cold, f"first {len(cold)} requests; {note}"),
        _ttft("warm_ttft_ms_first_100", warmed[:100], cold[:100], "of these the first 100"),
        Figure("warm_ttft_ratio", round(_mean_s(warmed) / _mean_s(cold), 3), 1.0, note="mean, against the cold start"),
        Figure("warm_cached_share", _cached_share(warmed), _cached_share(cold), note="of the prompts' tokens"),
        Figure("warm_mismatches", sum(a.text != b.text for a, b in zip(cold, warmed, strict=True))),
    )
    return Part("none: that is what is measured", figures)


def measure_seeds(plan: Plan) -> Part:
    """Measure a warmed start beside one whose prefills do not say how often they are expected."""
    unseeded, warmed, note = _side_by_side(plan, "unseeded", "warmed")
    figures = (
        _ttft("seeded_ttft_ms", warmed, unseeded, f"first {len(warmed)} requests; {note}"),
        Figure("seeded_cached_share", _cached_share(warmed), _cached_share(unseeded), note="of the prompts' tokens"),
    )
    return Part("none: that is what is measured", figures)


def measure_forecast(plan: Plan) -> Part:
    """Simulate the first 500 requests after a start, warmed by the 3,000 before; no engine is needed."""
    figures = []
    options = SimulationOptions(max_batch=8)
    cost = load_testbed(options.cost_model).cost
    for name in ("mmlu", "nq-small", "drift"):
        plan.report(f"warm-forecast: {name}")
        num_learned = plan.sized(3_000, 60)
        requests = list(make_trace(WORKLOADS[name], num_learned + NUM_FIRST, seed=plan.seed))
        learned, asked = Trace.from_requests(requests[:num_learned]), requests[num_learned:]
        first = Trace.from_requests(replace(each, arrival_s=each.arrival_s - asked[0].arrival_s) for each in asked)
        paths = pick_paths(learned, max(options.gpu_tokens, options.host_tokens), cost)
        told = forecast(first, options, paths)
        unseeded = forecast(first, options, [replace(path, expected_uses=1) for path in paths])
        key = f"forecast_{name.replace('-', '_')}"
        share, cold_share = round(told.warm.cached_share, 3), round(told.cold.cached_share, 3)
        note = f"{len(paths)} paths; {unseeded.warm.cached_share:.3f} with one expected use each"
        ttft_ms, cold_ms = (round(1000 * start.mean_ttft_s, 1) for start in (told.warm, told.cold))
        figures += [
            Figure(f"{key}_cached_share", share, cold_share, note=note),
            Figure(f"{key}_ttft_ms", ttft_ms, cold_ms),
        ]
    return Part("none", tuple(figures))


def _side_by_side(plan: Plan, *starts: str) -> tuple[list[Generation], list[Generation], str]:
    """Return the answers of two engines that start so to the same requests, asked by turns, and what was warmed."""
    documents = _documents(plan.corpus)
    num_requests = plan.sized(500, 12)
    expected, asked = (_requests(num_requests, plan.seed + i) for i in range(2))
    block = block_bytes(plan.model)
    cache = CacheConfig(kv_cache_bytes=_GPU_BLOCKS * block, block_size=BLOCK_SIZE, host_bytes=_HOST_BLOCKS * block)
    answers: list[list[Generation]] = [[], []]
    paths: list[WarmPath] = []
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        plan.report(f"warm: starting {' and '.join(starts)}")
        starting = [pool.submit(launch, plan.model, cache, env=ONE_CORE, max_num_seqs=_MAX_SEQS) for _ in starts]
        engines = [stack.enter_context(each.result()) for each in starting]
        for engine, start in zip(engines, starts, strict=True):
            if start != "cold":
                plan.report(f"warm: warming {start}")
                paths = _warm(engine, documents, expected, is_seeded=start == "warmed")
        for number, (first, second) in enumerate(asked):
            if number % 50 == 0:
                plan.report(f"warm: {' and '.join(starts)}, request {number} of {len(asked)}")
            prompt = _LAYOUT.render(
                engines[0].tokenizer, [documents[first], documents[second]], f"What does part {number} say?"
            )
            pairs = list(zip(answers, engines, strict=True))
            for each, engine in pairs if number % 2 else reversed(pairs):  # who is second finds the first's worker spin
                each.append(engine.generate(prompt, max_tokens=2))
    return answers[0], answers[1], f"{len(paths)} paths were warmed"


def _warm(engine: Engine, documents: Sequence[Document], expected: _Asked, *, is_seeded: bool) -> list[WarmPath]:
    budget = max(tier_sizes(engine).tokens.values())
    paths = pick_paths(_trace(engine, documents, expected), budget, PrefillCostModel.default(), system_tokens=32)
    named = {document.doc_id: document for document in documents}
    engine.bind_prompt(_LAYOUT)
    engine.warm_paths(([named[i] for i in path.doc_ids], path.expected_uses if is_seeded else 0) for path in paths)
    return paths


def _documents(corpus: Path) -> list[Document]:
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(corpus.glob("*.md")))
    starts = [number * 7919 % (len(text) - _DOCUMENT_CHARS) for number in range(_NUM_DOCUMENTS)]
    return [
        Document(f"document-{number}", f"Document {number}: {text[start : start + _DOCUMENT_CHARS]}")
        for number, start in enumerate(starts)
    ]


def _requests(num_requests: int, seed: int) -> _Asked:
    """Return the two documents of each request."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(_NUM_DOCUMENTS)]
    firsts = rng.choices(range(_NUM_DOCUMENTS), weights, k=num_requests)
    return [(first, (first + 1 + 7 * rng.randrange(_NUM_NEAR)) % _NUM_DOCUMENTS) for first in firsts]


def _trace(engine: Engine, documents: Sequence[Document], asked: _Asked) -> Trace:
    lengths = [len(engine.tokenizer.encode(_LAYOUT.document_text(document)).token_ids) for document in documents]
    return Trace.from_requests(
        TracedRequest(float(number), tuple(documents[i].doc_id for i in pair), tuple(lengths[i] for i in pair), 16, 1)
        for number, pair in enumerate(asked)
    )


def _ttft(key: str, answers: Sequence[Generation], cold: Sequence[Generation], note: str) -> Figure:
    p50, p99 = percentiles_ms([answer.stats.ttft_s or 0.0 for answer in answers])
    return Figure(key, round(_mean_s(answers) * 1000, 2), round(_mean_s(cold) * 1000, 2), p50, p99, note)


def _mean_s(answers: Sequence[Generation]) -> float:
    return fmean(answer.stats.ttft_s or 0.0 for answer in answers)


def _cached_share(answers: Sequence[Generation]) -> float:
    num_tokens = sum(answer.stats.num_prompt_tokens for answer in answers)
    return round(sum(answer.stats.num_cached_tokens for answer in answers) / num_tokens, 3)
