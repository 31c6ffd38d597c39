"""Time to first token with chunk reuse against prefix caching, with a model of 8 billion weights."""

from __future__ import annotations

from benchmarks.chunks.ttft import TtftLoad, measure_ttft
from benchmarks.device.sizes import model_8b
from benchmarks.report import BenchmarkPlan, Part

_NUM_HISTORY = 400
_NUM_REQUESTS = 40
_WINDOW = 24_576


def measure_chunks(plan: BenchmarkPlan) -> Part:
    """Measure whole prompts of ``sysx``, 3,600 tokens on average; on a CPU or with --quick, the small benchmark model.

    Both engines are on the GPU at once: 2 x 16 GiB of weights and 2 x 6 GiB of KV.
    """
    model = model_8b(plan)
    if model.is_small:
        return measure_ttft(plan)
    load = TtftLoad(
        model.path,
        model.dtype,
        scale=1.0,
        num_history=_NUM_HISTORY,
        num_requests=_NUM_REQUESTS,
        kv_bytes=6 << 30,
        host_bytes=32 << 30,
        max_model_len=_WINDOW,
        launch_args={**model.launch_args, "max_num_batched_tokens": 8192},
    )
    return measure_ttft(plan, load)
