"""A document changes, and goes: a store tells its engine, which forgets the old version's KV and prefills the new one.

The first question is asked cold and again, then its document is replaced and asked about once more: the answer is that
of the new version, which was cached by then. In the end the document is deleted, and nothing of it is left in any tier.
Run it with ``python -m examples.changing_documents``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace

from examples._shared import Row, demo_documents, demo_questions, open_engine, read_options, show
from ragcache_core import DocumentStore, PromptLayout

NEW_ANSWER = "Rosa Thimful"


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    asked = demo_questions("single")[0]
    layout, rows = PromptLayout(), []
    with (
        open_engine(options) as engine,
        tempfile.TemporaryDirectory() as folder,
        DocumentStore.create(folder, index="flat") as store,
    ):
        engine.bind_prompt(layout)
        store.add(demo_documents())
        store.bind(engine, warm=True)

        def ask(question: str, note: str) -> None:
            documents = store.search(question, 1).documents
            answer = engine.generate(layout.render(engine.tokenizer, documents, question), max_tokens=32)
            rows.append(Row.of(question, note, answer.text, answer.stats))

        question = asked["question"]
        ask(question, "cold")
        ask(question, "again")
        (document,) = store.search(question, 1).documents
        store.replace(replace(document, text=document.text.replace(asked["answer"], NEW_ANSWER)))
        ask(question, "changed")
        store.delete([document.doc_id])  # its KV goes with it
        receipt = engine.forget([document.doc_id])  # which asks again, and finds nothing
        ask(question, "deleted")
    show(rows, options)
    if not options.as_json:
        left = sum(receipt.num_blocks.values())
        print(f"{document.doc_id}: {left} blocks left, {'all of it is gone' if receipt.is_complete else 'ask again'}")


if __name__ == "__main__":
    main()
