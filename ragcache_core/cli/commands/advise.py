"""``ragcache advise``: forecast the gain of changes to an engine for recorded traffic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragcache_core.cli.command import Command, options_in_cli_wording, print_json
from ragcache_core.cli.options import FiniteRange, api_key_option, join_server
from ragcache_core.cli.output import (
    check_outputs,
    check_plot,
    counting_requests,
    output_option,
    printable,
    say_written,
    write_output,
)
from ragcache_core.cli.settings_options import simulation_options
from ragcache_core.errors import EngineError

if TYPE_CHECKING:
    from ragcache_core.reports.page import Report, Table
    from ragcache_core.sim.advice import Advice, AdviceOutcome

_WARM_UP_SHARE = 0.2
"""Of the requests, at the beginning, while an empty cache fills; they do not count."""


@click.command(
    cls=Command,
    short_help="Forecast the gain of more memory, another order or engine.",
    examples=[
        "ragcache serve MODEL --record-trace mine.jsonl     (for a day)",
        "ragcache advise --log mine.jsonl --url http://127.0.0.1:8000 --cost-model profile.json",
        "ragcache advise --log mine.jsonl --gpu-tokens 80000 --host-tokens 400000 --price 2.50",
        "ragcache advise --log mine.jsonl --plot advice.html --output advice.json",
    ],
)
@click.option(
    "--log",
    type=click.Path(path_type=Path),
    required=True,
    metavar="TRACE",
    help="Trace of your traffic: a file of 'ragcache serve --record-trace' or 'ragcache trace import'.",
)
@click.option(
    "--url",
    metavar="URL",
    help="Running server; its tier sizes are the starting point instead of --gpu-tokens and the like.",
)
@api_key_option
@click.option(
    "--gpu-tokens", type=int, metavar="N", help="Present size of the GPU KV cache, in tokens. [default: 40,960]"
)
@click.option(
    "--host-tokens", type=int, metavar="N", help="Present size of the host tier, in tokens. [default: 65,536]"
)
@click.option(
    "--disk-tokens", type=int, metavar="N", help="Present size of the disk tier, in tokens; 0 for none. [default: 0]"
)
@simulation_options("system_tokens", "cost_model", "retrieval_s")
@click.option(
    "--max-batch",
    type=int,
    default=8,
    show_default=True,
    metavar="N",
    help="Maximum number of requests that run at a time.",
)
@click.option(
    "--warm-up",
    type=int,
    metavar="N",
    help=f"Number of requests at the start that are not counted. [default: {_WARM_UP_SHARE:.0%} of them]",
)
@click.option(
    "--price",
    type=FiniteRange(min=0),
    metavar="P",
    help="Price of one engine-hour (all GPUs of the engine), in any currency; adds costs to the table.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Write a plot to this file: .png, .svg or .html."
)
@output_option("Write results and options of each simulation to this JSON file.")
def advise(
    log: Path,
    url: str | None,
    api_key: str | None,
    price: float | None,
    warm_up: int | None,
    plot: Path | None,
    output: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:  # fmt: skip
    """Simulate recorded traffic on the present engine, and again with one change at a time.

    Each line of the table is a run of 'ragcache simulate' over the same requests. Prefill is the GPU time for the
    prompts of 1,000 requests; generation costs the same in all runs and is not included. Below the table are the
    documents with the most GPU time now.
    """
    from ragcache_core.sim.advice import advise as simulate_changes
    from ragcache_core.sim.advice import changes
    from ragcache_core.sim.options import SimulationOptions
    from ragcache_core.sim.traces.trace import read_trace

    check_plot(plot)
    check_outputs({"--output": output, "--plot": plot}, (log, Path(settings["cost_model"])))
    trace = read_trace(log)
    sizes = {} if url is None else _sizes_of(url, api_key)
    given = {name: value for name, value in settings.items() if value is not None}
    num_warm_up = int(_WARM_UP_SHARE * len(trace)) if warm_up is None else warm_up
    with options_in_cli_wording(advise):
        now = SimulationOptions(**{**sizes, **given, "warm_up": num_warm_up})
        num_runs = 1 + sum(1 for _ in changes(now, trace))
        with counting_requests("simulating", num_runs * len(trace)) as report:
            advice = simulate_changes(trace, now, price_per_hour=price, progress=report)
    if as_json:
        print_json(advice.to_dict())
    else:
        click.echo("\n\n".join(each.text() for each in tables(advice)))
    for note in advice.notes:
        click.echo(f"ragcache: {note}", err=True)
    write_output(advice.to_dict(), output)
    if plot is not None:
        page(advice, log.name, len(trace)).save(plot)
        say_written(plot)


def _sizes_of(url: str, api_key: str | None) -> dict[str, int]:
    """Return the tokens that each tier of a server holds."""
    from ragcache_core.client.profiling import tier_sizes

    with join_server(url, api_key) as engine:
        try:
            sizes = tier_sizes(engine).tokens
        except EngineError as error:
            raise type(error)(f"{error}: give --gpu-tokens and --host-tokens") from error
    return {f"{name}_tokens": num_tokens for name, num_tokens in sizes.items()}


def tables(advice: Advice) -> list[Table]:
    """Return the table of changes, by gain in time to first token, and that of the most expensive documents."""
    from ragcache_core.reports.page import Table

    has_price = any(outcome.saved is not None for outcome in advice.outcomes)
    heads = ["", "mean TTFT", "p99", "found", "prefill of 1,000", *(["saved on 1,000,000"] if has_price else []), ""]
    rows = [list(_cells(outcome, advice.now, has_price)) for outcome in (advice.now, *_best_first(advice))]
    documents = [
        [printable(cost.doc_id), f"{cost.num_tokens:,}", f"{cost.num_uses:,}", f"{cost.num_misses:,}",
         f"{cost.prefill_s:.1f} s"]
        for cost in advice.documents
    ]  # fmt: skip
    return [
        Table("", heads, rows),
        Table("", ["most expensive documents", "tokens", "retrieved", "computed", "GPU time"], documents),
    ]


def page(advice: Advice, log: str, num_requests: int) -> Report:
    """Return the tables below a plot of mean TTFT and prefill time by change."""
    from ragcache_core.reports.page import Report
    from ragcache_core.reports.plots import bars

    outcomes = (advice.now, *_best_first(advice))
    ttft = {outcome.change.name: {"mean TTFT": outcome.mean_ttft_s} for outcome in outcomes}
    prefill = {outcome.change.name: {"prefill": outcome.prefill_s} for outcome in outcomes}
    return Report(
        "What changes would bring",
        [f"{num_requests:,} requests of {log}, simulated on one engine with one thing changed at a time."],
        [
            bars("Mean time to first token", "mean TTFT, s", ttft),
            bars("Prefill of 1,000 requests", "GPU time, s", prefill),
        ],
        tables(advice),
        notes=advice.notes,
        options=advice.now.change.options.to_dict(),
    )


def _best_first(advice: Advice) -> list[AdviceOutcome]:
    return sorted(advice.outcomes, key=lambda outcome: outcome.mean_ttft_s)


def _cells(outcome: AdviceOutcome, now: AdviceOutcome, has_price: bool) -> Iterator[str]:
    change = outcome.change
    yield change.name
    yield f"{outcome.mean_ttft_s:.3f} s"
    yield f"{outcome.p99_ttft_s:.3f} s"
    yield f"{outcome.token_hit_rate:.1%}"
    yield f"{outcome.prefill_s:.1f} s" + ("" if outcome is now else f" ({outcome.prefill_s / now.prefill_s - 1:+.0%})")
    if has_price:
        yield "" if outcome.saved is None else f"{outcome.saved:,.2f}"
    yield change.caveat
