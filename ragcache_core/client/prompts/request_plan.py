"""What a chat request carries besides its messages: which documents it shows, and access rights."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.prompt import ChatMessage, PromptDocument, RenderedPrompt, check_prompt_fits
from ragcache_core.runtime.rights import joined_salt, rights_salt
from ragcache_core.stats import DeadlineReport, RequestStats, document_stats
from ragcache_core.types import DocId, Document, PromptSegment, SegmentKind
from ragcache_core.wire import ChunkReuseOption, encode_kv_transfer_params, encode_shown_documents

_MAX_REMEMBERED = 1 << 16
"""Documents, many times more than can be recognised in prompts at a time."""


class DocumentFacts:
    """Access groups and readable labels of the documents that a client has seen; thread-safe.

    Prompts of frameworks are text, in which documents are recognised and known by their ids. Ids of several stores may
    be the same, so all groups count that were ever seen with one.
    """

    def __init__(self, *also: DocumentFacts) -> None:
        """``also``: facts that others add to, and that count here as well."""
        self._also = also
        self._acls: OrderedDict[DocId, frozenset[tuple[str, ...]]] = OrderedDict()
        self._labels: OrderedDict[DocId, str] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, documents: Iterable[Document]) -> None:
        """Remember the groups and labels of documents that have some."""
        for document in documents:
            acl, label = document.acl, document.label
            with self._lock if acl is not None or label is not None else nullcontext():
                if acl is not None:
                    self._acls[document.doc_id] = self._acls.pop(document.doc_id, frozenset()) | {tuple(acl)}
                if label is not None:
                    self._labels[document.doc_id] = label
                for kept in (self._acls, self._labels):
                    if len(kept) > _MAX_REMEMBERED:
                        kept.popitem(last=False)

    @property
    def has_acls(self) -> bool:
        """Whether any document has access groups."""
        return bool(self._acls) or any(other.has_acls for other in self._also)

    def acls_of(self, doc_ids: Iterable[DocId | None]) -> frozenset[tuple[str, ...]]:
        """Return the groups of those of the documents that have some."""
        ids = list(doc_ids)
        theirs = (other.acls_of(ids) for other in self._also)
        with self._lock:
            own = frozenset(acl for doc_id in ids for acl in self._acls.get(doc_id or "", ()))
        return own.union(*theirs)

    def label_of(self, doc_id: DocId | None) -> str | None:
        """Return the label of a document; ``None`` where it has none."""
        own = self._labels.get(doc_id or "")
        return own or next((label for other in self._also if (label := other.label_of(doc_id)) is not None), None)

    def labelled(self, segments: Iterable[PromptSegment]) -> tuple[PromptSegment, ...]:
        """Return segments with the labels of their documents, where they are known."""
        return tuple(replace(each, label=each.label or self.label_of(each.doc_id)) for each in segments)

    def body(self, doc_ids: Iterable[DocId | None], acls: frozenset[tuple[str, ...]] = frozenset()) -> dict[str, Any]:
        """Return what a request says of who may read the documents in it."""
        salt = rights_salt(acls | self.acls_of(doc_ids))
        return {} if salt is None else {"cache_salt": salt}


@dataclass(frozen=True, slots=True)
class ChatWithTools:
    """A request whose answer may call a tool, from which the next one of the same chat goes on.

    ``documents`` (id, text as shown) are in its ``messages``; ``settings`` are its other fields.
    """

    messages: Sequence[ChatMessage]
    settings: Mapping[str, Any]
    documents: Sequence[tuple[DocId, str]]


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A request's metadata, and how to read its statistics afterwards.

    ``extra_body`` is merged into the body of the request. ``doc_ids`` are the documents that the prompt shows, in its
    order, and ``num_chars`` its length, as text. ``prompt`` is known where its tokens are: the prompt was rendered
    before, or its request has a deadline. ``tool_chat`` is the chat of the request, if the model may answer
    with the call of a tool. ``deadline`` is that of the request, if it has one.
    """

    extra_body: dict[str, Any] = field(default_factory=dict)
    doc_ids: tuple[DocId, ...] = ()
    num_chars: int = 0
    prompt: RenderedPrompt | None = None
    tool_chat: ChatWithTools | None = None
    deadline: DeadlineReport | None = None

    def stats(self, usage: Mapping[str, Any] | None, *, ttft_s: float | None, total_s: float) -> RequestStats:
        """Return the statistics of the answered request; ``usage`` is the OpenAI protocol's, as the server sent it.

        A stream may have none; the engine tells the length of the prompt then.
        """
        segments = () if self.prompt is None else self.prompt.segments
        stats = request_stats(usage, segments, ttft_s=ttft_s, total_s=total_s)
        return stats if self.deadline is None else replace(stats, deadline=self.deadline)


