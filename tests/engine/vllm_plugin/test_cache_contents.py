"""What is in three tiers, as the cache's routes tell it: listed, pinned, prefetched and purged while requests run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.tree import PathSegment
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin import build_context
from ragcache_core.vllm_plugin.cache.controller import TierReport
from ragcache_core.vllm_plugin.scheduler import scheduler as scheduler_module
from tests.engine.vllm_plugin import test_forgetting
from tests.engine.vllm_plugin.storing_scene import BLOCK
from tests.engine.vllm_plugin.test_forgetting import DOCUMENTS, SYSTEM, Scene, first_block, keys_of, prompt


@contextmanager
def engine(tmp_path: Path | None, *, num_blocks: int = 60, **settings: Any) -> Iterator[Scene]:
    """An engine of three tiers without a model, whose blocks take as much on the GPU as in host memory."""
    with test_forgetting.engine(tmp_path, num_blocks=num_blocks, **settings) as it:
        block_bytes = it.controller.tiers[Tier.HOST].block_bytes
        it.controller.tiers[Tier.GPU] = TierReport(num_blocks * block_bytes, block_bytes)
        yield it


def act(it: Scene, action: str, *doc_ids: str, **body: Any) -> dict[str, Any]:
    body = {"ids": list(doc_ids), "dry_run": False, "token": f"{random.random()}", "keeps_answer": False, **body}
    while not (answer := it.scheduler.act_on_cache(action, body)):
        pass
    return answer


def listed(it: Scene, sort: str = "bytes", limit: int = 100) -> dict[str, Any]:
    return act(it, "list", sort=sort, limit=limit)


def by_id(it: Scene, **options: Any) -> dict[str, dict[str, Any]]:
    return {document["id"]: document for document in listed(it, **options)["documents"]}


def test_a_document_is_listed_with_its_paths_bytes_uses_and_what_it_has_saved(tmp_path: Path) -> None:
    with engine(tmp_path) as it:
        for number, documents in enumerate(("AB", "AB", "CB", "C")):
            it.ask(f"r{number}", documents, question=number)
        it.settle()
        found = by_id(it)
        assert set(found) == {"A", "B", "C"}
        assert [found[name]["paths"] for name in "ABC"] == [1, 2, 1]
        assert [found[name]["uses"] for name in "ABC"] == [2, 3, 2]
        block_bytes = it.controller.tiers[Tier.HOST].block_bytes
        for name in "ABC":
            here = {tier: number // block_bytes for tier, number in found[name]["bytes"].items() if tier != "disk"}
            assert here["gpu"] == here["host"] > 0
            assert found[name]["bytes"]["disk"] > 0
            assert found[name]["saved_s"] > 0
            assert 0 <= found[name]["age_s"] < 600
            assert not found[name]["pinned"]
        (shown,) = act(it, "show", "B", "nothing")["documents"]
        assert [place["behind"] for place in shown["places"]] == [["A"], ["C"]]
        assert sum(place["bytes"]["gpu"] for place in shown["places"]) == shown["bytes"]["gpu"]
        order = [document["id"] for document in listed(it, "uses", 2)["documents"]]
        assert order == ["B", "C"]
        assert listed(it, "uses", 2)["total"] == 3
        it.check()


def test_documents_of_salted_requests_are_in_no_answer_after_a_restart_as_well(tmp_path: Path) -> None:
    with engine(tmp_path) as it:
        it.ask("ours", "A")
        request = prompt("theirs", "B")
        request.cache_salt = "secret"
        request.block_hashes.clear()
        request.update_block_hashes()
        for number, key in enumerate(request.block_hashes, 1):  # the model of a worker knows keys by their tokens
            it.steps._tokens_of[key] = tuple(request.prompt_token_ids[: number * BLOCK])
        private = request.block_hashes[first_block("B", "B")]
        it.scheduler.add_request(request)
        it.steps.rest(100_000)
        it.settle()
        assert set(by_id(it)) == {"A"}
        assert act(it, "show", "B")["documents"] == []
        assert act(it, "pin", "B", dry_run=True)["changed"] == []
    with engine(tmp_path) as it:
        assert private in it.files()
        assert set(by_id(it)) == {"A"}
        assert act(it, "show", "B")["documents"] == []
        assert act(it, "prefetch", "B")["num_paths"] == 0
        assert it.num_resident("B") > 0


def test_a_pinned_document_stays_where_others_press_and_goes_like_any_when_it_is_unpinned() -> None:
    with engine(None, num_blocks=30, host="48KiB", pinned_share=0.5) as it:
        it.ask("first", "A")
        assert act(it, "pin", "A")["changed"] == ["A"]
        assert by_id(it)["A"]["pinned"]

        def press(name: str) -> None:
            for number in range(12):
                it.ask(f"{name}{number}", random.Random(number).choice(["BC", "CD", "DB", "EC"]), question=number)

        press("p")
        assert it.ask("again", "A", question=7)[Tier.GPU] >= (len(SYSTEM) + len(DOCUMENTS["A"])) // BLOCK * BLOCK
        assert act(it, "unpin", "A")["changed"] == ["A"]
        assert act(it, "unpin", "A")["unknown"] == ["A"]
        for number in range(30):
            it.ask(f"q{number}", random.Random(number).choice(["BC", "CD", "DB", "EC"]), question=100 + number)
        assert it.ask("last", "A", question=8)[Tier.GPU] < len(SYSTEM) + len(DOCUMENTS["A"]) // BLOCK * BLOCK
        it.check()


def test_pins_beyond_the_share_are_refused_and_change_nothing() -> None:
    with engine(None, num_blocks=60, host="256KiB", pinned_share=0.1) as it:
        it.ask("first", "A")
        it.ask("second", "C")
        refused = act(it, "pin", "A", "C")["refused"]
        assert "limit is" in refused
        assert "pinned_share" in refused
        assert not any(document["pinned"] for document in by_id(it).values())
        assert not it.controller.tree.protected_keys
        assert act(it, "pin", "E", dry_run=True)["changed"] == []


def test_a_path_that_comes_later_is_protected_too_and_forgetting_ends_the_pin() -> None:
    with engine(None, pinned_share=0.9) as it:
        it.ask("first", "A")
        act(it, "pin", "A")
        before = act(it, "pin", "A")["num_bytes"]
        it.ask("second", "BA")
        assert act(it, "pin")["num_bytes"] > before
        it.forget("B")
        assert act(it, "pin")["num_bytes"] == before, "the path behind B is gone"
        it.forget("A")
        receipt = act(it, "pin")
        assert (receipt["num_pinned"], receipt["num_bytes"]) == (0, 0)
        assert not it.controller.tree.protected_keys


def test_what_is_on_disk_of_a_document_is_read_into_host_memory_ahead(tmp_path: Path) -> None:
    with engine(tmp_path, num_blocks=30, host="96KiB") as it:
        it.ask("first", "A")
        for number in range(30):
            it.ask(f"p{number}", random.Random(number).choice(["BC", "CD", "DB", "EC"]), question=number)
        it.settle()
        before = by_id(it)["A"]["bytes"]
        assert before["disk"] > before["gpu"] + before["host"]
        begun = act(it, "prefetch", "A", "unknown")
        assert begun["num_read_tokens"] > 0
        assert begun["unknown"] == ["unknown"]
        assert (begun["num_paths"], begun["num_left_out"]) == (1, 0)
        it.steps.rest(100_000)
        assert by_id(it)["A"]["bytes"]["host"] > before["host"]
        assert act(it, "prefetch", "A")["num_paths"] == 0
        assert it.ask("again", "A", question=77)[Tier.HOST] > 0
        it.check()


def test_purged_nothing_is_left_in_a_tier_or_a_file_and_the_cache_goes_on(tmp_path: Path) -> None:
    with engine(tmp_path, pinned_share=0.9, store_steps=3) as it:
        for number, documents in enumerate(("AB", "B", "C", "CD", "BD")):
            it.ask(f"r{number}", documents)
        it.settle()
        act(it, "pin", "A")
        private = [kv for documents in ("AB", "B", "C", "CD", "BD") for kv in it.kv_of(documents)]
        keys = [key for documents in ("AB", "B", "C", "CD", "BD") for key in keys_of(documents)]
        assert all(kv in it.files() for kv in private)
        running = prompt("running", "BC", num_answers=30)
        it.scheduler.add_request(running)
        for _ in range(6):
            it.steps.step()
        receipt = act(it, "purge")
        assert set(receipt["forgotten"]) >= {"A", "B", "C", "D"}
        assert all(number > 0 for number in receipt["num_bytes"].values())
        assert it.scheduler.left()["num_requests"] == 1
        it.steps.rest(100_000)  # it reads its own KV and no other's: see Steps
        assert running.num_output_tokens == 30
        assert it.settle()["problems"] == []
        files, memory = it.files(), it.host_memory()
        assert not [kv for kv in private if kv in files or kv in memory]
        assert not [key for key in keys if key in files]
        assert listed(it) == {"documents": [], "total": 0}
        assert it.ask("after", "AB", question=5) == dict.fromkeys(Tier, 0)
        assert it.ask("and again", "AB", question=6)[Tier.GPU] > len(SYSTEM)
        it.check()


@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
def test_whatever_is_done_to_the_cache_meanwhile_no_request_reads_other_kv(tmp_path: Path, is_async: bool) -> None:
    """Requests come, wait and are loaded while documents are pinned, prefetched, forgotten, listed and purged."""
    done: dict[str, int] = dict.fromkeys(("pin", "unpin", "prefetch", "show", "forget", "purge", "list"), 0)
    for seed in range(2):
        dice = random.Random(seed)
        with engine(
            tmp_path / str(seed), num_blocks=30, host="64KiB", is_async=is_async, pinned_share=0.6,
            store_steps=dice.randrange(1, 4),
        ) as it:  # fmt: skip
            for number in range(60):
                documents = "".join(dice.sample("ABCDE", dice.randrange(1, 3)))
                it.scheduler.add_request(prompt(f"r{number}", documents, dice.randrange(1, 30), question=number % 3))
                for _ in range(dice.randrange(6)):
                    it.steps.step()
                action = dice.choices(list(done), (5, 3, 6, 3, 2, 1, 3))[0]
                chosen = dice.sample("ABCDE", dice.randrange(1, 3))
                match action:
                    case "forget":
                        it.forget(*chosen)
                    case "list":
                        found = listed(it)
                        assert found["total"] == len(found["documents"]) <= len(DOCUMENTS)
                    case _:
                        answer = act(it, action, *chosen)
                        assert action == "pin" or "refused" not in answer
                done[action] += 1
                assert it.controller.pins.num_units <= 18
            it.steps.rest(100_000)
            act(it, "purge")
            assert it.settle()["problems"] == []
            assert not it.controller.tree.protected_keys
            assert it.num_resident(*DOCUMENTS) == 0
            it.check()
    assert all(number > 2 for number in done.values())


@pytest.mark.parametrize("action", ["show", "pin", "unpin", "prefetch", "list", "tree"])
def test_a_call_on_many_documents_lets_steps_run_between_its_slices(tmp_path: Path, action: str) -> None:
    with engine(tmp_path) as it:
        tree = it.controller.tree
        for number in range(3000):
            (node,) = tree.insert([PathSegment([f"{number}".encode()], BLOCK, f"d{number}")])
            tree.add(node, 1, Tier.DISK)
        body = {"ids": [f"d{number}" for number in range(3000)], "dry_run": False, "sort": "uses", "limit": 50}
        body |= {"token": "t", "keeps_answer": False}
        num_slices, looked_at = 0, 0
        nodes_of = tree.nodes_of

        def counted(doc_id: str) -> Any:
            nonlocal looked_at
            looked_at += 1
            return nodes_of(doc_id)

        tree.nodes_of = counted  # type: ignore[method-assign]
        if action == "unpin":
            it.controller.pins.doc_ids.update(body["ids"])  # type: ignore[arg-type]
        while not it.scheduler.act_on_cache(action, body):
            num_slices += 1
            assert looked_at <= 2 * 500, "a slice"
            looked_at = 0
            it.ask(f"r{num_slices}", "AB", question=num_slices)  # steps run, and what they do is no other's
        assert 3 <= num_slices < 40
        it.check()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The engine's clock, which a test sets."""
    now = [2e9]
    monkeypatch.setattr(scheduler_module, "steady_s", lambda: now[0])
    monkeypatch.setattr(build_context, "steady_s", lambda: now[0])
    return now


