"""Engines side by side: the same requests at the same moments, one engine after the other, over rates and seeds."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from ragcache_core.bench.compare.load_generator import Load
from ragcache_core.bench.compare.peers import Peer
from ragcache_core.bench.compare.prompts import TracedPrompts
from ragcache_core.bench.compare.results import Results
from ragcache_core.bench.compare.sessions import Amounts, Session, capacity_rps, measure, plan
from ragcache_core.bench.compare.warm_disks import NUM_AWAKE, WarmDisks, wait_until_still
from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError

_IN_FLIGHT = 8

OpenEngine = Callable[[Peer, int, Path], AbstractContextManager[Engine]]
"""Returns an engine of that kind with so many bytes of host memory, and a folder that is its own."""


class Progress(Protocol):
    """Who is told how far a comparison is."""

    def plan(self, num_requests: int) -> None:
        """Take note of how many requests there will be."""

    def say(self, what: str) -> None:
        """Take note of what is going on."""

    def advance(self) -> None:
        """Take note of one more answer."""

    def announce(self, sentence: str) -> None:
        """Tell whoever waits."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What to compare: engines, sizes of host memory, rates in requests a second or as shares of a capacity.

    ``start_s`` is how long an engine's start takes, until one was timed.
    """

    peers: tuple[Peer, ...]
    host_bytes: tuple[int, ...]
    rates: tuple[float, ...]
    are_shares: bool
    seeds: tuple[int, ...]
    amounts: Amounts
    start_s: float = 30.0

    def __post_init__(self) -> None:
        for name, values in (("host memory", self.host_bytes), ("rates", self.rates)):
            if not values or list(values) != sorted(set(values)) or not all(0 < value < math.inf for value in values):
                shown = ", ".join(f"{value:g}" for value in values) or "(none)"
                raise ConfigError(f"{name} {shown}: give finite numbers above 0 in ascending order, each once")
        if not self.seeds:
            raise ConfigError("no seeds: measure one at least")
        if len({peer.name for peer in self.peers}) != len(self.peers) or not self.peers:
            raise ConfigError("name every engine to compare once")

    @property
    def num_trace_requests(self) -> int:
        """How many requests a seed's trace must have."""
        return self.amounts.num_warm_up + len(self.rates) * self.amounts.num_requests


def run_comparison(
    comparison: Comparison,
    results: Results,
    prompts: Callable[[int], TracedPrompts],
    open_engine: OpenEngine,
    progress: Progress,
    warm_disks: WarmDisks | None = None,
) -> None:
    """Measure what ``results`` lack. Every engine is closed when its session ends, however it ends.

    ``prompts`` returns the requests of a seed. With ``warm_disks`` an engine that has a disk begins with one that saw
    the warm-up, and sees the end of that itself.

    Raises:
        EngineStartError, EngineDiedError, ...: an engine failed; what was finished before is in ``results``.
    """
    names: Mapping[str, Peer] = {peer.name: peer for peer in comparison.peers}
    sessions = _sessions(comparison, results)
    amounts = comparison.amounts
    num_warmed = 0 if warm_disks is None else max(0, amounts.num_warm_up - NUM_AWAKE)
    num_left_out = sum(num_warmed for session in sessions if names[session.peer].uses_host)
    num_requests = sum(amounts.count(session, names[session.peer].keeps_anything) for session in sessions)
    num_requests -= num_left_out
    progress.plan(num_requests)
    work, start_s = (
        f"{len(sessions)} engines to open one after the other, {num_requests:,} requests",
        comparison.start_s,
    )
    if not results.rates_rps:
        if comparison.are_shares:
            first = comparison.peers[0].name
            progress.announce(f"{work}; how long that takes is said when it is known what {first} can serve")
        rates, capacity, start_s = _rates(comparison, prompts(comparison.seeds[0]), open_engine, progress)
        results.set_rates(rates, capacity)
    speed_rps = results.capacity_rps or max(results.rates_rps)
    seconds = sum(
        start_s + _seconds(session, amounts, names[session.peer], results.rates_rps, speed_rps) for session in sessions
    )
    seconds -= num_left_out / speed_rps
    if sessions:
        progress.announce(f"{work}: about {duration(seconds)}")
    by_seed: dict[int, TracedPrompts] = {}
    for number, session in enumerate(sessions, 1):
        peer = names[session.peer]
        if session.seed not in by_seed:
            by_seed = {session.seed: prompts(session.seed)}
        where = f"{_shown(session)}, {number} of {len(sessions)}"
        progress.say(f"{where}: starting")
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcache-bench-")))
            if warm_disks is not None and peer.uses_host:
                opened = partial(open_engine, peer, session.host_bytes)
                warm = partial(_warm_disk, opened, peer, by_seed[session.seed], num_warmed, where, progress)
                warm_disks.copied(peer.name, session.seed, warm, folder)
            engine = stack.enter_context(open_engine(peer, session.host_bytes, folder))
            measure(
                engine,
                peer,
                session,
                by_seed[session.seed],
                results.rates_rps,
                amounts,
                on_answer=progress.advance,
                on_rate=_telling(progress, where),
                keep=results.add,
                num_warmed=num_warmed if peer.uses_host else 0,
            )


