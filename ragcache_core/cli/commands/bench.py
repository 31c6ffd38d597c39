"""``ragcache bench``: real engines side by side under the same load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ragcache_core.cli.command import CommandGroup, print_json
from ragcache_core.cli.commands.trace import WORKLOAD_NAMES
from ragcache_core.cli.options import api_key_option
from ragcache_core.cli.output import check_output, check_outputs, require_matplotlib, say_written
from ragcache_core.runtime.terminal import Bar

if TYPE_CHECKING:
    from ragcache_core.bench.results import Results

_AUTO = "auto:0.25,0.5,0.8,1.2,1.8,2.6"
_OF_A_LAUNCH = frozenset(
    (
        "compare",
        "model",
        "dtype",
        "kv_memory",
        "host_memory",
        "disk_memory",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "vllm_args",
    )
)


class Rates(click.ParamType[Any]):
    """Comma-separated rates per second, or shares of a capacity; returns the numbers and which of both."""

    name = "rates"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        are_shares = value == "auto" or value.startswith("auto:")
        numbers = (_AUTO if value == "auto" else value).removeprefix("auto:")
        try:
            return tuple(float(number) for number in numbers.split(",")), are_shares
        except ValueError:
            self.fail(f"{value!r} is no list of numbers: give requests a second as 0.5,1,2, or auto.", param, ctx)


_html_option = click.option(
    "--html",
    "html_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="REPORT",
    callback=lambda _context, _option, path: _drawable(path),
    help="Write an HTML page with tables and plots, and each plot as a PNG beside it.",
)


@click.group(
    cls=CommandGroup,
    short_help="Compare real engines under the same load.",
    examples=[
        "ragcache bench --workload mmlu --output build/compare.json --html build/compare.html",
        "ragcache bench --compare vllm,ragcache --rates 1,2,4 --seeds 1 --requests 100 --output out.json",
        "ragcache bench --trace retrievals.jsonl --scale 0.25 --host-memory 64MiB,256MiB --output out.json --resume",
        "ragcache bench --model random-8b --dtype bfloat16 --max-num-batched-tokens 8192 --vllm-arg=--no-enforce-eager",
        "ragcache bench --engine http://127.0.0.1:8000 --api-key KEY --rates 1,2 --output out.json",
    ],
)
@click.option(
    "--engine",
    default="launch",
    show_default=True,
    metavar="launch|URL",
    help="launch: start each engine of --compare. An address: send the load to that running server.",
)
@api_key_option
@click.option(
    "--workload",
    type=click.Choice(WORKLOAD_NAMES),
    default="mmlu",
    show_default=True,
    help="Workload of the requests.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Trace with the requests, instead of a workload; the same requests for every seed.",
)
@click.option(
    "--compare",
    metavar="ENGINES",
    help="The engines, as vllm,vllm-host-lru,ragcache; the others are compared with the first. The error for an "
    "unknown name lists all. [default: all with exact answers, so without ragcache-chunks]",
)
@click.option(
    "--rates",
    type=Rates(),
    default="auto",
    metavar="R,R,...",
    help="Requests a second, ascending; auto[:S,S,...] takes shares of what the first engine can serve. "
    f"[default: {_AUTO}]",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Number of seeds; each repeats the run with different requests.",
)
@click.option(
    "--first-seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="First random seed; the others follow it.",
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Number of measured requests at each rate.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0),
    default=200,
    show_default=True,
    help="Number of unmeasured requests before the first rate, to fill the caches.",
)
@click.option(
    "--model",
    default="random",
    show_default=True,
    metavar="DIR|NAME|random|random-8b",
    help="The model; random is a Llama of 30 million parameters made on the spot, random-8b one of the shape of "
    "Llama-3.1-8B, for a GPU.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Data type of weights and KV.",
)
@click.option(
    "--scale",
    type=float,
    help="Factor for all prompt and document lengths. [default: 0.125 for the model random, 1 for others]",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(1),
    help="Length of each answer in tokens. [default: as in the trace or workload]",
)
@click.option(
    "--kv-memory",
    metavar="SIZE",
    help="Size of the GPU KV cache, such as 10GiB. [default: 40,960 tokens times the scale]",
)
@click.option(
    "--host-memory",
    metavar="SIZE,...",
    help="Size of the host tier, such as 48GiB; several sizes in ascending order are compared. "
    "[default: 262,144 tokens times the scale]",
)
@click.option(
    "--disk-memory",
    default="0",
    show_default=True,
    metavar="SIZE",
    help="Size of the disk tier of engines with host memory, such as 1GiB; 0 for none. vLLM's own "
    "file tier ignores the limit.",
)
@click.option("--block-size", type=click.IntRange(1), default=32, show_default=True, help="Tokens in a KV block.")
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Maximum number of requests that run at a time.",
)
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(1),
    default=1_024,
    show_default=True,
    help="Maximum number of tokens that one engine step computes.",
)
@click.option(
    "--vllm-arg",
    "vllm_args",
    multiple=True,
    metavar="ARG",
    help="Argument for vLLM's server, passed unchanged; may be repeated.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default="build/bench-compare.json",
    show_default=True,
    metavar="OUT",
    help="Write all measurements to this JSON file, run by run.",
)
@_html_option
@click.option("--resume", is_flag=True, help="Continue an interrupted comparison: skip the runs that OUT already has.")
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    compare: str | None,
    rates: tuple[tuple[float, ...], bool],
    host_memory: str | None,
    output: Path,
    as_json: bool,
    html_path: Path | None,
    resume: bool,
    **given: Any,
) -> None:
    """Launch engines one after the other, and send each of them the same requests at the same times.

    Each run is stored when it is finished: after Ctrl-C, --resume continues.
    """
    if ctx.invoked_subcommand is not None:
        return
    _check_engine(ctx, given["engine"])
    check_outputs({"--output": output, "--html": html_path}, [given["trace"] or Path()])
    from ragcache_core.bench.comparison import run_comparison
    from ragcache_core.bench.engines import EXACT
    from ragcache_core.bench.options import BenchOptions, prepare
    from ragcache_core.bench.results import Results, check_is_new
    from ragcache_core.reports.machine import machine

    check_is_new(output, resume=resume)
    numbers, are_shares = rates
    options = BenchOptions(
        compare=tuple(compare.split(",")) if compare else EXACT,
        rates=numbers,
        are_shares=are_shares,
        host_memory=() if host_memory is None else tuple(host_memory.split(",")),
        **given,
    )
    prepared = prepare(options)
    results = Results.open(output, prepared.facts, machine(), resume=resume)
    try:
        with _Progress("bench", unit="requests") as progress:
            run_comparison(prepared.comparison, results, prepared.prompts.__getitem__, prepared.open_engine, progress)
    except (KeyboardInterrupt, SystemExit):
        click.echo(f"ragcache: {len(results.runs)} runs are finished: add --resume to continue", err=True)
        raise
    finally:  # after an interruption too
        if results.runs:
            _report(results, html_path, as_json=as_json)
            say_written(output)


def _drawable(html_path: Path | None) -> Path | None:
    if html_path is not None:
        require_matplotlib("--html")
    return html_path


def _check_engine(ctx: click.Context, engine: str) -> None:
    """Reject options that do not apply to a running server."""
    if engine == "launch":
        return
    for param in ctx.command.params:
        is_given = ctx.get_parameter_source(param.name or "") is not ParameterSource.DEFAULT
        if param.name in _OF_A_LAUNCH and is_given:
            raise click.UsageError(
                f"{param.opts[0]} configures a launched engine, but --engine names a running server: "
                f"leave {param.opts[0]} out."
            )


@bench.command(
    short_help="Print and plot the results of a comparison.",
    examples=[
        "ragcache bench report build/compare.json --html build/compare.html",
    ],
)
@click.argument("results", type=click.Path(path_type=Path), metavar="OUT")
@_html_option
def report(results: Path, html_path: Path | None, as_json: bool) -> None:
    """Print the tables of the comparison in OUT, a file of 'ragcache bench'; measure nothing."""
    from ragcache_core.bench.results import Results

    check_output("--html", html_path, [results])
    _report(Results.read(results), html_path, as_json=as_json)


def _report(results: Results, html_path: Path | None, *, as_json: bool) -> None:
    """Print the tables, and write the page."""
    from ragcache_core.bench.report import summarise, tables, warnings, write_report

    summary, options = summarise(results), results.options
    for warning in warnings(options["seeds"], options["requests"]):
        click.echo(f"ragcache: warning: {warning}", err=True)
    if as_json:
        whole = {name: value for name, value in results.to_dict().items() if name != "runs"}
        print_json({**whole, "summary": summary.to_dict()})
    else:
        click.echo(", ".join(f"{name} {value}" for name, value in results.machine.items()))
        for table in tables(summary, results.rates_rps):
            click.echo("\n" + table.text())
    paths = [] if html_path is None else write_report(html_path, results)
    if paths:
        click.echo("ragcache: written to " + ", ".join(map(str, paths)), err=True)


class _Progress(Bar):
    """A bar of requests that names the current engine."""

    def plan(self, num_requests: int) -> None:
        self.move_to(0, num_requests)
