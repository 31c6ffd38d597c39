"""``make gpu-check``: the kernels and whole engines on a machine with a GPU; ``build/gpu-check.json``.

Every part is over in minutes and written when it is; ``--resume`` goes on after the last one. ``--cpu`` runs the same
on a CPU engine, to see that the check itself works.
"""

from __future__ import annotations

from collections.abc import Callable

import click

from tests.benchmarks.chunks.ttft import measure_ttft
from tests.benchmarks.command import benchmark
from tests.benchmarks.device.engine import check_kernels, has_gpu, measure_copies, measure_steps
from tests.benchmarks.report import Goal, Part, Plan
from tests.benchmarks.tiers.exactness import measure_exactness, measure_exactness_bf16

GOALS: dict[str, Goal] = {
    "kernels_failed": Goal("=", 0),
    "exact_mismatches": Goal("=", 0),
    "exact_bf16_mismatches_above_vllm": Goal("<=", 0),
    "pipeline_mismatches": Goal("=", 0),
    "requests_left": Goal("=", 0),
    "tasks_left": Goal("=", 0),
    "ttft_ratio": Goal(">=", 1.0),
    "load_share_of_link": Goal(">=", 0.7),
    "step_throughput_ratio": Goal(">=", 0.97),
}


def measure_speculation(plan: Plan) -> Part:
    """Load LangChain, LlamaIndex and Faiss for this part alone: a GPU machine may be without them."""
    from tests.benchmarks.pipeline.exactness import measure_pipeline_exactness

    return measure_pipeline_exactness(plan)


PARTS: dict[str, Callable[[Plan], Part]] = {
    "kernels": check_kernels,
    "tiers": measure_exactness,
    "tiers-bf16": measure_exactness_bf16,
    "speculation": measure_speculation,
    "chunks": measure_ttft,
    "copies": measure_copies,
    "steps": measure_steps,
}

main = benchmark(
    "gpu-check",
    "Check and time RAGCache on this machine's GPU: kernels, exactness over tiers, speculation, chunk reuse, copies, "
    "steps. Engines are vLLM's, killed and started again where that is part of the check.",
    PARTS,
    GOALS,
    """  python -m tests.benchmarks.device
  python -m tests.benchmarks.device --resume
  python -m tests.benchmarks.device --only tiers --only copies
  python -m tests.benchmarks.device --cpu --quick --output build/smoke.json""",
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
