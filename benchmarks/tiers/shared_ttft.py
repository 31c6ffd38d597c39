"""Time to first token of documents that another engine has computed, from a Redis, against computing them.

Two engines with one Redis on this machine. The first computes; the second is asked by turns about what the first has
computed and about what is new. At the end the Redis is killed while a document is loaded.
"""

from __future__ import annotations

import threading
import time
from statistics import median

from benchmarks.engines import BLOCK_SIZE, TokenTexts, launch
from benchmarks.report import BenchmarkPlan, Figure, Part, percentiles_ms
from benchmarks.tiers.idle_overhead import random_texts
from benchmarks.token_client import TokenAnswer, TokenClient
from ragcache_core.bench.prompts import TokenRequest
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_core.profiles.random_model import ModelShape, random_model
from tests.support.shared_stores import redis_server

_SHAPE = ModelShape(num_kv_heads=8)
"""34 million parameters, 32 KiB of KV a token."""
_DOCUMENT_TOKENS = 1024
_STORED_WITHIN_S = 60.0
_QUIET_S = 1.0
_KILLED_AFTER_S = 0.03


def measure_shared_ttft(plan: BenchmarkPlan) -> Part:
    """Measure some documents of each kind, and what the store's death costs."""
    num_documents, num_killed = plan.sized(10, 2), plan.sized(4, 1)
    model = str(random_model(_SHAPE))
    with redis_server("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru") as server:
        cache = CacheConfig(kv_cache_bytes="256MiB", host_bytes="512MiB", block_size=BLOCK_SIZE, shared=server.url)
        with _launch(model, cache) as one, _launch(model, cache) as other:
            texts = random_texts(plan.seed, 0)  # a random model's tokenizer tells no documents apart
            requests = [_request(texts, number) for number in range(2 * (num_documents + num_killed) + 2)]
            stored, new = requests[: num_documents + num_killed + 1], requests[num_documents + num_killed + 1 :]
            plan.report(f"shared-ttft: computing {len(stored)} documents on one engine")
            computed = [TokenClient(one).ask(request) for request in stored]
            _wait_for_store(one, computed)
            client = TokenClient(other)
            rounds = [
                (_ask(client, a), _ask(client, b)) for a, b in zip(stored, new[: num_documents + 1], strict=False)
            ]
            rounds = rounds[1 : num_documents + 1]  # the first compiles and connects
            threading.Timer(_QUIET_S + _KILLED_AFTER_S, server.process.kill).start()
            after = [_ask(client, request) for request in stored[num_documents + 1 :]]
            failures = other.stats().num_shared_failures
    loaded, fresh = [a for a, _ in rounds], [b for _, b in rounds]
    mismatches = sum(a.token_ids != b.token_ids for a, b in zip([*loaded, *after], computed[1:], strict=True))
    p50, p99 = percentiles_ms([_ttft_s(a) for a in loaded])
    computing_s = median(map(_ttft_s, fresh))
    share = sum(a.tokens_by_tier["shared"] for a in loaded) / sum(a.num_prompt_tokens for a in loaded)
    ratio = round(median(_ttft_s(a) / _ttft_s(b) for a, b in rounds), 3)
    slowest_s = max(map(_ttft_s, after))
    note = f"{len(rounds)} documents of {_DOCUMENT_TOKENS} tokens, {share:.0%} of the tokens from the store"
    return Part(
        "a document of each kind",
        (
            Figure("shared_ttft_ms", p50, round(computing_s * 1000, 2), p50, p99, note),
            Figure("shared_ttft_ratio", ratio, 1.0, note="against computing, by documents"),
            Figure("shared_mismatches", mismatches),
            Figure("shared_dead_excess_s", round(slowest_s - max(map(_ttft_s, fresh)), 3), note=f"{failures} failures"),
        ),
        {
            "loaded_s": [_ttft_s(a) for a in loaded],
            "new_s": [_ttft_s(b) for b in fresh],
            "dead_s": [*map(_ttft_s, after)],
        },
    )


def _launch(model: str, cache: CacheConfig) -> Engine:
    return launch(model, cache, max_model_len=2048)


def _request(texts: TokenTexts, number: int) -> TokenRequest:
    return texts.request([(number, _DOCUMENT_TOKENS)], "Who founded it?", max_tokens=4)


def _wait_for_store(engine: Engine, computed: list[TokenAnswer]) -> None:
    """Wait until the store has every whole block of what was computed.

    Raises:
        RuntimeError: it has not in a minute.
    """
    num_blocks = len(computed) * (_DOCUMENT_TOKENS // BLOCK_SIZE - 1)
    ends_s = time.monotonic() + _STORED_WITHIN_S
    while (num_stored := {tier.name: tier.num_blocks for tier in engine.stats().tiers}["shared"]) < num_blocks:
        if time.monotonic() > ends_s:
            raise RuntimeError(f"the store has {num_stored} of {num_blocks} blocks after {_STORED_WITHIN_S:g} s")
        time.sleep(0.1)  # a poll: another process makes it true


def _ask(client: TokenClient, request: TokenRequest) -> TokenAnswer:
    time.sleep(_QUIET_S)  # vLLM's worker spins for a while after its last step
    return client.ask(request)


def _ttft_s(answer: TokenAnswer) -> float:
    assert answer.ttft_s is not None
    return answer.ttft_s
