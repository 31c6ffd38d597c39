"""The format of RAGCache's metadata inside vLLM's ``kv_transfer_params``; both sides of the connection use it.

::

    kv_transfer_params = {
        "prompt_token_ids": [1, 17, ...],          # vLLM's own key: the prompt, tokenised already
        "ragcache": {
            "version": 1,
            "documents": [{"id": "faq-7", "start": 21, "end": 407}, ...],  # and a "label", where the id is not readable
                                                   # or with a "text" for start and end: the server finds its tokens,
                                                   # after "skip" other occurrences of the text
            "speculation": "3f2a...",              # only if the answer is not asked for yet: see confirm
            "reordered": true,                     # only if the documents stand in another order than retrieved
            "chunk_reuse": {"max_recompute": 0.3}, # or true, false, "store"; only if it is not to be as the engine does
            "prefill": true,                       # only without an answer: a request with this prefix follows
            "expected_uses": 12,                   # only with "prefill": of its documents, in the next 1,000 requests
            "retain_s": 30.0,                      # or any other of the hints in hints.py
        },
    }

Documents are in prompt order and do not overlap; tokens before the first one are the static prefix, tokens after
the last one the question. The engine trusts none of it for correctness: metadata that contradicts the prompt is
ignored, and identity is always the hash of the tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ragcache_core.config import ChunkReuseRequest
from ragcache_core.errors import ConfigError, quoted
from ragcache_core.hints import HINTS, MAX_ID_CHARS, NO_HINTS, CacheHints, read_hints
from ragcache_core.types import MAX_LABEL_CHARS, PromptSegment, SegmentKind

WIRE_VERSION = 1
KEY = "ragcache"
HUNG = "EngineHungError"
"""Error type of ``/health``, with status 503, for a hung engine."""
DEFAULTS_HEADER = "x-ragcache-defaults"
"""With which the server says, in answers to requests for completions, what it adds to those, as JSON: defaults of
sampling on which it depends where an answer may be cut, the ``most_tokens`` of any answer, and whether those to chats
are read from the model's tokens by a format that has no second beginning (``is_parsed``)."""
SESSION_HEADER = "x-session-id"
"""Equal for requests with the same first document, or the same beginning: vLLM's router and others hash it."""
SPECULATION_HEADER = "x-ragcache-speculation"
"""Id of a speculation, on its request, its confirmation and queries about it."""
SPECULATION_ROUTE = re.compile(r"/v1/ragcache/speculations/([^/]+)")
"""Route of a speculation by id: confirm, cancel and query it."""
REQUEST_ROUTE = re.compile(r"/v1/ragcache/requests/(.+)")
"""Route of the figures of a request that was answered, with the id of its response."""
REPLICA_HEADER = "x-ragcache-replica"
"""How a server calls itself, on its answers; whose figures are asked for, where one is asked for a request's."""
STATS_HEADER = "x-ragcache-stats"
"""With ``1`` a response to a completion has a ``ragcache`` object with the request's cached tokens by tier."""
MAX_DOCUMENTS = 4096
MAX_DOC_ID_CHARS = MAX_ID_CHARS
MAX_SPECULATION_CHARS = 64
MAX_EXPECTED_USES = 1000
"""The number of next requests in which uses are expected; each request is at most one use."""
REGISTER = "register"
"""In a request's metadata: documents to register before its prompt is looked up."""
UNKNOWN_ACTIONS = "unknown_actions"
"""In a request's metadata: how many actions of its ``kv_hints`` the server did not know."""
_NAMES = (
    "version", "documents", "speculation", "reordered", "chunk_reuse", "prefill", "expected_uses", REGISTER,
    UNKNOWN_ACTIONS, *HINTS,
)  # fmt: skip
ChunkReuseOption = ChunkReuseRequest | Mapping[str, Any] | Literal["store"] | bool | None
"""Chunk-reuse option of a request: settings, ``True`` or ``False``; the engine's by default. With ``store`` the answer
is exact, and its documents are stored for chunk reuse."""
ChunkReuseWish = ChunkReuseRequest | Literal[False, "store"] | None
"""The same, read; ``None`` is as the engine does."""
_MAX_DEPTH = 8
_SPECULATION = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_SPECULATION_CHARS}}}")  # it is part of a path


