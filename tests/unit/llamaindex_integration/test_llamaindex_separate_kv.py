"""What a LlamaIndex retriever has prefilled carries what separates the KV of the LLM's requests."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage

from ragcache_core.client import Engine
from ragcache_integrations.llamaindex import RAGCacheLLM, RAGCacheRetriever
from tests.support.scripted_server import ScriptedServer
from tests.support.scripted_source import QUESTION, ScriptedSource, Stage

pytestmark = pytest.mark.usefixtures("idle")
SETTINGS: dict[str, Any] = {
    "model": "an-adapter",
    "additional_kwargs": {"extra_body": {"cache_salt": "tenant-a"}},
    "default_headers": {"Authorization": "Bearer of-tenant-a"},
}
PROMPT = PromptTemplate("Answer from these documents, and be brief.\n\n{context_str}\n\nQuestion: {query_str}")


def format_nodes(nodes: Any) -> str:
    return "\n\n".join(node.node.get_content() for node in nodes)


@pytest.mark.parametrize("is_bound", [False, True])
def test_retrieve_prefills_for_the_requests_of_the_llm(
    scripted: Engine, server: ScriptedServer, generations: Any, *, is_bound: bool
) -> None:
    server.adapters = ("an-adapter",)
    llm = RAGCacheLLM(scripted, **SETTINGS)
    if is_bound:
        scripted.bind_prompt(PROMPT, format_nodes, context="context_str", question="query_str")

    def warmed() -> list[Any]:
        return [request for request in server.requests if request.path == "/v1/completions"]

    for may_prefill in (is_bound, True):
        last = Stage("moon sun", once=lambda: bool(warmed()) or not may_prefill)  # noqa: B023
        nodes = RAGCacheRetriever(ScriptedSource((Stage("moon sun"), last)), scripted).retrieve(QUESTION)
        asked = PROMPT.format(context_str=format_nodes(nodes), query_str=QUESTION)
        llm.chat([ChatMessage(role="user", content=asked)])
    for seen in (warmed()[0], generations()[-1]):
        assert (seen.body["model"], seen.body["cache_salt"]) == ("an-adapter", "tenant-a")
        assert seen.authorization == "Bearer of-tenant-a"
