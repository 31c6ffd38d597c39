"""Pins where tenants share the engine: an operator pins ids, and who has documents of these ids pays for his own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController, TierReport
from ragcache_core.wire import RequestMetadata
from tests.unit.vllm_plugin.scene import BLOCK, answer_of, controller, keys, segments

UNIT_BYTES = 100


@pytest.fixture
def it(tmp_path: Path) -> CacheController:
    """A GPU of 40 blocks, of which pins may have half: 5 of a's share of 10, 2 of b's quota of 4, 13 of the rest."""
    path = tmp_path / "tenants.toml"
    path.write_text(
        f'[[tenants]]\nname = "a"\nkeys = ["{"a" * 16}"]\n'
        f'[[tenants]]\nname = "b"\nkeys = ["{"b" * 16}"]\nquota = {{gpu = {4 * UNIT_BYTES}}}\n'
        "[operators]\nweight = 2\n"
    )
    tiers = {Tier.GPU: TierReport(40 * UNIT_BYTES, UNIT_BYTES)}
    return controller(tiers=tiers, tenants=path, pinned_share=0.5)


def ask(it: CacheController, mark: str, doc_id: str, num_blocks: int, tenant: str | None = None) -> None:
    """Ask about a document of its own first block, and have it on the GPU."""
    end = num_blocks * BLOCK
    block_keys = keys(num_blocks, f"{tenant} {mark}")
    metadata = RequestMetadata(segments((doc_id, end)))
    it.on_new_request(mark, metadata, block_keys, end, 1.0, tenant=tenant)
    at = it.tree.locate(block_keys[0])
    assert at is not None
    it.tree.add(at.node, at.node.full_mask, Tier.GPU)
    it.on_admitted(mark, block_keys, {}, 1.0)
    it.on_finished(mark)


def pinned(it: CacheController) -> dict[str | None, int]:
    found: dict[str | None, int] = {}
    for node in it.tree.nodes():
        if it.tree.is_protected(node):
            found[node.owner] = found.get(node.owner, 0) + len(node.keys)
    return found


def test_a_tenant_who_names_pinned_ids_takes_nothing_of_what_the_operator_may_pin(it: CacheController) -> None:
    ask(it, "own", "terms", 4)
    answer_of(it.pin(["terms"]))
    for number in range(9):
        ask(it, f"flood {number}", "terms", 2, tenant="a")
        ask(it, f"small {number}", "terms", 1, tenant="b")
    assert pinned(it) == {None: 4, "a": 4, "b": 2}
    ask(it, "more", "prices", 6)
    receipt = answer_of(it.pin(["prices"]))
    assert pinned(it)[None] == 10
    assert (receipt["num_bytes"], receipt["limit_bytes"]) == (10 * UNIT_BYTES, 13 * UNIT_BYTES)
    ask(it, "too many", "rules", 4)
    with pytest.raises(ConfigError, match="and the limit is"):
        answer_of(it.pin(["rules"]))


def test_paths_of_tenants_do_not_keep_an_operator_from_pinning_and_are_pinned_as_far_as_they_may(
    it: CacheController,
) -> None:
    for number in range(9):
        ask(it, f"flood {number}", "terms", 2, tenant="a")
    ask(it, "own", "terms", 4)
    answer_of(it.pin(["terms"]))
    assert pinned(it) == {None: 4, "a": 4}
    answer_of(it.unpin(["terms"]))
    assert pinned(it) == {}
