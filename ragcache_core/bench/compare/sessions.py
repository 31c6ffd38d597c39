"""Which engines are opened in which order, and what is measured on each.

An engine is opened for one seed and one size of host memory, and serves the rates from the lowest to the highest: after
the warm-up each rate has requests of its own, the same ones for every engine. What comes before the first rate that is
measured is run through as fast as the engine can, so that an engine whose rates were measured in part, before an
interruption, has seen what the others saw::

    requests of a seed   | warm-up | rate 1 | rate 2 | rate 3 |
    all rates              fast      timed    timed    timed
    rate 3 alone           fast      fast     fast     timed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ragcache_core.bench.compare.load_generator import Load, poisson_arrivals
from ragcache_core.bench.compare.peers import Peer, usage
from ragcache_core.bench.compare.prompts import TracedPrompts
from ragcache_core.bench.compare.search.question import SearchRun
from ragcache_core.bench.token_client import TokenClient
from ragcache_core.client import Engine

_SETTLE_S = 3.0
_NUM_UNCACHED_WARM_UP = 8
NUM_IN_FLIGHT = 8
"""Requests at a time where nothing is timed."""
_EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"


@dataclass(frozen=True, slots=True)
class Session:
    """One engine to open, and the numbers of the rates to measure on it. ``host_bytes`` is 0 for one without a tier."""

    peer: str
    host_bytes: int
    seed: int
    rates: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What one engine did with the requests of one rate: times request by request, and what was counted."""

    peer: str
    host_bytes: int
    seed: int
    rate: int
    requests_per_s: float
    duration_s: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_reordered: int
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    cpu_s: float | None = None
    memory_bytes: int | None = None
    search: SearchRun | None = None

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What was measured: engine, host memory, seed, rate."""
        return self.peer, self.host_bytes, self.seed, self.rate

    @property
    def completed_rps(self) -> float:
        """Requests that were answered a second, from the first arrival to the last answer."""
        return len(self.ttft_s) / self.duration_s

    @property
    def cached_share(self) -> float:
        """Prompt tokens that were in some tier, of all."""
        return self.num_cached_tokens / self.num_prompt_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the run that :meth:`to_dict` wrote.

        Raises:
            TypeError: ``data`` is not such a dictionary.
        """
        search = None if data.get("search") is None else SearchRun.from_dict(data["search"])
        return cls(**{**data, "ttft_s": tuple(data["ttft_s"]), "tpot_s": tuple(data["tpot_s"]), "search": search})


def plan(
    peers: Sequence[Peer], host_bytes: Sequence[int], num_rates: int, seeds: Sequence[int], done: Iterable[Run] = ()
) -> list[Session]:
    """Return the engines to open, the first of them another one for each seed; what is ``done`` is left out.

    All rates are measured with the middle size of host memory, and all sizes with the middle rate.
    """
    measured = {run.key for run in done}
    main_host, main_rate = middle(host_bytes), middle(range(num_rates))
    sessions = []
    for number, seed in enumerate(seeds):
        turn = number % len(peers)
        for peer in (*peers[turn:], *peers[:turn]):
            for size in host_bytes if peer.uses_host else (0,):
                rates = range(num_rates) if size in (0, main_host) else (main_rate,)
                left = tuple(rate for rate in rates if (peer.name, size, seed, rate) not in measured)
                if left:
                    sessions.append(Session(peer.name, size, seed, left))
    return sessions


