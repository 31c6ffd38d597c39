"""How good answers stay when documents are reused, reordered or exchanged, and what is saved: real engines in turn."""

from ragcache_core.quality.asking import AskedAnswer, answers_of
from ragcache_core.quality.conversing import conversations_of
from ragcache_core.quality.questions import Question
from ragcache_core.quality.reading import read_questions
from ragcache_core.quality.scores import exact_match, jaccard, rouge_l, token_f1
from ragcache_core.quality.summary import Summary, summarise, summary_table
from ragcache_core.quality.ways import (
    FULL,
    NAIVE,
    PREFIX,
    REFERRED_TO,
    SHOWN_AGAIN,
    Way,
    chunk_ways,
    order_ways,
)

__all__ = [
    "FULL",
    "NAIVE",
    "PREFIX",
    "REFERRED_TO",
    "SHOWN_AGAIN",
    "AskedAnswer",
    "Question",
    "Summary",
    "Way",
    "answers_of",
    "chunk_ways",
    "conversations_of",
    "exact_match",
    "jaccard",
    "order_ways",
    "read_questions",
    "rouge_l",
    "summarise",
    "summary_table",
    "token_f1",
]
