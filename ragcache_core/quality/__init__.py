"""The quality of answers with reused, reordered or replaced documents, and the savings, on real engines."""

from ragcache_core.quality.answers import ScoredAnswer, answers_of, conversations_of
from ragcache_core.quality.files import read_questions
from ragcache_core.quality.methods import (
    FULL,
    NAIVE,
    PREFIX,
    REFERRED_TO,
    SHOWN_AGAIN,
    Method,
    chunk_methods,
    compression_methods,
    order_methods,
)
from ragcache_core.quality.questions import Question
from ragcache_core.quality.scores import exact_match, jaccard, rouge_l, token_f1
from ragcache_core.quality.summary import QualitySummary, summarise, summary_table

__all__ = [
    "FULL",
    "NAIVE",
    "PREFIX",
    "REFERRED_TO",
    "SHOWN_AGAIN",
    "Method",
    "QualitySummary",
    "Question",
    "ScoredAnswer",
    "answers_of",
    "chunk_methods",
    "compression_methods",
    "conversations_of",
    "exact_match",
    "jaccard",
    "order_methods",
    "read_questions",
    "rouge_l",
    "summarise",
    "summary_table",
    "token_f1",
]
