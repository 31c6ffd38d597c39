"""An ordinary chain whose prompt is prefilled while its retriever searches."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document as LangChainDocument
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool

from examples.vector_database import copy_store
from ragcache_core import PromptLayout
from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError, SearchError, SearchTimeoutError
from ragcache_core.retrieval import DocumentStore, TfidfSvdEmbedder, pgvector_stages
from ragcache_integrations.langchain import ChatRAGCache, RAGCacheRetriever, format_documents, prompt_from_layout
from tests.support.postgres import pgvector_server
from tests.support.scripted_server import Reply, ScriptedServer
from tests.support.scripted_source import DOCUMENTS, EVENTS_OF_A_CHANGE, QUESTION, ScriptedSource, Stage

Eventually = Callable[[Callable[[], bool]], bool]
pytestmark = pytest.mark.usefixtures("idle")

STATIC = "Answer the question from the documents, and say no more than they do. Be brief, and do not guess."
PROMPT = ChatPromptTemplate.from_messages([("system", STATIC), ("human", "{context}\n\nQuestion: {question}")])
ENDLESS = Reply("word " * 100_000, token_wait_s=0.002)


def format_docs(documents: list[LangChainDocument]) -> str:
    return "\n\n".join(d.page_content for d in documents)


class Events(BaseCallbackHandler):
    """Keeps the custom events it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self.seen.append((name, data))

    @property
    def order(self) -> list[tuple[object, ...]]:
        return [(data.get("event", "stage"), data["stage"], *data["doc_ids"]) for _, data in self.seen]

    def num(self, kind: str) -> int:
        return sum(data.get("event") == kind for _, data in self.seen)


def chain_of(retriever: RAGCacheRetriever, llm: ChatRAGCache) -> Runnable[str, str]:
    """Return a chain with nothing in it but LangChain's own words."""
    parts = {"context": retriever | format_docs, "question": RunnablePassthrough()}
    return parts | PROMPT | llm | StrOutputParser()


async def run(chain: Runnable[Any, Any], is_async: bool, config: Any = None) -> Any:
    return (
        await chain.ainvoke(QUESTION, config) if is_async else await asyncio.to_thread(chain.invoke, QUESTION, config)
    )


both_ways = pytest.mark.parametrize("is_async", [False, True])


@both_ways
async def test_a_chain_whose_prompt_is_bound_is_prefilled_while_it_searches(
    is_async: bool, make: Any, llm: ChatRAGCache, engine: Engine, warmed: Any, server: ScriptedServer, generations: Any,
    eventually: Eventually,
) -> None:  # fmt: skip
    engine.bind_prompt(PROMPT, format_docs)
    chain = chain_of(make(Stage("moon sun"), Stage("moon sun", once=lambda: bool(warmed()))), llm)
    answer = await run(chain, is_async)
    assert answer == f"You said: {DOCUMENTS['moon'].text}\n\n{DOCUMENTS['sun'].text}\n\nQuestion: {QUESTION}"
    ((warm,), (asked,)) = warmed(), generations()
    assert (warm.body["max_tokens"], [d["id"] for d in warm.documents]) == (1, ["moon", "sun"])
    assert warm.speculation is not None
    assert asked.speculation is None
    known, prompt = warm.body["prompt"], asked.kv_transfer_params["prompt_token_ids"]
    assert prompt[: len(known)] == known
    assert len(known) >= asked.documents[-1]["end"] - 2
    assert await asyncio.to_thread(eventually, lambda: server.confirmed == [warm.speculation])


@both_ways
async def test_the_prompt_is_learned_from_the_first_question(
    is_async: bool, make: Any, llm: ChatRAGCache, warmed: Any, generations: Any
) -> None:
    await run(chain_of(make(Stage("sun mars"), Stage("sun mars")), llm), is_async)
    assert warmed() == []
    await run(chain_of(make(Stage("moon sun"), Stage("moon sun", once=lambda: bool(warmed()))), llm), is_async)
    (warm,), asked = warmed(), generations()[-1]
    assert [d["id"] for d in warm.documents] == ["moon", "sun"]
    assert asked.kv_transfer_params["prompt_token_ids"][: len(warm.body["prompt"])] == warm.body["prompt"]


class OtherRetriever(BaseRetriever):
    """A retriever without stages, which finds the same in every search."""

    found: list[LangChainDocument]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> Any:
        return self.found


QUESTION_FIRST = ChatPromptTemplate.from_messages([("system", STATIC), ("human", "Q: {question}\n\n{context}")])


