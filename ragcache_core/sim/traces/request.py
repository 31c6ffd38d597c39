"""A request of a trace, and what its line in a file must say."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_TOKENS = 2**31 - 1
MAX_ARRIVAL_S = sys.float_info.max
LEAST_TOKENS = {"doc_tokens": 1, "question_tokens": 0, "output_tokens": 1}
EXAMPLE = '{"t": 0.5, "docs": ["d7"], "doc_tokens": [655], "question_tokens": 31, "output_tokens": 1}'


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request: when it arrives, what it retrieves, best first, and how long everything is in tokens.

    One of a ``conversation`` (its number; None: of none) begins with ``history_tokens`` of all its earlier turns:
    documents, questions and answers, which are not said again.
    """

    arrival_s: float
    doc_ids: tuple[str, ...]
    doc_tokens: tuple[int, ...]
    question_tokens: int
    output_tokens: int
    conversation: int | None = None
    history_tokens: int = 0

    def in_order(self, order: Sequence[int]) -> TracedRequest:
        """Return the same request with its documents in another order, given as indices into them."""
        if all(i == index for i, index in enumerate(order)):
            return self
        return replace(
            self,
            doc_ids=tuple(self.doc_ids[index] for index in order),
            doc_tokens=tuple(self.doc_tokens[index] for index in order),
        )


def parse_request(line: bytes) -> TracedRequest:
    """Return what a line says, its numbers and ids unchecked.

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
    """Refuse a request that cannot be, or arrives before ``last_s``.

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
    """Return whether all values are whole numbers of tokens, ``least`` or more."""
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
