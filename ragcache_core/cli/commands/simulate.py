"""``ragcache simulate``: a trace on one engine, or a fleet of them, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragcache_core.cli.command import Command, Group, options_in_cli_wording, print_json
from ragcache_core.cli.commands.sweep import sweep
from ragcache_core.cli.output import check_output, counting_requests, output_option, write_output
from ragcache_core.cli.settings_options import simulation_options

if TYPE_CHECKING:
    from ragcache_core.sim.result import SimulationResult


@click.command(
    cls=Command,
    short_help="Simulate a trace of requests on one engine or several.",
    examples=[
        "ragcache simulate mmlu.jsonl --policy pgdsf --host-tokens 262144 --output out.json",
        "ragcache simulate mmlu.jsonl --order cache_aware --queue cache-aware --per-request --output out.json",
        "ragcache simulate sysx.jsonl --chunk-reuse 0.3 --host-tokens 262144",
        "ragcache simulate mine.jsonl --max-batch 8 --cost-model profile.json",
        "ragcache simulate mmlu.jsonl --policy belady --warm-up 3000 --json | jq .summary",
        "ragcache simulate mmlu.jsonl --replicas 8 --routing joint --order cache_aware",
        "ragcache simulate mmlu.jsonl --replicas 8 --routing round-robin --json",
        "ragcache simulate sweep --help      (several policies and capacities at a time)",
    ],
)
@click.argument("trace", type=click.Path(path_type=Path), metavar="TRACE")
@simulation_options()
@click.option("--per-request", is_flag=True, help="Add a record of each request to the JSON.")
@output_option("Write options and summary to this JSON file.")
def run(trace: Path, per_request: bool, output: Path | None, as_json: bool, **settings: Any) -> None:
    """Simulate one engine, or --replicas of them, that serve TRACE, with RAGCache's own tree, policies and queue.

    TRACE is a file of 'ragcache trace'. The policy decides which blocks stay on the GPU, in host memory and on disk.
    TTFT counts from a request's arrival and includes its search. 'ragcache simulate sweep' runs many combinations.
    """
    from ragcache_core.sim.options import SimulationOptions
    from ragcache_core.sim.simulator import simulate as run_simulation
    from ragcache_core.sim.testbeds import load_testbed
    from ragcache_core.sim.traces.trace import read_trace

    if per_request and output is None and not as_json:
        raise click.UsageError("--per-request adds records to the JSON: give --output OUT or --json as well.")
    with options_in_cli_wording(run):
        options = SimulationOptions(**settings)
        load_testbed(options.cost_model)
    check_output("--output", output, (trace, Path(options.cost_model), Path(options.search or "")))
    requests = read_trace(trace)
    with options_in_cli_wording(run), counting_requests("simulating", len(requests)) as report:
        result = run_simulation(requests, options, progress=report, keeps_requests=per_request)
    for note in result.notes:
        click.echo(f"ragcache: {note}", err=True)
    if as_json:
        print_json(result.to_dict())
    else:
        click.echo(table(result))
    write_output(result.to_dict(), output)


class SimulateGroup(Group):
    """``simulate TRACE`` and its subcommands; a first word that is no subcommand is a trace."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context of a subcommand, or of a simulation."""
        if args and args[0] in self.commands:
            return super().make_context(info_name, args, parent, **extra)
        return run.make_context(info_name, args, parent, **extra)


@click.group(cls=SimulateGroup, short_help=run.short_help)
def simulate() -> None:
    """Simulate a trace, or many combinations of settings."""


simulate.add_command(sweep)


def table(result: SimulationResult) -> str:
    """Return the summary as text lines."""
    options, summary = result.options, result.summary
    tiers = {"gpu": options.gpu_tokens, "host": options.host_tokens, "disk": options.disk_tokens}
    sizes = ", ".join(f"{tier} {size:,}" for tier, size in tiers.items() if size)
    if options.policy == "infinite":
        sizes = "no limit"
    num_hits = max(sum(summary.hits_by_tier.values()), 1)
    shares = ", ".join(f"{tier} {hits / num_hits:.0%}" for tier, hits in summary.hits_by_tier.items() if tiers[tier])
    rows = [
        ("requests", f"{summary.num_requests:,}, {summary.throughput_rps:.3f} a second"),
        ("cache", f"{options.policy}, order {options.order}, queue {options.queue}; tokens: {sizes}"),
        *_fleet_rows(result),
        ("engine", f"{options.cost_model}, batches of {options.max_batch}, blocks of {options.block_size} tokens"),
        ("hit rate", f"{summary.token_hit_rate:.3f} of tokens, {summary.document_hit_rate:.3f} of documents"),
        *([("documents", f"hit on {shares}")] if any(summary.hits_by_tier.values()) else []),
        ("TTFT", f"mean {summary.mean_ttft_s:.3f} s, p50 {summary.p50_ttft_s:.3f}, p99 {summary.p99_ttft_s:.3f}"),
        *_chunk_rows(result),
        ("moved", f"{summary.swapped_out_tokens:,} tokens to the host, {summary.loaded_tokens:,} to the GPU"),
        ("reordered", f"documents of {summary.reordered_share:.1%}; overtaken at most {summary.max_overtaken} times"),
        ("decisions", f"p50 {summary.p50_decision_s * 1e6:.0f} us, p99 {summary.p99_decision_s * 1e6:.0f} us"),
    ]
    lines = [f"{name:11}{value}" for name, value in rows]
    return "\n".join([*lines, *_replica_lines(result)])


def _fleet_rows(result: SimulationResult) -> list[tuple[str, str]]:
    options, summary = result.options, result.summary
    rows = []
    if options.replicas > 1:
        busiest = f"the busiest computes {summary.busiest_over_mean:.2f} of the mean"
        rows.append(("replicas", f"{options.replicas}, routing {options.routing}; {busiest}"))
    return rows


def _replica_lines(result: SimulationResult) -> list[str]:
    """Return a line per replica below a header; empty for one engine."""
    if not result.replicas:
        return []
    line = "{:<9}{:>10}{:>10}{:>13}{:>13}{:>8}"
    lines = ["", line.format("replica", "requests", "hit rate", "mean TTFT", "p95", "busy")]
    for place, one in enumerate(result.replicas):
        times = (f"{one.mean_ttft_s:.3f} s", f"{one.p95_ttft_s:.3f} s")
        rate = f"{one.token_hit_rate:.3f}"
        lines.append(line.format(place, f"{one.num_requests:,}", rate, *times, f"{one.busy_share:.0%}"))
    return lines


def _chunk_rows(result: SimulationResult) -> list[tuple[str, str]]:
    options, summary = result.options, result.summary
    if options.chunk_reuse is None:
        return []
    counts = f"{summary.chunk_reused_tokens:,} tokens reused, {summary.chunk_recomputed_tokens:,} of theirs recomputed"
    return [("chunks", f"{counts}; {options.chunk_share:g} of host and disk are theirs")]
