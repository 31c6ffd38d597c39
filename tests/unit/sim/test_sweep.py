"""A sweep runs every combination once, in several processes, and what is finished is never lost or run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ragcache_core.errors import ConfigError, TraceError
from ragcache_core.sim import sweep
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.simulator import simulate
from ragcache_core.sim.sweep import FinishedRun, Journal, SweepRun, plan, run_all
from ragcache_core.sim.traces.trace import read_trace, write_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

BASE = SimulationOptions(gpu_tokens=20_000, host_tokens=40_000)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    write_trace(make_trace(replace(WORKLOADS["nq-small"], most_tokens=4_000), 150, seed=1), path)
    return path


def finished(run: SweepRun, mean_ttft_s: float = 1.0) -> FinishedRun:
    return FinishedRun(run.key, str(run.trace), run.options.to_dict(), {"mean_ttft_s": mean_ttft_s}, (), 0.5)


def test_a_plan_holds_every_combination_once(trace: Path) -> None:
    runs = plan([trace], BASE, policies=["lru", "pgdsf", "lru"], orders=["retrieval", "canonical"], host_tokens=[0, 9])
    asked = {(run.options.policy, run.options.order, run.options.host_tokens) for run in runs}
    assert len(runs) == len(asked) == 2 * 2 * 2
    assert {run.options.gpu_tokens for run in runs} == {20_000}


def test_a_bound_that_does_not_exist_is_left_out_of_a_plan_but_refused_alone(trace: Path) -> None:
    runs = plan([trace], BASE, policies=["lru", "belady"], orders=["retrieval", "cache_aware"])
    assert len(runs) == 3
    with pytest.raises(ConfigError, match="belady"):
        plan([trace], BASE, policies=["belady"], orders=["cache_aware"])


def test_a_key_is_of_the_requests_the_options_and_the_cost_model(trace: Path, tmp_path: Path) -> None:
    (run,) = plan([trace], BASE)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(trace.read_bytes())
    profile = tmp_path / "profile.json"
    keys = [run.key, plan([trace], replace(BASE, window=31))[0].key]
    for content in ("a", "b"):
        profile.write_text(content)
        keys.append(plan([trace], replace(BASE, cost_model=str(profile)))[0].key)
    trace.write_bytes(trace.read_bytes() + b"\n")
    keys.append(plan([trace], BASE)[0].key)
    assert plan([copy], BASE)[0].key == run.key
    assert len(set(keys)) == len(keys)


def test_a_key_is_of_the_version(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = plan([trace], BASE)
    before = run.key
    monkeypatch.setattr(sweep, "__version__", "99.0")
    assert run.key != before


def test_a_journal_gives_back_what_was_added(trace: Path, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new" / "journal.jsonl")
    assert journal.read() == {}
    runs = [finished(run) for run in plan([trace], BASE, policies=["lru", "lfu"])]
    for run in runs:
        journal.append(run)
    assert [run.to_dict() for run in journal.read().values()] == [json.loads(json.dumps(r.to_dict())) for r in runs]
    journal.remove()
    journal.remove()
    assert journal.read() == {}


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_line_that_was_cut_off_costs_its_own_run_alone(trace: Path, tmp_path: Path, kept: int) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    first, second, third = (finished(run) for run in plan([trace], BASE, policies=["lru", "lfu", "gdsf"]))
    journal.append(first)
    size = journal.path.stat().st_size
    journal.append(second)
    line = journal.path.read_bytes()[size:]
    journal.path.write_bytes(journal.path.read_bytes()[:size] + line[: kept if kept > 0 else len(line) - 2])
    assert set(journal.read()) == {first.key}
    journal.append(third)
    assert set(journal.read()) == {first.key, third.key}


def test_runs_in_processes_say_what_one_run_here_says(trace: Path) -> None:
    runs = plan([trace], BASE, policies=["lru", "mixture"], host_tokens=[0, 40_000])
    counted: list[int] = []
    kept: list[FinishedRun] = []
    done = run_all(runs, jobs=2, keep=kept.append, report=counted.append)
    assert [run.key for run in done] == [run.key for run in runs]
    assert sorted(run.key for run in kept) == sorted(run.key for run in runs)
    assert sum(counted) == 4 * 150
    for run, result in zip(runs, done, strict=True):
        here = simulate(read_trace(trace), run.options).summary.to_dict()
        assert {k: v for k, v in result.summary.items() if "decision" not in k} == {
            k: v for k, v in here.items() if "decision" not in k
        }


def test_a_finished_run_is_not_run_again(trace: Path) -> None:
    runs = plan([trace], BASE, policies=["lru", "lfu"])
    known = {run.key: finished(run, mean_ttft_s=-1.0) for run in runs[:1]}
    kept: list[FinishedRun] = []
    done = run_all(runs, jobs=1, finished=known, keep=kept.append)
    assert [run.key for run in kept] == [runs[1].key]
    assert done[0].summary["mean_ttft_s"] == -1.0
    assert done[1].summary["mean_ttft_s"] > 0.0


def test_an_error_in_a_run_is_that_of_the_sweep_and_leaves_no_process(tmp_path: Path, trace: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(trace.read_text() + '{"t": 1e9}\n')
    before = _workers()
    with pytest.raises(TraceError, match="broken.jsonl:151"):
        run_all(plan([broken], BASE), jobs=2)
    assert _workers() <= before


def test_a_trace_that_changes_meanwhile_is_noticed(trace: Path) -> None:
    runs = plan([trace], BASE)
    trace.write_bytes(trace.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="has changed"):
        run_all(runs, jobs=1)


def test_what_ends_together_with_a_run_that_fails_is_kept(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"t": 1e9}\n')
    good = plan([trace], BASE, policies=["lru", "lfu", "gdsf", "pgdsf"])
    monkeypatch.setattr(sweep, "wait", lambda pending, **_: futures.wait(pending))
    kept: list[FinishedRun] = []
    with pytest.raises(TraceError, match=r"broken\.jsonl:1"):
        run_all([*plan([broken], BASE), *good], jobs=2, keep=kept.append)
    assert {run.key for run in kept} == {run.key for run in good}


_SWEEP = """
import sys
from pathlib import Path
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.sweep import Journal, plan, run_all

