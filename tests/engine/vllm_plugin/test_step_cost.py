"""Limits on the processor time of the scheduler's thread, as ratios to plain vLLM in the same run."""

from __future__ import annotations

import pytest

from benchmarks.step_cost.measure import StepCost, compare
from benchmarks.step_cost.schedulers import EngineName

pytestmark = pytest.mark.benchmark

_ENGINES: tuple[EngineName, ...] = ("vllm", "vllm-offload", "ragcache-host")
_NUM_ROUNDS = 6


@pytest.fixture(autouse=True)
def long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # the scheduler has no model, but the model's configuration


def _measure(scene: str) -> tuple[StepCost, StepCost]:
    """Return the costs of vLLM's offloading and of RAGCache with a host tier."""
    _, offload, host = compare(scene, _ENGINES, _NUM_ROUNDS)
    return offload, host
