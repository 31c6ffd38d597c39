"""A LangChain agent with a retriever tool, as LangChain makes them: nothing but the model and the retriever is ours.

While the tool searches, the engine reads what its result will show. The documents of each step are named in its
statistics, and a second run finds them cached. Run it with ``python -m examples.langchain_retriever_agent``.
"""

from __future__ import annotations

from collections.abc import Sequence

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import create_retriever_tool

from examples._shared import Row, SlowSearch, demo_questions, open_demo_store, open_engine, read_options, show
from examples.langchain_agent import calls_of
from ragcache_core import PromptLayout
from ragcache_integrations.langchain import CacheStatsCallbackHandler, ChatRAGCache, RAGCacheRetriever


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    rows = []
    with open_engine(options) as engine, open_demo_store() as store:
        llm = ChatRAGCache(engine=engine, temperature=0, max_tokens=64)
        retriever = RAGCacheRetriever(store=SlowSearch(store), engine=engine, k=2)
        shown = PromptTemplate.from_template("Document: {page_content}")
        search = create_retriever_tool(retriever, "search", "Search the documents.", document_prompt=shown)
        agent = create_agent(llm, [search], system_prompt=PromptLayout().static_prefix)
        for note in ("step", "again"):
            for question in [q["question"] for q in demo_questions("single")[:2]]:
                stats = CacheStatsCallbackHandler()
                config = RunnableConfig(callbacks=[stats], recursion_limit=6)
                state = agent.invoke({"messages": [HumanMessage(question)]}, config)
                said = [message for message in state["messages"] if isinstance(message, AIMessage)]
                for number, (message, (_, request)) in enumerate(zip(said, stats.runs, strict=True), 1):
                    text = calls_of(message) or f"{message.text} ({', '.join(d.doc_id for d in request.documents)})"
                    hidden_s = None if message.tool_calls else stats.summary().overlapped_search_s
                    rows.append(Row.of(question, f"{note} {number}", text, request, hidden_s))
    show(rows, options)


if __name__ == "__main__":
    main()
