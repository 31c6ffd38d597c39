"""Fleets of real engines: beside one engine with as much memory as all of them, and with a replica that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import repeat

from examples._shared import Options, open_demo_store, open_engine
from examples.document_order import popular_questions
from examples.fleet import CACHE, NUM_DOCUMENTS, ask
from ragcache_core import CacheConfig, DocumentStore, Engine, Fleet, PromptLayout
from ragcache_core.errors import EngineError
from tests.benchmarks.report import Figure, Part, Plan

_SIZES = (2, 3)
_AT_ONCE = 4


def measure_engines(plan: Plan) -> Part:
    """Ask fleets and one engine as large as each of them the same questions, all with cache-aware order."""
    num_questions = plan.sized(200, 12)
    figures: list[Figure] = []
    details: dict[str, object] = {}
    with open_demo_store() as store:
        for num in _SIZES[:1] if plan.is_quick else _SIZES:
            plan.report(f"{num} engines")
            with _engines(plan, num, CACHE) as engines, Fleet(engines) as fleet:
                ours = ask(repeat(fleet).__next__, store, engines, "fleet", num_questions, "cache_aware")
            assert CACHE.kv_cache_bytes is not None
            pooled = CacheConfig(kv_cache_bytes=num * CACHE.kv_cache_bytes, host_bytes=0, block_size=CACHE.block_size)
            with _engines(plan, 1, pooled) as engines:
                one = ask(repeat(engines[0]).__next__, store, engines, "one engine", num_questions, "cache_aware")
            details[str(num)] = [asdict(ours), asdict(one)]
            note = f"{ours.cached_share:.3f} of tokens cached against {one.cached_share:.3f}"
            share = round(ours.cached_share / one.cached_share, 4)
            figures.append(Figure(f"engines_{num}_hit_of_pooled", share, baseline=1.0, note=note))
            figures.append(Figure(f"engines_{num}_busiest", round(ours.busiest, 3), note="requests, over the mean"))
    return Part("none: all begin empty", tuple(figures), details)


def measure_kill(plan: Plan) -> Part:
    """Kill one of two replicas while four questions at a time are asked, and see what fails and what is cached then."""
    num_questions = plan.sized(120, 12)
    with open_demo_store() as store, _engines(plan, 2, CACHE) as engines, Fleet(engines) as fleet:
        plan.report("before the kill")
        before, _ = _ask_at_once(fleet, store, num_questions, None)
        plan.report("a replica is killed")
        during, failed = _ask_at_once(fleet, store, num_questions, engines[1])
        plan.report("after the kill")
        after, later = _ask_at_once(fleet, store, num_questions, None)
    figures = (
        Figure("kill_failed_requests", failed + later, baseline=0, note=f"of {2 * num_questions}"),
        Figure("kill_hit_rate_after", round(after / before, 4), baseline=1.0, note=f"{after:.3f} against {before:.3f}"),
        Figure("kill_hit_rate_during", round(during / before, 4), baseline=1.0),
    )
    return Part(f"{num_questions} questions", figures)


def _ask_at_once(fleet: Fleet, store: DocumentStore, num_questions: int, victim: Engine | None) -> tuple[float, int]:
    """Return the share of tokens that was cached, and how many requests failed; ``victim`` dies after a quarter."""
    layout, asked = PromptLayout(), popular_questions(num_questions)

    def one(place: int) -> tuple[int, int] | None:
        if victim is not None and place == num_questions // 4 and victim.pid is not None:
            os.killpg(os.getpgid(victim.pid), signal.SIGKILL)
        question = asked[place].question
        shown = fleet.arrange_documents(store.search(question, NUM_DOCUMENTS).documents, "cache_aware").documents
        try:
            stats = fleet.generate(layout.render(fleet.tokenizer, shown, question), max_tokens=16).stats
        except EngineError:
            return None
        return stats.num_cached_tokens, stats.num_prompt_tokens

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        answers = list(threads.map(one, range(num_questions)))
    told = [answer for answer in answers if answer is not None]
    return sum(cached for cached, _ in told) / max(sum(total for _, total in told), 1), len(answers) - len(told)


@contextmanager
def _engines(plan: Plan, num: int, cache: CacheConfig) -> Iterator[Sequence[Engine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(open_engine(Options(plan.model, None, True), cache)) for _ in range(num)]
