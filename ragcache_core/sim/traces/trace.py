"""Traces: arrivals of requests and their retrieved documents, in columns and as JSON lines.

One request a line; ``.gz`` at the end of a file's name packs it::

    {"t": 12.5, "docs": ["d17", "d3"], "doc_tokens": [1904, 655], "question_tokens": 31, "output_tokens": 1}

``t`` is seconds since the trace began. Other fields are passed over. A request may retrieve nothing, and a document
may have another length than the last time: it was split again. Turns of one conversation have its number, as
``"conversation": 7``: the prompt of each begins with the documents, questions and answers of earlier turns.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ragcache_core.errors import ConfigError, TraceError
from ragcache_core.private_files import replacing

MAX_TOKENS = 2**31 - 1
MAX_ARRIVAL_S = sys.float_info.max
LEAST_TOKENS = {"doc_tokens": 1, "question_tokens": 0, "output_tokens": 1}
EXAMPLE = '{"t": 0.5, "docs": ["d7"], "doc_tokens": [655], "question_tokens": 31, "output_tokens": 1}'
_BATCH = 8_192


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request: its arrival, its documents (best first), and all lengths in tokens.

    One of a ``conversation`` (its number; None: of none) begins with ``history_tokens`` of all its earlier turns:
    documents, questions and answers, which its line does not repeat.
    """

    arrival_s: float
    doc_ids: tuple[str, ...]
    doc_tokens: tuple[int, ...]
    question_tokens: int
    output_tokens: int
    conversation: int | None = None
    history_tokens: int = 0

    def in_order(self, order: Sequence[int]) -> TracedRequest:
        """Return the request with its documents in another order, given as indices."""
        if all(i == index for i, index in enumerate(order)):
            return self
        return replace(
            self,
            doc_ids=tuple(self.doc_ids[index] for index in order),
            doc_tokens=tuple(self.doc_tokens[index] for index in order),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of arrival, in read-only columns.

    Request ``i`` retrieves ``docs[first[i] : first[i + 1]]``, numbers of documents by their first appearance, whose
    ids are in ``doc_ids``. Shapes: arrival_s [n] float64, first [n + 1] int64, docs and doc_tokens [all retrieved]
    int32, question_tokens and output_tokens [n] int32, conversation [n] int32 (-1: of none), history_tokens [n] int64:
    of a conversation's earlier turns. Two traces are equal if their requests are.
    """

    arrival_s: npt.NDArray[np.float64]
    first: npt.NDArray[np.int64]
    docs: npt.NDArray[np.int32]
    doc_tokens: npt.NDArray[np.int32]
    question_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    doc_ids: Sequence[str]
    conversation: npt.NDArray[np.int32]
    history_tokens: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "history_tokens", self._history_tokens())
        for column in self._columns():
            column.flags.writeable = False

    @classmethod
    def from_requests(cls, requests: Iterable[TracedRequest]) -> Trace:
        """Return the trace of ``requests``.

        Raises:
            ConfigError: they are not sorted, or one has lengths that cannot be; the message names it by its number.
        """
        columns = _Columns()
        for number, request in enumerate(requests):
            try:
                columns.add(request)
            except ValueError as error:
                raise ConfigError(f"request {number} of the trace: {error}") from error
        return columns.trace()

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __iter__(self) -> Iterator[TracedRequest]:
        for start in range(0, len(self), _BATCH):
            yield from self._batch(start, min(start + _BATCH, len(self)))

    def __getitem__(self, number: int) -> TracedRequest:
        place = range(len(self))[number]  # an IndexError where there is none
        return next(self._batch(place, place + 1))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        pairs = zip(self._columns(), other._columns(), strict=True)
        return all(np.array_equal(a, b) for a, b in pairs) and list(self.doc_ids) == list(other.doc_ids)

    __hash__ = None  # type: ignore[assignment]

    @property
    def requests_per_s(self) -> float:
        """Return the mean rate since time 0; infinite if all arrive at once."""
        return len(self) / last_s if len(self) and (last_s := float(self.arrival_s[-1])) else math.inf

    def head(self, num_requests: int) -> Trace:
        """Return the first ``num_requests`` requests, or all if there are fewer."""
        count = min(num_requests, len(self))
        num_docs = int(self.first[count])
        docs = self.docs[:num_docs]
        num_ids = int(docs.max()) + 1 if num_docs else 0
        return Trace(
            self.arrival_s[:count], self.first[: count + 1], docs, self.doc_tokens[:num_docs],
            self.question_tokens[:count], self.output_tokens[:count], self.doc_ids[:num_ids], self.conversation[:count],
        )  # fmt: skip

    def with_rate(self, requests_per_s: float) -> Trace:
        """Return the same requests with times scaled to this mean rate per second.

        Raises:
            ConfigError: the rate is not positive, or all requests arrive at once.
        """
        if not 0 < requests_per_s < math.inf:
            raise ConfigError(f"{requests_per_s:g} requests a second: the rate must be above 0 and finite")
        if not math.isfinite(self.requests_per_s):
            raise ConfigError(f"all {len(self)} requests arrive at once: their times cannot be stretched")
        return replace(self, arrival_s=self.arrival_s * (self.requests_per_s / requests_per_s))

    def _columns(self) -> tuple[Any, ...]:
        return (
            self.arrival_s, self.first, self.docs, self.doc_tokens, self.question_tokens, self.output_tokens,
            self.conversation, self.history_tokens,
        )  # fmt: skip

    def document_tokens(self) -> npt.NDArray[np.int64]:
        """Return the document tokens of each request: [n]."""
        ends = np.concatenate([[0], np.cumsum(self.doc_tokens, dtype=np.int64)])
        return np.diff(ends[self.first])

    def _history_tokens(self) -> npt.NDArray[np.int64]:
        before = np.zeros(len(self), np.int64)
        turns = np.flatnonzero(self.conversation >= 0)
        turns = turns[np.argsort(self.conversation[turns], kind="stable")]
        added = (self.document_tokens() + self.question_tokens + self.output_tokens)[turns]
        sums = np.cumsum(added) - added
        begins = np.diff(self.conversation[turns], prepend=-1) != 0
        before[turns] = sums - np.maximum.accumulate(np.where(begins, sums, 0))
        return before

    def _batch(self, start: int, end: int) -> Iterator[TracedRequest]:
        first = self.first[start : end + 1].tolist()
        offset = first[0]
        ids = [self.doc_ids[number] for number in self.docs[offset : first[-1]].tolist()]
        tokens = self.doc_tokens[offset : first[-1]].tolist()
        columns = (self.arrival_s, self.question_tokens, self.output_tokens, self.conversation, self.history_tokens)
        rows = zip(*(column[start:end].tolist() for column in columns), strict=True)
        for i, (arrival_s, question, output, conversation, history) in enumerate(rows):
            span = slice(first[i] - offset, first[i + 1] - offset)
            yield TracedRequest(
                arrival_s, tuple(ids[span]), tuple(tokens[span]), question, output,
                None if conversation < 0 else conversation, history,
            )  # fmt: skip


def read_trace(path: Path | str) -> Trace:
    """Return the trace in a file of JSON lines.

    Raises:
        TraceError: it cannot be read, is empty, or a line is broken; the message begins with ``FILE:LINE``.
    """
    path = Path(path)
    columns = _Columns()
    num_lines = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                num_lines += 1
                if not line.isspace():
                    columns.add(parse_request(line))
    except ValueError as error:
        raise TraceError(str(error), path, num_lines) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        cure = "make one with 'ragcache trace make'" if isinstance(error, FileNotFoundError) else "is it a whole trace?"
        number = num_lines + 1 if num_lines else None
        raise TraceError(f"the trace cannot be read ({reason}): {cure}", path, number) from error
    if not len(columns):
        raise TraceError("the trace is empty: it must hold one request a line, as " + EXAMPLE, path)
    return columns.trace()


def write_trace(trace: Trace, path: Path | str, *, progress: Callable[[int], object] | None = None) -> None:
    """Write a file for :func:`read_trace`. Atomic: an exception leaves the former file.

    The same trace gives the same bytes. ``progress`` receives the number of requests written since its last call.

    Raises:
        TraceError: the disk is full, or the folder cannot be written to.
    """
    path = Path(path)
    try:
        with replacing(path) as file:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", compresslevel=5, fileobj=file, mtime=0) as packed:
                    write_lines(trace, packed, progress=progress)
            else:
                write_lines(trace, file, progress=progress)
    except OSError as error:
        raise TraceError(
            f"the trace cannot be written ({error.strerror}): is there a folder with room?", path
        ) from error


def write_lines(
    trace: Trace, file: IO[bytes] | gzip.GzipFile, *, progress: Callable[[int], object] | None = None
) -> None:
    """Write the JSON lines of a trace to an open file."""
    quoted = [json.dumps(doc_id) for doc_id in trace.doc_ids]
    for start in range(0, len(trace), _BATCH):
        end = min(start + _BATCH, len(trace))
        first = trace.first[start : end + 1].tolist()
        docs = [quoted[number] for number in trace.docs[first[0] : first[-1]].tolist()]
        tokens = list(map(str, trace.doc_tokens[first[0] : first[-1]].tolist()))
        columns = (trace.arrival_s, trace.question_tokens, trace.output_tokens, trace.conversation)
        lines = []
        rows = zip(*(column[start:end].tolist() for column in columns), strict=True)
        for i, (arrival_s, question, output, conversation) in enumerate(rows):
            span = slice(first[i] - first[0], first[i + 1] - first[0])
            turn_of = "" if conversation < 0 else f', "conversation": {conversation}'
            lines.append(
                f'{{"t": {arrival_s!r}, "docs": [{", ".join(docs[span])}], "doc_tokens": [{", ".join(tokens[span])}], '
                f'"question_tokens": {question}, "output_tokens": {output}{turn_of}}}\n'
            )
        file.write("".join(lines).encode("ascii"))
        if progress is not None:
            progress(end - start)


class _Columns:
    """A growing trace. An invalid request raises ValueError and adds nothing."""

    def __init__(self) -> None:
        self._arrival_s, self._first = array("d"), array("q", [0])
        self._docs, self._doc_tokens = array("i"), array("i")
        self._question_tokens, self._output_tokens = array("i"), array("i")
        self._conversation = array("i")
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._arrival_s)

    def trace(self) -> Trace:
        """Return the trace; nothing can be added afterwards."""
        docs, doc_tokens, question_tokens, output_tokens, conversation = (
            np.frombuffer(column, np.int32)
            for column in (
                self._docs, self._doc_tokens, self._question_tokens, self._output_tokens, self._conversation
            )
        )  # fmt: skip
        arrival_s, first = np.frombuffer(self._arrival_s, np.float64), np.frombuffer(self._first, np.int64)
        ids = tuple(self._numbers)
        return Trace(arrival_s, first, docs, doc_tokens, question_tokens, output_tokens, ids, conversation)

    def add(self, request: TracedRequest) -> None:
        check_request(request, self._arrival_s[-1] if self._arrival_s else 0.0)
        numbers = self._numbers
        self._arrival_s.append(request.arrival_s)
        self._first.append(self._first[-1] + len(request.doc_ids))
        self._docs.extend(numbers.setdefault(doc_id, len(numbers)) for doc_id in request.doc_ids)
        self._doc_tokens.extend(request.doc_tokens)
        self._question_tokens.append(request.question_tokens)
        self._output_tokens.append(request.output_tokens)
        self._conversation.append(-1 if request.conversation is None else request.conversation)


def parse_request(line: bytes) -> TracedRequest:
    """Return the fields of a line, without checks of numbers and ids.

    Raises:
        ValueError: it is no JSON object with the fields of a request.
    """
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1}): write the trace as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON ({error.msg} at column {error.colno}): a request is one line as {EXAMPLE}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise ValueError(f"not JSON that can be read ({error}): a request is one line as {EXAMPLE}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{_shown(row)} is not a request: it must be an object as {EXAMPLE}")  # noqa: TRY004
    for name in ("t", "docs", "doc_tokens", "question_tokens", "output_tokens"):
        if name not in row:
            raise ValueError(f"{name!r} is missing: a request is one line as {EXAMPLE}")
    for name in ("docs", "doc_tokens"):
        if not isinstance(row[name], list):
            raise ValueError(f"{name!r} is {_shown(row[name])}: it must be a list, one entry a document")  # noqa: TRY004
    return TracedRequest(
        row["t"], tuple(row["docs"]), tuple(row["doc_tokens"]), row["question_tokens"], row["output_tokens"],
        row.get("conversation"),
    )  # fmt: skip


def check_request(request: TracedRequest, last_s: float) -> None:
    """Reject an invalid request, or one that arrives before ``last_s``.

    Raises:
        ValueError: with the field, its value and what it must be.
    """
    arrival_s = request.arrival_s
    if type(arrival_s) not in (int, float) or not 0 <= arrival_s <= MAX_ARRIVAL_S:
        raise ValueError(f"'t' is {_shown(arrival_s)}: it must be seconds, 0 or more, since the trace began")
    if arrival_s < last_s:
        raise ValueError(f"'t' is {arrival_s!r} after {last_s!r}: requests must be sorted by their time of arrival")
    for doc_id in request.doc_ids:
        if not isinstance(doc_id, str) or not doc_id:
            raise ValueError(f"a document of 'docs' is {_shown(doc_id)}: ids must be strings that are not empty")
    if len(request.doc_ids) != len(request.doc_tokens):
        counts = f"{len(request.doc_tokens)} lengths for {len(request.doc_ids)} documents"
        raise ValueError(f"{counts}: 'doc_tokens' must hold one for each of 'docs'")
    if request.conversation is not None and not are_lengths([request.conversation], 0):
        raise ValueError(
            f"'conversation' is {_shown(request.conversation)}: it must be a whole number from 0 to {MAX_TOKENS}, the "
            "same for all turns of one conversation, or left out"
        )
    lengths = [("doc_tokens", tokens) for tokens in request.doc_tokens]
    lengths += [("question_tokens", request.question_tokens), ("output_tokens", request.output_tokens)]
    for name, tokens in lengths:
        if not are_lengths([tokens], LEAST_TOKENS[name]):
            raise ValueError(
                f"{name!r} holds {_shown(tokens)}: a number of tokens must be whole, from "
                f"{LEAST_TOKENS[name]} to {MAX_TOKENS}"
            )


def are_lengths(values: Sequence[object], least: int) -> bool:
    """Return whether all values are whole numbers of at least ``least``."""
    if not values:
        return True
    if set(map(type, values)) != {int}:
        return False
    return least <= min(values) and max(values) <= MAX_TOKENS  # type: ignore[type-var, operator]


def _shown(value: object) -> str:
    try:
        return f"{json.dumps(value):.60}"
    except (TypeError, ValueError, RecursionError):
        return f"{value!r:.60}" if not isinstance(value, int) else "too large"
