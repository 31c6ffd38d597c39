"""``ragcache profile``: measure prefill times, for loads and policies that use recompute cost."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from ragcache_core.cli.command import Command, print_json
from ragcache_core.cli.options import (
    FiniteRange,
    api_key_option,
    check_vllm_args,
    log_option,
    tokenizer_option,
    vllm_args_argument,
)
from ragcache_core.errors import EngineError
from ragcache_core.runtime.terminal import Bar, columns, plain

if TYPE_CHECKING:
    from ragcache_core.client import Engine
    from ragcache_core.client.profiling import EngineFacts, Grid, Measurement
    from ragcache_core.config import CacheConfig

RANDOM = "random"
"""A Llama of 30 million parameters, made on the spot: that of ``ragcache bench``."""
_RANDOM_TOKENS = range(256, 4_096)
_STARTUP_TIMEOUT_S = 600.0
_CPU_KV_CACHE_BYTES = 1 << 30
_ASSUMED_BLOCK_SIZE = 16
_NOISY_SPREAD = 0.25


@click.command(
    cls=Command,
    short_help="Measure prefill times for the cache's decisions.",
    examples=[
        "ragcache profile examples/demo_model",
        "ragcache profile org/model --kv-cache-bytes 20GiB --max-tokens 16384 -- --max-model-len 32768",
        "ragcache profile org/model --url http://127.0.0.1:8000 --api-key KEY --repeats 5",
        "ragcache profile examples/demo_model --dry-run",
    ],
)
@click.argument("model")
@click.option("--url", metavar="URL", help="Measure the idle server at this address instead of launching one.")
@api_key_option
@tokenizer_option
@click.option(
    "--kv-cache-bytes",
    metavar="SIZE",
    help="Size of the engine's GPU KV cache, such as 512MiB. [default: vLLM's choice]",
)
@click.option("--block-size", type=int, metavar="TOKENS", help="Tokens in a KV block. [default: vLLM's choice]")
@click.option(
    "--max-tokens", type=click.IntRange(1), help="Longest prompt to measure, in tokens. [default: the engine's maximum]"
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Measurements per point; the profile has their median.",
)
@click.option(
    "--steps",
    is_flag=True,
    help="Also measure the time of engine steps with several running requests, which 'ragcache simulate' uses.",
)
@click.option(
    "--host-memory",
    metavar="SIZE",
    help="Also measure loads from a host tier of this size, such as 4GiB; needs --kv-cache-bytes.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the profile to this file instead of the user's cache folder.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be measured, without launching an engine.")
@click.option(
    "--startup-timeout",
    type=FiniteRange(0, min_open=True),
    metavar="S",
    help="Abort the start after this many seconds without progress in loading. [default: 600]",
)
@log_option
@vllm_args_argument
def profile(
    model: str,
    url: str | None,
    api_key: str | None,
    tokenizer: str | None,
    kv_cache_bytes: str | None,
    block_size: int | None,
    max_tokens: int | None,
    repeats: int,
    steps: bool,
    host_memory: str | None,
    output: Path | None,
    dry_run: bool,
    startup_timeout: float | None,
    log: Path | None,
    vllm_args: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure how long MODEL takes to prefill a prompt, by its cached and its new tokens.

    MODEL is a folder in Hugging Face format, or a name of the hub. An engine without host and disk tier is
    launched for it, and ended afterwards. The times are stored for this model on this hardware. Engines that start
    later use them to decide which disk blocks to load and, with some policies, what to evict. Ctrl-C leaves the former
    profile.
    """
    check_vllm_args(vllm_args)
    of_a_launch = {
        "--kv-cache-bytes": kv_cache_bytes,
        "--block-size": block_size,
        "--host-memory": host_memory,
        "--startup-timeout": startup_timeout,
        "--log": log,
        "what follows '--'": vllm_args or None,
    }
    given = [name for name, value in of_a_launch.items() if value is not None]
    if url is not None and given:
        raise click.UsageError(
            f"{given[0]} configures a launched engine, but --url names a running server: leave {given[0]} out."
        )
    if url is not None and output is None and not _is_here(url):
        raise click.UsageError(
            f"The profile of the server at {url} belongs to its machine: give --output FILE, or run this command there."
        )
    from ragcache_core.client.launch.arguments import check_model
    from ragcache_core.client.profiling import make_grid
    from ragcache_core.config import CacheConfig
    from ragcache_core.profiles.prefill import check_writable, profile_path

    is_random = model == RANDOM
    if is_random:
        from ragcache_core.profiles.random_model import random_model

        model = str(random_model())
    check_model(model)
    sizes = CacheConfig(kv_cache_bytes=kv_cache_bytes, block_size=block_size, host_bytes=host_memory)
    if host_memory is not None and kv_cache_bytes is None:
        raise click.UsageError("--host-memory evicts a prompt from the GPU KV cache: give --kv-cache-bytes, as 64MiB.")
    path = output or profile_path(model)
    check_writable(path)
    if max_tokens is not None:  # a length that cannot work is known before a model is loaded
        make_grid(block_size=block_size or _ASSUMED_BLOCK_SIZE, max_tokens=max_tokens)

    if url is not None and tokenizer is not None:
        raise click.UsageError(
            "--tokenizer configures a launched engine, but --url names a running server: leave one of them out."
        )

    def join() -> Engine:
        if url is not None:
            return _connect(url, api_key)
        return _launch(model, sizes, api_key, tokenizer, startup_timeout, log, vllm_args)

    if dry_run and url is None:
        _show_plan(_plan(model, block_size, max_tokens), repeats, path, as_json)
        click.echo("ragcache: an engine with a smaller context window or GPU KV cache measures less", err=True)
        return
    with join() as engine:
        facts, grid = _facts_and_grid(engine, model, max_tokens)
        if dry_run:
            _show_plan(grid, repeats, path, as_json)
            return
        if is_random:  # ordinary text is one unknown word to it
            facts = replace(facts, token_ids=tuple(_RANDOM_TOKENS))
        measurements = _measure(engine, facts, grid, repeats)
        hardware = None if url is None or _is_here(url) else f"the machine of {url}"
        more = _measure_more(engine, facts, repeats, sizes, steps=steps)
        _keep(engine, facts, measurements, more, model, hardware, path, as_json)


