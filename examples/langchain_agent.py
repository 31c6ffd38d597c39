"""A LangChain agent that decides itself to search; its tool is the fused pair, which answers while it searches.

Asked again, each of its steps starts from cached KV. Run it with ``python -m examples.langchain_agent``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool

from examples._shared import Row, SlowSearch, demo_questions, open_demo_store, open_engine, read_options, show
from ragcache_core import PromptLayout
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    SpeculativeRAG,
    prompt_from_layout,
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    rows = []
    with open_engine(options) as engine, open_demo_store() as store:
        llm = ChatRAGCache(engine=engine, temperature=0, max_tokens=64)
        retriever = RAGCacheRetriever(store=SlowSearch(store), engine=engine, k=2)
        rag = SpeculativeRAG(retriever=retriever, prompt=prompt_from_layout(), llm=llm)

        @tool(response_format="content_and_artifact")
        def search(query: str, config: RunnableConfig) -> tuple[str, dict[str, Any]]:
            """Search the documents."""
            answer = rag.invoke(query, config)
            return answer.text, answer.response_metadata["ragcache"]["pipeline"]

        agent = create_agent(llm, [search], system_prompt=PromptLayout().static_prefix)
        for question in [q["question"] for q in demo_questions("single")[:2]]:
            for note in ("step", "again"):
                stats = CacheStatsCallbackHandler()
                config = RunnableConfig(callbacks=[stats], recursion_limit=6)
                state = agent.invoke({"messages": [HumanMessage(question)]}, config)
                said = state["messages"][1:]  # by the model, in a step of the agent or within the tool
                for number, (message, (_, request)) in enumerate(zip(said, stats.runs, strict=True), 1):
                    hidden_s = message.artifact["overlapped_search_s"] if isinstance(message, ToolMessage) else None
                    text = calls_of(message) if isinstance(message, AIMessage) else ""
                    rows.append(Row.of(question, f"{note} {number}", text or message.text, request, hidden_s))
    show(rows, options)


def calls_of(message: AIMessage) -> str:
    """Return the tool calls of a message as code."""
    return " ".join(f"{c['name']}({', '.join(map(str, c['args'].values()))})" for c in message.tool_calls)


if __name__ == "__main__":
    main()
