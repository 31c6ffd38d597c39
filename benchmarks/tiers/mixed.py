"""Exactness of mixed requests: tenants, encryption, compression, hints, a batch, aborts, kills, forgets, chunks."""

from __future__ import annotations

import base64
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmarks.engines import BLOCK_SIZE, block_bytes, kill_engine_core, launch
from benchmarks.report import BenchmarkPlan, Figure, Part
from benchmarks.tiers.exactness import NUM_DOCUMENTS, mismatches, plain_answers
from benchmarks.token_client import TokenAnswer, TokenClient
from ragcache_core.batch_order import order_requests
from ragcache_core.bench.prompts import TokenRequest
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig, ChunkReuse
from ragcache_core.errors import EngineError
from ragcache_core.wire import KEY

_IN_FLIGHT = 14
_GPU_BLOCKS, _HOST_BLOCKS, _DISK_BLOCKS = 72, 120, 500
_HINTS: dict[int, dict[str, object]] = {
    1: {"retain_s": 5, "priority": 2},
    4: {"ttl_s": 1},
    7: {"demote": True},
    8: {"prefetch": [f"document-{number}" for number in range(4)]},
}
"""What a request says of its KV, by its number modulo 9."""
_TENANT_KEYS = ("first-tenant-key-0", "second-tenant-key-1")
_TENANTS = "\n".join(
    f'[[tenants]]\nname = "tenant-{number}"\nkeys = ["{key}"]\nweight = {number + 1}'
    for number, key in enumerate(_TENANT_KEYS)
)


def measure_mixed(plan: BenchmarkPlan) -> Part:
    """Answer 2,000 requests with plain vLLM, then with tiny tiers and everything that may happen to them, and compare.

    A seventh of the requests reuses chunks, which is approximate: their answers are not compared. They use the same
    documents and the same memory as the others, whose answers must stay exact. A twelfth is aborted after the first
    token. Document KV is forgotten, pinned and prefetched between answers. The engine's core is killed twice, and the
    engine is started three times; the last third is sent in the order of an offline batch.
    """
    requests, expected = plain_answers(plan, plan.sized(2000, 40), enable_prefix_caching=False)
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder:
        run = _MixedRun(plan, _config(plan.model, Path(folder)))
        third = len(requests) // 3
        answers = run.answer(requests[:third], first=0, is_killed=True)
        answers += run.answer(requests[third : 2 * third], first=third, is_killed=True)
        answers += run.answer(requests[2 * third :], first=2 * third, is_killed=False, is_batch=True)
    counts = run.counts
    compared = [i for i, answer in enumerate(answers) if answer is not None]
    found = [answer for answer in answers if answer is not None]
    differing = [compared[i] for i in mismatches(found, [expected[i] for i in compared])]
    figures = (
        Figure("mixed_requests", len(requests), note=f"{_IN_FLIGHT} in flight, float32, greedy, three keys"),
        Figure("mixed_compared", len(compared), note="all but aborted requests and those that reuse chunks"),
        Figure("mixed_mismatches", len(differing), 0, note="answers that differ from plain vLLM's in any token"),
        *(Figure(f"mixed_{name}", counts[name]) for name in sorted(counts)),
    )
    return Part("none: the first request counts", figures, {"counts": dict(counts), "differing": differing[:50]})


def _config(model: str, folder: Path) -> CacheConfig:
    tenants, key = folder / "tenants.toml", folder / "disk.key"
    for path, content in ((tenants, _TENANTS), (key, base64.b64encode(os.urandom(32)).decode())):
        path.touch(mode=0o600)
        path.write_text(content, encoding="utf-8")
    size = block_bytes(model)
    return CacheConfig(
        kv_cache_bytes=_GPU_BLOCKS * size,
        block_size=BLOCK_SIZE,
        host_bytes=_HOST_BLOCKS * size,
        disk_bytes=_DISK_BLOCKS * size,
        directory=folder / "kv",
        disk_key_file=key,
        compression="lz4",
        tenants=tenants,
        layerwise_loads=True,
        chunk_reuse=ChunkReuse(is_default=False, share=0.3),
    )


