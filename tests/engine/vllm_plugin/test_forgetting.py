"""Documents that are forgotten in GPU and host memory and on disk while requests run; files are searched for them."""

from __future__ import annotations

import errno
import math
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcache_core.chunkstore import ChunkStore, async_store, slotfile
from ragcache_core.chunkstore.encryption import KEY_ENV
from ragcache_core.errors import CacheTierError, CacheWriteError, ConfigError
from ragcache_core.runtime.environment import STARTED_AGAIN_ENV
from ragcache_core.runtime.shared_memory import EngineFiles, journal_folder, new_engine_id
from ragcache_core.types import PromptSegment, SegmentKind, Tier
from ragcache_core.vllm_plugin.cache.kv_groups import KVGroups, OtherGroup
from ragcache_core.vllm_plugin.disk import manager as disk
from ragcache_core.vllm_plugin.offload import spec
from ragcache_core.vllm_plugin.shared import tier as shared_tier
from ragcache_core.wire import RequestMetadata
from tests.engine.vllm_plugin.disk_scene import Opening, failing, payload
from tests.engine.vllm_plugin.disk_scene import Scene as TierScene
from tests.engine.vllm_plugin.storing_scene import BLOCK, Steps, content, host_scheduler, request
from tests.support.waiting import until


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(10, 900), k=count)


SYSTEM = tokens(0, 40)
DOCUMENTS = {
    name: tokens(i + 1, length) for i, (name, length) in enumerate(zip("ABCDE", (50, 33, 70, 48, 9), strict=True))
}


def prompt(name: str, documents: str, num_answers: int = 2, question: int = 999, **params: Any) -> Any:
    """Return a request for documents, which are named, after a prefix that all requests share."""
    words, spans = list(SYSTEM), []
    for doc in documents:
        spans.append({"id": doc, "start": len(words), "end": len(words) + len(DOCUMENTS[doc.upper()])})
        words += DOCUMENTS[doc.upper()]
    metadata = {"ragcache": {"version": 1, "documents": spans}, **params}
    return request(name, [*words, *tokens(question, 20)], num_answers, params=metadata)


def first_block(documents: str, of: str) -> int:
    """Return the block in which a document of a prompt begins; of none, that of the first."""
    return (len(SYSTEM) + sum(len(DOCUMENTS[doc]) for doc in documents[: max(documents.find(of or " "), 0)])) // BLOCK


def keys_of(documents: str, of: str = "") -> list[bytes]:
    """Return the keys of a prompt's blocks from a document on."""
    return list(prompt("x", documents).block_hashes[first_block(documents, of) :])


class Scene:
    """An engine of three tiers without a model."""

    def __init__(self, scheduler: Any, directory: Path | None, is_async: bool = False, store_steps: int = 1) -> None:
        self.scheduler, self.directory = scheduler, directory
        self.steps = Steps(scheduler, is_async, store_steps)
        self.controller = scheduler._controller

    def ask(self, name: str, documents: str, **options: Any) -> dict[Tier, int]:
        """Let a request come, run and end, and return how many tokens each tier had of it."""
        it = prompt(name, documents, **options)
        before = list(self.controller.counters.num_tokens_by_tier)
        self.scheduler.add_request(it)
        self.steps.rest(100_000)  # it steps while the disk writes
        after = self.controller.counters.num_tokens_by_tier
        return {tier: after[tier] - before[tier] for tier in Tier}

    def forget(self, *doc_ids: str) -> dict[str, Any]:
        receipt: dict[str, Any] = self.scheduler.forget(list(doc_ids))
        return receipt

    def settle(self) -> dict[str, Any]:
        """Do what can be done without a request, until nothing is left of what was forgotten and all is written."""
        left: dict[str, Any] = {}

        def is_gone() -> bool:
            self.steps.rest(100_000)  # until the disk has copies; it may write them later
            for tier in self.scheduler.connector.tiers.lower:
                tier._io.finish_writes(20)
            left.update(self.scheduler.left())
            return not left["num_blocks"] and not left["num_requests"]

        assert until(is_gone, 20), f"something is left: {left}"
        return left

    def num_resident(self, *doc_ids: str) -> int:
        """Return how many blocks of documents, and behind them, lie anywhere, as the tree knows it."""
        tree = self.controller.tree
        below = [node for top in tree.named(set(doc_ids)) for node in top.below()]
        return sum(tree.resident_mask(node, tier).bit_count() for node in below for tier in Tier)

    def kv_of(self, documents: str, of: str = "") -> list[bytes]:
        """Return what the KV of a prompt's blocks looks like in memory and on disk, from the document ``of`` on."""
        words = tuple(prompt("x", documents).prompt_token_ids)
        ends = range((first_block(documents, of) + 1) * BLOCK, len(words) + 1, BLOCK)
        numbers = [self.steps._host.numbers.get(content(0, words[:end])) for end in ends]
        return [np.full(64, number, np.int64).tobytes() for number in numbers if number is not None]

    def files(self) -> bytes:
        assert self.directory is not None
        paths = [path for path in self.directory.rglob("*") if path.is_file()]
        return b"".join(path.read_bytes() for path in paths)

    def host_memory(self) -> bytes:
        return bytes(self.scheduler.connector.tiers.host.get_kv_memoryview())

    def check(self) -> None:
        """The tiers are at rest and agree with one another."""
        assert not self.scheduler.connector.copies.num_jobs
        host = self.scheduler.connector._host
        assert not any(host._num_reads[row] for row in host.contents().values())
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@contextmanager
def engine(
    tmp_path: Path | None, *, num_blocks: int = 60, host: str = "256KiB", is_async: bool = False, **kw: Any
) -> Iterator[Scene]:
    tiers: dict[str, Any] = {} if tmp_path is None else {"directory": tmp_path, "disk_bytes": "4MiB"}
    store_steps = kw.pop("store_steps", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "kv_identity", lambda config: {"model": "demo", "weights": "5f3a"})
        with host_scheduler(num_blocks, host, is_async=is_async, **tiers, **kw) as scheduler:
            yield Scene(scheduler, tmp_path, is_async, store_steps)


