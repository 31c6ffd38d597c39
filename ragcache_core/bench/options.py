"""Options of a comparison, and everything that is decided before the first engine starts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ragcache_core._version import __version__
from ragcache_core.bench.comparison import Amounts, Comparison, OpenEngine
from ragcache_core.bench.engines import BASELINES, EXACT, MAX_BATCHED_TOKENS, Baseline, Setup
from ragcache_core.bench.prompts import TracedPrompts, check_scale, scaled
from ragcache_core.bench.report import LAUNCH, SERVER
from ragcache_core.client import Engine
from ragcache_core.config import BytesOrNone
from ragcache_core.errors import ConfigError
from ragcache_core.profiles.model_facts import ModelFacts
from ragcache_core.profiles.random_model import LLAMA_3_8B, random_model
from ragcache_core.sim.traces.trace import Trace, read_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

KV_TOKENS, HOST_TOKENS = 40_960, 262_144
"""RAGCache's KV memory of 5 GiB, and 32 GiB of host memory, at 8,192 tokens a GiB (Mistral-7B)."""
RANDOM, RANDOM_8B = "random", "random-8b"
_RANDOM_MODELS_SCALE = 0.125
_LEAST_VOCABULARY = 1_024  # of a running server, whose model is unknown
_SIZE = TypeAdapter(BytesOrNone)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of ``ragcache bench``; sizes as text, ``None`` for a default."""

    engine: str = LAUNCH
    api_key: str | None = None
    workload: str = "mmlu"
    trace: Path | None = None
    compare: tuple[str, ...] = EXACT
    rates: tuple[float, ...] = (0.25, 0.5, 0.8, 1.2, 1.8, 2.6)
    are_shares: bool = True
    seeds: int = 3
    first_seed: int = 0
    requests: int = 200
    warm_up: int = 200
    model: str = RANDOM
    dtype: str = "float32"
    scale: float | None = None
    output_tokens: int | None = None
    kv_memory: str | None = None
    host_memory: tuple[str, ...] = ()
    disk_memory: str = "0"
    block_size: int = 32
    max_num_seqs: int = 8
    max_num_batched_tokens: int = MAX_BATCHED_TOKENS
    vllm_args: tuple[str, ...] = ()

    @property
    def length_scale(self) -> float:
        """The factor of the trace's lengths."""
        default = _RANDOM_MODELS_SCALE if self.engine == LAUNCH and self.model == RANDOM else 1.0
        return default if self.scale is None else self.scale


@dataclass(frozen=True, slots=True)
class Prepared:
    """A comparison that can begin. ``facts`` are its options in results, and must agree to continue."""

    comparison: Comparison
    prompts: Mapping[int, TracedPrompts]
    open_engine: OpenEngine
    facts: Mapping[str, Any]


def prepare(options: BenchOptions) -> Prepared:
    """Return the checked comparison; makes the traces and the random model.

    Raises:
        ConfigError: options are out of range, or contradict each other.
        TraceError: the trace's file is broken; the message names the line.
    """
    check_scale(options.length_scale)
    if options.engine != LAUNCH:
        return _prepare_server(options)
    baselines = []
    for name in options.compare:
        if name not in BASELINES:
            raise ConfigError(f"there is no engine {name!r:.80} to compare: choose from {', '.join(BASELINES)}")
        baselines.append(BASELINES[name])
    model, vllm_args = options.model, options.vllm_args
    if model == RANDOM:
        model = str(random_model())
    elif model == RANDOM_8B:
        model, vllm_args = str(random_model(LLAMA_3_8B, has_weights=False)), ("--load-format=dummy", *vllm_args)
    facts, scale = ModelFacts.read(model, options.dtype), options.length_scale
    kv_bytes = facts.memory_bytes(KV_TOKENS, scale, options.block_size)
    if options.kv_memory is not None:
        kv_bytes = _bytes("--kv-memory", options.kv_memory)
    sizes = tuple(_bytes("--host-memory", size) for size in options.host_memory)
    sizes = sizes or (facts.memory_bytes(HOST_TOKENS, scale, options.block_size),)
    if min(sizes) < (least := options.block_size * facts.kv_bytes_per_token):
        raise ConfigError(f"host memory of {min(sizes):,} bytes: a block of this model's KV takes {least:,}")
    comparison = _comparison(options, tuple(baselines), sizes)
    prompts = _prompts(options, comparison, facts.vocab_size)
    needed = window(
        prompts,
        facts,
        num_requests=comparison.num_trace_requests,
        kv_bytes=kv_bytes,
        block_size=options.block_size,
    )
    setup = Setup(
        model,
        options.dtype,
        kv_bytes,
        options.block_size,
        needed,
        options.max_num_seqs,
        options.max_num_batched_tokens,
        _bytes("--disk-memory", options.disk_memory),
        vllm_args,
        scale,
    )

    def open_engine(baseline: Baseline, host_bytes: int, folder: Path) -> AbstractContextManager[Engine]:
        return baseline.opened(setup, host_bytes, folder)

    decided = {
        "kv_memory_bytes": kv_bytes,
        "kv_bytes_per_token": facts.kv_bytes_per_token,
        "host_memory_bytes": list(sizes),
        "disk_memory_bytes": setup.disk_bytes,
        "max_model_len": needed,
    }
    return Prepared(comparison, prompts, open_engine, {**_facts(options), **decided})