def test_blocks_older_than_max_age_are_in_no_tier_and_never_hit(tmp_path: Path, clock: list[float]) -> None:
    with engine(tmp_path, max_age=100) as it:
        it.ask("r0", "AB")
        clock[0] += 60
        it.ask("r1", "CD")
        it.ask("r2", "AB", question=1)
        it.settle()
        private = it.kv_of("AB", "A")
        assert all(kv in it.files() for kv in private)
        assert by_id(it)["A"]["age_s"] == pytest.approx(60)
        clock[0] += 34
        assert set(by_id(it)) == set("ABCD")
        clock[0] += 5
        running = prompt("running", "CD", num_answers=30, question=3)
        it.scheduler.add_request(running)
        it.steps.step()
        assert "A" not in by_id(it)
        clock[0] += 60  # what the running request has is too old as well
        it.steps.step()
        assert by_id(it) == {}
        assert it.scheduler.recent_requests(1)["num_running"] == 1
        assert it.scheduler.left()["num_requests"] == 0, "deleting documents does not wait for what is only old"
        assert it.scheduler.recent_requests(1)["requests"][0]["doc_ids"], "nor is it a secret which those are"
        it.steps.rest(100_000)
        assert it.settle()["problems"] == []
        files, memory = it.files(), it.host_memory()
        assert not [kv for kv in private if kv in files or kv in memory]
        clock[0] += 1000
        assert by_id(it) == {}
        assert it.ask("after", "CD", question=4) == dict.fromkeys(Tier, 0)
        clock[0] -= 5000  # it cannot, while a process runs; and would do no harm
        assert it.ask("again", "CD", question=5)[Tier.GPU] > len(SYSTEM)
        it.settle()
        it.check()


def test_ages_go_on_over_a_restart_and_a_clock_that_was_set_back_makes_nothing_older(
    tmp_path: Path, clock: list[float]
) -> None:
    with engine(tmp_path, max_age=100) as it:
        it.ask("r0", "A")
        it.settle()
    clock[0] += 70
    with engine(tmp_path, max_age=100) as it:
        assert by_id(it)["A"]["age_s"] == pytest.approx(70)
        it.ask("r1", "B")
        it.settle()
    clock[0] -= 500
    with engine(tmp_path, max_age=100) as it:
        assert by_id(it)["A"]["age_s"] == by_id(it)["B"]["age_s"] == 0
    clock[0] += 670
    with engine(tmp_path, max_age=100) as it:
        it.settle()
        assert by_id(it) == {}
