"""A LangChain application whose engine runs elsewhere, in an environment with the extra ``langchain`` alone."""

import json
from collections.abc import AsyncGenerator

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough

from ragcache_core import Document, RetrievalUpdate
from ragcache_core.retrieval import one_stage
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    format_documents,
    prompt_from_layout,
)

DOCUMENTS = [
    Document("zorval", "Zorval is a company. Zorval was founded by Anna. Zorval makes clocks. " * 3),
    Document("tenrik", "Tenrik is a company. Tenrik was founded by Boris. Tenrik makes ships. " * 3),
]


class Shelf:
    """A search of one's own."""

    def stages(self, query: str, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        """Return all there is."""

        async def find() -> list[Document]:
            return DOCUMENTS[:k]

        return one_stage(find)


llm = ChatRAGCache(temperature=0, max_tokens=4)  # RAGCACHE_BASE_URL
retriever = RAGCacheRetriever(store=Shelf(), engine=llm.connect())
chain = {"context": retriever | format_documents, "question": RunnablePassthrough()} | prompt_from_layout() | llm.bind()
message = chain.invoke("Who founded Zorval?", {"callbacks": [CacheStatsCallbackHandler()]})
assert StrOutputParser().invoke(message)
found = message.response_metadata["ragcache"]["documents"]
print(json.dumps({"documents": [d["doc_id"] for d in found], "num_tokens": [d["num_tokens"] for d in found]}))
llm.close()
