"""Times engines in turns, and compares them with the first."""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.step_cost.instructions import InstructionCounter
from benchmarks.step_cost.loop import EngineLoop, Profiler
from benchmarks.step_cost.scenes import SCENES, RequestFactory, StepLoad, fill_cache
from benchmarks.step_cost.schedulers import EngineName, is_ragcache, make_scheduler, tiers_of
from ragcache_core.types import Origin, Tier

_LEAST_HIT, _MOST_OTHER = 0.6, 0.2  # on a busy machine a disk writes some prompts too late


@dataclass(frozen=True, slots=True)
class StepCost:
    """Processor time of the scheduler's thread for one unit of a scene.

    Attributes:
        unit: ``step`` or ``request``.
        time_us: the median over slices, in microseconds.
        extra_us: the median of the differences to the baseline, slice by slice.
        ratio: ``time_us`` over the baseline's.
    """

    scene: str
    engine: EngineName
    unit: str
    time_us: float
    extra_us: float
    ratio: float


def compare(scene_name: str, engines: Sequence[EngineName], num_rounds: int) -> list[StepCost]:
    """Return the cost of each engine in a scene; the first engine is the baseline.

    The engines take turns, a slice each, so that a slow moment of the machine meets all of them. The garbage collector
    does not run while they are timed.
    """
    scene = SCENES[scene_name]
    slices: dict[EngineName, list[float]] = {engine: [] for engine in engines}
    with ExitStack() as stack:
        started = {engine: stack.enter_context(_started(engine, scene_name)) for engine in engines}
        stack.enter_context(_no_collection())
        for number in range(num_rounds):
            for engine in engines if number % 2 == 0 else reversed(engines):
                loop, load = started[engine]
                before = loop.total_s()
                loop.is_timed = True
                load.run(scene.slice_size)
                loop.is_timed = False
                slices[engine].append(1e6 * (loop.total_s() - before) / scene.slice_size)
    base = slices[engines[0]]
    return [
        StepCost(
            scene_name,
            engine,
            scene.unit,
            time_us=statistics.median(own),
            extra_us=statistics.median(a - b for a, b in zip(own, base, strict=True)),
            ratio=statistics.median(own) / statistics.median(base),
        )
        for engine, own in slices.items()
    ]


def profile(scene_name: str, engine: EngineName, num_rounds: int, num_lines: int) -> str:
    """Return the functions that take the most processor time in a scene, one a line.

    The profiler makes short functions look longer than they are: compare figures of :func:`compare` only.
    """
    scene, profiler = SCENES[scene_name], cProfile.Profile()
    with _started(engine, scene_name, profiler) as (loop, load), _no_collection():
        loop.is_timed = True
        count = num_rounds * scene.slice_size
        load.run(count)
    rows = sorted(pstats.Stats(profiler).stats.items(), key=lambda row: -row[1][2])  # type: ignore[attr-defined]
    lines = [f"{engine}, {scene_name}: us a {scene.unit}, own and with callees"]
    for (path, line, name), (_, num_calls, own_s, total_s, _) in rows[:num_lines]:
        place = "/".join(path.split("/")[-3:])
        lines.append(
            f"{1e6 * own_s / count:9.1f} {1e6 * total_s / count:9.1f} {num_calls / count:9.2f} calls  "
            f"{place}:{line} {name}"
        )
    return "\n".join(lines)


def count_instructions(scene_name: str, engine: EngineName, num_units: int) -> list[dict[str, int]]:
    """Return the bytecode instructions of each function of RAGCache in the scheduler's thread, unit by unit."""
    counter = InstructionCounter()
    counts = []
    with _started(engine, scene_name, counter) as (loop, load):
        loop.is_timed = True
        for _ in range(num_units):
            load.run(1)
            counts.append(counter.take())
    return counts


@contextmanager
def _started(
    engine: EngineName, scene_name: str, profiler: Profiler | None = None
) -> Iterator[tuple[EngineLoop, StepLoad]]:
    """Yield an engine in a scene, and check afterwards where the hits of its timed requests came from."""
    scene = SCENES[scene_name]
    with make_scheduler(engine, scene.spec) as scheduler:
        loop, requests = EngineLoop(scheduler, profiler), RequestFactory(with_documents=is_ragcache(engine))
        if scene.is_full:
            fill_cache(loop, requests, scene.spec.num_blocks)
        load = scene.start(loop, requests)
        num_before = _num_from_disk(scheduler, engine)
        yield loop, load
        if scene.unit == "request":
            _check_hits(scene_name, engine, loop.tokens, _num_from_disk(scheduler, engine) - num_before)


def _check_hits(scene_name: str, engine: EngineName, tokens: Mapping[str, int], num_from_disk: int) -> None:
    """Raise ``RuntimeError`` if the hits of an engine do not come from the tier that its scene is about.

    An engine without this tier computes the prompts.

    Args:
        scene_name: of the scene.
        engine: that ran in it.
        tokens: of the prompts, see :attr:`EngineLoop.tokens`.
        num_from_disk: how many of the loaded tokens came from disk.
    """
    wanted = SCENES[scene_name].hit_tier
    shares = {
        Tier.GPU: tokens["gpu"] / tokens["prompt"],
        Tier.HOST: (tokens["below"] - num_from_disk) / tokens["prompt"],
        Tier.DISK: num_from_disk / tokens["prompt"],
    }
    least = {wanted: _LEAST_HIT} if wanted in tiers_of(engine) else {}
    for tier, share in shares.items():
        if share < least.get(tier, 0) or (tier not in least and share > _MOST_OTHER):
            limit = f"at least {_LEAST_HIT:.0%}" if tier in least else f"at most {_MOST_OTHER:.0%}"
            raise RuntimeError(
                f"{scene_name!r} does not measure {engine}: {share:.0%} of {tokens['prompt']} prompt tokens are hits "
                f"in the {tier.label} tier, it needs {limit}; see that the loop ends all copies, and the tiers' sizes"
            )


def _num_from_disk(scheduler: Any, engine: EngineName) -> int:
    if Tier.DISK not in tiers_of(engine):
        return 0
    count: int = scheduler.connector.controller.counters.num_tokens_by_tier[Origin.DISK]
    return count


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
