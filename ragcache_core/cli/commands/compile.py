"""``ragcache compile``: prefill the documents of a store ahead, into a shared store that any engine reads."""

from __future__ import annotations

import math
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragcache_core.cli.command import Command, engine_progress, options_in_cli_wording, print_json
from ragcache_core.cli.options import (
    cache_options,
    check_vllm_args,
    layout_of,
    log_option,
    open_store,
    read_cache_config,
    read_size,
    store_option,
    tokenizer_option,
    vllm_args_argument,
)
from ragcache_core.cli.output import check_output, output_option, write_output
from ragcache_core.cli.warming import (
    WarmingPlan,
    check_expectation,
    expectation_options,
    lines_of,
    plan_of,
    plan_to_dict,
    read_expected,
    size_text,
    warm_engine,
)
from ragcache_core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from ragcache_core.client import Engine
    from ragcache_core.stats import EngineStats, TierStats

_NUM_FORECASTS = 4
_LEAST_BUDGET_BYTES = 1 << 20
"""Less than any corpus takes: a size whose unit was left out is refused before a model is loaded."""
_POLL_S = 0.5
_STALLED_S = 120.0
_MOST_WAITING = 1 / 8
"""Share of host memory whose blocks may wait for the store: the engine drops further blocks from a half on."""


def _read_budget(context: click.Context, option: click.Parameter, text: str) -> int:
    budget = read_size(context, option, text)
    if budget < _LEAST_BUDGET_BYTES:
        raise click.BadParameter(f"{text!r:.40} is less than 1MiB, and holds no document's KV: write it as 200GiB")
    return budget


def _read_part(_context: click.Context, _option: click.Parameter, text: str) -> tuple[int, int]:
    try:
        number, count = map(int, text.split("/"))
    except ValueError:
        number, count = 0, 0
    if not 1 <= number <= count:
        raise click.BadParameter(f"{text!r:.40} is no part: write I/N, as 1/4 for the first of four machines")
    return number, count


@click.command(
    "compile",
    cls=Command,
    short_help="Prefill a store's documents into a shared store.",
    examples=[
        "ragcache compile org/model --store notes.store --shared file:///srv/kv --budget 200GiB",
        "ragcache compile org/model --store notes.store --shared s3://bucket/kv --budget 1TiB --from-log questions.txt",
        "ragcache compile org/model --store notes.store --shared file:///srv/kv --budget 1TiB --part 1/4",
        "ragcache serve org/model --shared file:///srv/kv     (any number of engines, on any machine)",
    ],
)
@click.argument("model")
@store_option
@click.option(
    "--budget",
    required=True,
    callback=_read_budget,
    metavar="SIZE",
    help="Maximum size of the KV to prefill, such as 200GiB, before compression.",
)
@click.option(
    "--part",
    default="1/1",
    show_default=True,
    callback=_read_part,
    metavar="I/N",
    help="Prefill part I of N of the documents, to divide the work among N machines.",
)
@expectation_options
@click.option(
    "--dry-run", is_flag=True, help="Print what would be prefilled, and the forecast gain, without prefilling it."
)
@output_option("Write plan, forecasts and result to this JSON file.")
@cache_options
@tokenizer_option
@log_option
@vllm_args_argument
def compile_(
    model: str,
    store: Path,
    budget: int,
    part: tuple[int, int],
    dry_run: bool,
    output: Path | None,
    cache_config: Path | None,
    tokenizer: str | None,
    log: Path | None,
    vllm_args: tuple[str, ...],
    as_json: bool,
    **settings: Any,
) -> None:
    """Prefill the documents of a store with MODEL, and write their KV to a shared store (--shared).

    The prefixes (documents in prompt order) with the largest savings within the budget are picked, from questions, from
    a trace, or by the similarity between stored documents. Documents in none of them follow, each as a prefix of its
    own. A simulation forecasts hits: it picks from the first half of the requests alone, replays the second half, and
    repeats that for half, a quarter and an eighth of the tokens. An engine starts, prefills, and ends. Engines that
    start later with the same model and the same --shared load the KV instead of computing it.

    Run it again after an interruption, or after 'ragcache index --update': KV that is there is loaded, not computed.
    KV of a changed document is never found. Exit status 0 means that all picked documents are stored, but those that
    are longer than the context window, which are counted.
    """
    from ragcache_core.chunkstore.remote import check_reachable
    from ragcache_core.client import Engine

    names = ("from_log", "trace", "top", "k", "document_order", "embedder", "cost_model")
    of_layout = ("static_prefix", "document_format", "question_format")
    expectation = {name: settings.pop(name) for name in (*names, *of_layout)}
    layout = layout_of(expectation)
    check_vllm_args(vllm_args)
    check_expectation(expectation)
    check_output("--output", output, filter(None, (expectation["from_log"], expectation["trace"])))
    cache = read_cache_config(cache_config, settings)
    if cache.shared is None:
        raise click.UsageError("Give --shared, where the KV goes, as file:///srv/kv.")
    if cache.chunk_reuse is not None:
        raise click.UsageError("KV for chunk reuse is not in a shared store: leave out --chunk-reuse.")
    if cache.shared_read_only:
        raise click.UsageError("--shared-read-only stores nothing: leave it out, or give --no-shared-read-only.")
    if (why := check_reachable(cache.shared, is_limited=cache.shared_bytes is not None, is_written=True)) is not None:
        raise ConfigError(f"--shared {cache.shared} takes no KV ({why})")
    with open_store(store, expectation["embedder"], read_only=True) as documents:
        expected = replace(read_expected(documents, expectation), alone=documents.ids())
        with (
            Engine.launch(
                model,
                cache=cache,
                tokenizer=tokenizer,
                log_path=log,
                progress=engine_progress(),
                extra_args=vllm_args,
            ) as engine,
            options_in_cli_wording(compile_),
        ):
            plan = plan_of(
                engine, documents, expected, layout, budget, expectation["cost_model"], num_forecasts=_NUM_FORECASTS
            )
            facts = {"model": model, "store": str(store), "shared": cache.shared, **plan_to_dict(plan, expected)}
            facts["forecasts"] = [forecast.to_dict() for forecast in plan.forecasts]
            num_out = len(set(expected.alone) - {path.doc_ids[-1] for path in plan.paths})
            facts["num_left_out_documents"] = num_out
            if not as_json:
                left_out = f"{num_out:,} of {len(expected.alone):,} documents do not fit the budget: raise --budget"
                click.echo("\n".join([*lines_of(plan, expected), *_forecast_lines(plan), *[left_out] * bool(num_out)]))
            if not dry_run:
                facts |= _compile(engine, _part_of(plan, *part), as_json=as_json)
    write_output(facts, output)
    if as_json:
        print_json(facts)


