"""What a comparison was asked to do, and all that is decided from it before the first engine starts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ragcache_core._version import __version__
from ragcache_core.bench.compare.comparison import Comparison, OpenEngine
from ragcache_core.bench.compare.peers import MAX_BATCHED_TOKENS, PEERS, USUAL, Peer, Setup
from ragcache_core.bench.compare.prompts import TracedPrompts, check_scale, scaled
from ragcache_core.bench.compare.report import LAUNCH, SERVER
from ragcache_core.bench.compare.search.index import SearchOptions, open_index
from ragcache_core.bench.compare.search.peers import SPECULATIVE
from ragcache_core.bench.compare.search.prompts import SearchedPrompts
from ragcache_core.bench.compare.sessions import Amounts
from ragcache_core.bench.compare.sizing import HOST_TOKENS, KV_TOKENS, ModelFacts, check_host, window
from ragcache_core.bench.compare.warm_disks import WarmDisks
from ragcache_core.client import Engine
from ragcache_core.config import BytesOrNone
from ragcache_core.errors import ConfigError
from ragcache_core.profiles.random_model import LLAMA_3_8B, random_model
from ragcache_core.retrieval.base import IndexKind
from ragcache_core.sim.traces.trace import Trace, read_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

RANDOM, RANDOM_8B = "random", "random-8b"
AUTO_SHARES = (0.25, 0.5, 0.8, 1.2, 1.8, 2.6)
_RANDOM_MODELS_SCALE = 0.125
_ASSUMED_VOCABULARY = 1_024
"""Tokens that every model has, for a server whose model is not said."""
_SIZE = TypeAdapter(BytesOrNone)
_NOT_OF_A_DISK = {"compare", "rates", "are_shares", "seeds", "first_seed", "host_memory_bytes", "has_warm_disks"}
"""Facts of a comparison that its disk tiers do not depend on."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of ``ragcache bench``; sizes as they are typed, ``None`` where it decides."""

    engine: str = LAUNCH
    api_key: str | None = None
    workload: str = "mmlu"
    trace: Path | None = None
    compare: tuple[str, ...] = USUAL
    rates: tuple[float, ...] = AUTO_SHARES
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
    warm_disks: Path | None = None
    block_size: int = 32
    max_num_seqs: int = 8
    max_num_batched_tokens: int = MAX_BATCHED_TOKENS
    vllm_args: tuple[str, ...] = ()
    search: int | None = None
    search_dim: int = 128
    search_index: IndexKind = "ivf"
    search_share: float | None = None
    search_folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A comparison that can begin. Results must agree in ``facts`` with it."""

    comparison: Comparison
    prompts: Mapping[int, TracedPrompts]
    open_engine: OpenEngine
    facts: Mapping[str, Any]
    warm_disks: WarmDisks | None = None


def prepare(options: BenchOptions, stack: ExitStack | None = None) -> Prepared:
    """Return what ``options`` ask for, checked: traces are made, and so are the random model and the index.

    ``stack`` closes what is open in the end: the index of a search, which needs one.

    Raises:
        ConfigError: options that cannot work, or contradict each other.
        TraceError: the trace's file is broken; the message says where.
    """
    search = _search(options)
    if options.engine != LAUNCH:
        return _on_a_server(options, search, stack)
    peers = _peers(options.compare, SPECULATIVE if search else {})
    model, model_args = _model(options.model)
    facts = ModelFacts.read(model, options.dtype)
    scale = _scale(options)
    kv_bytes = facts.memory_bytes(KV_TOKENS, scale, options.block_size)
    if options.kv_memory is not None:
        kv_bytes = _bytes("--kv-memory", options.kv_memory)
    host_bytes = tuple(_bytes("--host-memory", size) for size in options.host_memory)
    host_bytes = host_bytes or tuple(facts.memory_bytes(tokens, scale, options.block_size) for tokens in HOST_TOKENS)
    check_host(host_bytes, facts, options.block_size)
    comparison = _comparison(options, peers, host_bytes)
    prompts = _prompts(options, comparison, scale, facts.vocab_size, search, stack)
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
        disk_bytes=_bytes("--disk-memory", options.disk_memory),
        vllm_args=(*model_args, *options.vllm_args),
        scale=scale,
    )

    def open_engine(peer: Peer, host_bytes: int, folder: Path) -> AbstractContextManager[Engine]:
        return peer.opened(setup, host_bytes, folder)

    sizes = {
        "kv_memory_bytes": kv_bytes,
        "kv_bytes_per_token": facts.kv_bytes_per_token,
        "host_memory_bytes": list(host_bytes),
        "disk_memory_bytes": setup.disk_bytes,
        "max_model_len": needed,
    }
    known = {**asked_facts(options), **sizes}
    return Prepared(comparison, prompts, open_engine, known, _warm_disks(options, known, setup.disk_bytes))


def _model(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the folder or name of a model, and what vLLM must be told to load it."""
    if name == RANDOM:
        return str(random_model()), ()
    if name == RANDOM_8B:
        return str(random_model(LLAMA_3_8B, has_weights=False)), ("--load-format=dummy",)
    return name, ()


def _warm_disks(options: BenchOptions, known: Mapping[str, Any], disk_bytes: int) -> WarmDisks | None:
    if options.warm_disks is None:
        return None
    if not disk_bytes:
        raise ConfigError("--warm-disks keeps disk tiers, and no engine has one: give --disk-memory as well")
    decides = {name: value for name, value in known.items() if name not in _NOT_OF_A_DISK}
    return WarmDisks(options.warm_disks, {**decides, "num_rates": len(options.rates)})


