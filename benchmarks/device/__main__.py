"""``make gpu-check``: the kernels and whole engines on a machine with a GPU; ``build/gpu-check.json``.

Parts are ordered by value. A run takes ten minutes by default and writes each part as it ends; ``--resume`` continues
after the last one. ``--cpu`` runs the same on a CPU engine, to see that the check itself works.
"""

from __future__ import annotations

from collections.abc import Callable

import click

from benchmarks.command import benchmark
from benchmarks.device import compare
from benchmarks.device.chunk_ttft import measure_chunks
from benchmarks.device.engine import check_kernels, has_gpu, measure_copies
from benchmarks.device.host_hits import measure_host_hits
from benchmarks.device.processor_time import measure_request
from benchmarks.device.sizes import PART_MINUTES
from benchmarks.device.steps import measure_steps
from benchmarks.report import BenchmarkPlan, Goal, Part
from benchmarks.tiers.exactness import measure_exactness, measure_exactness_bf16

GOALS: dict[str, Goal] = {
    "step_throughput_ratio_32": Goal(">=", 0.97),
    "step_throughput_ratio_256": Goal(">=", 0.97),
    "request_hit_api_server_extra_ms": Goal("<=", 1.0),
    "kernels_failed": Goal("=", 0),
    "exact_mismatches": Goal("=", 0),
    "exact_bf16_mismatches_above_vllm": Goal("<=", 0),
    "pipeline_mismatches": Goal("=", 0),
    "requests_left": Goal("=", 0),
    "tasks_left": Goal("=", 0),
    "ttft_ratio": Goal(">=", 1.0),
    "load_share_of_link": Goal(">=", 0.7),
}


def measure_speculation(plan: BenchmarkPlan) -> Part:
    """Load LangChain, LlamaIndex and Faiss for this part alone: a GPU machine may be without them."""
    from benchmarks.pipeline.exactness import measure_pipeline_exactness

    return measure_pipeline_exactness(plan)


PARTS: dict[str, Callable[[BenchmarkPlan], Part]] = {
    "steps": measure_steps,
    "request": measure_request,
    "host-hits": measure_host_hits,
    **compare.parts(),
    "chunks": measure_chunks,
    "kernels": check_kernels,
    "tiers": measure_exactness,
    "tiers-bf16": measure_exactness_bf16,
    "speculation": measure_speculation,
    "copies": measure_copies,
}

main = benchmark(
    "gpu-check",
    "Time and check RAGCache on this machine's GPU, in the order of value: steps, one request's processor time, host "
    "hits, engines under load, chunk reuse, kernels, exactness, copies. Engines are vLLM's, killed and started again "
    "where that is part of the check.",
    PARTS,
    GOALS,
    """  python -m benchmarks.device
  python -m benchmarks.device --resume
  python -m benchmarks.device --only tiers --only copies
  python -m benchmarks.device --minutes 60
  python -m benchmarks.device --cpu --quick --minutes 60 --output build/smoke.json""",
    part_minutes=PART_MINUTES,
)


def _need_a_gpu(_context: click.Context, _option: click.Parameter, is_on_cpu: bool) -> None:
    if not is_on_cpu and not has_gpu():
        click.echo("gpu-check: skipped: torch finds no GPU on this machine (--cpu tries the check itself)")
        raise click.exceptions.Exit(0)


main.params.append(
    click.Option(
        ["--cpu"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_need_a_gpu,
        help="Run on a CPU engine; kernels in Triton's interpreter.",
    )
)

if __name__ == "__main__":
    main()
