"""Measure step times of a running engine with several requests: decoding, requests, loads."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ragcache_core.client.engine import Engine
from ragcache_core.client.profiling import Ask
from ragcache_core.errors import EngineError
from ragcache_core.policy.prefill_cost import StepTimes
from ragcache_core.prompt import RenderedPrompt

_NUM_TOGETHER = 4
_NUM_ANSWER_TOKENS = 33
_NUM_NEW = 32

Together = Callable[[Sequence[Sequence[int]], int], float]
"""Sends prompts at once, each for an answer of that many tokens; returns the seconds until the last has ended."""


def asker_together(engine: Engine) -> Together:
    """Return a function that sends several prompts to ``engine`` at once."""

    def ask(prompt: Sequence[int], max_tokens: int) -> None:
        rendered = RenderedPrompt((), tuple(prompt), ())
        engine.generate(rendered, max_tokens=max_tokens, extra_body={"ignore_eos": True})

    def together(prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        with ThreadPoolExecutor(len(prompts)) as threads:
            began_s = time.perf_counter()
            for answer in [threads.submit(ask, prompt, max_tokens) for prompt in prompts]:
                answer.result()
            return time.perf_counter() - began_s

    return together


def measure_steps(
    together: Together, token_ids: Sequence[int], *, block_size: int, num_repeats: int, rng: random.Random
) -> StepTimes:
    """Return step times: of one answer, of several at once, and of a request whose prompt is almost fully cached.

    ::

        one request, n tokens            request_s + n (step_s + sequence_s)
        m requests at once, n tokens     ...       + n (step_s + m sequence_s)

    The prompts are cached but for a token, so that none of them is computed.
    """
    prompts = [[*rng.choices(token_ids, k=2 * block_size), token_ids[0]] for _ in range(_NUM_TOGETHER)]
    together(prompts, 1)
    one, several, first = [], [], []
    for _ in range(num_repeats):
        first_s = together(prompts[:1], 1)
        first.append(first_s)
        one.append((together(prompts[:1], _NUM_ANSWER_TOKENS) - first_s) / (_NUM_ANSWER_TOKENS - 1))
        more_s = together(prompts, _NUM_ANSWER_TOKENS) - together(prompts, 1)
        several.append(more_s / (_NUM_ANSWER_TOKENS - 1))
    one_s, several_s = statistics.median(one), statistics.median(several)
    sequence_s = min(max((several_s - one_s) / (_NUM_TOGETHER - 1), 0.0), one_s)
    return StepTimes(max(statistics.median(first) - one_s, 0.0), one_s - sequence_s, sequence_s)


def measure_loads(
    ask: Ask, token_ids: Sequence[int], *, num_kv_tokens: int, block_size: int, num_repeats: int, rng: random.Random
) -> float:
    """Return the tokens per second that the engine loads from host memory.

    Of vLLM with its own host memory. A prompt is put into the cache, pushed out of KV memory by more tokens than that
    holds, and asked again: by how much longer that takes than with KV in the engine is its load.

    Raises:
        EngineError: what left KV memory was not found in host memory, or came in no time that can be told.
    """

    def fresh(num_tokens: int) -> list[int]:
        return rng.choices(token_ids, k=num_tokens)

    num_tokens = max(num_kv_tokens // 4 // block_size, 1) * block_size
    seconds = []
    for _ in range(num_repeats):
        prefix = fresh(num_tokens)
        ask([*prefix, *fresh(_NUM_NEW)])
        for _ in range(5):
            ask(fresh(num_tokens))
        loaded = ask([*prefix, *fresh(_NUM_NEW)])
        kept = ask([*prefix, *fresh(_NUM_NEW)])
        if loaded.num_cached_tokens < num_tokens // 2:
            raise EngineError(
                f"{num_tokens} tokens left KV memory, and host memory had {loaded.num_cached_tokens} of them: give "
                "--host-memory several times what --kv-cache-bytes is"
            )
        seconds.append((loaded.time_s - kept.time_s) / loaded.num_cached_tokens)
    if (each_s := statistics.median(seconds)) <= 0:
        raise EngineError("KV in host memory was found as fast as in the engine: measure on an idle machine")
    return 1 / each_s
