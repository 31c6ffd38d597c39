"""Answers that were given, for questions that mean the same: told apart from the rest of a prompt, compared, kept.

::

    ask (messages -> question, and a key of all the rest) -> AnswerCache.find | keep | forget -> a file, if asked for
"""

from ragcache_core.answers.asked import AskedPrompt, ask
from ragcache_core.answers.cache import AnswerCache, FoundAnswer

__all__ = ["AnswerCache", "AskedPrompt", "FoundAnswer", "ask"]