@pytest.mark.parametrize("is_a_retriever", [True, False])
@pytest.mark.parametrize(
    ("ids", "question"),
    [
        ("sun mars", QUESTION),
        ("mars sun", QUESTION),
        ("sun", QUESTION),
        ("sun", "How hot is it?"),
        ("moon sun", "Is it?"),
    ],
)
def test_a_prompt_of_another_retriever_teaches_nothing_and_is_not_warned_of(
    is_a_retriever: bool,
    ids: str,
    question: str,
    make: Any,
    llm: ChatRAGCache,
    warmed: Any,
    generations: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chain_of(make(Stage("sun mars"), Stage("sun mars")), llm).invoke(QUESTION)
    found = [LangChainDocument(id=i, page_content=DOCUMENTS[i].text) for i in ids.split()]
    search: Any = OtherRetriever(found=found) if is_a_retriever else RunnableLambda(lambda _: found)
    ({"context": search | format_docs, "question": RunnablePassthrough()} | QUESTION_FIRST | llm).invoke(question)
    assert caplog.records == []
    chain_of(make(Stage("moon sun"), Stage("moon sun", once=lambda: bool(warmed()))), llm).invoke(QUESTION)
    (warm,), asked = warmed(), generations()[-1]
    assert [d["id"] for d in warm.documents] == ["moon", "sun"]
    assert asked.kv_transfer_params["prompt_token_ids"][: len(warm.body["prompt"])] == warm.body["prompt"]


def test_a_prompt_with_a_part_of_an_older_search_teaches_nothing(
    make: Any, llm: ChatRAGCache, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    make(Stage("sun mars")).invoke("What is far away?")
    found = [LangChainDocument(id="sun", page_content=DOCUMENTS["sun"].text)]
    other = {"context": OtherRetriever(found=found) | format_docs, "question": RunnablePassthrough()}
    (other | QUESTION_FIRST | llm).invoke(QUESTION)
    assert caplog.records == []
    assert engine.integration.prompts.bound_prompt is None


def test_the_warning_names_the_prompt_and_the_retriever(
    make: Any, llm: ChatRAGCache, caplog: pytest.LogCaptureFixture
) -> None:
    chain = {"context": make(Stage("moon sun")) | format_docs, "question": RunnablePassthrough()} | QUESTION_FIRST | llm
    for _ in range(2):
        chain.invoke(QUESTION)
    (record,) = caplog.records
    assert "RAGCacheRetriever" in record.getMessage()
    assert STATIC[:30] in record.getMessage()
    assert QUESTION not in record.getMessage()


def test_what_stands_before_a_question_is_prefilled_and_hides_nothing_of_the_search(
    make: Any, engine: Engine, warmed: Any, num_begun: Any
) -> None:
    asked_first = ChatPromptTemplate.from_messages([("system", STATIC), ("human", "Question: {question}\n\n{context}")])
    engine.bind_prompt(asked_first, format_docs)
    events = Events()
    make(Stage("moon"), Stage("moon", once=lambda: num_begun() == 1)).invoke(QUESTION, {"callbacks": [events]})
    (warm,) = warmed()
    assert (warm.documents, events.num("confirm")) == ([], 1)
    assert events.seen[-1][1]["hidden_search_s"] == 0.0


def test_chains_that_share_an_engine_each_have_their_prompt(make: Any, engine: Engine, warmed: Any) -> None:
    mine = engine.bind_prompt(PromptLayout(static_prefix=f"{STATIC} Mine."))
    engine.bind_prompt(PROMPT, format_docs)
    for prompt in (mine, None):
        num_before = len(warmed())
        stages = Stage("moon"), Stage("moon", once=lambda: len(warmed()) > num_before)  # noqa: B023
        make(*stages, prompt=prompt).invoke(QUESTION)
    of_mine, of_bound = (seen.body["prompt"] for seen in warmed())
    assert of_mine != of_bound
    assert of_mine == list(mine.prefix([], [DOCUMENTS["moon"]]).token_ids)


@both_ways
async def test_stages_and_prefills_are_events_in_order(
    is_async: bool,
    make: Any,
    engine: Engine,
    server: ScriptedServer,
    eventually: Eventually,
    warmed: Any,
    num_begun: Any,
) -> None:
    engine.bind_prompt(PROMPT, format_docs)
    events = Events()
    retriever = make(
        Stage("mars"),
        Stage("moon", once=lambda: events.num("start") == num_begun() == server.num_running == 1),
        Stage("moon", once=lambda: events.num("start") == num_begun() == 2),
    )
    server.script(Reply("late", wait_s=30.0))
    (found,) = await run(retriever, is_async, {"callbacks": [events]})
    assert found.id == "moon"
    assert events.order == EVENTS_OF_A_CHANGE
    assert {data["query"] for _, data in events.seen} == {QUESTION}
    stage, confirm = events.seen[-2], events.seen[-1]
    assert stage[0] == "ragcache.candidates"
    assert set(stage[1]) == {"query", "stage", "doc_ids", "is_final", "scores", "swaps"}
    assert confirm[0] == "ragcache.speculation"
    assert set(confirm[1]) == {"query", "stage", "doc_ids", "event", "hidden_search_s", "search_s"}
    assert 0 < confirm[1]["hidden_search_s"] < confirm[1]["search_s"]
    assert await asyncio.to_thread(eventually, lambda: server.aborted == warmed()[:1])


def test_a_call_may_say_how_many_documents_it_wants(make: Any) -> None:
    retriever = make(Stage("moon"))
    assert retriever.invoke(QUESTION, k=7) == retriever.invoke(QUESTION)
    assert [k for _, k in retriever.store.asked] == [7, 2]
    with pytest.raises(ConfigError, match="k is -1: give a whole number of documents, 0 or more"):
        retriever.invoke(QUESTION, k=-1)


@both_ways
@pytest.mark.parametrize("why", ["switched off", "no engine", "no prompt", "plain server"])
async def test_without_speculation_nothing_is_sent_and_the_documents_are_the_same(
    why: str, is_async: bool, make: Any, engine: Engine, server: ScriptedServer
) -> None:
    if why != "no prompt":
        engine.bind_prompt(PROMPT, format_docs)
    if why == "plain server":
        server.load = None
    retriever = make(Stage("mars"), Stage("moon sun"))
    retriever.speculate = why != "switched off"
    retriever.engine = None if why == "no engine" else engine
    events = Events()
    assert [d.id for d in await run(retriever, is_async, {"callbacks": [events]})] == ["moon", "sun"]
    assert server.requests == []
    assert events.order == [("stage", 0, "mars"), ("stage", 1, "moon", "sun")]
    if why in ("switched off", "no engine"):
        assert server.cache_questions == []


def test_a_plain_server_is_named_once(make: Any, server: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    server.load = None
    retriever = make(Stage("mars"), Stage("moon", once=lambda: bool(caplog.records)))
    for _ in range(3):
        retriever.invoke(QUESTION)
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "RAGCache's scheduler" in warning.message


@both_ways
async def test_documents_may_come_in_an_order_of_their_own(
    is_async: bool, make: Any, engine: Engine, warmed: Any
) -> None:
    engine.bind_prompt(PROMPT, format_docs)
    retriever = make(Stage("sun moon"), Stage("moon sun", once=lambda: bool(warmed())), document_order="canonical")
    assert [d.id for d in await run(retriever, is_async)] == ["moon", "sun"]
    (warm,) = warmed()
    assert [d["id"] for d in warm.documents] == ["moon", "sun"]
    retriever.engine = None
    assert [d.id for d in await run(retriever, is_async)] == ["moon", "sun"]
    for server_or_none in (engine, None):
        retriever = make(Stage("sun moon mars"), document_order="canonical", keep_first=True)
        retriever.engine, retriever.k = server_or_none, 3
        assert [d.id for d in await run(retriever, is_async)] == ["sun", "mars", "moon"]


def test_a_prompt_can_name_the_relevance_of_documents_in_another_order(make: Any, llm: ChatRAGCache) -> None:
    layout = PromptLayout(relevance_hint="Most relevant first: {order}.")
    for stage, order, hint in (
        ("sun moon", "canonical", "\n\nMost relevant first: 2, 1."),
        ("moon sun", "canonical", ""),
        ("sun moon", "retrieval", ""),
    ):
        retriever = make(Stage(stage), document_order=order)
        parts = {"context": retriever | partial(format_documents, layout=layout), "question": RunnablePassthrough()}
        answer = (parts | prompt_from_layout(layout) | llm).invoke(QUESTION).content
        assert answer.endswith(f"{hint}\n\nQuestion: {QUESTION}")
        assert ("Most relevant" in answer) == bool(hint)


async def test_what_a_vector_database_finds_with_little_effort_is_prefilled_before_its_last_answer(
    tmp_path: Path, llm: ChatRAGCache, engine: Engine, warmed: Any, server: ScriptedServer, eventually: Eventually
) -> None:
    class LateConnection(psycopg.Connection[Any]):
        """Holds the exact search back until the engine has prefilled documents."""

        def execute(self, query: Any, params: Any = None, **settings: Any) -> psycopg.Cursor[Any]:
            if params == ("enable_indexscan", "off"):
                assert eventually(lambda: bool(warmed()))
            return super().execute(query, params, **settings)

    embedder = TfidfSvdEmbedder(8).fit([document.text for document in DOCUMENTS.values()])
    with pgvector_server() as address:
        with (
            DocumentStore.create(tmp_path / "store", embedder=embedder, word_weight=0.0) as store,
            psycopg.connect(address) as connection,
        ):
            store.add(DOCUMENTS.values())
            copy_store(store, connection, "docs")
            expected = [document.doc_id for document in store.search(QUESTION, 2).documents]
        source = pgvector_stages(lambda: LateConnection.connect(address), "docs", embedder, efforts=(10, "exact"))
        engine.bind_prompt(PROMPT, format_docs)
        await chain_of(RAGCacheRetriever(store=source, engine=engine, k=2), llm).ainvoke(QUESTION)
    (warm,) = warmed()
    assert [document["id"] for document in warm.documents] == expected
    assert await asyncio.to_thread(eventually, lambda: server.confirmed == [warm.speculation])


def test_it_serves_as_a_tool_and_prefills(make: Any, engine: Engine, warmed: Any) -> None:
    engine.bind_prompt(PROMPT, format_docs)
    retriever = make(Stage("moon"), Stage("moon", once=lambda: bool(warmed())))
    search = create_retriever_tool(retriever, "search", "Search the sky.")
    assert set(search.args) == {"query"}
    assert search.invoke({"query": QUESTION}) == DOCUMENTS["moon"].text
    assert len(warmed()) == 1


# What goes wrong


@both_ways
@pytest.mark.parametrize("how", ["raises", "ends", "lasts"])
async def test_a_search_that_goes_wrong_leaves_no_prefill(
    how: str, is_async: bool, make: Any, engine: Engine, warmed: Any, server: ScriptedServer, eventually: Eventually
) -> None:
    engine.bind_prompt(PROMPT, format_docs)
    server.script(Reply("late", wait_s=30.0))
    stages = [Stage("moon")]
    if how == "raises":
        stages.append(Stage(error=OSError("the disk is gone"), once=lambda: bool(warmed())))
    retriever = make(*stages, is_endless=True, search_timeout_s=0.3 if how == "lasts" else None)
    if how == "ends":
        retriever.store.pause_s = 0.1
    raised = {"raises": OSError, "ends": SearchError, "lasts": SearchTimeoutError}[how]
    with pytest.raises(raised):
        await run(retriever, is_async)
    assert await asyncio.to_thread(eventually, lambda: server.num_running == 0)
    assert retriever.store.num_open == 0


def test_a_document_that_is_found_twice_is_returned_once(make: Any) -> None:
    assert [d.id for d in make(Stage("moon sun moon")).invoke(QUESTION)] == ["moon", "sun"]


@both_ways
async def test_a_source_that_finds_too_much_is_cut(is_async: bool, make: Any, engine: Engine, warmed: Any) -> None:
    engine.bind_prompt(PROMPT, format_docs)
    retriever = make(Stage("moon sun mars"), Stage("moon sun moon mars", once=lambda: bool(warmed())))
    assert [d.id for d in await run(retriever, is_async)] == ["moon", "sun"]
    (warm,) = warmed()
    assert [d["id"] for d in warm.documents] == ["moon", "sun"]
    assert [d.id for d in retriever.invoke(QUESTION, k=1)] == ["moon"]
    assert retriever.invoke(QUESTION, k=0) == []


async def test_giving_up_a_search_leaves_no_task(
    make: Any, engine: Engine, server: ScriptedServer, eventually: Eventually
) -> None:
    engine.bind_prompt(PROMPT, format_docs)
    server.script(ENDLESS)
    retriever, before = make(Stage("moon"), is_endless=True), asyncio.all_tasks()
    task = asyncio.ensure_future(retriever.ainvoke(QUESTION))
    assert await asyncio.to_thread(eventually, lambda: len(server.requests) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
    assert retriever.store.num_open == 0
    assert await asyncio.to_thread(eventually, lambda: server.num_running == 0)


@pytest.mark.parametrize("settings", [{"store": object()}, {"search_timeout_s": 0}, {"document_order": "best"}])
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        RAGCacheRetriever(**{"store": ScriptedSource(()), **settings})
