"""A semantic answer cache: answers a similar question over an equal context.

::

    parse_question(messages) -> QuestionKey -> AnswerCache.find | keep | forget -> SQLite, in memory or in a folder
"""

from ragcache_core.answers.cache import AnswerCache, FoundAnswer, QuestionKey, parse_question

__all__ = ["AnswerCache", "FoundAnswer", "QuestionKey", "parse_question"]
