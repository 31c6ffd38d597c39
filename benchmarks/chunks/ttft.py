"""Time to first token with chunk reuse beside prefix caching, on a real CPU engine with a model of 30 million weights.

Both engines are there at once and are asked in turn, so that whatever else the machine does slows down both. Of every
reused document 30 % of the tokens are recomputed, unless it follows the same documents as when it was
captured: a flat budget, as Cache-Craft §5.3 has it.

A service that runs for long has read what is popular. Instead of all of its history, both engines first read, five at a
time, those documents of the last ``HISTORY`` requests that will come again, and then the last requests as they were::

    requests   | history: what comes again is read | as they were | timed |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from benchmarks.engines import BLOCK_SIZE, cached_share, launch
from benchmarks.report import BenchmarkPlan, Figure, Part, percentiles_ms
from benchmarks.token_client import TokenAnswer, TokenClient
from ragcache_core.bench.prompts import TracedPrompts, scaled
from ragcache_core.config import CacheConfig, ChunkReuse
from ragcache_core.profiles.model_facts import ModelFacts
from ragcache_core.profiles.random_model import random_model
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

SCALE = 0.25
"""Lengths of the workload times this: prompts of 900 tokens on average, at most 5,000."""
RECOMPUTED = 0.3
HISTORY = 1_000
"""Requests before those that are sent; their documents are known."""
_FLAT_ALPHA = 1e6
"""So large that the CFO of whatever changed is 1, and ``max_recompute`` decides."""
REUSE = ChunkReuse(selection="cache_craft", alpha=_FLAT_ALPHA, max_recompute=RECOMPUTED, share=0.9)
_GROUP = 5
_KV_BYTES, HOST_BYTES = 1 << 30, 3 << 30
_WINDOW = 6144


@dataclass(frozen=True, slots=True)
class TtftLoad:
    """A model, its memory, and the requests to time; by default those of the benchmark model.

    Args:
        model: the model's folder; by default the benchmark model.
        scale: what the workload's lengths are multiplied by.
        num_history: requests before those that are sent.
        num_requests: requests that are sent as they were, and as many that are timed; by default the plan's.
        max_model_len: the context window in tokens.
        launch_args: further arguments of ``Engine.launch``.
    """

    model: str | None = None
    dtype: str = "float32"
    scale: float = SCALE
    num_history: int = HISTORY
    num_requests: int | None = None
    kv_bytes: int = _KV_BYTES
    host_bytes: int = HOST_BYTES
    max_model_len: int = _WINDOW
    launch_args: Mapping[str, Any] = field(default_factory=dict)


def measure_ttft(plan: BenchmarkPlan, load: TtftLoad = TtftLoad()) -> Part:
    """Ask both engines for the same requests of the ``sysx`` workload, one at a time, in turn."""
    num_recent = num_timed = load.num_requests or plan.sized(60, 12)
    model, num_history = load.model or str(random_model()), load.num_history
    drawn = scaled(make_trace(WORKLOADS["sysx"], num_history + num_recent + num_timed, plan.seed), load.scale)
    trace = condensed(drawn, num_history)
    num_warm_up = len(trace) - num_timed
    vocab_size = ModelFacts.read(model, load.dtype).vocab_size
    prompts = TracedPrompts(trace, vocab_size, seed=plan.seed, num_output_tokens=1)
    cache = CacheConfig(
        kv_cache_bytes=load.kv_bytes, host_bytes=load.host_bytes, block_size=BLOCK_SIZE, chunk_reuse=REUSE
    )
    arguments = {"dtype": load.dtype, "max_model_len": load.max_model_len, **load.launch_args}
    plan.report("ttft: starting both engines")
    with (
        launch(model, None, kv_cache_memory_bytes=load.kv_bytes, **arguments) as plain,
        launch(model, cache, **arguments) as chunks,
    ):
        clients = TokenClient(plain), TokenClient(chunks)
        pairs = []
        for number in range(len(trace)):
            plan.report(f"ttft: request {number + 1} of {len(trace)}")
            pairs.append(_ask_both(clients, prompts, number))
        pairs = pairs[num_warm_up:]
        counted = chunks.stats().chunks
    prefix_s, chunk_s = ([answer.total_s for answer in side] for side in zip(*pairs, strict=True))
    p50, p99 = percentiles_ms(chunk_s)
    ratio = fmean(prefix_s) / fmean(chunk_s)
    by_pair = median(a / b for a, b in zip(prefix_s, chunk_s, strict=True))
    note = f"means of {num_timed}; median request by request {by_pair:.2f}"
    num_tokens = fmean(sum(request.doc_tokens) for request in drawn)
    figures = (
        Figure("ttft_ratio", round(ratio, 3), 1.0, p50, p99, note),
        Figure("ttft_chunks_ms", round(1000 * fmean(chunk_s), 1), round(1000 * fmean(prefix_s), 1), p50, p99),
        Figure("ttft_prompt_tokens", round(num_tokens, 1), note=f"mean of the documents, scale {load.scale:g}"),
        Figure(
            "ttft_prefix_cached",
            round(cached_share([plain for plain, _ in pairs]), 4),
            note="share of prompt tokens in the prefix cache",
        ),
    )
    details = {
        "prefix_s": prefix_s,
        "chunks_s": chunk_s,
        "counted": None if counted is None else {name: getattr(counted, name) for name in counted.__slots__},
    }
    warm_up = f"{num_warm_up} requests: documents of {num_history} earlier ones that return, and the last {num_recent}"
    return Part(warm_up, figures, details)


def condensed(trace: Trace, num_history: int) -> Trace:
    """Return the trace with its first ``num_history`` requests condensed: what comes again of them, in the same order.

    Every document of theirs that a later request retrieves is there once, five of them a request.
    """
    requests = list(trace)
    later = requests[num_history:]
    coming = {doc_id for request in later for doc_id in request.doc_ids}
    last_seen: dict[str, int] = {}
    for request in requests[:num_history]:
        for doc_id, tokens in zip(request.doc_ids, request.doc_tokens, strict=True):
            if doc_id in coming:
                last_seen.pop(doc_id, None)
                last_seen[doc_id] = tokens
    read = list(last_seen.items())
    groups = [read[start : start + _GROUP] for start in range(0, len(read), _GROUP)]
    history = [
        TracedRequest(0.0, tuple(doc_id for doc_id, _ in group), tuple(tokens for _, tokens in group), 1, 1)
        for group in groups
    ]
    return Trace.from_requests([*history, *later])


def _ask_both(
    clients: tuple[TokenClient, TokenClient], prompts: TracedPrompts, number: int
) -> tuple[TokenAnswer, TokenAnswer]:
    """Return both answers of one token; who is asked first alternates."""
    request = prompts.request(number)
    if number % 2:
        second = clients[1].ask(request)
        return clients[0].ask(request, is_plain=True), second
    return clients[0].ask(request, is_plain=True), clients[1].ask(request)
