"""The processor time of one request in the API server and the engine core, over plain vLLM's."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.report import BenchmarkPlan, Figure, Part
from benchmarks.server_cost.engines import EngineName
from benchmarks.server_cost.measure import ServerCost, compare, group_engines

_ENGINES: tuple[EngineName, ...] = ("vllm", "vllm-offload", "ragcache-host")


def measure_request(plan: BenchmarkPlan) -> Part:
    """Run ``benchmarks.server_cost`` with a host tier; the baseline of a figure is vLLM's own offloading.

    On a GPU the engine core waits for the device in a loop, so its processor time contains the model's time.
    """
    rows: list[ServerCost] = []
    groups = group_engines(_ENGINES)
    for measured in compare(groups, plan.sized(100, 4), lambda scene: plan.report(f"request: {scene}")):
        rows += measured
    costs = {(row.scene, row.engine): row for row in rows}
    figures = []
    for scene in dict.fromkeys(row.scene for row in rows):
        own, offload = costs[scene, "ragcache-host"], costs[scene, "vllm-offload"]
        for process in ("api_server", "engine_core"):
            cost = getattr(own, process)
            key = f"request_{scene.replace(', ', '_').replace(' ', '_')}_{process}_extra_ms"
            note = f"ratio to plain vLLM {cost.ratio:.2f}; the baseline is vLLM's offloading"
            baseline_ms = getattr(offload, process).extra_ms
            figures.append(Figure(key, round(cost.extra_ms, 3), round(baseline_ms, 3), note=note))
    return Part("44 requests", tuple(figures), {"rows": [asdict(row) for row in rows]})
