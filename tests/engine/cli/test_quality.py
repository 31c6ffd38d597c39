"""``ragcache calibrate`` and ``ragcache quality`` over real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from examples.demo_model_training.recurring import recurring_questions
from ragcache_core.cli import cli
from ragcache_core.profiles.calibration import calibration_path, load_calibration
from ragcache_core.quality.questions import to_line

pytestmark = pytest.mark.benchmark

NUM_QUESTIONS = 12
SIZES = ["--kv-cache-bytes", "64MiB", "--host-bytes", "64MiB", "--block-size", "32", "--max-tokens", "16"]
VLLM_ARGS = ["--", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]


def drawn_questions(folder: Path) -> str:
    path = folder / "questions.jsonl"
    drawn = [question for question in recurring_questions(40) if question.kind == "continued"][:NUM_QUESTIONS]
    path.write_text("\n".join(to_line(question) for question in drawn), encoding="utf-8")
    return str(path)


def test_a_model_is_calibrated_with_the_engine_that_will_use_it(
    demo_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_data_dir", lambda name: str(tmp_path / name))
    questions = drawn_questions(tmp_path)
    result = CliRunner().invoke(
        cli,
        ["calibrate", demo_model, "--questions", questions, "--alphas", "1.7", "--json", *SIZES, *VLLM_ARGS],
    )
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["full"] == 1.0
    assert told["alpha"] == 1.7
    (point,) = load_calibration(calibration_path(demo_model, "whole_chunks")).points
    assert (point.quality, point.num_questions) == (1.0, NUM_QUESTIONS)
    assert 0.0 < point.recomputed < 0.6  # some were reused as they were, some computed again


def test_answers_from_kv_of_eight_bits_are_compared_with_exact_ones(demo_model: str, tmp_path: Path) -> None:
    pytest.importorskip("blosc2")
    methods = ["--compression", "int8", "--disk-bytes", "256MiB"]
    result = CliRunner().invoke(
        cli,
        ["quality", demo_model, "--questions", drawn_questions(tmp_path), *methods, "--json", *SIZES, *VLLM_ARGS],
    )
    assert result.exit_code == 0, result.stderr
    rows = {row["way"]: row for row in json.loads(result.stdout)["summaries"]}
    exact, approximate = (rows[name] for name in ("prefix caching", "disk, int8"))
    assert approximate["num_computed_tokens"] < 0.5 * exact["num_computed_tokens"], "one engine stored the documents"
    assert approximate["agreement"] > 0.8
