"""A launched engine over a model with sliding windows, which has several groups of KV caches."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache_core import Document, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_core.prompt import RenderedPrompt
from tests.conftest import DEMO_MODEL

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 with random weights: five layers look 128 tokens back, the sixth everywhere."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    folder = tmp_path_factory.mktemp("gemma")
    vocab_size = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        sliding_window=128,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )
    Gemma3ForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODEL / name, folder)
    return folder


@pytest.fixture(scope="module")
def hybrid(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("hybrid")
    cache = CacheConfig(
        kv_cache_bytes="8MiB", block_size=32, host_bytes="128MiB", disk_bytes="64MiB", directory=folder / "kv"
    )
    with Engine.launch(
        str(model),
        cache=cache,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        log_path=folder / "server.log",
    ) as engine:
        yield engine


def prompts(engine: Engine) -> list[RenderedPrompt]:
    rng = random.Random(1)
    words = ["the", "river", "baker", "of", "Aro", "is", "cold", "miller", "Mara", "in", "winter"]
    documents = [Document(f"d{i}", " ".join(rng.choice(words) for _ in range(200))) for i in range(10)]
    return [PromptLayout().render(engine.tokenizer, documents[i : i + 2], "Who is cold?") for i in range(9)]


def test_it_is_served_from_all_tiers_with_the_same_answers_and_nothing_is_left_to_vllms_order(hybrid: Engine) -> None:
    asked = prompts(hybrid)
    first = [hybrid.generate(prompt, max_tokens=8) for prompt in asked]
    again = [hybrid.generate(prompt, max_tokens=8) for prompt in asked]
    assert [a.text for a in again] == [a.text for a in first]
    assert sum(a.stats.num_host_tokens or 0 for a in again) > 0
    tiers = hybrid.stats().tiers
    assert [tier.name for tier in tiers] == ["gpu", "host", "disk"]
    assert all(0 < tier.used_bytes <= tier.capacity_bytes for tier in tiers)
    assert hybrid.log_path is not None
    assert "RC-TREE-OFF" not in hybrid.log_path.read_text(encoding="utf-8")
