"""``cache=None`` runs plain vLLM: the same doors, and nothing of RAGCache inside."""

from __future__ import annotations

from pathlib import Path

from ragcache_core.client import Engine
from tests.conftest import DEMO_MODEL


def test_plain_vllm_answers_at_once_and_says_nothing_of_a_cache(tmp_path: Path) -> None:
    with Engine.launch(
        str(DEMO_MODEL),
        cache=None,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=32,
        log_path=tmp_path / "server.log",
    ) as engine:
        answers = [engine.generate("Who is cold?", max_tokens=2) for _ in range(3)]
        http, key = engine.http_client(), {"Authorization": f"Bearer {engine.api_key}"}
        for route in ("stats", "requests/cmpl-1"):  # not there, so that nobody waits for their answers
            assert http.get(f"{engine.base_url}/ragcache/{route}", headers=key).json().get("detail") == "Not Found"
        assert {answer.stats.num_gpu_tokens for answer in answers} == {None}
        stats = engine.stats()
        assert (stats.policy, stats.tiers) == (None, ())
        assert stats.num_prompt_tokens > 0
        page = engine.http_client().get(f"{engine.base_url.removesuffix('/v1')}/metrics").text
        assert "vllm:prompt_tokens_total" in page
        assert "ragcache_" not in page
        log = (tmp_path / "server.log").read_text(encoding="utf-8")
        assert "RAGCacheScheduler" not in log
        assert "ragcache_core.vllm_plugin.connector" not in log
