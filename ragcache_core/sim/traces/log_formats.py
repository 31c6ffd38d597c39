"""Parse a line of a retrieval log: of vLLM, LangChain, plain lists, or a published trace.

A line that is about something else yields nothing; one that is about a retrieval and broken is a ValueError.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from ragcache_core.types import SegmentKind
from ragcache_core.wire import KEY, decode_kv_transfer_params

LogFormat = Literal["vllm", "langchain", "plain"]
Row = Mapping[str, Any]

_TIMES = ("t", "timestamp", "@timestamp", "start_time", "arrival_time", "time", "ts", "created_at", "created")
_DOCS = ("docs", "doc_ids", "document_ids", "documents", "retrieved_ids", "ids")
_LENGTHS = ("doc_tokens", "document_tokens", "lengths")
_DOC_TOKENS = ("num_tokens", "token_count", "tokens")
_QUESTION_TOKENS = ("question_tokens", "query_tokens")
_OUTPUT_TOKENS = ("output_tokens", "completion_tokens", "num_output_tokens")
_IDS = ("id", "doc_id", "document_id", "chunk_id", "_id")
_PLACES = ("chunk", "chunk_index", "seq_num", "start_index", "page")
_TEXTS = ("text", "page_content", "content")
_QUESTIONS = ("question", "query", "input", "prompt")
_ANSWERS = ("answer", "output", "response", "completion")
_MAX_DEPTH = 8
_CHARS_PER_TOKEN = 4.0


@dataclass(frozen=True, slots=True)
class Retrieval:
    """The fields of one request in a log; ``None`` if missing. ``time_s`` has the log's own origin.

    ``doc_estimates`` are the documents' lengths by their texts, and so is the question's where nothing else tells it;
    ``trace_id`` is what it has in common with the run that answered. Where ``prompt_tokens`` are known and the
    question's are not, the question is what is no document.
    """

    time_s: float
    doc_ids: tuple[str, ...]
    doc_tokens: tuple[int | None, ...]
    question_tokens: int | None = None
    output_tokens: int | None = None
    is_speculative: bool = False
    doc_estimates: tuple[int | None, ...] = ()
    trace_id: str | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    """The length of a model's answer, and its runs. ``time_s`` is the time of its request."""

    time_s: float
    trace_id: str | None
    output_tokens: int


def estimated_tokens(text: object) -> int | None:
    """Return the estimated number of tokens of a text, at 4 characters each; ``None`` for another value."""
    return max(round(len(text) / _CHARS_PER_TOKEN), 1) if isinstance(text, str) and text else None


def format_of(row: Row) -> LogFormat | None:
    """Return the format of a line; ``None`` if unknown."""
    if _kv_transfer_params(row) is not None:
        return "vllm"
    if "run_type" in row or "child_runs" in row:
        return "langchain"
    return "plain" if _first(row, _DOCS) is not None else None


def vllm_retrievals(row: Row) -> Iterator[Retrieval]:
    """Yield the request of a line, from the ``kv_transfer_params`` with documents at any depth.

    Lengths are those of the documents' spans; the question is what follows the last, where the prompt's length is
    known from its token ids or the usage.
    """
    params = _kv_transfer_params(row)
    if params is None or params.get(KEY) is None:
        return
    usage = _search(row, "usage")
    usage = usage if isinstance(usage, Mapping) else {}
    prompt = params.get("prompt_token_ids") or _search(row, "prompt_token_ids") or _search(row, "prompt")
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        num_prompt_tokens: int | None = len(prompt)
    else:
        num_prompt_tokens = _count(usage, ("prompt_tokens",))
    metadata = decode_kv_transfer_params(params, num_prompt_tokens or _last_end(params[KEY]))
    documents = [segment for segment in metadata.segments if segment.kind is SegmentKind.DOCUMENT]
    if documents:
        yield Retrieval(
            _time_s(row),
            tuple(str(segment.doc_id) for segment in documents),
            tuple(segment.end - segment.start for segment in documents),
            None if num_prompt_tokens is None else num_prompt_tokens - documents[-1].end,
            _tokens(usage, _OUTPUT_TOKENS),
            metadata.speculation is not None,
        )


def langchain_retrievals(row: Row) -> Iterator[Retrieval | LoggedAnswer]:
    """Yield the retriever and model runs of a line: a run, or a tree of runs, as LangSmith exports it.

    A document is known by its id, else by its metadata (an id, or its source and the place in it), else by its text.
    """
    yield from _runs(row, row, 0)


