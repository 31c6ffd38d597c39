"""What salts keep from everybody else with the server's key: which documents were shown; and images, kept apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from ragcache_core.errors import ConfigError
from ragcache_core.runtime.tenants import cache_salt_for
from ragcache_core.tree import check_invariants
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.controller import TierReport
from tests.engine.vllm_plugin.scheduler_scene import Stage

SECRET = "contract-of-tenant-a"
SALT_SECRET = "z" * 32
BLOCK_BYTES = 128


def named(doc_id: str) -> dict[str, object]:
    return {"documents": [{"id": doc_id, "start": 0, "end": 160}]}


@pytest.mark.parametrize("is_speculative", [False, True])
def test_an_engine_reports_no_ids_of_documents_sent_with_a_salt(
    monkeypatch: pytest.MonkeyPatch, is_speculative: bool
) -> None:
    """All that the server's routes and series show arrives with the statistics of steps."""
    stage = Stage(settings={"max_prefill_bs": 4})
    told: list[Any] = []
    connector = stage.scheduler.connector
    take = connector.get_kv_connector_stats
    monkeypatch.setattr(connector, "get_kv_connector_stats", lambda: told.append(stats := take()) or stats)
    for turn in range(3):
        guess = f"guess-{turn}" if is_speculative else None
        stage.ask("A", salt="salt-of-tenant-a", metadata=named(SECRET), speculation=guess)
        stage.ask("B", metadata=named("handbook"))
        stage.finish_all()
        if guess is not None:
            stage.scheduler.confirm(guess)
    paths = stage.controller.paths_of(None).changes("")
    text = json.dumps([stage.controller.report(), paths, *(stats.data for stats in told if stats is not None)])
    assert stage.uses == {"handbook": 3}
    assert stage.controller.counters.num_requests == 6, "the figures count them all"
    assert text.count("handbook") > 1, "in a report and among the cached paths"
    assert SECRET not in text
    assert "salt-of-tenant-a" not in text


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    """Two tenants; the first may have 12 blocks of the GPU's 63."""
    path = tmp_path / "tenants.toml"
    path.write_text(
        f'secret = "{SALT_SECRET}"\n'
        f'[[tenants]]\nname = "a"\nkeys = ["{"a" * 16}"]\nquota = {{gpu = "{12 * BLOCK_BYTES}"}}\n'
        f'[[tenants]]\nname = "b"\nkeys = ["{"b" * 16}"]\n'
    )
    return path


def test_tenants_see_only_themselves_and_stay_within_quota(tenants: Path) -> None:
    stage = shared(tenants)
    for turn in range(3):
        for tenant in "ab":
            for doc in "XYZ":
                ask(stage, tenant, doc)
                stage.finish_all()
                ask(stage, tenant, doc, salt="own")
                stage.finish_all()
        stage.ask("W")
        stage.finish_all()
        shares = stage.controller.tree.tiers[Tier.GPU].shares
        assert shares.owned["a"] <= 12, turn
    check_invariants(stage.controller.tree)
    report: Any = stage.controller.report()
    assert {use["doc_id"] for use in report["hottest_documents"]} == {"W"}
    for tenant in "ab":
        own = report["tenants"][tenant]
        assert own["num_requests"] == 18
        assert {use["doc_id"]: use["frequency"] for use in own["hottest_documents"]} == {
            f"{doc} of {tenant}": 3 for doc in "XYZ"
        }, "those of a salt of its own are in no report"
    tier = report["tenants"]["a"]["tiers"][0]
    assert (tier["num_blocks"], tier["num_evicted_blocks"] > 0) == (shares.owned["a"], True)
    assert tier["capacity_bytes"] == 12 * BLOCK_BYTES
    paths = [json.dumps(stage.scheduler.cached_paths("", tenant)) for tenant in (None, "a", "b")]
    for tenant, told in zip(("W", "a", "b"), paths, strict=True):
        assert all((f"of {other}" in told) == (other == tenant) for other in "ab")


def test_after_a_purge_a_tenant_sees_no_document(tenants: Path) -> None:
    stage = shared(tenants)
    ask(stage, "a", "X")
    stage.finish_all()
    stage.controller.forget_all()
    report: Any = stage.controller.report()
    assert report["tenants"]["a"]["hottest_documents"] == []
    assert "X of a" not in json.dumps([stage.scheduler.recent_requests(9), stage.scheduler.cached_paths("", "a")])
    assert not any(stage.controller.tree.tiers[Tier.GPU].shares.owned.values())


