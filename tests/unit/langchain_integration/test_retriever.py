from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import create_retriever_tool
from langchain_tests.integration_tests import RetrieversIntegrationTests

from ragcache_core.errors import ConfigError
from ragcache_integrations.langchain import RAGCacheRetriever, StagedFAISS
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


def test_a_document_store_of_the_core_serves_as_well(store: StagedFAISS) -> None:
    assert RAGCacheRetriever(store=store.store, k=2).invoke("Mel") == RAGCacheRetriever(store=store, k=2).invoke("Mel")


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


def test_a_source_of_stages_has_to_filter_itself() -> None:
    with pytest.raises(ConfigError, match="is no store"):
        RAGCacheRetriever(store=ScriptedSource(()), filter={"number": 3}).invoke("Who is Mel?")
    with pytest.raises(ConfigError, match="search_type='mmr' is given, but ScriptedSource is no store"):
        RAGCacheRetriever(store=ScriptedSource(()), search_type="mmr").invoke("Who is Mel?")


async def test_a_stream_yields_the_final_documents_once(store: StagedFAISS) -> None:
    retriever = RAGCacheRetriever(store=store, k=2, stages=4)
    expected = [retriever.invoke("Who is Mel?")]
    assert list(retriever.stream("Who is Mel?")) == expected
    assert [d async for d in retriever.astream("Who is Mel?")] == expected


def test_a_vector_store_makes_a_retriever_of_its_own(store: StagedFAISS) -> None:
    first, _ = store.as_retriever(search_kwargs={"k": 2}).invoke("Who is Mel?")
    assert first.id == "p1"


def test_it_serves_as_a_tool_of_an_agent(store: StagedFAISS) -> None:
    search = create_retriever_tool(RAGCacheRetriever(store=store, k=1), "search", "Search the planets.")
    assert set(search.args) == {"query"}
    assert search.invoke({"query": "Mel"}) == TEXTS[1]