def _on_a_server(options: BenchOptions, search: SearchOptions | None, stack: ExitStack | None) -> Prepared:
    """Return the load on one server that runs already, as it is."""
    with Engine.connect(options.engine, api_key=options.api_key, tokenizer=False) as engine:
        is_ragcache = engine.stats().policy is not None
        num_tokens = engine.max_model_len
    speculates = is_ragcache and search is not None
    peer = Peer(SERVER, f"the server at {options.engine}", is_ragcache=is_ragcache, speculates=speculates)
    comparison = replace(_comparison(options, (peer,), (1,)), start_s=0.0)
    scale = _scale(options)
    prompts = _prompts(options, comparison, scale, _ASSUMED_VOCABULARY, search, stack)
    facts = ModelFacts(_ASSUMED_VOCABULARY, 1, num_tokens)
    window(prompts, facts, num_requests=comparison.num_trace_requests, kv_bytes=num_tokens, block_size=1)

    def open_engine(peer: Peer, host_bytes: int, folder: Path) -> Engine:  # noqa: ARG001 (it has its own)
        return Engine.connect(options.engine, api_key=options.api_key)

    return Prepared(comparison, prompts, open_engine, asked_facts(options))


def _peers(names: tuple[str, ...], more: Mapping[str, Peer]) -> tuple[Peer, ...]:
    known = {**PEERS, **more}
    for name in names:
        if name in SPECULATIVE and not more:
            raise ConfigError(f"{name} is asked ahead of a search's end, and there is no search: give --search as well")
        if name not in known:
            raise ConfigError(f"there is no engine {name!r:.80} to compare: choose from {', '.join(known)}")
    return tuple(known[name] for name in names)


def _search(options: BenchOptions) -> SearchOptions | None:
    """Return what is searched, checked before anything is made."""
    if options.search is None:
        return None
    if options.trace is not None:
        raise ConfigError("--search finds the documents that --trace would name: give one of them, or a --workload")
    if WORKLOADS[options.workload].goes_on:
        raise ConfigError(f"--search asks single questions, and {options.workload} has conversations: name another")
    return SearchOptions(options.search, options.search_dim, options.search_index, options.search_share)


def _comparison(options: BenchOptions, peers: tuple[Peer, ...], host_bytes: tuple[int, ...]) -> Comparison:
    seeds = tuple(range(options.first_seed, options.first_seed + options.seeds))
    amounts = Amounts(options.warm_up, options.requests)
    return Comparison(peers, host_bytes, options.rates, options.are_shares, seeds, amounts)


def _prompts(
    options: BenchOptions,
    comparison: Comparison,
    scale: float,
    vocab_size: int,
    search: SearchOptions | None,
    stack: ExitStack | None,
) -> Mapping[int, TracedPrompts]:
    count = comparison.num_trace_requests
    if search is not None:
        return _searched_prompts(options, search, comparison, scale, vocab_size, stack)
    return {
        seed: TracedPrompts(
            traced(options.workload, options.trace, None, count, seed, scale),
            vocab_size,
            seed=seed,
            num_output_tokens=options.output_tokens,
        )
        for seed in comparison.seeds
    }


def traced(workload: str, path: Path | str | None, sha256: str | None, count: int, seed: int, scale: float) -> Trace:
    """Return the requests of a seed: those of the workload, or of the file at ``path``, which is the same for all.

    Raises:
        ConfigError: the file is not the one of ``sha256``.
        TraceError: it is broken.
    """
    if path is None:
        return scaled(make_trace(WORKLOADS[workload], count, seed), scale)
    path = Path(path)
    if sha256 is not None and _digest(path) != sha256:
        raise ConfigError(f"{path} is another trace than the one that was measured: put that one in its place")
    return scaled(read_trace(path).head(count), scale)


def _searched_prompts(
    options: BenchOptions,
    search: SearchOptions,
    comparison: Comparison,
    scale: float,
    vocab_size: int,
    stack: ExitStack | None,
) -> dict[int, SearchedPrompts]:
    assert stack is not None, "nobody would close the index"
    workload = WORKLOADS[options.workload]
    if search.count < workload.documents_per_request:
        raise ConfigError(
            f"--search is {search.count}, and {options.workload} shows {workload.documents_per_request} documents: more"
        )
    store = stack.enter_context(open_index(search, options.search_folder))
    return {
        seed: SearchedPrompts(
            store,
            workload,
            comparison.num_trace_requests,
            vocab_size,
            seed=seed,
            scale=scale,
            num_output_tokens=options.output_tokens,
        )
        for seed in comparison.seeds
    }


def _scale(options: BenchOptions) -> float:
    default = _RANDOM_MODELS_SCALE if options.engine == LAUNCH and options.model == RANDOM else 1.0
    scale = default if options.scale is None else options.scale
    check_scale(scale)
    return scale


def _bytes(name: str, size: str) -> int:
    try:
        return int(_SIZE.validate_python(size))
    except ValidationError as error:
        raise ConfigError(f"{name} is {size!r:.80}: write a size as 64MiB or 1GiB") from error


def asked_facts(options: BenchOptions) -> dict[str, Any]:
    """Return in what results must agree with ``options``, as far as that is known before anything is made."""
    asked = asdict(replace(options, api_key=None, scale=_scale(options)))
    for decided in ("api_key", "kv_memory", "host_memory", "disk_memory"):
        del asked[decided]
    del asked["search_folder"]
    if asked.pop("warm_disks") is not None:
        asked["has_warm_disks"] = True
    if options.search is None:
        asked = {name: value for name, value in asked.items() if not name.startswith("search")}
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in asked.items()}
    digest = None if options.trace is None else _digest(options.trace)
    return {**asked, "trace_sha256": digest, "ragcache_version": __version__}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
