"""What a request may say of the KV that it leaves: what is possible, and what comes back of vLLM's ``kv_hints``."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import ConfigError
from ragcache_core.hints import CacheHints, actions_of_hints, hints_of_actions, read_hints
from ragcache_core.wire import KEY, check_metadata, decode_kv_transfer_params, encode_hints


@pytest.mark.parametrize(
    ("given_hints", "said"),
    [
        ({"priority": -1}, "priority is -1: send a whole number from 0 to 9"),
        ({"priority": 10}, "priority is 10"),
        ({"priority": True}, "priority is True"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"retain_s": -0.5}, "retain_s is -0.5: send seconds from 0 to 86,400"),
        ({"retain_s": math.nan}, "retain_s is nan"),
        ({"retain_s": math.inf}, "retain_s is inf"),
        ({"retain_s": "30"}, "retain_s is '30'"),
        ({"retain_s": 10**400}, "retain_s is 1000"),
        ({"retain_s": 86_401}, "retain_s is 86401"),
        ({"ttl_s": False}, "ttl_s is False"),
        ({"demote": 1}, "demote is 1: send true or false"),
        ({"prefetch": "faq-7"}, "prefetch is 'faq-7': send a list of at most 64 ids"),
        ({"prefetch": ["faq-7", ""]}, "prefetch is"),
        ({"prefetch": ["d"] * 65}, "prefetch is"),
        ({"tool": ""}, "tool is '': send a name of 1 to 64 characters"),
        ({"tool": "t" * 65}, "tool is"),
        ({"tool": 7}, "tool is 7"),
        ({"demote": True, "retain_s": 30}, "demote is true beside retain_s 30"),
        ({"demote": True, "priority": 2}, "demote is true beside priority 2"),
        ({"demote": True, "ttl_s": 5}, "demote is true beside ttl_s 5"),
        ({"ttl_s": 20, "retain_s": 30}, "ttl_s is 20 beside retain_s 30"),
        ({"retain": 30}, "'retain', which there is not: send one of"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_value_and_limit(given_hints: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_metadata({"version": 1, **given_hints})
    assert said in str(refused.value)


hints = st.builds(
    CacheHints,
    priority=st.integers(0, 9),
    retain_s=st.none() | st.floats(0, 86_400),
    prefetch=st.lists(st.text(min_size=1, max_size=9), max_size=3),
    tool=st.none() | st.text(min_size=1, max_size=9),
) | st.builds(CacheHints, ttl_s=st.none() | st.floats(0, 86_400)) | st.just(CacheHints(demote=True))  # fmt: skip


@given(hints)
def test_hints_arrive_as_they_were_sent_in_the_body_and_as_actions(sent: CacheHints) -> None:
    params: Any = encode_hints(sent).get("kv_transfer_params", {})
    check_metadata(params.get(KEY, {"version": 1}))
    assert decode_kv_transfer_params(params, 8).hints.to_dict() == sent.to_dict()
    told, num_unknown = hints_of_actions(actions_of_hints(sent))
    assert (read_hints(told).to_dict(), num_unknown) == (sent.to_dict(), 0)


def test_a_plain_client_may_send_its_hints_alone() -> None:
    assert decode_kv_transfer_params({KEY: {"retain_s": 30}}, 8).hints == CacheHints(retain_s=30)


def test_unknown_actions_and_fields_are_counted_and_left_out() -> None:
    told = hints_of_actions(
        [("evict_all", {"retain_s": 3}), ("ragcache.retain", {"retain_s": 3, "color": 1}), ("ragcache.demote", {})]
    )
    assert told == ({"retain_s": 3, "demote": True}, 2)
