"""``python -m benchmarks.papers``: published numbers beside ours, in simulation."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from benchmarks.papers.figures import FIGURES, measure, paper_report, to_dict
from benchmarks.papers.runs import PaperRuns
from ragcache_core.runtime.terminal import Bar
from ragcache_core.sim.sweep import Journal

_QUICK_REQUESTS = 120
_EPILOG = """\b
Examples:
  python -m benchmarks.papers "table 2"
  python -m benchmarks.papers "figure 6" --searches build/traces/monday.jsonl
  python -m benchmarks.papers "figure 13" "figure 15" --seeds 5 --plot load.png
  python -m benchmarks.papers --jobs 4 --plot build/bench-papers.html
  python -m benchmarks.papers --quick      (to see that it runs; the figures mean nothing)
"""


@click.command(epilog=_EPILOG)
@click.argument("names", nargs=-1, type=click.Choice(list(FIGURES)), metavar="[FIGURE]...")
@click.option("--seeds", "num_seeds", default=3, show_default=True, type=click.IntRange(1), help="Traces of each kind.")
@click.option(
    "--requests",
    "num_requests",
    type=click.IntRange(1),
    help="Requests of each run. [default: those of one hour, as in the papers]",
)
@click.option("--jobs", type=click.IntRange(1), help="Runs at a time. [default: one for each core]")
@click.option("--quick", is_flag=True, help=f"One seed and {_QUICK_REQUESTS} requests; the figures mean nothing.")
@click.option(
    "--searches",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Recorded searches for Figure 6: a trace of 'ragcache trace import'. May be repeated.",
)
@click.option(
    "--questions",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Questions for Figure 6: a file of 'ragcache quality', whose documents are the corpus. [default: the demo's]",
)
@click.option("--markdown", is_flag=True, help="Print sections of a page.")
@click.option(
    "--output", default="build/bench-papers.json", show_default=True, type=click.Path(path_type=Path, dir_okay=False)
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Plots: .png, .svg, or a page .html.")
@click.option("--resume", is_flag=True, help="Continue with the finished runs of an interrupted call.")
def main(
    names: tuple[str, ...],
    num_seeds: int,
    num_requests: int | None,
    jobs: int | None,
    quick: bool,
    searches: tuple[Path, ...],
    questions: Path | None,
    markdown: bool,
    output: Path,
    plot: Path | None,
    resume: bool,
) -> None:
    """Simulate FIGUREs of the papers, by default all, and print their numbers beside ours.

    Each names its settings, how many rows agree, why others do not, and the command that measures the same on a real
    engine. The text's claims take the place of numbers that a paper only plots.
    """
    journal = Journal(output.with_name(output.name + ".runs.jsonl"))
    finished = journal.read()
    if finished and not resume:
        raise click.UsageError(f"{journal.path} holds finished runs: continue with --resume, or delete the file.")
    if quick:
        num_seeds, num_requests = 1, num_requests or _QUICK_REQUESTS
    output.parent.mkdir(parents=True, exist_ok=True)
    figures = []
    with _FigureProgress("simulating", unit="requests") as bar:
        runs = PaperRuns(
            num_seeds=num_seeds,
            num_requests=num_requests,
            jobs=jobs or os.cpu_count() or 1,
            finished=finished,
            journal=journal,
            on_plan=bar.plan,
            on_requests=bar.advance,
            searches=searches,
            questions=questions,
        )
        for figure in measure(names or FIGURES, runs):
            figures.append(figure)
            click.echo((figure.markdown() if markdown else figure.text()) + "\n")
            output.write_text(json.dumps(to_dict(figures, runs), indent=2) + "\n", encoding="utf-8")
    journal.remove()
    if plot is not None:
        paper_report(figures, num_seeds, num_requests).save(plot)
    if num_requests is not None:
        click.echo(
            f"{num_requests:,} requests a run are not the hour of the papers: no row's verdict is valid", err=True
        )
    click.echo(f"written to {output}")


class _FigureProgress(Bar):
    """A bar of simulated requests; its length grows with the runs of each figure."""

    def plan(self, num_requests: int) -> None:
        self.move_to(self.num_done, (self.total or 0) + num_requests)


if __name__ == "__main__":
    main()
