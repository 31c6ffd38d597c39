"""Several data-parallel engines behind one server, which answers for all of them."""

from __future__ import annotations

from typing import Any

from ragcache_core.stats import merged_report
from ragcache_core.vllm_plugin.server.several_engines import joined_changes, merged_contents, merged_pins


def report(**figures: Any) -> dict[str, Any]:
    tier = {"name": "gpu", "capacity_bytes": 100, "num_hit_tokens": 32, "is_enabled": True}
    use = {"doc_id": "a", "frequency": 2, "num_tokens": 64, "tiers": ["host"]}
    return {
        "policy": "pgdsf",
        "num_requests": 3,
        "max_overtaken": 1,
        "tiers": [tier],
        "hottest_documents": [use],
        **figures,
    }


def test_figures_of_several_engines_add_up() -> None:
    disk = {"name": "disk", "capacity_bytes": 7, "num_hit_tokens": 0, "is_enabled": False}
    others = [
        {"doc_id": "b", "frequency": 9, "num_tokens": 32, "tiers": []},
        {"doc_id": "a", "frequency": 1, "num_tokens": 96, "tiers": ["gpu"]},
    ]
    second = report(num_requests=4, max_overtaken=0, hottest_documents=others, chunks={"num_chunks": 2, "is_on": False})
    second["tiers"] = [{**second["tiers"][0], "num_hit_tokens": 64, "is_enabled": False}, disk]
    merged = merged_report([report(chunks={"num_chunks": 1, "is_on": True}), second])
    assert merged == {
        "policy": "pgdsf",
        "num_requests": 7,
        "max_overtaken": 1,
        "chunks": {"num_chunks": 3, "is_on": False},
        "tiers": [{"name": "gpu", "capacity_bytes": 200, "num_hit_tokens": 96, "is_enabled": False}, disk],
        "hottest_documents": [others[0], {"doc_id": "a", "frequency": 3, "num_tokens": 96, "tiers": ["gpu", "host"]}],
    }
    assert merged_report([second]) is second


def test_cached_prefixes_of_engines_are_merged_and_complete_after_the_last_part() -> None:
    told = [
        {"cursor": "5f.2", "is_reset": True, "is_complete": True, "changes": [["00", ["a"], 32, True]]},
        {"cursor": "77.9", "is_reset": False, "is_complete": False, "changes": []},
    ]
    joined = joined_changes(told)
    assert joined["cursor"] == "5f.2-77.9"
    assert joined["is_complete"] is False
    assert joined["engines"] == [{"is_reset": t["is_reset"], "changes": t["changes"]} for t in told]
    assert joined_changes(told[:1])["is_complete"] is True


def document(doc_id: str, host: int, **figures: Any) -> dict[str, Any]:
    here = {"gpu": 0, "host": host, "disk": 5}
    zero = {"paths": 1, "tokens": 64, "variants": 0, "uses": 2, "saved_s": 0.5, "age_s": 7.0, "pinned": False}
    return {"id": doc_id, "bytes": here, **zero, **figures}


def test_a_document_that_several_engines_have_is_one_with_all_of_its_bytes() -> None:
    one = {"documents": [document("b", 60), document("a", 50, age_s=None, places=[{"behind": []}])], "total": 2}
    two = {"documents": [document("a", 40, pinned=True, tokens=96, places=[{"behind": ["b"]}])], "total": 9}
    merged = merged_contents([one, two], "bytes", 1)
    assert merged == {
        "documents": [
            {
                **document("a", 90, pinned=True, tokens=96, paths=2, uses=4, saved_s=1.0),
                "bytes": {"gpu": 0, "host": 90, "disk": 10},
                "places": [{"behind": []}, {"behind": ["b"]}],
            }
        ],
        "total": 9,
    }
    assert [each["id"] for each in merged_contents([one, two], "age", 5)["documents"]] == ["b", "a"]
    assert merged_contents([two], "bytes", 1) is two


def test_what_one_engine_has_is_pinned_in_all_and_known_to_the_server() -> None:
    one = {"changed": ["a"], "unknown": ["b", "c"], "num_pinned": 1, "num_bytes": 3, "limit_bytes": 10}
    two = {"changed": ["b"], "unknown": ["a", "c"], "num_pinned": 2, "num_bytes": 4, "limit_bytes": 10}
    receipt = merged_pins([one, two], ["a", "b", "c"])
    assert (receipt.changed, receipt.unknown) == (("a", "b"), ("c",))
    assert (receipt.num_pinned, receipt.num_bytes, receipt.limit_bytes) == (2, 7, 20)
