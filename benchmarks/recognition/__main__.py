"""``python -m benchmarks.recognition``: recall, precision, processor time and memory of recognition."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from tqdm import tqdm

from benchmarks.recognition.measure import accuracies, cost
from benchmarks.recognition.tokenizers import NAMES
from ragcache_core.reports.machine import machine


@click.command()
@click.option("--tokenizer", "names", multiple=True, type=click.Choice(NAMES), help="All by default.")
@click.option("--prompts", default=100, show_default=True, type=click.IntRange(1), help="Prompts of each layout.")
@click.option("--documents", "sizes", multiple=True, default=(1_000, 10_000, 100_000), show_default=True, type=int)
@click.option("--output", default="build/bench-recognition.json", show_default=True, type=click.Path(path_type=Path))
def main(names: tuple[str, ...], prompts: int, sizes: tuple[int, ...], output: Path) -> None:
    """Measure which registered documents are recognised in prompts, and what that costs."""
    rows = []
    click.echo(f"{'tokenizer':14} {'layout':18} {'documents':>9} {'recall':>7} {'precision':>9}")
    for name in tqdm(names or NAMES, desc="tokenizers", disable=None):
        for row in accuracies(name, prompts):
            rows.append({**asdict(row), "recall": row.recall, "precision": row.precision})
            click.echo(f"{row.tokenizer:14} {row.layout:18} {row.num_shown:9} {row.recall:7.4f} {row.precision:9.4f}")
    costs = []
    click.echo(f"{'documents':>9} {'ms of CPU':>9} {'us each':>8} {'bytes':>6} {'of arrays':>9} {'recall':>7}")
    for size in sizes:
        measured = cost(size)
        costs.append(asdict(measured))
        click.echo(
            f"{size:9} {measured.find_ms:9.3f} {measured.register_us:8.0f} {measured.process_bytes:6.0f} "
            f"{measured.array_bytes:9.0f} {measured.recall:7.4f}"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"machine": machine(), "accuracy": rows, "cost": costs}, indent=1, default=str))


if __name__ == "__main__":
    main()
