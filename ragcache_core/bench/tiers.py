"""``make bench-tiers``: what the tiers bring, what they cost, and whether they are right; ``build/bench-tiers.json``.

Every figure is measured beside its baseline in the same run. Nothing is asserted: the table says which goals are met.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import click
from tqdm import tqdm

from ragcache_core.bench.measure import machine
from ragcache_core.bench.tiers_exact import measure_exactness
from ragcache_core.bench.tiers_goals import Part, Plan, merged, read_report, table, to_json
from ragcache_core.bench.tiers_idle import measure_idle
from ragcache_core.bench.tiers_policy import measure_policies
from ragcache_core.bench.tiers_share import measure_share, measure_share_by_policy, measure_swap_out
from ragcache_core.bench.tiers_store import measure_index, measure_killpoints
from ragcache_core.bench.tiers_tree import measure_decisions

PARTS: dict[str, Callable[[Plan], Part]] = {
    "decisions": measure_decisions,
    "index": measure_index,
    "killpoints": measure_killpoints,
    "policies": measure_policies,
    "exactness": measure_exactness,
    "share": measure_share,
    "share-by-policy": measure_share_by_policy,
    "swap-out": measure_swap_out,
    "idle": measure_idle,
}
_EPILOG = """\b
Examples:
  python -m ragcache_core.bench.tiers
  python -m ragcache_core.bench.tiers --quick --json build/smoke.json
  python -m ragcache_core.bench.tiers --only decisions --only idle
"""


@click.command(epilog=_EPILOG)
@click.option("--model", default="examples/demo_model", show_default=True, help="Folder of the model to measure with.")
@click.option(
    "--corpus",
    default="examples/demo_corpus",
    show_default=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of .md files that the prompts are made of.",
)
@click.option("--seed", default=0, show_default=True, help="Of everything that is drawn at random.")
@click.option("--quick", is_flag=True, help="Small sizes, to see that it runs; the figures mean nothing.")
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="Measure this part; may be repeated.")
@click.option(
    "--json", "json_path", default="build/bench-tiers.json", show_default=True, type=click.Path(path_type=Path)
)
def main(model: str, corpus: Path, seed: int, quick: bool, only: tuple[str, ...], json_path: Path) -> None:
    """Measure the tiers: exactness, cached share, decision time, throughput, copies, crashes, policies.

    With --only, the file of an earlier run keeps the figures of its other parts.
    """
    facts = {**machine(), "model": model, "seed": seed, "quick": quick}
    report = read_report(json_path) if only else {}
    names = only or tuple(PARTS)
    with tqdm(total=len(names), desc="bench-tiers", bar_format="{desc} {n}/{total} [{elapsed}]", disable=None) as bar:
        plan = Plan(model, corpus, seed, quick, bar.set_description_str)
        for name in names:
            started_s = time.perf_counter()
            part = to_json(PARTS[name](plan), facts)
            part["seconds"] = round(time.perf_counter() - started_s, 1)
            report = merged(report, {name: part})
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            bar.update()
    click.echo(", ".join(f"{key} {value}" for key, value in facts.items()))
    for name in names:
        click.echo(f"{name}: warm-up: {report['parts'][name]['warm_up']}; {report['parts'][name]['seconds']} s")
    click.echo("\n" + table(figure for name in names for figure in report["parts"][name]["figures"]))
    click.echo(f"\nwritten to {json_path}")


if __name__ == "__main__":
    main()