def _is_here(url: str) -> bool:
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    return host in (None, "localhost", "127.0.0.1", "::1")  # an address without a host is refused when it is joined


def _connect(url: str, api_key: str | None) -> Engine:
    from ragcache_core.client import Engine

    return Engine.connect(url, api_key=api_key)


def _launch(
    model: str,
    sizes: CacheConfig,
    api_key: str | None,
    tokenizer: str | None,
    startup_timeout_s: float | None,
    log: Path | None,
    vllm_args: tuple[str, ...],
) -> Engine:
    """Launch plain vLLM, with its own host memory at most, to measure its prefix cache."""
    from ragcache_core.client import Engine
    from ragcache_core.client.launch.settings import VLLMOffload
    from ragcache_core.runtime.environment import CPU_KV_CACHE_BYTES_ENV

    return Engine.launch(
        model,
        cache=None if sizes.host_bytes is None else VLLMOffload(int(sizes.host_bytes)),
        api_key=api_key,
        tokenizer=tokenizer,
        startup_timeout_s=_STARTUP_TIMEOUT_S if startup_timeout_s is None else startup_timeout_s,
        max_restarts=0,  # its successor would have an empty cache
        log_path=log,
        env={CPU_KV_CACHE_BYTES_ENV: str(_CPU_KV_CACHE_BYTES)},
        extra_args=vllm_args,
        kv_cache_memory_bytes=None if sizes.kv_cache_bytes is None else int(sizes.kv_cache_bytes),
        block_size=sizes.block_size,
    )


def _plan(model: str, block_size: int | None, max_tokens: int | None) -> Grid:
    """Return the measurements to make, as far as the model's folder shows."""
    from ragcache_core.client.profiling import make_grid

    try:
        window = json.loads((Path(model).expanduser() / "config.json").read_bytes())["max_position_embeddings"]
    except (OSError, ValueError, LookupError, TypeError):
        window = None
    limits = [limit for limit in (max_tokens, window - 1 if isinstance(window, int) else None) if limit is not None]
    if not limits:
        raise click.UsageError(
            f"--dry-run launches nothing, so the context window of {model!r} is unknown: give --max-tokens, or --url."
        )
    return make_grid(block_size=block_size or _ASSUMED_BLOCK_SIZE, max_tokens=min(limits))


def _facts_and_grid(engine: Engine, model: str, max_tokens: int | None) -> tuple[EngineFacts, Grid]:
    from ragcache_core.client.profiling import make_grid, read_facts
    from ragcache_core.profiles.files import model_identity

    facts = read_facts(engine)
    root = facts.model_root
    is_same = (
        model_identity(root) == model_identity(model) if Path(root).is_dir() else Path(root).name == Path(model).name
    )
    if not is_same:
        raise EngineError(f"the server at {engine.base_url} serves {root!r}, not {model!r}: give that as MODEL")
    limit = min(facts.max_prompt_tokens, max_tokens or facts.max_prompt_tokens)
    return facts, make_grid(block_size=facts.block_size, max_tokens=limit)


