"""What an engine's steps and loads take, told from requests that were timed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ragcache_core.client.profiling import TimedAnswer, measure_loads, measure_steps
from ragcache_core.errors import EngineError

BLOCK = 16
TOKENS = tuple(range(100))
REQUEST_S, STEP_S, SEQUENCE_S = 0.008, 0.004, 0.0015


def test_times_of_requests_steps_and_answers_are_distinguished() -> None:
    def together(prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        return REQUEST_S + max_tokens * (STEP_S + len(prompts) * SEQUENCE_S)

    found = measure_steps(together, TOKENS, block_size=BLOCK, num_repeats=2, rng=random.Random(1))
    assert found.request_s == pytest.approx(REQUEST_S)
    assert found.step_s == pytest.approx(STEP_S)
    assert found.sequence_s == pytest.approx(SEQUENCE_S)


class Loading:
    """An engine whose KV memory holds ``num_kv_tokens``, and host memory beneath that loads tokens at this rate."""

    def __init__(self, num_kv_tokens: int, tokens_per_s: float, *, has_host: bool = True) -> None:
        self.num_kv_tokens, self.tokens_per_s, self.has_host = num_kv_tokens, tokens_per_s, has_host
        self.kept: list[list[int]] = []
        self.seen: list[list[int]] = []

    def ask(self, prompt: Sequence[int]) -> TimedAnswer:
        tokens = list(prompt)
        in_engine, anywhere = self._found(tokens, self.kept), self._found(tokens, self.seen if self.has_host else [])
        num_loaded = max(anywhere - in_engine, 0)
        self.seen.append(tokens)
        self.kept.append(tokens)
        while sum(map(len, self.kept)) > self.num_kv_tokens:
            self.kept.pop(0)
        num_cached = max(in_engine, anywhere)
        return TimedAnswer(0.01 + 1e-4 * (len(tokens) - num_cached) + num_loaded / self.tokens_per_s, num_cached)

    @staticmethod
    def _found(tokens: list[int], known: list[list[int]]) -> int:
        ends = range(len(tokens) // BLOCK * BLOCK, 0, -BLOCK)
        return next((end for end in ends if any(other[:end] == tokens[:end] for other in known)), 0)


def test_the_load_rate_is_measured_with_an_evicted_prompt() -> None:
    engine = Loading(2_000, 50_000.0)
    found = measure_loads(
        engine.ask, TOKENS, num_kv_tokens=2_000, block_size=BLOCK, num_repeats=2, rng=random.Random(1)
    )
    assert found == pytest.approx(50_000.0, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "message"),
    [(Loading(2_000, 50_000.0, has_host=False), "--host-memory"), (Loading(2_000, float("inf")), "idle machine")],
)
def test_loads_that_did_not_happen_are_no_measurement(engine: Loading, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        measure_loads(engine.ask, TOKENS, num_kv_tokens=2_000, block_size=BLOCK, num_repeats=1, rng=random.Random(1))