def max_body_bytes(max_model_len: int, *, takes_files: bool) -> int:
    """Return the maximum bytes of a request's body: 16 MiB, and 64 per token of the context window.

    A token is some 5 bytes of text, or 12 where JSON escapes it, and 7 as a number; 16 MiB are a batch of prompts, or
    what is said of documents. Images and sounds, which stand in the body as text, may take 256 MiB more.
    """
    return (16 << 20) + 64 * max_model_len + (256 << 20 if takes_files else 0)


@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """The metadata of a request.

    ``segments`` tile its prompt. ``speculation`` names it while its answer is not asked for yet: it must not delay
    a request that a client waits for. ``is_reordered`` says that its documents do not stand as they were retrieved.
    ``chunk_reuse`` is ``None`` where it is left to the engine. One that ``is_prefill`` is no request in itself: the one
    that begins with the same tokens follows it, and counts. ``expected_uses`` are those that a prefill ahead of a
    forecast promises of its documents, in the next :data:`MAX_EXPECTED_USES` requests; 0 of all others.
    ``num_unknown_actions`` of its ``kv_hints`` were not known.
    """

    segments: tuple[PromptSegment, ...]
    speculation: str | None = None
    is_reordered: bool = False
    chunk_reuse: ChunkReuseWish = None
    is_prefill: bool = False
    expected_uses: int = 0
    hints: CacheHints = NO_HINTS
    num_unknown_actions: int = 0


def encode_kv_transfer_params(
    segments: Iterable[PromptSegment],
    prompt_token_ids: Sequence[int] | None = None,
    *,
    speculation: str | None = None,
    is_reordered: bool = False,
    chunk_reuse: ChunkReuseOption = None,
    is_prefill: bool = False,
    expected_uses: int = 0,
) -> dict[str, object]:
    """Return the ``kv_transfer_params`` of a request, which list the first 4,096 of its documents.

    ``prompt_token_ids`` is for the chat endpoint only, where the messages would be tokenised again; the completions
    endpoint takes the ids as its prompt.

    Raises:
        ConfigError: ``chunk_reuse`` is none, or ``expected_uses`` are out of bounds.
    """
    params: dict[str, object] = {} if prompt_token_ids is None else {"prompt_token_ids": list(prompt_token_ids)}
    documents: list[dict[str, object]] = [
        {
            "id": s.doc_id,
            "start": s.start,
            "end": s.end if s.text_end is None else s.text_end,
            **({} if s.label is None else {"label": s.label}),
        }
        for s in segments
        if s.kind is SegmentKind.DOCUMENT
    ]
    params[KEY] = {
        **_metadata(documents, is_reordered, chunk_reuse),
        **({} if speculation is None else {"speculation": speculation}),
        **({"prefill": True} if is_prefill else {}),
        **({"expected_uses": check_expected_uses(expected_uses)} if expected_uses else {}),
    }
    return params


def encode_shown_documents(
    shown: Iterable[tuple[str, str, int, str | None]],
    *,
    is_reordered: bool = False,
    chunk_reuse: ChunkReuseOption = None,
) -> dict[str, object]:
    """Return the ``kv_transfer_params`` of a request whose documents the server finds in the prompt.

    Args:
        shown: id, text as shown, number of other occurrences before and label of each document, in prompt order.
        is_reordered: they are in another order than they were retrieved in.
        chunk_reuse: how documents are reused, if it is not to be as the engine does.

    Raises:
        ConfigError: ``chunk_reuse`` is none, or an id cannot be sent.
    """
    documents: list[dict[str, object]] = [
        {
            "id": doc_id,
            "text": text,
            **({"skip": num_others} if num_others else {}),
            **({} if label is None else {"label": label}),
        }
        for doc_id, text, num_others, label in shown
    ]
    return {KEY: _metadata(documents, is_reordered, chunk_reuse)}


