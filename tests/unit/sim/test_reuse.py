"""How documents come again in a trace: which, when, where and with which others."""

from __future__ import annotations

import pytest

from ragcache_core.sim.traces.reuse import reuse_of
from ragcache_core.sim.traces.trace import Trace, TracedRequest


def trace(*requests: tuple[float, str]) -> Trace:
    tokens = {"a": 100, "b": 300, "c": 600}
    return Trace.from_requests(
        TracedRequest(at, tuple(docs), tuple(tokens[doc] for doc in docs), 10, 1) for at, docs in requests
    )


TRACE = trace((0.0, "ab"), (5.0, "ac"), (50.0, "ba"), (700.0, "ab"))


def test_popularity_is_a_curve_that_ends_with_the_rarest() -> None:
    reuse = reuse_of(TRACE)
    assert dict(reuse.top_documents)[0.01] == pytest.approx(4 / 8)  # a, at least one document
    shares = [share for _, share in reuse.top_documents]
    assert shares == sorted(shares)


def test_a_return_counts_from_the_documents_last_retrieval() -> None:
    reuse = reuse_of(TRACE)  # a after 5, 45 and 650 seconds, b after 50 and 650
    assert [share for _, share in reuse.returns_within_s] == [1 / 8, 3 / 8, 3 / 8, 5 / 8, 5 / 8]
    assert dict(reuse.return_s)[0.5] == 50.0


def test_a_prefix_comes_again_only_behind_the_same_documents() -> None:
    first, second = reuse_of(TRACE).positions
    assert (first.num_retrievals, first.anywhere, first.same_prefix) == (4, 3 / 4, 2 / 4)  # b came before, not in front
    assert (second.num_retrievals, second.anywhere, second.same_prefix) == (4, 2 / 4, 1 / 4)
    reuse = reuse_of(TRACE)
    assert reuse.anywhere_tokens == pytest.approx((100 + 400 + 400) / 1900)
    assert reuse.same_prefix_tokens == pytest.approx((100 + 400) / 1900)


def test_documents_come_again_together_in_whatever_order() -> None:
    reuse = reuse_of(TRACE)
    assert reuse.repeated_sets == reuse.repeated_pairs == 2 / 4
    longer = reuse_of(trace((0.0, "abc"), (1.0, "ca")))
    assert (longer.repeated_sets, longer.repeated_pairs) == (0.0, 1 / 4)


def test_a_request_knows_its_documents_from_those_before_it() -> None:
    reuse = reuse_of(TRACE)  # none, a of two, both, both
    assert reuse.known_documents == ((0.01, 3 / 4), (0.25, 3 / 4), (0.5, 3 / 4), (0.75, 2 / 4), (1.0, 2 / 4))
    assert reuse.sources == ((1, 1 / 2), (2, 1 / 2))  # ba: a came last with c and b alone; ab: both with ba
    many = [(float(at), doc) for at, doc in enumerate("abcabcabc")]
    assert reuse_of(trace(*many, (9.0, "abc"))).sources == ((3, 1.0),)


def test_sets_have_a_popularity_of_their_own() -> None:
    assert dict(reuse_of(TRACE).top_sets)[0.5] == pytest.approx(3 / 4)  # ab of ab and ac
    assert reuse_of(trace((0.0, "a"), (1.0, "a"))).top_sets == ()


def test_a_document_twice_in_one_prompt_is_no_pair() -> None:
    reuse = reuse_of(trace((0.0, "aa"), (1.0, "aa")))
    assert reuse.repeated_pairs == reuse.repeated_sets == 0.0
    assert reuse.sources == reuse.top_sets == ()


def test_what_prompts_consist_of_adds_up() -> None:
    reuse = reuse_of(TRACE)
    assert sum(reuse.shares_of_prompts.values()) == pytest.approx(1.0)
    assert reuse.shares_of_prompts["documents"] == pytest.approx(1900 / 1940)
    assert dict(reuse.prompt_tokens)[0.5] == 410.0


def test_a_trace_without_documents_has_lengths_alone() -> None:
    reuse = reuse_of(trace((0.0, ""), (1.0, "")))
    assert not any((reuse.top_documents, reuse.return_s, reuse.positions, reuse.document_tokens))
    assert not any((reuse.known_documents, reuse.sources, reuse.top_sets))
    assert reuse.anywhere_tokens == reuse.repeated_pairs == 0.0
    assert dict(reuse.prompt_tokens)[0.5] == 10.0
