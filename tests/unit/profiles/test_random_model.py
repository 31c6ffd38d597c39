"""The model made on the spot: whole, the same every time, readable by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from ragcache_core.errors import ConfigError
from ragcache_core.profiles.random_model import LLAMA_3_8B, ModelShape, random_model

SMALL = ModelShape(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, vocab_size=64, max_tokens=256
)


def test_the_usual_model_has_30_million_parameters_and_8_kib_of_kv_a_token() -> None:
    shape = ModelShape()
    assert 29e6 < shape.num_parameters < 31e6
    assert shape.num_layers * shape.num_kv_heads * shape.head_dim * 2 * 4 == 8 << 10


def test_a_model_is_made_once_and_the_same_every_time(tmp_path: Path) -> None:
    made = random_model(SMALL, tmp_path / "one")
    again = random_model(SMALL, tmp_path / "two")
    assert made.name == again.name
    assert {p.name: p.read_bytes() for p in made.iterdir()} == {p.name: p.read_bytes() for p in again.iterdir()}
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert random_model(SMALL, tmp_path / "one") == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in (tmp_path / "one").iterdir()] == [made.name]  # nothing half made is left


def test_another_shape_is_another_model(tmp_path: Path) -> None:
    other = ModelShape(
        hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=48, vocab_size=64, max_tokens=256
    )
    assert random_model(SMALL, tmp_path) != random_model(other, tmp_path)


def test_the_weights_are_all_that_the_configuration_asks_for(tmp_path: Path) -> None:
    model = random_model(SMALL, tmp_path)
    weights = load_file(model / "model.safetensors")
    assert sum(w.size for w in weights.values()) == SMALL.num_parameters
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (16, 32)
    assert 0.015 < float(weights["lm_head.weight"].std()) < 0.025
    assert json.loads((model / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_large_model_is_made_without_weights_and_never_taken_for_one_that_has_them(tmp_path: Path) -> None:
    made = random_model(SMALL, tmp_path, has_weights=False)
    assert not list(made.glob("*.safetensors"))
    assert made != random_model(SMALL, tmp_path)
    assert 8.0e9 < LLAMA_3_8B.num_parameters < 8.1e9
    assert LLAMA_3_8B.num_layers * LLAMA_3_8B.num_kv_heads * LLAMA_3_8B.head_dim * 2 * 2 == 128 << 10


def test_a_word_is_a_token(tmp_path: Path) -> None:
    from tests.support.local_tokenizer import LocalTokenizer

    tokenizer = LocalTokenizer.of_model(str(random_model(SMALL, tmp_path)))
    assert tokenizer.encode("w17 w3  w63").token_ids == (17, 3, 63)
    assert tokenizer.lay_out([{"role": "user", "content": "w9"}], ()).token_ids[-1] == 9


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_heads 3"):
        ModelShape(num_heads=3)