@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
def test_a_document_is_deleted_from_every_tier_with_its_subtree(tmp_path: Path, is_async: bool) -> None:
    with engine(tmp_path, is_async=is_async) as it:
        for number, documents in enumerate(("AB", "BA", "CB", "C")):
            it.ask(f"r{number}", documents)
        it.settle()
        gone = [key for documents in ("AB", "BA", "CB") for key in keys_of(documents, "B")]
        assert any(key in it.files() for key in gone)
        before = it.num_resident("B")
        receipt = it.forget("B")
        left = it.settle()
        assert receipt["forgotten"] == ["B"]
        assert receipt["num_paths"] == 3
        assert sum(receipt["num_blocks"].values()) == before > 0
        assert set(receipt["num_blocks"]) == {"gpu", "host", "disk"}
        assert all(number > 0 for number in receipt["num_bytes"].values())
        assert left["problems"] == []
        assert it.num_resident("B") == 0
        files = it.files()
        assert not [key for key in gone if key in files]
        assert it.num_resident("C") > 0, "what was not named stays"
        assert it.ask("again", "C", question=1)[Tier.GPU] > len(SYSTEM)
        assert it.ask("new", "BA", question=1)[Tier.GPU] <= len(SYSTEM)
        it.check()


def test_no_byte_of_it_is_left_in_a_file_or_in_host_memory(tmp_path: Path) -> None:
    with engine(tmp_path) as it:
        for number, documents in enumerate(("AB", "B", "C", "CD", "BD")):
            it.ask(f"r{number}", documents)
        it.settle()
        private = [*it.kv_of("B", "B"), *it.kv_of("BD", "B"), *it.kv_of("AB", "B")]
        keys = [*keys_of("B", "B"), *keys_of("BD", "B"), *keys_of("AB", "B")]
        assert len(private) > 8
        assert any(key in it.files() for key in keys)
        assert all(kv in it.files() and kv in it.host_memory() for kv in private)
        it.forget("B")
        it.settle()
        files, memory = it.files(), it.host_memory()
        assert not [kv for kv in private if kv in files or kv in memory]
        assert not [key for key in keys if key in files]
        assert all(kv in files and kv in memory for kv in it.kv_of("CD"))
        it.check()


def test_a_running_request_keeps_what_it_has_and_leaves_nothing_when_it_ends(tmp_path: Path) -> None:
    with engine(tmp_path, store_steps=3) as it:
        it.ask("before", "B")
        running = prompt("running", "BC", num_answers=40)
        it.scheduler.add_request(running)
        for _ in range(6):
            it.steps.step()
        assert running.num_output_tokens
        it.forget("B")
        left = it.scheduler.left()
        assert left["num_requests"] == 1
        waiting = prompt("another", "B", question=5)
        it.scheduler.add_request(waiting)
        it.steps.rest(100_000)  # it reads its own KV and no other's: see Steps
        assert running.num_output_tokens == 40
        it.settle()
        words = tuple(running.prompt_token_ids)
        own = [it.steps._host.numbers.get(content(0, words[:end])) for end in range(8 * BLOCK, len(words), BLOCK)]
        files, memory = it.files(), it.host_memory()
        for number in own:
            assert number is None or np.full(64, number, np.int64).tobytes() not in files + memory
        assert not [key for key in keys_of("BC", "C") if key in files]
        assert it.ask("after", "BC", question=7)[Tier.GPU] <= len(SYSTEM) + len(DOCUMENTS["B"])
        it.check()


