"""The command line of a benchmark of several parts: what to measure, a progress bar, a table, a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from benchmarks.report import BenchmarkPlan, Goals, Part, merged, read_report, table, to_json
from ragcache_core.reports.machine import machine

_MINUTES_HELP = "Start no part that could end later; at least one runs."


def benchmark(
    name: str,
    summary: str,
    parts: Mapping[str, Callable[[BenchmarkPlan], Part]],
    goals: Goals,
    examples: str,
    *,
    keeps_runs: bool = False,
    part_minutes: float | None = None,
) -> click.Command:
    """Return the command that measures ``parts`` and writes ``build/<name>.json``.

    With --resume it goes on after the parts that an earlier run at this commit has measured. With ``keeps_runs`` parts
    also keep what is finished of them in ``Plan.kept_at``. With ``part_minutes``, a part's longest
    time, the command has --minutes and starts no part that could end later.
    """

    @click.command(help=f"{summary}\n\nWith --only, the file of an earlier run keeps the figures of its other parts.")
    @click.option("--model", default="examples/demo_model", show_default=True, help="Folder of the model to use.")
    @click.option(
        "--corpus",
        default="examples/demo_corpus",
        show_default=True,
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Folder of .md files that the prompts are made of.",
    )
    @click.option("--seed", default=0, show_default=True, help="Of everything that is drawn at random.")
    @click.option("--quick", is_flag=True, help="Small sizes, to see that it runs; the figures mean nothing.")
    @click.option("--only", multiple=True, type=click.Choice(list(parts)), help="Measure this part; may be repeated.")
    @click.option("--resume", is_flag=True, help="Go on with what was finished when it was interrupted.")
    @click.option("--output", default=f"build/{name}.json", show_default=True, type=click.Path(path_type=Path))
    def main(
        model: str,
        corpus: Path,
        seed: int,
        quick: bool,
        only: tuple[str, ...],
        resume: bool,
        output: Path,
        minutes: float | None = None,
    ) -> None:
        latest_start_s = None
        if minutes is not None and part_minutes is not None:
            latest_start_s = time.monotonic() + 60 * (minutes - part_minutes)
        kept_at = output.with_name(output.name + ".runs.jsonl") if keeps_runs else None
        if kept_at is not None and kept_at.exists() and not resume:
            raise click.UsageError(
                f"{kept_at} keeps what an interrupted run finished: go on with it by --resume (make: RESUME=1), or "
                "delete it."
            )
        facts = {**machine(), "model": model, "seed": seed, "quick": quick}
        report = read_report(output) if only or resume else {}
        names = only or tuple(parts)
        measured = {each: part for each, part in report.get("parts", {}).items() if facts.items() <= part.items()}
        missing = [each for each in names if not (resume and each in measured)]
        found = _figures(part for each, part in measured.items() if each not in missing)
        left_out: Sequence[str] = ()
        with tqdm(total=len(missing), desc=name, bar_format="{desc} {n}/{total} [{elapsed}]", disable=None) as bar:
            plan = BenchmarkPlan(model, corpus, seed, quick, bar.set_description_str, kept_at, found)
            for number, part_name in enumerate(missing):
                if number and latest_start_s is not None and time.monotonic() > latest_start_s:
                    left_out = missing[number:]
                    break
                started_s = time.perf_counter()
                part = to_json(parts[part_name](plan), facts)
                part["seconds"] = round(time.perf_counter() - started_s, 1)
                report = merged(report, {part_name: part}, goals)
                found |= _figures([part])
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
                bar.update()
        if kept_at is not None:
            kept_at.unlink(missing_ok=True)
        click.echo(", ".join(f"{key} {value}" for key, value in facts.items()))
        names = tuple(each for each in names if each not in left_out)
        for part_name in names:
            part = report["parts"][part_name]
            click.echo(f"{part_name}: warm-up: {part['warm_up']}; {part['seconds']} s")
        figures = (figure for part_name in names for figure in report["parts"][part_name]["figures"])
        click.echo("\n" + table(figures, goals))
        click.echo(f"\nwritten to {output}")
        if left_out:
            left = ", ".join(left_out)
            click.echo(f"not run within {minutes:g} minutes: {left}; --resume (make: RESUME=1) runs them")

    if part_minutes is not None:
        option = click.Option(
            ["--minutes"], default=10.0, show_default=True, type=click.FloatRange(0, min_open=True), help=_MINUTES_HELP
        )
        main.params.append(option)
    main.epilog = f"\b\nExamples:\n{examples}"
    return main


def _figures(parts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    return {figure["key"]: figure["value"] for part in parts for figure in part["figures"]}
