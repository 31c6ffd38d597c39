"""Convert a log of retrieved documents, or a published trace, to a trace; read the questions of a log."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ragcache_core.errors import ConfigError, TraceError
from ragcache_core.sim.traces.log_formats import (
    PUBLISHED_READERS,
    READERS,
    LogFormat,
    LoggedAnswer,
    PublishedFormat,
    Retrieval,
    format_of,
    is_table,
    lengths_beside,
    published_format_of,
    question_of,
)
from ragcache_core.sim.traces.trace import Trace, TracedRequest, are_lengths, check_request

ImportedFormat = LogFormat | PublishedFormat
_APART_S = 10.0  # between questions whose file has no times: none waits for another
_Reader = Callable[[Mapping[str, Any]], Iterator[Retrieval | LoggedAnswer]]
_READERS: Mapping[str, _Reader] = dict[str, _Reader]((*READERS.items(), *PUBLISHED_READERS.items()))


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Defaults for missing lengths: of documents by id or of all, of questions, of answers.

    A document whose text the log has is as long as that says, unless its length is known by its id.

    Speculative requests of a vLLM log are passed over, as most of them were superseded, unless they are to be counted.
    """

    lengths: Mapping[str, int] = field(default_factory=dict)
    mean_tokens: int | None = None
    question_tokens: int = 32
    output_tokens: int = 1
    counts_speculative: bool = False

    def __post_init__(self) -> None:
        limits = (("mean_tokens", 1), ("question_tokens", 0), ("output_tokens", 1))
        for name, least in limits:
            value = getattr(self, name)
            if value is not None and not are_lengths([value], least):
                raise ConfigError(f"{name} is {value!r}: it must be a whole number of tokens, {least} or more")


@dataclass(frozen=True, slots=True)
class ImportedLog:
    """The trace of a log, its format, and the number of its unrelated and speculative lines.

    ``num_estimated`` lengths of documents were taken from their texts, at 4 characters a token.
    """

    trace: Trace
    log_format: ImportedFormat
    num_passed_over: int
    num_speculative: int
    num_estimated: int = 0


def import_log(path: Path | str, assumed: Assumptions, log_format: ImportedFormat | None = None) -> ImportedLog:
    """Return the trace of a log (JSON lines or a published table), sorted by time from 0 on.

    Without ``log_format`` the first line that tells decides. A name that ends in ``.gz`` is unpacked.

    Raises:
        TraceError: it cannot be read, a line is broken or lacks a length, or none is about a retrieval.
    """
    path = Path(path)
    requests: list[TracedRequest] = []
    found: list[tuple[int, Retrieval]] = []
    answers: dict[str, list[LoggedAnswer]] = {}
    num_passed_over = num_speculative = num_estimated = 0
    for number, row in _rows(path):
        log_format = log_format or format_of(row) or published_format_of(row)
        is_about_another = True
        try:
            for retrieval in _READERS[log_format](row) if log_format else ():
                is_about_another = False
                if isinstance(retrieval, LoggedAnswer):
                    answers.setdefault(retrieval.trace_id or f"line {number}", []).append(retrieval)
                elif retrieval.is_speculative and not assumed.counts_speculative:
                    num_speculative += 1
                else:
                    found.append((number, retrieval))
        except ValueError as error:
            raise TraceError(str(error), path, number) from error
        num_passed_over += is_about_another
    if log_format == "ragpulse" and found:
        assumed = _with_lengths_beside(path, assumed)
    for number, retrieval in found:
        answered = _answered(retrieval, answers.get(retrieval.trace_id or f"line {number}", []))
        try:
            requests.append(_request(answered, assumed))
        except ValueError as error:
            raise TraceError(str(error), path, number) from error
        num_estimated += sum(
            given is None and estimate is not None and doc_id not in assumed.lengths
            for doc_id, given, estimate in zip(
                retrieval.doc_ids, retrieval.doc_tokens, retrieval.doc_estimates, strict=False
            )
        )
    if not requests or log_format is None:
        raise TraceError(
            f"no line of the log says what was retrieved ({num_passed_over} about something else, {num_speculative} "
            "speculative): name its --format, or write lines as {\"t\": 0.5, \"docs\": [\"d7\"]}", path
        )  # fmt: skip
    requests.sort(key=lambda request: request.arrival_s)  # a log is often written when a request ends
    start_s = requests[0].arrival_s
    trace = Trace.from_requests(replace(r, arrival_s=round(r.arrival_s - start_s, 6)) for r in requests)
    return ImportedLog(trace, log_format, num_passed_over, num_speculative, num_estimated)


def read_lengths(path: Path | str) -> dict[str, int]:
    """Return document lengths by id from a JSON file: ``{"d17": 1904}``.

    Raises:
        TraceError: it cannot be read, or a length is none.
    """
    path = Path(path)
    try:
        lengths = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TraceError(
            f'the lengths cannot be read ({reason}): they must be JSON as {{"d17": 1904}}', path
        ) from error
    if not isinstance(lengths, dict):
        raise TraceError(f'the lengths are a {type(lengths).__name__}: they must be JSON as {{"d17": 1904}}', path)
    for doc_id, tokens in lengths.items():
        if not are_lengths([tokens], 1):
            raise TraceError(
                f"the length of {doc_id!r:.60} is {tokens!r:.60}: it must be whole tokens, 1 or more", path
            )
    return lengths


