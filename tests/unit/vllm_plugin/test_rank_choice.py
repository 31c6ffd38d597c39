"""Several engines behind one server: which of them gets a request."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random

import pytest

from ragcache_core.vllm_plugin.server.rank_choice import RankChoice, documents_of


def sent(choice: RankChoice, documents: str) -> int:
    """Send a request that is answered at once."""
    with choice.sending(documents) as rank:
        return rank


def test_new_documents_are_spread_and_known_ones_go_where_they_were() -> None:
    choice = RankChoice(3)
    first = {name: sent(choice, name) for name in "abcdef"}
    assert sorted(first.values()) == [0, 0, 1, 1, 2, 2]
    for name in Random(7).choices("abcdef", k=30):
        assert sent(choice, name) == first[name]
        assert sent(choice, name + "x") == first[name], "it has the first of them"


def test_the_longest_beginning_that_was_sent_somewhere_counts() -> None:
    choice = RankChoice(2)
    with ExitStack() as running:
        at_a = running.enter_context(choice.sending("a"))
        for _ in range(5):
            running.enter_context(choice.sending("a"))
        elsewhere = running.enter_context(choice.sending("ab"))
    assert elsewhere != at_a, "the one that has `a` was busy"
    assert sent(choice, "abc") == elsewhere
    assert sent(choice, "bac") == sent(choice, "bac")


def test_an_engine_that_is_far_busier_than_another_is_spared_until_its_requests_are_answered() -> None:
    choice = RankChoice(2)
    sent(choice, "b")
    home = sent(choice, "a")
    with ExitStack() as running:
        ranks = [running.enter_context(choice.sending("a")) for _ in range(5)]
        assert ranks == [home] * 5
        assert running.enter_context(choice.sending("a")) != home
    fresh = RankChoice(2)
    home = sent(fresh, "a")
    assert {sent(fresh, "a") for _ in range(20)} == {home}


def test_what_was_sent_long_ago_is_forgotten() -> None:
    """And does not count where new documents go: they go to the one with fewer remembered documents."""
    choice = RankChoice(2, max_known=2)
    assert [sent(choice, name) for name in "abcdeb"] == [0, 1, 0, 0, 1, 0]


def test_a_tenants_documents_are_routed_to_its_own_cached_ones_only() -> None:
    choice = RankChoice(2)
    with choice.sending("a", "acme") as home:
        pass
    with choice.sending("b", "acme") as elsewhere:
        pass
    assert elsewhere != home
    for number in range(21_000):
        with choice.sending([f"{number}"], "other"):
            pass
    for documents, rank in (("a", home), ("b", elsewhere)):
        with choice.sending(documents, "acme") as again:
            assert again == rank


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'["kv_transfer_params"]',
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": {"ragcache": []}}',
        b'{"kv_transfer_params": {"ragcache": {"documents": 7}}}',
        b'{"kv_transfer_params": {"ragcache": {"documents": [{}]}}}',
        b'{"kv_transfer_params": ' + b"[" * 100_000,
    ],
)
def test_a_request_that_names_no_documents_rightly_goes_anywhere(body: bytes) -> None:
    assert documents_of(body) == []
