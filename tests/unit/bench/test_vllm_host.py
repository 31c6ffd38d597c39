"""vLLM's own host tier as it is simulated: which chunk goes first, and what is kept from going."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest

from benchmarks.simulated.vllm_host import VLLMHostBlocks
from ragcache_core.types import Tier


def ask(host: VLLMHostBlocks, keys: str) -> int:
    """Ask for chunks, store what is missing, and end the request; return how many were found."""
    found = len(host.look_up(keys))
    host.release(keys[:found])
    stored: Sequence[Hashable] = host.store(keys[found:])
    host.settle()
    host.on_answered(keys, set(stored), set(keys) - set(stored))
    return found


def kept(host: VLLMHostBlocks, keys: str) -> str:
    """Return which of ``keys`` are there."""
    there = ""
    for key in keys:
        if host.look_up(key):
            host.release(key)
            there += key
    return there


def test_an_lru_evicts_the_tail_of_what_was_used_longest_ago() -> None:
    host = VLLMHostBlocks(6, is_arc=False)
    assert [ask(host, keys) for keys in ("abc", "xyz", "abc")] == [0, 0, 3]
    assert ask(host, "pq") == 0
    assert kept(host, "abcxyzpq") == "abcxpq", "of xyz the last two went"


@pytest.mark.parametrize("is_arc", [False, True])
def test_what_is_loaded_or_written_stays_and_a_prompt_that_does_not_fit_beside_it_is_not_stored(is_arc: bool) -> None:
    host = VLLMHostBlocks(4, is_arc=is_arc)
    ask(host, "ab")
    assert host.look_up("abz") == [Tier.HOST, Tier.HOST]
    assert host.store("wxyz") == []
    assert host.store("wx") == ["w", "x"]
    assert host.store("yz") == [], "w and x are being written"
    host.settle()
    assert host.store("yz") == ["y", "z"]
    host.release("ab")
    assert kept(host, "abwxyz") == "abyz"


def test_arc_keeps_what_came_again_from_what_comes_once() -> None:
    arc, lru = VLLMHostBlocks(4, is_arc=True), VLLMHostBlocks(4, is_arc=False)
    for host in (arc, lru):
        for keys in ("ab", "ab", "cd", "ef", "gh"):
            ask(host, keys)
    assert kept(arc, "abcdefgh") == "abgh"
    assert kept(lru, "abcdefgh") == "efgh"


def test_arc_learns_from_a_miss_of_what_it_gave_up_too_early() -> None:
    host = VLLMHostBlocks(4, is_arc=True)
    for keys in ("ab", "ab", "cd", "ef", "cd", "ef", "cd"):  # cd and ef go again and again, for ab was used twice
        ask(host, keys)
    assert kept(host, "ab") != "ab", "its share has shrunk"
