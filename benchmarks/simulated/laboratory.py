"""The simulator with what experiments need besides: Algorithm 1's whole documents, other routers, vLLM's steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from benchmarks.simulated.documents import DocumentCache
from benchmarks.simulated.routers import OtherRouter
from benchmarks.simulated.steps import simulate_steps
from ragcache_core.errors import ConfigError
from ragcache_core.sim import simulator
from ragcache_core.sim.engine import SimulatedCache
from ragcache_core.sim.options import ROUTINGS, SimulationOptions
from ragcache_core.sim.result import SimulationResult
from ragcache_core.sim.testbeds import Testbed
from ragcache_core.sim.traces.trace import Trace

Routing = Literal["round-robin", "power-of-two", "hash", "bounded", "vllm-router", "mirror", "joint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOptions(SimulationOptions):
    """Settings of an experiment.

    Attributes:
        granularity: whether whole documents are cached, as the paper's Algorithm 1 does, or blocks, as the engine does.
        frequency: whether uses are counted beyond eviction ("ghost"); None: not for ``pgdsf``, and for all others.
        max_batched_tokens: that a step of the engine computes, as vLLM schedules them; None: iterations of whole
            prompts.
        knows_documents: whether blocks are kept as with RAGCache's plugin; False: as vLLM alone keeps them.
    """

    routings: ClassVar[tuple[str, ...]] = (*ROUTINGS, "power-of-two", "hash", "bounded", "vllm-router", "mirror")

    granularity: Literal["document", "block"] = "document"
    frequency: Literal["ghost", "cached"] | None = None
    max_batched_tokens: int | None = None
    knows_documents: bool = True

    @property
    def keeps_frequency(self) -> bool:
        """Whether a document's uses are counted beyond its eviction."""
        return self.policy != "pgdsf" if self.frequency is None else self.frequency == "ghost"


def simulate(
    trace: Trace,
    options: SimulationOptions,
    *,
    progress: Callable[[int], object] | None = None,
    keeps_requests: bool = False,
) -> SimulationResult:
    """Return what the engines of an experiment would have done with ``trace``.

    Raises:
        ConfigError: see :func:`ragcache_core.sim.simulator.simulate`; or whole documents meet conversations.
    """
    assert isinstance(options, LabOptions)
    if options.max_batched_tokens is not None:
        return simulate_steps(
            trace,
            options,
            max_batched_tokens=options.max_batched_tokens,
            knows_documents=options.knows_documents,
            keeps_requests=keeps_requests,
            progress=progress,
        )
    if options.granularity == "document" and (trace.conversation >= 0).any():
        raise ConfigError("the trace has conversations, whose histories blocks alone keep: choose granularity block")
    return simulator.simulate(trace, options, progress=progress, keeps_requests=keeps_requests, parts=PARTS)


def make_cache(trace: Trace, options: SimulationOptions, testbed: Testbed) -> SimulatedCache:
    """Return the empty cache of an experiment."""
    if isinstance(options, LabOptions) and options.granularity == "document":
        return DocumentCache(options, testbed.cost, trace)
    return simulator.make_cache(trace, options, testbed)


PARTS = simulator.Parts(make_cache, OtherRouter)
