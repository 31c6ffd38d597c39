"""Runs of the simulator that a benchmark asks for: several at a time, each kept as soon as it is finished."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from benchmarks.report import Plan
from ragcache_core.sim.sweep import FinishedRun, Journal, Run, run_all


def simulate_runs(plan: Plan, name: str, runs: Sequence[Run], num_requests: int) -> list[FinishedRun]:
    """Simulate what is not finished yet, in as many processes as there are cores, and return all runs in their order.

    ``num_requests`` are those of all runs together; ``name`` says in the benchmark's bar what is simulated.
    """
    num_done = 0

    def count(num_simulated: int) -> None:
        nonlocal num_done
        num_done += num_simulated
        plan.report(f"{name}: {num_done / num_requests:.0%} of {len(runs)} runs")

    journal = None if plan.kept_at is None else Journal(plan.kept_at)
    keep: Callable[[FinishedRun], None] = (lambda _: None) if journal is None else journal.append
    finished = {} if journal is None else journal.read()
    return run_all(runs, jobs=os.cpu_count() or 1, finished=finished, keep=keep, report=count)
