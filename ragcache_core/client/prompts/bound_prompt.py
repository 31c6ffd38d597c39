"""What of a prompt is known before the question's documents are final: its beginning, and what separates its KV."""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Lock
from typing import Any, Protocol, get_origin

from ragcache_core.errors import ConfigError, EngineError, PromptError
from ragcache_core.log import logger_of
from ragcache_core.ordering import static_prefix_digest
from ragcache_core.prompt import (
    ChatMessage,
    PromptLayout,
    PromptTokenizer,
    RenderedPrompt,
    acls_of,
    common_prefix_len,
    render_known,
    texts_of,
)
from ragcache_core.runtime.daemon_threads import DaemonThreadPool
from ragcache_core.types import DocId, Document
from ragcache_core.wire import KEY

_OURS = (KEY, "prompt_token_ids")
# What RAGCache itself puts into kv_transfer_params. The rest says, for example, that nothing is offloaded.
MIN_PREFILL_TOKENS = 16
"""Shorter beginnings are not worth a request: vLLM caches whole blocks, and this is the smallest usual one."""

_REMADE_AFTER_S = 10.0
"""What a prompt begins with may change (a date, say), and making it may have failed: it is made again then."""

UNKNOWN = ("Xqz", "Jvw kuy")
"""Two texts in place of one that is not known yet: other first characters, other lengths."""

_ROLES = {"human": "user", "ai": "assistant"}
_FIRST_WAIT_S = 0.1
_SHOWN = ("<first>", "another")
_MAX_OPENING_CHARS = 60

FormatDocuments = Callable[[Any], Any]
"""The user's own: the framework's documents as the text that the prompt shows."""

Drafts = tuple[list[ChatMessage], list[ChatMessage]]
"""The messages of a prompt twice; they differ in all that is not known yet, from its first character on."""
logger = logger_of(__name__)
_threads = DaemonThreadPool("ragcache-prefix", most=4)


@dataclass(frozen=True, slots=True)
class KVScope:
    """The fields of a request that separate its KV: model or adapter, salt, KV transfer, and the API key's tenant.

    Documents with access groups add a salt of their own, which depends on the prompt and is no part of the scope.

    Attributes:
        body: the fields of the body as JSON; without the engine's own model, which is the default.
        authorization: the request's own ``Authorization`` header; ``None`` where it is that of the engine's handle.
    """

    body: str = "{}"
    authorization: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the body."""
        fields: dict[str, Any] = json.loads(self.body)
        return fields

    def headers(self) -> dict[str, str]:
        """Return the headers of the request."""
        return {} if self.authorization is None else {"Authorization": self.authorization}

    def settings(self) -> dict[str, Any]:
        """Return the same as settings of a request through the OpenAI SDK."""
        fields, headers = self.fields(), self.headers()
        model = {"model": fields.pop("model")} if "model" in fields else {}
        return {
            **model,
            **({"extra_body": fields} if fields else {}),
            **({"extra_headers": headers} if headers else {}),
        }


class KVScopes:
    """The KV scopes of one engine's requests, as far as they are known. Thread-safe.

    A search does not know which request will show its documents. What is prefilled for it gets the scope of the
    requests so far that showed documents. Where these differ, it is not known, and stays so: a wrong scope would let
    requests of another tenant find the KV. So it is where their scope is not that of a model: the next call may have
    another salt.
    """

    def __init__(self, model: str, api_key: str) -> None:
        """``model`` and ``api_key`` are those of the engine's handle."""
        self._model = model
        self._authorization = f"Bearer {api_key}"
        self._lock = Lock()
        self._expected: set[KVScope] = set()
        self._seen: set[KVScope] = set()
        self._is_warned = False

    def read(self, settings: Mapping[str, Any]) -> KVScope:
        """Return the scope of a request with these settings; vLLM's own are in ``extra_body``."""
        given = {**settings, **(settings.get("extra_body") or {})}
        fields = {name: given[name] for name in ("model", "cache_salt") if given.get(name)}
        if fields.get("model") == self._model:
            del fields["model"]
        params = given.get("kv_transfer_params")
        if isinstance(params, Mapping) and (kept := {k: v for k, v in params.items() if k not in _OURS}):
            fields["kv_transfer_params"] = kept
        headers = settings.get("extra_headers") or {}
        sent = next((value for name, value in headers.items() if name.lower() == "authorization"), None)
        own = sent if isinstance(sent, str) and sent != self._authorization else None
        return KVScope(json.dumps(fields, sort_keys=True, default=repr), own)

    def expect(self, settings: Mapping[str, Any]) -> None:
        """Record a model that was made: until a request shows documents, its scope is the likely one."""
        self._add(self._expected, self.read(settings))

    def note(self, settings: Mapping[str, Any]) -> None:
        """Record a request that shows documents."""
        self._add(self._seen, self.read(settings))

    def of(self, bound: KVScope | None) -> KVScope | None:
        """Return the scope of the requests that will show a prompt; ``None`` where it is not known.

        Args:
            bound: the scope with which the prompt was bound, if it was bound with one.
        """
        if bound is not None:
            return bound
        with self._lock:
            known = self._seen or self._expected or {KVScope()}
            if len(known) == 1 and known <= self._expected | {KVScope()}:
                return next(iter(known))
            is_new, self._is_warned = not self._is_warned, True
        if is_new:
            logger.warning(
                "RC-SCOPE-UNKNOWN: no prefill while the search runs: requests of this engine differ in model, "
                "cache_salt, kv_transfer_params or key, and a search does not know which of them follows. %s",
                HINT,
            )
        return None

    def _add(self, scopes: set[KVScope], scope: KVScope) -> None:
        with self._lock:
            if len(scopes) < 2:  # two are enough to know that they differ
                scopes.add(scope)


