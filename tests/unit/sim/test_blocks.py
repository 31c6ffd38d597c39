"""The cache of blocks: what a request finds and leaves, what tiers hold, and what never breaks."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ragcache_core.errors import ConfigError
from ragcache_core.policy import POLICIES, PrefillCostModel
from ragcache_core.sim.blocks import BlockCache
from ragcache_core.sim.options import INFINITE, SimulationOptions
from ragcache_core.sim.prompt_blocks import cut_into_blocks
from ragcache_core.sim.traces.trace import TracedRequest
from ragcache_core.tree import check_invariants
from ragcache_core.types import Tier

COST = PrefillCostModel.default()
BLOCK = 4
LENGTHS = {"a": 8, "b": 11, "c": 3, "d": 1, "e": 17, "f": 24}


def asked(doc_ids: str, question_tokens: int = 5, output_tokens: int = 1) -> TracedRequest:
    return TracedRequest(0.0, tuple(doc_ids), tuple(LENGTHS[doc] for doc in doc_ids), question_tokens, output_tokens)


def cache(gpu: int, host: int = 0, disk: int = 0, **given: Any) -> BlockCache:
    """Return a cache of that many blocks in each tier."""
    options = SimulationOptions(
        **{
            "policy": "lru",
            "block_size": BLOCK,
            "gpu_tokens": gpu * BLOCK,
            "host_tokens": host * BLOCK,
            "disk_tokens": disk * BLOCK,
            **given,
        }
    )
    return BlockCache(options, COST)


def num_blocks(cache: BlockCache, tier: Tier) -> int:
    return cache.tree.tiers[tier].num_units


def num_leading_tokens(cache: BlockCache, request: TracedRequest) -> int:
    """Return how many tokens of a prompt lie in GPU and host memory: what is on disk may find no room on the host."""
    prompt = cut_into_blocks(request, None, system_tokens=cache._options.system_tokens, block_size=BLOCK)
    keys = list(prompt.keys)[: max(prompt.num_prompt_tokens - 1, 0) // BLOCK]
    for i, key in enumerate(keys):
        at = cache.tree.locate(key)
        if at is None or not any(
            cache.tree.resident_mask(at.node, tier) >> at.unit & 1 for tier in (Tier.GPU, Tier.HOST)
        ):
            return i * BLOCK
    return len(keys) * BLOCK


REQUESTS = st.lists(
    st.builds(
        asked,
        st.lists(st.sampled_from("abcdef"), max_size=3).map("".join),
        st.integers(0, 9),
        st.integers(1, 14),
    ),
    max_size=40,
)


@given(
    requests=REQUESTS,
    policy=st.sampled_from((*POLICIES, INFINITE)),
    gpu=st.integers(28, 40),  # the longest request takes 26 blocks
    host=st.sampled_from((0, 1, 7, 30, 60)),
    has_disk=st.booleans(),
    system_tokens=st.sampled_from((0, 3, 10)),
    max_cached_documents=st.sampled_from((None, 1, 2)),
)
@settings(max_examples=150, deadline=None)
def test_tokens_are_conserved_and_no_tier_overflows(
    requests: list[TracedRequest],
    policy: str,
    gpu: int,
    host: int,
    has_disk: bool,
    system_tokens: int,
    max_cached_documents: int | None,
) -> None:
    it = cache(
        gpu,
        host,
        45 if host and has_disk else 0,
        policy=policy,
        system_tokens=system_tokens,
        max_cached_documents=max_cached_documents,
    )
    capacities = {Tier.GPU: gpu - 1, Tier.HOST: host, Tier.DISK: 45 if host and has_disk else 0}
    for number, request in enumerate(requests):
        expected = num_leading_tokens(it, request) if has_disk else it.num_cached_tokens(request)
        served = it.serve(request, number)
        num_prompt = system_tokens + sum(request.doc_tokens) + request.question_tokens
        assert served.num_cached_tokens + served.num_new_tokens == num_prompt
        assert all(count % BLOCK == 0 for count in served.num_cached_tokens_by_tier)
        assert served.num_cached_tokens_by_tier[Tier.GPU] <= max(num_prompt - 1, 0)
        assert served.num_loaded_tokens == sum(served.num_cached_tokens_by_tier[1:])
        assert served.num_cached_tokens >= expected
        assert len(served.tiers) == len(request.doc_ids)
        if policy != INFINITE:
            for tier, capacity in capacities.items():
                assert num_blocks(it, tier) <= capacity
        assert not any(state.in_use for state in it.tree.tiers), "everything was let go"
        assert not it.tree.protected
        check_invariants(it.tree, is_connected=False)


@given(requests=REQUESTS, policy=st.sampled_from(tuple(POLICIES)), gpu=st.integers(25, 40))
@settings(max_examples=50, deadline=None)
def test_without_slower_tiers_what_is_left_is_always_a_usable_prefix(
    requests: list[TracedRequest], policy: str, gpu: int
) -> None:
    it = cache(gpu, policy=policy)
    for number, request in enumerate(requests):
        it.serve(request, number)
        check_invariants(it.tree)


@given(requests=REQUESTS, host=st.sampled_from((0, 30)), policy=st.sampled_from(("pgdsf", "mixture")))
@settings(max_examples=50, deadline=None)
def test_asking_changes_nothing(requests: list[TracedRequest], host: int, policy: str) -> None:
    asked_often, quiet = cache(25, host, policy=policy), cache(25, host, policy=policy)
    for number, request in enumerate(requests):
        asked_often.num_cached_tokens(request)
        asked_often.best_order(request)
        assert asked_often.serve(request, number) == quiet.serve(request, number)


@given(requests=REQUESTS, host=st.sampled_from((0, 30)), last=st.permutations("abcdef"), k=st.integers(1, 3))
@example(requests=[asked("bdc")], host=0, last=list("bcdaef"), k=3)  # "d" fills no block of its own
@settings(max_examples=50, deadline=None)
def test_the_best_order_has_the_longest_cached_prefix(
    requests: list[TracedRequest], host: int, last: list[str], k: int
) -> None:
    it = cache(30, host, system_tokens=3)
    for number, request in enumerate(requests):
        it.serve(request, number)
    documents = "".join(last[:k])
    counts = {
        order: it.num_cached_tokens(asked("".join(documents[i] for i in order))) for order in permutations(range(k))
    }
    best = it.best_order(asked(documents))
    assert counts[best] == max(counts.values())
    if counts[tuple(range(k))] == counts[best]:
        assert counts[best] == 0 or best == min(order for order in counts if counts[order] == counts[best])


def test_blocks_are_cut_over_the_whole_prompt_and_belong_to_the_later_of_two() -> None:
    #  tokens   0    3         11            22  25        33
    #           | s  |    a    |      b      | c |    q    | answer
    #  blocks   |   0    1    2    3    4    5    6    7    8    9
    prompt = cut_into_blocks(asked("abc", 8, 7), 0, system_tokens=3, block_size=4)
    assert [(s.doc_id, len(s.keys), s.num_tokens) for s in prompt.path] == [
        ("a", 2, 8), ("b", 3, 12), ("c", 1, 4), (None, 2, 8),
    ]  # fmt: skip
    assert (prompt.num_prompt_tokens, prompt.num_tokens, len(prompt.keys)) == (33, 39, 9)
    assert [(d.first, d.last) for d in prompt.documents] == [(0, 2), (2, 5), (5, 6)]


def test_keys_agree_as_far_as_the_tokens_do() -> None:
    def keys(request: TracedRequest, number: int = 0) -> list[int]:
        return list(cut_into_blocks(request, number, system_tokens=3, block_size=4).keys)

    def num_common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    one = keys(asked("abe"))
    assert len(set(one)) == len(one)
    assert num_common(one, keys(asked("abe"))) == len(one)
    assert num_common(one, keys(asked("abe"), 1)) == (3 + 8 + 11 + 17) // 4
    assert num_common(one, keys(asked("abf"))) == (3 + 8 + 11) // 4
    assert num_common(one, keys(asked("ba"))) == 0
    longer = TracedRequest(0.0, ("a", "b"), (8, 12), 5, 1)  # split again
    assert num_common(one, keys(longer)) == (3 + 8) // 4


@pytest.mark.parametrize(("question_tokens", "num_hit"), [(0, 16), (1, 16), (2, 20), (5, 20), (6, 24)])
def test_the_last_token_is_always_computed(question_tokens: int, num_hit: int) -> None:
    it = cache(20)
    request = asked("ab", question_tokens)  # 19 tokens of documents
    assert it.serve(request, 0).num_new_tokens == 19 + question_tokens
    again = it.serve(request, 0)
    assert again.num_cached_tokens == num_hit
    assert again.num_new_tokens > 0


def test_a_document_is_hit_where_all_its_blocks_are() -> None:
    it = cache(30)
    assert it.serve(asked("ab"), 0).tiers == (None, None)
    assert it.serve(asked("ab"), 1).tiers == (Tier.GPU, Tier.GPU)
    assert it.serve(asked("ac"), 2).tiers == (Tier.GPU, None), "too short for a block of its own"
    assert it.serve(asked("b"), 3).tiers == (None,)
    assert it.serve(asked("a"), 4).num_cached_tokens_by_tier == (8, 0, 0)


def test_documents_are_written_through_to_the_host_and_questions_are_not() -> None:
    it = cache(20, host=20)
    served = it.serve(asked("ae", 9, 8), 0)  # 25 tokens of documents, 34 of the prompt
    assert served.num_swapped_out_tokens == 24
    assert num_blocks(it, Tier.HOST) == 6
    assert num_blocks(it, Tier.GPU) == (34 + 7) // BLOCK
    assert it.serve(asked("ae", 9), 1).num_swapped_out_tokens == 0
    assert it.serve(asked("", 9), 2).num_swapped_out_tokens == 8, "without documents, the prompt"


def test_what_left_the_gpu_comes_back_from_the_host() -> None:
    it = cache(10, host=30)
    it.serve(asked("f"), 0)
    it.serve(asked("eb"), 1)
    served = it.serve(asked("f"), 2)
    assert served.tiers == (Tier.HOST,)
    assert served.num_loaded_tokens == served.num_cached_tokens_by_tier[Tier.HOST] > 0
    assert served.num_cached_tokens == 24
    assert it.serve(asked("f"), 3).tiers == (Tier.GPU,)


def test_a_load_beside_the_prefill_leaves_the_last_block_to_it() -> None:
    for overlaps, num_loaded in ((True, 20), (False, 24)):
        it = cache(10, host=30, overlaps_transfers=overlaps)
        it.serve(asked("f", 0), 0)
        it.serve(asked("eb"), 1)
        served = it.serve(asked("f", 0), 2)
        assert (served.num_loaded_tokens, served.num_new_tokens) == (num_loaded, 24 - num_loaded)


def test_what_left_the_host_comes_back_from_the_disk_through_the_host() -> None:
    it = cache(10, host=8, disk=40)
    it.serve(asked("f"), 0)
    for number, other in enumerate(("eb", "be"), 1):
        it.serve(asked(other), number)
    served = it.serve(asked("f"), 3)
    assert served.tiers == (Tier.DISK,)
    assert served.num_cached_tokens_by_tier == (0, 0, 24)
    assert num_blocks(it, Tier.DISK) > num_blocks(it, Tier.HOST)


def test_documents_beyond_the_limit_are_not_stored_and_go_first() -> None:
    it = cache(16, host=20, max_cached_documents=1)
    assert it.serve(asked("ab"), 0).num_swapped_out_tokens == 8
    for number, other in enumerate("fe", 1):
        it.serve(asked(other), number)
    assert it.serve(asked("ab"), 3).tiers == (Tier.GPU, None)


def test_the_same_prompt_computed_again_leaves_no_block_behind() -> None:
    it = cache(30)
    request = asked("af", 0, 6)  # 32 tokens and 5 of its answer, which is the same each time
    for _ in range(5):
        it.serve(request, 0)
        assert num_blocks(it, Tier.GPU) == 37 // BLOCK
    assert it.serve(request, 0).num_cached_tokens == 28


def test_a_request_that_never_fits_is_refused_with_the_capacity_it_needs() -> None:
    it = cache(9)
    it.serve(asked("f", 8), 0)
    with pytest.raises(ConfigError, match=r"request 7 .* needs 9 blocks of 4 tokens, the GPU has 8 .* to 40 or more"):
        it.serve(asked("f", 8, 2), 7)
    assert it.serve(asked("f", 8), 1).tiers == (Tier.GPU,), "nothing was changed"


def test_an_id_may_be_any_text_of_json() -> None:
    it = cache(20)
    half_a_pair = TracedRequest(0.0, ("\ud800",), (8,), 5, 1)
    assert it.serve(half_a_pair, 0).tiers == (None,)
    assert it.serve(TracedRequest(0.0, ("\ud801",), (8,), 5, 1), 1).tiers == (None,)
    assert it.serve(half_a_pair, 2).tiers == (Tier.GPU,)
