"""The prompt helpers, and an ordinary LCEL chain in every way it can be run."""

from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document as LangChainDocument
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from ragcache_core.client import Engine
from ragcache_integrations.langchain import (
    ChatRAGCache,
    RAGCacheRetriever,
    StagedFAISS,
    format_documents,
    prompt_from_layout,
)
from tests.support.scripted_server import ScriptedServer
from tests.support.scripted_source import Stage

TEXTS = {
    "sun": "The sun is a star, and every planet goes around it.",
    "moon": "The moon goes around the earth once in a month.",
    "mars": "Mars is red, and two small moons go around it.",
}
QUESTION = "What goes around the earth in a month?"


@pytest.fixture
def chain(llm: ChatRAGCache, engine: Engine, tmp_path: Path) -> Runnable[str, str]:
    """Nothing in it but LangChain's own words."""
    store = StagedFAISS.from_texts(list(TEXTS.values()), ids=list(TEXTS), path=tmp_path / "store")
    retriever = RAGCacheRetriever(store=store, engine=engine, k=2)
    prompt = ChatPromptTemplate.from_template("Answer from this:\n{context}\n\nQuestion: {question}")

    def format_docs(documents: list[LangChainDocument]) -> str:
        return "\n\n".join(d.page_content for d in documents)

    parts = {"context": retriever | format_docs, "question": RunnablePassthrough()}
    return parts | prompt | llm | StrOutputParser()


def check(server: ScriptedServer, answers: list[str]) -> None:
    assert len({*answers}) == 1
    assert TEXTS["moon"] in answers[0]
    assert answers[0].endswith(QUESTION)
    for seen in server.requests:
        assert len(seen.documents) == 2
        assert seen.documents[0]["id"] == "moon"
    assert len(server.requests) == len(answers)


def test_a_chain_is_invoked_and_batched(chain: Runnable[str, str], server: ScriptedServer) -> None:
    check(server, [chain.invoke(QUESTION), *chain.batch([QUESTION] * 3)])


async def test_a_chain_streams(chain: Runnable[str, str], server: ScriptedServer) -> None:
    pieces, awaited = list(chain.stream(QUESTION)), [c async for c in chain.astream(QUESTION)]
    assert len(pieces) > 5
    assert pieces == awaited
    check(server, ["".join(pieces), "".join(awaited)])


async def test_the_events_of_a_chain_hold_candidates_and_statistics(chain: Runnable[str, str]) -> None:
    events: list[Any] = [e async for e in chain.astream_events(QUESTION, version="v2")]

    (candidates,) = [e for e in events if e["event"] == "on_custom_event" and e["data"]["is_final"]]
    assert candidates["name"] == "ragcache.candidates"
    assert candidates["data"]["doc_ids"][0] == "moon"
    (retrieved,) = [e for e in events if e["event"] == "on_retriever_end"]
    assert [d.id for d in retrieved["data"]["output"]] == candidates["data"]["doc_ids"]
    (ended,) = [e for e in events if e["event"] == "on_chat_model_end"]
    stats = ended["data"]["output"].response_metadata["ragcache"]
    assert {d["doc_id"] for d in stats["documents"]} == set(candidates["data"]["doc_ids"])


@pytest.mark.usefixtures("idle")
def test_no_prefill_has_the_key_of_an_earlier_call(make: Any, llm: ChatRAGCache, warmed: Any) -> None:
    """The next call may be another tenant's."""
    asked = llm.bind(extra_headers={"x-tenant": "a"})
    for _ in range(2):
        search = {"context": make(Stage("moon sun"), Stage("moon sun")) | format_documents}
        (search | prompt_from_layout().partial(question=QUESTION) | asked).invoke(QUESTION)
    assert warmed() == []
