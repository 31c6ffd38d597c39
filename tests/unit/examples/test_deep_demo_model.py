"""The committed deep demo model: it has its depth, reads three documents behind one another, and fits."""

import json
from functools import cache
from pathlib import Path

import pytest

from examples.demo_model_training import evaluate
from examples.demo_model_training.export import load_exported
from examples.demo_model_training.model import DemoLlama
from examples.demo_model_training.tokenizer import Vocabulary

FOLDER = Path(__file__).parents[3] / "examples" / "deep_demo_model"
CASES = {case.name: case for case in (*evaluate.CASES, *evaluate.DEEP_CASES)}
SEED = evaluate.HELD_OUT_SEED + 500


@cache
def model() -> DemoLlama:
    return load_exported(FOLDER)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "floor"), [("single, k = 3", 0.9), ("three-hop, k = 3", 0.75), ("continued two-hop, k = 3", 0.85)]
)
def test_held_out_questions_are_answered_exactly(name: str, floor: float) -> None:
    prompts = evaluate.held_out_prompts(Vocabulary(), CASES[name], SEED)
    assert evaluate.measure(model(), name, prompts, num_questions=25).exact_match >= floor


def test_it_has_twelve_layers_with_grouped_queries_in_at_most_16_mb() -> None:
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config["num_hidden_layers"] == 12
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert (FOLDER / "model.safetensors").stat().st_size <= 16e6