HINT = (
    "Name them where the prompt is bound, engine.bind_prompt(..., settings={'extra_body': {'cache_salt': ...}}), and "
    "pass that prompt to the retriever"
)


class DraftedPrompt(Protocol):
    """A prompt whose messages can be made, but for the question."""

    def drafts(self, shown_documents: Sequence[Any], documents: Sequence[Document]) -> Drafts:
        """Return the messages about these documents, twice."""
        ...

    def texts(self, documents: Sequence[Document]) -> list[tuple[DocId, str]]:
        """Return the documents as the messages show them."""
        ...


class BoundPrompt:
    """The beginning of a chain's prompt, as tokens, while its question's documents are searched. Thread-safe.

    Attributes:
        is_question_first: something that is not known while the search runs (the question, a history of the chat)
            stands before the documents, so that only the static part before it can be prefilled.
        has_documents: whether any of what is known are the documents.
        scope: what separates the KV of the requests that show it; ``None`` where that was not said.
    """

    def __init__(
        self,
        prompt: DraftedPrompt,
        tokenizer: PromptTokenizer | None,
        *,
        max_model_len: int,
        is_question_first: bool = False,
        has_documents: bool = True,
        scope: KVScope | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Bind ``prompt``; without a ``tokenizer`` nothing of it is known.

        ``settings`` are the other fields of the requests that will show it, if they change the tokens.
        """
        self.is_question_first = is_question_first
        self.has_documents = has_documents and not is_question_first
        self.scope = scope
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._settings = settings
        self._max_model_len = max_model_len
        self._warned = Lock()
        self._made_s = -math.inf
        self._answered = Event()
        self._static_prefix: bytes | None = None

    def static_prefix(self, shown_documents: Sequence[Any], documents: Sequence[Document]) -> bytes | None:
        """Return what names the tokens before the documents in the cache, as they were of late; None: not known (yet).

        The server is asked by another thread, at the first call and every ten seconds or so, about a prompt of one
        document. The first call waits for the answer, 0.1 s at most. :meth:`prefix` asks as well.
        """
        if time.monotonic() - self._made_s >= _REMADE_AFTER_S and self._finds_documents:
            self._made_s = time.monotonic()
            with suppress(RuntimeError):  # no more threads: the next call asks
                if _threads.run(partial(self._ask, shown_documents[:1], documents[:1])):
                    self._answered.wait(_FIRST_WAIT_S)
        return self._static_prefix

    def _ask(self, shown_documents: Sequence[Any], documents: Sequence[Document]) -> None:
        try:
            self.prefix(shown_documents, documents)
        finally:
            self._answered.set()

    @property
    def _finds_documents(self) -> bool:
        return self._tokenizer is not None and self._tokenizer.finds_documents

    def prefix(self, shown_documents: Sequence[Any], documents: Sequence[Document]) -> RenderedPrompt | None:
        """Return the tokens that a request about these documents, in this order, begins with; asks the server.

        ``shown_documents`` are the framework's, for the user's own formatting; ``documents`` are the same ones. None
        where nothing is worth a prefill. Never fails: a prompt that cannot be made is not speculated on, and said once.
        """
        self._made_s = time.monotonic()
        if self._tokenizer is None or not self._finds_documents:
            return None
        try:
            one, other = self._prompt.drafts(shown_documents, documents)
            known = render_known(self._tokenizer, one, other, self._prompt.texts(documents), self._settings)
            known = replace(known, acls=acls_of(documents))
        except EngineError:
            return None  # the request itself will say so
        except Exception as error:  # the user's own code may raise anything, and will do so again in the chain itself
            if self._warned.acquire(blocking=False):
                logger.warning(
                    "RC-PROMPT-UNBOUND: no prefill while the search runs: the prompt of %d documents cannot be made "
                    "before its question is asked (%s: %s); bind the prompt and the format_docs that the chain uses",
                    len(documents),
                    type(error).__name__,
                    error,
                )
            return None
        self._static_prefix = static_prefix_digest(known.token_ids, known.segments)
        return known if MIN_PREFILL_TOKENS <= len(known.token_ids) < self._max_model_len else None


def bind(
    prompt: Any,
    format_docs: FormatDocuments | None,
    tokenizer: PromptTokenizer | None,
    *,
    max_model_len: int,
    context: str = "context",
    question: str = "question",
    is_prefilled: bool = True,
    scope: KVScope | None = None,
) -> BoundPrompt:
    """Return ``prompt`` bound; a warning says so if its question comes first. See ``Engine.bind_prompt``.

    Raises:
        ConfigError: ``prompt`` is nothing that makes messages, it has no variable ``context``, or no ``format_docs``
            says how it shows documents.
    """
    drafted = _drafted(prompt, format_docs, context, question)
    early = drafted.unknown_before_context()
    if early and is_prefilled:
        warn_question_first(early)
    return BoundPrompt(drafted, tokenizer, max_model_len=max_model_len, is_question_first=bool(early), scope=scope)


def warn_question_first(names: Sequence[str], *, opening: str = "", retriever: str | None = None) -> None:
    """Warn that a prompt's documents cannot be prefilled, and say why and what to do.

    Args:
        names: the variables before the documents.
        opening: the static text that the prompt begins with, where the prompt was learned from a request.
        retriever: the name of the retriever, where it is known.
    """
    logger.warning(
        "RC-QUESTION-FIRST: the prompt%s shows %s before the documents%s. They cannot be prefilled during the search, "
        "and no other question can reuse their KV: put the context before the question, and the chat history after it",
        "" if not opening else f" that begins with {opening[:_MAX_OPENING_CHARS]!r}",
        " and ".join(repr(name) for name in names),
        "" if retriever is None else f" of {retriever}",
    )


class _Template:
    """Messages made by a function of the context and of what is not known yet."""

    def __init__(
        self,
        fill: Callable[[str, Mapping[str, int]], list[ChatMessage]],
        unknown: Sequence[str],
        show: Callable[[Sequence[Any], Sequence[Document]], str],
        text_of: Callable[[Document], str],
    ) -> None:
        self._fill = fill
        self._unknown = tuple(unknown)
        self._show = show
        self._text_of = text_of

    def drafts(self, shown_documents: Sequence[Any], documents: Sequence[Document]) -> Drafts:
        context = self._show(shown_documents, documents)
        if not isinstance(context, str):
            raise PromptError(f"format_docs returned {type(context).__name__}, not a string")
        one, other = (self._fill(context, dict.fromkeys(self._unknown, i)) for i in (0, 1))
        return one, other

    def texts(self, documents: Sequence[Document]) -> list[tuple[DocId, str]]:
        return [(d.doc_id, self._text_of(d)) for d in documents]

    def unknown_before_context(self) -> list[str]:
        """Return the variables that stand before the context in the messages."""
        chosen = dict.fromkeys(self._unknown, 0)
        try:
            plain = _text(self._fill(_SHOWN[0], chosen))
            start = common_prefix_len(plain, _text(self._fill(_SHOWN[1], chosen)))
            if start == len(plain):
                return []
            others = {name: _text(self._fill(_SHOWN[0], {**chosen, name: 1})) for name in self._unknown}
        except Exception:  # will be said at the first prefix, with the documents that it is about
            return []
        return [name for name, other in others.items() if common_prefix_len(plain, other) < start]


def _text(messages: Sequence[ChatMessage]) -> str:
    """Return what a chat template makes of messages, as far as their order goes."""
    return "".join(f"<{message['role']}>{''.join(texts_of(message.get('content')))}" for message in messages)


def _drafted(prompt: Any, format_docs: FormatDocuments | None, context: str, question: str) -> _Template:
    if isinstance(prompt, PromptLayout):
        return _of_layout(prompt, format_docs)
    if format_docs is None:
        raise ConfigError("format_docs is None: pass the function that makes the context of the retrieved documents")
    call: Any = format_docs if callable(format_docs) else getattr(format_docs, "invoke", None)
    if call is None:
        raise ConfigError(f"format_docs is {format_docs!r:.80}: pass a function of the retrieved documents")
    if (make := _maker(prompt)) is not None:
        fill, unknown = _filler(prompt, make, context, question)
    elif callable(prompt):
        fill, unknown = _caller(prompt), [question]
    else:
        raise ConfigError(
            f"{prompt!r:.80} is no prompt: pass a prompt template of LangChain or LlamaIndex, a PromptLayout, or a "
            "function of context and question that returns messages"
        )
    return _Template(fill, unknown, lambda shown, _: call(shown), lambda d: d.text)


def _of_layout(layout: PromptLayout, format_docs: FormatDocuments | None) -> _Template:
    def fill(context: str, unknown: Mapping[str, int]) -> list[ChatMessage]:
        query_name = unknown["question"]
        hint = (
            (layout.relevance_hint or "") if query_name else ""
        )  # shown where the documents are reordered: not known here
        return layout.messages_of(context, UNKNOWN[query_name], hint)

    def show(shown: Sequence[Any], documents: Sequence[Document]) -> Any:
        return format_docs(shown) if format_docs is not None else layout.context(documents)

    return _Template(fill, ["question"], show, layout.document_text)


def _caller(prompt: Callable[..., Any]) -> Callable[[str, Mapping[str, int]], list[ChatMessage]]:
    def fill(context: str, unknown: Mapping[str, int]) -> list[ChatMessage]:
        (query_name,) = unknown.values()
        return [_message(m) for m in prompt(context, UNKNOWN[query_name])]

    return fill


def _maker(prompt: Any) -> Callable[..., Any] | None:
    """Return what makes messages of a template's variables."""
    if callable(make := getattr(prompt, "format_messages", None)) and not inspect.isclass(prompt):
        return make  # type: ignore[no-any-return]
    if callable(make := getattr(prompt, "format_prompt", None)) and not inspect.isclass(prompt):
        return lambda **variables: make(**variables).to_messages()
    return None


def _filler(
    prompt: Any, make: Callable[..., Any], context: str, question: str
) -> tuple[Callable[[str, Mapping[str, int]], list[ChatMessage]], list[str]]:
    variables, unknown = _variables(prompt)
    if variables and context not in variables:
        raise ConfigError(
            f"the prompt has no variable {context!r}, it has {sorted(variables)}: pass context= with the name of the "
            "variable that holds the documents"
        )
    types: Mapping[str, Any] = getattr(prompt, "input_types", None) or {}
    lists = {name for name, kind in types.items() if get_origin(kind) is list}
    names = sorted((unknown or {question}) - {context})

    def fill(text: str, chosen: Mapping[str, int]) -> list[ChatMessage]:
        values = {name: _history(i) if name in lists else UNKNOWN[i] for name, i in chosen.items()}
        return [_message(m) for m in make(**{context: text, **values})]

    return fill, names


def _variables(prompt: Any) -> tuple[set[str], set[str]]:
    """Return the names that a template takes, and those that the caller of the chain gives."""
    if (inputs := getattr(prompt, "input_variables", None)) is not None:  # LangChain
        partial: Mapping[str, Any] = getattr(prompt, "partial_variables", None) or {}
        optional = {name for name in getattr(prompt, "optional_variables", ()) if not partial.get(name)}
        return {*inputs, *optional, *partial}, {*inputs, *optional}
    names = set(getattr(prompt, "template_vars", None) or ())  # LlamaIndex
    mapped: Mapping[str, str] = getattr(prompt, "template_var_mappings", None) or {}
    made = {*(getattr(prompt, "function_mappings", None) or {}), *(getattr(prompt, "kwargs", None) or {})}
    return {*names, *mapped, *made}, ({*names} - {*mapped.values()} | {*mapped}) - made


def _history(chosen: int) -> list[tuple[str, str]]:
    return [("human", UNKNOWN[1]), ("ai", UNKNOWN[0])] if chosen else []


def _message(message: Any) -> ChatMessage:
    """Return a message of a framework as the OpenAI protocol's, as the framework's own client sends it."""
    if isinstance(message, Mapping):
        return message
    role: Any = getattr(message, "role", None) or getattr(message, "type", None)
    role = getattr(role, "value", role)
    blocks = getattr(message, "blocks", None)  # LlamaIndex
    content = message.content if blocks is None else "".join(block.text for block in blocks)
    extra: Mapping[str, Any] = getattr(message, "additional_kwargs", None) or {}
    role = extra.get("__openai_role__") or _ROLES.get(role, role)
    name = getattr(message, "name", None) or extra.get("name")
    return {"role": role, "content": content, **({"name": name} if name is not None else {})}