def _measure(engine: Engine, facts: EngineFacts, grid: Grid, repeats: int) -> tuple[Measurement, ...]:
    from ragcache_core.client.profiling import asker, measure

    rng = random.Random()  # noqa: S311 (tokens that the engine has not seen in an earlier profile)
    with Bar("profiling", grid.num_tokens(repeats), "tokens") as bar:
        return measure(asker(engine), grid, facts.token_ids, num_repeats=repeats, rng=rng, report=bar.advance)


def _measure_more(
    engine: Engine, facts: EngineFacts, repeats: int, sizes: CacheConfig, *, steps: bool
) -> dict[str, Any]:
    """Return the requested further measurements of a profile."""
    from ragcache_core.client.profiling import asker, asker_together, measure_loads, measure_steps

    rng = random.Random()  # noqa: S311 (as above)
    more: dict[str, Any] = {}
    if sizes.kv_cache_bytes is not None:
        more["tokens_per_gib"] = facts.num_kv_tokens / (int(sizes.kv_cache_bytes) / 2**30)
    if steps:
        more["steps"] = measure_steps(
            asker_together(engine), facts.token_ids, block_size=facts.block_size, num_repeats=repeats, rng=rng
        )
    if sizes.host_bytes is not None:
        tokens_per_s = measure_loads(
            asker(engine),
            facts.token_ids,
            num_kv_tokens=facts.num_kv_tokens,
            block_size=facts.block_size,
            num_repeats=repeats,
            rng=rng,
        )
        more["host_gib_per_s"] = tokens_per_s / more["tokens_per_gib"]
    return more


def _keep(
    engine: Engine,
    facts: EngineFacts,
    measurements: Sequence[Measurement],
    more: dict[str, Any],
    model: str,
    hardware: str | None,
    path: Path,
    as_json: bool,
) -> None:
    from ragcache_core.client.profiling import cost_model, logged_dtype
    from ragcache_core.profiles.files import model_identity
    from ragcache_core.profiles.prefill import Profile, hardware_name, save_profile

    measured = Profile(
        model=model_identity(model),
        hardware=hardware or hardware_name(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        vllm_version=facts.vllm_version,
        dtype=logged_dtype(engine.log_path),
        num_repeats=len(measurements[0].times_s),
        spread=statistics.median(m.spread for m in measurements),
        cost_model=cost_model(measurements),
        **more,
    )
    if not as_json:  # first, so that they are not lost where the profile cannot be saved
        click.echo(f"{measured.model} on {measured.hardware}, {measured.dtype}, vLLM {measured.vllm_version}")
        click.echo(_table(measurements))
        if measured.steps is not None:
            times = (f"{name} {seconds * 1000:.2f} ms" for name, seconds in asdict(measured.steps).items())
            click.echo(f"steps: {', '.join(times)}")
        if measured.host_gib_per_s is not None:
            click.echo(f"from host memory: {measured.host_gib_per_s:.2f} GiB/s")
    save_profile(measured, path)
    if as_json:
        points = [
            {"cached_tokens": m.num_cached_tokens, "new_tokens": m.num_new_tokens, "times_s": list(m.times_s)}
            for m in measurements
        ]
        print_json({**measured.to_dict(), "points": points, "path": str(path)})
        return
    if measured.spread > _NOISY_SPREAD:
        click.echo(
            f"ragcache: repeated times differ by {measured.spread:.0%}: measure on an idle machine, or raise --repeats",
            err=True,
        )
    click.echo(f"ragcache: kept in {path}", err=True)


def _table(measurements: Sequence[Measurement]) -> str:
    """Return the medians in milliseconds: cached lengths as rows, new lengths as columns."""
    median_ms = {(m.num_cached_tokens, m.num_new_tokens): f"{m.median_s * 1000:,.1f}" for m in measurements}
    cached, new = (sorted({point[axis] for point in median_ms}) for axis in (0, 1))
    rows = ([f"{row:,}", *(median_ms.get((row, column), "-") for column in new)] for row in cached)
    return plain(columns(rows, ">" * (len(new) + 1), ["cached, new: ms", *(f"{column:,}" for column in new)]))


def _show_plan(grid: Grid, repeats: int, path: Path, as_json: bool) -> None:
    num_points, num_tokens = len(grid.points()), grid.num_tokens(repeats)
    if as_json:
        plan = {"cached_tokens": grid.cached_tokens, "new_tokens": grid.new_tokens, "max_tokens": grid.max_tokens}
        print_json({**plan, "points": grid.points(), "num_tokens": num_tokens, "path": str(path)})
        return
    click.echo(f"cached tokens  {' '.join(map(str, grid.cached_tokens))}")
    click.echo(f"new tokens     {' '.join(map(str, grid.new_tokens))}")
    click.echo(f"to measure     {num_points} prompts of at most {grid.max_tokens:,} tokens, {repeats} times each")
    click.echo(f"to compute     {num_tokens:,} tokens")
    click.echo(f"to store in    {path}")
