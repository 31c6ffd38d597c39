"""Applications of both frameworks, as ``mixed`` asks them: searches, rerankers, agents and conversations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from langchain_core.documents import Document as LangChainDocument
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.utils import convert_to_openai_messages
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import FilterOperator, MetadataFilter, MetadataFilters
from llama_index.llms.openai.utils import to_openai_message_dicts

from examples.reranking import WordReranker
from ragcache_core import Document, DocumentStore, PromptLayout, RequestStats, request_stats_from_dict
from ragcache_core.client import Engine
from ragcache_core.stats import STATS_KEY
from ragcache_integrations import langchain, llamaindex

MAX_TOKENS = 16
_RERANKS_S = 0.02
_NUM_CANDIDATES = 6
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the documents.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


@dataclass(frozen=True, slots=True)
class Session:
    """What one user does: ``questions`` of a conversation, or one to an agent, or over a search, reranked or not.

    ``kinds`` are those of the documents that it is about, ``()`` if all are; ``k`` is how many are shown.
    """

    framework: str
    kind: str
    questions: tuple[str, ...]
    k: int
    kinds: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        """How many answers it takes: an agent's first is before its tool's result, its second after."""
        return 2 if self.kind == "agent" else len(self.questions)


@dataclass(frozen=True, slots=True)
class Asked:
    """A chat as OpenAI's protocol has it, and the answer with its tokens."""

    session: Session
    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    text: str
    tokens: list[str]


Searching = Callable[[Callable[[Engine | None], Awaitable[list[str]]]], Awaitable[list[str]]]
"""Is given a search, with an engine and without, and returns the texts that it finds with one."""


class Application(Protocol):
    """Answers sessions, and notes what it asked."""

    async def answer(self, session: Session) -> list[Asked]:
        """Return what was asked for a session."""


@dataclass
class LangChainApplication:
    """Chats of ``ChatRAGCache`` about what ``RAGCacheRetriever`` finds."""

    engine: Engine
    store: DocumentStore
    searching: Searching
    counts: Counter[str]
    layout: PromptLayout = field(default_factory=PromptLayout)

    def __post_init__(self) -> None:
        self._llm = langchain.ChatRAGCache(engine=self.engine, temperature=0, max_tokens=MAX_TOKENS, logprobs=True)

    async def answer(self, session: Session) -> list[Asked]:
        """Return what was asked for a session."""
        if session.kind == "agent":
            return await self._agent(session)
        asked: list[Asked] = []
        told: list[AnyMessage] = []
        for question in session.questions:
            texts = await self._search(session, question)
            shown = self.layout.messages([Document("", text) for text in texts], question)
            user = HumanMessage(shown[-1]["content"])
            told += [user] if told else [SystemMessage(shown[0]["content"]), user]
            asked.append(await self._ask(session, told, []))
            told.append(AIMessage(asked[-1].text))
        return asked

    async def _agent(self, session: Session) -> list[Asked]:
        (question,) = session.questions
        messages: list[AnyMessage] = [SystemMessage(self.layout.static_prefix), HumanMessage(question)]
        first = await self._ask(session, messages, [TOOL])
        call = {"name": "search", "args": {"query": question}, "id": "call-1"}
        result = "\n\n".join(await self._search(session, question))
        messages += [AIMessage("", tool_calls=[call]), ToolMessage(result, tool_call_id="call-1", name="search")]
        return [first, await self._ask(session, messages, [TOOL])]

    async def _ask(self, session: Session, messages: Sequence[AnyMessage], tools: list[dict[str, Any]]) -> Asked:
        stats = langchain.CacheStatsCallbackHandler()
        llm = self._llm.bind_tools(tools) if tools else self._llm
        answer = await llm.ainvoke(list(messages), {"callbacks": [stats]})
        ((_, request),) = stats.runs
        count(self.counts, request)
        tokens = [token["token"] for token in answer.response_metadata["logprobs"]["content"]]
        sent: Any = convert_to_openai_messages(list(messages))
        return Asked(session, sent, tools, answer.text, tokens)

    async def _search(self, session: Session, question: str) -> list[str]:
        async def search(engine: Engine | None) -> list[str]:
            settings: dict[str, Any] = {"filter": {"kind": {"$in": list(session.kinds)}}} if session.kinds else {}
            if session.kind == "reranked":
                settings |= {"num_candidates": _NUM_CANDIDATES, "compressor": WordReranker(takes_s=_RERANKS_S)}
            retriever = langchain.RAGCacheRetriever(store=self.store, engine=engine, k=session.k, **settings)
            found: list[LangChainDocument] = await retriever.ainvoke(question)
            return [document.page_content for document in found]

        return await self.searching(search)


