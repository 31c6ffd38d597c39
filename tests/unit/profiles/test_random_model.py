"""The model made on the spot: whole, the same every time, readable by transformers."""

from __future__ import annotations

from pathlib import Path

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


def test_a_large_model_is_made_without_weights_and_never_taken_for_one_that_has_them(tmp_path: Path) -> None:
    made = random_model(SMALL, tmp_path, has_weights=False)
    assert not list(made.glob("*.safetensors"))
    assert made != random_model(SMALL, tmp_path)
    assert 8.0e9 < LLAMA_3_8B.num_parameters < 8.1e9
    assert LLAMA_3_8B.num_layers * LLAMA_3_8B.num_kv_heads * LLAMA_3_8B.head_dim * 2 * 2 == 128 << 10
