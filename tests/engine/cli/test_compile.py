"""``ragcache compile`` on real engines: what one writes into a folder, another loads, and answers as without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_core.prompt import PromptLayout
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document

pytestmark = pytest.mark.slow  # engines of its own

SIZES = {"kv_cache_bytes": "32MiB", "host_bytes": "64MiB", "block_size": 32}
VLLM_ARGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")


def compile_command(model: str, store: Path, folder: Path, *options: str) -> Result:
    sizes = [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    arguments = ["compile", model, "--store", str(store), "--shared", folder.as_uri(), "--budget", "32MiB", "--json"]
    return CliRunner().invoke(cli, [*arguments, *sizes, *options, "--", *VLLM_ARGS])


def compiled(model: str, store: Path, folder: Path, *options: str) -> dict[str, Any]:
    result = compile_command(model, store, folder, *options)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_engines_load_what_was_compiled_and_a_second_run_computes_what_changed(demo_model: str, tmp_path: Path) -> None:
    store, folder = tmp_path / "store", tmp_path / "kv"
    documents = {
        topic: Document(topic, f"the house of {topic} is near the river. " * 30)
        for topic in ("zor", "mel", "tar", "oru", "vel", "kin")
    }
    with DocumentStore.create(store) as opened:
        opened.add(list(documents.values()))
    first = compiled(demo_model, store, folder, "-k", "1")
    assert first["forecast"] is None
    assert first["forecasts"] == [], "six documents have no halves to tell anything from"
    assert {path["doc_ids"][0] for path in first["paths"]} == set(documents)
    assert first["receipt"]["num_warmed"] == len(first["paths"])
    assert first["num_loaded_tokens"] == 0

    changed = first["paths"][0]["doc_ids"][0]
    with DocumentStore.open(store) as opened:
        opened.put([Document(changed, f"the house of {changed} is far from any river. " * 30)])
        documents[changed] = next(iter(opened.get([changed])))
    second = compiled(demo_model, store, folder, "-k", "1")
    num_unchanged = second["num_tokens"] - second["paths"][0]["num_tokens"]
    assert 0.8 * num_unchanged < second["num_loaded_tokens"] <= num_unchanged + 32

    layout = PromptLayout()
    prompts = [layout.messages([document], "where is it") for document in documents.values()]
    new = Document("new", "a house that was never compiled is far from any river. " * 30)
    kept = {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}
    answers = []
    for cache in (None, CacheConfig(shared=folder.as_uri(), shared_read_only=True, **SIZES)):
        with Engine.launch(demo_model, cache=cache, dtype="float32", enforce_eager=True, max_model_len=1024) as engine:
            answers.append([engine.generate(prompt, max_tokens=8) for prompt in prompts])
            engine.generate(layout.messages([new], "where is it"), max_tokens=8)
            stats = engine.stats()
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))} == kept, "it is only read"
    (shared,) = (tier for tier in stats.tiers if tier.name == "shared")
    assert (shared.num_dropped_blocks, stats.num_shared_failures, stats.num_shared_pending_blocks) == (0, 0, 0)
    assert [answer.text for answer in answers[0]] == [answer.text for answer in answers[1]]
    for answer in answers[1]:
        assert (answer.stats.num_shared_tokens or 0) >= 0.8 * answer.stats.num_prompt_tokens


def test_a_forecast_is_about_later_questions_of_the_log(demo_model: str, tmp_path: Path) -> None:
    store, log = tmp_path / "store", tmp_path / "questions.txt"
    early, late = ("zor", "mel", "tar"), ("oru", "vel", "kin")
    with DocumentStore.create(store) as opened:
        opened.add([Document(topic, f"the house of {topic} is near the river. " * 30) for topic in (*early, *late)])
    forecasts = []
    for topics in ((early * 5, late * 5), ((*early, *late) * 3, (*early, *late) * 3)):
        log.write_text("\n".join(f"where is the house of {topic}" for half in topics for topic in half))
        found = compiled(demo_model, store, tmp_path / "kv", "-k", "1", "--from-log", str(log), "--dry-run")
        assert {path["doc_ids"][0] for path in found["paths"]} == {*early, *late}, "picked from the whole log"
        forecasts.append(found["forecasts"])
    for found in forecasts:
        shares = [part["warm"]["cached_share"] for part in found]
        assert len(shares) == 4
        assert shares == sorted(shares), "a larger budget has no fewer hits"
    other, same = (found[-2] for found in forecasts)  # half of the tokens: the most asked come first
    assert other["warm"]["cached_share"] == other["cold"]["cached_share"]
    assert same["warm"]["cached_share"] > same["cold"]["cached_share"]


def test_a_store_that_deletes_blocks_for_its_limit_is_not_reported_to_have_all(demo_model: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with DocumentStore.create(store) as opened:
        opened.add(
            [Document(topic, f"the house of {topic} is near the river. " * 30) for topic in ("zor", "mel", "tar")]
        )
    result = compile_command(demo_model, store, tmp_path / "kv", "--shared-read-only")
    assert (result.exit_code, "--no-shared-read-only" in result.stderr) == (2, True), result.stderr
    result = compile_command(demo_model, store, tmp_path / "kv", "-k", "1", "--shared-bytes", "1MiB")
    assert result.exit_code == 1
    assert "to keep --shared-bytes" in result.stderr
    part = compiled(demo_model, store, tmp_path / "kv", "-k", "1", "--budget", "3MiB")
    assert len({path["doc_ids"][-1] for path in part["paths"]}) == 3 - part["num_left_out_documents"]
    assert part["num_left_out_documents"] in (1, 2), "the budget has space for one"