class _MixedRun:
    """Sends requests to engines over the same directory, and disturbs them; the same disturbances for the same seed."""

    def __init__(self, plan: BenchmarkPlan, cache: CacheConfig) -> None:
        self.counts: Counter[str] = Counter()
        self._plan = plan
        self._cache = cache
        self._counting = threading.Lock()

    def answer(
        self, requests: Sequence[TokenRequest], *, first: int, is_killed: bool, is_batch: bool = False
    ) -> list[TokenAnswer | None]:
        """Return the answers of one engine; ``None`` for an aborted request, and for one that reuses chunks.

        Args:
            requests: what is sent; at most 14 at a time.
            first: the number of the first request, which decides what kind each is.
            is_killed: kill the engine's core after half of the answers.
            is_batch: send them in the order of an offline batch.
        """
        order = list(range(len(requests)))
        if is_batch:
            order = order_requests([("tokens", request.token_ids) for request in requests])
            self.counts["batched"] = len(order)
        self._plan.report(f"mixed: starting the engine for requests {first} to {first + len(requests) - 1}")
        with (
            launch(self._plan.model, self._cache, max_model_len=1024, max_num_batched_tokens=128) as engine,
            ThreadPoolExecutor(_IN_FLIGHT) as pool,
        ):
            clients = [TokenClient(engine, api_key=key) for key in (None, *_TENANT_KEYS)]
            num_answered = 0

            def send(number: int, request: TokenRequest) -> TokenAnswer | None:
                nonlocal num_answered
                answer = self._send(clients[number % len(clients)], number, request)
                with self._counting:
                    num_answered += 1
                    count = num_answered
                self._disturb(engine, count, is_killed and count == len(requests) // 2)
                return answer

            sent = {i: pool.submit(send, first + i, requests[i]) for i in order}
            answers = [sent[i].result() for i in range(len(requests))]
            self._read_counters(engine)
            self.counts["restarts"] += engine.num_restarts()
        return answers

    def _send(self, client: TokenClient, number: int, request: TokenRequest) -> TokenAnswer | None:
        if number % 12 == 5:
            client.abort(request)
            self._count("aborted")
            return None
        metadata = (request.params or {}).get(KEY)
        if number % 7 == 2 and isinstance(metadata, dict):
            reusing = replace(request, params={KEY: {**metadata, "chunk_reuse": True}})
            self._count("chunk_tokens", client.ask(reusing).num_chunk_tokens)
            self._count("chunk_requests")
            return None
        if isinstance(metadata, dict) and (hints := _HINTS.get(number % 9)) is not None:
            request = replace(request, params={KEY: {**metadata, **hints}})
            self._count("hinted")
        answer = client.ask(request)
        for tier, num_tokens in answer.tokens_by_tier.items():
            self._count(f"tokens_{tier}", num_tokens)
        return answer

    def _disturb(self, engine: Engine, count: int, is_killed: bool) -> None:
        """Kill the core, or forget, pin or prefetch documents, as the number of answers decides."""
        if is_killed:
            self._plan.report("mixed: killing the engine's core")
            self._read_counters(engine)
            kill_engine_core(engine)
            return
        rng = random.Random(f"{self._plan.seed} {count}")
        doc_ids = [f"document-{number}" for number in rng.sample(range(NUM_DOCUMENTS), 3)]
        cache = engine.cache
        actions: list[tuple[int, str, Callable[[list[str]], object]]] = [
            (11, "forgets", engine.forget),
            (17, "prefetches", cache.prefetch),
            (23, "pins", cache.pin),
            (37, "unpins", cache.unpin),
        ]
        for _, name, action in (action for action in actions if count % action[0] == 0):
            try:
                action(doc_ids)
            except EngineError:  # the engine restarts after the kill
                self._count("refused_actions")
            else:
                self._count(name)

    def _read_counters(self, engine: Engine) -> None:
        """Add what the engine has counted since its last start."""
        stats = engine.stats()
        self._count("preemptions", stats.num_preemptions)
        for tier in stats.tiers:
            self._count(f"evicted_{tier.name}", tier.num_evicted_blocks)

    def _count(self, name: str, number: int = 1) -> None:
        with self._counting:
            self.counts[name] += number
