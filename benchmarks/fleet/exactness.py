"""Exactness: two engines over one store, killed by turns while its objects are damaged, answer as plain vLLM does."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from benchmarks.engines import BLOCK_SIZE, ONE_CORE, block_bytes, kill_engine_core, launch, side_by_side
from benchmarks.report import BenchmarkPlan, Figure, Part
from benchmarks.tiers.exactness import mismatches, plain_answers
from benchmarks.token_client import TokenAnswer, TokenClient
from ragcache_core import CacheConfig, Engine, Fleet
from ragcache_core.bench.prompts import TokenRequest
from ragcache_core.errors import EngineError
from tests.support.shared_stores import RedisServer, redis_server

_IN_FLIGHT = 8
_RESTARTED_WITHIN_S = 240.0
_GPU_BLOCKS, _HOST_BLOCKS = 72, 48


def measure_exactness(plan: BenchmarkPlan) -> Part:
    """Ask a fleet what plain vLLM was asked: every third request streamed, from two engines that are killed by turns.

    At first their cores alone are killed, then all their processes. With each answer an object in their store is
    changed, cut off, emptied, put in another's place, or deleted.
    """
    requests, expected = plain_answers(plan, plan.sized(520, 24), enable_prefix_caching=False)
    counts: Counter[str] = Counter()
    plan.report("exactness: starting two engines over one store")
    size = block_bytes(plan.model)
    with redis_server("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as server:
        cache = CacheConfig(
            kv_cache_bytes=_GPU_BLOCKS * size,
            block_size=BLOCK_SIZE,
            host_bytes=_HOST_BLOCKS * size,
            shared=server.url,
        )
        settings = {"max_model_len": 1024, "env": ONE_CORE, "max_restarts": 8}
        with (
            side_by_side(2, lambda: launch(plan.model, cache, **settings)) as engines,
            Fleet(engines, restart_timeout_s=_RESTARTED_WITHIN_S) as fleet,
        ):
            answers = _ask(plan, fleet, engines, requests, server, counts)
            for engine in engines:
                _count(engine, counts)
                counts["restarts"] += engine.num_restarts()
    differing = mismatches(answers, [_like(a, b) for a, b in zip(answers, expected, strict=True)])
    shared = sum(answer.tokens_by_tier.get("shared", 0) for answer in answers)
    told = sum(answer.num_prompt_tokens for answer in answers)
    figures = (
        Figure("exact_requests", len(answers), len(expected), note=f"{_IN_FLIGHT} in flight, float32, greedy"),
        Figure("exact_mismatches", len(differing), 0, note="answers that differ from plain vLLM's in any token"),
        Figure("exact_shared_tokens", shared, 0, note=f"of {told} prompt tokens, from the store"),
        Figure("exact_restarts", counts["restarts"], note="of engines that were killed"),
        Figure("exact_damaged", counts["damaged"], note="objects in the store"),
        Figure("exact_damage_seen", counts["seen"], note="by the engines, as told before their deaths and at the end"),
    )
    details = {"counts": dict(counts), "differing": [_shown(i, answers[i], expected[i]) for i in differing[:20]]}
    return Part("none: the first request counts", figures, details)


def _ask(
    plan: BenchmarkPlan,
    fleet: Fleet,
    engines: Sequence[Engine],
    requests: Sequence[TokenRequest],
    server: RedisServer,
    counts: Counter[str],
) -> list[TokenAnswer]:
    client, num_answered, counting = TokenClient(fleet), 0, threading.Lock()
    store, rng = server.client(), random.Random(plan.seed)
    num_kills = plan.sized(4, 2)
    kills = {len(requests) * (i + 1) // (num_kills + 1): i for i in range(num_kills)}

    def ask(number: int) -> TokenAnswer:
        nonlocal num_answered
        answer = _streamed(fleet, requests[number]) if number % 3 == 2 else client.ask(requests[number])
        with counting:
            num_answered += 1
            counts["damaged"] += _damage(store, rng)
            kill = kills.get(num_answered)
        if kill is not None:
            plan.report(f"exactness: kill {kill + 1} of {num_kills}, after {num_answered} of {len(requests)} answers")
            _kill(engines[kill % 2], counts, is_whole=kill >= num_kills // 2)
        return answer

    with ThreadPoolExecutor(_IN_FLIGHT) as threads:
        return list(threads.map(ask, range(len(requests))))


def _streamed(fleet: Fleet, request: TokenRequest) -> TokenAnswer:
    """Return the text of an answer that is streamed: what one engine began another may end."""
    body = {
        "model": fleet.model,
        "prompt": list(request.token_ids),
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **({} if request.params is None else {"kv_transfer_params": dict(request.params)}),
    }
    texts = []
    headers = {"Authorization": f"Bearer {fleet.api_key}"}
    with fleet.http_client().stream("POST", f"{fleet.base_url}/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                texts += [choice["text"] for choice in event["choices"]]
    return TokenAnswer((), 0, 0, text="".join(texts))


def _like(answer: TokenAnswer, expected: TokenAnswer) -> TokenAnswer:
    """Return what an answer should be, known as it is: by its tokens, or, streamed, by its text."""
    return answer if not answer.token_ids and answer.text == expected.text else expected


def _kill(engine: Engine, counts: Counter[str], *, is_whole: bool) -> None:
    with suppress(EngineError):  # it is being started again already
        _count(engine, counts)
    if is_whole and engine.pid is not None:
        os.killpg(os.getpgid(engine.pid), signal.SIGKILL)
    else:
        kill_engine_core(engine)


def _count(engine: Engine, counts: Counter[str]) -> None:
    stats = engine.stats()
    counts["seen"] += stats.num_corrupt_blocks
    for tier in stats.tiers:
        counts[f"hits_{tier.name}"] += tier.num_hit_tokens
        counts[f"evicted_{tier.name}"] += tier.num_evicted_blocks


def _damage(client: Any, rng: random.Random) -> bool:
    """Damage an object; return whether there was one."""
    if not (names := sorted(client.scan_iter())):
        return False
    name, other = rng.choice(names), rng.choice(names)
    if not (data := client.get(name)):
        return False
    at = rng.randrange(len(data))
    match rng.choice(("changed", "cut", "longer", "emptied", "swapped", "deleted")):
        case "changed":
            client.set(name, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        case "cut":
            client.set(name, data[:at])
        case "longer":
            client.set(name, data + data[:at])
        case "emptied":
            client.set(name, b"")
        case "swapped":
            client.set(name, client.get(other) or b"")
        case _:
            client.unlink(name)
    return True


def _shown(number: int, answer: TokenAnswer, expected: TokenAnswer) -> dict[str, object]:
    return {
        "request": number,
        "answer": list(answer.token_ids) or answer.text,
        "expected": list(expected.token_ids) if answer.token_ids else expected.text,
        "tokens_by_tier": dict(answer.tokens_by_tier),
    }
