"""A LangChain agent that decides itself to search; asked again, each of its steps starts from cached KV.

Run it with ``python -m examples.langchain_agent``.
"""

from __future__ import annotations

from collections.abc import Sequence

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import create_retriever_tool

from examples._shared import Row, demo_questions, open_demo_store, open_engine, read_options, show
from ragcache_core import PromptLayout
from ragcache_integrations.langchain import CacheStatsCallbackHandler, ChatRAGCache, RAGCacheRetriever


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    rows = []
    with open_engine(options) as engine, open_demo_store() as store:
        retriever = RAGCacheRetriever(store=store, engine=engine, k=3)
        search = create_retriever_tool(retriever, "search", "Search the documents.")
        llm = ChatRAGCache(engine=engine, temperature=0, max_tokens=64)
        agent = create_agent(llm, [search], system_prompt=PromptLayout().static_prefix)
        for question in [q["question"] for q in demo_questions("single")[:2]]:
            for note in ("step", "again"):
                stats = CacheStatsCallbackHandler()
                config = RunnableConfig(callbacks=[stats], recursion_limit=6)
                state = agent.invoke({"messages": [HumanMessage(question)]}, config)
                said = [m for m in state["messages"] if m.type == "ai"]
                for number, (message, (_, request)) in enumerate(zip(said, stats.runs, strict=True), 1):
                    calls = [f"{c['name']}({', '.join(map(str, c['args'].values()))})" for c in message.tool_calls]
                    rows.append(Row.of(question, f"{note} {number}", " ".join(calls) or message.text, request))
    show(rows, options)


if __name__ == "__main__":
    main()