@pytest.mark.parametrize("is_async", [False, True], ids=["one step in flight", "two steps in flight"])
@pytest.mark.parametrize(
    ("num_blocks", "host", "has_disk"), [(30, "64KiB", True), (60, "96KiB", False), (24, "1MiB", True)]
)
def test_whatever_is_forgotten_meanwhile_no_request_reads_other_kv(
    tmp_path: Path, num_blocks: int, host: str, has_disk: bool, is_async: bool
) -> None:
    """Requests come, wait, are loaded from host and disk, are given up; ids are forgotten at any moment."""
    num_forgotten = 0
    for seed in range(2):
        dice = random.Random(seed)
        folder = tmp_path / str(seed) if has_disk else None
        with engine(
            folder, num_blocks=num_blocks, host=host, is_async=is_async, store_steps=dice.randrange(1, 4)
        ) as it:
            for number in range(60):
                documents = "".join(dice.sample("ABCDE", dice.randrange(1, 3)))
                named = documents if dice.random() < 0.8 else documents.lower()  # two ids for the same tokens
                it.scheduler.add_request(prompt(f"r{number}", named, dice.randrange(1, 30), question=number % 3))
                for _ in range(dice.randrange(6)):
                    it.steps.step()
                if dice.random() < 0.25:
                    receipt = it.forget(*dice.sample("ABCDEabcde", dice.randrange(1, 3)), "never seen")
                    assert "never seen" not in receipt["forgotten"]
                    num_forgotten += sum(receipt["num_blocks"].values())
            it.steps.rest(100_000)
            both = sorted({*"ABCDE", *"abcde"})
            it.forget(*both)
            it.settle()
            assert it.num_resident(*both) == 0
            it.check()
            if has_disk:
                files, memory = it.files(), it.host_memory()
                private = [kv for doc in "ABCDE" for kv in it.kv_of(doc, doc)]
                assert len(private) > 5
                assert not [kv for kv in private if kv in files or kv in memory]
    assert num_forgotten > 50


# The disk tier by itself


def left_of(it: TierScene, timeout_s: float = 20) -> int:
    until(lambda: not it.tier.num_pending(), timeout_s)
    return it.tier.num_pending()


def forget(it: TierScene, *doc_ids: str) -> dict[str, Any]:
    return it.controller.forget(set(doc_ids))


def files_of(it: TierScene) -> bytes:
    return b"".join(path.read_bytes() for path in it.directory.rglob("*") if path.is_file())


def test_what_is_forgotten_is_gone_after_a_restart_and_so_is_what_was_named_later(opening: Opening) -> None:
    it = opening()
    one, other = it.store("AB"), it.store("D")
    copy = it.announce("AB")
    tree = it.tree
    parts = tuple(
        PromptSegment(SegmentKind.DOCUMENT, 4 * a, 4 * b, name) for a, b, name in ((0, 1, "A"), (1, 4, "copy"))
    )
    it.controller.on_new_request("r", RequestMetadata(parts), copy, 16, 0.0)
    it.controller.on_finished("r")
    assert tree.rekeyed
    it.end_step()
    assert not tree.rekeyed
    it.close()
    again = opening()
    receipt = forget(again, "copy")
    assert receipt["forgotten"] == ["copy"]
    assert receipt["num_blocks"] == {"disk": 3}
    assert left_of(again) == 0
    assert again.tier.deletion_problem() is None
    again.check()
    files = files_of(again)
    assert [payload(key)[:64] in files for key in (*one, *other)] == [True] + [False] * 3 + [True] * 6
    assert [key in files for key in one] == [True] + [False] * 3
    assert again.num_hits("AB") == 1
    assert again.num_hits("D") == 6
    assert again.store("AB") == one
    assert again.num_hits("AB") == 4
    assert again.load(one) == set(one)
    again.close()
    assert opening().num_hits("AB") == 4