def window(
    prompts: Mapping[int, TracedPrompts], facts: ModelFacts, *, num_requests: int, kv_bytes: int, block_size: int
) -> int:
    """Return the context window for the first ``num_requests`` requests of each seed, in whole blocks.

    Raises:
        ConfigError: a request exceeds the model's window or the KV memory, or a trace is too short.
    """
    if (shortest := min(map(len, prompts.values()))) < num_requests:
        raise ConfigError(
            f"the trace has {shortest} requests, {num_requests} are needed (warm-up, and those of each rate): "
            "lower --requests or --warm-up, give fewer --rates, or a longer trace"
        )
    longest = max(of.num_tokens(number) for of in prompts.values() for number in range(num_requests))
    limit = min(facts.max_tokens, kv_bytes // facts.kv_bytes_per_token)
    needed = math.ceil((longest + 1) / block_size) * block_size
    if needed > limit:
        what = "the model's window" if limit == facts.max_tokens else "the KV memory"
        raise ConfigError(
            f"a request has {longest:,} tokens, {what} holds {limit:,}: lower --scale, raise --kv-memory, or choose "
            "another model"
        )
    return needed


def _prepare_server(options: BenchOptions) -> Prepared:
    """Return the load on one running server, whose settings stay as they are."""

    def connect(*_: object) -> Engine:
        return Engine.connect(options.engine, api_key=options.api_key)

    with Engine.connect(options.engine, api_key=options.api_key, tokenizer=False) as engine:
        is_ragcache, num_tokens = engine.stats().policy is not None, engine.max_model_len
    comparison = _comparison(options, (Baseline(SERVER, "a running server", is_ragcache=is_ragcache),), (1,))
    prompts = _prompts(options, comparison, _LEAST_VOCABULARY)
    facts = ModelFacts(_LEAST_VOCABULARY, 1, num_tokens)
    window(prompts, facts, num_requests=comparison.num_trace_requests, kv_bytes=num_tokens, block_size=1)
    return Prepared(comparison, prompts, connect, _facts(options))


def _comparison(options: BenchOptions, baselines: tuple[Baseline, ...], host_bytes: tuple[int, ...]) -> Comparison:
    seeds = tuple(range(options.first_seed, options.first_seed + options.seeds))
    amounts = Amounts(options.warm_up, options.requests)
    return Comparison(baselines, host_bytes, options.rates, options.are_shares, seeds, amounts)


def _prompts(options: BenchOptions, comparison: Comparison, vocab_size: int) -> Mapping[int, TracedPrompts]:
    count, scale = comparison.num_trace_requests, options.length_scale
    return {
        seed: TracedPrompts(
            scaled(_trace(options, count, seed), scale),
            vocab_size,
            seed=seed,
            num_output_tokens=options.output_tokens,
        )
        for seed in comparison.seeds
    }


def _trace(options: BenchOptions, count: int, seed: int) -> Trace:
    if options.trace is not None:
        return read_trace(options.trace).head(count)
    return make_trace(WORKLOADS[options.workload], count, seed)


def _bytes(name: str, size: str) -> int:
    try:
        return int(_SIZE.validate_python(size))
    except ValidationError as error:
        raise ConfigError(f"{name} is {size!r:.80}: write a size as 64MiB or 1GiB") from error


def _facts(options: BenchOptions) -> dict[str, Any]:
    """Return the options in which results must agree to continue."""
    given = asdict(replace(options, scale=options.length_scale))
    for name in ("api_key", "kv_memory", "host_memory", "disk_memory"):  # kept as bytes, or secret
        del given[name]
    given = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    digest = None if options.trace is None else hashlib.sha256(options.trace.read_bytes()).hexdigest()
    return {**given, "trace_sha256": digest, "ragcache_version": __version__}
