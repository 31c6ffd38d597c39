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


# Measured: 1.04 to 1.25, seldom 1.45, and 1.07 to 1.19; with loops over all running requests from 1.58 and 1.48 on.
@pytest.mark.parametrize(("scene", "limit"), [("decode 256, full", 1.35), ("decode 32", 1.3)])
def test_a_decoding_step_costs_less_than_with_vllms_offloading(scene: str, limit: float) -> None:
    check(scene, lambda offload, host: host.ratio < limit and host.time_us < offload.time_us)


# Measured: 9.3 to 11.4; with look-ups and loads of single blocks 27.
def test_a_prompt_from_disk_costs_no_more_than_runs_of_blocks() -> None:
    ratios = []
    for _ in range(_NUM_RUNS):
        _, disk = compare("prompt 4000, disk hit", ("vllm", "ragcache-disk"), _NUM_ROUNDS)
        if disk.ratio < 16:
            return
        ratios.append(disk.ratio)
    pytest.fail(f"no run meets the limit: {ratios}")


# Measured: 6.7 to 7.9 and 3.6 to 4.7; with one call per block in place of batches from 9.3 and 5.7 on.
@pytest.mark.parametrize(("scene", "limit"), [("prompt 4000, new", 8.6), ("prompt 4000, GPU hit", 5.2)])
def test_a_prompt_of_4000_tokens_costs_no_more_than_batches_of_blocks(scene: str, limit: float) -> None:
    check(scene, lambda _, host: host.ratio < limit)