def request_stats(
    usage: Mapping[str, Any] | None, segments: Sequence[PromptSegment], *, ttft_s: float | None, total_s: float
) -> RequestStats:
    """Return what ``usage`` and the clock say of a request."""
    usage = usage or {}
    num_cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return RequestStats(
        num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
        num_cached_tokens=num_cached_tokens,
        num_output_tokens=int(usage.get("completion_tokens") or 0),
        ttft_s=ttft_s,
        total_s=total_s,
        documents=document_stats(segments, num_cached_tokens),
    )


def merge_bodies(*bodies: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return several ``extra_body`` as one; later ones win, and their ``kv_transfer_params`` are merged too.

    The salt of a prompt's rights is joined with any other, so that none of them is lost.

    Raises:
        ConfigError: a body is not a mapping.
    """
    merged: dict[str, Any] = {}
    for body in filter(None, bodies):
        if not isinstance(body, Mapping):
            raise ConfigError(f"extra_body is {quoted(body)}: pass a mapping, {{'top_k': 20}} for example")
        params = {**(merged.get("kv_transfer_params") or {}), **(body.get("kv_transfer_params") or {})}
        merged = {**merged, **body, **({"kv_transfer_params": params} if params else {})}
    salts = [body["cache_salt"] for body in bodies if body and body.get("cache_salt") is not None]
    return {**merged, "cache_salt": joined_salt(salts)} if salts else merged


def as_plain_text(message: ChatMessage) -> ChatMessage:
    """Return a message whose content is a list of one text with that text as its content, others as they are.

    Every server renders both in the same way.
    """
    match message.get("content"):
        case [{"type": "text", "text": str(text), **other}] if not other:
            return {**message, "content": text}
    return message


def plan_texts(
    shown: Sequence[PromptDocument],
    facts: DocumentFacts,
    *,
    reordered: Container[tuple[DocId, ...]] = (),
    chunk_reuse: ChunkReuseOption = None,
    names_documents: bool = True,
) -> RequestPlan:
    """Return the plan of a chat whose tokens the server makes, and finds the documents in them.

    Args:
        shown: its documents, in its order.
        facts: what is known of these documents.
        reordered: the orders of documents that are not those of a search.
        chunk_reuse: how documents are reused, if it is not to be as the engine does.
        names_documents: whether the server finds documents by their texts.

    Raises:
        ConfigError: ``chunk_reuse`` holds what cannot be.
    """
    ids = tuple(each.doc_id for each in shown)
    body: dict[str, Any] = facts.body(ids)
    if names_documents:
        named = ((*each, facts.label_of(each.doc_id)) for each in shown)
        params = encode_shown_documents(named, is_reordered=ids in reordered, chunk_reuse=chunk_reuse)
        body["kv_transfer_params"] = params
    return RequestPlan(body, ids)


def plan_tokens(
    prompt: RenderedPrompt,
    facts: DocumentFacts,
    *,
    reordered: Container[tuple[DocId, ...]] = (),
    chunk_reuse: ChunkReuseOption = None,
    sends_tokens: bool = True,
    **options: Any,
) -> RequestPlan:
    """Return the plan of a request for ``prompt``, whose tokens are known; see :func:`plan_texts`.

    ``sends_tokens``: it is a chat of text, whose tokens the server takes from there. ``options`` are those of
    :func:`encode_kv_transfer_params`.
    """
    ids = tuple(s.doc_id or "" for s in prompt.segments if s.kind is SegmentKind.DOCUMENT)
    params = encode_kv_transfer_params(
        facts.labelled(prompt.segments),
        prompt.token_ids if sends_tokens else None,
        is_reordered=ids in reordered,
        chunk_reuse=chunk_reuse,
        **options,
    )
    return RequestPlan({"kv_transfer_params": params, **facts.body(ids, prompt.acls)}, ids, prompt=prompt)


def changed_messages(messages: Sequence[ChatMessage], sent: Sequence[ChatMessage]) -> dict[str, Any]:
    """Return what a request's body says in place of its ``messages`` where others are to be ``sent``."""
    return {} if list(sent) == list(messages) else {"messages": list(sent)}


def plan_rendered(
    prompt: RenderedPrompt,
    facts: DocumentFacts,
    *,
    max_model_len: int,
    reordered: Container[tuple[DocId, ...]] = (),
    chunk_reuse: ChunkReuseOption = None,
    is_prefill: bool = False,
    expected_uses: int = 0,
) -> RequestPlan:
    """Return the plan of a prompt whose token ids are sent to the completions endpoint; see :func:`plan_texts`.

    ``is_prefill``: the request that it is for follows, and ``expected_uses`` of them where a forecast says how many.

    Raises:
        PromptTooLongError: the prompt does not fit into ``max_model_len`` tokens.
        ConfigError: ``chunk_reuse`` or ``expected_uses`` hold what cannot be.
    """
    check_prompt_fits(len(prompt.token_ids), max_model_len)
    return plan_tokens(
        prompt,
        facts,
        reordered=reordered,
        chunk_reuse=chunk_reuse,
        sends_tokens=False,
        is_prefill=is_prefill,
        expected_uses=expected_uses,
    )


_next_sequence = count().__next__


@dataclass(frozen=True, slots=True)
class RememberedSearch:
    """The result of one search.

    Attributes:
        query: the query, where it is known.
        documents: (id, text), best first.
        retriever: the name of the retriever, where it is known.
        sequence: orders the searches of a process.
    """

    query: str | None
    documents: tuple[tuple[DocId, str], ...]
    retriever: str | None = field(default=None, compare=False)
    sequence: int = field(default_factory=_next_sequence, compare=False)


class RememberedDocuments:
    """The documents that retrievers returned lately, least recently seen first; bounded and thread-safe.

    An ordinary LCEL chain passes its model nothing but text: the documents in a prompt are recognised by their text.
    """

    def __init__(self, capacity: int = 512, *, num_searches: int = 32, facts: DocumentFacts | None = None) -> None:
        self.facts = facts or DocumentFacts()
        self._capacity = capacity
        self._searches: deque[RememberedSearch] = deque(maxlen=num_searches)
        self._shown: OrderedDict[tuple[DocId, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def add(
        self,
        documents: Iterable[Document],
        shown: Callable[[Document], str] | None = None,
        *,
        query: str | None = None,
        retriever: str | None = None,
    ) -> None:
        """Remember the result of a search for ``query`` and how prompts show it.

        ``shown`` returns the text of a document in prompts, by default its text; ``retriever`` is a name for messages.
        """
        documents = tuple(documents)
        self.facts.add(documents)
        with self._lock:
            self._searches.append(RememberedSearch(query, tuple((d.doc_id, d.text) for d in documents), retriever))
            for document in documents:
                key = (document.doc_id, shown(document) if shown else document.text)
                self._shown[key] = None
                self._shown.move_to_end(key)
            while len(self._shown) > self._capacity:
                self._shown.popitem(last=False)

    def shown(self) -> list[tuple[DocId, str]]:
        """Return (id, text as shown), the most recently seen first."""
        with self._lock:
            return list(reversed(self._shown))

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._searches.clear()
            self._shown.clear()

    def searches(self) -> list[RememberedSearch]:
        """Return what the last searches found, the newest first."""
        with self._lock:
            return list(reversed(self._searches))
