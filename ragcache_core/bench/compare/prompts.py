"""A trace's requests as prompts for an engine: exactly as many tokens as the trace says, the same for the same ids."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from ragcache_core.bench.token_client import TokenRequest
from ragcache_core.errors import ConfigError
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.types import DocId, Document, PromptSegment, SegmentKind
from ragcache_core.wire import encode_kv_transfer_params, tile

_FIRST_TOKEN = 256
"""Tokenizers have their special tokens below, or at the very end."""
_SPARED_AT_THE_END = 1_024


def check_scale(factor: float) -> None:
    """Refuse a factor that no lengths can be multiplied with.

    Raises:
        ConfigError: it is not above 0 and finite.
    """
    if not 0 < factor < math.inf:
        raise ConfigError(f"lengths times {factor:g}: the scale must be above 0 and finite")


def scaled(trace: Trace, factor: float) -> Trace:
    """Return the trace with every prompt's lengths times ``factor``: documents and questions, each a token at least.

    Raises:
        ConfigError: the factor is not above 0 and finite, or makes a length that cannot be.
    """
    check_scale(factor)
    if factor == 1:
        return trace
    return Trace.from_requests(
        replace(
            request,
            doc_tokens=tuple(max(1, round(tokens * factor)) for tokens in request.doc_tokens),
            question_tokens=max(1, round(request.question_tokens * factor)),
        )
        for request in trace
    )


class TracedPrompts:
    """The requests of one trace, ready to be asked.

    A document's tokens are a function of its id: a shorter version is the beginning of a longer one. Every request's
    question is its own. Tokens are drawn at random: an engine that has to read them does not care what they say. A
    conversation's turn begins with all that its earlier turns showed, asked and answered; answers are drawn there too,
    in place of those that an engine gave, so that every engine is asked the same.
    """

    def __init__(self, trace: Trace, vocab_size: int, *, seed: int, num_output_tokens: int | None = None) -> None:
        """``num_output_tokens`` replaces the answers' lengths of the trace."""
        spared = min(_SPARED_AT_THE_END, vocab_size // 8)
        self._tokens = range(min(_FIRST_TOKEN, vocab_size // 8), vocab_size - spared)
        self._trace = trace
        self._seed = seed
        self._num_output_tokens = num_output_tokens
        self._documents: dict[str, list[int]] = {}
        self._turns = _turns(trace)

    def __len__(self) -> int:
        return len(self._trace)

    def documents(self, number: int) -> list[Document]:
        """Return what request ``number`` retrieved, the best first; without their texts."""
        return [Document(doc_id, "") for doc_id in self._trace[number].doc_ids]

    def num_tokens(self, number: int) -> int:
        """Return the tokens of request ``number``, prompt and answer."""
        turns = (self._trace[turn] for turn in (*self._earlier(number), number))
        return sum(sum(t.doc_tokens) + max(t.question_tokens, 1) + self._num_outputs(t) for t in turns)

    def request(
        self, number: int, *, orders: Mapping[int, Sequence[str]] = MappingProxyType({}), sends_documents: bool = True
    ) -> TokenRequest:
        """Return request ``number``, its documents as ``orders`` has it (ids, by request; by default as retrieved).

        A turn's history shows its documents in the order of the turn that they came with. ``sends_documents``: with
        the metadata that the integrations of the frameworks send.
        """
        traced = self._trace[number]
        token_ids: list[int] = []
        spans: list[PromptSegment] = []
        for turn in (*self._earlier(number), number):
            shown = self._trace[turn]
            sizes = dict(zip(shown.doc_ids, shown.doc_tokens, strict=True))
            doc_ids = orders.get(turn, shown.doc_ids)
            self._show(turn, doc_ids, (sizes[doc_id] for doc_id in doc_ids), token_ids, spans)
            if turn != number:
                token_ids += self._drawn(f"answer {self._seed} {turn}", self._num_outputs(shown))
        is_reordered = tuple(orders.get(number, traced.doc_ids)) != traced.doc_ids
        return self._asked(traced, token_ids, spans if sends_documents else None, is_reordered)

    def _asked(
        self, traced: TracedRequest, token_ids: list[int], spans: list[PromptSegment] | None, is_reordered: bool
    ) -> TokenRequest:
        params = None
        if spans is not None:
            params = encode_kv_transfer_params(tile(spans, len(token_ids)), is_reordered=is_reordered)
        return TokenRequest(tuple(token_ids), params, self._num_outputs(traced))

    def _earlier(self, number: int) -> Sequence[int]:
        """Return the numbers of the turns before request ``number`` in its conversation."""
        turns = self._turns.get(int(self._trace.conversation[number]), ())
        return turns[: bisect_left(turns, number)]

    def _show(
        self,
        number: int,
        doc_ids: Iterable[DocId],
        sizes: Iterable[int],
        token_ids: list[int],
        spans: list[PromptSegment],
    ) -> None:
        """Put documents of so many tokens, and the question of a request, behind ``token_ids``."""
        for doc_id, num_tokens in zip(doc_ids, sizes, strict=True):
            start = len(token_ids)
            token_ids += self._document(doc_id, num_tokens)
            spans.append(PromptSegment(SegmentKind.DOCUMENT, start, len(token_ids), doc_id))
        token_ids += self._drawn(f"question {self._seed} {number}", max(self._trace[number].question_tokens, 1))

    def _num_outputs(self, traced: TracedRequest) -> int:
        return traced.output_tokens if self._num_output_tokens is None else self._num_output_tokens

    def _document(self, doc_id: str, num_tokens: int) -> list[int]:
        known = self._documents.get(doc_id, [])
        if len(known) < num_tokens:
            known = self._documents[doc_id] = self._drawn(f"document {doc_id}", num_tokens)
        return known[:num_tokens]

    def _drawn(self, name: str, num_tokens: int) -> list[int]:
        """Return tokens that ``name`` decides; more of them begin with the same ones."""
        digest = hashlib.blake2b(name.encode("utf-8", "backslashreplace"), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "little"))
        drawn = (rng.random(num_tokens) * len(self._tokens)).astype(int)
        token_ids: list[int] = (self._tokens.start + drawn).tolist()
        return token_ids


def _turns(trace: Trace) -> dict[int, list[int]]:
    """Return the numbers of the requests of each conversation, in their order."""
    turns: dict[int, list[int]] = defaultdict(list)
    for number in np.flatnonzero(trace.conversation >= 0):
        turns[int(trace.conversation[number])].append(int(number))
    return dict(turns)
