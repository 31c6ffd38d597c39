"""Limits on the processor time of the scheduler's thread with a host tier, as ratios to plain vLLM in the same run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.step_cost.measure import StepCost, compare
from benchmarks.step_cost.schedulers import EngineName

pytestmark = pytest.mark.benchmark

_ENGINES: tuple[EngineName, ...] = ("vllm", "vllm-offload", "ragcache-host")
_NUM_ROUNDS = 20
# Other processes disturb about one run in ten by more than the margin, a slow scheduler every run.
_NUM_RUNS = 3


@pytest.fixture(autouse=True)
def _allow_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # the demo model's window is shorter than the prompts


def check(scene: str, is_met: Callable[[StepCost, StepCost], bool]) -> None:
    """Fail if the costs of vLLM's offloading and of RAGCache meet the limit in none of three runs."""
    runs = []
    for _ in range(_NUM_RUNS):
        _, offload, host = compare(scene, _ENGINES, _NUM_ROUNDS)
        if is_met(offload, host):
            return
        runs.append((offload, host))
    pytest.fail(f"no run meets the limit: {runs}")


# Measured: 1.04 to 1.25, seldom 1.45; with loops over all running requests 1.56 to 1.66.
def test_a_step_of_256_decoding_requests_costs_less_than_with_vllms_offloading() -> None:
    check("decode 256, full", lambda offload, host: host.ratio < 1.35 and host.time_us < offload.time_us)


# Measured: 1.07 to 1.19; with loops over all running requests 1.48.
def test_a_step_of_32_decoding_requests_costs_less_than_with_vllms_offloading() -> None:
    check("decode 32", lambda offload, host: host.ratio < 1.3 and host.time_us < offload.time_us)


# Measured: 3.6 to 4.7; with one call per block in place of batches 5.7.
def test_a_hit_of_4000_tokens_costs_no_more_than_batches_of_blocks() -> None:
    check("prompt 4000, GPU hit", lambda _, host: host.ratio < 5.2)