def encode_hints(hints: CacheHints) -> dict[str, object]:
    """Return the fields of a request's body that carry its hints; none without hints."""
    given = hints.to_dict()
    return {"kv_transfer_params": {KEY: {"version": WIRE_VERSION, **given}}} if given else {}


def _metadata(
    documents: Sequence[Mapping[str, object]], is_reordered: bool, chunk_reuse: ChunkReuseOption
) -> dict[str, object]:
    listed = list(documents[:MAX_DOCUMENTS])
    check_sendable([document["id"] for document in listed], "the ids of documents")
    return {
        "version": WIRE_VERSION,
        "documents": listed,
        **({"reordered": True} if is_reordered else {}),
        **_encoded(read_chunk_reuse(chunk_reuse)),
    }


def decode_kv_transfer_params(params: Mapping[str, object], num_prompt_tokens: int) -> RequestMetadata:
    """Return the metadata of a request with a prompt of ``num_prompt_tokens`` tokens.

    One without our metadata is one QUESTION segment. Documents by text, which no server has found, have no segment.

    Raises:
        ConfigError: the metadata contradicts itself or the prompt; the message says where.
    """
    try:
        return _decode(params.get(KEY), num_prompt_tokens)
    except RecursionError:  # to show a value takes as many calls as it is deep
        raise ConfigError("ragcache metadata is nested too deeply: send version, documents and flat options") from None


def _decode(raw: object, num_prompt_tokens: int) -> RequestMetadata:
    if raw is None:
        return RequestMetadata(tile([], num_prompt_tokens))
    if not isinstance(raw, Mapping) or raw.get("version", WIRE_VERSION) != WIRE_VERSION:
        version = raw.get("version") if isinstance(raw, Mapping) else raw
        raise ConfigError(
            f"ragcache metadata of version {version!r:.80}, this engine reads {WIRE_VERSION}: upgrade both"
        )
    documents = raw.get("documents", [])
    if not isinstance(documents, list) or len(documents) > MAX_DOCUMENTS:
        raise ConfigError(f"ragcache metadata must list at most {MAX_DOCUMENTS} documents, got {_size(documents)}")
    placed = [(i, d) for i, d in enumerate(documents) if not (isinstance(d, dict) and "text" in d and "start" not in d)]
    return RequestMetadata(
        tile([_document(d, i) for i, d in placed], num_prompt_tokens),
        _speculation(raw.get("speculation")),
        _flag(raw, "reordered"),
        read_chunk_reuse(raw.get("chunk_reuse")),
        _flag(raw, "prefill"),
        read_expected_uses(raw),
        read_hints(raw),
        _num_unknown_actions(raw.get(UNKNOWN_ACTIONS)),
    )


def check_metadata(metadata: Mapping[str, object]) -> None:
    """Refuse what a request's metadata say of KV that other requests share, and names that there are not.

    Raises:
        ConfigError: with the name, the value and the limit.
    """
    if unknown := [name for name in metadata if name not in _NAMES]:
        names = ", ".join(_NAMES)
        raise ConfigError(f"the ragcache metadata have {quoted(unknown[0])}, which there is not: send one of {names}")
    read_expected_uses(metadata)
    read_hints(metadata)


def read_chunk_reuse(option: object) -> ChunkReuseWish:
    """Return a request's chunk-reuse option: settings, ``False``, ``store``, or ``None``. ``True`` is the engine's.

    Raises:
        ConfigError: it is something else, or holds a setting that does not exist or cannot work.
    """
    if option is None or option is False or isinstance(option, ChunkReuseRequest):
        return option
    if option == "store":
        return "store"
    if option is True:
        return ChunkReuseRequest()
    names = ChunkReuseRequest.model_fields
    if not isinstance(option, Mapping) or not set(option).issubset(names):
        raise ConfigError(
            f"chunk_reuse is {quoted(option, 120)}; it must be true, false, 'store', or a mapping of {', '.join(names)}"
        )
    return ChunkReuseRequest(**option)


