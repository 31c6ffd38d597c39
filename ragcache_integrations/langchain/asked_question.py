"""One question to :class:`~ragcache_integrations.langchain.speculative_rag.SpeculativeRAG` on its way to an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document as LangChainDocument
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable

from ragcache_core.client import EngineClient
from ragcache_core.client.pipeline.run import PipelineEvent, Speculator
from ragcache_core.client.pipeline.session import SearchOverlap, SearchSession
from ragcache_core.client.prompts.bound_prompt import BoundPrompt
from ragcache_core.client.speculation.speculation import Speculation
from ragcache_core.stats import PIPELINE_KEY, STATS_KEY
from ragcache_core.types import Document
from ragcache_integrations.langchain.chat_model import ChatRAGCache
from ragcache_integrations.langchain.documents import to_langchain

Documents = list[LangChainDocument]
Prompt = Runnable[dict[str, Any], PromptValue]


class AskedQuestion(SearchSession):
    """One question: what its prompt is made of, what the search for it came to, and whether that was reported."""

    def __init__(self, question: str, values: Callable[[Documents], dict[str, Any]], prompt: Prompt) -> None:
        """``values`` makes what ``prompt`` is made of."""
        super().__init__()
        self.question = question
        self.values = values
        self.engine: EngineClient | None = None
        self.speculator: AnswerAhead | None = None
        self.bound: Callable[[], BoundPrompt | None] = lambda: None
        self._prompt = prompt
        self._is_answered = False
        self._is_reported = False
        self._untold: list[PipelineEvent] = []

    def messages(self, documents: Sequence[Document]) -> list[BaseMessage]:
        """Return the messages of the prompt without telling any callback."""
        values = self.values([to_langchain(document) for document in documents])
        if isinstance(self._prompt, BasePromptTemplate):
            return self._prompt.format_prompt(**values).to_messages()
        return self._prompt.invoke(values, {"callbacks": []}).to_messages()

    def overlap(self, timeout_s: float | None) -> SearchOverlap[Speculator]:
        """Return what goes on while the search does."""
        return SearchOverlap(self.engine, self.speculator, self.take, timeout_s, self.bound)

    def reported(self, answer: AIMessage, *, is_whole: bool = False) -> AIMessage:
        """Return an answer, or a chunk of one, with the report if its statistics are there, or if it is whole."""
        if not self._is_answered:  # whatever the request did not take over by now would only run beside it
            self._is_answered = True
            self.close()
        stats = getattr(answer, "response_metadata", {}).get(STATS_KEY)  # another model may answer with a string
        if stats is None and not is_whole:
            return answer
        if (found := self._settled_report()) is None or not isinstance(answer, AIMessage):
            return answer
        report = {STATS_KEY: {**(stats or {}), PIPELINE_KEY: found}}
        return answer.model_copy(update={"response_metadata": {**answer.response_metadata, **report}})

    def untold(self) -> Iterator[PipelineEvent]:
        """Yield what the report that was given away tells, for those who listen; once."""
        while self._untold:
            yield self._untold.pop()

    def _settled_report(self) -> dict[str, Any] | None:
        if (event := self.settle()) is not None:
            self._untold.append(event)
        report = self.pipeline_report()
        self._is_reported = report is not None
        return report

    def unreported(self) -> Iterator[AIMessageChunk]:
        """Yield a last chunk with the report, if the stream of another model had no chunk to take it."""
        if not self._is_reported and (found := self._settled_report()) is not None:
            yield AIMessageChunk(content="", response_metadata={STATS_KEY: {PIPELINE_KEY: found}})


@dataclass(frozen=True, slots=True)
class AnswerAhead:
    """Asks the model for an answer from candidates, just as it will be asked for the one from the final documents."""

    asked: AskedQuestion
    llm: ChatRAGCache
    kwargs: Mapping[str, Any]
    is_streamed: bool

    def prepare(self, documents: Sequence[Document]) -> Callable[[], Speculation]:
        self.llm.connect().remember_documents(documents, query=self.asked.question)
        messages = self.asked.messages(documents)
        with self.asked.asking():
            return self.llm.prepare(messages, is_streamed=self.is_streamed, **self.kwargs)
