"""A LlamaIndex app as it was: of RAGCache it has the base URL alone.

Run ``curl.sh`` first, which registers the documents, then ``python -m examples.any_client.llamaindex_app``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.embeddings import MockEmbedding
from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-untyped]

TEXTS = json.loads(Path(__file__).with_name("documents.json").read_text(encoding="utf-8"))["documents"]


def main() -> None:
    documents = [Document(text=document["text"], id_=document["id"]) for document in TEXTS]
    index = VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(embed_dim=8))
    llm = OpenAILike(
        model=os.environ.get("MODEL", "demo_model"),
        api_base=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("API_KEY", "none"),
        is_chat_model=True,
        max_tokens=8,
    )
    found = index.as_retriever(similarity_top_k=2).retrieve("Who is this about?")
    content = "\n\n".join([*(node.get_content() for node in found), "Question: Who is this about?"])
    for _ in range(2):
        usage = llm.chat([ChatMessage(role="user", content=content)]).raw.usage
        print(json.dumps({"input": usage.prompt_tokens, "cached": usage.prompt_tokens_details.cached_tokens}))


if __name__ == "__main__":
    main()