def read_expected_uses(metadata: Mapping[str, object]) -> int:
    """Return the expected uses of a prefill's documents from its metadata; 0 if missing.

    Raises:
        ConfigError: they are out of bounds, or the request is no prefill, which is a use itself.
    """
    if "expected_uses" not in metadata:
        return 0
    if metadata.get("prefill") is not True:
        raise ConfigError(
            f"expected_uses is {quoted(metadata['expected_uses'], 40)} of a request with an answer: leave it out, "
            "or set prefill: true for a request without one"
        )
    return check_expected_uses(metadata["expected_uses"])


def check_expected_uses(raw: object) -> int:
    """Return a checked number of expected uses.

    Raises:
        ConfigError: it is none, or more than there can be.
    """
    if isinstance(raw, int) and not isinstance(raw, bool) and 1 <= raw <= MAX_EXPECTED_USES:
        return raw
    raise ConfigError(
        f"expected_uses is {quoted(raw, 40)}; it must be a whole number from 1 to {MAX_EXPECTED_USES}: the uses that "
        f"are expected in the next {MAX_EXPECTED_USES} requests"
    )


def decode_speculation(params: Mapping[str, object]) -> str | None:
    """Return the speculation of a request, regardless of its other metadata; ``None`` without one."""
    raw = params.get(KEY)
    try:
        return _speculation(raw.get("speculation")) if isinstance(raw, Mapping) else None
    except (ConfigError, RecursionError):
        return None


def check_sendable(value: object, name: str) -> None:
    """Reject values that a request cannot carry: lone surrogates, and numbers beyond 64 bits or not finite.

    ``name`` says what of a request it is. JSON's own types are looked at, all others pass.

    Raises:
        ConfigError: with the place, the value, the limit and the cure.
    """
    waiting: list[tuple[object, str]] = [(value, name)]
    while waiting:
        value, place = waiting.pop()
        if isinstance(value, str):
            check_text(value, place)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{place} is {value}; a number must be finite: send another one, or leave it out")
        elif isinstance(value, int) and not _in_64_bits(value):
            raise ConfigError(
                f"{place} is {quoted(value, 30)}; a whole number must lie within 64 bits, -2^63 to 2^64 - 1: send a "
                "smaller one"
            )
        elif isinstance(value, Mapping):
            waiting += [(key, f"a name in {place}") for key in value]
            waiting += [(inner, f"{place}.{key}") for key, inner in value.items()]
        elif isinstance(value, list | tuple) and not _are_whole_numbers(value):
            waiting += [(inner, f"{place}[{i}]") for i, inner in enumerate(value)]


def _are_whole_numbers(values: Sequence[Any]) -> bool:
    """Return whether all are integers of 64 bits, with one pass over a prompt's tokens."""
    return set(map(type, values)) == {int} and _in_64_bits(min(values)) and _in_64_bits(max(values))


def _in_64_bits(number: int) -> bool:
    return -(2**63) <= number < 2**64


def read_doc_ids(raw: object) -> list[str]:
    """Return the document ids in a body, each once.

    Raises:
        ConfigError: it is no list of ids, or one of too many.
    """
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_DOCUMENTS:
        raise ConfigError(f"ids is {_size(raw)}; send a list of 1 to {MAX_DOCUMENTS} ids of documents")
    for index, doc_id in enumerate(raw):
        if not isinstance(doc_id, str) or not 0 < len(doc_id) <= MAX_DOC_ID_CHARS or not _is_text(doc_id):
            raise ConfigError(
                f"ids[{index}] is {quoted(doc_id)}; an id has 1 to {MAX_DOC_ID_CHARS} characters of Unicode text: "
                "send those with which the documents were asked about"
            )
    return list(dict.fromkeys(raw))


def check_text(text: str, name: str) -> None:
    """Reject text with lone surrogates, which Unicode cannot encode.

    Raises:
        ConfigError: with the place, the value and the cure.
    """
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{ascii(name)[1:-1]} holds {text[error.start]!a} at character {error.start + 1} of {len(text)}, half of a "
            "surrogate pair, which is no Unicode text: read the source with its own encoding, or remove it with "
            "text.encode('utf-8', 'replace').decode()"
        ) from error


