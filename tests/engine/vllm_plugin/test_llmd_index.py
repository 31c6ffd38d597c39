"""llm-d's index on the KV events of engines without a model: it knows of each replica what its tiers hold."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.engine.vllm_plugin.storing_scene import BLOCK
from tests.engine.vllm_plugin.test_kv_events import Scene, engine, prompt
from tests.support.kv_events import Book
from tests.support.llmd_index import LlmdIndex

MODEL = "demo"
TIERS = {"GPU": "gpu", "CPU": "cpu", "STORAGE": "storage"}
WEIGHTS = {"gpu": 1.0, "cpu": 0.8, "storage": 0.4}


class Replica:
    """An engine without a model whose events go to an index as vLLM publishes them."""

    def __init__(self, name: str, scene: Scene, index: LlmdIndex) -> None:
        self.name, self.scene, self.index = name, scene, index
        self._pack = msgspec.msgpack.Encoder()
        self._num_batches = 0
        scene.scheduler.kv_event_publisher.publish = self._publish

    def _publish(self, batch: Any) -> None:
        self.scene.book.read(batch.events)
        self.index.receive(f"kv@{self.name}@{MODEL}", self._num_batches, self._pack.encode(batch))
        self._num_batches += 1

    def ask(self, number: int, *documents: str) -> None:
        self.scene.ask(number, *documents)
        for _ in range(3):
            self.scene.steps.step()

    def tiers(self, *documents: str) -> list[set[str]]:
        """Return what the index knows of each block of documents."""
        return self.index.tiers(prompt("any", *documents).prompt_token_ids, MODEL, self.name)

    def check(self, *pairs: tuple[str, str]) -> None:
        """Come to rest; what the index knows of prompts is what the tiers hold, and it knows no other blocks."""
        num_held = self.scene.check()
        held = self.scene.held()
        for documents in pairs:
            hashes = map(maybe_convert_block_hash, prompt("any", *documents).block_hashes)
            assert self.tiers(*documents) == [
                {TIERS[medium] for medium, keys in held.items() if each in keys} for each in hashes
            ]
        assert self.index.num_entries(self.name) == Counter({TIERS[medium]: num for medium, num in num_held.items()})


def test_the_index_follows_two_replicas_through_evictions_in_three_tiers_and_deletions(tmp_path: Path) -> None:
    dice, names = random.Random(5), [f"d{i}" for i in range(12)]
    index, seen = LlmdIndex(BLOCK, WEIGHTS), Counter[str]()
    with engine(tmp_path / "one", Book()) as first, engine(tmp_path / "two", Book()) as second:
        replicas = [Replica("10.0.0.1:8000", first, index), Replica("10.0.0.2:8000", second, index)]
        pairs = [(one, other) for one in names for other in names if one != other]
        for number in range(100):
            replica = dice.choice(replicas)
            replica.ask(number, *dice.choice(pairs))
            if number % 20 == 15:
                replica.scene.scheduler.forget(dice.sample(names, 3))
            if number % 20 == 0:
                for each in replicas:
                    each.check(*pairs)
                    seen.update(tier for pair in pairs for tiers in each.tiers(*pair) for tier in tiers)
        for each in replicas:
            each.check(*pairs)
    assert not index.num_unresolved
    assert seen.keys() == WEIGHTS.keys()
    assert all(sum(each.scene.book.num_removed.values()) > 20 for each in replicas)


def test_the_score_prefers_the_replica_with_the_longer_prefix_and_the_faster_tier(tmp_path: Path) -> None:
    index = LlmdIndex(BLOCK, WEIGHTS)
    with engine(tmp_path / "one", Book()) as first, engine(tmp_path / "two", Book()) as second:
        warm, cold = Replica("warm", first, index), Replica("cold", second, index)
        warm.ask(0, "d0", "d1")
        cold.ask(0, "d0", "d2")
        asked = prompt("r0", "d0", "d1").prompt_token_ids
        for each in (warm, cold):
            each.scene.check()
        long, short = (index.score(asked, MODEL, each.name) for each in (warm, cold))
        assert long == 7.0
        assert short == 4.0
        for number in range(1, 9):  # others push it off the GPU
            warm.ask(number, f"e{number}", f"f{number}")
        warm.scene.check()
        assert 0 < index.score(asked, MODEL, "warm") < long


def test_after_a_restart_the_index_knows_the_disk_where_it_knew_the_tokens_before(tmp_path: Path) -> None:
    known, new = LlmdIndex(BLOCK, WEIGHTS), LlmdIndex(BLOCK, WEIGHTS)
    with engine(tmp_path, Book()) as scene:
        replica = Replica("a", scene, known)
        for number in range(6):
            replica.ask(number, f"d{number}", "d9")
            scene.check()  # a slow disk would drop what it should hold
        replica.check(*((f"d{number}", "d9") for number in range(6)))
    for index in (known, new):
        with engine(tmp_path, Book()) as scene:
            replica = Replica("a", scene, index)
            num_on_disk = scene.check()["STORAGE"]
            assert num_on_disk > 20
            on_disk = {"storage": num_on_disk} if index is known else {}
            assert index.num_entries("a") == on_disk, "the disk is told by hash alone"
            replica.ask(9, "d1", "d9")
            assert scene.check()["GPU"] > 0
            assert all(tiers & {"gpu", "cpu"} for tiers in replica.tiers("d1", "d9")[:7])


def test_a_reset_of_the_gpu_alone_empties_what_the_index_knows_of_a_replica(tmp_path: Path) -> None:
    index = LlmdIndex(BLOCK, WEIGHTS)
    with engine(tmp_path, Book()) as scene:
        replica = Replica("a", scene, index)
        replica.ask(0, "d0", "d1")
        assert scene.check()["CPU"] > 0
        assert scene.scheduler.reset_prefix_cache(reset_connector=False)
        scene.check()
        assert not index.num_entries("a"), "llm-d has no clearing of one tier"
        replica.ask(1, "d0", "d1")
        scene.check()
        assert all("gpu" in tiers for tiers in replica.tiers("d0", "d1")[:7])
