"""Agents of LangChain that search with a tool: the next call of the model is prefilled while the tool runs."""

import asyncio
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document as LangChainDocument
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import BaseTool, create_retriever_tool, tool
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition

from ragcache_core.client import Engine
from ragcache_integrations.langchain import ChatRAGCache, RAGCacheRetriever, format_documents, prompt_from_layout
from tests.support.scripted_server import Reply, ScriptedServer, Seen
from tests.support.scripted_source import QUESTION, Stage

pytestmark = pytest.mark.usefixtures("idle")
STATIC = "Answer the question from what the search finds, and say no more than it does. Be brief, and do not guess."


def search_tool(retriever: RAGCacheRetriever) -> BaseTool:
    return create_retriever_tool(retriever, "search", "Search the sky.")


def agent_of(llm: ChatRAGCache, tools: list[BaseTool]) -> Any:
    return create_agent(llm, tools, system_prompt=STATIC)


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def graph_of(llm: ChatRAGCache, tools: list[BaseTool]) -> Any:
    with_tools = llm.bind_tools(tools)
    graph = StateGraph(State)
    graph.add_node("model", lambda s: {"messages": with_tools.invoke([SystemMessage(STATIC), *s["messages"]])})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


async def run(agent: Any, way: str) -> None:
    asked = {"messages": [HumanMessage(QUESTION)]}
    match way:
        case "invoke":
            await asyncio.to_thread(agent.invoke, asked)
        case "ainvoke":
            await agent.ainvoke(asked)
        case "stream":
            await asyncio.to_thread(lambda: list(agent.stream(asked, stream_mode="messages")))
        case "astream":
            _ = [chunk async for chunk in agent.astream(asked, stream_mode="messages")]


def twice(make: Any, warmed: Any) -> RAGCacheRetriever:
    """Return a retriever whose search does not end before something is prefilled."""
    num_before = len(warmed())
    retriever: RAGCacheRetriever = make(Stage("moon sun"), Stage("moon sun", once=lambda: len(warmed()) > num_before))
    return retriever


def check_prefilled(server: ScriptedServer, warm: Seen, asked: Seen) -> None:
    known = warm.body["prompt"]
    assert server.tokens_of(asked)[: len(known)] == known
    assert [d["id"] for d in warm.documents] == [d["id"] for d in asked.documents] == ["moon", "sun"]
    assert len(known) >= server._prompt(asked)[1][-1]["end"] - 2


@pytest.mark.parametrize(
    ("make_agent", "way"),
    [(agent_of, way) for way in ("invoke", "ainvoke", "stream", "astream")] + [(graph_of, "invoke")],
)
async def test_the_next_call_of_the_model_is_prefilled_while_the_tool_searches(
    make_agent: Any, way: str, make: Any, llm: ChatRAGCache, warmed: Any, generations: Any, server: ScriptedServer
) -> None:
    await run(make_agent(llm, [search_tool(twice(make, warmed))]), way)
    (warm,), (first, second) = warmed(), generations()
    check_prefilled(server, warm, second)
    assert warm.speculation is not None
    assert first.documents == []


async def test_how_a_tool_shows_its_documents_is_learned_from_its_first_result(
    make: Any, llm: ChatRAGCache, warmed: Any, generations: Any, server: ScriptedServer
) -> None:
    for number in range(2):
        retriever = twice(make, warmed)

        @tool
        def look_up(query: str) -> str:
            """Look something up."""
            found: list[LangChainDocument] = retriever.invoke(query)  # noqa: B023
            return "Found:\n" + "\n".join(f"[{i}] {d.page_content}" for i, d in enumerate(found, 1))

        await run(agent_of(llm, [look_up]), "invoke")
        warm, asked = warmed()[-1], generations()[-1]
        if number:
            check_prefilled(server, warm, asked)
        else:
            assert server.tokens_of(asked)[: len(warm.body["prompt"])] != warm.body["prompt"]


async def test_the_second_of_two_calls_is_prefilled_up_to_what_the_first_one_finds(
    make: Any, llm: ChatRAGCache, warmed: Any, server: ScriptedServer, generations: Any
) -> None:
    first = search_tool(make(Stage("mars")))
    second = create_retriever_tool(twice(make, warmed), "second", "Search the sky again.")
    server.script(Reply(tool_calls=(("search", {"query": "red"}), ("second", {"query": QUESTION}))))
    await run(agent_of(llm, [first, second]), "ainvoke")
    (warm,), asked = warmed(), generations()[-1]
    assert warm.documents == []
    assert server.tokens_of(asked)[: len(warm.body["prompt"])] == warm.body["prompt"]
    assert [d["id"] for d in asked.documents] == ["mars", "moon", "sun"]


async def test_a_tool_that_answers_from_its_documents_leaves_the_prompt_to_its_own_chain(
    make: Any, llm: ChatRAGCache, engine: Engine, warmed: Any
) -> None:
    def context(query: str, text: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": STATIC}, {"role": "user", "content": f"{text}\n\n{query}"}]

    for _ in range(2):
        retriever = twice(make, warmed)

        @tool
        def answer(query: str) -> str:
            """Answer a question."""
            retriever.invoke(query)  # noqa: B023
            return "In a month."

        await run(agent_of(llm, [answer]), "invoke")
        engine.bind_prompt(lambda text, query: context(query, text), lambda found: found[0].page_content)
    guessed, bound = warmed()
    assert [d["id"] for d in guessed.documents] == ["moon", "sun"]
    assert [d["id"] for d in bound.documents] == ["moon"]


def test_documents_of_a_foreign_retriever_are_recognised_in_a_tools_result(llm: ChatRAGCache, generations: Any) -> None:
    class Fixed(BaseRetriever):
        def _get_relevant_documents(self, query: str, **_: Any) -> list[LangChainDocument]:
            return [LangChainDocument(id="venus", page_content="Venus is hot, and no moon goes around it at all.")]

    search = create_retriever_tool(Fixed(), "search", "Search the sky.")
    agent_of(llm, [search]).invoke({"messages": [HumanMessage(QUESTION)]})
    assert [[d["id"] for d in step.documents] for step in generations()] == [[], ["venus"]]


@pytest.mark.parametrize("asks_before", [False, True])
async def test_an_agents_next_prompt_is_for_its_own_kv(
    asks_before: bool,
    make: Any,
    engine: Engine,
    llm: ChatRAGCache,
    server: ScriptedServer,
    warmed: Any,
    generations: Any,
) -> None:
    server.adapters = ("an-adapter",)
    agents_own = ChatRAGCache(engine=engine, model="an-adapter", extra_body={"cache_salt": "tenant-a"})
    if asks_before:  # a chain whose prompt is for other KV
        chain = {"context": make(Stage("moon sun")) | format_documents, "question": RunnablePassthrough()}
        (chain | prompt_from_layout() | llm).invoke(QUESTION)
        await run(agent_of(agents_own, [search_tool(make(Stage("moon sun")))]), "invoke")
    await run(agent_of(agents_own, [search_tool(twice(make, warmed))]), "invoke")
    for seen in (warmed()[-1], generations()[-1]):
        assert (seen.body["model"], seen.body["cache_salt"]) == ("an-adapter", "tenant-a")
