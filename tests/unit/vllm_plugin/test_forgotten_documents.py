"""What the controller makes of documents that are to be forgotten: where they are, who has them, and what is left."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ragcache_core.tree import check_invariants
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController
from ragcache_core.vllm_plugin.cache.forgetting import Forgotten, Freed, OutOfReach
from ragcache_core.vllm_plugin.chunks.private_hashes import private_hashes
from ragcache_core.wire import RequestMetadata

from .scene import BLOCK, controller, keys, run, segments


class Shelf:
    """A tier that keeps every block it is given, and lets some go late."""

    def __init__(self, it: CacheController, tier: Tier) -> None:
        self.it, self.tier = it, tier
        self.late = 0
        self.why: str | None = None
        self.seen: list[Forgotten] = []
        it.forgetting.add_holder(self)

    def put(self, block_keys: Sequence[bytes]) -> None:
        for key in block_keys:
            at = self.it.tree.locate(key)
            assert at is not None
            self.it.tree.add(at.node, 1 << at.unit, self.tier)

    def forget(self, forgotten: Forgotten) -> Freed:
        self.seen.append(forgotten)
        num_blocks = 0
        for key in forgotten.units:
            at = self.it.tree.locate(key)
            assert at is not None
            num_blocks += self.it.tree.resident_mask(at.node, self.tier) >> at.unit & 1
            self.it.tree.remove(at.node, 1 << at.unit, self.tier)
        return Freed({self.tier: num_blocks}, {self.tier: 100 * num_blocks})

    def num_pending(self) -> int:
        return self.late

    def deletion_problem(self) -> str | None:
        return self.why


def test_a_document_is_found_wherever_it_stands_and_what_is_before_it_stays() -> None:
    it = controller()
    gpu, disk = Shelf(it, Tier.GPU), Shelf(it, Tier.DISK)
    one, other, alone = keys(6, "one"), [*keys(1, "one"), *keys(4, "two")], keys(3, "c")
    for documents, own in (
        (segments(("", 4), ("a", 12), ("b", 20), (None, 24)), one),
        (segments(("", 4), ("b", 12), ("a", 20)), other),
        (segments(("c", 12)), alone),
    ):
        run(it, "r", documents, own)
        gpu.put(own)
    disk.put([*one[:4], *alone])
    receipt = it.forget({"b", "unknown"})
    assert receipt == {
        "forgotten": ["b"],
        "num_paths": 2,
        "num_variants": 0,
        "num_blocks": {"gpu": 3 + 4, "disk": 1},
        "num_bytes": {"gpu": 700, "disk": 100},
    }
    assert set(gpu.seen[0].units) == {*one[3:], *other[1:]}
    check_invariants(it.tree)
    assert it.tree.tiers[Tier.GPU].num_units == 3 + 3
    assert {node.doc_id for node in it.tree.nodes()} == {None, "a", "c"}, "the others are not in use"
    assert "b" not in {row["doc_id"] for row in it.document_uses.hottest()}
    assert it.forget({"b"})["num_blocks"] == {"gpu": 0, "disk": 0}


@pytest.mark.parametrize("name", ["short", "shorter"])
def test_a_document_that_ends_in_the_block_in_which_it_begins_is_found_by_that_block(name: str) -> None:
    it = controller()
    gpu = Shelf(it, Tier.GPU)
    prompt = keys(5)
    run(it, "r", segments(("", 4), ("a", 9), ("short", 10), ("shorter", 11), (None, 20)), prompt)
    gpu.put(prompt)
    receipt = it.forget({name})
    assert (receipt["forgotten"], receipt["num_paths"]) == ([name], 1)
    assert gpu.seen[0].units == prompt[2:], "the block that has it, and what stands on it"


def test_one_in_the_last_block_which_an_answer_fills_is_found_there() -> None:
    it = controller()
    gpu = Shelf(it, Tier.GPU)
    grown = keys(4)
    metadata = RequestMetadata(segments(("", 5), ("short", 7)))
    it.on_new_request("r", metadata, grown[:1], 7, 0.0)
    it.on_admitted("r", grown[:1], {}, 0.0)
    for index in range(4):
        it.locate_block(grown, index, "r")
    it.on_finished("r")
    gpu.put(grown)
    assert it.forget({"short"})["forgotten"] == ["short"]
    assert gpu.seen[0].units == grown[1:], "the prefix before it stays"


def test_the_same_tokens_under_two_ids_are_the_document_of_both() -> None:
    for wanted in ("a", "copy"):
        it = controller()
        gpu = Shelf(it, Tier.GPU)
        for request_id, name in (("r1", "a"), ("r2", "copy"), ("r3", "a")):
            run(it, request_id, segments(("", 4), (name, 12)), keys(3))
        gpu.put(keys(3))
        assert it.forget({wanted})["forgotten"] == [wanted]
        assert gpu.seen[0].units == keys(3)[1:]


def test_a_document_with_a_new_name_in_every_request_keeps_a_bounded_list_of_names() -> None:
    it = controller()
    for number in range(100):
        run(it, "r", segments((f"copy {number}", 8)), keys(2))
    (node,) = it.tree.nodes()
    assert len(node.other_ids) == 32
    assert it.forget({"copy 0"})["forgotten"] == ["copy 0"]


def test_requests_in_the_engine_keep_theirs_and_share_none_of_it_any_more() -> None:
    it = controller()
    gpu, stored = Shelf(it, Tier.GPU), {}
    it.forgetting.store_at_most = stored.__setitem__
    prompt = keys(6)
    for request_id, document in (("has it", "b"), ("by another id", "copy of b"), ("has none", "c")):
        own = prompt if document != "c" else [*prompt[:2], *keys(4, "c")]
        parts = segments(("", 4), ("a", 8), (document, 16), (None, 24))
        it.on_new_request(request_id, RequestMetadata(parts), own, 24, 0.0)
        it.on_admitted(request_id, own, {}, 0.0)
    it.on_new_request("not computed", RequestMetadata(segments(("b", 3), (None, 7))), keys(1, "x"), 7, 0.0)
    it.forget({"b"})
    assert gpu.seen[0].requests == {"has it": 2, "by another id": 2, "not computed": 0}
    assert stored == {"has it": 2 * BLOCK, "by another id": 2 * BLOCK, "not computed": 0}
    assert {name: it.state_of(name).first_private for name in ("has it", "has none")} == {  # type: ignore[union-attr]
        "has it": 2,
        "has none": None,
    }
    assert it.forgetting.left()["num_requests"] == 3
    it.on_new_request("after", RequestMetadata(segments(("", 4), ("a", 8), ("b", 16))), prompt[:4], 16, 0.0)
    assert it.state_of("after").first_private is None, "what is computed from now on is nothing that was forgotten"  # type: ignore[union-attr]
    for request_id in ("has it", "by another id", "has none", "not computed", "after"):
        it.on_finished(request_id)
    assert it.forgetting.left() == {"num_requests": 0, "num_blocks": 0, "problems": []}
    check_invariants(it.tree)


def test_pending_blocks_are_reported_until_the_last_holder_deletes_them() -> None:
    it = controller()
    shelves = Shelf(it, Tier.HOST), Shelf(it, Tier.DISK)
    run(it, "r", segments(("a", 8)), keys(2))
    shelves[0].late, shelves[1].why = 3, "the disk is out of service"
    it.forget({"a"})
    it.forgetting.sweep()
    assert it.forgetting.left() == {"num_requests": 0, "num_blocks": 3, "problems": ["the disk is out of service"]}
    it.forgetting.remove_holder(shelves[1])
    it.forgetting.add_holder(OutOfReach("no disk was there at the start"))
    it.forget({"a"})
    assert it.forgetting.left()["problems"] == ["no disk was there at the start"]
    it.forgetting.remove_holder(OutOfReach("no disk was there at the start"))
    shelves[0].late = 0
    it.forgetting.sweep()
    assert it.forgetting.left() == {"num_requests": 0, "num_blocks": 0, "problems": []}


def test_what_chunk_reuse_made_of_a_document_is_forgotten_with_it() -> None:
    """Those of a request that has ended, and those that one in the engine would have left."""
    it = controller()
    gpu, exact = Shelf(it, Tier.GPU), keys(6)
    apart = private_hashes(exact, 1, b"same")
    parts = segments(("", 4), ("a", 12), ("b", 20), (None, 24))
    for request_id in ("ended", "there"):
        it.on_new_request(request_id, RequestMetadata(parts), exact, 24, 0.0)
        it.on_admitted(request_id, exact, {}, 0.0)
        it.on_approximated(request_id, 1, apart)
        gpu.put([key for key in apart if not it.is_on_gpu(key)])
    it.on_finished("ended")
    it.forget({"b"})
    assert gpu.seen[0].requests == {"there": 1}
    assert apart[3] in gpu.seen[0].units
    assert [it.is_on_gpu(key) for key in apart] == [True, False, False, False, False, False]
    state = it.state_of("there")
    assert state is not None
    assert (state.first_private, list(state.apart)) == (1, [])
    it.on_approximated("there", 0, private_hashes(exact, 0, b"same"))
    assert list(state.apart) == [], "it is given up for good"
    it.on_finished("there")
    check_invariants(it.tree)


def test_what_may_have_been_made_of_a_document_elsewhere_is_forgotten_with_it() -> None:
    """A variant of ``a`` behind ``b`` was reused behind ``c``: the place does not say so."""
    it = controller()
    gpu, exact = Shelf(it, Tier.GPU), keys(6)
    apart = private_hashes(exact, 3, b"same")
    it.on_new_request("one", RequestMetadata(segments(("", 4), ("c", 12), ("a", 20), (None, 24))), exact, 24, 0.0)
    it.on_admitted("one", exact, {}, 0.0)
    it.on_approximated("one", 3, apart)
    gpu.put(apart)
    it.on_finished("one")
    it.forgetting.forget_nodes([])
    assert all(map(it.is_on_gpu, apart)), "nothing was forgotten"
    it.forget({"b"})
    assert [it.is_on_gpu(key) for key in apart] == [True, True, True, False, False, False]
    check_invariants(it.tree)


def test_derived_blocks_are_deleted_with_their_too_old_source() -> None:
    it = controller()
    gpu, apart = Shelf(it, Tier.GPU), private_hashes(keys(6), 1, b"same")
    it.on_new_request("one", RequestMetadata(segments(("a", 12), (None, 24))), keys(6), 24, 0.0)
    it.on_admitted("one", keys(6), {}, 0.0)
    it.on_approximated("one", 1, apart)
    gpu.put(apart)
    it.forgetting.forget_approximate()
    assert [it.is_on_gpu(key) for key in apart] == [True, False, False, False, False, False]
    assert not it.state_of("one").apart  # type: ignore[union-attr]  # it is there
    it.on_finished("one")
    check_invariants(it.tree)
