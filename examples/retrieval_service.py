"""A store that is searched over HTTP: whoever serves it has the index, whoever asks has the engine.

Here one program does both. As two, `ragcache serve-store build/demo_store` is the first half, and `--store-url` names
it. Stages of the search arrive as the service makes them, so that the engine reads while the search goes on, as with a
store of this process. Run it with ``python -m examples.retrieval_service``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough

from examples._shared import Row, demo_questions, open_demo_store, open_engine, option_parser, options_of, show
from ragcache_core import RemoteStore, StoreService
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    format_documents,
    prompt_from_layout,
)

KEY = "of-the-demo-store"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--store-url", help="a store that is served already (its key in RAGCACHE_STORE_API_KEY)")
    given = parser.parse_args(arguments)
    options, rows = options_of(given), []
    with ExitStack() as stack:
        url, key = given.store_url, os.environ.get("RAGCACHE_STORE_API_KEY")
        if url is None:
            service = stack.enter_context(StoreService(stack.enter_context(open_demo_store()), api_key=KEY))
            url, key = service.url, KEY
        store = stack.enter_context(RemoteStore(url, api_key=key))
        engine = stack.enter_context(open_engine(options))
        prompt = prompt_from_layout()
        engine.bind_prompt(prompt, format_documents)
        llm = ChatRAGCache(engine=engine, temperature=0, max_tokens=32)
        documents = {
            "context": RAGCacheRetriever(store=store, engine=engine, k=2) | format_documents,
            "question": RunnablePassthrough(),
        }
        chain = documents | prompt | llm | StrOutputParser()
        for asked in demo_questions("single")[:3]:
            for note in ("cold", "again"):
                stats = CacheStatsCallbackHandler()
                answer = "".join(chain.stream(asked["question"], {"callbacks": [stats]}))
                ((_, request),) = stats.runs
                rows.append(Row.of(asked["question"], note, answer, request))
    show(rows, options)


if __name__ == "__main__":
    main()
