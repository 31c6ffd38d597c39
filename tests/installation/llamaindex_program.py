"""A LlamaIndex application whose engine runs elsewhere, in an environment with the extra ``llamaindex`` alone."""

import json

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from ragcache_integrations.llamaindex import RAGCacheLLM, RAGCacheQueryEngine

TEXTS = {
    "zorval": "Zorval is a company. Zorval was founded by Anna. Zorval makes clocks. " * 3,
    "tenrik": "Tenrik is a company. Tenrik was founded by Boris. Tenrik makes ships. " * 3,
}


class Shelf(BaseRetriever):
    """A search of one's own."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(id_=name, text=text), score=1.0) for name, text in TEXTS.items()]


llm = RAGCacheLLM(temperature=0, max_tokens=4)  # RAGCACHE_BASE_URL
response = RAGCacheQueryEngine(Shelf(), llm).query("Who founded Zorval?")
assert str(response)
found = response.metadata["ragcache"]["documents"]
print(json.dumps({"documents": [d["doc_id"] for d in found], "num_tokens": [d["num_tokens"] for d in found]}))
llm.close()