@dataclass
class LlamaIndexApplication:
    """Query engines, chat engines and tools over LlamaIndex's ``RAGCacheRetriever``."""

    engine: Engine
    store: DocumentStore
    searching: Searching
    counts: Counter[str]

    def __post_init__(self) -> None:
        self._llm = _HeardLLM(
            self.engine, temperature=0, max_tokens=MAX_TOKENS, additional_kwargs={"logprobs": True}, is_chat_model=True
        )

    async def answer(self, session: Session) -> list[Asked]:
        """Return what was asked for a session."""
        heard: list[tuple[list[ChatMessage], ChatResponse]] = []
        _heard.set(heard)
        tools = [TOOL] if session.kind == "agent" else []
        await (self._agent(session) if tools else self._conversation(session))
        assert len(heard) == session.num_requests, f"{session.kind}: {len(heard)} requests"
        return [self._asked(session, messages, tools, response) for messages, response in heard]

    async def _conversation(self, session: Session) -> None:
        """Have a query engine answer, or a chat engine, which shows documents and what was said in its own way."""
        if session.kind == "conversation":
            chat = ContextChatEngine.from_defaults(retriever=self._retriever(session, self.engine), llm=self._llm)
            for question in session.questions:
                await self.searching(partial(self._through, session, question, chat.achat))
            return
        query_engine = llamaindex.RAGCacheQueryEngine(self._retriever(session, self.engine), self._llm)
        for question in session.questions:
            await self.searching(partial(self._through, session, question, query_engine.aquery))

    async def _agent(self, session: Session) -> None:
        (question,) = session.questions
        system = ChatMessage(role=MessageRole.SYSTEM, content=PromptLayout().static_prefix)
        messages = [system, ChatMessage(role=MessageRole.USER, content=question)]
        await self._llm.achat(messages, tools=[TOOL])
        called = {"name": "search", "arguments": json.dumps({"query": question})}
        call = {"id": "call-1", "type": "function", "function": called}
        result = "\n\n".join(await self.searching(partial(self._through, session, question, None)))
        messages += [
            ChatMessage(role=MessageRole.ASSISTANT, content="", additional_kwargs={"tool_calls": [call]}),
            ChatMessage(role=MessageRole.TOOL, content=result, additional_kwargs={"tool_call_id": "call-1"}),
        ]
        await self._llm.achat(messages, tools=[TOOL])

    async def _through(self, session: Session, question: str, answer: Any, engine: Engine | None) -> list[str]:
        """Search, as part of answering where an engine answers."""
        if answer is None or engine is None:
            nodes = await self._retriever(session, engine).aretrieve(question)
        else:
            nodes = (await answer(question)).source_nodes
        return [node.node.get_content() for node in nodes]

    def _retriever(self, session: Session, engine: Engine | None) -> llamaindex.RAGCacheRetriever:
        settings: dict[str, Any] = {}
        if session.kinds:
            wanted = MetadataFilter(key="kind", value=list(session.kinds), operator=FilterOperator.IN)
            settings["filters"] = MetadataFilters(filters=[wanted])
        if session.kind == "reranked":
            settings |= {"num_candidates": _NUM_CANDIDATES, "node_postprocessors": [_WordReranker()]}
        return llamaindex.RAGCacheRetriever(self.store, engine, similarity_top_k=session.k, **settings)

    def _asked(
        self, session: Session, messages: Sequence[ChatMessage], tools: list[dict[str, Any]], response: ChatResponse
    ) -> Asked:
        count(self.counts, request_stats_from_dict(response.additional_kwargs[STATS_KEY]))
        logprobs = response.raw.choices[0].logprobs  # type: ignore[union-attr]  # raw is the SDK's answer
        sent: Any = to_openai_message_dicts(messages, model=self._llm.model)
        tokens = [token.token for token in logprobs.content or ()]
        return Asked(session, sent, tools, response.message.content or "", tokens)


def count(counts: Counter[str], request: RequestStats) -> None:
    """Count what served a request, and whether its documents were known."""
    counts["named"] += bool(request.documents)
    for tier in ("gpu", "host", "disk"):
        counts[f"{tier}_hits"] += bool(getattr(request, f"num_{tier}_tokens"))


_heard: ContextVar[list[tuple[list[ChatMessage], ChatResponse]]] = ContextVar("heard")


class _HeardLLM(llamaindex.RAGCacheLLM):
    """Notes what a session's engines ask."""

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        response: ChatResponse = await super().achat(messages, **kwargs)
        _heard.get().append((list(messages), response))
        return response


class _WordReranker(BaseNodePostprocessor):
    """Puts the nodes first that LangChain's does."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        assert query_bundle is not None
        shown = [LangChainDocument(node.node.get_content(), metadata={"place": i}) for i, node in enumerate(nodes)]
        ranked = WordReranker(takes_s=_RERANKS_S).compress_documents(shown, query_bundle.query_str)
        return [nodes[document.metadata["place"]] for document in ranked]
