"""Pins where tenants share the engine: an operator pins ids, and who has documents of these ids pays for his own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.hints import CacheHints
from ragcache_core.tree import TreeNode, check_invariants
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController, TierReport
from ragcache_core.wire import RequestMetadata
from tests.unit.vllm_plugin.scene import BLOCK, answer_of, controller, keys, segments

UNIT_BYTES = 100


@pytest.fixture
def it(tmp_path: Path) -> CacheController:
    return controller_of_tenants(tmp_path, pinned_share=0.5)


def controller_of_tenants(tmp_path: Path, **settings: Any) -> CacheController:
    """A GPU of 40 blocks. Of a half, 5 are of a's share of 10, 2 of b's quota of 4, and 13 of the rest."""
    path = tmp_path / "tenants.toml"
    path.write_text(
        f'[[tenants]]\nname = "a"\nkeys = ["{"a" * 16}"]\n'
        f'[[tenants]]\nname = "b"\nkeys = ["{"b" * 16}"]\nquota = {{gpu = {4 * UNIT_BYTES}}}\n'
        "[operators]\nweight = 2\n"
    )
    tiers = {Tier.GPU: TierReport(40 * UNIT_BYTES, UNIT_BYTES)}
    return controller(tiers=tiers, tenants=path, **settings)


def ask(it: CacheController, mark: str, doc_id: str, num_blocks: int, tenant: str | None = None, **hints: Any) -> None:
    """Ask about a document of its own first block, and have it on the GPU."""
    end = num_blocks * BLOCK
    block_keys = keys(num_blocks, f"{tenant} {mark}")
    metadata = RequestMetadata(segments((doc_id, end)), hints=CacheHints(**hints))
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


def test_the_highest_priority_of_a_tenant_takes_nothing_of_what_others_retain(tmp_path: Path) -> None:
    it = controller_of_tenants(tmp_path, retained_share=0.5)
    ask(it, "own", "terms", 4, retain_s=60)
    ask(it, "b", "terms", 2, tenant="b", retain_s=60)
    for number in range(9):
        ask(it, f"flood {number}", "terms", 2, tenant="a", priority=9)
    assert pinned(it) == {None: 4, "a": 4, "b": 2}
    assert it.report()["num_retained_tokens"] == 10 * BLOCK
    assert it.report()["num_rejected_hints"] == 7
    it.tick(it.tree.now_s + 61)
    assert pinned(it) == {"a": 4}


def ask_about(it: CacheController, chain: str, *documents: tuple[str, int], is_cached: bool = True) -> None:
    """Ask a prompt whose blocks are the beginnings of a text, over documents with the blocks in which they end."""
    block_keys = [chain[: end + 1].encode() for end in range(len(chain))]
    parts = segments(*((doc_id, end * BLOCK) for doc_id, end in documents))
    it.on_new_request("r", RequestMetadata(parts), block_keys, parts[-1].end, 1.0)
    for key in block_keys if is_cached else ():
        at = it.tree.locate(key)
        assert at is not None
        it.tree.add(at.node, 1 << at.unit, Tier.GPU)
    it.on_admitted("r", block_keys, {}, 1.0)
    it.on_finished("r")


def operator_pins() -> CacheController:
    return controller(tiers={Tier.GPU: TierReport(100_000 * UNIT_BYTES, UNIT_BYTES)}, pinned_share=0.5)


def test_what_is_counted_of_pins_is_what_is_protected_however_paths_are_cut_and_forgotten() -> None:
    dice = Random(7)
    it = operator_pins()
    for _ in range(400):
        match dice.choice(("ask", "ask", "ask", "pin", "unpin", "forget")):
            case "ask":
                chain = "".join(dice.choices("xy", k=dice.randrange(1, 7)))
                middle = dice.randrange(1, len(chain) + 1)
                ask_about(it, chain, (dice.choice("abc"), middle), (dice.choice("abc"), len(chain)))
            case "pin":
                answer_of(it.pin([dice.choice("abc")]))
            case "unpin":
                answer_of(it.unpin([dice.choice("abc")]))
            case _:
                it.forget({dice.choice("abc")})
        assert it.pins.num_units == pinned(it).get(None, 0)
        check_invariants(it.tree, is_connected=False)
    answer_of(it.unpin("abc"))
    assert (it.pins.num_units, pinned(it), it.tree.protected_keys) == (0, {}, {})


def test_a_new_pinned_path_costs_the_same_however_many_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    for num_pinned in (10, 3000):
        it = operator_pins()
        for number in range(num_pinned):
            ask_about(it, f"{number:04}", (f"d{number}", 4))
        answer_of(it.pin([*(f"d{number}" for number in range(num_pinned)), "new"]))
        assert it.pins.num_units == pinned(it)[None]
        num_looked_at = 0
        path = TreeNode.path

        def counted(node: TreeNode, path: Callable[[TreeNode], list[TreeNode]] = path) -> list[TreeNode]:
            nonlocal num_looked_at
            num_looked_at += 1
            return path(node)

        monkeypatch.setattr(TreeNode, "path", counted)
        ask_about(it, "new", ("new", 3))
        monkeypatch.setattr(TreeNode, "path", path)
        assert it.pins.num_units == pinned(it)[None]
        costs.append(num_looked_at)
    assert costs[0] == costs[1]


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_speculation_retains_what_it_left_once_it_is_confirmed(ends_first: bool) -> None:
    it = operator_pins()
    block_keys = keys(4)
    metadata = RequestMetadata(segments(("a", 4 * BLOCK)), "guess", hints=CacheHints(retain_s=60))
    it.on_new_request("r", metadata, block_keys, 4 * BLOCK, 1.0)
    it.on_admitted("r", block_keys, {}, 1.0)
    for confirms in (ends_first, not ends_first):
        assert pinned(it) == {}
        if confirms:
            it.on_finished("r")
        else:
            it.confirm("guess")
    assert pinned(it) == {None: 4}
