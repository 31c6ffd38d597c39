"""The simulator of benchmarks: many runs at a time, Algorithm 1's cache of documents, other routers, vLLM's steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ragcache_core.sim.sweep import FinishedRun, Journal, SweepRun, run_all


class RunPlan(Protocol):
    """What a benchmark's plan says of its runs: where they are kept, and where progress is reported."""

    @property
    def kept_at(self) -> Path | None:
        """Return the file of finished runs; None: they are not kept."""
        ...

    @property
    def report(self) -> Callable[[str], None]:
        """Return what receives a line of progress."""
        ...


def simulate_runs(plan: RunPlan, name: str, runs: Sequence[SweepRun], num_requests: int) -> list[FinishedRun]:
    """Simulate what is not finished yet, in as many processes as there are cores, and return all runs in their order.

    Args:
        plan: of the benchmark.
        name: of the runs, for its progress bar.
        runs: with options of an experiment.
        num_requests: of all runs together.
    """
    from benchmarks.simulated.laboratory import simulate

    num_done = 0

    def count(num_simulated: int) -> None:
        nonlocal num_done
        num_done += num_simulated
        plan.report(f"{name}: {num_done / num_requests:.0%} of {len(runs)} runs")

    journal = None if plan.kept_at is None else Journal(plan.kept_at)
    keep: Callable[[FinishedRun], None] = (lambda _: None) if journal is None else journal.append
    finished = {} if journal is None else journal.read()
    jobs = os.cpu_count() or 1
    return run_all(runs, jobs=jobs, finished=finished, keep=keep, report=count, simulate=simulate)
