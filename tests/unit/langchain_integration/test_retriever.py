from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import create_retriever_tool
from langchain_tests.integration_tests import RetrieversIntegrationTests

from ragcache_integrations.langchain import RAGCacheRetriever, StagedFAISS

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


def numbers(documents: list[Document]) -> set[int]:
    return {d.metadata["number"] for d in documents}


async def test_filters_select_the_found_documents(store: StagedFAISS) -> None:
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


def test_it_serves_as_a_tool_of_an_agent(store: StagedFAISS) -> None:
    search = create_retriever_tool(RAGCacheRetriever(store=store, k=1), "search", "Search the planets.")
    assert set(search.args) == {"query"}
    assert search.invoke({"query": "Mel"}) == TEXTS[1]
