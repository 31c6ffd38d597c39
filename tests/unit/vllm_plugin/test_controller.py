"""What the engine's controller tells of requests, tiers and documents; no vLLM here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from ragcache_core.policy import PrefillCostModel, make_policy
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController, TierReport
from ragcache_core.wire import RequestMetadata
from tests.unit.vllm_plugin.scene import controller, keys, run, segments


def test_a_requests_figures_say_where_its_tokens_came_from_and_how_long_it_waited() -> None:
    it = controller()
    parts = segments(("a", 8), ("b", 16), (None, 18))
    it.on_new_request("r", RequestMetadata(parts), keys(4), 18, 10.0)
    it.on_admitted("r", keys(4), {Tier.GPU: 4, Tier.HOST: 8}, 10.25)
    it.on_loaded("r", 2000)
    it.on_stored("r", 300)
    it.on_stored("r", 30)
    it.on_first_token("r", 11.0)
    assert it.on_finished("r") == {
        "num_gpu_tokens": 4,
        "num_host_tokens": 8,
        "num_disk_tokens": 0,
        "num_shared_tokens": 0,
        "num_loaded_bytes": 2000,
        "num_stored_bytes": 330,
        "queue_s": 0.25,
        "load_s": None,
        "ttft_s": 1.0,
        "is_speculative": False,
        "is_confirmed": False,
        "num_prompt_tokens": 18,
        "documents": [{"id": "a", "start": 0, "end": 8}, {"id": "b", "start": 8, "end": 16}],
    }
    report = it.report()
    assert (report["num_requests"], report["num_prompt_tokens"]) == (1, 18)
    assert (report["num_loaded_bytes"], report["num_stored_bytes"]) == (2000, 330)


def test_a_request_that_was_abandoned_while_it_waited_has_no_times_and_is_not_counted() -> None:
    it = controller()
    it.on_new_request("r", RequestMetadata(segments((None, 9))), keys(2), 9, 10.0)
    figures = it.on_finished("r")
    assert figures is not None
    assert figures["queue_s"] is figures["ttft_s"] is None
    assert it.report()["num_requests"] == 0
    assert it.is_idle


def test_a_preempted_request_is_counted_once() -> None:
    it = controller()
    parts = segments(("a", 8), (None, 10))
    it.on_new_request("r", RequestMetadata(parts), keys(2), 10, 10.0)
    it.on_admitted("r", keys(2), {Tier.DISK: 8}, 10.5)
    it.on_first_token("r", 11.0)
    it.on_admitted("r", keys(2), {Tier.GPU: 8}, 12.0)
    it.on_first_token("r", 13.0)
    figures = it.on_finished("r")
    assert figures is not None
    assert (figures["num_gpu_tokens"], figures["num_disk_tokens"], figures["ttft_s"]) == (0, 8, 1.0)
    assert it.report()["num_requests"] == 1
    (node,) = [node for node in it.tree.nodes() if node.doc_id == "a"]
    assert node.frequency == 1


def test_what_of_a_prompt_lies_where_is_counted_without_a_gap() -> None:
    it = controller()
    parts = segments(("a", 8), ("b", 24), (None, 26))
    it.on_new_request("r", RequestMetadata(parts), keys(6), 26, 10.0)
    a, b = (next(node for node in it.tree.nodes() if node.doc_id == name) for name in "ab")
    last = it.last_known([*keys(6), b"unknown"])
    assert last == keys(6)[-1]
    assert it.leading_blocks(last) == it.leading_blocks(it.last_known([b"unknown"])) == (0, 0, 0)
    it.tree.add(a, 0b11, Tier.DISK)
    it.tree.add(a, 0b01, Tier.GPU)
    assert it.leading_blocks(last) == (1, 1, 2)
    it.tree.add(b, 0b0011, Tier.HOST)
    assert it.leading_blocks(last) == (1, 1, 4)
    it.tree.add(a, 0b10, Tier.HOST)
    assert it.leading_blocks(last) == (1, 4, 4), "host memory has it all"
    it.tree.add(b, 0b1000, Tier.DISK)
    assert it.leading_blocks(last) == (1, 4, 4), "without what is before it, a block is of no use"
    it.tree.add(b, 0b0100, Tier.DISK)
    assert it.leading_blocks(last) == (1, 4, 6)
    assert it.leading_blocks(keys(6)[2]) == (1, 3, 3), "of what ends amid a document"


def test_what_cached_blocks_save_is_what_the_prefill_takes_longer_without_them() -> None:
    it = controller()
    cost = PrefillCostModel.default()
    it.on_new_request("r", RequestMetadata(segments((None, 26))), keys(6), 26, 10.0)
    state = it.state_of("r")
    assert state is not None
    assert it.saved_s(state, 1, 3) == cost.estimate_s(4, 22) - cost.estimate_s(16, 10)
    it.on_new_request("whole", RequestMetadata(segments((None, 24))), keys(6, "w"), 24, 10.0)
    whole = it.state_of("whole")
    assert whole is not None
    assert it.saved_s(whole, 0, 6) == cost.estimate_s(0, 24) - cost.estimate_s(24, 1), "a token is always computed"


def test_a_speculation_counts_as_a_request_only_once_confirmed() -> None:
    it = controller()
    metadata = RequestMetadata(segments(("a", 8), (None, 10)), "s", True)
    counted = ("num_requests", "num_prompt_tokens", "num_reordered_prompts")

    def counts() -> list[object]:
        return [it.report()[name] for name in counted]

    for request_id in ("ended", "running", "waiting"):
        it.on_new_request(request_id, metadata, keys(2), 10, 10.0)
    it.on_admitted("ended", keys(2), {Tier.GPU: 4}, 10.5)
    it.on_admitted("running", keys(2), {Tier.GPU: 4}, 10.5)
    it.on_finished("ended")
    assert counts() == [0, 0, 0]
    it.confirm("s")
    assert counts() == [2, 20, 2]
    it.on_admitted("waiting", keys(2), {}, 11.0)
    it.on_admitted("running", keys(2), {}, 11.0)
    assert counts() == [3, 30, 3]


@pytest.mark.parametrize("policy", ["pgdsf", "mixture"])
def test_a_document_is_charged_as_the_policy_says(policy: str) -> None:
    it = controller(policy=policy)
    it.on_new_request("r", RequestMetadata(segments(("a", 8), (None, 10))), keys(2), 10, 10.0)
    it.on_admitted("r", keys(2), {Tier.GPU: 4}, 10.5)
    it.on_finished("r")
    (node,) = [node for node in it.tree.nodes() if node.doc_id == "a"]
    expected_s = make_policy(policy).cost_per_token_s(PrefillCostModel.default(), 4, 6)
    assert node.avg_cost_s == pytest.approx(expected_s)


@pytest.mark.parametrize("is_confirmed_early", [True, False])
def test_a_prefill_that_was_right_pays_and_the_request_that_it_was_for_counts_once(is_confirmed_early: bool) -> None:
    it = controller()
    parts = segments(("a", 8), (None, 10))
    it.on_new_request("guess", RequestMetadata(parts, "wrong", is_prefill=True), keys(2), 10, 10.0)
    it.on_admitted("guess", keys(2), {}, 10.5)
    it.on_finished("guess")
    (node,) = [node for node in it.tree.nodes() if node.doc_id == "a"]
    assert (node.frequency, node.num_computed) == (0, 0)
    if is_confirmed_early:
        it.confirm("s")
    it.on_new_request("warm", RequestMetadata(parts, "s", is_prefill=True), keys(2), 10, 10.0)
    it.on_admitted("warm", keys(2), {}, 10.5)
    it.confirm("s")
    it.on_finished("warm")
    assert (node.frequency, node.num_computed) == (0, 1)
    paid_s = node.avg_cost_s
    assert paid_s > 0
    assert (it.report()["num_requests"], it.report()["hottest_documents"]) == (0, [])
    it.on_new_request("r", RequestMetadata(parts, is_reordered=True), keys(2), 10, 11.0)
    it.on_admitted("r", keys(2), {Tier.GPU: 8}, 11.5)
    it.on_finished("r")
    assert (node.frequency, node.num_computed, node.avg_cost_s) == (1, 1, paid_s)
    report: Any = it.report()
    assert (report["num_requests"], report["num_prompt_tokens"], report["num_reordered_prompts"]) == (1, 10, 1)
    assert [document["frequency"] for document in report["hottest_documents"]] == [1]


def test_a_prefill_by_forecast_seeds_uses_and_cost_and_counts_nothing() -> None:
    it = controller()
    parts = segments(("", 4), ("a", 12), ("b", 18))
    it.on_new_request("first", RequestMetadata(parts[:2], "s1", is_prefill=True, expected_uses=30), keys(3), 12, 10.0)
    it.on_admitted("first", keys(3), {}, 10.5)
    it.on_finished("first")
    it.on_new_request("next", RequestMetadata(parts, "s2", is_prefill=True, expected_uses=20), keys(4), 18, 11.0)
    it.on_admitted("next", keys(4), {Tier.GPU: 12}, 11.5)
    it.on_speculated("next", 6)
    it.on_finished("next")
    uses = {node.doc_id: (node.frequency, node.num_computed) for node in it.tree.nodes()}
    assert uses == {None: (30, 1), "a": (30, 1), "b": (20, 1)}
    assert all(node.avg_cost_s > 0 for node in it.tree.nodes())
    report: Any = it.report()
    assert (report["num_requests"], report["hottest_documents"], it.tree.num_requests) == (0, [], 0)
    assert (report["num_speculative_tokens"], report["num_wasted_tokens"]) == (6, 0), "it is no guess"


def test_a_new_or_preempted_speculation_waits_until_it_is_confirmed() -> None:
    it = controller()
    it.on_new_request("s", RequestMetadata(segments((None, 10)), "s"), keys(2), 10, 10.0)
    it.on_new_request("real", RequestMetadata(segments((None, 10))), keys(2), 10, 10.0)
    it.on_admitted("s", keys(2), {}, 10.5)
    it.on_admitted("s", keys(2), {}, 12.0)  # its blocks were loaded until then
    assert it.speculations.take_waited_s() == {"s": (0.5, None)}
    it.on_preempted("s", 13.0)
    assert it.speculations.take_waited_s() == {}
    it.on_admitted("s", keys(2), {}, 15.0)
    assert it.speculations.take_waited_s() == {"s": (2.5, None)}
    it.confirm("s")
    it.on_preempted("s", 16.0)
    it.on_admitted("s", keys(2), {}, 17.0)
    for request_id in ("real", "real", "s"):
        it.on_admitted(request_id, keys(2), {}, 18.0)
        it.on_preempted(request_id, 18.0)
    assert it.speculations.take_waited_s() == {}, "a real request's pauses are no search's"


def test_a_report_is_plain_json() -> None:
    it = controller(tiers={Tier.GPU: TierReport(2000, 50)})
    it.add_tier(Tier.DISK, TierReport(4000, 100, is_enabled=False))
    run(it, "r", segments(("a", 8), (None, 10)), keys(2), {Tier.GPU: 4})
    location = it.tree.locate(b"0")
    assert location is not None
    it.tree.add(location.node, 0b11, Tier.GPU)
    report = json.loads(json.dumps(it.report()))
    assert report["tiers"] == [
        {
            "name": "gpu",
            "capacity_bytes": 2000,
            "used_bytes": 100,
            "num_blocks": 2,
            "num_evicted_blocks": 0,
            "num_hit_tokens": 4,
            "is_enabled": True,
            "num_corrupt_blocks": 0,
            "num_dropped_blocks": 0,
        },
        {
            "name": "disk",
            "capacity_bytes": 4000,
            "used_bytes": 0,
            "num_blocks": 0,
            "num_evicted_blocks": 0,
            "num_hit_tokens": 0,
            "is_enabled": False,
            "num_corrupt_blocks": 0,
            "num_dropped_blocks": 0,
        },
    ]
    assert report["hottest_documents"] == [{"doc_id": "a", "frequency": 1, "num_tokens": 8, "tiers": ["gpu"]}]


def test_the_hottest_documents_are_the_ten_most_used_wherever_they_stood() -> None:
    it = controller()
    for i in range(12):
        for turn in range(i + 1):
            run(it, f"{i} {turn}", segments((f"d{i}", 8), (None, 9)), keys(2, f"{i} after {turn % 2} "))
    listed: Any = it.report()["hottest_documents"]
    assert [document["doc_id"] for document in listed] == [f"d{i}" for i in range(11, 1, -1)]
    assert [document["frequency"] for document in listed] == list(range(12, 2, -1))


def test_a_document_lies_in_the_tiers_that_hold_any_part_of_it() -> None:
    it = controller(tiers={Tier.HOST: TierReport(1000, 10)})
    run(it, "r", segments(("a", 16), (None, 17)), keys(4))
    run(it, "cut", segments(("a", 8), (None, 17)), [*keys(2), b"else", b"where"])
    last = it.tree.locate(keys(4)[3])
    assert last is not None
    it.tree.add(last.node, 1 << last.unit, Tier.HOST)
    run(it, "again", segments(("a", 16), (None, 17)), keys(4))
    (listed,) = cast("list[dict[str, object]]", it.report()["hottest_documents"])
    assert (listed["num_tokens"], listed["tiers"]) == (16, ["host"])


def put(it: CacheController, tier: Tier, *block_keys: bytes) -> None:
    for key in block_keys:
        at = it.tree.locate(key)
        assert at is not None
        it.tree.add(at.node, 1 << at.unit, tier)


def hottest(it: CacheController) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", it.report()["hottest_documents"])


def test_hot_documents_of_a_tenant_are_counted_from_its_own_kv(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text("".join(f'[[tenants]]\nname = "{name}"\nkeys = ["{name * 16}"]\n' for name in "xy"))
    it = controller(tiers={tier: TierReport(1000, 10) for tier in Tier}, tenants=file)
    for tier, tenant in zip(Tier, (None, "x", "y"), strict=True):
        own = keys(2, f"{tenant} ")
        it.on_new_request("r", RequestMetadata(segments(("a", 8))), own, 8, 1.0, tenant=tenant)
        it.on_admitted("r", own, {}, 1.0)
        it.on_finished("r")
        put(it, tier, *own)
    report: Any = it.report()
    assert report["hottest_documents"][0]["tiers"] == ["gpu"]
    assert [report["tenants"][name]["hottest_documents"][0]["tiers"] for name in "xy"] == [["host"], ["disk"]]


@pytest.mark.parametrize("is_all", [False, True])
def test_a_forgotten_document_is_not_listed_by_requests_that_began_before(is_all: bool) -> None:
    it = controller(tiers={tier: TierReport(1000, 10) for tier in Tier})
    parts = segments(("secret", 8), (None, 9))
    it.on_new_request("ended", RequestMetadata(parts, "s"), keys(2), 9, 1.0)
    it.on_admitted("ended", keys(2), {}, 1.0)
    it.on_finished("ended", 2.0)
    it.on_new_request("queued", RequestMetadata(parts), keys(2), 9, 1.0)
    it.forget_all() if is_all else it.forget({"secret"})
    it.confirm("s")
    it.on_admitted("queued", keys(2), {}, 3.0)
    it.on_finished("queued")
    assert hottest(it) == []
    assert it.report()["num_requests"] == 2, "they count all the same"
    run(it, "later", parts, keys(2))
    assert [use["doc_id"] for use in hottest(it)] == ["secret"], "asked about again, it is known again"


def test_a_million_documents_do_not_fill_the_memory_with_their_uses() -> None:
    it = controller(ghost_size=4)
    for i in range(3000):
        run(it, f"r{i}", segments((f"d{i}", 8), (None, 9)), keys(2, f"{i} "))
        run(it, f"hot{i}", segments(("hot", 8), (None, 9)), keys(2, "hot "))
    assert len(it.document_uses) <= 1024
    assert len(it.tree) < 20
    assert (hottest(it)[0]["doc_id"], hottest(it)[0]["frequency"]) == ("hot", 3000)
