"""Where the blocks of prompts and answers stand in the tree, and what of them is worth keeping."""

from __future__ import annotations

import pytest

from ragcache_core.chunkstore import ChunkEntry
from ragcache_core.chunkstore.regrowing import note_of, regrow
from ragcache_core.tree import check_invariants
from ragcache_core.types import PromptSegment, Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController, TierReport
from ragcache_core.wire import RequestMetadata
from tests.unit.vllm_plugin.scene import controller, keys, nodes, run, segments


def test_a_block_that_straddles_two_documents_belongs_to_the_later_one() -> None:
    it = controller()
    it.on_new_request("r", RequestMetadata(segments(("", 3), ("a", 10), ("b", 16), (None, 21))), keys(5), 21, 0.0)
    assert nodes(it) == [("a", 0, 2, False), ("b", 2, 2, False), (None, 4, 1, False)]


@pytest.mark.parametrize("num_keys", [0, 1, 2, 3])
def test_a_prompt_with_fewer_keys_than_blocks_is_taken_as_far_as_they_go(num_keys: int) -> None:
    """vLLM hashes full blocks only, and none where prefix caching is off."""
    it = controller()
    parts = segments(("a", 8), (None, 14))
    figures = run(it, "r", parts, keys(num_keys))
    assert figures["num_gpu_tokens"] == 0
    assert sum(num_blocks for _, _, num_blocks, _ in nodes(it)) == min(num_keys, 3)
    assert it.is_idle


def test_an_answers_keys_are_not_taken_for_the_prompts() -> None:
    """A request that is resumed brings the keys of what it has answered."""
    it = controller()
    it.on_new_request("r", RequestMetadata(segments(("a", 8), (None, 10))), keys(2), 10, 0.0)
    it.on_admitted("r", keys(6), {}, 1.0)
    assert sum(num_blocks for _, _, num_blocks, _ in nodes(it)) == 2


def test_documents_beyond_the_limit_are_transient_and_not_stored() -> None:
    it = controller(max_cached_documents=2)
    parts = segments(("", 4), ("a", 8), ("b", 14), ("c", 20), ("d", 24), (None, 30))
    it.on_new_request("r", RequestMetadata(parts), keys(7), 30, 0.0)
    assert nodes(it) == [
        (None, 0, 1, False),
        ("a", 1, 1, False),
        ("b", 2, 1, False),
        ("c", 3, 2, True),
        ("d", 5, 1, True),
        (None, 6, 1, True),
    ]
    assert it.num_storable_tokens("r") == 14


@pytest.mark.parametrize(
    ("parts", "limit", "expected"),
    [
        (segments((None, 20)), None, 20),
        (segments((None, 20)), 1, 20),
        (segments(("", 4), (None, 20)), None, 20),
        (segments(("a", 8), (None, 20)), None, 8),
        (segments(("a", 8), ("b", 12), (None, 20)), None, 12),
        (segments(("a", 8), ("b", 12), (None, 20)), 1, 8),
        (segments(("a", 8), ("b", 20)), 5, 20),
    ],
)
def test_blocks_are_stored_up_to_the_last_kept_document(
    parts: tuple[PromptSegment, ...], limit: int | None, expected: int | None
) -> None:
    it = controller(max_cached_documents=limit)
    it.on_new_request("r", RequestMetadata(parts), keys(5), 20, 0.0)
    assert it.num_storable_tokens("r") == expected


def talk(it: CacheController, mark: str) -> tuple[list[bytes], int | None]:
    """Let a request about a document come, with its answer, and return its keys and what was worth storing."""
    block_keys = keys(8, mark)
    it.on_new_request(mark, RequestMetadata(segments(("a", 8), (None, 18))), block_keys[:4], 18, 0.0)
    limit = it.num_storable_tokens(mark)
    state = it.state_of(mark)
    assert state is not None
    it.on_admitted(mark, block_keys[:4], {}, 0.0)
    state.keys = block_keys  # vLLM's own list grows with the answer
    it.on_finished(mark)
    return block_keys, limit


def go_on(it: CacheController, mark: str, before: list[bytes]) -> int | None:
    """Let the next turn come, and return what was worth storing."""
    more = [*before, *keys(2, f"{mark} more ")]
    it.on_new_request(f"{mark} more", RequestMetadata(segments(("a", 8), (None, 40))), more, 40, 0.0)
    limit = it.num_storable_tokens(f"{mark} more")
    it.on_admitted(f"{mark} more", more, {}, 0.0)
    it.on_finished(f"{mark} more")
    return limit


def test_turns_after_the_documents_are_stored_once_conversations_continue() -> None:
    it = controller()
    first, limit = talk(it, "first")
    assert limit == 8, "to the end of the document"
    go_on(it, "first", first)
    assert it.report()["num_followup_turns"] == 1
    assert talk(it, "second")[1] is None, "question and answer as well"
    for i in range(40):
        talk(it, f"single {i}")
    assert talk(it, "last")[1] == 8, "they seldom go on after all"


