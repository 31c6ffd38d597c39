from pathlib import Path

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from ragcache_core.errors import ConfigError
from ragcache_integrations.langchain import RAGCacheRetriever, StagedFAISS

TEXTS = ["The sun is a star.", "The moon is a moon.", "Mars is a red planet.", "A star shines in the night."]


class TestStandard(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tmp_path: Path) -> VectorStore:
        return StagedFAISS.create(tmp_path / "store", self.get_embeddings())


@pytest.fixture(params=["l2", "ip"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StagedFAISS:
    return StagedFAISS.from_texts(
        TEXTS, metadatas=[{"n": i} for i in range(4)], ids=list("abcd"), path=tmp_path / "store", metric=request.param
    )


async def test_every_way_to_search_finds_the_same(store: StagedFAISS) -> None:
    question, k = "Which star shines?", 3
    vector = store.embeddings.embed_query(question)
    expected = store.similarity_search(question, k)

    assert expected[0].id == "d"
    assert await store.asimilarity_search(question, k) == expected
    by_vector = store.similarity_search_by_vector(vector, k)
    assert by_vector[0] == expected[0], "a vector has no words"
    assert await store.asimilarity_search_by_vector(vector, k) == by_vector
    assert [d for d, _ in store.similarity_search_with_score(question, k)] == expected
    assert await store.asimilarity_search_with_score(question, k) == store.similarity_search_with_score(question, k)
    assert [d for d, _ in store.similarity_search_with_relevance_scores(question, k)] == expected
    assert store.search(question, "similarity", k=k) == expected


async def test_filters_thresholds_and_mmr_are_what_langchains_own_retriever_asks_for(store: StagedFAISS) -> None:
    question, some = "Which star shines?", {"$or": [{"n": [0, 1]}, {"n": {"$gte": 3}}]}
    found = store.similarity_search(question, 4, filter=some)
    assert {d.metadata["n"] for d in found} == {0, 1, 3}
    scored = store.similarity_search_with_relevance_scores(question, 4, filter=some)
    least = (scored[0][1] + scored[1][1]) / 2
    mmr = {"k": 2, "fetch_k": 3, "lambda_mult": 0.1, "filter": some}
    for search_type, settings, expected in (
        ("similarity", {"k": 4}, found),
        ("similarity_score_threshold", {"score_threshold": least}, found[:1]),
        ("mmr", mmr, store.max_marginal_relevance_search(question, **mmr)),
    ):
        theirs = store.as_retriever(search_type=search_type, search_kwargs={"filter": some, **settings})
        ours = RAGCacheRetriever(store=store, search_type=search_type, search_kwargs={"filter": some, **settings})
        for retriever in (theirs, ours):
            assert retriever.invoke(question) == await retriever.ainvoke(question) == expected
    vector = store.embeddings.embed_query(question)
    by_vector = store.max_marginal_relevance_search_by_vector(vector, **mmr)
    assert await store.amax_marginal_relevance_search_by_vector(vector, **mmr) == by_vector
    assert len(by_vector) == 2


def test_langchains_index_keeps_its_record_of_blank_and_changed_documents(tmp_path: Path) -> None:
    store = StagedFAISS.create(tmp_path / "store", DeterministicFakeEmbedding(size=8))
    records = InMemoryRecordManager("test")
    records.create_schema()

    def run(*texts: str) -> dict[str, int]:
        pages = [Document(text, metadata={"source": f"page-{i}"}) for i, text in enumerate(texts)]
        return dict(index(pages, records, store, cleanup="full", source_id_key="source", key_encoder="sha256"))

    assert run("Opens at nine.", "", "Closes at five.")["num_added"] == 3
    assert run("Opens at nine.", "", "Closes at five.")["num_skipped"] == 3
    assert run("Opens at nine.", "New.", "")["num_deleted"] == 2
    found = store.similarity_search("Opens", k=9)
    assert {d.page_content for d in found} == {"Opens at nine.", "New."}


class LongVectors(DeterministicFakeEmbedding):
    """Vectors whose lengths are about 40."""

    def embed_query(self, text: str) -> list[float]:
        return [10 * x for x in super().embed_query(text)]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


def unit_vectors(texts: list[str]) -> list[list[float]]:
    vectors = np.array(DeterministicFakeEmbedding(size=16).embed_documents(texts))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).tolist()


def test_relevance_of_inner_products_of_long_vectors_differs(tmp_path: Path) -> None:
    with StagedFAISS.from_texts(TEXTS, LongVectors(size=16), path=tmp_path / "s", metric="ip") as store:
        found = store.similarity_search_with_relevance_scores(TEXTS[0], 4)
        relevances = [relevance for _, relevance in found]
        assert len(set(relevances)) == 4
        assert relevances == sorted(relevances, reverse=True)
        assert all(0 < relevance < 1 for relevance in relevances)
        assert [d.page_content for d, _ in found[:1]] == TEXTS[:1]
        assert relevances[0] > 0.65 > 0.6 > relevances[-1], "a text is near itself"
        retriever = RAGCacheRetriever(
            store=store, search_type="similarity_score_threshold", search_kwargs={"score_threshold": relevances[1]}
        )
        assert [d.page_content for d in retriever.invoke(TEXTS[0])] == [d.page_content for d, _ in found[:2]]


def test_relevance_of_unit_vectors_is_one_for_the_document_itself(tmp_path: Path) -> None:
    class UnitVectors(LongVectors):
        def embed_query(self, text: str) -> list[float]:
            return unit_vectors([text])[0]

    for metric in ("l2", "ip"):
        store = StagedFAISS.from_texts(TEXTS, UnitVectors(size=16), metric=metric)
        (found, relevance), *others = store.similarity_search_with_relevance_scores(TEXTS[0], 4)
        assert found.page_content == TEXTS[0]
        assert relevance == pytest.approx(1.0, abs=1e-6)
        assert all(other < 0.95 for _, other in others)


def test_an_argument_that_would_remove_all_documents_is_refused(store: StagedFAISS) -> None:
    with pytest.raises(ConfigError, match="delete.. knows no filter"):
        store.delete(filter={"n": 1})
    assert len(store.similarity_search("star", 9)) == 4
