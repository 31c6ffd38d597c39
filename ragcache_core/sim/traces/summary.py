"""What a trace is like, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ragcache_core.errors import ConfigError
from ragcache_core.sim.traces.trace import Trace

TOP_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Counts and means of a trace; tokens of documents are means over what is retrieved.

    ``top_share`` is what part of all retrievals are of the most popular 3 % of the documents that are retrieved at
    all. ``repeated_retrievals`` is how many are of a document that an earlier request retrieved, and
    ``repeated_prefix`` how many are so after the same documents in the same order: the most that an endless cache of
    prefixes hits. ``history_share`` is what part of all prompts was shown, asked or answered in earlier turns.
    """

    num_requests: int
    duration_s: float
    requests_per_s: float
    num_documents: int
    num_retrievals: int
    documents_per_request: float
    mean_document_tokens: float
    median_prompt_tokens: float
    mean_prompt_tokens: float
    max_prompt_tokens: int
    mean_question_tokens: float
    mean_output_tokens: float
    top_share: float
    repeated_retrievals: float
    repeated_prefix: float
    num_conversations: int
    turns_per_conversation: float
    median_think_s: float
    history_share: float


def summarize(trace: Trace) -> TraceSummary:
    """Return what ``trace`` is like.

    Raises:
        ConfigError: it is empty.
    """
    if not len(trace):
        raise ConfigError("the trace has no requests: there is nothing to say of it")
    num_retrievals = len(trace.docs)
    prompts = trace.document_tokens() + trace.question_tokens + trace.history_tokens
    turns = np.flatnonzero(trace.conversation >= 0)
    turns = turns[np.argsort(trace.conversation[turns], kind="stable")]
    num_conversations = len(np.unique(trace.conversation[turns]))
    think_s = np.diff(trace.arrival_s[turns])[np.diff(trace.conversation[turns]) == 0]
    return TraceSummary(
        num_requests=len(trace),
        duration_s=float(trace.arrival_s[-1]),
        requests_per_s=trace.requests_per_s,
        num_documents=len(trace.doc_ids),
        num_retrievals=num_retrievals,
        documents_per_request=num_retrievals / len(trace),
        mean_document_tokens=float(trace.doc_tokens.mean()) if num_retrievals else 0.0,
        median_prompt_tokens=float(np.median(prompts)),
        mean_prompt_tokens=float(prompts.mean()),
        max_prompt_tokens=int(prompts.max()),
        mean_question_tokens=float(trace.question_tokens.mean()),
        mean_output_tokens=float(trace.output_tokens.mean()),
        top_share=popularity_share(trace, TOP_SHARE),
        repeated_retrievals=1 - len(trace.doc_ids) / num_retrievals if num_retrievals else 0.0,
        num_conversations=num_conversations,
        turns_per_conversation=len(turns) / max(num_conversations, 1),
        median_think_s=float(np.median(think_s)) if len(think_s) else 0.0,
        history_share=float(trace.history_tokens.sum() / max(prompts.sum(), 1)),
        repeated_prefix=1 - _num_prefixes(trace) / num_retrievals if num_retrievals else 0.0,
    )


def popularity_share(trace: Trace, top: float, num_documents: int | None = None) -> float:
    """Return what part of all retrievals are of the ``top`` share of the documents.

    Those are the documents of the trace, or of a corpus of ``num_documents``.
    """
    counts = np.sort(np.bincount(trace.docs))[::-1]
    num_top = max(1, round(top * (num_documents or len(trace.doc_ids))))
    return float(counts[:num_top].sum() / counts.sum()) if len(counts) else 0.0


def _num_prefixes(trace: Trace) -> int:
    """Return how many different beginnings requests have: nodes of the tree that holds all of them."""
    numbers: dict[tuple[int, int], int] = {}
    docs, first = trace.docs.tolist(), trace.first.tolist()
    for start, end in pairwise(first):
        node = -1
        for doc in docs[start:end]:
            node = numbers.setdefault((node, doc), len(numbers))
    return len(numbers)