def test_what_is_being_written_or_read_is_overwritten_after_that(opening: Opening, gate: threading.Event) -> None:
    it = opening()
    first = it.store("B")
    gate.clear()
    second = it.announce("CB")
    it.result(it.submit_store(second))  # it is in buffers
    loading = it.submit_load(first)
    receipt = forget(it, "B")
    assert receipt["num_blocks"] == {"disk": 3 + 3}, "of the other two blocks none is forgotten"
    assert it.num_hits("B") == 0
    assert it.tier.num_pending() == 1
    stored_again = it.announce("B")
    it.submit_store(stored_again)
    gate.set()
    assert left_of(it) == 0
    results: list[Any] = []
    assert until(lambda: results.extend(it.tier.take_ended()) or len(results) >= 2, 20)
    assert {result.number for result in results} >= {loading}
    it.settle()
    it.tier._take_in_written()
    files = files_of(it)
    assert not [key for key in (*first, *second[2:]) if payload(key)[:64] in files]
    assert it.num_hits("CB") == 2
    assert it.controller.counters.num_corrupt_blocks == 0, "it was forgotten, not damaged"


def test_a_disk_that_is_gone_is_a_problem_and_no_error(opening: Opening) -> None:
    it = opening()
    it.store("B")
    shutil.rmtree(it.directory)
    receipt = forget(it, "B")
    assert receipt["forgotten"] == ["B"]
    assert left_of(it) == 0
    why = it.tier.deletion_problem()
    assert why is not None
    assert str(it.tier.path) in why
    assert it.num_hits("B") == 0
    forget(it, "B", "never stored")
    assert left_of(it) == 0


@pytest.mark.parametrize("what", ["the index cannot be read", "the key is gone"])
def test_a_disk_missing_after_a_restart_is_reported_and_not_waited_for(tmp_path: Path, what: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STARTED_AGAIN_ENV, "1")
        if what == "the key is gone":
            patch.setenv(KEY_ENV, "")
        else:
            patch.setattr(ChunkStore, "entries", failing(CacheTierError(what)))
        with engine(tmp_path) as it:
            it.ask("r", "AB")
            it.forget("B")
            left = it.settle()
            assert [str(tmp_path) in problem for problem in left["problems"]] == [True]


@pytest.mark.parametrize("has_disk", [True, False], ids=["with a disk", "without"])
def test_a_shared_store_missing_after_a_restart_is_reported_and_not_waited_for(tmp_path: Path, has_disk: bool) -> None:
    url = "redis://127.0.0.1:1/0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STARTED_AGAIN_ENV, "1")
        patch.setattr(shared_tier, "shared_identity", failing(ConfigError("there are no weights")))
        with engine(tmp_path if has_disk else None, shared=url) as it:
            it.ask("r", "AB")
            it.forget("B")
            places = [str(tmp_path), url] if has_disk else [url]
            problems = it.settle()["problems"]
            assert all(place in problem for place, problem in zip(places, problems, strict=True))
            assert it.controller.shared is None


def test_an_erasure_that_the_disk_refuses_is_tried_again_until_it_does_it(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_store, "REST_S", 0.1)
    monkeypatch.setattr(async_store, "_LONGEST_REST_S", 0.2)
    it = opening()
    keys, others = it.store("B"), it.store("C")
    with monkeypatch.context() as patched:
        patched.setattr(slotfile, "_punch", failing(errno.EIO))
        forget(it, "B")
        forget(it, "C")
        for _ in range(3):
            assert left_of(it, timeout_s=1) > 0
            assert f"if it ends before that, delete {it.tier.path}" in str(it.tier.deletion_problem())
            it.store("B")
            assert it.num_hits("B") == 0, "nothing of it is stored again meanwhile"
            assert until(lambda: it.tier._io.can_write)
    assert until(lambda: left_of(it) == 0)
    assert it.tier.deletion_problem() is None
    assert not [key for key in (*keys, *others) if payload(key)[:64] in files_of(it)]
    assert until(lambda: it.store("B") == it.hits(keys)), "then it is"


