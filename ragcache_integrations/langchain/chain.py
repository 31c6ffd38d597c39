"""The prompt of an ordinary LCEL chain, laid out so that requests about the same documents share their prefix.

::

    chain = (
        {"context": retriever | format_documents, "question": RunnablePassthrough()}
        | prompt_from_layout()
        | ChatRAGCache(engine=engine)
        | StrOutputParser()
    )
"""

from __future__ import annotations

from collections.abc import Iterable

from langchain_core.prompts import ChatPromptTemplate

from ragcache_core.prompt import PromptLayout
from ragcache_integrations.langchain.documents import AnyDocument, to_core

RANK_KEY = "relevance_rank"
"""Key of a document's metadata for its place in the search's result, where the retriever returned another order."""

_DEFAULT = PromptLayout()


def format_documents(documents: Iterable[AnyDocument], layout: PromptLayout = _DEFAULT) -> str:
    """Return the documents as the prompt shows them, in the order given; the ``relevance_hint`` follows them."""
    shown = to_core(documents)
    ranks = {d.doc_id: rank for d in shown if isinstance(rank := d.metadata.get(RANK_KEY), int)}
    is_ranked = len(ranks) == len(shown)
    hint = layout.hint(shown, sorted(shown, key=lambda d: ranks[d.doc_id]) if is_ranked else None)
    return layout.document_separator.join(filter(None, (layout.context(shown), hint)))


def prompt_from_layout(layout: PromptLayout = _DEFAULT) -> ChatPromptTemplate:
    """Return a prompt template of ``{context}`` and ``{question}`` that makes the messages of ``layout``.

    The context is what :func:`format_documents` returns, of at least one document.
    """
    before, after = (_literal(part) for part in layout.question_format.split("{question}"))
    asked = f"{{context}}{_literal(layout.document_separator)}{before}{{question}}{after}"
    prefix = [("system", _literal(layout.static_prefix))] if layout.static_prefix else []
    return ChatPromptTemplate.from_messages([*prefix, ("human", asked)])


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
