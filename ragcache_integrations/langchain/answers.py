"""Semantic answer cache for LangChain models: ``set_llm_cache``, or ``cache=`` of a model."""

from __future__ import annotations

import json
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
from ragcache_core.log import logger_of
from ragcache_core.retrieval import DocumentStore
from ragcache_core.retrieval.embedders.base import Embedder
from ragcache_core.stats import ANSWER_KEY, STATS_KEY
from ragcache_core.types import DocId
from ragcache_integrations.langchain.vectorstore import StagedFAISS

_UNSENT_FIELDS = {"id", "response_metadata", "usage_metadata"}  # fields of a message that no model reads
_ROLES = {"human": "user", "ai": "assistant"}
_MAX_PENDING = 1000

logger = logger_of(__name__)


class SemanticAnswerCache(BaseCache):
    """Reuses an answer for a question of nearly the same meaning about the same versions of the same documents.

    ::

        with SemanticAnswerCache(MiniLMEmbedder(), folder="answers") as answers:
            chain = search | prompt | ChatRAGCache(engine=engine, cache=answers)

    This is approximate, and opt-in. Everything but the question must be equal: the model and its settings, the prompt,
    the documents and their order, and the numbers and (English) question words of the question. The question is a
    retriever's query that the prompt contains unchanged; any other prompt only matches an equal prompt. Answers with
    tool calls are not stored. LangChain's caches do not apply to ``llm.stream``.

    ``response_metadata["ragcache"]["answer_cache"]`` of a cached answer holds its question and the similarity;
    ``CacheStatsCallbackHandler`` counts these answers separately.

    A changed document makes another prompt; :meth:`forget` deletes the answers about a deleted one.

    Args:
        embedding: compares questions: a sentence embedding, or a store with one. The default compares their words,
            which finds few rewordings and almost no wrong answer.
        threshold: minimum cosine of two questions, above 0 and at most 1.
        max_answers: capacity; the least recently used answer is evicted.
        folder: where answers outlive the process, readable by their owner alone; one process at a time.

    Raises:
        ConfigError: an invalid value, an embedding that embeds nothing, or the built-in one.
        StoreError: the folder cannot be used (StoreLockedError, StoreCorruptError, StoreVersionError).
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
        key, since = _key_of(prompt, llm_string), self._answers.now()
        if (found := self._answers.find(key)) is not None and (generations := _loaded(found)) is not None:
            return generations
        with self._lock:
            self._pending[prompt, llm_string] = key, since
            if len(self._pending) > _MAX_PENDING:
                self._pending.popitem(last=False)
        return None

    def update(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        with self._lock:
            key, since = self._pending.pop((prompt, llm_string), (None, None))
        if (answer := _dumped(return_val)) is not None:
            self._answers.keep(_key_of(prompt, llm_string) if key is None else key, answer, since=since)

    def clear(self, **kwargs: Any) -> None:
        """Delete every answer.

        Raises:
            StoreError: see :meth:`forget`.
        """
        self._answers.clear()

    def forget(self, ids: Iterable[DocId]) -> int:
        """Delete every answer about one of these documents, and return the number of answers.

        Answers about them that are being generated are not stored. The deletion is on disk when this returns.

        Raises:
            StoreError: the answers are not found any more, but are still on disk: repeat the call.
        """
        return self._answers.forget(ids)

    def forget_outdated(self, store: StagedFAISS | DocumentStore) -> int:
        """Delete every answer about a document that ``store`` lacks or has in another version; see :meth:`forget`."""
        return self._answers.forget_outdated(store.store if isinstance(store, StagedFAISS) else store)

    def close(self) -> None:
        """Release the folder. May be called twice."""
        self._answers.close()

    def __len__(self) -> int:
        return len(self._answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _key_of(prompt: str, llm_string: str) -> QuestionKey:
    queries = [search.query for search in RETRIEVED.searches() if search.query]
    return parse_question(_messages(prompt), llm_string, RETRIEVED.shown(), queries)


def _messages(prompt: str) -> list[dict[str, Any]]:
    """Return the messages that LangChain serialised; a plain text is a user message."""
    try:
        messages = json.loads(prompt)
        if not isinstance(messages, list):
            raise TypeError
        read = [{n: v for n, v in message["kwargs"].items() if n not in _UNSENT_FIELDS} for message in messages]
        return [{**message, "role": _ROLES.get(message["type"], message["type"])} for message in read]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [{"role": "user", "content": prompt}]


def _dumped(generations: Sequence[Generation]) -> str | None:
    """Return generations as JSON; ``None`` for tool calls and for values that are not JSON."""
    parts = []
    for generation in generations:
        message = generation.message if isinstance(generation, ChatGeneration) else None
        if getattr(message, "tool_calls", None) or getattr(message, "invalid_tool_calls", None):
            return None
        dumped = None if message is None else message_to_dict(message)
        parts.append({"text": generation.text, "info": generation.generation_info, "message": dumped})
    try:
        return json.dumps(parts)
    except (TypeError, ValueError) as error:
        logger.warning("RC-ANSWER-UNCACHED: an answer is not cached, because it is not JSON: %s", error)
        return None


def _read(text: str) -> list[Generation] | None:
    """Return the generations of a JSON text of :func:`_dumped`; ``None`` for any other text."""
    try:
        return [_generation(**part) for part in json.loads(text)]
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("RC-ANSWER-UNREADABLE: a cached answer cannot be read: %s", error)
        return None


def _generation(text: str, info: dict[str, Any] | None, message: dict[str, Any] | None) -> Generation:
    if message is None:
        return Generation(text=text, generation_info=info)
    return ChatGeneration(message=messages_from_dict([message])[0], generation_info=info)


def _loaded(found: FoundAnswer) -> list[Generation] | None:
    """Return the generations of a cached answer, marked as cached; a text is marked if its question is another one."""
    mark = {STATS_KEY: {ANSWER_KEY: {"question": found.question, "similarity": found.similarity}}}
    generations = _read(found.answer)
    for generation in generations or ():
        if isinstance(generation, ChatGeneration):
            metadata = {**generation.message.response_metadata, **mark}
            generation.message = generation.message.model_copy(update={"id": None, "response_metadata": metadata})
            # With the id of the first answer LangGraph would replace that one by this one.
        elif found.similarity < 1:
            generation.generation_info = {**(generation.generation_info or {}), **mark}
    return generations
