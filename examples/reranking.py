"""A reranker behind the search: the engine reads the candidates while it decides which of them stay, and in what order.

The reranker here counts the question's words in each document, and takes as long as a model would. Where it leaves the
first documents in front, the engine has read them by the time it is done. Run it with ``python -m examples.reranking``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough

from examples._shared import Row, demo_questions, open_demo_store, open_engine, read_options, show
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    format_documents,
    prompt_from_layout,
)


class WordReranker(BaseDocumentCompressor):
    """Puts the documents with most of the question's words first."""

    takes_s: float = 0.25

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks = None
    ) -> Sequence[Document]:
        time.sleep(self.takes_s)
        asked = set(_words(query))
        return sorted(documents, key=lambda document: -len(asked & set(_words(document.page_content))))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    rows = []
    with open_engine(options) as engine, open_demo_store() as store:
        retriever = RAGCacheRetriever(store=store, engine=engine, k=4, num_candidates=20, compressor=WordReranker())
        prompt = prompt_from_layout()
        engine.bind_prompt(prompt, format_documents)
        llm = ChatRAGCache(engine=engine, temperature=0, max_tokens=32)
        search = {"context": retriever | format_documents, "question": RunnablePassthrough()}
        chain = search | prompt | llm | StrOutputParser()
        for question in [q["question"] for q in demo_questions("single")[:3]]:
            for note in ("cold", "again"):
                stats = CacheStatsCallbackHandler()
                answer = "".join(chain.stream(question, {"callbacks": [stats]}))
                ((_, request),) = stats.runs
                rows.append(Row.of(question, note, answer, request, stats.summary().overlapped_search_s))
    show(rows, options)


if __name__ == "__main__":
    main()
