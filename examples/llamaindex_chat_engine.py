"""A LlamaIndex chat engine: what was said before is part of each prompt, and comes out of the cache.

LlamaIndex's chat engines show the documents of the last question in the system message, before all that was said. So a
turn starts from cached KV where it is about the same documents as the turn before. Run it with
``python -m examples.llamaindex_chat_engine``.
"""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.instrumentation import get_dispatcher

from examples._shared import Row, open_demo_store, open_engine, read_options, show
from ragcache_integrations.llamaindex import CacheStatsEventHandler, RAGCacheLLM, RAGCacheRetriever

CONVERSATIONS = (
    ("In which country is Memgexdak?", "Who is the mayor of Memgexdak?", "And in which country is Memgexdak again?"),
    ("What is the capital of Bivfik?", "What is the currency of Bivfik?"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    rows = []
    with open_engine(options) as engine, open_demo_store() as store:
        llm = RAGCacheLLM(engine, temperature=0, max_tokens=32)
        retriever = RAGCacheRetriever(store, engine, similarity_top_k=1)
        stats, dispatcher = CacheStatsEventHandler(), get_dispatcher()
        dispatcher.add_event_handler(stats)
        for questions in CONVERSATIONS:
            chat = ContextChatEngine.from_defaults(retriever=retriever, llm=llm)
            for number, question in enumerate(questions, 1):
                answer = str(chat.chat(question))
                assert stats.last is not None
                rows.append(Row.of(question, f"turn {number}", answer, stats.last.stats))
        dispatcher.event_handlers.remove(stats)
    show(rows, options)


if __name__ == "__main__":
    main()