def read_questions(path: Path | str) -> list[tuple[float, str]]:
    """Return each question of a log with its time in seconds since the first.

    A line that begins with ``{`` is a JSON object whose ``question`` (``query``, ``input``, ``prompt``) it is, and
    which may have a time; one without a question is passed over. Where one has no time, all are taken to be far apart.

    Raises:
        TraceError: the file cannot be read, is no UTF-8, or holds no question.
    """
    path = Path(path)
    found: list[tuple[float | None, str]] = []
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                found += _questions_of(line, path, number)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TraceError(f"the questions cannot be read ({reason})", path) from error
    if not found:
        raise TraceError('it holds no question: write one a line, or objects as {"question": "Where is Zor?"}', path)
    times = [time_s for time_s, _ in found if time_s is not None]
    if len(times) < len(found):
        return [(i * _APART_S, question) for i, (_, question) in enumerate(found)]
    start_s = min(times)
    return sorted((time_s - start_s, question) for (_, question), time_s in zip(found, times, strict=True))


def _with_lengths_beside(path: Path, assumed: Assumptions) -> Assumptions:
    """Return ``assumed`` with lengths from RAGPulse's files, if there are no others."""
    try:
        beside = lengths_beside(path)
    except FileNotFoundError:
        return assumed
    except (OSError, ValueError) as error:
        raise TraceError(f"the lengths of its passages cannot be read ({error})", path) from error
    return replace(assumed, lengths={**beside, **assumed.lengths})


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            columns: list[str] | None = None
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                if number == 1 and is_table(line):
                    columns = _values(line, path, number)
                    continue
                if columns is not None:
                    values = _values(line, path, number)
                    if len(values) != len(columns):
                        raise TraceError(
                            f"{len(values)} values for {len(columns)} columns: a table must have one of each in a line",
                            path, number,
                        )  # fmt: skip
                    yield number, dict(zip(columns, values, strict=True))
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise TraceError(f"not JSON ({error}): a log must hold one object a line", path, number) from error
                if not isinstance(row, dict):
                    raise TraceError(f"{row!r:.60} is no object: a log must hold one a line", path, number)
                yield number, row
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TraceError(f"the log cannot be read ({reason})", path, number or None) from error


def _values(line: bytes, path: Path, number: int) -> list[str]:
    try:
        (values,) = csv.reader([line.decode("utf-8-sig")])
    except (ValueError, csv.Error) as error:
        raise TraceError(f"no comma-separated values ({error})", path, number) from error
    return [value.strip() for value in values]


def _request(retrieval: Retrieval, assumed: Assumptions) -> TracedRequest:
    estimates = retrieval.doc_estimates or (None,) * len(retrieval.doc_ids)
    tokens = tuple(
        _length(doc_id, given, estimate, assumed)
        for doc_id, given, estimate in zip(retrieval.doc_ids, retrieval.doc_tokens, estimates, strict=True)
    )
    question, output = retrieval.question_tokens, retrieval.output_tokens
    if question is None and retrieval.prompt_tokens is not None:
        question = retrieval.prompt_tokens - sum(tokens)
        if question < 0:
            raise ValueError(f"its documents have {sum(tokens)} tokens, its whole prompt {retrieval.prompt_tokens}")
    request = TracedRequest(
        0.0,
        retrieval.doc_ids,
        tokens,
        assumed.question_tokens if question is None else question,
        assumed.output_tokens if output is None else max(output, 1),  # 0: it was aborted
    )
    check_request(request, 0.0)
    return replace(request, arrival_s=retrieval.time_s)


def _answered(retrieval: Retrieval, answers: Sequence[LoggedAnswer]) -> Retrieval:
    """Return a retrieval with the length of the next answer in its trace."""
    if retrieval.output_tokens is not None or not answers:
        return retrieval
    later = [answer for answer in answers if answer.time_s >= retrieval.time_s]
    answer = min(later, key=lambda one: one.time_s) if later else max(answers, key=lambda one: one.time_s)
    return replace(retrieval, output_tokens=answer.output_tokens)


def _length(doc_id: str, given: int | None, estimate: int | None, assumed: Assumptions) -> int:
    by_text = assumed.mean_tokens if estimate is None else estimate
    known = assumed.lengths.get(doc_id, by_text) if given is None else given
    if known is None:
        raise ValueError(f"the length of document {doc_id!r:.60} is unknown: give --lengths FILE, or --mean-tokens")
    return known


def _questions_of(line: bytes, path: Path, number: int) -> list[tuple[float | None, str]]:
    try:
        text = line.decode("utf-8-sig").strip()
        question = question_of(json.loads(text) if text.startswith("{") else {"question": text})
    except UnicodeDecodeError as error:
        raise TraceError(f"not UTF-8 (byte {error.start + 1}): write questions as UTF-8", path, number) from error
    except json.JSONDecodeError as error:
        raise TraceError(f"not JSON ({error}): write a text, or an object with one", path, number) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(str(error), path, number) from error
    return [] if question is None else [question]
