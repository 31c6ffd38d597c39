"""What goes wrong during a search whose answer is under way, and what is left afterwards: nothing."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from langchain_core.documents import Document as LangChainDocument
from langchain_core.prompt_values import StringPromptValue
from langchain_core.runnables import RunnableLambda

from ragcache_integrations.langchain import (
    ChatRAGCache,
    format_documents,
)
from tests.support.scripted_server import Reply, ScriptedServer
from tests.support.scripted_source import QUESTION, Stage, expected

Eventually = Callable[[Callable[[], bool]], bool]
pytestmark = pytest.mark.usefixtures("idle")
ENDLESS = Reply("word " * 100_000, token_wait_s=0.002)


def test_candidates_that_cannot_be_formatted_do_not_spoil_the_answer(make_rag: Any, generations: Any) -> None:
    def fussy(documents: list[LangChainDocument]) -> str:
        if documents[0].id == "mars":
            raise KeyError("mars")
        return format_documents(documents)

    rag = make_rag(Stage("mars"), Stage("moon"), format_docs=fussy)
    assert rag.invoke(QUESTION).content == expected("moon")
    with pytest.raises(KeyError, match="mars"):
        make_rag(Stage("mars"), format_docs=fussy).invoke(QUESTION)


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
