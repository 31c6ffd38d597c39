"""Limits on the work of the scheduler's thread: counted instructions, and times as ratios to plain vLLM's."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.step_cost.measure import StepCost, compare, count_instructions
from benchmarks.step_cost.scenes import SCENES
from benchmarks.step_cost.schedulers import BLOCK_TOKENS, EngineName, SchedulerSpec

pytestmark = pytest.mark.benchmark

_FEW, _MANY = 32, 256
_NUM_PROMPT_BLOCKS = 250
_NUM_ROUNDS = 12
# Other processes disturb about one run in ten by more than the margin, a slow scheduler every run.
_NUM_RUNS = 3


@pytest.fixture(autouse=True)
def _allow_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # the demo model's window is shorter than the prompts


# A loop over all requests takes three instructions for each or more. Measured: none, and for each new block 254, 254
# and, where the answers' blocks enter the tree at once, 1376.
@pytest.mark.parametrize(
    ("engine", "groups", "most_per_block"),
    [
        ("ragcache-gpu", ("full",), 300),
        ("ragcache-host", ("full",), 300),
        ("ragcache-host", ("full", "window"), 1600),
    ],
)
def test_a_step_does_nothing_for_requests_that_get_no_block(
    engine: EngineName, groups: tuple[str, ...], most_per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, total = [], []
    for scene in (f"decode {_FEW}", f"decode {_MANY}"):
        monkeypatch.setitem(SCENES, scene, replace(SCENES[scene], spec=SchedulerSpec(20_000, groups)))
        steps = sorted(count_instructions(scene, engine, BLOCK_TOKENS), key=lambda step: sum(step.values()))
        quiet.append(steps[0])
        total.append(sum(sum(step.values()) for step in steps))
    grown = {name: num - quiet[0].get(name, 0) for name, num in quiet[1].items()}
    assert sum(grown.values()) < _MANY - _FEW, {name: num for name, num in grown.items() if num}
    assert total[1] - total[0] < most_per_block * (_MANY - _FEW)


# Measured: 335, 212, 731 to 749, and 1397 to 1469.
@pytest.mark.parametrize(
    ("scene", "engine", "most_per_block"),
    [
        ("prompt 4000, new", "ragcache-host", 385),
        ("prompt 4000, GPU hit", "ragcache-host", 245),
        ("prompt 4000, host hit", "ragcache-host", 850),
        ("prompt 4000, disk hit", "ragcache-disk", 1650),
    ],
)
def test_a_prompt_takes_few_instructions_a_block(scene: str, engine: EngineName, most_per_block: int) -> None:
    counts = count_instructions(scene, engine, 8)
    num_instructions = statistics.median(sum(request.values()) for request in counts)
    assert num_instructions < most_per_block * _NUM_PROMPT_BLOCKS, counts[-1]


# Times, as the work in C counts as well. Only ratios to plain vLLM in the same run are steady enough.


def check(scene: str, engines: tuple[EngineName, ...], is_met: Callable[..., bool]) -> None:
    """Fail if the costs of the engines after the first meet the limit in none of three runs."""
    runs: list[list[StepCost]] = []
    for _ in range(_NUM_RUNS):
        runs.append(compare(scene, engines, _NUM_ROUNDS))
        if is_met(*runs[-1][1:]):
            return
    pytest.fail(f"no run meets the limit: {runs}")


# Measured: 1.08 to 1.17, and 1.07 to 1.19; seldom 1.45.
@pytest.mark.parametrize(("scene", "limit"), [("decode 256, full", 1.25), ("decode 32", 1.25)])
def test_a_decoding_step_costs_less_than_with_vllms_offloading(scene: str, limit: float) -> None:
    check(
        scene,
        ("vllm", "vllm-offload", "ragcache-host"),
        lambda offload, host: host.ratio < limit and host.time_us < offload.time_us,
    )


# Measured: 3.7 to 4.1, 3.0 to 3.2, 4.9 to 5.1 and 7.8 to 9.3.
@pytest.mark.parametrize(
    ("scene", "engine", "limit"),
    [
        ("prompt 4000, new", "ragcache-host", 5.5),
        ("prompt 4000, GPU hit", "ragcache-host", 4.0),
        ("prompt 4000, host hit", "ragcache-host", 7.0),
        ("prompt 4000, disk hit", "ragcache-disk", 12.0),
    ],
)
def test_a_prompt_of_4000_tokens_costs_no_more_than_batches_of_blocks(
    scene: str, engine: EngineName, limit: float
) -> None:
    check(scene, ("vllm", engine), lambda cost: cost.ratio < limit)