def plain_retrievals(row: Row) -> Iterator[Retrieval]:
    """Yield the request of a line with a time and a list of documents: ids, or objects with an id."""
    documents = _first(row, _DOCS)
    if documents is None:
        return
    if not isinstance(documents, list):
        raise ValueError(f"the documents are {documents!r:.60}: they must be a list of ids")  # noqa: TRY004
    tokens = _first(row, _LENGTHS)
    if tokens is None:
        tokens = [_count(d, _DOC_TOKENS) if isinstance(d, Mapping) else None for d in documents]
    if not isinstance(tokens, list) or len(tokens) != len(documents):
        raise ValueError(f"the lengths are {tokens!r:.60}: they must be a list with one for each document")
    question, answer = _tokens(row, _QUESTION_TOKENS), _tokens(row, _OUTPUT_TOKENS)
    yield Retrieval(
        _time_s(row),
        tuple(_id_of(_first(d, _IDS) if isinstance(d, Mapping) else d) for d in documents),
        tuple(tokens),
        estimated_tokens(_first(row, _QUESTIONS)) if question is None else question,
        estimated_tokens(_first(row, _ANSWERS)) if answer is None else answer,
        doc_estimates=tuple(estimated_tokens(_first(d, _TEXTS)) if isinstance(d, Mapping) else None for d in documents),
    )


def question_of(row: Row) -> tuple[float | None, str] | None:
    """Return time and question of a line, each ``None`` if missing."""
    question = _first(row, _QUESTIONS)
    if not isinstance(question, str) or not question.strip():
        return None
    return None if _first(row, _TIMES) is None else _time_s(row), question.strip()


READERS: Mapping[LogFormat, Callable[[Row], Iterator[Retrieval | LoggedAnswer]]] = {
    "vllm": vllm_retrievals,
    "langchain": langchain_retrievals,
    "plain": plain_retrievals,
}


def _runs(run: Row, root: Row, depth: int) -> Iterator[Retrieval | LoggedAnswer]:
    trace_id = next(
        (str(found) for found in (run.get("trace_id"), root.get("trace_id"), root.get("id")) if found), None
    )
    if run.get("run_type") in ("llm", "chat_model") and (tokens := _answer_tokens(run)) is not None:
        yield LoggedAnswer(_time_s(run), trace_id, tokens)
    if run.get("run_type") == "retriever":
        outputs = run.get("outputs")
        if isinstance(outputs, Mapping):  # one that failed has none
            documents = outputs.get("documents", outputs.get("output"))
            if not isinstance(documents, list):
                raise ValueError(f"a retriever's outputs are {dict(outputs)!r:.40}: 'documents' must be a list")  # noqa: TRY004
            parts = [_langchain_document(document) for document in documents]
            own = _tokens(run, _OUTPUT_TOKENS)
            yield Retrieval(
                _time_s(run),
                tuple(doc_id for doc_id, _, _ in parts),
                tuple(tokens for _, tokens, _ in parts),
                estimated_tokens(_first(asked, _QUESTIONS))
                if isinstance(asked := run.get("inputs"), Mapping)
                else None,
                _tokens(root, _OUTPUT_TOKENS) if own is None else own,
                doc_estimates=tuple(estimate for _, _, estimate in parts),
                trace_id=trace_id,
            )
    children = run.get("child_runs")
    if isinstance(children, list) and depth < _MAX_DEPTH:
        for child in children:
            if isinstance(child, Mapping):
                yield from _runs(child, root, depth + 1)


def _answer_tokens(run: Row) -> int | None:
    """Return the length of a model's answer in tokens: counted, or estimated from its text."""
    outputs = run.get("outputs")
    for place in ("usage_metadata", "token_usage", "usage"):
        if isinstance(found := _search(_listed(outputs), place), Mapping):
            for name in ("output_tokens", "completion_tokens"):
                if (tokens := _count(found, (name,))) is not None:
                    return tokens
    counted = _count(run, _OUTPUT_TOKENS)
    return estimated_tokens(_search(_listed(outputs), "text")) if counted is None else counted


def _listed(value: object, depth: int = 0) -> object:
    """Return JSON with lists as mappings, to search for names."""
    if isinstance(value, list) and depth <= _MAX_DEPTH:
        return {str(i): _listed(inner, depth + 1) for i, inner in enumerate(value)}
    if isinstance(value, Mapping) and depth <= _MAX_DEPTH:
        return {key: _listed(inner, depth + 1) for key, inner in value.items()}
    return value


