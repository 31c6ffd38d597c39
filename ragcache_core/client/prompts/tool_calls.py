"""An agent's next prompt while its tool still runs: all that was said, and the tool's result as far as it is known."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from ragcache_core.client.prompts.bound_prompt import UNKNOWN, BoundPrompt, Drafts, KVScopes
from ragcache_core.client.prompts.layout_learner import LayoutLearner, LearnedLayout
from ragcache_core.client.prompts.request_plan import ChatWithTools, RememberedSearch
from ragcache_core.prompt import ChatMessage, PromptTokenizer, texts_of
from ragcache_core.types import DocId, Document

_T = TypeVar("_T")

_MAX_CALLS = 64
"""The most calls that are waited for: the oldest is forgotten."""
_MAX_TOOLS = 256
_USUAL = LearnedLayout(
    before=(),
    message={"role": "tool", "content": ""},
    head="",
    gap="\n\n",
    first_number=0,
    num_documents=None,
    tail="",
    question_start=0,
    after=(),
)
"""How the retriever tools of LangChain and LlamaIndex show documents, unless they are told otherwise."""


class ToolCalls:
    """The tool calls of models that wait for a result, and how results of each tool look. Thread-safe."""

    def __init__(self, tokenizer: PromptTokenizer, scopes: KVScopes, *, max_model_len: int) -> None:
        """Know of none."""
        self._tokenizer = tokenizer
        self._scopes = scopes
        self._max_model_len = max_model_len
        self._lock = Lock()
        self._waiting: OrderedDict[str, _ParsedCall] = OrderedDict()
        self._tools: OrderedDict[str, _Tool] = OrderedDict()

    def add(self, tool_chat: ChatWithTools, answer: ChatMessage) -> None:
        """Record that a model answered a chat with the calls of ``answer``, a message as it will be sent back."""
        ids: tuple[str, ...] = ()
        for call_id, name, arguments in _calls_of(answer):
            ids, tool = (*ids, call_id), self._tool_of(name)
            layout = tool.learner.layout or _USUAL
            prompt = BoundPrompt(
                _NextPrompt(tool_chat, answer, ids, layout),
                self._tokenizer,
                max_model_len=self._max_model_len,
                has_documents=layout.num_documents != 0,
                scope=self._scopes.read(tool_chat.settings),
                settings=tool_chat.settings,
            )
            with self._lock:
                _put(self._waiting, call_id, _ParsedCall(tool, _texts_in(arguments), prompt), _MAX_CALLS)

    def observe(self, messages: Sequence[ChatMessage], searches: Sequence[RememberedSearch]) -> None:
        """Learn from a chat that ends in results how each tool shows what ``searches`` found; they wait no longer."""
        for message in reversed(messages):
            if message.get("role") != "tool":
                break
            with self._lock:
                call = self._waiting.pop(str(message.get("tool_call_id")), None)
            if call is not None:
                shown = {**message, "content": "\n".join(texts_of(message.get("content")))}
                call.tool.observe(shown, [search for search in searches if call.asks(search.query or "")])

    def prompt_for(self, query: str, default: BoundPrompt | None) -> BoundPrompt | None:
        """Return the next prompt of the agent whose tool searches ``query``, the newest one; ``default`` else.

        That also goes before the prompt of a tool whose results have not been seen yet, unless the KV of the two is
        separate: then it is not known which of them will show the documents, and there is none.
        """
        with self._lock:
            found = next((call for call in reversed(self._waiting.values()) if call.asks(query)), None)
        if found is None or found.tool.shows_documents is False:
            return default
        if found.tool.shows_documents or default is None:
            return found.prompt
        return default if self._scopes.of(default.scope) == found.prompt.scope else None

    def _tool_of(self, name: str) -> _Tool:
        with self._lock:
            return _put(self._tools, name, self._tools.get(name) or _Tool(LayoutLearner(None)), _MAX_TOOLS)


@dataclass(slots=True)
class _Tool:
    """How a tool shows what it found; ``shows_documents`` is ``None`` while that is not known."""

    learner: LayoutLearner
    shows_documents: bool | None = None

    def observe(self, result: ChatMessage, searches: Sequence[RememberedSearch]) -> None:
        """Learn from a result of ``searches``: what a query engine made of them shows none of their documents."""
        self.learner.observe([result], searches, is_prefilled=False)
        if self.learner.layout is not None:
            self.shows_documents = True
        elif any(search.documents for search in searches):
            self.shows_documents = False


@dataclass(frozen=True, slots=True)
class _ParsedCall:
    """A call that waits for its result: the texts among its arguments, and the prompt that will show the result."""

    tool: _Tool
    texts: tuple[str, ...]
    prompt: BoundPrompt

    def asks(self, query: str) -> bool:
        """Return whether the tool searches ``query`` for it: LlamaIndex's own puts an argument's name before it."""
        query = _squeezed(query)
        return any(query == text or query.endswith(f" is {text}") for text in self.texts)


@dataclass(frozen=True, slots=True)
class _NextPrompt:
    """What an agent asks when the last call of ``answer`` here has a result; of those before it none is known."""

    tool_chat: ChatWithTools
    answer: ChatMessage
    call_ids: tuple[str, ...]
    layout: LearnedLayout

    def drafts(self, shown_documents: Sequence[Any], documents: Sequence[Document]) -> Drafts:
        """Return the messages about these documents, twice."""
        *earlier, own = self.call_ids
        one, other = (
            [
                *self.tool_chat.messages,
                self.answer,
                *({**_USUAL.message, "tool_call_id": call_id, "content": unknown} for call_id in earlier),
                {**draft[0], "tool_call_id": own},
            ]
            for unknown, draft in zip(UNKNOWN, self.layout.drafts(shown_documents, documents), strict=True)
        )
        return one, other

    def texts(self, documents: Sequence[Document]) -> list[tuple[DocId, str]]:
        """Return the documents as the messages show them, those that the chat showed already among them."""
        return [*self.tool_chat.documents, *self.layout.texts(documents)]


def _calls_of(answer: ChatMessage) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield id, name and arguments of a message's tool calls; what a model wrote that is none has no arguments."""
    for call in answer.get("tool_calls") or ():
        match call:
            case {"id": str(call_id), "function": {"name": str(name), "arguments": arguments}}:
                try:
                    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                except ValueError:
                    arguments = None
                yield call_id, name, arguments if isinstance(arguments, Mapping) else {}


def _texts_in(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(text for value in arguments.values() if isinstance(value, str) and (text := _squeezed(value)))


def _squeezed(text: str) -> str:
    """Return a text with single spaces: models put white space around what they search for."""
    return " ".join(text.split())


def _put(kept: OrderedDict[str, _T], key: str, value: _T, capacity: int) -> _T:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > capacity:
        kept.popitem(last=False)
    return value
