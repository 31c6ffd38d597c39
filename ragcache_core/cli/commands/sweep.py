"""``ragcache simulate sweep``: many policies, orders and capacities on the same traces, several at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragcache_core._version import __version__
from ragcache_core.cli.command import Command, options_in_cli_wording, print_json
from ragcache_core.cli.output import (
    check_outputs,
    check_plot,
    counting_requests,
    output_option,
    say_written,
    write_output,
)
from ragcache_core.cli.settings_options import Listed, field_helps, simulation_options
from ragcache_core.errors import ConfigError
from ragcache_core.ordering import DOCUMENT_ORDERS
from ragcache_core.sim.options import BELADY, ROUTINGS, SIMULATED_POLICIES, SimulationOptions

if TYPE_CHECKING:
    from ragcache_core.reports.page import Report, Table
    from ragcache_core.reports.plots import Plot
    from ragcache_core.sim.sweep import FinishedRun, Journal, SweepRun

_TIERS = {"host_tokens": "host memory", "gpu_tokens": "GPU", "disk_tokens": "disk"}
_CAPACITIES = tuple(_TIERS)
_AXES = {**_TIERS, "replicas": "replicas"}
_VARIED = ("policy", "order", "routing", "replicas", *_CAPACITIES)
_COLUMNS = (
    ("hit rate", "token_hit_rate", "{:.3f}"),
    ("documents", "document_hit_rate", "{:.3f}"),
    ("mean TTFT", "mean_ttft_s", "{:.3f} s"),
    ("p50", "p50_ttft_s", "{:.3f} s"),
    ("p99", "p99_ttft_s", "{:.3f} s"),
    ("requests/s", "throughput_rps", "{:.3f}"),
    ("busiest", "busiest_over_mean", "{:.2f}"),
)


_LISTED = {
    "policies": ("policy", SIMULATED_POLICIES, "pgdsf,lru,mixture"),
    "orders": ("order", DOCUMENT_ORDERS, "retrieval"),
    "gpu_tokens": ("gpu_tokens", (), "40960"),
    "host_tokens": ("host_tokens", (), "65536,262144,1048576"),
    "disk_tokens": ("disk_tokens", (), "0"),
    "replicas": ("replicas", (), "1"),
    "routing": ("routing", ROUTINGS, "joint"),
}
"""The options that take several values: the setting, its choices and the default of each."""


def _listed_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, (setting, choices, default) in reversed(_LISTED.items()):
        text = field_helps(SimulationOptions)[setting].removesuffix(".")
        command = click.option(
            "--" + name.replace("_", "-"),
            type=Listed(choices),
            default=default,
            show_default=True,
            metavar="X,X,...",
            help=f"{text}: {', '.join(choices)}." if choices else f"{text}.",
        )(command)
    return command


@click.command(
    cls=Command,
    short_help="Simulate many policies, orders and capacities.",
    examples=[
        "ragcache simulate sweep mmlu.jsonl --policies pgdsf,mixture,belady --output sweep.json --plot sweep.png",
        "ragcache simulate sweep a.jsonl b.jsonl --host-tokens 65536,262144,1048576 --jobs 4 --output sweep.json",
        "ragcache simulate sweep mmlu.jsonl --replicas 1,2,4,8 --routing round-robin,joint --orders cache_aware",
        "ragcache simulate sweep mmlu.jsonl --orders retrieval,cache_aware --plot sweep.html",
    ],
)
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TRACE...")
@_listed_options
@simulation_options(
    *("system_tokens", "cost_model", "queue", "window", "block_size", "retrieval_s", "max_batch"),
    *("overlaps_transfers", "chunk_reuse", "chunk_share", "warm_up"),
)
@click.option(
    "--jobs", type=click.IntRange(1), metavar="N", help="Number of simulations at a time. [default: one per core]"
)
@output_option(
    "Write options and summary of every run to this JSON file; until then, finished runs are in a file beside it."
)
@click.option(
    "--plot",
    "plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="OUT.png|.svg|.html",
    help="Plot TTFT and hit rate against the capacity that varies.",
)
@click.option("--resume", is_flag=True, help="Skip the runs that an earlier sweep into OUT finished.")
def sweep(
    traces: tuple[Path, ...],
    policies: tuple[str, ...],
    orders: tuple[str, ...],
    gpu_tokens: tuple[int, ...],
    host_tokens: tuple[int, ...],
    disk_tokens: tuple[int, ...],
    replicas: tuple[int, ...],
    routing: tuple[str, ...],
    jobs: int | None,
    output: Path | None,
    plot: Path | None,
    resume: bool,
    as_json: bool,
    **settings: Any,
) -> None:  # fmt: skip
    """Simulate every combination of policies, orders and capacities on each TRACE, several runs at a time.

    A trace is a file of 'ragcache trace'. After Ctrl-C, a sweep with --output keeps the finished runs, and --resume
    continues it. --resume also reuses runs of an earlier sweep with the same settings.
    """
    from ragcache_core.sim.sweep import Journal, plan

    if resume and output is None:
        raise click.UsageError("--resume continues the runs stored next to OUT: give --output OUT as well.")
    check_plot(plot)
    inputs = (*traces, Path(settings["cost_model"]))
    check_outputs({"--output": output, "--plot": plot}, inputs)
    journal = None if output is None else Journal(output.with_name(output.name + ".runs.jsonl"))
    finished = {} if output is None or journal is None else read_finished(journal, output, is_resumed=resume)
    axes = {"gpu_tokens": gpu_tokens, "host_tokens": host_tokens, "disk_tokens": disk_tokens}
    with options_in_cli_wording(sweep):
        base = SimulationOptions(**settings)
        num_requests = _count_requests(traces, base)
        runs = plan(num_requests, base, policies=policies, orders=orders, replicas=replicas, routings=routing, **axes)
    done = _run(runs, finished, journal, num_requests, jobs or os.cpu_count() or 1)
    notes = notes_on(done, leaves_out_belady=BELADY in policies and ("cache_aware" in orders or max(replicas) > 1))
    whole = {"version": __version__, "notes": notes, "runs": [run.to_dict() for run in done]}
    if output is not None and journal is not None:
        write_output(whole, output)
        clear_journal(journal, {run.key for run in done})
    if as_json:
        print_json(whole)
    else:
        click.echo(table(done).text())
    for note in notes:
        click.echo(f"ragcache: {note}", err=True)
    if plot is not None:
        report(done, {str(path): count for path, count in num_requests.items()}, notes).save(plot)
        say_written(plot)


def _count_requests(traces: Sequence[Path], base: SimulationOptions) -> dict[Path, int]:
    """Return the number of requests of each trace; reject an invalid one before any run.

    Raises:
        TraceError: a line is broken. ConfigError: the options do not fit a trace.
    """
    from ragcache_core.sim.simulator import check_trace
    from ragcache_core.sim.testbeds import load_testbed
    from ragcache_core.sim.traces.trace import read_trace

    testbed = load_testbed(base.cost_model)
    num_requests = {}
    for path in traces:
        trace = read_trace(path)
        try:
            check_trace(trace, base, testbed)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        num_requests[path] = len(trace)
    return num_requests


def _run(
    runs: Sequence[SweepRun],
    finished: Mapping[str, FinishedRun],
    journal: Journal | None,
    num_requests: Mapping[Path, int],
    jobs: int,
) -> list[FinishedRun]:
    from ragcache_core.sim.sweep import run_all

    kept = dict(finished)

    def keep(run: FinishedRun) -> None:
        kept[run.key] = run
        if journal is not None:
            journal.append(run)

    to_do = [run for run in runs if run.key not in finished]
    if len(to_do) < len(runs):
        click.echo(f"ragcache: {len(runs) - len(to_do)} of {len(runs)} runs are finished already", err=True)
    try:
        with counting_requests("simulating", sum(num_requests[run.trace] for run in to_do)) as report:
            return run_all(runs, jobs=jobs, finished=finished, keep=keep, report=report)
    except (KeyboardInterrupt, SystemExit):
        num_done = sum(run.key in kept for run in runs)
        cure = "add --resume to go on" if journal is not None else "with --output OUT they would have been kept"
        click.echo(f"ragcache: {num_done} of {len(runs)} runs are finished: {cure}", err=True)
        raise


def clear_journal(journal: Journal, keys: AbstractSet[str]) -> None:
    """Remove the journal, unless it has runs besides ``keys`` that no other file has."""
    num_others = len(journal.read().keys() - keys)
    if num_others:
        click.echo(f"ragcache: {journal.path} keeps {num_others} finished runs that were not asked for", err=True)
    else:
        journal.remove()


def read_finished(journal: Journal, output: Path, *, is_resumed: bool) -> dict[str, FinishedRun]:
    """Return the finished runs of an interrupted sweep, and of the last complete one.

    Raises:
        ConfigError: runs of an interrupted sweep, or of the last whole one, would be lost.
    """
    from ragcache_core.sim.sweep import FinishedRun

    interrupted = journal.read()
    if not is_resumed:
        if interrupted:
            raise ConfigError(
                f"{journal.path} holds {len(interrupted)} finished runs of an interrupted sweep: "
                "add --resume to go on, or delete that file to start again"
            )
        return {}
    try:
        whole = [FinishedRun.from_dict(run) for run in json.loads(output.read_bytes())["runs"]]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        whole = []
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be read ({error.strerror}): see to that, or name another file with --output"
        ) from error
    return {run.key: run for run in whole} | interrupted


def table(runs: Sequence[FinishedRun]) -> Table:
    """Return a table with a row per run, with the settings that differ between runs."""
    from ragcache_core.reports.page import Table

    varied = _varied(runs)
    heads = [*(name.removesuffix("_tokens") for name in varied), *(head for head, _, _ in _COLUMNS)]
    rows = [
        [*(_shown(run, name) for name in varied), *(form.format(run.summary[key]) for _, key, form in _COLUMNS)]
        for run in runs
    ]
    return Table("", heads, rows, len(varied))


def plots(runs: Sequence[FinishedRun]) -> list[Plot]:
    """Return mean TTFT and hit rate over the varying capacity for each trace; bars if none varies."""
    from ragcache_core.reports.plots import bars, lines

    varied = [name for name in _varied(runs) if name != "trace"]
    axis = next((name for name in _AXES if name in varied), None)
    shown = []
    for trace in dict.fromkeys(run.trace for run in runs):
        of_trace = sorted((run for run in runs if run.trace == trace), key=lambda run: run.options[axis] if axis else 0)
        for title, y_label, key in (
            ("Mean time to first token", "mean TTFT, s", "mean_ttft_s"),
            ("Hit rate", "share of document tokens", "token_hit_rate"),
        ):
            titled = f"{title}, {Path(trace).name}"
            if axis is None:
                groups: dict[str, dict[str, float]] = {}
                for run in of_trace:
                    group = ", ".join(_shown(run, name) for name in varied if name != "policy")
                    groups.setdefault(group, {})[run.options["policy"]] = run.summary[key]
                shown.append(bars(titled, y_label, groups))
                continue
            series: dict[str, list[tuple[float, float]]] = {}
            for run in of_trace:
                name = ", ".join(_shown(run, name) for name in varied if name != axis)
                series.setdefault(name, []).append((run.options[axis], run.summary[key]))
            is_log = min(run.options[axis] for run in runs) > 0
            label = f"{_TIERS[axis]}, tokens" if axis in _TIERS else axis
            shown.append(lines(titled, label, y_label, series, log_x=is_log))
    return shown


def report(runs: Sequence[FinishedRun], num_requests: Mapping[str, int], notes: Sequence[str]) -> Report:
    """Return plots and table of a sweep, with its settings and ``notes``; ``num_requests`` by trace."""
    from ragcache_core.reports.page import Report, worded

    options, varied = dict(runs[0].options), _varied(runs)
    names = dict.fromkeys(run.trace for run in runs)
    traces = ", ".join(f"{Path(trace).name} ({num_requests[trace]:,} requests)" for trace in names)
    sizes = [
        f"{words} {options[name]:,} tokens" if options[name] else f"no {words}"
        for name, words in _TIERS.items()
        if name not in varied
    ]
    batch = "one request at a time" if options["max_batch"] == 1 else f"batches of {options['max_batch']}"
    warm_up = f"; the first {options['warm_up']:,} requests do not count" if options["warm_up"] else ""
    lead = [
        f"Simulated in virtual time: {traces}{warm_up}.",
        f"Cost model {Path(options['cost_model']).name}; {', '.join(sizes)}; {batch}, queue {options['queue']}, "
        f"blocks of {options['block_size']} tokens.",
    ]
    of_all = {
        name: list(dict.fromkeys(run.options[name] for run in runs)) if name in varied else worded(name, value)
        for name, value in options.items()
    }
    return Report("Policies side by side", lead, plots(runs), [table(runs)], notes, options=of_all)


def notes_on(runs: Sequence[FinishedRun], *, leaves_out_belady: bool) -> list[str]:
    """Return the notes of all runs, each sentence once."""
    from ragcache_core.sim.sweep import above_belady

    left_out = "there is no belady with order cache_aware or replicas, which decide while they run"
    notes = [*dict.fromkeys(note for run in runs for note in run.notes), *above_belady(runs)]
    return [*notes, left_out] if leaves_out_belady else notes


def _varied(runs: Sequence[FinishedRun]) -> list[str]:
    names = ["trace"] if len({run.trace for run in runs}) > 1 else []
    return names + [n for n in _VARIED if n == "policy" or len({run.options[n] for run in runs}) > 1]


def _shown(run: FinishedRun, name: str) -> str:
    if name == "trace":
        return Path(run.trace).name
    value = run.options[name]
    return f"{value:,}" if isinstance(value, int) else str(value)
