"""What goes wrong during a search whose answer is under way, and what is left afterwards: nothing."""

import asyncio
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from langchain_core.documents import Document as LangChainDocument
from langchain_core.prompt_values import StringPromptValue
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda

from ragcache_core.client import Engine
from ragcache_core.errors import RequestRejectedError, SearchTimeoutError
from ragcache_integrations.langchain import (
    ChatRAGCache,
    format_documents,
)
from tests.support.scripted_server import Refusal, Reply, ScriptedServer
from tests.support.scripted_source import QUESTION, Stage, expected
from tests.unit.langchain_integration.ways import answered, each_way

Eventually = Callable[[Callable[[], bool]], bool]
pytestmark = pytest.mark.usefixtures("idle")
ENDLESS = Reply("word " * 100_000, token_wait_s=0.002)


@each_way
async def test_a_retriever_that_raises_in_the_middle_leaves_no_request(
    way: Any, make_rag: Any, generations: Any, server: ScriptedServer, eventually: Eventually
) -> None:
    server.script(ENDLESS)
    rag = make_rag(Stage("moon"), Stage(error=OSError("the disk is gone"), once=lambda: bool(generations())))
    with pytest.raises(OSError, match="the disk is gone"):
        await answered(way, rag)
    assert await asyncio.to_thread(eventually, lambda: server.num_running == 0)
    assert rag.retriever.store.num_open == 0


@each_way
@pytest.mark.parametrize("on_the_retriever", [False, True])
async def test_a_search_that_never_ends_is_timed_out(
    way: Any, on_the_retriever: bool, make_rag: Any, server: ScriptedServer, eventually: Eventually, engine: Engine
) -> None:
    server.script(ENDLESS)
    rag = make_rag(Stage("moon"), is_endless=True, search_timeout_s=None if on_the_retriever else 0.1)
    if on_the_retriever:
        rag.retriever.search_timeout_s = 0.1
    with pytest.raises(SearchTimeoutError, match=r"0\.1 s"):
        await answered(way, rag)
    assert await asyncio.to_thread(eventually, lambda: server.num_running == 0)
    assert rag.retriever.store.num_open == 0


class StuckRetriever(BaseRetriever):
    """Blocks its thread until it is told to go on."""

    go_on: Any

    def _get_relevant_documents(self, query: str, **_: Any) -> list[LangChainDocument]:
        self.go_on.wait(30.0)
        return []


def test_a_retriever_that_blocks_for_good_is_timed_out_too(make_rag: Any) -> None:
    go_on = threading.Event()
    rag = make_rag(retriever=StuckRetriever(go_on=go_on), search_timeout_s=0.1)
    with pytest.raises(SearchTimeoutError):
        rag.invoke(QUESTION)
    go_on.set()


def test_a_speculation_that_the_engine_refuses_is_asked_again_for_real(
    make_rag: Any, generations: Any, server: ScriptedServer
) -> None:
    server.script(Refusal(503, "too busy", "ServiceUnavailable"))
    rag = make_rag(Stage("moon"), Stage("moon", once=lambda: len(generations()) >= 1))
    assert rag.invoke(QUESTION).content == expected("moon")


def test_an_error_of_the_request_itself_is_raised(make_rag: Any, server: ScriptedServer) -> None:
    server.rules = (lambda _: Refusal(400, "no such thing"),)
    with pytest.raises(RequestRejectedError, match="no such thing"):
        make_rag(Stage("moon"), Stage("moon")).invoke(QUESTION)


def test_candidates_that_cannot_be_formatted_do_not_spoil_the_answer(make_rag: Any, generations: Any) -> None:
    def fussy(documents: list[LangChainDocument]) -> str:
        if documents[0].id == "mars":
            raise KeyError("mars")
        return format_documents(documents)

    rag = make_rag(Stage("mars"), Stage("moon"), format_docs=fussy)
    assert rag.invoke(QUESTION).content == expected("moon")
    with pytest.raises(KeyError, match="mars"):
        make_rag(Stage("mars"), format_docs=fussy).invoke(QUESTION)


@each_way
async def test_a_source_that_finds_too_much_is_cut(way: Any, make_rag: Any, generations: Any) -> None:
    rag = make_rag(Stage("moon sun mars"), Stage("moon sun moon mars", once=lambda: bool(generations())))
    assert await answered(way, rag) == expected("moon", "sun")
    assert len(generations()) == 1


async def test_leaving_during_the_search_leaves_nothing_behind(
    make_rag: Any, generations: Any, server: ScriptedServer, eventually: Eventually
) -> None:
    server.script(ENDLESS)
    rag = make_rag(Stage("moon"), is_endless=True)
    loop, before = asyncio.get_running_loop(), asyncio.all_tasks()
    for call in (lambda: rag.ainvoke(QUESTION), lambda: anext(aiter(rag.astream(QUESTION)))):
        server.clear()
        server.script(ENDLESS)
        task = asyncio.ensure_future(call())
        assert await asyncio.to_thread(eventually, lambda: server.num_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(eventually, lambda: server.num_running == 0)
        assert rag.retriever.store.num_open == 0
        # the loop closes abandoned generators in tasks of its own, which end soon
        assert await asyncio.to_thread(eventually, lambda: asyncio.all_tasks(loop) == before)


@pytest.mark.parametrize("is_right", [True, False])
async def test_leaving_the_stream_ends_the_request(
    is_right: bool, make_rag: Any, generations: Any, server: ScriptedServer, eventually: Eventually
) -> None:
    server.rules = (lambda _: ENDLESS,)
    rag = make_rag(Stage("moon" if is_right else "mars"), Stage("moon", once=lambda: bool(generations())))
    chunks = rag.astream(QUESTION)
    async for chunk in chunks:
        if chunk.content:
            break
    await chunks.aclose()
    assert await asyncio.to_thread(eventually, lambda: server.num_running == 0)

    server.clear()
    blocking: Any = rag.stream(QUESTION)
    while not next(blocking).content:
        pass
    assert server.num_running >= 1
    blocking.close()
    assert await asyncio.to_thread(eventually, lambda: server.num_running == 0)


async def test_leaving_the_stream_of_a_bound_model_ends_the_request(
    make_rag: Any, generations: Any, llm: ChatRAGCache, server: ScriptedServer, eventually: Eventually
) -> None:
    server.rules = (lambda _: ENDLESS,)
    rag = make_rag(Stage("moon"), Stage("moon", once=lambda: bool(generations())), llm=llm.bind(temperature=0.5))
    chunks = rag.astream(QUESTION)
    async for chunk in chunks:
        if chunk.content:
            break
    await chunks.aclose()
    assert await asyncio.to_thread(eventually, lambda: server.num_running == 0)


async def test_a_speculation_that_the_request_does_not_match_ends_with_its_first_token(
    make_rag: Any, generations: Any, server: ScriptedServer, eventually: Eventually
) -> None:
    server.rules = (lambda _: ENDLESS,)
    number = count()
    prompt = RunnableLambda(lambda values: StringPromptValue(text=f"{next(number)} {values['context']}"))
    rag = make_rag(Stage("moon"), Stage("moon", once=lambda: bool(generations())), prompt=prompt)
    chunks = rag.astream(QUESTION)
    async for chunk in chunks:
        if chunk.content:
            break
    assert await asyncio.to_thread(eventually, lambda: server.num_running == 1)
    speculation, asked = generations()
    assert server.aborted == [speculation]
    assert asked.speculation is None
    await chunks.aclose()
    assert await asyncio.to_thread(eventually, lambda: server.num_running == 0)
