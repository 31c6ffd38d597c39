"""A conversation about retrieved documents with LangGraph's memory: each turn starts from where the last one ended.

The memory keeps what was shown and said, so that a turn's prompt begins with all of the one before, documents included.
A document that the conversation shows already is referred to (``deduplicate``), not shown again. Each turn is retained
for a minute, in which the next question may come (``retain_s``). Run it with
``python -m examples.langchain_conversation``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from examples._shared import Row, open_demo_store, open_engine, read_options, show
from ragcache_core import PromptLayout
from ragcache_integrations.langchain import CacheStatsCallbackHandler, ChatRAGCache, RAGCacheRetriever, format_documents

CONVERSATIONS = (
    ("In which country is Memgexdak?", "What did the mayor of Memgexdak work as?", "Which country is Memgexdak in?"),
    ("What is the capital of Bivfik?", "Which animal is the emblem of the capital of Bivfik?"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    rows = []
    with open_engine(options) as engine, open_demo_store() as store:
        llm = ChatRAGCache(engine=engine, temperature=0, max_tokens=32, deduplicate=True)
        retriever = RAGCacheRetriever(store=store, engine=engine, k=2)
        system = SystemMessage(PromptLayout().static_prefix)

        def answer(state: MessagesState) -> dict[str, Any]:
            return {"messages": [llm.invoke([system, *state["messages"]], retain_s=60)]}

        graph = StateGraph(MessagesState).add_node(answer).add_edge(START, "answer").compile(InMemorySaver())
        for name, questions in enumerate(CONVERSATIONS, 1):
            for number, question in enumerate(questions, 1):
                stats = CacheStatsCallbackHandler()
                shown = format_documents(retriever.invoke(question))
                asked = HumanMessage(f"{shown}\n\nQuestion: {question}")
                config: Any = {"configurable": {"thread_id": str(name)}, "callbacks": [stats]}
                said = graph.invoke({"messages": [asked]}, config)["messages"][-1]
                ((_, request),) = stats.runs
                rows.append(Row.of(question, f"turn {number}", said.text, request))
    show(rows, options)


if __name__ == "__main__":
    main()