def check_depth(raw: object, name: str) -> None:
    """Reject metadata nested deeper than RAGCache's, which could not be pickled.

    Raises:
        ConfigError: it is.
    """
    level = [raw]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, (list, dict))
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise ConfigError(f"{name} is nested more than {_MAX_DEPTH} deep: send it flat")


def tile(documents: Sequence[PromptSegment], num_prompt_tokens: int) -> tuple[PromptSegment, ...]:
    """Return segments of a whole prompt without gaps: prefix, documents, question.

    Tokens between two documents (a separator) go to the earlier one, so a document keeps what follows it; its
    ``text_end`` is before them.

    Raises:
        ConfigError: documents overlap, are out of order, empty, or reach outside the prompt.
    """
    if not documents:
        return (PromptSegment(SegmentKind.QUESTION, 0, num_prompt_tokens),) if num_prompt_tokens else ()
    segments: list[PromptSegment] = []
    if documents[0].start > 0:
        segments.append(PromptSegment(SegmentKind.PREFIX, 0, documents[0].start))
    position = 0
    for i, document in enumerate(documents):
        if not position <= document.start < document.end <= num_prompt_tokens:
            raise ConfigError(
                f"document {document.doc_id!r:.80} spans tokens [{document.start}, {document.end}) but must lie in "
                f"[{position}, {num_prompt_tokens}) and not be empty: send spans in prompt order, without overlap"
            )
        position = document.end
        end = documents[i + 1].start if i + 1 < len(documents) else document.end
        segments.append(
            PromptSegment(
                document.kind,
                document.start,
                max(end, document.end),
                document.doc_id,
                text_end=document.end,
                label=document.label,
            )
        )
    if position < num_prompt_tokens:
        segments.append(PromptSegment(SegmentKind.QUESTION, position, num_prompt_tokens))
    return tuple(segments)


def _encoded(chunk_reuse: ChunkReuseWish) -> dict[str, object]:
    if chunk_reuse is None:
        return {}
    if chunk_reuse == "store":
        return {"chunk_reuse": "store"}
    given = chunk_reuse.model_dump(exclude_none=True) if chunk_reuse else False
    return {"chunk_reuse": True if given == {} else given}


def _document(raw: object, index: int) -> PromptSegment:
    match raw:
        case {"id": str(doc_id), "start": int(start), "end": int(end), **others} if (
            0 < len(doc_id) <= MAX_DOC_ID_CHARS
            and not isinstance(start, bool)
            and not isinstance(end, bool)
            and _is_text(doc_id)
        ):
            return PromptSegment(SegmentKind.DOCUMENT, start, end, doc_id, label=_label(others.get("label")))
    raise ConfigError(
        f"document {index} of the ragcache metadata is {raw!r:.120}; it must hold an id of 1 to {MAX_DOC_ID_CHARS} "
        "characters of Unicode text and integer start and end"
    )


def _label(label: object) -> str | None:
    """Return a document's readable name without unprintable characters."""
    return label if isinstance(label, str) and 0 < len(label) <= MAX_LABEL_CHARS and _is_text(label) else None


def _speculation(raw: object) -> str | None:
    if raw is None or (isinstance(raw, str) and _SPECULATION.fullmatch(raw)):
        return raw
    raise ConfigError(
        f"the speculation of the ragcache metadata is {raw!r:.120}; it must be 1 to {MAX_SPECULATION_CHARS} letters, "
        "digits, '-' or '_'"
    )


def _flag(metadata: Mapping[str, object], name: str) -> bool:
    raw = metadata.get(name, False)
    if isinstance(raw, bool):
        return raw
    raise ConfigError(f"{name!r} of the ragcache metadata is {raw!r:.120}; it must be true or false")


def _is_text(value: str) -> bool:
    try:
        return value.isascii() or bool(value.encode("utf-8"))
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _num_unknown_actions(raw: object) -> int:
    return min(max(raw, 0), MAX_DOCUMENTS) if isinstance(raw, int) else 0  # it is only counted


def _size(value: object) -> str:
    return str(len(value)) if isinstance(value, list) else type(value).__name__
