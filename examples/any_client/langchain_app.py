"""A LangChain app as it was: of RAGCache it has the base URL alone.

Run ``curl.sh`` first, which registers the documents, then ``python -m examples.any_client.langchain_app``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

TEXTS = json.loads(Path(__file__).with_name("documents.json").read_text(encoding="utf-8"))["documents"]


def main() -> None:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=64))
    store.add_documents([Document(document["text"], id=document["id"]) for document in TEXTS])
    retriever = store.as_retriever(search_kwargs={"k": 2})
    llm = ChatOpenAI(
        model=os.environ.get("MODEL", "demo_model"),
        base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=SecretStr(os.environ.get("API_KEY", "none")),
        max_completion_tokens=8,
    )
    prompt = ChatPromptTemplate.from_template("Answer from the documents.\n\n{context}\n\nQuestion: {question}")
    context = retriever | (lambda found: "\n\n".join(document.page_content for document in found))
    chain = {"context": context, "question": RunnablePassthrough()} | prompt | llm
    for _ in range(2):
        answer = chain.invoke("Who is this about?")
        usage = answer.usage_metadata
        assert usage is not None
        print(json.dumps({"input": usage["input_tokens"], "cached": usage["input_token_details"]["cache_read"]}))


if __name__ == "__main__":
    main()
