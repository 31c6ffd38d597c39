"""vLLM's KV events, read by a consumer that keeps book: what it believes is what the tiers hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash
from vllm.v1.request import RequestStatus

from ragcache_core.vllm_plugin.disk import manager as disk
from tests.engine.vllm_plugin.storing_scene import BLOCK, Steps, host_scheduler, request
from tests.support.kv_events import Book
from tests.support.waiting import until


class Scene:
    """An engine without a model that tells its events to a book."""

    def __init__(self, scheduler: Any, book: Book) -> None:
        self.scheduler, self.book = scheduler, book
        self.steps = Steps(scheduler, is_async=False)
        scheduler.kv_event_publisher.publish = lambda batch: book.read(batch.events)

    def held(self) -> dict[str, set[Any]]:
        """Return the hashes of what each tier holds."""
        manager = self.scheduler.connector.tiers
        gpu = self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        host = [key for key, row in manager.host.contents().items() if manager.host._num_reads[row] >= 0]
        below = [name for tier in manager.lower for name in tier._stored]
        unit_of = manager.host.groups.unit_of
        return {
            "GPU": {maybe_convert_block_hash(get_block_hash(key)) for key in gpu._cache},
            "CPU": {maybe_convert_block_hash(unit_of(key)) for key in host},
            "STORAGE": {maybe_convert_block_hash(unit_of(key)) for key in below},
        }

    def check(self) -> dict[str, int]:
        """Come to rest; the book is what the tiers hold. Return how many blocks of each were told."""
        tiers = self.scheduler.connector.tiers.lower

        def is_written() -> bool:
            for tier in tiers:
                tier._take_in_written()
            self.steps.rest(100_000)
            return not any(tier._writing for tier in tiers)

        assert until(is_written, 20)
        assert self.book.held() == {medium: keys for medium, keys in self.held().items() if keys}
        return {medium: len(keys) for medium, keys in self.held().items()}

    def ask(self, number: int, *documents: str, num_answers: int = 3) -> None:
        asked = prompt(f"r{number}", *documents, num_answers=num_answers)
        self.scheduler.add_request(asked)


def prompt(name: str, *documents: str, num_answers: int = 3) -> Any:
    words, spans = [7] * BLOCK, []
    for document in documents:
        text = random.Random(document).choices(range(10, 900), k=3 * BLOCK)
        spans.append({"id": document, "start": len(words), "end": len(words) + len(text)})
        words = [*words, *text]
    params = {"ragcache": {"version": 1, "documents": spans}}
    return request(name, [*words, *random.Random(name).choices(range(10, 900), k=9)], num_answers, params=params)


@contextmanager
def engine(directory: Path | None, book: Book, *, num_blocks: int = 24, host: str = "96KiB") -> Iterator[Scene]:
    tiers: dict[str, Any] = {} if directory is None else {"directory": directory, "disk_bytes": "640KiB"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "kv_identity", lambda config: {"model": "demo", "weights": "5f3a"})
        with host_scheduler(num_blocks, host, emits_events=True, **tiers) as scheduler:
            yield Scene(scheduler, book)


@pytest.mark.parametrize("has_disk", [False, True], ids=["host", "host and disk"])
def test_a_consumer_knows_what_every_tier_holds_whatever_is_evicted_forgotten_and_reset(
    tmp_path: Path, has_disk: bool
) -> None:
    dice, names = random.Random(3), [f"d{i}" for i in range(40)]
    book, most = Book(), Counter[str]()
    with engine(tmp_path if has_disk else None, book) as scene:
        for number in range(160):
            scene.ask(number, *dice.sample(names, 2))
            for _ in range(dice.randrange(5)):
                scene.steps.step()
            if number % 20 == 11 and scene.scheduler.requests:
                scene.scheduler.finish_requests(
                    dice.choice(list(scene.scheduler.requests)), RequestStatus.FINISHED_ABORTED
                )
            if number % 20 == 15:
                scene.scheduler.forget(dice.sample(names, 3))
            if number % 10 == 0:
                for medium, num in scene.check().items():
                    most[medium] = max(most[medium], num)
        scene.check()
        assert scene.scheduler.reset_prefix_cache(reset_connector=True)
        assert not scene.check()["CPU"]
    assert all(book.num_removed[medium] > 20 for medium in ("GPU", "CPU", *["STORAGE"][:has_disk]))
    assert most["GPU"] > 10
    assert most["CPU"] > 10
    assert (most["STORAGE"] > 100) == has_disk


def test_events_name_their_tokens_in_every_tier(tmp_path: Path) -> None:
    book = Book()
    with engine(tmp_path, book) as scene:
        for number in range(6):
            scene.ask(number, f"d{number}", f"d{number + 1}")
        scene.check()
    assert book.num_unnamed == 0
    asked = prompt("x", "d0", "d1")
    words = tuple(asked.prompt_token_ids)
    for i, block_hash in enumerate(asked.block_hashes):
        told = book.told[maybe_convert_block_hash(block_hash)]
        assert told.token_ids == list(words[i * BLOCK : (i + 1) * BLOCK])
        assert told.parent_block_hash == (maybe_convert_block_hash(asked.block_hashes[i - 1]) if i else None)
        assert told.block_size == BLOCK


def test_an_engine_without_requests_reports_what_was_forgotten_and_what_the_disk_has_written(tmp_path: Path) -> None:
    book = Book()
    with engine(tmp_path, book) as scene:
        scene.ask(0, "d0", "d1")
        assert scene.check()["STORAGE"] >= 7
        scene.scheduler.forget(["d0"])
        assert scene.scheduler.has_requests(), "a step tells it"
        assert scene.check() == {"GPU": 1, "CPU": 1, "STORAGE": 1}
        assert not scene.scheduler.has_requests()


def test_after_a_restart_a_new_consumer_gets_the_disk_content_before_any_request(tmp_path: Path) -> None:
    with engine(tmp_path, Book()) as scene:
        for number in range(4):
            scene.ask(number, f"d{number}")
        num_stored = scene.check()["STORAGE"]
    book = Book()
    with engine(tmp_path, book) as scene:
        assert scene.check() == {"GPU": 0, "CPU": 0, "STORAGE": num_stored}
        scene.ask(9, "d1")
        assert scene.check()["CPU"] > 0
        scene.scheduler.forget(["d1"])
        assert scene.check()["STORAGE"] < num_stored


def test_a_disabled_disk_is_reported_as_empty(tmp_path: Path) -> None:
    book = Book()
    with engine(tmp_path, book) as scene:
        scene.ask(0, "d0", "d1")
        assert scene.check()["STORAGE"]
        scene.scheduler.on_weights_changed("the test says so")
        assert not scene.check()["STORAGE"]
        assert scene.scheduler.connector.tiers.lower


def test_no_events_are_kept_where_none_are_published(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "kv_identity", lambda config: {"model": "demo", "weights": "5f3a"})
        with host_scheduler(24, "24KiB", directory=tmp_path, disk_bytes="256KiB") as scheduler:
            steps = Steps(scheduler, is_async=False)
            scheduler.add_request(prompt("r", "d0", "d1"))
            steps.rest(100_000)
            (tier,) = scheduler.connector.tiers.lower
            assert until(lambda: not list(tier.take_ended()) and bool(tier._stored), 5)
            assert not tier.has_events
            assert tier._stored
