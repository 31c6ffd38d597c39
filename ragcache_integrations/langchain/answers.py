"""A semantic cache of answers for LangChain's models: ``set_llm_cache``, or ``cache=`` of a model."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from langchain_core.caches import RETURN_VAL_TYPE, BaseCache
from langchain_core.embeddings import Embeddings
from langchain_core.messages import message_to_dict, messages_from_dict
from langchain_core.outputs import ChatGeneration, Generation

from ragcache_core.answers import AnswerCache, FoundAnswer, QuestionKey, parse_question
from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_core.retrieval import DocumentStore
from ragcache_core.retrieval.embedders.base import Embedder
from ragcache_core.stats import ANSWER_KEY, STATS_KEY
from ragcache_core.types import DocId
from ragcache_integrations.langchain.vectorstore import StagedFAISS

_SAYS_NOTHING = {"id", "response_metadata", "usage_metadata"}
"""What a message has besides what a model reads of it."""
_ROLES = {"human": "user", "ai": "assistant"}
_NUM_PENDING_KEPT = 1000

_logger = logging.getLogger(__name__)


class SemanticAnswerCache(BaseCache):
    """Gives an answer again to a question of nearly the same meaning, about the same versions of the same documents.

    ::

        with SemanticAnswerCache(MiniLMEmbedder(), folder="answers") as answers:
            chain = search | prompt | ChatRAGCache(engine=engine, cache=answers)

    This is approximate, and opt-in. Everything but the question has to be equal: the model and its settings, the
    prompt, the documents and their order, the question's numbers and (English) question words. The question is what a
    retriever was asked, if the prompt shows it as it was asked; other prompts are given the answer to the very same
    prompt alone. Answers that call tools are not kept. Streams (``llm.stream``) pass LangChain's caches by.

    ``response_metadata["ragcache"]["answer_cache"]`` marks such an answer and holds the question that it was given to,
    and how near that is; ``CacheStatsCallbackHandler`` counts it apart.

    A document that was changed makes another prompt; :meth:`forget` drops what was said of one that is gone.

    Args:
        embedding: what compares questions: a sentence embedding, or a store with one. Without it they are compared by
            their words, which seldom finds one, and hardly ever a wrong one.
        threshold: the least cosine of two questions, above 0 and at most 1.
        max_answers: how many are kept; the one that was longest not asked for goes first.
        folder: where they outlive the process, readable by their owner alone; one process at a time.

    Raises:
        ConfigError: a value that cannot work, an embedding that embeds nothing, or the built-in one, which knows the
            words of documents alone.
        StoreLockedError: another process uses the folder. StoreCorruptError, StoreError
    """

    def __init__(
        self,
        embedding: Embeddings | Embedder | StagedFAISS | DocumentStore | None = None,
        *,
        threshold: float = 0.92,
        max_answers: int = 1000,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        embedder = embedding.store if isinstance(embedding, StagedFAISS) else embedding
        self._answers = AnswerCache(embedder, threshold=threshold, max_answers=max_answers, folder=folder)
        self._pending: OrderedDict[tuple[str, str], tuple[QuestionKey, int]] = OrderedDict()
        self._lock = threading.Lock()

    def lookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        asked, since = _asked(prompt, llm_string), self._answers.now()
        if (found := self._answers.find(asked)) is not None and (kept := _loaded(found)) is not None:
            return kept
        with self._lock:
            self._pending[prompt, llm_string] = asked, since
            if len(self._pending) > _NUM_PENDING_KEPT:
                self._pending.popitem(last=False)
        return None

    def update(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        with self._lock:
            asked, since = self._pending.pop((prompt, llm_string), (None, None))
        if (answer := _dumped(return_val)) is not None:
            self._answers.keep(_asked(prompt, llm_string) if asked is None else asked, answer, since=since)

    def clear(self, **kwargs: Any) -> None:
        """Drop every answer."""
        self._answers.clear()

    def forget(self, ids: Iterable[DocId]) -> int:
        """Drop every answer that stands on one of these documents; return how many there were.

        An answer that is being given meanwhile is not kept either.
        """
        return self._answers.forget(ids)

    def forget_outdated(self, store: StagedFAISS | DocumentStore) -> int:
        """Drop every answer that stands on a document which ``store`` does not hold as it was; return how many."""
        return self._answers.forget_outdated(store.store if isinstance(store, StagedFAISS) else store)

    def close(self) -> None:
        """Let another process use the folder. May be called twice."""
        self._answers.close()

    def __len__(self) -> int:
        return len(self._answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _asked(prompt: str, llm_string: str) -> QuestionKey:
    queries = [search.query for search in RETRIEVED.searches() if search.query]
    return parse_question(_messages(prompt), llm_string, RETRIEVED.shown(), queries)


def _messages(prompt: str) -> list[dict[str, Any]]:
    """Return the messages that LangChain serialised; a text is one of the user."""
    try:
        messages = json.loads(prompt)
        if not isinstance(messages, list):
            raise TypeError
        read = [{n: v for n, v in message["kwargs"].items() if n not in _SAYS_NOTHING} for message in messages]
        return [{**message, "role": _ROLES.get(message["type"], message["type"])} for message in read]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [{"role": "user", "content": prompt}]


def _dumped(generations: Sequence[Generation]) -> str | None:
    """Return generations as JSON; ``None`` where they call tools, or hold what is no JSON."""
    parts = []
    for generation in generations:
        message = generation.message if isinstance(generation, ChatGeneration) else None
        if getattr(message, "tool_calls", None) or getattr(message, "invalid_tool_calls", None):
            return None
        said = None if message is None else message_to_dict(message)
        parts.append({"text": generation.text, "info": generation.generation_info, "message": said})
    try:
        return json.dumps(parts)
    except (TypeError, ValueError) as error:
        _logger.warning("an answer cannot be kept, it holds what is no JSON: %s", error)
        return None


def _read(text: str) -> list[Generation] | None:
    """Return the generations that :func:`_dumped` wrote; ``None`` if it did not."""
    try:
        return [_generation(**part) for part in json.loads(text)]
    except (ValueError, KeyError, TypeError) as error:
        _logger.warning("an answer that was kept cannot be read: %s", error)
        return None


def _generation(text: str, info: dict[str, Any] | None, message: dict[str, Any] | None) -> Generation:
    if message is None:
        return Generation(text=text, generation_info=info)
    return ChatGeneration(message=messages_from_dict([message])[0], generation_info=info)


def _loaded(found: FoundAnswer) -> list[Generation] | None:
    """Return the generations of an answer that was found, marked as such: texts only where it was asked otherwise."""
    mark = {STATS_KEY: {ANSWER_KEY: {"question": found.question, "similarity": found.similarity}}}
    generations = _read(found.answer)
    for generation in generations or ():
        if isinstance(generation, ChatGeneration):
            metadata = {**generation.message.response_metadata, **mark}
            generation.message = generation.message.model_copy(update={"id": None, "response_metadata": metadata})
            # its id is that of the first answer: LangGraph would put this one in that one's place
        elif found.similarity < 1:
            generation.generation_info = {**(generation.generation_info or {}), **mark}
    return generations
