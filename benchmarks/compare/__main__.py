"""``python -m benchmarks.compare``: ``ragcache bench`` with ``lmcache`` among its engines, and simulated runs.

``run`` takes the options of ``ragcache bench``, ``predict`` the results of a comparison and a profile of
``ragcache profile --steps``.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.compare.lmcache import LMCACHE
from benchmarks.compare.prediction import predict, table
from ragcache_core.bench import engines
from ragcache_core.bench.results import Results
from ragcache_core.cli.commands.bench import bench
from ragcache_core.sim.testbeds import load_testbed


@click.group(help=__doc__)
def main() -> None:
    """Add LMCache to the engines of ``ragcache bench``."""
    engines.BASELINES.setdefault(LMCACHE.name, LMCACHE)


@main.command("predict")
@click.argument("results", type=click.Path(path_type=Path))
@click.argument("profile")
def show_predictions(results: Path, profile: str) -> None:
    """Print simulated times and cached shares of the runs in RESULTS beside the measured ones."""
    click.echo(table(list(predict(Results.read(results), load_testbed(profile)))).text())


main.add_command(bench, "run")

if __name__ == "__main__":
    main()
