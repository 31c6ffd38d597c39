"""The runs behind the paper's figures: engines as its text describes them, and each simulated once for every seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.papers.published import HOST_7B_GIB, HOST_LARGE_GIB, MAX_BATCH, MIXTRAL_MAX_BATCH, WINDOW
from benchmarks.papers.ratios import DEFAULT_POLICY
from benchmarks.simulated.laboratory import LabOptions, simulate
from ragcache_core.sim.sweep import FinishedRun, Journal, plan, run_all
from ragcache_core.sim.testbeds import TESTBEDS
from ragcache_core.sim.traces.trace import write_trace
from ragcache_core.sim.traces.workload import WORKLOADS, Workload, make_trace

FIRST_SEED = 101  # on seeds below this one policies were chosen and tuned
GPU_GIB = 5
_HOUR_S, _FEWEST = 3_600.0, 50
_MANY_RPS = 100.0
_CAPACITY_REQUESTS = 2_880

Summaries = tuple[Mapping[str, Any], ...]
"""A run's summary for each seed."""


@dataclass(frozen=True, slots=True)
class PaperCase:
    """One engine under one load. ``num_requests`` None: as many as arrive in an hour, as the paper has it (§7)."""

    workload: Workload
    options: LabOptions
    num_requests: int | None = None

    def at(self, requests_per_s: float) -> PaperCase:
        """Return the same under another load."""
        return replace(self, workload=replace(self.workload, requests_per_s=requests_per_s))


class PaperRuns:
    """Simulates cases for all seeds, each once, however many figures need it.

    Args:
        num_requests: of every run, instead of its own number.
        jobs: processes at a time.
        finished: runs of an earlier time, by their keys, that need not be done again.
        journal: where each run is kept as soon as it is finished.
        on_plan: told how many more requests are to be simulated.
        on_requests: told now and then how many more have been.
        searches, questions: of Figure 6, see :func:`~benchmarks.papers.retrieval_skew.figure_6`.

    Attributes:
        keys: of the runs that were asked for so far.
    """

    def __init__(
        self,
        *,
        num_seeds: int,
        num_requests: int | None = None,
        jobs: int = 1,
        finished: Mapping[str, FinishedRun] | None = None,
        journal: Journal | None = None,
        on_plan: Callable[[int], object] = lambda _: None,
        on_requests: Callable[[int], object] = lambda _: None,
        searches: Sequence[Path] = (),
        questions: Path | None = None,
    ) -> None:
        self.num_seeds = num_seeds
        self.num_requests = num_requests
        self.keys: set[str] = set()
        self.searches, self.questions = searches, questions
        self._jobs = jobs
        self._finished = dict(finished or {})
        self._journal = journal
        self._on_plan = on_plan
        self._on_requests = on_requests
        self._done: dict[PaperCase, Summaries] = {}

    def summaries(self, cases: Iterable[PaperCase]) -> Mapping[PaperCase, Summaries]:
        """Return the summaries of at least these cases.

        Raises:
            ConfigError: of the first run that failed.
        """
        to_do = [case for case in dict.fromkeys(cases) if case not in self._done]
        if not to_do:
            return self._done
        with TemporaryDirectory(prefix="ragcache-paper-") as folder:
            traces = self._write_traces(to_do, Path(folder))
            keys = sorted(
                ((case, seed) for case in to_do for seed in self._seeds()),
                key=lambda key: traces[key[0].workload, self._size(key[0]), key[1]],
            )  # runs of one trace one after the other: a process reads it once
            runs = [plan([traces[case.workload, self._size(case), seed]], case.options)[0] for case, seed in keys]
            self.keys.update(run.key for run in runs)
            new = [key for key, run in zip(keys, runs, strict=True) if run.key not in self._finished]
            self._on_plan(sum(self._size(case) for case, _ in new))
            finished = run_all(
                runs,
                jobs=self._jobs,
                finished=self._finished,
                keep=self._keep,
                report=self._on_requests,
                simulate=simulate,
            )
        by_key = {key: run.summary for key, run in zip(keys, finished, strict=True)}
        self._done.update({case: tuple(by_key[case, seed] for seed in self._seeds()) for case in to_do})
        return self._done

    def capacities_rps(self, cases: Sequence[PaperCase]) -> list[float]:
        """Return what each engine serves in a second where far more arrives, the mean over the seeds."""
        pressed = [replace(case.at(_MANY_RPS), num_requests=_CAPACITY_REQUESTS) for case in cases]
        done = self.summaries(pressed)
        return [fmean(summary["throughput_rps"] for summary in done[case]) for case in pressed]

    def _keep(self, run: FinishedRun) -> None:
        self._finished[run.key] = run
        if self._journal is not None:
            self._journal.append(run)

    def _seeds(self) -> range:
        return range(FIRST_SEED, FIRST_SEED + self.num_seeds)

    def _size(self, case: PaperCase) -> int:
        hour = max(round(case.workload.requests_per_s * _HOUR_S), _FEWEST)
        return self.num_requests or case.num_requests or hour

    def _write_traces(self, cases: Iterable[PaperCase], folder: Path) -> dict[tuple[Workload, int, int], Path]:
        paths: dict[tuple[Workload, int, int], Path] = {}
        for workload, size in dict.fromkeys((case.workload, self._size(case)) for case in cases):
            for seed in self._seeds():
                path = paths[workload, size, seed] = folder / f"{len(paths)}.jsonl"
                write_trace(make_trace(workload, size, seed), path)
        return paths