def middle(values: Sequence[int]) -> int:
    """Return the value in the middle of several, the lower one of two."""
    return values[(len(values) - 1) // 2]


@dataclass(frozen=True, slots=True)
class Amounts:
    """How many requests warm an engine up, and how many are timed at each rate."""

    num_warm_up: int
    num_requests: int

    def timed(self, rate: int) -> range:
        """Return the numbers of the requests of a rate."""
        first = self.num_warm_up + rate * self.num_requests
        return range(first, first + self.num_requests)

    def before(self, rate: int, keeps_anything: bool) -> range:
        """Return the numbers of those before them; an engine that keeps nothing only has to be awake."""
        end = self.timed(rate).start
        return range(end if keeps_anything else min(end, _NUM_UNCACHED_WARM_UP))

    def count(self, session: Session, keeps_anything: bool) -> int:
        """Return how many requests a session asks."""
        num_timed = len(session.rates) * self.num_requests
        between = 0 if not keeps_anything else session.rates[-1] - session.rates[0] + 1 - len(session.rates)
        return len(self.before(session.rates[0], keeps_anything)) + num_timed + between * self.num_requests


def measure(
    engine: Engine,
    peer: Peer,
    session: Session,
    prompts: TracedPrompts,
    rates_rps: Sequence[float],
    amounts: Amounts,
    *,
    on_answer: Callable[[], object],
    on_rate: Callable[[str], object],
    keep: Callable[[Run], object],
    num_warmed: int = 0,
) -> None:
    """Warm ``engine`` up, and measure the session's rates on it; ``keep`` is given each as soon as it is finished.

    The first ``num_warmed`` requests of the warm-up are left out: its disk has seen them.
    """
    load = Load(
        engine,
        prompts,
        order=peer.order,
        sends_documents=peer.sends_documents,
        speculates=peer.speculates,
        on_answer=on_answer,
    )
    if peer.order == "cache_aware":
        engine.arrange_documents([], peer.order)  # begins to follow the cache
    num_seen = num_warmed
    for rate in session.rates:
        on_rate("warming up")
        load.run_through(amounts.before(rate, peer.keeps_anything)[num_seen:], in_flight=NUM_IN_FLIGHT)
        on_rate(f"{rates_rps[rate]:.3g} requests/s")
        numbers = amounts.timed(rate)
        arrivals = poisson_arrivals(len(numbers), rates_rps[rate], seed=session.seed * 1_000 + rate)
        before, tiers_before, reused_before = usage(engine.pid), tokens_by_tier(engine), _reused_tokens(engine)
        began_s = time.perf_counter()
        answers = load.replay(numbers, arrivals)
        duration_s = time.perf_counter() - began_s - arrivals[0]
        after = usage(engine.pid)
        num_cached = sum(a.num_cached_tokens for a in answers)
        served = _settled(engine, tiers_before, num_cached)
        if peer.chunk_reuse is not None:  # vLLM calls cached what was computed on the way as well
            num_cached = min(num_cached, sum(served.values()) + _reused_tokens(engine) - reused_before)
        keep(
            Run(
                session.peer,
                session.host_bytes,
                session.seed,
                rate,
                rates_rps[rate],
                round(duration_s, 6),
                tuple(round(a.ttft_s, 6) for a in answers),
                tuple(round(a.tpot_s, 6) for a in answers if a.tpot_s is not None),
                sum(a.num_prompt_tokens for a in answers),
                num_cached,
                sum(a.num_output_tokens for a in answers),
                sum(a.is_reordered for a in answers),
                served,
                None if engine.pid is None else round(after.cpu_s - before.cpu_s, 3),
                None if engine.pid is None else after.memory_bytes,
                SearchRun.of(a.search for a in answers),
            )
        )
        num_seen = len(amounts.before(rate, peer.keeps_anything)) + (len(numbers) if peer.keeps_anything else 0)


def capacity_rps(load: Load, num_requests: int, in_flight: int) -> float:
    """Return how many requests a second an engine answers that is never idle."""
    load.run_through(range(_NUM_UNCACHED_WARM_UP), in_flight=in_flight)
    numbers = range(_NUM_UNCACHED_WARM_UP, _NUM_UNCACHED_WARM_UP + num_requests)
    began_s = time.perf_counter()
    load.run_through(numbers, in_flight=in_flight)
    return num_requests / (time.perf_counter() - began_s)


def tokens_by_tier(engine: Engine) -> dict[str, int]:
    """Return the prompt tokens that each tier has served so far; what vLLM's own tiers served is ``host``."""
    stats = engine.stats()
    if stats.policy is not None:
        return {tier.name: tier.num_hit_tokens for tier in stats.tiers}
    return {"gpu": stats.num_prefix_hit_tokens, "host": int(TokenClient(engine).counter(_EXTERNAL_HITS))}


def _reused_tokens(engine: Engine) -> int:
    """Return the prompt tokens that were taken so far as they were stored behind other documents."""
    chunks = engine.stats().chunks
    return 0 if chunks is None else chunks.num_reused_tokens + chunks.num_prefix_tokens


def _settled(engine: Engine, before: Mapping[str, int], num_cached: int) -> dict[str, int]:
    """Return what the tiers served since ``before``; the engine tells of its last step a moment after it."""
    until_s = time.monotonic() + _SETTLE_S
    while True:
        served = {tier: count - before.get(tier, 0) for tier, count in tokens_by_tier(engine).items()}
        if sum(served.values()) >= num_cached or time.monotonic() > until_s:
            return served
        time.sleep(0.05)
