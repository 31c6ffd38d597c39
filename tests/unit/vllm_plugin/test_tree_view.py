"""What the page shows of the tree and of requests: the most used first, bounded, and nothing of salted requests."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController, TierReport
from ragcache_core.wire import RequestMetadata

from .scene import answer_of, controller, keys, run, segments

TIERS = {Tier.GPU: TierReport(1000, 10), Tier.HOST: TierReport(1000, 12)}


def put(it: CacheController, block_keys: list[bytes], tier: Tier = Tier.GPU) -> None:
    for key in block_keys:
        at = it.tree.locate(key)
        assert at is not None
        it.tree.add(at.node, 1 << at.unit, tier)


def ask(it: CacheController, name: str, *, is_salted: bool = False, mark: str = "", **times: Any) -> None:
    """Let a request for a document after a prefix come, run and end."""
    own = [*keys(1, mark), *keys(2, f"{mark}{name}")]
    parts = segments(("", 4), (name, 12), (None, 14))
    metadata = RequestMetadata(parts, times.get("speculation"))
    it.on_new_request(name, metadata, own, 14, 10.0, is_salted=is_salted)
    put(it, own)
    it.on_looked_up(name, 4)
    it.on_admitted(name, own, {Tier.HOST: 4}, 10.5)
    it.on_load_ended(name, 10.7)
    it.on_first_token(name, 11.0)
    it.on_finished(name, 12.0)


def view(it: CacheController, limit: int = 100) -> dict[str, Any]:
    return answer_of(it.tree_view(limit))


def test_the_tree_is_listed_from_the_root_with_the_blocks_of_each_node_and_tier() -> None:
    it = controller(tiers=TIERS)
    for name in ("a", "a", "b"):
        ask(it, name)
    put(it, keys(1), Tier.HOST)
    said = view(it)
    prefix, first, second = said["nodes"]
    assert prefix["parent"] is None
    assert first["parent"] == second["parent"] == prefix["node"]
    assert [(n["doc_id"], n["num_tokens"], n["num_uses"], n["num_bytes"]) for n in said["nodes"]] == [
        (None, 4, 3, {"gpu": 10, "host": 12}),
        ("a", 8, 2, {"gpu": 20}),
        ("b", 8, 1, {"gpu": 20}),
    ]
    assert (said["num_nodes"], said["num_left_out"]) == (3, 0)


def test_the_most_used_nodes_are_listed_and_the_others_counted() -> None:
    it = controller(tiers=TIERS)
    for name in ("a", "b", "b", "c"):
        ask(it, name)
    said = view(it, limit=2)
    assert [n["doc_id"] for n in said["nodes"]] == [None, "b"]
    assert (said["num_nodes"], said["num_left_out"]) == (4, 2)


def test_what_a_request_with_a_salt_asks_for_is_in_no_picture_and_its_documents_have_no_name() -> None:
    it = controller(tiers=TIERS)
    ask(it, "open")
    ask(it, "secret", is_salted=True, mark="salt")
    told = str((view(it), it.recent_requests(10, 13.0)))
    assert "open" in told
    assert told.count("secret") == 1, "the id of the request itself"
    assert [n["doc_id"] for n in view(it)["nodes"]] == [None, "open"]


def test_recent_requests_are_listed_latest_first_after_running_ones() -> None:
    it = controller(tiers=TIERS)
    ask(it, "a")
    it.on_new_request("waits", RequestMetadata(segments((None, 6))), keys(1, "x"), 6, 12.5)
    said: Any = it.recent_requests(10, 13.0)
    waits, ended = said["requests"]
    assert (said["num_queued"], said["num_running"]) == (1, 0)
    assert (waits["id"], waits["age_s"], waits["queue_s"], waits["total_s"]) == ("waits", 0.5, None, None)
    assert ended["doc_ids"] == ["a"]
    assert (ended["queue_s"], round(ended["load_s"], 9), ended["ttft_s"], ended["total_s"]) == (0.5, 0.7, 1.0, 2.0)
    assert (ended["num_prompt_tokens"], ended["num_gpu_tokens"], ended["num_host_tokens"]) == (14, 4, 4)
    assert it.recent_requests(1, 13.0)["requests"] == [waits]


def test_a_forgotten_document_has_no_name_in_the_times_of_requests() -> None:
    it = controller(tiers=TIERS)
    run(it, "r", segments(("", 4), ("b", 12), (None, 14)), keys(3, "b"))
    ask(it, "a")
    it.forget({"a"})
    (told,) = it.recent_requests(10, 13.0)["requests"]  # type: ignore[attr-defined]  # of plain JSON
    assert told["doc_ids"] == []
    assert told["num_documents"] == 1


@pytest.mark.parametrize("num_before", [0, 2], ids=["a_prompt_of_no_block", "behind_a_prefix"])
def test_a_salted_document_that_ends_in_a_block_with_the_answer_has_no_name_either(num_before: int) -> None:
    it = controller(tiers=TIERS)
    own, end = keys(num_before + 3), 4 * num_before + 3
    parts = segments(*([("", end - 3)] if num_before else []), ("secret", end))
    it.on_new_request("r", RequestMetadata(parts), own, end, 10.0, is_salted=True)
    it.on_admitted("r", own, {}, 10.5)
    for index in range(len(own)):
        it.locate_block(own, index, "r")
    put(it, own)
    it.on_finished("r", 12.0)
    assert answer_of(it.contents.list("bytes", 10)) == {"documents": [], "total": 0}
    assert answer_of(it.contents.show(["secret"]))["documents"] == []
    assert answer_of(it.pin(["secret"], dry_run=True))["unknown"] == ["secret"]
    assert view(it)["nodes"] == []


def test_nothing_that_was_purged_has_a_name_in_the_times_of_requests() -> None:
    it = controller(tiers=TIERS)
    ask(it, "a")
    own = keys(1, "b")
    it.on_new_request("r", RequestMetadata(segments(("short", 3))), own[:0], 3, 10.0)
    it.forget_all()
    state = it.state_of("r")
    assert state is not None
    assert state.first_private == 0, "what it has of before is its own"
    it.on_finished("r", 12.0)
    told: Any = it.recent_requests(10, 13.0)["requests"]
    assert [request["doc_ids"] for request in told] == [[], []]