def _forecast_lines(plan: WarmingPlan) -> list[str]:
    """Return the forecast hits by budget as a person reads them."""
    return [
        f"  {size_text(forecast.num_tokens * plan.bytes_per_token):>10}: {forecast.warm.cached_share:.0%} of prompts "
        f"cached, mean TTFT {forecast.warm.mean_ttft_s:.3f} s"
        for forecast in plan.forecasts
    ]


def _part_of(plan: WarmingPlan, number: int, count: int) -> WarmingPlan:
    """Return one of ``count`` parts of the paths; paths with the same first document are in the same part."""
    paths = [path for path in plan.paths if zlib.crc32(path.doc_ids[0].encode()) % count == number - 1]
    return replace(plan, paths=paths)


def _compile(engine: Engine, plan: WarmingPlan, *, as_json: bool) -> dict[str, object]:
    """Prefill, wait until the shared store has all blocks, and return the receipt with its counts.

    Raises:
        EngineError: the store did not take all blocks, or had to delete some for them.
    """
    receipt = warm_engine(engine, plan, on_path=lambda _: _wait_for_writes(engine, _MOST_WAITING))
    stats = _wait_for_writes(engine, 0)
    shared = _tier(stats, "shared")
    if shared.num_evicted_blocks:
        raise EngineError(
            f"the engine deleted {shared.num_evicted_blocks:,} blocks from the shared store to keep --shared-bytes, "
            "which may be blocks of this run: raise --shared-bytes or lower --budget, and run it again until it "
            "deletes none"
        )
    if not as_json:
        num_out = receipt.num_left_out
        left_out = f" ({num_out:,} more do not fit the context window and are left out)" if num_out else ""
        click.echo(
            f"compiled {receipt.num_warmed + receipt.num_cached:,} paths in {receipt.duration_s:.1f} s{left_out}: all "
            f"their blocks are in the shared store; {shared.num_hit_tokens:,} tokens were loaded from it, not computed"
        )
    counts = {"num_blocks": shared.num_blocks, "num_loaded_tokens": shared.num_hit_tokens}
    return {"receipt": receipt.to_dict(), **counts}


def _wait_for_writes(engine: Engine, most: float) -> EngineStats:
    """Return the engine's statistics once at most the share ``most`` of host memory waits for the shared store.

    Raises:
        EngineError: the store did not take a block, or nothing was written for two minutes.
    """
    least, since_s = math.inf, time.monotonic()
    while True:
        stats = engine.stats()
        host, num_waiting = _tier(stats, "host"), stats.num_shared_pending_blocks
        if num_dropped := _tier(stats, "shared").num_dropped_blocks:
            raise EngineError(
                f"the shared store did not take {num_dropped:,} blocks: the engine's log says why; run it again to go "
                f"on (log: {engine.log_path})"
            )
        if num_waiting * host.used_bytes <= most * host.capacity_bytes * host.num_blocks:
            return stats
        if num_waiting < least:
            least, since_s = num_waiting, time.monotonic()
        if time.monotonic() - since_s > _STALLED_S:
            raise EngineError(
                f"{num_waiting:,} blocks wait for the shared store, which took none for {_STALLED_S:g} s: see that it "
                f"is reachable and not full, and run it again to go on (log: {engine.log_path})"
            )
        time.sleep(_POLL_S)


def _tier(stats: EngineStats, name: str) -> TierStats:
    return next(tier for tier in stats.tiers if tier.name == name)
