"""Long texts split by tokens of the model, as the engine counts them: it is known what ``k`` of them take of a prompt.

Pages of many entries are indexed by ``ragcache index --tokenizer MODEL --chunk-tokens 96``, and asked about. Run it
with ``python -m examples.token_chunks``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from langchain_core.runnables import RunnablePassthrough

from examples._shared import Row, demo_documents, demo_questions, open_engine, read_options, show
from ragcache_core import DocumentStore
from ragcache_integrations.langchain import (
    CacheStatsCallbackHandler,
    ChatRAGCache,
    RAGCacheRetriever,
    format_documents,
    prompt_from_layout,
)

CHUNK_TOKENS = 96
_ENTRIES_OF_A_PAGE = 48


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    rows = []
    with tempfile.TemporaryDirectory(prefix="ragcache-example-") as folder, open_engine(options) as engine:
        pages, store_folder = Path(folder) / "pages", Path(folder) / "store"
        write_pages(pages)
        index = ["index", str(pages), "--store", str(store_folder), "--tokenizer", options.model]
        subprocess.run(
            [sys.executable, "-m", "ragcache_core", *index, "--chunk-tokens", str(CHUNK_TOKENS)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with DocumentStore.open(store_folder, read_only=True) as store:
            search = RAGCacheRetriever(store=store, engine=engine, k=2) | format_documents
            asking = {"context": search, "question": RunnablePassthrough()} | prompt_from_layout()
            chain = asking | ChatRAGCache(engine=engine, temperature=0, max_tokens=32)
            for question in [q["question"] for q in demo_questions("single")[:2]]:
                for note in ("cold", "again"):
                    stats = CacheStatsCallbackHandler()
                    answer = chain.invoke(question, {"callbacks": [stats]})
                    ((_, request),) = stats.runs
                    rows.append(Row.of(question, note, answer.text, request))
            if not options.as_json:
                num_pages = len(list(pages.iterdir()))
                longest = max(len(engine.tokenizer.encode(chunk.text).token_ids) for chunk in store.get(store.ids()))
                print(f"{len(store)} chunks of {num_pages} pages, the longest of {longest} tokens\n")
    show(rows, options)


def write_pages(folder: Path) -> None:
    """Write the demo corpus as a few long pages."""
    folder.mkdir()
    texts = [document.text for document in demo_documents()]
    for start in range(0, len(texts), _ENTRIES_OF_A_PAGE):
        page = "\n\n".join(texts[start : start + _ENTRIES_OF_A_PAGE])
        (folder / f"page-{start // _ENTRIES_OF_A_PAGE}.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
