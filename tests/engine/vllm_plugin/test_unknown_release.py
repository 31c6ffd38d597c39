"""A vLLM that RAGCache does not know serves with the connector alone, and says once what is missing and the cure."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ragcache_core import ChunkReuse, Document, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.config import CacheConfig
from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin import compat, facts, release
from ragcache_core.vllm_plugin.connector.fallback import FallbackConnector
from ragcache_core.vllm_plugin.connector.gpu_connector import DocumentConnector
from ragcache_core.vllm_plugin.connector.minimal import MinimalConnector
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.changed_vllm import changed_vllm

LAYOUT = PromptLayout()
PROMPTS = [
    [
        Document(f"d{i}", f"Company {i} was founded in {1800 + i} and makes clocks. " * 12),
        Document("all", "Clocks. " * 40),
    ]
    for i in (1, 2)
]


@pytest.fixture(scope="module")
def next_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM 0.34: a class that RAGCache extends is gone, and so is a name of a folder of its own."""
    spec, queue = "class TieringOffloadingSpec(", "v1/core/kv_cache_utils.py"
    return changed_vllm(
        tmp_path_factory.mktemp("vllm"),
        {
            "_version.py": ("'0.3", "'0.34.0' or '0.3"),
            "v1/kv_offload/tiering/spec.py": (spec, spec.replace("Spec", "SpecV2")),
            queue: (
                "def iter_blocks_after(\n        self,",
                "def iter_blocks_after(\n        self,\n        why: str,",
            ),
        },
    )


@pytest.fixture(scope="module")
def alone(next_release: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("alone")
    cache = CacheConfig(
        kv_cache_bytes="64MiB",
        block_size=32,
        host_bytes="64MiB",
        disk_bytes="64MiB",
        directory=folder / "kv",
        chunk_reuse=ChunkReuse(),
    )
    settings: dict[str, Any] = {**ENGINE_ARGS, "cache": cache}
    env = {"PYTHONPATH": f"{next_release}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with Engine.launch(str(DEMO_MODEL), log_path=folder / "server.log", env=env, **settings) as engine:
        yield engine


@pytest.mark.slow
def test_it_answers_as_plain_vllm_and_reports_what_documents_were_cached(alone: Engine, plain: Engine) -> None:
    for documents in (*PROMPTS, *PROMPTS):
        prompt = LAYOUT.render(alone.tokenizer, documents, "Who makes clocks?")
        answer = alone.generate(prompt, max_tokens=8)
        assert answer.text == plain.generate(prompt, max_tokens=8).text
    assert answer.stats.num_gpu_tokens == answer.stats.num_cached_tokens > 0
    assert [(each.doc_id, each.num_cached_tokens > 0) for each in answer.stats.documents] == [
        ("d2", True),
        ("all", True),
    ]
    stats = alone.stats()
    assert [tier.name for tier in stats.tiers] == ["gpu"]
    assert stats.num_requests == 4


@pytest.mark.slow
def test_one_warning_names_the_release_what_is_missing_and_the_hint(alone: Engine) -> None:
    assert alone.log_path is not None
    lines = alone.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    (warning,) = [line for line in lines if "RC-CACHE-OFF" in line]
    assert "this is vLLM 0.34.0, RAGCache knows 0.32 and 0.33" in warning
    assert "vllm.v1.kv_offload.tiering.spec has no TieringOffloadingSpec" in warning
    assert "FreeKVCacheBlockQueue.iter_blocks_after takes self, why, cursor" in warning
    assert warning.endswith("Install one of those, or a newer ragcache")


@pytest.mark.slow
def test_nothing_is_asked_ahead_of_an_engine_that_would_not_wait_with_it(alone: Engine) -> None:
    with httpx.Client(base_url=alone.base_url, headers={"Authorization": f"Bearer {alone.api_key}"}) as http:
        load = http.get("ragcache/load").json()
        assert (load["num_pending_prefills"], load["pending_prefill_s"]) == (0, 0.0)
        assert (load["max_prefill_bs"], load["is_speculative"], load["has_room"]) == (0, False, False)
        assert http.post("ragcache/speculations/of-none/confirm").status_code == 204
        assert [tree["nodes"] for tree in http.get("ragcache/tree").json()["engines"]] == [[]], "for the page"
        assert http.get("ragcache/requests").json()["num_running"] == 0


def test_what_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts.missing_facts() == []

    def lookup(self: object, key: object, req_context: object, *, tier: int) -> None: ...

    def touch(self: object) -> None: ...

    monkeypatch.setattr(compat.OffloadingManager, "lookup", lookup)
    monkeypatch.setattr(compat.OffloadingManager, "touch", touch)
    monkeypatch.setitem(facts.PRIVATE, compat.Scheduler, ("_preempt_request", "_preempt"))
    assert facts.missing_facts() == [
        "OffloadingManager.lookup takes self, key, req_context, tier",
        "OffloadingManager.touch takes self",
        "Scheduler has no _preempt",
    ]
    release.unsupported_reason.cache_clear()
    why = release.unsupported_reason()
    release.unsupported_reason.cache_clear()
    assert why is not None
    assert "Scheduler has no _preempt" in why


def test_a_hook_takes_what_vllm_may_give_it_and_no_less() -> None:
    def theirs(self: object, key: int, *, size: int = 0) -> None: ...

    def same(self: object, key: int, *, size: int = 0) -> None: ...

    def more(self: object, key: int, *extra: object, **named: object) -> None: ...

    def without_option(self: object, key: int) -> None: ...

    def greedy(self: object, key: int, other: int, *, size: int = 0) -> None: ...

    accepted = {ours.__name__: facts._accepts(ours, theirs) for ours in (same, more, without_option, greedy)}
    assert accepted == {"same": True, "more": True, "without_option": False, "greedy": False}


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (release, inspect.getmodule(MinimalConnector)):
        monkeypatch.setattr(module, "unsupported_reason", lambda: "this is vLLM 9")


@pytest.mark.parametrize("error", [AttributeError("gone"), TypeError("called otherwise")])
def test_an_engine_starts_where_even_documents_cannot_be_read(
    unknown: None, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture, error: Exception
) -> None:
    monkeypatch.setattr(DocumentConnector, "__init__", _raising(error))
    made = FallbackConnector(_config(), KVConnectorRole.SCHEDULER, None)
    assert type(made) is MinimalConnector
    assert made.get_num_new_matched_tokens(None, 7) == (0, False)
    assert made.request_finished_all_groups(None, ()) == (False, None)
    (warning,) = [message for message in plugin_log.messages if message.startswith("RC-CACHE-OFF: ")]
    assert warning.endswith("and chunk reuse, and without documents and statistics: this is vLLM 9")


def test_settings_that_are_wrong_are_refused_as_ever(unknown: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DocumentConnector, "__init__", _raising(ConfigError("queue_window is 0")))
    with pytest.raises(ConfigError, match="queue_window"):
        FallbackConnector(_config(), KVConnectorRole.SCHEDULER, None)


def _raising(error: Exception) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise error

    return fail


def _config() -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(), model_config=None)
