"""LlamaIndex's own VectorStoreIndex on our store, with our embedding model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_index.core import Document as LlamaDocument
from llama_index.core import StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters

from ragcache_core.errors import ConfigError
from ragcache_integrations.llamaindex import StagedFAISSVectorStore, TfidfSvdEmbedding


@pytest.fixture
def vector_store(tmp_path: Path) -> Iterator[StagedFAISSVectorStore]:
    store = StagedFAISSVectorStore(tmp_path / "store")
    yield store
    store.close()


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


async def test_index_adds_asynchronously(vector_store: StagedFAISSVectorStore, embed_model: TfidfSvdEmbedding) -> None:
    index = VectorStoreIndex.from_vector_store(vector_store, embed_model=embed_model)
    nodes = [TextNode(text=d.text, metadata=d.metadata) for d in DOCUMENTS]
    await index.ainsert_nodes(nodes)
    found = await index.as_retriever(similarity_top_k=1).aretrieve("rough sea in winter")
    assert found[0].node.get_content() == DOCUMENTS[2].text


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


async def test_embedding_is_the_same_from_every_method(embed_model: TfidfSvdEmbedding) -> None:
    text = DOCUMENTS[0].text
    rows = [
        embed_model.get_text_embedding(text),
        embed_model.get_query_embedding(text),
        await embed_model.aget_text_embedding(text),
        await embed_model.aget_query_embedding(text),
        *embed_model.get_text_embedding_batch([text, text]),
        *await embed_model.aget_text_embedding_batch([text]),
    ]
    assert all(row == rows[0] for row in rows)
    assert len(rows[0]) == 16
    assert embed_model.model_name == "tfidf-svd-16"
    with pytest.raises(ConfigError):
        TfidfSvdEmbedding([])