def test_a_conversation_is_stored_no_further_than_the_documents_that_are_kept_and_the_host_tier() -> None:
    it = controller(max_cached_documents=1, tiers={Tier.HOST: TierReport(capacity_bytes=700, block_bytes=100)})
    go_on(it, "first", talk(it, "first")[0])
    assert talk(it, "second")[1] == 28
    parts = segments(("a", 8), ("b", 16), (None, 20))
    it.on_new_request("two", RequestMetadata(parts), keys(5, "two"), 20, 0.0)
    assert it.num_storable_tokens("two") == 8


def test_who_only_guesses_or_prefills_is_no_turn() -> None:
    it = controller()
    first, _ = talk(it, "first")
    more = [*first, *keys(2, "more")]
    for name, metadata in (
        ("guess", RequestMetadata(segments((None, 40)), speculation="s")),
        ("prefill", RequestMetadata(segments((None, 40)), is_prefill=True)),
    ):
        it.on_new_request(name, metadata, more, 40, 0.0)
        it.on_admitted(name, more, {}, 0.0)
        it.on_finished(name)
    assert it.report()["num_followup_turns"] == 0
    assert it.tree.returning.probability(1) == 0.0
    assert it.confirm("s") == []
    assert it.report()["num_followup_turns"] == 1


def test_a_path_stays_in_the_tree_as_long_as_its_request_lives() -> None:
    it = controller(ghost_size=0)
    it.on_new_request("r1", RequestMetadata(segments(("a", 8), (None, 12))), keys(3), 12, 0.0)
    it.on_new_request("same", RequestMetadata(segments(("a", 8), (None, 12))), keys(3), 12, 0.0)
    it.on_finished("r1")
    run(it, "r2", segments(("b", 8), (None, 12)), keys(3, "b"))
    assert it.tree.locate(b"2") is not None
    it.on_finished("same")
    run(it, "r3", segments(("b", 8), (None, 12)), keys(3, "b"))
    assert it.tree.locate(b"2") is None
    check_invariants(it.tree)


# Blocks


# From storage


def test_a_tree_grows_again_from_what_was_noted_with_its_blocks() -> None:
    it = controller()
    parts = segments(("a", 8), ("b", 16), (None, 20))
    for i in range(3):
        run(it, f"r{i}", parts, keys(5))
    locations = [it.tree.locate(key) for key in keys(5)]
    assert all(locations)
    entries = []
    for key, location in zip(keys(5), locations, strict=True):
        assert location is not None
        note = note_of(it.tree, location)
        entries.append(ChunkEntry(key, note.parent, note.doc_id, note.position, note.frequency, note.cost))
    again = controller()
    found, orphans = regrow(again.tree, entries, Tier.DISK, again.tokens_per_block)
    assert (found, orphans) == (keys(5), [])
    assert nodes(again) == nodes(it)
    assert {n.doc_id: (n.frequency, n.avg_cost_s) for n in again.tree.nodes()} == {
        n.doc_id: (n.frequency, n.avg_cost_s) for n in it.tree.nodes()
    }
    check_invariants(again.tree)
    assert [key for run in again.tree.evict(Tier.DISK, 5) or () for key in run.keys] == keys(5)[::-1]


def test_blocks_without_their_prefix_are_orphans_and_so_is_what_follows_them() -> None:
    it = controller()
    entries = [
        ChunkEntry(b"1", None, "a", 0, 1.0, 0.1),
        ChunkEntry(b"2", b"lost", "a", 1, 1.0, 0.1),
        ChunkEntry(b"3", b"2", "a", 2, 1.0, 0.1),
        ChunkEntry(b"4", b"4", "a", 2, 1.0, 0.1),
    ]
    assert regrow(it.tree, entries, Tier.HOST, it.tokens_per_block) == ([b"1"], [b"2", b"3", b"4"])
    check_invariants(it.tree)


def test_blocks_of_other_groups_are_found_with_their_unit_and_are_orphans_without() -> None:
    it = controller()
    entries = [
        ChunkEntry(b"1 window", b"1", None, 0, 0.0, 0.0),
        ChunkEntry(b"1", None, "a", 0, 1.0, 0.1),
        ChunkEntry(b"2", b"lost", "a", 1, 1.0, 0.1),
        ChunkEntry(b"2 window", b"2", None, 1, 0.0, 0.0),
    ]
    found, orphans = regrow(
        it.tree, entries, Tier.DISK, it.tokens_per_block, lambda entry: (entry.key[:1], len(entry.key) == 1)
    )
    assert (found, orphans) == ([b"1", b"1 window"], [b"2", b"2 window"])
    assert it.tree.tiers[Tier.DISK].num_units == 1
    check_invariants(it.tree)
