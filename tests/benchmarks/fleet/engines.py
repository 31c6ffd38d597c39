"""Fleets of real engines: beside one engine with as much memory as all of them, and with a replica that is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

from examples._shared import Options, open_demo_store, open_engine
from examples.document_order import Asked, popular_questions
from examples.fleet import NUM_DOCUMENTS
from ragcache_core import CacheConfig, DocumentStore, Engine, Fleet, PromptLayout
from ragcache_core.client import EngineClient
from ragcache_core.errors import EngineError
from tests.benchmarks.engines import ONE_CORE, side_by_side
from tests.benchmarks.report import Figure, Part, Plan
from tests.support.waiting import until

_SIZES = (2, 3)
_REPLICA_BYTES = 16 << 20
"""4,096 tokens of the demo model, a fourth of its corpus: one replica alone caches less than all of them."""
_AT_ONCE = 4
_WINDOW = 40
_BACK_SHARE = 0.9
_RESTARTED_WITHIN_S = 300.0


def measure_engines(plan: Plan) -> Part:
    """Ask fleets, and one engine as large as each, the same questions in cache-aware order, four at any time."""
    questions = popular_questions(plan.sized(300, 12))
    figures: list[Figure] = []
    with open_demo_store() as store:
        for num in _SIZES[:1] if plan.is_quick else _SIZES:
            plan.report(f"{num} engines")
            with _engines(plan, num, _REPLICA_BYTES) as engines, Fleet(engines) as fleet:
                before = [engine.stats().num_first_tokens for engine in engines]
                ours = _share(_ask_at_once(fleet, store, questions))
                served = [engine.stats().num_first_tokens - n for engine, n in zip(engines, before, strict=True)]
            plan.report(f"one engine with the memory of {num}")
            with _engines(plan, 1, num * _REPLICA_BYTES) as engines:
                one = _share(_ask_at_once(engines[0], store, questions))
            note = f"{ours:.3f} of tokens cached against {one:.3f}"
            figures.append(Figure(f"engines_{num}_hit_of_pooled", round(ours / one, 4), baseline=1.0, note=note))
            busiest = max(served) * num / max(sum(served), 1)
            figures.append(Figure(f"engines_{num}_busiest", round(busiest, 3), note="requests, over the mean"))
    return Part("none: all begin empty", tuple(figures), {"questions": len(questions)})


def measure_kill(plan: Plan) -> Part:
    """Kill one of two replicas while four questions at a time are asked: what fails, and when is all cached again?

    What the replica had is to be read again: from its return until the hit rate is back, as many requests may pass as
    passed at first, when both were empty.
    """
    num = plan.sized(200, 12)
    questions = popular_questions(5 * num)
    with open_demo_store() as store, _engines(plan, 2, _REPLICA_BYTES) as engines, Fleet(engines) as fleet:
        plan.report("kill: before")
        before = _ask_at_once(fleet, store, questions[: 2 * num])
        plan.report("kill: a replica is killed")
        during = _ask_at_once(fleet, store, questions[2 * num : 3 * num], engines[1])
        plan.report("kill: until it is back")
        if not until(lambda: engines[1].num_restarts() > 0 and _is_ready(engines[1]), _RESTARTED_WITHIN_S):
            raise RuntimeError(f"the replica is not back in {_RESTARTED_WITHIN_S:g} s: {engines[1].log_path}")
        plan.report("kill: after")
        after = _ask_at_once(fleet, store, questions[3 * num :])
    warm, again = _share(before[num:]), _share(after[num:])
    cold, back = (_num_until(told, _BACK_SHARE * warm) for told in (before, after))
    told = [*before, *during, *after]
    failed = [one.error for one in told if one.error]
    slowest_s, usual_s = (round(max(one.total_s for one in part), 2) for part in (during, before))
    figures = (
        Figure("kill_failed_requests", len(failed), baseline=0, note=f"of {len(told)}"),
        Figure(
            "kill_hit_rate_during", round(_share(during) / warm, 4), baseline=1.0, note="from a quarter on with one"
        ),
        Figure("kill_hit_rate_after", round(again / warm, 4), baseline=1.0, note=f"{again:.3f} against {warm:.3f}"),
        Figure("kill_requests_until_back", back, baseline=cold, note=f"at {_BACK_SHARE:g} of the hit rate before"),
        Figure("kill_back_of_cold", round(back / max(cold, 1), 4), baseline=1.0),
        Figure("kill_slowest_s", slowest_s, usual_s, note="of the requests while it died, and before"),
    )
    shares = [round(_share(part[at : at + _WINDOW]), 3) for part in (before, during, after) for at in _windows(part)]
    return Part(f"{num} questions", figures, {f"cached_share_of_each_{_WINDOW}": shares, "errors": failed})


@dataclass(frozen=True, slots=True)
class _Told:
    """What came of one question."""

    total_s: float
    num_cached: int = 0
    num_tokens: int = 0
    error: str = ""


def _ask_at_once(
    engine: EngineClient, store: DocumentStore, questions: Sequence[Asked], victim: Engine | None = None
) -> list[_Told]:
    """Ask questions in their order, four at any time; ``victim`` dies after a quarter of them."""
    layout = PromptLayout()

    def one(place: int) -> _Told:
        if victim is not None and place == len(questions) // 4 and victim.pid is not None:
            os.killpg(os.getpgid(victim.pid), signal.SIGKILL)
        began_s, question = time.perf_counter(), questions[place].question
        shown = engine.arrange_documents(store.search(question, NUM_DOCUMENTS).documents, "cache_aware").documents
        try:
            stats = engine.generate(layout.render(engine.tokenizer, shown, question), max_tokens=16).stats
        except EngineError as error:
            return _Told(time.perf_counter() - began_s, error=str(error))
        return _Told(time.perf_counter() - began_s, stats.num_cached_tokens, stats.num_prompt_tokens)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(one, range(len(questions))))


def _is_ready(engine: Engine) -> bool:
    try:
        engine.stats()
    except EngineError:
        return False
    return True


def _windows(told: Sequence[_Told]) -> range:
    return range(0, len(told), _WINDOW)


def _share(told: Sequence[_Told]) -> float:
    """Return the share of tokens that was cached."""
    return sum(one.num_cached for one in told) / max(sum(one.num_tokens for one in told), 1)


def _num_until(told: Sequence[_Told], share: float) -> int:
    """Return after how many questions of the next :data:`_WINDOW` so much is cached; all where it never is."""
    starts = range(max(len(told) - _WINDOW, 0))
    return next((start for start in starts if _share(told[start : start + _WINDOW]) >= share), len(told))


def _engines(plan: Plan, num: int, kv_cache_bytes: int) -> AbstractContextManager[list[Engine]]:
    cache = CacheConfig(kv_cache_bytes=kv_cache_bytes, host_bytes=0, block_size=32)
    return side_by_side(num, lambda: open_engine(Options(plan.model, None, True), cache, env=ONE_CORE))
