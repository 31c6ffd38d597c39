"""Prompts of a trace: exactly its tokens, the same for the same ids."""

from __future__ import annotations

import math

import pytest

from ragcache_core.bench.prompts import TracedPrompts, scaled
from ragcache_core.errors import ConfigError
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from ragcache_core.wire import decode_kv_transfer_params

TRACE = Trace.from_requests(
    [
        TracedRequest(0.0, ("a", "b"), (100, 60), 9, 1),
        TracedRequest(1.0, ("b", "a"), (60, 100), 9, 5),
        TracedRequest(2.0, ("a",), (40,), 0, 2),
        TracedRequest(3.0, (), (), 7, 1),
    ]
)


def test_a_prompt_has_exactly_the_tokens_of_the_trace() -> None:
    prompts = TracedPrompts(TRACE, 6_144, seed=0)
    assert [len(prompts.request(i).token_ids) for i in range(4)] == [169, 169, 41, 7]  # a question is a token at least
    assert [prompts.request(i).max_tokens for i in range(4)] == [1, 5, 2, 1]
    assert [prompts.num_tokens(i) for i in range(4)] == [170, 174, 43, 8]


def test_a_document_is_the_same_wherever_it_stands_and_a_shorter_one_is_its_beginning() -> None:
    prompts = TracedPrompts(TRACE, 6_144, seed=0)
    first, second, third = (prompts.request(i).token_ids for i in range(3))
    assert first[:100] == second[60:160]
    assert first[100:160] == second[:60]
    assert third[:40] == first[:40]
    assert TracedPrompts(TRACE, 6_144, seed=0).request(2).token_ids == third  # whatever was asked for before


def test_the_metadata_reports_where_the_documents_are_in_the_order_shown() -> None:
    prompts = TracedPrompts(TRACE, 6_144, seed=0)
    request = prompts.request(0, orders={0: ["b", "a"]})
    assert request.params is not None
    metadata = decode_kv_transfer_params(request.params, len(request.token_ids))
    spans = [(s.doc_id, s.start, s.end) for s in metadata.segments if s.doc_id]
    assert spans == [("b", 0, 60), ("a", 60, 160)]
    assert metadata.is_reordered
    assert request.token_ids[:60] == prompts.request(1).token_ids[:60]
    plain = prompts.request(0, sends_documents=False)
    assert plain.params is None
    assert plain.token_ids == prompts.request(0).token_ids


def test_a_scaled_trace_keeps_documents_times_and_answers() -> None:
    small = scaled(TRACE, 1 / 8)
    assert [r.doc_tokens for r in small] == [(12, 8), (8, 12), (5,), ()]
    assert [r.question_tokens for r in small] == [1, 1, 1, 1]
    assert [(r.arrival_s, r.doc_ids, r.output_tokens) for r in small] == [
        (r.arrival_s, r.doc_ids, r.output_tokens) for r in TRACE
    ]
    assert scaled(TRACE, 1) is TRACE
    for factor in (0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="above 0 and finite"):
            scaled(TRACE, factor)


TALK = Trace.from_requests(
    [
        TracedRequest(0.0, ("a", "b"), (100, 60), 9, 4, conversation=1),
        TracedRequest(1.0, ("a",), (100,), 9, 4),
        TracedRequest(2.0, (), (), 5, 3, conversation=1),
        TracedRequest(3.0, ("c",), (40,), 6, 2, conversation=1),
    ]
)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_turn_begins_with_all_that_was_shown_asked_and_answered_before(factor: float) -> None:
    trace = scaled(TALK, factor)
    prompts = TracedPrompts(trace, 6_144, seed=0)
    first, other, second, third = (prompts.request(i).token_ids for i in range(4))
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    for number, request in enumerate((first, other, second, third)):
        traced = trace[number]
        num_own = sum(traced.doc_tokens) + traced.question_tokens
        assert len(request) == traced.history_tokens + num_own
        assert prompts.num_tokens(number) == len(request) + traced.output_tokens