def workload(name: str, requests_per_s: float, **changes: Any) -> Workload:
    """Return a workload with two documents a request, if no other number is among the changes."""
    settings = {"documents_per_request": 2, "requests_per_s": requests_per_s, **changes}
    return replace(WORKLOADS[name], **settings)


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the paper's Table 1 on its testbed.

    The paper does not say how much of the GPU its cache has. On an A10G, 24 GiB with 14 of weights, we give it 5
    of the rest; on two H800, 160 GiB, what is left of nine tenths of them beside 90 and 130 GiB of weights.
    """

    name: str
    cost_model: str
    gpu_gib: int = GPU_GIB
    host_gib: int = HOST_7B_GIB
    max_batch: int = MAX_BATCH

    @property
    def tokens_per_gib(self) -> int:
        """Of KV."""
        return TESTBEDS[self.cost_model].tokens_per_gib


MISTRAL = Model("Mistral-7B", "a10g-mistral-7b")
LLAMA2 = Model("LLaMA2-7B", "a10g-llama2-7b")
MIXTRAL = Model("Mixtral-8x7B", "h800-mixtral-8x7b", 54, HOST_LARGE_GIB, MIXTRAL_MAX_BATCH)
LLAMA2_70B = Model("LLaMA2-70B", "h800-llama2-70b", 14, HOST_LARGE_GIB)


def vllm(model: Model) -> LabOptions:
    """Return vLLM 0.3.0 as the paper has it: nothing is kept from one request to another, first come first served."""
    return replace(sglang(model), gpu_tokens=1)


def sglang(model: Model) -> LabOptions:
    """Return SGLang as the paper has it: prefixes are kept on the GPU alone, the least recently used goes."""
    return LabOptions(
        policy="lru",
        gpu_tokens=model.gpu_gib * model.tokens_per_gib,
        host_tokens=0,
        cost_model=model.cost_model,
        max_batch=model.max_batch,
        window=WINDOW,
    )


def ragcache(model: Model, host_gib: int | None = None) -> LabOptions:
    """Return the paper's Algorithm 1, first come first served: PGDSF whose counts end with a document's eviction."""
    return replace(sglang(model), policy="pgdsf", host_tokens=(host_gib or model.host_gib) * model.tokens_per_gib)


def reordered(options: LabOptions) -> LabOptions:
    """Return the same engine with cache-aware reordering (§5.2)."""
    return replace(options, queue="cache-aware")


def speculating(options: LabOptions) -> LabOptions:
    """Return the same engine with dynamic speculative pipelining (§5.3), four stages, a quarter settles in each."""
    return replace(options, speculation="dynamic", settle_shares=(0.25, 0.25, 0.25, 0.25))


def default(options: LabOptions) -> LabOptions:
    """Return the same engine with the policy that users of this project get."""
    return replace(options, policy=DEFAULT_POLICY)
