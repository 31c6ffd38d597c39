"""``make bench``: measure, print one table each, write ``build/bench.json``."""

from __future__ import annotations

import json
from pathlib import Path

import click
from tqdm import tqdm

from benchmarks.retrieval.searches import (
    SearchComparison,
    compare_filtered_search,
    compare_staged_search,
    settled_shares,
    table,
)
from ragcache_core.reports.machine import machine

_EPILOG = """\b
Examples:
  python -m benchmarks.retrieval
  python -m benchmarks.retrieval --vectors 1000000 --dimension 384
"""


@click.command(epilog=_EPILOG)
@click.option("--vectors", default=100_000, show_default=True, type=click.IntRange(1_000), help="Vectors in an index.")
@click.option("--dimension", default=128, show_default=True, type=click.IntRange(8), help="Their dimension.")
@click.option("--pairs", default=100, show_default=True, type=click.IntRange(5), help="Pairs of runs per figure.")
@click.option("--seed", default=0, show_default=True, help="Of the vectors.")
@click.option("--output", default="build/bench.json", show_default=True, help="Where to write the figures.")
def main(vectors: int, dimension: int, pairs: int, seed: int, output: str) -> None:
    """Measure staged search against plain search, and what filters cost."""
    results: dict[str, list[SearchComparison]] = {}
    with tqdm(desc="bench", bar_format="{desc} [{elapsed}]", disable=None) as bar:
        results["staged search"] = compare_staged_search(
            vectors, dimension, pairs=pairs, seed=seed, report=bar.set_description_str
        )
        results |= compare_filtered_search(vectors, dimension, pairs=pairs, seed=seed, report=bar.set_description_str)
        settled = settled_shares(vectors, dimension, queries=200, seed=seed)
    facts = machine()
    click.echo(", ".join(f"{key} {value}" for key, value in facts.items()))
    heads = {
        "staged search": ("plain", "staged"),
        "filtered, Faiss with a selector": ("plain", "staged"),
        "filtered, all documents": ("all", "filtered"),
    }
    for name, rows in results.items():
        click.echo(f"\n{name}\n{table(rows, *heads[name])}")
    click.echo("\nquestions whose first two documents stand after each stage, by the share that a filter selects")
    for share, stages in settled.items():
        click.echo(f"{share:>5}  {'  '.join(f'{each:.1%}' for each in stages)}")
    report = {
        "machine": facts,
        "seed": seed,
        "filtered, settled": settled,
        **{k: [row.to_dict() for row in v] for k, v in results.items()},
    }
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    click.echo(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
