"""The command line of a benchmark of several parts: what to measure, a progress bar, a table, a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from benchmarks.report import BenchmarkPlan, Goals, Part, key_of, merged, read_report, table, to_json
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

    With --resume it goes on after the parts that an earlier run at this commit has measured with the same seeds. With
    ``keeps_runs`` parts also keep what is finished of them in ``Plan.kept_at``. With ``part_minutes``, a part's longest
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
    @click.option(
        "--seed",
        "seeds",
        default=(0,),
        show_default=True,
        multiple=True,
        type=click.IntRange(min=0),
        help="Of everything that is drawn at random; may be repeated, and all parts run with the first one first.",
    )
    @click.option("--quick", is_flag=True, help="Small sizes, to see that it runs; the figures mean nothing.")
    @click.option("--only", multiple=True, type=click.Choice(list(parts)), help="Measure this part; may be repeated.")
    @click.option("--resume", is_flag=True, help="Go on with what was finished when it was interrupted.")
    @click.option("--output", default=f"build/{name}.json", show_default=True, type=click.Path(path_type=Path))
    def main(
        model: str,
        corpus: Path,
        seeds: tuple[int, ...],
        quick: bool,
        only: tuple[str, ...],
        resume: bool,
        output: Path,
        minutes: float | None = None,
    ) -> None:
        latest_start_s = None
        if minutes is not None and part_minutes is not None:
            latest_start_s = time.monotonic() + 60 * (minutes - part_minutes)
        kept = {seed: output.with_name(key_of(output.name, seed) + ".runs.jsonl") for seed in seeds if keeps_runs}
        for path in kept.values():
            if path.exists() and not resume:
                raise click.UsageError(
                    f"{path} keeps what an interrupted run finished: go on with it by --resume (make: RESUME=1), or "
                    "delete it."
                )
        facts = {**machine(), "model": model, "quick": quick}
        report = read_report(output) if only or resume else {}
        wanted = {key_of(name, seed): (name, seed) for seed in seeds for name in only or parts}
        measured = {each: part for each, part in report.get("parts", {}).items() if facts.items() <= part.items()}
        missing = [each for each in wanted if not (resume and each in measured)]
        found = {
            seed: _figures(p for each, p in measured.items() if p["seed"] == seed and each not in missing)
            for seed in seeds
        }
        left_out: Sequence[str] = ()
        with tqdm(total=len(missing), desc=name, bar_format="{desc} {n}/{total} [{elapsed}]", disable=None) as bar:
            for number, key in enumerate(missing):
                if number and latest_start_s is not None and time.monotonic() > latest_start_s:
                    left_out = missing[number:]
                    break
                part_name, seed = wanted[key]
                plan = BenchmarkPlan(model, corpus, seed, quick, bar.set_description_str, kept.get(seed), found[seed])
                started_s = time.perf_counter()
                part = to_json(parts[part_name](plan), {**facts, "seed": seed})
                part["seconds"] = round(time.perf_counter() - started_s, 1)
                report = merged(report, part_name, part, goals)
                found[seed] |= _figures([part])
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
                bar.update()
        for path in kept.values():
            path.unlink(missing_ok=True)
        click.echo(", ".join(f"{key} {value}" for key, value in facts.items()))
        shown = {each: report["parts"][each] for each in wanted if each not in left_out}
        for each, part in shown.items():
            click.echo(f"{each}: warm-up: {part['warm_up']}; {part['seconds']} s")
        for seed in seeds:
            figures = [figure for part in shown.values() if part["seed"] == seed for figure in part["figures"]]
            if figures:
                click.echo(f"\nseed {seed}:\n" + table(figures, goals))
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