if __name__ == "__main__":
    short, long, journal = map(Path, sys.argv[1:])
    run_all(plan([short, long], SimulationOptions()), jobs=2, keep=Journal(journal).append)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "is_kept_alive"), [(signal.SIGINT, True), (signal.SIGKILL, False)])
def test_what_is_finished_survives_the_end_of_the_sweep_and_no_process_does(
    tmp_path: Path, trace: Path, number: signal.Signals, is_kept_alive: bool
) -> None:
    script, long, journal = tmp_path / "run.py", tmp_path / "long.jsonl", Journal(tmp_path / "journal.jsonl")
    script.write_text(_SWEEP)
    write_trace(make_trace(WORKLOADS["mmlu"], 20_000, seed=1), long)
    process = subprocess.Popen(
        [sys.executable, script, trace, long, journal.path], stderr=subprocess.PIPE, start_new_session=True
    )
    _wait_until(lambda: bool(journal.read()), process)
    workers = _workers(process.pid)
    assert workers
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert (b"KeyboardInterrupt" in errors) is is_kept_alive
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    assert [run.trace for run in journal.read().values()] == [str(trace)]


def test_ctrl_c_leaves_a_process_that_is_still_starting_to_its_owner(tmp_path: Path, trace: Path) -> None:
    script, other, journal = tmp_path / "run.py", tmp_path / "other.jsonl", Journal(tmp_path / "journal.jsonl")
    script.write_text(_SWEEP)
    write_trace(make_trace(WORKLOADS["nq-small"], 200, seed=2), other)
    process = subprocess.Popen([sys.executable, script, trace, other, journal.path], stderr=subprocess.PIPE)
    _wait_until(lambda: bool(_workers(process.pid)), process)
    for worker in _workers(process.pid):
        worker.send_signal(signal.SIGINT)  # as a terminal does, to every process
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    assert len(journal.read()) == 2


def _wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.05)  # a poll: another process or thread makes it true


def _workers(owner: int | None = None) -> set[psutil.Process]:
    return {child for child in psutil.Process(owner).children() if "spawn_main" in " ".join(child.cmdline())}
