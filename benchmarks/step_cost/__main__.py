"""``python -m benchmarks.step_cost``: what a step and a request cost the scheduler's thread, beside plain vLLM."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import click
from tqdm import tqdm

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.step_cost.measure import StepCost, compare, profile
from benchmarks.step_cost.scenes import SCENES
from benchmarks.step_cost.schedulers import ENGINES
from ragcache_core.reports.machine import machine

_EPILOG = """\b
Examples:
  python -m benchmarks.step_cost
  python -m benchmarks.step_cost --scene "decode 256, full" --engine vllm --engine ragcache-host
  python -m benchmarks.step_cost --profile ragcache-host --scene "prompt 4000, new"
"""


@click.command(epilog=_EPILOG)
@click.option("--scene", "scenes", multiple=True, type=click.Choice(list(SCENES)), help="Scene to run; all by default.")
@click.option("--engine", "engines", multiple=True, type=click.Choice(ENGINES), help="The first is the baseline.")
@click.option("--rounds", default=12, show_default=True, type=click.IntRange(1), help="Slices of each engine.")
@click.option("--profile", "profiled", type=click.Choice(ENGINES), help="Print where this engine spends its time.")
@click.option("--lines", default=40, show_default=True, type=click.IntRange(1), help="Functions that --profile prints.")
@click.option("--output", default="build/step-cost.json", show_default=True, type=click.Path(path_type=Path))
def main(
    scenes: tuple[str, ...],
    engines: tuple[str, ...],
    rounds: int,
    profiled: str | None,
    lines: int,
    output: Path,
) -> None:
    """Measure the processor time of the scheduler's thread for a step and for a request, without a model.

    Engines of one scene run in one process by turns. Figures are medians; compare ratios, not times.
    """
    names = scenes or tuple(SCENES)
    if profiled is not None:
        for name in names:
            click.echo(profile(name, profiled, rounds, lines))  # type: ignore[arg-type]
        return
    rows: list[StepCost] = []
    click.echo(f"{'scene':24} {'engine':14} {'us':>8}          {'ratio':>6} {'extra us':>9}")
    for name in tqdm(names, desc="scenes", disable=None):
        measured = compare(name, engines or ENGINES, rounds)  # type: ignore[arg-type]
        rows += measured
        for row in measured:
            tqdm.write(
                f"{row.scene:24} {row.engine:14} {row.time_us:8.0f} /{row.unit:8} {row.ratio:6.2f} {row.extra_us:+9.0f}"
            )
        output.parent.mkdir(parents=True, exist_ok=True)
        report = {**machine(), "rounds": rounds, "rows": [asdict(each) for each in rows]}
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    click.echo(f"written to {output}")


if __name__ == "__main__":
    main()
