"""``cache=None`` runs plain vLLM: the same doors, and nothing of RAGCache inside."""

from __future__ import annotations

import pytest
from langchain_core.tools import tool
from llama_index.core.tools import FunctionTool

from ragcache_core.client import Engine
from ragcache_core.errors import RequestRejectedError
from ragcache_integrations.langchain import ChatRAGCache
from ragcache_integrations.llamaindex import RAGCacheLLM


def test_plain_vllm_answers_at_once_and_says_nothing_of_a_cache(plain: Engine) -> None:
    answers = [plain.generate("Who is cold?", max_tokens=2) for _ in range(3)]
    http, key = plain.http_client(), {"Authorization": f"Bearer {plain.api_key}"}
    for route in ("stats", "requests/cmpl-1"):  # not there, so that no client waits for their answers
        assert http.get(f"{plain.base_url}/ragcache/{route}", headers=key).json().get("detail") == "Not Found"
    assert {answer.stats.num_gpu_tokens for answer in answers} == {None}
    assert plain.tokenize("Who is cold?")
    stats = plain.stats()
    assert (stats.policy, stats.tiers) == (None, ())
    assert stats.num_prompt_tokens > 0
    page = plain.http_client().get(f"{plain.base_url.removesuffix('/v1')}/metrics").text
    assert "vllm:prompt_tokens_total" in page
    assert "ragcache_" not in page
    assert plain.log_path is not None
    log = plain.log_path.read_text(encoding="utf-8")
    assert "RAGCacheScheduler" not in log
    assert "ragcache_core.vllm_plugin.connector" not in log


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def test_tools_on_an_engine_that_was_started_without_them_name_both_options(plain: Engine) -> None:
    wanted = r"--enable-auto-tool-choice --tool-call-parser .*enable_auto_tool_choice=True, tool_call_parser="
    llm = ChatRAGCache(engine=plain)
    for choice in (None, "any", "add"):
        with pytest.raises(RequestRejectedError, match=wanted):
            llm.bind_tools([add], tool_choice=choice).invoke("What is 1 + 2?")
    with pytest.raises(RequestRejectedError, match=wanted):
        await llm.bind_tools([add]).ainvoke("What is 1 + 2?")
    with pytest.raises(RequestRejectedError, match=wanted):
        list(llm.bind_tools([add]).stream("What is 1 + 2?"))
    with pytest.raises(RequestRejectedError, match=wanted):
        RAGCacheLLM(plain).chat_with_tools([FunctionTool.from_defaults(add.func)], user_msg="What is 1 + 2?")
