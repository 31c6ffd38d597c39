"""Every way to run a Runnable that answers with a message, alike."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda

from tests.support.scripted_source import QUESTION


def invoke(rag: Runnable[Any, Any], given: Any) -> str:
    return rag.invoke(given).content


async def ainvoke(rag: Runnable[Any, Any], given: Any) -> str:
    return (await rag.ainvoke(given)).content


def batch(rag: Runnable[Any, Any], given: Any) -> str:
    return rag.batch([given])[0].content


async def abatch(rag: Runnable[Any, Any], given: Any) -> str:
    return (await rag.abatch([given]))[0].content


def stream(rag: Runnable[Any, Any], given: Any) -> str:
    return "".join((rag | StrOutputParser()).stream(given))


async def astream(rag: Runnable[Any, Any], given: Any) -> str:
    return "".join([text async for text in (rag | StrOutputParser()).astream(given)])


async def astream_events(rag: Runnable[Any, Any], given: Any) -> str:
    events: Any = rag.astream_events(given, version="v2")
    return "".join([e["data"]["chunk"].content async for e in events if e["event"] == "on_chat_model_stream"])


async def invoked_under_astream_events(rag: Runnable[Any, Any], given: Any) -> str:
    """LangChain makes the model stream where a handler wants its tokens, also if it was only invoked."""

    async def call(value: Any) -> AIMessage:
        return await rag.ainvoke(value)

    return await astream_events(RunnableLambda(call), given)


WAYS = [invoke, ainvoke, batch, abatch, stream, astream, astream_events, invoked_under_astream_events]
each_way = pytest.mark.parametrize("way", WAYS)


async def answered(way: Any, rag: Runnable[Any, Any], given: Any = QUESTION) -> str:
    if asyncio.iscoroutinefunction(way):
        text = await way(rag, given)
    else:
        text = await asyncio.to_thread(way, rag, given)
    assert isinstance(text, str)
    return text
