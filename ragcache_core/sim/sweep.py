"""Many simulations, several at a time; finished runs are kept for the next time.

A run is a trace and its options. Its key is a digest of both and of the version, so that a journal says of any run
whether it is finished: runs of other traces, of other options and of other versions are other runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcache_core._version import __version__
from ragcache_core.errors import ConfigError
from ragcache_core.private_files import make_folders, open_private
from ragcache_core.sim.options import BELADY, INFINITE, SimulationOptions
from ragcache_core.sim.result import SimulationResult
from ragcache_core.sim.traces.trace import Trace, read_trace

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One simulation to run: a trace's file with the digest of its content, and the options."""

    trace: Path
    trace_sha256: str
    options: SimulationOptions
    cost_sha256: str = ""

    @property
    def key(self) -> str:
        """Key of a run, equal for equal requests, options, cost model and version."""
        facts = [__version__, self.trace_sha256, self.cost_sha256, self.options.to_dict()]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The outcome of a run as plain JSON data: ``options`` and ``summary`` of a result's ``to_dict``."""

    key: str
    trace: str
    options: Mapping[str, Any]
    summary: Mapping[str, Any]
    notes: Sequence[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FinishedRun:
        """Return the run of a :meth:`to_dict`.

        Raises:
            KeyError: something is missing.
        """
        return cls(**{name: data[name] for name in cls.__slots__})


class Journal:
    """A file of finished runs, one JSON line each. An incomplete line is a run that did not finish."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, FinishedRun]:
        """Return the finished runs by key; empty without a file."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return {}
        runs = (_parsed(line) for line in lines)
        return {run.key: run for run in runs if run is not None}

    def append(self, run: FinishedRun) -> None:
        """Append a run; durable at the return."""
        make_folders(self.path.parent)
        with open(self.path, "a+b", opener=open_private) as file:
            line = json.dumps(run.to_dict()).encode() + b"\n"
            file.write(line if self._ends_with_a_line() else b"\n" + line)
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Delete the file, as its runs are stored elsewhere."""
        self.path.unlink(missing_ok=True)

    def _ends_with_a_line(self) -> bool:
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            return file.read() in (b"", b"\n")


def plan(
    traces: Iterable[Path],
    base: SimulationOptions,
    *,
    policies: Sequence[str] = (),
    orders: Sequence[str] = (),
    gpu_tokens: Sequence[int] = (),
    host_tokens: Sequence[int] = (),
    disk_tokens: Sequence[int] = (),
    replicas: Sequence[int] = (),
    routings: Sequence[str] = (),
) -> list[SweepRun]:
    """Return a run for each trace and combination of values; other settings are those of ``base``.

    A plan of several runs has no ``belady`` where there is no such bound: with the order ``cache_aware``, or replicas.

    Raises:
        ConfigError: a combination that cannot work. OSError: a trace, or the cost model's file, cannot be read.
    """
    grid = {
        "policy": policies or (base.policy,),
        "order": orders or (base.order,),
        "gpu_tokens": gpu_tokens or (base.gpu_tokens,),
        "host_tokens": host_tokens or (base.host_tokens,),
        "disk_tokens": disk_tokens or (base.disk_tokens,),
        "replicas": replicas or (base.replicas,),
        "routing": routings or (base.routing,),
    }
    cost_file = Path(base.cost_model)
    cost_sha256 = _digest(cost_file) if cost_file.is_file() else ""
    settings = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    possible = [
        of for of in settings if of["policy"] != BELADY or (of["order"] != "cache_aware" and of["replicas"] == 1)
    ]
    options = [replace(base, **of) for of in possible or settings]  # type: ignore[arg-type]
    digests = {trace: _digest(trace) for trace in traces}
    runs = (SweepRun(trace, digest, of, cost_sha256) for trace, digest in digests.items() for of in options)
    return list({(run.trace, run.key): run for run in runs}.values())


def run_all(
    runs: Sequence[SweepRun],
    *,
    jobs: int,
    finished: Mapping[str, FinishedRun] | None = None,
    keep: Callable[[FinishedRun], None] = lambda _: None,
    report: Callable[[int], object] = lambda _: None,
    simulate: Callable[..., SimulationResult] | None = None,
) -> list[FinishedRun]:
    """Simulate the runs that are not in ``finished``, in ``jobs`` processes, and return all in input order.

    Args:
        runs: to be done.
        jobs: processes at a time.
        finished: runs by their keys that need not be done again.
        keep: called with each run as soon as it is finished.
        report: called now and then with the number of requests simulated since the last call.
        simulate: a function of a module that takes the place of :func:`~ragcache_core.sim.simulator.simulate`.

    Whatever ends it early, an error in a run or an interrupt, ends the processes as well.

    Raises:
        ConfigError, TraceError: of the first run that failed. BrokenProcessPool: a process was killed.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; it must be 1 process or more")
    by_key = dict(finished or {})
    to_do = {run.key: run for run in runs if run.key not in by_key}
    if to_do:
        context = get_context("spawn")
        counter: Synchronized[int] = context.Value("q", 0)
        num_reported = 0
        with _workers(min(jobs, len(to_do)), counter) as executor:
            with _without_interrupts():
                pending: set[Future[FinishedRun]] = {
                    executor.submit(_simulate, run, simulate) for run in to_do.values()
                }
            while pending:
                done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda future: future.exception() is not None):  # failures last
                    by_key[future.result().key] = future.result()
                    keep(future.result())
                report(counter.value - num_reported)
                num_reported = counter.value
    return [replace(by_key[run.key], trace=str(run.trace)) for run in runs]