def test_a_tenants_flood_evicts_no_other_tenant(tenants: Path) -> None:
    stage = shared(tenants)
    ask(stage, "a", "X")
    stage.finish_all()
    for i in range(30):
        ask(stage, "b", chr(200 + i))
        stage.finish_all()
    warm = ask(stage, "a", "X")
    stage.step()
    state = stage.controller.state_of(warm)
    assert state is not None
    assert state.num_cached_tokens == 160
    stage.finish_all()
    cold = ask(stage, "b", "X")
    stage.step()
    state = stage.controller.state_of(cold)
    assert state is not None
    assert state.num_cached_tokens == 0, "the same tokens"


def shared(tenants: Path, num_blocks: int = 64) -> Stage:
    """Return an engine that tenants share, whose blocks have a size."""
    stage = Stage(num_blocks=num_blocks, settings={"tenants": str(tenants)})
    stage.controller.add_tier(Tier.GPU, TierReport(num_blocks * BLOCK_BYTES, BLOCK_BYTES))
    return stage


def ask(stage: Stage, tenant: str, doc: str, salt: str | None = None) -> str:
    """Ask as a server does for who has a tenant's key."""
    metadata = {"documents": [{"id": f"{doc} of {tenant}", "start": 0, "end": 160}]}
    return stage.ask(doc, salt=cache_salt_for(tenant, salt, secret=SALT_SECRET), metadata=metadata, question=1)


def test_a_beam_search_counts_for_its_tenant(tenants: Path) -> None:
    """vLLM makes its own requests: of what the server has added they have the salt alone."""
    stage = shared(tenants)
    for salt in (cache_salt_for("a"), cache_salt_for("a", "own")):
        stage.ask("X", salt=salt)
        stage.finish_all()
    owned = stage.controller.tree.tiers[Tier.GPU].shares.owned
    assert set(owned) == {"a"}
    stage.ask("W")
    stage.finish_all()
    assert owned["a"] <= 12, "the quota"


def test_an_own_salt_or_that_of_an_unknown_tenant_has_no_owner(tenants: Path) -> None:
    stage = shared(tenants)
    for salt in (None, "s", "tenant-a-b", cache_salt_for("who")):
        stage.ask("X", salt=salt)
    stage.finish_all()
    assert set(stage.controller.tree.tiers[Tier.GPU].shares.owned) == {None}


def test_a_collection_stays_within_its_quota_also_on_shared_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "collections.toml"
    path.write_text(
        f'[[collections]]\nname = "news"\nids = ["[A-M]"]\nquota = {{gpu = "{12 * BLOCK_BYTES}"}}\n'
        '[[collections]]\nname = "terms"\nids = ["T"]\n'
    )
    stage = shared(path)
    shares = stage.controller.tree.tiers[Tier.GPU].shares
    for turn in range(6):
        for documents in ("TA", "BCD", "XE", "FT"):
            for asked in (documents, "W"):
                stage.ask(asked)
                stage.finish_all()
            assert shares.owned["news"] <= 12, (turn, documents)
    check_invariants(stage.controller.tree)
    assert shares.owned["terms"] > 0
    report: Any = stage.controller.report()
    tier = report["collections"]["news"]["tiers"][0]
    assert (tier["num_blocks"], tier["capacity_bytes"]) == (shares.owned["news"], 12 * BLOCK_BYTES)
    assert tier["num_evicted_blocks"] > 0
    assert report["tenants"] == {}


def test_a_quota_of_more_than_the_tier_is_refused(tenants: Path) -> None:
    with pytest.raises(ConfigError, match=r"quota of tenant 'a' .* of gpu, the tier holds .*: lower quota\.gpu"):
        shared(tenants, num_blocks=8)


@pytest.mark.parametrize(("start", "num_shared"), [(0, 0), (160, 160), (200, 192)])
def test_the_same_tokens_with_another_image_are_another_path_from_the_image_on(start: int, num_shared: int) -> None:
    """An image's tokens are all equal: vLLM's hash of a block holds that of the image, and so do our tree's keys."""
    stage = Stage(num_blocks=256)
    stage.scheduler.max_num_encoder_input_tokens = 2048
    stage.scheduler.encoder_cache_manager = EncoderCacheManager(2048)

    def num_cached(image_hash: str) -> int:
        request = stage.ask("XY", question=1, image=(start, 40), image_hash=image_hash)
        stage.step()
        state = stage.controller.state_of(request)
        assert state is not None
        stage.finish_all()
        return state.num_cached_tokens

    assert [num_cached(image) for image in ("cat", "cat", "dog", "cat", "dog")] == [0, 320, num_shared, 320, 320]
    check_invariants(stage.controller.tree)
