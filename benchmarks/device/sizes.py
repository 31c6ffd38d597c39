"""Models, engine settings and time limits of the checks on a device; the plan's own model on a CPU or with --quick."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines import has_gpu
from benchmarks.report import BenchmarkPlan
from ragcache_core.profiles.random_model import LLAMA_3_8B, random_model

PART_MINUTES = 4.0
# The rest of a part's time is for its last round and for the end of its engines.
_ROUNDS_S = 200.0
# CUDA graphs for decoding without torch.compile, which takes longer to start than these parts take.
GRAPHS = ("-cc.mode=none", "-cc.cudagraph_mode=FULL_DECODE_ONLY")


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A model and how vLLM loads it.

    Attributes:
        path: the model's folder.
        is_small: whether it is the plan's model in place of the one that the part is about.
        launch_args: further arguments of ``Engine.launch``.
    """

    path: str
    dtype: str
    is_small: bool
    launch_args: Mapping[str, Any] = field(default_factory=dict)


def model_30m(plan: BenchmarkPlan) -> DeviceModel:
    """Return a Llama of 30 million random weights in bfloat16."""
    if plan.is_quick or not has_gpu():
        return DeviceModel(plan.model, "float32", is_small=True)
    return DeviceModel(
        str(random_model()), "bfloat16", is_small=False, launch_args={"enforce_eager": False, "extra_args": GRAPHS}
    )


def model_8b(plan: BenchmarkPlan) -> DeviceModel:
    """Return a model of Llama-3.1-8B's shape with random weights in bfloat16."""
    if plan.is_quick or not has_gpu():
        return DeviceModel(plan.model, "float32", is_small=True)
    path = random_model(LLAMA_3_8B, has_weights=False)
    arguments = {"enforce_eager": False, "extra_args": GRAPHS, "load_format": "dummy"}
    return DeviceModel(str(path), "bfloat16", is_small=False, launch_args=arguments)


class PartTime:
    """Ends the rounds of a part in time.

    Args:
        share: the share of the part's time, from the making of this object on.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._ends_s = time.monotonic() + share * _ROUNDS_S

    def rounds(self, count: int) -> Iterator[int]:
        """Yield the numbers of up to ``count`` rounds after round 0, the warm-up, and at least of one."""
        for number in range(1 + count):
            if number > 1 and time.monotonic() > self._ends_s:
                return
            yield number
