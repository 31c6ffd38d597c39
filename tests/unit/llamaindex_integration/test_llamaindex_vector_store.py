"""What LlamaIndex expects of a vector store (it has no conformance suite), and that ours keeps nodes whole on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from llama_index.core import Document as LlamaDocument
from llama_index.core import StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, IndexNode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)

from ragcache_core.errors import ConfigError, EmbedderMismatchError
from ragcache_integrations.llamaindex import StagedFAISSVectorStore, TfidfSvdEmbedding

NAMES = ("east", "north", "up", "north-east")


VECTORS = ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.6, 0.8, 0.0])


def make_nodes() -> list[TextNode]:
    """Return four nodes of two documents: ``east`` and ``north`` of ``flat``, the others of ``deep``."""
    nodes = []
    for i, (name, vector) in enumerate(zip(NAMES, VECTORS, strict=True)):
        source = RelatedNodeInfo(node_id="flat" if i < 2 else "deep", metadata={"page": 1})
        nodes.append(
            TextNode(
                id_=name,
                text=f"  The wind blows {name}.\n",
                embedding=vector,
                metadata={"rank": i, "tags": ["wind", name], "even": i % 2 == 0, "author": "Mel" if i else "Åse"},
                excluded_llm_metadata_keys=["rank"],
                relationships={NodeRelationship.SOURCE: source},
            )
        )
    return nodes


@pytest.fixture
def vector_store(tmp_path: Path) -> Iterator[StagedFAISSVectorStore]:
    store = StagedFAISSVectorStore(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def filled(vector_store: StagedFAISSVectorStore) -> StagedFAISSVectorStore:
    assert vector_store.add(make_nodes()) == list(NAMES)
    return vector_store


def query_of(k: int = 4, **settings: object) -> VectorStoreQuery:
    return VectorStoreQuery(query_embedding=[0.9, 0.4, 0.1], similarity_top_k=k, **settings)  # type: ignore[arg-type]


def where(*filters: MetadataFilter | MetadataFilters, condition: FilterCondition | None = None) -> MetadataFilters:
    return MetadataFilters(filters=list(filters), condition=condition)


def without_embedding(nodes: Sequence[BaseNode] | None) -> list[dict[str, object]]:
    return [{**node.to_dict(), "embedding": None} for node in nodes or ()]


async def both_ways(store: StagedFAISSVectorStore, query: VectorStoreQuery) -> VectorStoreQueryResult:
    """Return what the query finds, both sync and async."""
    result = store.query(query)
    assert await store.aquery(query) == result
    return result


async def test_query_returns_the_nearest_nodes_best_first(filled: StagedFAISSVectorStore) -> None:
    result = await both_ways(filled, query_of(3))
    assert result.ids == ["east", "north-east", "north"]
    assert result.similarities == pytest.approx([0.9, 0.86, 0.4])
    assert [node.node_id for node in result.nodes or ()] == result.ids


async def test_nodes_come_back_whole(filled: StagedFAISSVectorStore) -> None:
    nodes = make_nodes()
    result = await both_ways(filled, query_of(1))
    assert without_embedding(result.nodes) == without_embedding(nodes[:1])
    assert without_embedding(filled.get_nodes()) == without_embedding(nodes)
    assert result.nodes is not None
    assert result.nodes[0].ref_doc_id == "flat"


def test_nodes_of_other_kinds_come_back_as_they_were(vector_store: StagedFAISSVectorStore) -> None:
    nodes = [
        IndexNode(id_="index", index_id="other", text="see there", embedding=[1.0, 0.0]),
        LlamaDocument(id_="document", text="whole", embedding=[0.0, 1.0], metadata={"nested": {"a": [1, None]}}),
    ]
    vector_store.add(nodes)
    index, document = vector_store.get_nodes()
    assert isinstance(index, IndexNode)
    assert index.index_id == "other"
    assert (document.get_content(), document.metadata) == ("whole", {"nested": {"a": [1, None]}})


def test_batch_that_cannot_be_stored_changes_nothing(filled: StagedFAISSVectorStore) -> None:
    before = without_embedding(filled.get_nodes())
    for nodes, error in (
        ([TextNode(id_="east", text="short", embedding=[1.0, 2.0])], EmbedderMismatchError),
        ([TextNode(id_="east", text="none")], ConfigError),
        ([TextNode(id_="east", text="some", embedding=[1.0, 2.0, 3.0]), TextNode(id_="up", text="none")], ValueError),
    ):
        with pytest.raises(error):
            filled.add(nodes)
    assert without_embedding(filled.get_nodes()) == before


def test_delete_nodes_takes_ids_filters_or_both(filled: StagedFAISSVectorStore) -> None:
    even = where(MetadataFilter(key="rank", value=2, operator=FilterOperator.GTE))
    filled.delete_nodes(["east", "up", "unknown"], even)
    assert [n.node_id for n in filled.get_nodes()] == ["east", "north", "north-east"]
    filled.delete_nodes(filters=even)
    assert [n.node_id for n in filled.get_nodes()] == ["east", "north"]
    filled.delete_nodes(["north"])
    assert [n.node_id for n in filled.get_nodes()] == ["east"]


_EQ, _OP = MetadataFilter, FilterOperator


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (where(_EQ(key="author", value="Åse")), {"east"}),
        (where(_EQ(key="author", value="Åse", operator=_OP.NE)), {"north", "up", "north-east"}),
        (where(_EQ(key="rank", value=1, operator=_OP.GT)), {"up", "north-east"}),
        (where(_EQ(key="rank", value=[0, 3], operator=_OP.IN)), {"east", "north-east"}),
        (where(_EQ(key="rank", value=[0, 3], operator=_OP.NIN)), {"north", "up"}),
        (where(_EQ(key="tags", value="up", operator=_OP.CONTAINS)), {"up"}),
        (where(_EQ(key="tags", value=["up", "east"], operator=_OP.ANY)), {"up", "east"}),
        (where(_EQ(key="tags", value=["wind", "east"], operator=_OP.ALL)), {"east"}),
        (where(_EQ(key="author", value="me", operator=_OP.TEXT_MATCH_INSENSITIVE)), {"north", "up", "north-east"}),
        (where(_EQ(key="missing", value=None, operator=_OP.IS_EMPTY)), set(NAMES)),
        (where(_EQ(key="rank", value=0), _EQ(key="author", value="Mel")), set()),
        (where(_EQ(key="rank", value=0), _EQ(key="rank", value=2), condition=FilterCondition.OR), {"east", "up"}),
        (
            where(_EQ(key="rank", value=0), _EQ(key="rank", value=2), condition=FilterCondition.NOT),
            {"north", "north-east"},
        ),
        (
            where(
                where(_EQ(key="rank", value=0), _EQ(key="rank", value=2), condition=FilterCondition.OR),
                where(_EQ(key="author", value="Mel")),
            ),
            {"up"},
        ),
        (where(), set(NAMES)),
    ],
)
async def test_query_finds_the_nearest_that_pass_the_filters(
    filters: MetadataFilters, found: set[str], filled: StagedFAISSVectorStore
) -> None:
    result = await both_ways(filled, query_of(filters=filters))
    assert set(result.ids or ()) == found
    assert result.similarities == sorted(result.similarities or (), reverse=True)
    nearest = await both_ways(filled, query_of(1, filters=filters))
    assert (nearest.ids or []) == (result.ids or [])[:1]


async def test_vector_store_kwargs_are_refused_that_would_find_everybodys_nodes(filled: StagedFAISSVectorStore) -> None:
    index = VectorStoreIndex.from_vector_store(filled, embed_model=MockEmbedding(3))
    retriever = index.as_retriever(vector_store_kwargs={"filter": {"author": "Mel"}})
    with pytest.raises(ConfigError, match=r"a search knows no filter: .* filters=MetadataFilters"):
        retriever.retrieve("Who?")
    with pytest.raises(ConfigError, match="a search knows no filter"):
        await retriever.aretrieve("Who?")


def test_an_upsert_of_a_changed_document_beside_a_blank_one_keeps_both_versions_apart(tmp_path: Path) -> None:
    def page(number: int, text: str) -> LlamaDocument:
        return LlamaDocument(text=text, id_=f"page-{number}", metadata={"page": number})

    with closing(StagedFAISSVectorStore(tmp_path / "store")) as store:
        pipeline = IngestionPipeline(
            transformations=[SentenceSplitter(), MockEmbedding(embed_dim=8)],
            docstore=SimpleDocumentStore(),
            vector_store=store,
            docstore_strategy=DocstoreStrategy.UPSERTS,
        )
        pipeline.run(documents=[page(1, "Opens at nine."), page(3, "Closes at five.")])
        pipeline.run(documents=[page(1, "Opens at ten."), page(2, ""), page(3, "Closes at five.")])
        assert sorted(node.get_content() for node in store.get_nodes()) == ["Closes at five.", "Opens at ten."]
        pipeline.run(documents=[page(1, ""), page(3, "Closes at five.")])
        assert [node.get_content() for node in store.get_nodes()] == ["Closes at five."]


DOCUMENTS = [
    LlamaDocument(id_="zor", text="The lighthouse of Zor is kept by Mel Anvik.", metadata={"kind": "place"}),
    LlamaDocument(id_="mel", text="Mel Anvik is a pilot who was born in Nalna.", metadata={"kind": "person"}),
    LlamaDocument(id_="sea", text="The sea around the cape is rough in winter.", metadata={"kind": "place"}),
]


@pytest.fixture
def embed_model() -> TfidfSvdEmbedding:
    return TfidfSvdEmbedding([d.text for d in DOCUMENTS], dimension=16)


async def test_index_is_built_on_the_store_and_opened_from_it(tmp_path: Path, embed_model: TfidfSvdEmbedding) -> None:
    store = StagedFAISSVectorStore(tmp_path / "store")
    VectorStoreIndex.from_documents(
        DOCUMENTS, storage_context=StorageContext.from_defaults(vector_store=store), embed_model=embed_model
    )
    store.close()

    store = StagedFAISSVectorStore(tmp_path / "store")
    index = VectorStoreIndex.from_vector_store(store, embed_model=embed_model)
    retriever = index.as_retriever(similarity_top_k=2)
    for nodes in (retriever.retrieve("Who is a pilot?"), await retriever.aretrieve("Who is a pilot?")):
        assert nodes[0].node.ref_doc_id == "mel"
        assert nodes[0].node.metadata == {"kind": "person"}
    places = index.as_retriever(
        similarity_top_k=3, filters=MetadataFilters(filters=[MetadataFilter(key="kind", value="place")])
    )
    assert {n.node.ref_doc_id for n in places.retrieve("Who is a pilot?")} == {"zor", "sea"}

    index.insert(LlamaDocument(id_="new", text="Irene Luvsith is a potter.", metadata={"kind": "person"}))
    assert retriever.retrieve("Irene Luvsith")[0].node.ref_doc_id == "new"
    index.delete_ref_doc("mel")
    assert "mel" not in {n.node.ref_doc_id for n in retriever.retrieve("Who is a pilot?")}
    store.close()


def test_storage_context_is_persisted_beside_the_store(
    tmp_path: Path, vector_store: StagedFAISSVectorStore, embed_model: TfidfSvdEmbedding
) -> None:
    context = StorageContext.from_defaults(vector_store=vector_store)
    VectorStoreIndex.from_documents(DOCUMENTS, storage_context=context, embed_model=embed_model)
    context.persist(str(tmp_path / "storage"))
    loaded = load_index_from_storage(
        StorageContext.from_defaults(persist_dir=str(tmp_path / "storage"), vector_store=vector_store),
        embed_model=embed_model,
    )
    assert loaded.as_retriever(similarity_top_k=1).retrieve("pilot")[0].node.ref_doc_id == "mel"
