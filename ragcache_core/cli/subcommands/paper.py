"""``ragcache bench paper``: the paper's numbers beside ours, in simulation."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ragcache_core.cli.command import Command, print_json
from ragcache_core.cli.output import check_outputs, check_plot, output_option, write_json
from ragcache_core.cli.subcommands.sweep import clear_journal, read_finished
from ragcache_core.runtime.terminal import Bar

_FIGURES = ("13", "14", "15", "16", "17", "18", "19")
_TABLES = ("2", "3", "4")
_CACHE_CRAFT = ("22", "24")
_QUICK_REQUESTS = 120


@click.command(
    cls=Command,
    short_help="Put the RAGCache paper's numbers beside ours.",
    examples=[
        "ragcache bench paper --table 2",
        "ragcache bench paper --figure 13 --figure 15 --seeds 5 --plot load.png",
        "ragcache bench paper --all --jobs 4 --output build/bench-paper.json --plot build/bench-paper.html",
        "ragcache bench paper --all --quick      (to see that it runs; the figures mean nothing)",
    ],
)
@click.option("--figure", "figures", multiple=True, type=click.Choice(_FIGURES), help="A figure; may be repeated.")
@click.option("--table", "tables", multiple=True, type=click.Choice(_TABLES), help="A table; may be repeated.")
@click.option(
    "--cache-craft",
    "cache_craft",
    multiple=True,
    type=click.Choice(_CACHE_CRAFT),
    help="A figure of Cache-Craft's; may be repeated.",
)
@click.option("--all", "is_all", is_flag=True, help="All of them.")
@click.option(
    "--seeds",
    "num_seeds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    metavar="N",
    help="Traces of each kind.",
)
@click.option(
    "--requests",
    "num_requests",
    type=click.IntRange(1),
    metavar="N",
    help="Of every run. [default: those that arrive in an hour, as in the paper]",
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Runs at a time. [default: one for each core]")
@click.option("--quick", is_flag=True, help=f"One seed and {_QUICK_REQUESTS} requests; the figures mean nothing.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print sections of a page.")
@output_option("Where every row goes as soon as its figure is finished.")
@click.option(
    "--plot",
    "plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="OUT.png|.svg|.html",
    help="Our curves; a page for many.",
)
@click.option("--resume", is_flag=True, help="Go on with the runs that were finished when it was interrupted.")
def paper(
    figures: tuple[str, ...],
    tables: tuple[str, ...],
    cache_craft: tuple[str, ...],
    is_all: bool,
    num_seeds: int,
    num_requests: int | None,
    jobs: int | None,
    quick: bool,
    as_markdown: bool,
    as_json: bool,
    output: Path | None,
    plot: Path | None,
    resume: bool,
) -> None:
    """Simulate figures and tables of the RAGCache paper, and of Cache-Craft, and print their numbers beside ours.

    Each says with what it was simulated, how many rows agree, why others do not, and which command measures the same
    on a real engine. What the paper only plots is compared with what its text says of it. Interrupted by Ctrl-C, it
    keeps what is finished beside OUT, and goes on with --resume.
    """
    if as_json and as_markdown:
        raise click.UsageError("--json and --markdown both want standard output: give one of them.")
    kinds = {"figure": figures, "table": tables, "cache-craft": cache_craft}
    asked = {f"{kind} {number}" for kind, numbers in kinds.items() for number in numbers}
    if not asked and not is_all:
        raise click.UsageError("Name what to simulate: --figure N, --table N, or --all.")
    if resume and output is None:
        raise click.UsageError("--resume goes on with what is kept beside OUT: give --output OUT as well.")
    check_plot(plot)
    check_outputs({"--output": output, "--plot": plot})
    from ragcache_core.bench.paper.exhibits import EXHIBITS, measure, paper_report, to_dict
    from ragcache_core.bench.paper.runs import PaperRuns
    from ragcache_core.sim.sweep import Journal

    journal = None if output is None else Journal(output.with_name(output.name + ".runs.jsonl"))
    finished = {} if output is None or journal is None else read_finished(journal, output, is_resumed=resume)
    names = [name for name in EXHIBITS if is_all or name in asked]
    if quick:
        num_seeds, num_requests = 1, num_requests or _QUICK_REQUESTS
    exhibits = []
    try:
        with _Progress("simulating", unit="requests") as bar:
            runs = PaperRuns(
                num_seeds=num_seeds,
                num_requests=num_requests,
                jobs=jobs or os.cpu_count() or 1,
                finished=finished,
                journal=journal,
                on_plan=bar.plan,
                on_requests=bar.advance,
            )
            for name, exhibit in zip(names, measure(names, runs), strict=True):
                exhibits.append(exhibit)
                bar.say(f"{name} done")
                if not as_json:
                    click.echo((exhibit.markdown() if as_markdown else exhibit.text()) + "\n")
                if output is not None:
                    write_json(to_dict(exhibits, runs), output)
    except (KeyboardInterrupt, SystemExit):
        cure = "with --output OUT its runs would have been kept" if output is None else "add --resume to go on"
        click.echo(f"ragcache: {len(exhibits)} of {len(names)} figures are finished: {cure}", err=True)
        raise
    if as_json:
        print_json(to_dict(exhibits, runs))
    if journal is not None:
        clear_journal(journal, runs.keys)
    drawn = [one for exhibit in exhibits for one in exhibit.plots]
    if plot is not None and drawn:
        paper_report(exhibits, num_seeds, num_requests).save(plot)
    if num_requests is not None:
        few = f"{num_requests:,} requests each instead of an hour of them, which the figures' texts name"
        click.echo(f"ragcache: warning: {few}: whether a row agrees means nothing", err=True)
    for path in (output, plot if drawn else None):
        if path is not None:
            click.echo(f"ragcache: written to {path}", err=True)


class _Progress(Bar):
    """A bar of simulated requests, whose length grows as figures say what they need."""

    def plan(self, num_requests: int) -> None:
        self.move_to(self.num_done, (self.total or 0) + num_requests)