def test_blocks_of_windows_and_states_go_with_their_units(opening: Opening) -> None:
    groups = KVGroups(0, {1: OtherGroup(1), 2: OtherGroup(math.inf)})
    it = opening(groups=groups)
    units = it.announce("AB")
    keys = [groups.key_of(unit, group) for unit in units for group in (0, 1, 2)]
    it.submit_store(keys)
    it.settle()
    list(it.tier.take_ended())
    assert len(it.tier._stored) == 12
    receipt = forget(it, "B")
    assert receipt["num_blocks"] == {"disk": 9}
    assert left_of(it) == 0
    assert it.tier._stored == set(map(bytes, keys[:3]))
    files = files_of(it)
    assert [payload(key)[:64] in files for key in keys] == [True] * 3 + [False] * 9


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Open, or closed: what is read from and written to slots then waits."""
    opened = threading.Event()
    opened.set()
    for name in ("read", "write"):
        real = getattr(slotfile.SlotFile, name)

        def waiting(*args: Any, real: Any = real) -> Any:
            assert opened.wait(30)
            return real(*args)

        monkeypatch.setattr(slotfile.SlotFile, name, waiting)
    yield opened
    opened.set()


# Host memory that outlives an engine


def test_an_engine_after_one_that_was_killed_finds_nothing_of_what_was_forgotten(tmp_path: Path) -> None:
    files = EngineFiles(new_engine_id(os.getpid()), host_bytes=1 << 30)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spec, "kv_identity", lambda config: {"model": "demo", "weights": "5f3a"})
            with host_scheduler(60, "256KiB", files=files) as scheduler:
                it = Scene(scheduler, None)
                for number, documents in enumerate(("AB", "C", "c")):
                    it.ask(f"r{number}", documents)
                assert until(lambda: not it.scheduler.connector._host.journal._work)
                it.steps.rest(100_000)
                gone = keys_of("AB", "B")
                journal = journal_folder(files.engine_id)
                assert until(lambda: any(key in bytes_below(journal) for key in gone))
                it.forget("B")
                it.settle()
                assert not [key for key in gone if key in bytes_below(journal)]
                assert not [kv for kv in it.kv_of("AB", "B") if kv in it.host_memory()]
                num_before = it.num_resident("A", "C")
                assert num_before
                it.scheduler.add_request(prompt("another step", "A"))
                it.steps.rest(100_000)
                time.sleep(0.3)  # the journal is written every tenth of a second
            with host_scheduler(60, "256KiB", files=files) as scheduler:
                after = Scene(scheduler, None)
                assert after.num_resident("B") == 0
                assert after.num_resident("A") > 0
                assert after.forget("c")["forgotten"] == ["c"], "the id that was named later"
                after.settle()
                assert after.num_resident("C") == 0
    finally:
        files.remove()


@pytest.mark.parametrize("has_disk", [True, False], ids=["with a disk", "without"])
def test_what_a_killed_engine_left_in_host_memory_is_overwritten_by_the_next(tmp_path: Path, has_disk: bool) -> None:
    files = EngineFiles(new_engine_id(os.getpid()), host_bytes=1 << 30)
    tiers: dict[str, Any] = {"directory": tmp_path, "disk_bytes": "4MiB"} if has_disk else {}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for module in (spec, disk):
                patch.setattr(module, "kv_identity", lambda config: {"model": "demo", "weights": "5f3a"})
            with host_scheduler(60, "256KiB", files=files, **tiers) as scheduler:
                it = Scene(scheduler, tmp_path)
                it.ask("r", "AB")
                if not has_disk:
                    shutil.rmtree(journal_folder(files.engine_id))  # which was not written to the end
                gone = it.kv_of("AB", "B")
                assert gone
                assert all(kv in it.host_memory() for kv in gone)
            patch.setenv(STARTED_AGAIN_ENV, "1")
            with host_scheduler(60, "256KiB", files=files, **tiers) as scheduler:
                after = Scene(scheduler, tmp_path)
                assert all(kv in after.host_memory() for kv in gone), "it is found no more, and is there"
                after.forget("B")
                after.settle()
                assert not any(kv in after.host_memory() for kv in gone)
    finally:
        files.remove()


def bytes_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("is_full", [False, True])
def test_a_reset_that_could_not_empty_the_disk_is_a_problem(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, *, is_full: bool
) -> None:
    it = opening()
    it.store("B")
    if is_full:
        monkeypatch.setattr(ChunkStore, "clear", failing(CacheWriteError("No space left on device")))
    it.tier.clear()
    forget(it, "B")
    assert left_of(it) == 0
    assert (it.tier.deletion_problem() is not None) == is_full


def test_an_erasure_that_the_disk_refuses_to_the_end_is_found_no_more_after_a_restart(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = opening()
    keys = it.store("B")
    with monkeypatch.context() as patched:
        patched.setattr(slotfile, "_punch", failing(errno.EIO))
        forget(it, "B")
        assert left_of(it, timeout_s=1) > 0
        it.close()
    after = opening()
    assert after.num_hits("B") == 0, "rows go before slots: what is not found cannot be served"
    forget(after, "B")
    assert left_of(after) == 0
    assert not [key for key in keys if payload(key)[:64] in files_of(after)]


def test_an_erasure_that_fails_after_a_reset_is_a_problem(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    it = opening()
    it.store("B")
    it.tier.clear()
    monkeypatch.setattr(ChunkStore, "erase", failing(CacheWriteError("No space left on device")))
    forget(it, "B")
    assert left_of(it) == 0
    assert it.tier.deletion_problem() is not None, "the bytes of what was emptied may still be there"
