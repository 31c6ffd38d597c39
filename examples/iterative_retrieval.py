"""Iterative retrieval: the first answer names what to search for next. Each round is a request of its own.

A question such as "Who founded the city where Adam Sarsis was born?" needs two documents, and the second cannot be
found before the first was read (RAGCache §9). The second round shows the documents of the first one again, in front, so
that it begins with their cached KV. Run it with ``python -m examples.iterative_retrieval``.
"""

from __future__ import annotations

from collections.abc import Sequence

from examples._shared import Row, demo_questions, open_demo_store, open_engine, read_options, show
from ragcache_core import Document, DocumentStore, Engine, Generation, PromptLayout

NUM_ROUNDS = 2


def answer_in_rounds(engine: Engine, store: DocumentStore, question: str, k: int = 2) -> list[Generation]:
    """Return the answer of each round; each searches with the question and the answer before."""
    layout, documents, answers = PromptLayout(), dict[str, Document](), list[Generation]()
    for _ in range(NUM_ROUNDS):
        query = f"{question} {answers[-1].text}" if answers else question
        found = store.search(query, k).documents
        documents.update({d.doc_id: d for d in found if d.doc_id not in documents})
        prompt = layout.render(engine.tokenizer, list(documents.values()), question)
        answers.append(engine.generate(prompt, max_tokens=32))
    return answers


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(__doc__, arguments)
    rows = []
    with open_engine(options) as engine, open_demo_store() as store:
        for question in [q["question"] for q in demo_questions("two-hop")[:3]]:
            for number, answer in enumerate(answer_in_rounds(engine, store, question), 1):
                rows.append(Row.of(question, f"round {number}", answer.text, answer.stats))
    show(rows, options)


if __name__ == "__main__":
    main()
