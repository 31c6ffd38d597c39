"""What goes wrong during a search whose answer is under way, and what is left afterwards: nothing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError, SearchError
from ragcache_core.types import RetrievalUpdate
from ragcache_integrations.llamaindex import RAGCacheLLM, RAGCacheQueryEngine, RAGCacheRetriever
from tests.support.scripted_server import Reply, ScriptedServer
from tests.support.scripted_source import DOCUMENTS, QUESTION, ScriptedSource, Stage, expected
from tests.support.waiting import until
from tests.unit.llamaindex_integration.test_llamaindex_query_engine import ListRetriever
from tests.unit.llamaindex_integration.ways import aquery, every_query, query, wait_until_idle

pytestmark = [
    pytest.mark.usefixtures("idle"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),  # workflows' own
]
ENDLESS = Reply("word " * 200, token_wait_s=0.05)  # twice as long as anything here is waited for


@pytest.mark.parametrize("ask", [query, aquery])
async def test_a_search_without_final_documents_is_an_error(ask: Any, make_engine: Any, scripted: Engine) -> None:
    class Endless(ScriptedSource):
        async def stages(self, query: str, k: int) -> Any:
            return
            yield

    with pytest.raises(SearchError, match="is_final=True"):
        await ask(partial(make_engine, retriever=RAGCacheRetriever(Endless(()), scripted)), QUESTION)


async def _no_generator() -> list[RetrievalUpdate]:
    return []


async def _yielding(stage: Any) -> Any:
    yield stage


class WithoutClose:
    """A search that cannot be closed."""

    def __init__(self) -> None:
        self._stages = iter([RetrievalUpdate((DOCUMENTS["moon"],), (0.0,), 0, True)])

    def __aiter__(self) -> WithoutClose:
        return self

    async def __anext__(self) -> RetrievalUpdate:
        return next(self._stages)


@dataclass
class Making:
    """A source whose search is whatever ``make`` makes."""

    make: Callable[[], Any]

    def stages(self, query: str, k: int) -> Any:
        return self.make()


@pytest.mark.parametrize("ask", [query, aquery])
@pytest.mark.parametrize(
    "make", [_no_generator, lambda: None, lambda: _yielding([])], ids=["coroutine", "None", "list"]
)
async def test_what_yields_no_stages_is_an_error_with_its_cure(
    ask: Any, make: Any, make_engine: Any, scripted: Engine
) -> None:
    with pytest.raises(SearchError, match=r"write stages\(query, k\) as an async def that yields RetrievalUpdates"):
        await ask(partial(make_engine, retriever=RAGCacheRetriever(Making(make), scripted)), QUESTION)


@pytest.mark.parametrize("ask", [query, aquery])
async def test_a_search_that_cannot_be_closed_is_a_search(ask: Any, make_engine: Any, scripted: Engine) -> None:
    text, _ = await ask(partial(make_engine, retriever=RAGCacheRetriever(Making(WithoutClose), scripted)), QUESTION)
    assert text == expected("moon")


@every_query
async def test_nothing_found_is_answered_without_the_llm(ask: Any, make_engine: Any, server: ScriptedServer) -> None:
    text, metadata = await ask(partial(make_engine, Stage(""), Stage("")), QUESTION)
    assert text == "Empty Response"
    assert metadata["ragcache"]["pipeline"]["num_stages"] == 2
    assert server.requests == []


async def test_leaving_while_the_answer_comes_leaves_nothing_behind(
    make_engine: Any, generations: Any, server: ScriptedServer
) -> None:
    server.rules = (lambda _: ENDLESS,)
    engine = make_engine(Stage("moon"), Stage("moon", once=lambda: bool(generations())))
    task = asyncio.ensure_future(engine.aquery(QUESTION))
    assert await asyncio.to_thread(until, lambda: bool(server.confirmed))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until_idle, server)
    assert len(generations()) == 1


@pytest.mark.parametrize("how", ["closed", "closed unread", "forgotten"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_stream_that_is_not_read_to_its_end_ends_the_request(
    is_async: bool, how: str, make_engine: Any, generations: Any, server: ScriptedServer
) -> None:
    server.rules = (lambda _: ENDLESS,)
    engine = make_engine(Stage("moon"), Stage("moon", once=lambda: bool(generations())), streaming=True)
    response: Any = await engine.aquery(QUESTION) if is_async else await asyncio.to_thread(engine.query, QUESTION)
    assert server.num_running == 1
    if how == "closed":
        assert (await anext(response.response_gen) if is_async else next(response.response_gen)).strip() == "word"
    if how == "forgotten":
        del response
        gc.collect()
    elif is_async:
        await response.response_gen.aclose()
    else:
        response.response_gen.close()
    await asyncio.sleep(0)  # what was forgotten is closed by the loop
    assert await asyncio.to_thread(until, lambda: server.num_running == 0)
    assert len(generations()) == 1


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_a_time_out_that_cannot_work_is_refused(
    value: float, make_engine: Any, scripted: Engine, llm: RAGCacheLLM
) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        RAGCacheRetriever(ScriptedSource(()), scripted, search_timeout_s=value)
    with pytest.raises(ConfigError, match="timeout_s"):
        RAGCacheQueryEngine(ListRetriever(), llm, search_timeout_s=value)