def _langchain_document(document: object) -> tuple[str, int | None, int | None]:
    if isinstance(document, Mapping) and "kwargs" in document:  # as langchain_core.load.dumpd writes it
        document = document["kwargs"]
    if not isinstance(document, Mapping):
        raise ValueError(f"a document of a retriever is {document!r:.60}: it must be an object")  # noqa: TRY004
    metadata = document.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    tokens = _count(metadata, _DOC_TOKENS)
    estimate = estimated_tokens(document.get("page_content"))
    known = _first(document, ("id",)) or _first(metadata, _IDS)
    if known is not None:
        return _id_of(known), tokens, estimate
    if (source := metadata.get("source")) is not None:
        place = _first(metadata, _PLACES)
        return (_id_of(source) if place is None else f"{source}#{place}"), tokens, estimate
    text = document.get("page_content")
    if not isinstance(text, str):
        raise ValueError(f"a document of a retriever has neither an id nor text: {dict(document)!r:.60}")  # noqa: TRY004
    return f"text-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:16]}", tokens, estimate


def _kv_transfer_params(row: Row) -> Row | None:
    params = _search(row, "kv_transfer_params")
    return params if isinstance(params, Mapping) else None


def _search(value: object, key: str, depth: int = 0) -> object:
    """Return the value of ``key`` at any depth of a line; a body logged as text is parsed."""
    if isinstance(value, str) and depth and value.startswith("{") and f'"{key}"' in value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, Mapping) or depth > _MAX_DEPTH:
        return None
    if value.get(key) is not None:
        return value[key]
    found = (_search(inner, key, depth + 1) for inner in value.values() if isinstance(inner, Mapping | str))
    return next((inner for inner in found if inner is not None), None)


def _last_end(raw: object) -> int:
    documents = raw.get("documents") if isinstance(raw, Mapping) else None
    ends = [d.get("end") for d in documents if isinstance(d, Mapping)] if isinstance(documents, list) else []
    return max((end for end in ends if isinstance(end, int)), default=0)


def _first(row: Row, names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _count(row: Row, names: tuple[str, ...]) -> int | None:
    value = _first(row, names)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _tokens(row: Row, names: tuple[str, ...]) -> int | None:
    """Return a line's token count of question or answer; ``None`` if invalid."""
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        return None
    value = row[name]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"{name!r} is {value!r:.60}: it must be a whole number of tokens, 0 or more")


def _id_of(value: object) -> str:
    if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
        return str(value)
    raise ValueError(f"the id of a document is {value!r:.60}: it must be text, not empty, or a whole number")


def _time_s(row: Row) -> float:
    value = _first(row, _TIMES)
    if value is None:
        raise ValueError(f"no time: a line must say when, under one of {', '.join(_TIMES)}")
    return seconds_of(value)


def seconds_of(value: object) -> float:
    """Return a time in seconds: relative, since 1970 in any unit, or a date.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, str):
        text = value
        try:
            value = float(text)
        except ValueError:
            try:
                moment = datetime.fromisoformat(text)
            except ValueError:
                raise ValueError(f"the time is {text!r:.60}: it must be seconds, or as 2026-01-31T12:00:00Z") from None
            value = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"the time is {value!r:.60}: it must be seconds, or as 2026-01-31T12:00:00Z")
    for unit in (1e17, 1e14, 1e11):  # nanoseconds, microseconds, milliseconds since 1970: seconds are far fewer
        if abs(value) >= unit:
            return value / (unit / 1e8)
    return float(value)


PublishedFormat = Literal["mooncake", "qwen", "ragpulse", "azure", "burst"]

MOONCAKE_BLOCK: Final = 512
QWEN_BLOCK: Final = 16
_TABLES: Final[Mapping[str, PublishedFormat]] = {"ContextTokens": "azure", "Request tokens": "burst"}
_RAGPULSE_LENGTHS: Final = {"2_passages.jsonl": "passage_id", "5_web_search.jsonl": "web_search_id"}


def published_format_of(row: Row) -> PublishedFormat | None:
    """Return the published trace of a line; ``None`` if unknown."""
    if isinstance(hashes := row.get("hash_ids"), Mapping) and "passages_ids" in hashes:
        return "ragpulse"
    if hashes is not None:
        return "qwen" if "parent_chat_id" in row else "mooncake"
    return next((name for column, name in _TABLES.items() if column in row), None)


def is_table(first_line: bytes) -> bool:
    """Return whether a file's first line is the header of a published CSV trace."""
    return not first_line.startswith(b"{") and any(column.encode() in first_line for column in _TABLES)


