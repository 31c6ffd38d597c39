"""``python -m benchmarks.server_cost``: the processor time of a request in an engine's processes, over plain vLLM's."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import click
from tqdm import tqdm

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.server_cost.engines import ENGINES
from benchmarks.server_cost.measure import ServerCost, compare, count_slices, group_engines
from ragcache_core.reports.machine import machine

_EPILOG = """\b
Examples:
  python -m benchmarks.server_cost
  python -m benchmarks.server_cost --requests 20 --engine vllm --engine ragcache-host
  python -m benchmarks.server_cost --in-flight 1
"""
_COLUMNS = f"{'ms':>8} {'ratio':>6} {'extra':>8}"
_HEADER = (
    f"{'':18} {'':14} {'API server':>24}   {'engine core':>24}\n"
    f"{'scene':18} {'engine':14} {_COLUMNS}   {_COLUMNS} {'cached':>8}"
)


@click.command(epilog=_EPILOG)
@click.option("--engine", "engines", multiple=True, type=click.Choice(ENGINES), help="The first is the baseline.")
@click.option("--requests", default=200, show_default=True, type=click.IntRange(1), help="Of each scene and engine.")
@click.option(
    "--in-flight", default=4, show_default=True, type=click.IntRange(1), help="Requests of an engine at once."
)
@click.option("--at-once", type=click.IntRange(2), help="Engines that run at once. [default: as many as memory holds]")
@click.option("--output", default="build/server-cost.json", show_default=True, type=click.Path(path_type=Path))
def main(engines: tuple[str, ...], requests: int, in_flight: int, at_once: int | None, output: Path) -> None:
    """Measure the processor time of a request in the API server's and the engine core's process.

    Prompts have about 3,900 tokens, new or in the GPU KV cache, and answers one token; the model has one layer. The
    engines take turns. vllm-control is plain vLLM again: its ratio shows the noise. Figures are medians. With one
    request in flight an engine becomes idle after each, and RAGCache reports its tiers to the API server each time.
    """
    try:
        groups = group_engines(engines or ENGINES, at_once)  # type: ignore[arg-type]
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    rows: list[ServerCost] = []
    with tqdm(total=count_slices(groups, requests), desc="starting engines", disable=None) as bar:

        def on_slice(scene: str) -> None:
            bar.set_description_str(scene)
            bar.update()

        tqdm.write(_HEADER)
        for measured in compare(groups, requests, on_slice, in_flight=in_flight):
            rows += measured
            for row in measured:
                tqdm.write(_line(row))
            output.parent.mkdir(parents=True, exist_ok=True)
            report = {
                **machine(),
                "requests": requests,
                "in_flight": in_flight,
                "rows": [asdict(each) for each in rows],
            }
            output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    click.echo(f"written to {output}")


def _line(row: ServerCost) -> str:
    costs = "   ".join(
        f"{cost.time_ms:8.2f} {cost.ratio:6.2f} {cost.extra_ms:+8.2f}" for cost in (row.api_server, row.engine_core)
    )
    return f"{row.scene:18} {row.engine:14} {costs} {row.cached_tokens:8.0f}"


if __name__ == "__main__":
    main()
