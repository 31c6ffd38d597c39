"""Measure a running engine: prefill times by cached and new tokens, steps with several requests, and loads."""

from __future__ import annotations

import random
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from ragcache_core.client.engine import Engine
from ragcache_core.client.launch.process import is_stream
from ragcache_core.client.server_api import Call, ServerAPI
from ragcache_core.client.stats.cache_stats import KV_MEMORY
from ragcache_core.errors import ConfigError, EngineError
from ragcache_core.policy.prefill_cost import PrefillCostModel, StepTimes
from ragcache_core.prompt import RenderedPrompt

SMALLEST_NEW = 32
"""Fewest new tokens that are measured: a short question behind documents that are all cached."""
_SMALLEST_CACHED = 128
_ATTEMPTS = 3
_ORDINARY_TEXT = (
    "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789 the of and to in is that it was for on"
)
_LOGGED_DTYPE = re.compile(r"Initializing a V1 LLM engine.*?\bdtype=torch\.(\w+)")


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """The duration of a prompt, and the number of its tokens hit in the GPU KV cache."""

    time_s: float
    num_cached_tokens: int


Ask = Callable[[Sequence[int]], TimedAnswer]
"""Sends a prompt of token ids, and lets one token be generated."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The lengths to measure: all pairs whose prompt has at most ``max_tokens`` tokens."""

    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    max_tokens: int

    def new_behind(self, num_cached_tokens: int) -> tuple[int, ...]:
        """Return the new lengths that fit after ``num_cached_tokens``."""
        return tuple(new for new in self.new_tokens if num_cached_tokens + new <= self.max_tokens)

    def points(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs (cached, new)."""
        return tuple((cached, new) for cached in self.cached_tokens for new in self.new_behind(cached))

    def num_tokens(self, num_repeats: int) -> int:
        """Return the number of tokens that the engine computes for the grid."""
        return self.max_tokens + num_repeats * (sum(self.cached_tokens) + sum(new for _, new in self.points()))


@dataclass(frozen=True, slots=True)
class Measurement:
    """The times of one point of the grid."""

    num_cached_tokens: int
    num_new_tokens: int
    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def spread(self) -> float:
        """The difference between the longest and the shortest time, as a share of their median."""
        return (max(self.times_s) - min(self.times_s)) / self.median_s


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Model source, maximum prompt length and version of a server.

    ``token_ids`` are ids of ordinary text, to make prompts of.
    """

    model_root: str
    block_size: int
    num_kv_tokens: int
    max_prompt_tokens: int
    vllm_version: str
    token_ids: tuple[int, ...]


def make_grid(*, block_size: int, max_tokens: int) -> Grid:
    """Return lengths that double, up to prompts of ``max_tokens``; cached ones are multiples of ``block_size``.

    Raises:
        ConfigError: prompts that short leave nothing to measure.
    """
    least = block_size + 2 * SMALLEST_NEW
    if max_tokens < least:
        raise ConfigError(
            f"prompts of at most {max_tokens} tokens leave nothing to measure, {least} are needed with blocks of "
            f"{block_size}: raise --max-tokens, the context window (-- --max-model-len) or --kv-cache-bytes"
        )
    first_cached = -(-_SMALLEST_CACHED // block_size) * block_size
    last_cached = (max_tokens - SMALLEST_NEW) // block_size * block_size
    return Grid((0, *_doubling(first_cached, last_cached)), _doubling(SMALLEST_NEW, max_tokens), max_tokens)


def read_facts(engine: Engine) -> EngineFacts:
    """Return the facts about ``engine`` that profiling needs.

    Raises:
        EngineError: it is busy, or not a vLLM server that tells.
    """
    load = engine.stats()
    if load.num_running + load.num_waiting:
        raise EngineError(
            f"the engine at {engine.base_url} is busy with {load.num_running + load.num_waiting} requests, which would "
            "be measured as well: profile an idle engine"
        )
    api = _api_of(engine)
    text = {"model": engine.model, "prompt": _ORDINARY_TEXT, "add_special_tokens": False}
    version = api.ask(Call("/version", httpx.Response.raise_for_status))
    tokenized = api.ask(Call("/tokenize", httpx.Response.raise_for_status, method="POST", body=text))
    try:
        block_size, num_kv_tokens = api.ask(KV_MEMORY)
        return EngineFacts(
            model_root=api.model_card().root,
            block_size=block_size,
            num_kv_tokens=num_kv_tokens,
            max_prompt_tokens=min(engine.max_model_len, num_kv_tokens) - 1,  # one token is generated
            vllm_version=str(version.json()["version"]),
            token_ids=tuple(sorted(set(tokenized.json()["tokens"]))),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(
            f"the engine at {engine.base_url} does not say what its KV memory, version or tokens are ({error!r}): "
            "profile a server of vLLM 0.32 or 0.33"
        ) from error


def asker(engine: Engine) -> Ask:
    """Return a function that sends a prompt to ``engine`` and times it."""

    def ask(token_ids: Sequence[int]) -> TimedAnswer:
        stats = engine.generate(RenderedPrompt((), tuple(token_ids), ()), max_tokens=1).stats
        in_kv_memory = stats.num_cached_tokens if stats.num_gpu_tokens is None else stats.num_gpu_tokens
        return TimedAnswer(stats.total_s, in_kv_memory)

    return ask


def measure(
    ask: Ask,
    grid: Grid,
    token_ids: Sequence[int],
    *,
    num_repeats: int,
    rng: random.Random,
    report: Callable[[int], object],
) -> tuple[Measurement, ...]:
    """Return the times of every point of ``grid``, each measured ``num_repeats`` times with different tokens.

    A prefix is put into the engine's cache by a request of its own and is then used by every point of its row; the
    engine frees it last, so that it stays in GPU memory, whatever tiers lie below. ``report`` is told how many tokens
    each step has computed.

    Raises:
        EngineError: the engine does not keep what was put into its cache.
    """

    def fresh(num_tokens: int) -> list[int]:
        return rng.choices(token_ids, k=num_tokens)

    ask(fresh(grid.max_tokens))
    report(grid.max_tokens)
    times_s: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for _ in range(num_repeats):
        for num_cached_tokens in grid.cached_tokens:
            prefix = fresh(num_cached_tokens)
            if prefix:
                ask(prefix)
                report(num_cached_tokens)
            for num_new_tokens in grid.new_behind(num_cached_tokens):
                time_s = _time_behind(ask, prefix, num_new_tokens, fresh)
                times_s[num_cached_tokens, num_new_tokens].append(time_s)
                report(num_new_tokens)
    return tuple(Measurement(*point, tuple(times_s[point])) for point in grid.points())


def cost_model(measurements: Sequence[Measurement]) -> PrefillCostModel:
    """Return the cost model that interpolates the medians of ``measurements``."""
    return PrefillCostModel.from_measured({(m.num_cached_tokens, m.num_new_tokens): m.median_s for m in measurements})


def logged_dtype(log_path: Path | None) -> str:
    """Return the data type in the log of a launched server; ``unknown`` without a log."""
    if log_path is None or is_stream(log_path):
        return "unknown"
    found = _LOGGED_DTYPE.search(log_path.read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else "unknown"


def _time_behind(ask: Ask, prefix: list[int], num_new_tokens: int, fresh: Callable[[int], list[int]]) -> float:
    reported = []
    for _ in range(_ATTEMPTS):
        answer = ask(prefix + fresh(num_new_tokens))
        if answer.num_cached_tokens == len(prefix):
            return answer.time_s
        reported.append(answer.num_cached_tokens)
        if prefix:
            ask(prefix)  # something else has pushed it out
    raise EngineError(
        f"{len(prefix)} tokens were put into the cache, and the engine hit {reported} of them: profile an "
        "otherwise idle engine, with prefix caching on and --enable-prompt-tokens-details"
    )


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """Return ``first`` and its doubles up to ``last``, which replaces a value close to it."""
    values = []
    while first * 1.5 <= last:
        values.append(first)
        first *= 2
    return (*values, last)


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Size of each working tier in tokens, from the fastest on, and the bytes of a token."""

    tokens: dict[str, int]
    bytes_per_token: float


def tier_sizes(engine: Engine) -> TierSizes:
    """Return the tier sizes of ``engine``.

    Raises:
        EngineError: it is plain vLLM, or cannot be asked.
    """
    tiers = {tier.name: tier for tier in engine.stats().tiers if tier.is_enabled}
    if "gpu" not in tiers:
        raise EngineError(f"the server at {engine.base_url} is plain vLLM and has no tiers")
    _, num_gpu_tokens = _api_of(engine).ask(KV_MEMORY)
    bytes_per_token = tiers["gpu"].capacity_bytes / num_gpu_tokens
    return TierSizes(
        {name: int(tier.capacity_bytes / bytes_per_token) for name, tier in tiers.items()}, bytes_per_token
    )


def _api_of(engine: Engine) -> ServerAPI:
    return ServerAPI(engine.base_url, engine.api_key, engine.http_client())


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
        EngineError: what left KV memory was not found in host memory, or its load took no measurable time.
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