def lengths_beside(trace: Path) -> dict[str, int]:
    """Return the tokens of RAGPulse's passages and web pages by id, from the files beside its trace.

    Raises:
        ValueError: a line of them is broken. OSError: one cannot be read.
    """
    lengths = {}
    for name, id_column in _RAGPULSE_LENGTHS.items():
        for number, line in enumerate((trace.parent / name).read_bytes().splitlines(), 1):
            if line and not line.isspace():
                try:
                    row = json.loads(line)
                    lengths[str(_whole(row, id_column))] = _whole(row, "token_length", least=1)
                except (ValueError, TypeError, AttributeError) as error:
                    raise ValueError(f"line {number} of {name}: {error}") from error
    return lengths


def _mooncake(row: Row) -> Iterator[Retrieval]:
    """kvcache-ai/Mooncake, FAST 2025: milliseconds, blocks of 512 tokens."""
    yield _of_blocks(row, MOONCAKE_BLOCK, _whole(row, "timestamp") / 1000.0)


def _qwen(row: Row) -> Iterator[Retrieval]:
    """alibaba-edu/qwen-bailian-usagetraces-anon, USENIX ATC 2025: seconds, blocks of 16 tokens."""
    yield _of_blocks(row, QWEN_BLOCK, seconds_of(row.get("timestamp")))


def _of_blocks(row: Row, block_size: int, time_s: float) -> Retrieval:
    hashes, num_tokens = row.get("hash_ids"), _whole(row, "input_length")
    if not isinstance(hashes, list) or not all(isinstance(block, int) for block in hashes):
        raise ValueError(f"'hash_ids' is {hashes!r:.60}: it must be a list of whole numbers")
    num_full = num_tokens // block_size
    if len(hashes) not in (num_full, -(-num_tokens // block_size)):
        raise ValueError(
            f"'hash_ids' has {len(hashes)} blocks of {block_size} tokens for an 'input_length' of {num_tokens}: it "
            f"must have {-(-num_tokens // block_size)}"
        )
    blocks = tuple(map(str, hashes[:num_full]))
    return Retrieval(
        time_s, blocks, (block_size,) * num_full, num_tokens - num_full * block_size, _whole(row, "output_length")
    )


def _ragpulse(row: Row) -> Iterator[Retrieval]:
    """flashserve/RAGPulse, 2025: seconds, ids of passages and web pages; lengths are in other files."""
    hashes = row.get("hash_ids")
    found = [hashes.get(name) for name in ("passages_ids", "web_search")] if isinstance(hashes, Mapping) else [None]
    doc_ids: list[str] = []
    for part in found:
        if not isinstance(part, list) or not all(isinstance(one, int) for one in part):
            raise ValueError(f"'hash_ids' is {hashes!r:.60}: it must have lists of ids, passages_ids and web_search")
        doc_ids += map(str, part)
    yield Retrieval(
        seconds_of(row.get("timestamp")), tuple(doc_ids), (None,) * len(doc_ids),
        output_tokens=_whole(row, "output_length"), prompt_tokens=_whole(row, "input_length"),
    )  # fmt: skip


def _azure(row: Row) -> Iterator[Retrieval]:
    """Azure/AzurePublicDataset, LLM inference 2023 and 2024: date, prompt and answer tokens."""
    yield _of_lengths(row, "TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _burst(row: Row) -> Iterator[Retrieval]:
    """HPMLL/BurstGPT: seconds, prompt and answer tokens; a failed request has an empty answer."""
    yield _of_lengths(row, "Timestamp", "Request tokens", "Response tokens")


def _of_lengths(row: Row, time: str, prompt: str, answer: str) -> Retrieval:
    return Retrieval(seconds_of(row.get(time)), (), (), _whole(row, prompt), _whole(row, answer))


PUBLISHED_READERS: Mapping[PublishedFormat, Callable[[Row], Iterator[Retrieval]]] = {
    "mooncake": _mooncake,
    "qwen": _qwen,
    "ragpulse": _ragpulse,
    "azure": _azure,
    "burst": _burst,
}


def _whole(row: Row, name: str, least: int = 0) -> int:
    value = row.get(name)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise ValueError(f"{name!r} is {value!r:.60}: it must be a whole number, {least} or more")