def _warm_disk(
    open_engine: Callable[[Path], AbstractContextManager[Engine]],
    peer: Peer,
    prompts: TracedPrompts,
    num_warmed: int,
    where: str,
    progress: Progress,
    folder: Path,
) -> None:
    """Fill ``folder`` with the disk tier of an engine that has seen the first requests of the warm-up."""
    folder.mkdir()
    progress.say(f"{where}: warming a disk by {num_warmed} requests, once")
    with open_engine(folder) as engine:
        _load(engine, peer, prompts).run_through(range(num_warmed), in_flight=_IN_FLIGHT)
        wait_until_still(folder)


def _sessions(comparison: Comparison, results: Results) -> list[Session]:
    return plan(comparison.peers, comparison.host_bytes, len(comparison.rates), comparison.seeds, results.runs)


def _rates(
    comparison: Comparison, prompts: TracedPrompts, open_engine: OpenEngine, progress: Progress
) -> tuple[tuple[float, ...], float | None, float]:
    """Return the rates in requests a second, the capacity that shares are of, the first engine's, and how long its
    start took.
    """
    if not comparison.are_shares:
        return comparison.rates, None, comparison.start_s
    first, host_bytes = comparison.peers[0], comparison.host_bytes[0]
    progress.say(f"{first.name}: what it can serve")
    began_s = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="ragcache-bench-") as folder,
        open_engine(first, host_bytes, Path(folder)) as engine,
    ):
        start_s = time.perf_counter() - began_s
        load = _load(engine, first, prompts)
        num_requests = min(comparison.amounts.num_requests, len(prompts) - _IN_FLIGHT)
        capacity = capacity_rps(load, num_requests, in_flight=_IN_FLIGHT)
    return tuple(round(share * capacity, 4) for share in comparison.rates), round(capacity, 4), start_s


def _load(engine: Engine, peer: Peer, prompts: TracedPrompts) -> Load:
    return Load(engine, prompts, order=peer.order, sends_documents=peer.sends_documents, speculates=peer.speculates)


def _seconds(session: Session, amounts: Amounts, peer: Peer, rates_rps: Sequence[float], speed_rps: float) -> float:
    """Return about how long a session's requests take, of an engine that serves ``speed_rps`` at most."""
    num_timed = len(session.rates) * amounts.num_requests
    num_untimed = amounts.count(session, peer.keeps_anything) - num_timed
    timed_s = sum(amounts.num_requests / min(rates_rps[rate], speed_rps) for rate in session.rates)
    return num_untimed / speed_rps + timed_s


def duration(seconds: float) -> str:
    """Return a duration in words that are as exact as an estimate is."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _telling(progress: Progress, where: str) -> Callable[[str], None]:
    return lambda what: progress.say(f"{where}: {what}")


def _shown(session: Session) -> str:
    host = f", host {session.host_bytes / 2**20:,.0f} MiB" if session.host_bytes else ""
    return f"{session.peer}{host}, seed {session.seed}"
