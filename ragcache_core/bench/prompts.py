"""Requests of a trace as prompts of token ids: the trace's lengths, and the same tokens for the same document id."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from ragcache_core.errors import ConfigError
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.types import DocId, Document, PromptSegment, SegmentKind
from ragcache_core.wire import encode_kv_transfer_params, tile

# Tokenizers have their special tokens below the first, or in the last ones.
_FIRST_TOKEN, _NUM_LAST_TOKENS = 256, 1_024


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A prompt as token ids, and its ``kv_transfer_params``; plain vLLM gets none."""

    token_ids: tuple[int, ...]
    params: Mapping[str, object] | None = None
    max_tokens: int = 4


def check_scale(factor: float) -> None:
    """Refuse a factor of lengths.

    Raises:
        ConfigError: it is not above 0 and finite.
    """
    if not 0 < factor < math.inf:
        raise ConfigError(f"lengths times {factor:g}: the scale must be above 0 and finite")


def scaled(trace: Trace, factor: float) -> Trace:
    """Return the trace with the lengths of documents and questions times ``factor``, each at least a token.

    Raises:
        ConfigError: the factor is not above 0 and finite, or a length is out of range.
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
    """Prompts of one trace.

    The tokens are random. A document's tokens are a function of its id, and a shorter version is the beginning of a
    longer one. Each request has its own question. A conversation's turn begins with its earlier turns: their documents,
    questions and answers. Their answers are random too, so that each engine gets the same prompts.
    """

    def __init__(self, trace: Trace, vocab_size: int, *, seed: int, num_output_tokens: int | None = None) -> None:
        """Use ``num_output_tokens`` for each answer, if given, in place of the trace's lengths."""
        spared = min(_NUM_LAST_TOKENS, vocab_size // 8)
        self._tokens = range(min(_FIRST_TOKEN, vocab_size // 8), vocab_size - spared)
        self._trace = trace
        self._seed = seed
        self._num_output_tokens = num_output_tokens
        self._documents: dict[str, list[int]] = {}
        self._turns = _turns(trace)

    def __len__(self) -> int:
        return len(self._trace)

    def documents(self, number: int) -> list[Document]:
        """Return the documents of request ``number``, the best first, without texts."""
        return [Document(doc_id, "") for doc_id in self._trace[number].doc_ids]

    def num_tokens(self, number: int) -> int:
        """Return the length of request ``number`` in tokens, prompt and answer."""
        turns = (self._trace[turn] for turn in (*self._earlier(number), number))
        return sum(sum(t.doc_tokens) + max(t.question_tokens, 1) + self._num_outputs(t) for t in turns)

    def request(
        self, number: int, *, orders: Mapping[int, Sequence[str]] = MappingProxyType({}), sends_documents: bool = True
    ) -> TokenRequest:
        """Return request ``number``.

        Args:
            number: its place in the trace.
            orders: document ids in their order by request number; by default the retrieval order. A turn's history
                shows its documents in the order of their own turn.
            sends_documents: add the metadata that the framework integrations send.
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
        params = None
        if sends_documents:
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
        """Append the documents and the question of request ``number``."""
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
        """Return random tokens seeded by ``name``; a longer result begins with the shorter one."""
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
