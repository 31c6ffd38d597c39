"""Asks engines in turns, and compares the processor time of a request with the first engine's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil

from benchmarks.server_cost.engines import CpuTimes, EngineName, MeasuredEngine, launch_engine
from benchmarks.server_cost.scenes import SCENES, ServerScenario
from ragcache_core.client import Engine
from ragcache_core.memory import has_gpu

_SLICE = 20
# Between the last answer of a slice and its end: stores to the host tier and reports belong to its requests.
_QUIET_S = 0.2
# What one engine needs of memory, both processes and libraries.
_ENGINE_BYTES = 3 << 30


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """Processor time of one request in one process, as the median over slices.

    Attributes:
        extra_ms: the median of the differences to the baseline, slice by slice.
        extra_low_ms: the lower quartile of these differences.
        extra_high_ms: the upper quartile.
        ratio: ``time_ms`` over the baseline's.
    """

    time_ms: float
    extra_ms: float
    extra_low_ms: float
    extra_high_ms: float
    ratio: float


@dataclass(frozen=True, slots=True)
class ServerCost:
    """What a request of a scene costs an engine.

    Attributes:
        cached_tokens: mean number of prompt tokens from the cache.
        num_requests: how many were measured.
    """

    scene: str
    engine: EngineName
    api_server: ProcessCost
    engine_core: ProcessCost
    cached_tokens: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class _Slice:
    cost: CpuTimes
    cached_tokens: float


def compare(
    groups: Sequence[Sequence[EngineName]],
    num_requests: int,
    on_slice: Callable[[str], None],
    *,
    in_flight: int = 1,
) -> Iterator[list[ServerCost]]:
    """Yield the rows of each scene, group by group of :func:`group_engines`.

    The engines of a group take turns, a slice of requests each. A row compares slices of one group.

    Args:
        groups: engines that run at once; the first of each is the baseline.
        num_requests: requests of each scene and engine.
        on_slice: called after each slice with the name of the scene.
        in_flight: requests of one engine at once. An engine that becomes idle after each request reports its tiers
            after each, and not once a second.
    """
    for number, group in enumerate(groups):
        with _launched(group, num_requests) as running:
            for scene in SCENES:
                rows = _rows(scene, _measure(running, scene, num_requests, on_slice, in_flight), num_requests)
                yield rows if number == 0 else rows[1:]


def group_engines(engines: Sequence[EngineName], at_once: int | None = None) -> list[list[EngineName]]:
    """Return which engines run at once: the baseline, which is the first, in every group.

    Args:
        engines: their names, the baseline first.
        at_once: how many; by default as many as memory holds.

    Raises:
        ValueError: memory does not hold a baseline and one more.
    """
    available = psutil.virtual_memory().available
    baseline, *others = dict.fromkeys(engines)
    size = (at_once or available // _ENGINE_BYTES) - 1
    if not others:
        return [[baseline]]
    if size < 1:
        needed = 2 * _ENGINE_BYTES / 2**30
        raise ValueError(f"{available / 2**30:.1f} GiB of memory are free: two engines at once need {needed:.0f} GiB")
    return [[baseline, *others[start : start + size]] for start in range(0, len(others), size)]


def count_slices(groups: Sequence[Sequence[EngineName]], num_requests: int) -> int:
    """Return how often :func:`compare` reports a slice."""
    return len(SCENES) * sum(map(len, groups)) * len(_slice_sizes(num_requests))


@contextmanager
def _launched(engines: Sequence[EngineName], num_requests: int) -> Iterator[dict[EngineName, MeasuredEngine]]:
    num_host_prompts = num_requests + sum(scene.num_warm_up for scene in SCENES)
    num_threads = 1 if has_gpu() else len(engines)  # vLLM measures a GPU's free memory while it starts
    with ExitStack() as stack, ThreadPoolExecutor(num_threads) as threads:

        def start(name: EngineName) -> Engine:
            return stack.enter_context(launch_engine(name, num_host_prompts))

        starting = {name: threads.submit(start, name) for name in engines}
        yield {name: MeasuredEngine(name, future.result()) for name, future in starting.items()}


def _measure(
    running: dict[EngineName, MeasuredEngine],
    scene: ServerScenario,
    num_requests: int,
    on_slice: Callable[[str], None],
    in_flight: int,
) -> dict[EngineName, list[_Slice]]:
    slices: dict[EngineName, list[_Slice]] = {name: [] for name in running}
    for engine in running.values():
        _ask(engine, scene, range(scene.num_warm_up), in_flight)
    start = scene.num_warm_up
    for number, size in enumerate(_slice_sizes(num_requests)):
        for name in running if number % 2 == 0 else reversed(running):
            slices[name].append(_ask(running[name], scene, range(start, start + size), in_flight))
            on_slice(scene.name)
        start += size
    return slices


def _slice_sizes(num_requests: int) -> list[int]:
    return [min(_SLICE, num_requests - start) for start in range(0, num_requests, _SLICE)]


def _ask(engine: MeasuredEngine, scene: ServerScenario, numbers: range, in_flight: int) -> _Slice:
    requests = [scene.make_request(number) for number in numbers]
    is_plain = not (engine.sends_documents and scene.sends_documents)
    before = engine.cpu_times()
    answers = engine.client.ask_all(requests, in_flight=in_flight, is_plain=is_plain)
    time.sleep(_QUIET_S)
    used = engine.cpu_times() - before
    count = len(requests)
    cached_tokens = statistics.fmean(answer.num_cached_tokens for answer in answers)
    return _Slice(CpuTimes(used.api_server / count, used.engine_core / count), cached_tokens)


def _rows(scene: ServerScenario, slices: dict[EngineName, list[_Slice]], num_requests: int) -> list[ServerCost]:
    base = next(iter(slices.values()))
    return [
        ServerCost(
            scene.name,
            name,
            _process_cost([each.cost.api_server for each in own], [each.cost.api_server for each in base]),
            _process_cost([each.cost.engine_core for each in own], [each.cost.engine_core for each in base]),
            statistics.fmean(each.cached_tokens for each in own),
            num_requests,
        )
        for name, own in slices.items()
    ]


def _process_cost(own: Sequence[float], base: Sequence[float]) -> ProcessCost:
    extra = sorted(1e3 * (a - b) for a, b in zip(own, base, strict=True))
    low, middle, high = statistics.quantiles(extra, n=4) if len(extra) > 1 else extra * 3
    return ProcessCost(
        1e3 * statistics.median(own), middle, low, high, statistics.median(own) / statistics.median(base)
    )