def above_belady(runs: Sequence[FinishedRun]) -> list[str]:
    """Return why a policy of ``runs`` was better than belady with the same trace, capacities and order.

    One sentence with the run where it shows most; none where no policy did.
    """
    bounds = {_setting(run): run for run in runs if run.options["policy"] == BELADY}
    above = []
    for run in runs:
        bound = bounds.get(_setting(run))
        if bound is not None and run.options["policy"] not in (BELADY, INFINITE):
            for key, sign in (("token_hit_rate", 1), ("mean_ttft_s", -1)):
                if (gain := sign * (run.summary[key] - bound.summary[key]) / max(bound.summary[key], 1e-9)) > 0:
                    above.append((gain, run, bound, key))
    if not above:
        return []
    _, run, bound, key = max(above, key=lambda each: each[0])
    return [
        f"{run.options['policy']} came out better than belady ({key} {run.summary[key]:.3f} against "
        f"{bound.summary[key]:.3f}; {Path(run.trace).name}, order {run.options['order']}, GPU "
        f"{run.options['gpu_tokens']:,}, host {run.options['host_tokens']:,}): belady is a bound of one tier where "
        "requests are served in the order of the trace. It ignores what blocks cost to compute or to load, and keeps "
        "those that are in two tiers twice"
    ]


def _setting(run: FinishedRun) -> tuple[object, ...]:
    return run.trace, *(run.options[name] for name in ("gpu_tokens", "host_tokens", "disk_tokens", "order"))


@contextmanager
def _workers(jobs: int, counter: Synchronized[int]) -> Iterator[ProcessPoolExecutor]:
    """Yield processes that end with the block, at once if it fails."""
    others = set(active_children())
    executor = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_start_worker, initargs=(counter,))
    try:
        yield executor
    except BaseException:
        for worker in set(active_children()) - others:
            worker.terminate()
        raise
    finally:
        executor.shutdown()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Defer Ctrl-C in this process until the block's end, and ignore it in processes started inside.

    A terminal's Ctrl-C reaches all its processes, also one that is still importing what would have it ignored.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In a worker

_counter: Synchronized[int] | None = None


def _start_worker(counter: Synchronized[int]) -> None:
    global _counter  # a task cannot be given it: it is inherited
    _counter = counter
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait_for_any([parent.sentinel])
    os._exit(1)


def _simulate(run: SweepRun, simulate: Callable[..., SimulationResult] | None) -> FinishedRun:
    if simulate is None:
        from ragcache_core.sim import simulator

        simulate = simulator.simulate

    started_s = time.perf_counter()
    if run.cost_sha256 and _digest(Path(run.options.cost_model)) != run.cost_sha256:
        raise ConfigError(f"{run.options.cost_model} has changed since the sweep began: run it again")
    result = simulate(_load(run.trace, run.trace_sha256), run.options, progress=_count)
    seconds = round(time.perf_counter() - started_s, 3)
    options, summary = result.options.to_dict(), result.summary.to_dict()
    return FinishedRun(run.key, str(run.trace), options, summary, result.notes, seconds)


def _count(num_requests: int) -> None:
    if _counter is not None:
        with _counter.get_lock():
            _counter.value += num_requests


@lru_cache(maxsize=2)
def _load(path: Path, sha256: str) -> Trace:
    if _digest(path) != sha256:
        raise ConfigError(f"{path} has changed since the sweep began: run it again")
    return read_trace(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parsed(line: bytes) -> FinishedRun | None:
    try:
        return FinishedRun.from_dict(json.loads(line))
    except (ValueError, KeyError, TypeError):
        return None
