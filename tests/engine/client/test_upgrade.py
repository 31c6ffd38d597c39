"""An upgrade of the weights over one disk, and its rollback: no KV of the other weights is found, and none lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ragcache_core import CacheConfig, Document, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.client.generation import Generation
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.waiting import until

pytestmark = pytest.mark.slow

DOCUMENTS = [Document("zorval", "Zorval was a company founded by Anna in the north. " * 12)]


def served(model: Path, folder: Path, *, num_queries: int) -> list[Generation]:
    """Start an engine over the disk, ask the same ``num_queries`` times, and end it when the disk has all."""
    cache = CacheConfig(
        kv_cache_bytes="64MiB", block_size=32, host_bytes="16MiB", disk_bytes="64MiB", directory=folder / "kv"
    )
    settings = {**ENGINE_ARGS, "cache": cache, "log_path": folder / "server.log", "served_model_name": "demo"}
    with Engine.launch(str(model), max_restarts=0, **settings) as engine:
        prompt = PromptLayout().render(engine.tokenizer, DOCUMENTS, "Who founded Zorval?")
        answers = [engine.generate(prompt, max_tokens=8) for _ in range(num_queries)]
        disk = lambda: next(tier for tier in engine.stats().tiers if tier.name == "disk")  # noqa: E731
        assert until(lambda: 32 * disk().num_blocks > len(prompt.token_ids) // 2), disk()
    return answers


def test_new_weights_find_nothing_of_the_old_and_a_rollback_finds_all_of_it(tmp_path: Path) -> None:
    old, model = tmp_path / "old", tmp_path / "model"
    shutil.copytree(DEMO_MODEL, old)
    shutil.copytree(old, model)
    (before,) = served(model, tmp_path, num_queries=1)
    namespaces = {path for path in (tmp_path / "kv").rglob("*") if path.is_dir()}

    weights = load_file(model / "model.safetensors")
    changed = {name: tensor * 1.5 if "mlp" in name else tensor for name, tensor in weights.items()}
    save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    first, again = served(model, tmp_path, num_queries=2)
    assert first.stats.num_cached_tokens == 0, "KV of other weights"
    assert again.stats.num_cached_tokens > 0
    assert again.text == first.text
    assert namespaces <= {path for path in (tmp_path / "kv").rglob("*") if path.is_dir()}, "the old KV stays"

    shutil.copy2(old / "model.safetensors", model / "model.safetensors")
    (after,) = served(model, tmp_path, num_queries=1)
    assert after.text == before.text
    assert (after.stats.num_disk_tokens or 0) > after.stats.num_prompt_tokens // 2
