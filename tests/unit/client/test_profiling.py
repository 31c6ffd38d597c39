"""Measuring prefill times: what is sent, what is checked, what comes out."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.client import Engine
from ragcache_core.client.profiling import (
    SMALLEST_NEW,
    EngineFacts,
    Grid,
    Measurement,
    asker,
    cost_model,
    logged_dtype,
    make_grid,
    measure,
    read_facts,
)
from ragcache_core.errors import ConfigError, EngineError
from tests.support.clocked_engine import TOKEN_IDS, ClockedEngine, linear_s, prompts_of

GRID = Grid((0, 16, 48), (10, 30), max_tokens=60)


def measured(
    engine: ClockedEngine, grid: Grid = GRID, num_repeats: int = 1, report: Any = int
) -> tuple[Measurement, ...]:
    ask = asker(cast("Engine", engine))
    return measure(ask, grid, TOKEN_IDS, num_repeats=num_repeats, rng=random.Random(7), report=report)


@given(st.sampled_from([1, 16, 32, 100, 128, 1024]), st.integers(70, 200_000))
def test_a_grid_covers_every_length_that_fits(block_size: int, max_tokens: int) -> None:
    if max_tokens < block_size + 2 * SMALLEST_NEW:
        with pytest.raises(ConfigError, match=f"at most {max_tokens} tokens leave nothing to measure"):
            make_grid(block_size=block_size, max_tokens=max_tokens)
        return
    grid = make_grid(block_size=block_size, max_tokens=max_tokens)
    assert grid.cached_tokens[0] == 0
    assert all(cached % block_size == 0 for cached in grid.cached_tokens)
    assert max_tokens - block_size < grid.cached_tokens[-1] + SMALLEST_NEW <= max_tokens == grid.new_tokens[-1]
    assert all(cached + new <= max_tokens for cached, new in grid.points())
    for axis in (grid.cached_tokens[1:], grid.new_tokens):
        assert all(1.5 * low <= high < 3 * low for low, high in pairwise(axis))
    model = cost_model([Measurement(*point, (1.0,)) for point in grid.points()])
    assert (model.cached_tokens, model.new_tokens) == (grid.cached_tokens, grid.new_tokens)


def test_every_point_is_measured_with_exactly_its_cached_tokens() -> None:
    engine = ClockedEngine()
    measurements = measured(engine, num_repeats=2)
    assert [(m.num_cached_tokens, m.num_new_tokens) for m in measurements] == list(GRID.points())
    for m in measurements:
        assert m.times_s == (linear_s(m.num_cached_tokens, m.num_new_tokens),) * 2
    assert (48, 30) not in GRID.points()


def test_each_repeat_has_tokens_of_its_own_and_each_row_one_prefix() -> None:
    engine = ClockedEngine()
    measured(engine, num_repeats=2)
    repeat = [10, 30, 16, 26, 46, 48, 58]
    assert prompts_of(engine) == [60, *repeat, *repeat]
    first, second = engine.prompts[1:8], engine.prompts[8:]
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert first[2] == first[3][:16] == first[4][:16]
    assert first[3][16:26] != first[4][16:26]


def test_the_model_holds_the_medians_and_the_spread_the_extremes() -> None:
    model = cost_model(
        [Measurement(0, 32, (0.3, 0.1, 0.2)), Measurement(0, 64, (0.4,) * 3), Measurement(32, 32, (0.5, 0.5, 9.0))]
    )
    assert model.seconds == ((0.2, 0.4), (0.5, 0.7))
    assert Measurement(0, 32, (0.3, 0.1, 0.2)).spread == pytest.approx(1.0)


def test_a_prefix_that_was_pushed_out_is_put_back() -> None:
    engine = ClockedEngine()

    def forget_once(number: int) -> None:
        if number == 4:
            engine._cached.clear()

    engine.on_request = forget_once
    measurements = measured(engine)
    assert prompts_of(engine) == [60, 10, 30, 16, 26, 16, 26, 46, 48, 58]
    assert all(m.times_s == (linear_s(m.num_cached_tokens, m.num_new_tokens),) for m in measurements)


@pytest.mark.parametrize(
    ("engine", "reported"), [(ClockedEngine(keeps=False), "0, 0, 0"), (ClockedEngine(gpu_share=0.5), "8, 8, 8")]
)
def test_an_engine_that_does_not_serve_from_its_own_memory_is_refused(engine: ClockedEngine, reported: str) -> None:
    with pytest.raises(EngineError, match=rf"16 tokens were put into the cache, and the engine hit \[{reported}\]"):
        measured(engine)


def test_the_facts_are_the_servers() -> None:
    facts = read_facts(cast("Engine", ClockedEngine(num_blocks=33)))
    assert facts == EngineFacts("examples/demo_model", 16, 32 * 16, 32 * 16 - 1, "0.32.0", TOKEN_IDS)
    assert read_facts(cast("Engine", ClockedEngine(max_model_len=300))).max_prompt_tokens == 299


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (ClockedEngine(num_running=2), "busy with 2 requests.*profile an idle engine"),
        (ClockedEngine(metrics=""), "does not say what its KV memory"),
        (ClockedEngine(metrics='vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'), "does not say"),
    ],
)
def test_a_server_that_cannot_be_profiled_is_refused(engine: ClockedEngine, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_facts(cast("Engine", engine))


def test_the_data_type_is_read_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "dtype=torch.x\nInitializing a V1 LLM engine (v0.32.0) with config: a=1, dtype=torch.bfloat16, b=2\n"
    )
    assert logged_dtype(log) == "bfloat16"
    log.write_text("nothing")
    assert logged_dtype(log) == "unknown"
    assert logged_dtype(None) == "unknown"
