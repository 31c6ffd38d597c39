import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import BaseCallbackHandler, Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests
from pydantic import ValidationError

from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_integrations.langchain import ChatRAGCache, RAGCacheRetriever, StagedFAISS
from tests.support.late_search import begin_late
from tests.support.scripted_server import ScriptedServer
from tests.support.scripted_source import ScriptedSource

TEXTS = [f"Planet number {i} is called {name}." for i, name in enumerate(["Zor", "Mel", "Tak", "Ruv", "Bim", "Lof"])]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> StagedFAISS:
    path = tmp_path_factory.mktemp("retriever") / "store"
    metadatas = [{"number": i} for i in range(len(TEXTS))]
    return StagedFAISS.from_texts(TEXTS, metadatas=metadatas, ids=[f"p{i}" for i in range(len(TEXTS))], path=path)


class TestStandard(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _store(self, store: StagedFAISS) -> None:
        self.store = store

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return RAGCacheRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"store": self.store}

    @property
    def retriever_query_example(self) -> str:
        return "Which planet is called Mel?"


class Candidates(BaseCallbackHandler):
    """Keeps the custom events it sees."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        assert name == "ragcache.candidates"
        self.seen.append(data)


def test_ids_and_metadata_come_through(store: StagedFAISS) -> None:
    (first,) = RAGCacheRetriever(store=store, k=1).invoke("Who is Mel?")
    assert (first.id, first.page_content, first.metadata) == ("p1", TEXTS[1], {"number": 1})


def test_what_a_question_found_last_is_its_first_stage_whichever_retriever_is_asked(
    store: StagedFAISS, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_late(store.store, monkeypatch)

    def stages(question: str, **asked: Any) -> list[tuple[int, list[str]]]:
        retriever, seen = RAGCacheRetriever(store=store, k=2, compressor=SlowReverser()), Candidates()
        retriever.invoke(question, config={"callbacks": [seen]}, **asked)
        return [(event["stage"], event["doc_ids"]) for event in seen.seen]

    *searched, final = stages("Who is Mel?")
    assert [stage for stage, _ in searched] == [0]
    assert stages("Who is Mel?") == [(-1, final[1]), *searched, final]
    assert stages("Who is Zor?")[0][0] == 0
    assert stages("Who is Mel?", filter={"number": {"$gte": 0}})[0][0] == 0, "another filter is another question"
    assert stages("Who is Mel?", filter=lambda metadata: True)[0][0] == 0
    assert stages("Who is Mel?", filter=lambda metadata: True)[0][0] == 0, "what a function lets pass has no name"


class SlowReverser(BaseDocumentCompressor):
    """Takes longer than it is worth."""

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Callbacks = None) -> Any:
        time.sleep(0.05)  # a model
        return list(reversed(documents))[:2]


def test_a_document_store_of_the_core_serves_as_well(store: StagedFAISS) -> None:
    assert RAGCacheRetriever(store=store.store, k=2).invoke("Mel") == RAGCacheRetriever(store=store, k=2).invoke("Mel")


def test_more_documents_than_the_store_holds_are_all_of_them(store: StagedFAISS) -> None:
    assert len(RAGCacheRetriever(store=store, k=100).invoke("Mel")) == len(TEXTS)
    assert len(RAGCacheRetriever(store=store).invoke("Mel", k=0)) == 0


def numbers(documents: list[Document]) -> set[int]:
    return {d.metadata["number"] for d in documents}


async def test_a_filter_decides_whose_documents_are_found(store: StagedFAISS) -> None:
    accepted = {"number": 3}
    for retriever in (
        RAGCacheRetriever(store=store, filter=accepted),
        RAGCacheRetriever(store=store, filter=lambda metadata: metadata["number"] == 3),
        RAGCacheRetriever(store=store, search_kwargs={"filter": accepted, "k": 5}),
        RAGCacheRetriever(store=store.store, filter=accepted),
    ):
        assert numbers(retriever.invoke("Who is Mel?")) == {3}
        assert numbers(await retriever.ainvoke("Who is Mel?")) == {3}
        assert numbers(retriever.invoke("Who is Mel?", filter={"number": 4})) == {4}  # a call's goes before
    assert RAGCacheRetriever(store=store, filter={"number": 99}).invoke("Who is Mel?") == []
    assert numbers(RAGCacheRetriever(store=store, filter={"number": {"$gt": 1, "$lt": 4}}).invoke("Mel?")) == {2, 3}


def test_a_filter_can_be_configured_for_each_call_of_a_chain(store: StagedFAISS) -> None:
    field = ConfigurableField(id="search_kwargs")
    retriever = RAGCacheRetriever(store=store).configurable_fields(search_kwargs=field)
    for number in (2, 5):
        config: Any = {"configurable": {"search_kwargs": {"filter": {"number": number}}}}
        assert numbers(retriever.invoke("Who is Mel?", config)) == {number}


def test_the_number_of_documents_has_the_names_that_users_know(store: StagedFAISS) -> None:
    assert len(RAGCacheRetriever(store=store, k=2).invoke("Mel")) == 2
    assert len(RAGCacheRetriever(store=store, top_k=2).invoke("Mel")) == 2  # type: ignore[call-arg]
    assert len(RAGCacheRetriever(store=store, search_kwargs={"k": 3}).invoke("Mel")) == 3
    assert len(RAGCacheRetriever(store=store).invoke("Mel", top_k=1)) == 1


@pytest.mark.parametrize("k", ["3", 2.5, True, -1])
def test_a_number_of_documents_that_is_none_is_refused(store: StagedFAISS, k: Any) -> None:
    with pytest.raises(ConfigError, match=r"k is .*: give a whole number of documents"):
        RAGCacheRetriever(store=store).invoke("Mel", k=k)
    with pytest.raises(ValueError, match=r"k is .*: give a whole number of documents"):
        RAGCacheRetriever(store=store, search_kwargs={"k": k})


@pytest.mark.parametrize(
    "unknown",
    [
        {"filters": {"number": 3}},
        {"search_kwargs": {"filters": {"number": 3}}},
        {"search_kwargs": {"filter": {"number": {"$near": 3}}}},
        {"filter": {"$nor": [{"number": 3}]}},
        {"filter": "number = 3"},
    ],
)
def test_what_a_retriever_does_not_know_is_refused(store: StagedFAISS, unknown: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"filter"):
        RAGCacheRetriever(store=store, **unknown)
    with pytest.raises(ConfigError, match="knows no filters: a search of type 'similarity' takes k, filter"):
        RAGCacheRetriever(store=store).invoke("Who is Mel?", filters={"number": 3})
    with pytest.raises(ConfigError, match="knows no filters: it takes k and filter"):
        store.as_retriever(search_kwargs={"filters": {"number": 3}}).invoke("Who is Mel?")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"search_type": "best"}, "search_type"),
        ({"search_type": "mmr", "search_kwargs": {"score_threshold": 0.5}}, "'mmr' takes k, filter, fetch_k, lambda"),
        ({"search_type": "mmr", "search_kwargs": {"lambda_mult": 2}}, "lambda_mult is 2"),
        ({"search_kwargs": {"fetch_k": 3}}, "knows no fetch_k: a search of type 'similarity'"),
        ({"search_type": "similarity_score_threshold"}, "score_threshold is None: give search_kwargs="),
        (
            {"search_type": "similarity_score_threshold", "search_kwargs": {"score_threshold": 40}},
            "score_threshold is 40: .* relevance from 0 to 1",
        ),
    ],
)
def test_settings_that_a_type_of_search_does_not_take_are_refused(
    store: StagedFAISS, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        RAGCacheRetriever(store=store, **settings)


def test_a_source_of_stages_has_to_filter_itself() -> None:
    with pytest.raises(ConfigError, match="is no store"):
        RAGCacheRetriever(store=ScriptedSource(()), filter={"number": 3}).invoke("Who is Mel?")
    with pytest.raises(ConfigError, match="search_type='mmr' is given, but ScriptedSource is no store"):
        RAGCacheRetriever(store=ScriptedSource(()), search_type="mmr").invoke("Who is Mel?")


def test_an_empty_store_has_no_documents(tmp_path: Path) -> None:
    assert RAGCacheRetriever(store=StagedFAISS.create(tmp_path / "empty")).invoke("Mel") == []


async def test_each_stage_is_an_event_and_the_last_one_is_the_answer(store: StagedFAISS) -> None:
    blocking, awaited = Candidates(), Candidates()
    retriever = RAGCacheRetriever(store=store, k=3, stages=3)
    answer = retriever.invoke("Who is Mel?", {"callbacks": [blocking]})
    assert answer == await retriever.ainvoke("Who is Mel?", {"callbacks": [awaited]})

    assert blocking.seen == awaited.seen
    assert [c["is_final"] for c in blocking.seen] == [False] * (len(blocking.seen) - 1) + [True]
    assert [c["stage"] for c in blocking.seen] == list(range(len(blocking.seen)))
    last = blocking.seen[-1]
    assert last["doc_ids"] == [d.id for d in answer]
    assert len(last["scores"]) == 3
    assert last["scores"] == sorted(last["scores"], reverse=True), "the larger, the nearer"
    assert last["query"] == "Who is Mel?"


async def test_a_stream_yields_the_final_documents_once(store: StagedFAISS) -> None:
    retriever = RAGCacheRetriever(store=store, k=2, stages=4)
    expected = [retriever.invoke("Who is Mel?")]
    assert list(retriever.stream("Who is Mel?")) == expected
    assert [d async for d in retriever.astream("Who is Mel?")] == expected


def test_the_engine_is_told_what_was_retrieved(
    store: StagedFAISS, engine: Engine, llm: ChatRAGCache, server: ScriptedServer
) -> None:
    (first, *_) = RAGCacheRetriever(store=store, engine=engine).invoke("Who is Mel?")
    llm.invoke(f"{first.page_content} Who?")
    assert [d["id"] for d in server.requests[-1].documents] == [first.id]


def test_a_vector_store_makes_a_retriever_of_its_own(store: StagedFAISS) -> None:
    first, _ = store.as_retriever(search_kwargs={"k": 2}).invoke("Who is Mel?")
    assert first.id == "p1"


def test_it_serves_as_a_tool_of_an_agent(store: StagedFAISS) -> None:
    search = create_retriever_tool(RAGCacheRetriever(store=store, k=1), "search", "Search the planets.")
    assert set(search.args) == {"query"}
    assert search.invoke({"query": "Mel"}) == TEXTS[1]


def test_threads_share_a_retriever(store: StagedFAISS) -> None:
    retriever, found = RAGCacheRetriever(store=store, k=1), []
    threads = [threading.Thread(target=lambda: found.append(retriever.invoke("Who is Mel?"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [retriever.invoke("Who is Mel?")] * 8


@pytest.mark.parametrize("other", [InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), "docs.store", 7])
def test_a_store_of_another_kind_is_one_error(other: object) -> None:
    with pytest.raises(ValidationError, match=r"not searched in stages|no source of stages") as raised:
        RAGCacheRetriever(store=other)
    assert raised.value.error_count() == 1
    if not isinstance(other, str | int):
        assert "InMemoryVectorStore.as_retriever()" in str(raised.value)
