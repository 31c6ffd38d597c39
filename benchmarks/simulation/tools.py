"""What the names of tools bring to histories of agents: turns rank by how long their own tool usually takes.

Requests are those of the workload ``agents``. Each turn calls one of eight tools: the one whose usual duration is
nearest to the wait for the next turn, times a lognormal factor, so a name says little where that varies much. The last
turn of a conversation calls a tool too, which does not return. The engine gets the name after the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

import numpy as np

from benchmarks.report import BenchmarkPlan, Figure, Part
from ragcache_core.sim.blocks import BlockCache, BlockRun, next_turn_s
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.simulator import Parts, make_cache, simulate
from ragcache_core.sim.testbeds import Testbed
from ragcache_core.sim.traces.trace import Trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

_USUAL_S: Final = (0.5, 2.0, 5.0, 10.0, 30.0, 60.0, 180.0, 400.0)
_SIGMAS: Final = (0.4, 1.0)
_SIZES: Final = ((60_000, 0), (100_000, 0), (200_000, 0), (100_000, 300_000))
"""Tokens of GPU and host memory; the smallest holds the longest prompt of all seeds."""
_FIRST_SEED, _NUM_SEEDS = 21, 3
_NUM_REQUESTS, _WARM_UP = 1_500, 300


class _NamingCache(BlockCache):
    """A cache that is given the name of the tool after each answer."""

    tools: Sequence[str]

    def end(self, run: BlockRun) -> None:
        super().end(run)
        if run.number is not None and run.prompt.answer_key is not None:
            self.tree.record_answer(run.prompt.answer_key, run.turn, self.tools[run.number])


def measure_tools(plan: BenchmarkPlan) -> Part:
    """Compare computed tokens with tools' names over those without, by how much a tool's times vary."""
    seeds = range(_FIRST_SEED + plan.seed, _FIRST_SEED + plan.seed + plan.sized(_NUM_SEEDS, 1))
    workload = replace(WORKLOADS["agents"], requests_per_s=1.5)
    traces = [make_trace(workload, plan.sized(_NUM_REQUESTS, 100), seed) for seed in seeds]
    figures: list[Figure] = []
    for gpu_tokens, host_tokens in _SIZES:
        options = SimulationOptions(
            policy="mixture",
            gpu_tokens=gpu_tokens,
            host_tokens=host_tokens,
            system_tokens=512,
            cost_model="h100-llama3-8b",
            queue="cache-aware",
            block_size=64,
            max_batch=16,
            retrieval_s=0.0,
            warm_up=plan.sized(_WARM_UP, 20),
        )
        plain = [_computed(plan, options, trace, make_cache) for trace in traces]
        for sigma in (*_SIGMAS, math.inf):
            named = [
                _computed(plan, options, trace, _naming(_tools(trace, sigma, seed)))
                for seed, trace in zip(seeds, traces, strict=True)
            ]
            ratios = [with_names / without for with_names, without in zip(named, plain, strict=True)]
            name = f"tools_sigma_{sigma:g}_gpu_{gpu_tokens}_host_{host_tokens}"
            note = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            figures.append(Figure(name, round(fmean(ratios), 4), 1.0, note=f"computed tokens; by seed: {note}"))
    return Part(f"{plan.sized(_WARM_UP, 20)} of the requests", tuple(figures))


def _tools(trace: Trace, sigma: float, seed: int) -> list[str]:
    """Return the tool that each turn calls; with an infinite ``sigma`` the names say nothing."""
    rng = np.random.default_rng([seed, 77])
    agents = WORKLOADS["agents"]
    waits_s = next_turn_s(trace) - trace.arrival_s
    last_s = rng.lognormal(math.log(agents.think_median_s), agents.think_sigma, len(trace))
    logs = np.log(np.maximum(np.where(np.isfinite(waits_s), waits_s, last_s), _USUAL_S[0]))
    factors = rng.normal(size=len(trace))
    logs = rng.permutation(logs) if math.isinf(sigma) else logs + sigma * factors
    nearest = np.abs(logs[:, None] - np.log(_USUAL_S)).argmin(axis=1)
    return [f"tool of {_USUAL_S[number]:g} s" for number in nearest]


def _naming(tools: Sequence[str]) -> Callable[[Trace, SimulationOptions, Testbed], BlockCache]:
    def make(trace: Trace, options: SimulationOptions, testbed: Testbed) -> BlockCache:
        cache = _NamingCache(options, testbed.cost, trace=trace)
        cache.tools = tools
        return cache

    return make


def _computed(
    plan: BenchmarkPlan,
    options: SimulationOptions,
    trace: Trace,
    make: Callable[[Trace, SimulationOptions, Testbed], BlockCache],
) -> int:
    plan.report(f"tools: GPU {options.gpu_tokens:,}, host {options.host_tokens:,}")
    return simulate(trace, options, parts=Parts(make)).summary.computed_tokens
