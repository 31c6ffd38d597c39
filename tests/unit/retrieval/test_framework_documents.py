"""A document store takes the documents of LangChain and LlamaIndex as they are."""

from __future__ import annotations

from datetime import date

import pytest
from langchain_core.documents import Document as LangChainDocument
from llama_index.core import Document as LlamaDocument
from llama_index.core.schema import NodeWithScore, TextNode

from ragcache_core import Document, DocumentStore
from ragcache_integrations.langchain import StagedFAISS

METADATA = {"source": "harbour.md", "acl": ["staff"]}


@pytest.mark.parametrize(
    "document",
    [
        LangChainDocument("The harbour of Zor.", id="a", metadata=METADATA),
        LlamaDocument(text="The harbour of Zor.", id_="a", metadata=METADATA),
        TextNode(text="The harbour of Zor.", id_="a", metadata=METADATA),
        NodeWithScore(node=TextNode(text="The harbour of Zor.", id_="a", metadata=METADATA), score=1.0),
    ],
    ids=["LangChain", "LlamaIndex document", "LlamaIndex node", "LlamaIndex result"],
)
def test_documents_of_a_framework_are_stored_as_core_documents(store: DocumentStore, document: object) -> None:
    expected = [Document("a", "The harbour of Zor.", METADATA)]
    for change in (store.add, store.put):
        assert change([document]) == ["a"]
        assert store.get(["a"]) == expected
        assert store.get(["a"])[0].acl == ("staff",)
    store.replace(document)
    assert store.search("harbour of Zor", 1).documents == tuple(expected)
    assert StagedFAISS(store).get_by_ids(["a"]) == [LangChainDocument("The harbour of Zor.", id="a", metadata=METADATA)]


def test_documents_without_ids_have_the_same_ids_at_every_run(store: DocumentStore) -> None:
    documents = [
        LangChainDocument("same"),
        LangChainDocument("same"),
        LangChainDocument("same", metadata={"day": date(2026, 5, 4)}),
        LangChainDocument("other"),
    ]
    ids = store.put(documents)
    assert len(set(ids)) == 4
    assert store.put(documents) == ids
    assert len(store) == 24
    assert store.get([ids[2]])[0].metadata == {"day": "2026-05-04"}
