"""When reads from disk begin, what waits for them, and when computing is faster: our scheduler over all three tiers."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import RequestStatus

from ragcache_core.chunkstore import async_store
from ragcache_core.chunkstore.slotfile import SlotFile
from ragcache_core.policy import PrefillCostModel
from ragcache_core.profiles.prefill import Profile, save_profile
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.lower.manager import TierManager
from ragcache_core.wire import KEY
from tests.engine.vllm_plugin.storing_scene import FULL, LATENT, STATE, WINDOW, Steps, host_scheduler, request
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("identity")
NUM_BLOCKS = 400


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(10, 900), k=count)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds every read of the disk until it is set."""
    go_on, read = threading.Event(), SlotFile.read
    monkeypatch.setattr(SlotFile, "read", lambda self, *args: (go_on.wait(30), read(self, *args))[1])
    yield go_on
    go_on.set()


def stored(directory: Path, *prompts: list[int]) -> dict[str, Any]:
    """Compute prompts on an engine whose disk keeps them, and return the settings of the next engine on it."""
    tiers = {"disk_bytes": "4MiB", "directory": directory}
    with host_scheduler(NUM_BLOCKS, "1MiB", **tiers) as scheduler:
        steps = Steps(scheduler, is_async=False)
        for number, words in enumerate(prompts):
            scheduler.add_request(request(f"first{number}", words, 1))
        assert until(partial(rests, steps), 30.0)
    return tiers


def keep_busy(scheduler: Any, steps: Steps, num_requests: int = 8) -> None:
    """Let as many requests run as may, for long."""
    for number in range(num_requests):
        scheduler.add_request(request(f"busy{number}", tokens(1000 + number, 20), 900))
    while len(scheduler.running) < num_requests:
        steps.step()


def num_host_blocks(scheduler: Any, name: str) -> int:
    """Return how many leading blocks of a request lie in host memory, or are on their way there."""
    tree = scheduler._controller.tree
    last = tree.locate(scheduler._controller.state_of(name).retained)
    num_units: int = tree.num_leading_units(last.node, (Tier.HOST,))
    return num_units


def rests(steps: Steps) -> bool:
    return not steps.step()


def end(scheduler: Any, name: str) -> None:
    scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)


def test_a_read_gets_no_memory_that_a_store_from_before_a_reset_still_writes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tokens(1, 64)
    with host_scheduler(NUM_BLOCKS, "1MiB", **stored(tmp_path, [*words, *tokens(2, 9)])) as scheduler:
        steps = Steps(scheduler, is_async=False, store_steps=3)
        copy = steps._store
        # sleeps until a read that begins with the same step has ended
        monkeypatch.setattr(steps, "_store", lambda jobs: (time.sleep(0.1 if jobs else 0.0), copy(jobs)))
        scheduler.add_request(request("stored", tokens(3, 80), 4))
        steps.step()
        with scheduler.keeping_weights():
            scheduler.connector.reset_cache()
        scheduler.add_request(request("read", [*words, *tokens(4, 9)], 4))
        assert until(partial(rests, steps), 30.0)
        assert scheduler._controller.counters.num_tokens_by_tier[Tier.DISK] == len(words)
        host = scheduler.connector.tiers.host
        num_free = host.rows.num_free
        assert num_free + scheduler._controller.tree.tiers[Tier.HOST].num_units == host.num_rows, "none is lost"


def test_what_a_request_needs_is_read_while_it_is_queued(tmp_path: Path) -> None:
    words = tokens(1, 100)
    with host_scheduler(NUM_BLOCKS, "1MiB", **stored(tmp_path, words)) as scheduler:
        steps = Steps(scheduler, is_async=False)
        keep_busy(scheduler, steps)
        late = request("late", words, 2)
        scheduler.add_request(late)
        assert num_host_blocks(scheduler, "late") == 0
        steps.step()
        assert num_host_blocks(scheduler, "late") == 6
        assert late.status == RequestStatus.WAITING
        end(scheduler, "busy0")
        assert until(lambda: steps.step() and late.num_output_tokens > 0, 30.0)
        assert scheduler._controller.counters.num_tokens_by_tier[Tier.DISK] == 96


def test_an_idle_engine_prefetches_a_speculative_prompt_into_host_memory(tmp_path: Path) -> None:
    words, other = tokens(1, 100), tokens(2, 100)
    with host_scheduler(NUM_BLOCKS, "1MiB", **stored(tmp_path, words, other)) as scheduler:
        steps = Steps(scheduler, is_async=False)
        counters = scheduler._controller.counters
        assert not steps.step()
        assert scheduler.prefetch(request("known", [*words, *tokens(3, 100)], 1)) == {"num_read_tokens": 96}
        assert scheduler.prefetch(request("unknown", tokens(4, 100), 1)) == {"num_read_tokens": 0}
        assert until(partial(rests, steps), 30.0)
        assert scheduler.prefetch(request("again", words, 1)) == {"num_read_tokens": 0}
        assert not steps.step()
        assert counters.num_requests == 0
        assert not scheduler.connector.copies.num_requests
        for number, asked in enumerate((words, other)):
            scheduler.add_request(request(f"real{number}", asked, 2))
            assert until(partial(rests, steps), 30.0)
        assert (counters.num_tokens_by_tier[Tier.HOST], counters.num_tokens_by_tier[Tier.DISK]) == (96, 96)


def test_speculative_prompts_take_at_most_a_quarter_of_host_memory(tmp_path: Path, gate: threading.Event) -> None:
    prompts = [*(tokens(number, 100) for number in range(8)), tokens(9, 600)]
    with host_scheduler(NUM_BLOCKS, "128KiB", **stored(tmp_path, *prompts)) as scheduler:
        num_host = scheduler._controller.tiers[Tier.HOST].num_blocks
        steps = Steps(scheduler, is_async=False)
        begun = [scheduler.prefetch(request(f"prompt{number}", words, 1)) for number, words in enumerate(prompts)]
        assert begun == [{"num_read_tokens": 96}] * 8 + [{"num_read_tokens": 0}]
        for _ in range(5):
            steps.step()
        in_host = scheduler._controller.tree.tiers[Tier.HOST].num_units
        assert num_host // 4 - 6 < in_host <= num_host // 4
        gate.set()
        assert until(partial(rests, steps), 30.0)
        assert not scheduler._controller.tree.tiers[Tier.HOST].in_use, "nothing is promised for ever"
        assert scheduler._controller.tree.tiers[Tier.HOST].num_units > in_host, "the others, when there was room"


def test_reads_ahead_leave_half_of_host_memory_to_others_and_guesses_a_quarter(
    tmp_path: Path, gate: threading.Event
) -> None:
    prompts = [tokens(number, 100) for number in range(8)]  # six blocks each
    with host_scheduler(NUM_BLOCKS, "128KiB", **stored(tmp_path, *prompts)) as scheduler:
        num_host = scheduler._controller.tiers[Tier.HOST].num_blocks
        steps = Steps(scheduler, is_async=False)
        keep_busy(scheduler, steps)
        guess = {KEY: {"version": 1, "speculation": "s"}}
        for number, words in enumerate(prompts):
            scheduler.add_request(request(f"guess{number}", words, 2, params=guess))
        assert [scheduler._controller.is_speculative(f"guess{number}") for number in range(8)] == [True] * 8
        steps.step()
        assert promised(scheduler, "guess") * 6 <= num_host // 4
        assert promised(scheduler, "guess") >= 1
        for number, words in enumerate(prompts):
            scheduler.add_request(request(f"real{number}", words, 2))
        steps.step()
        num_ahead = promised(scheduler, "guess") + promised(scheduler, "real")
        assert num_host // 2 - 6 < num_ahead * 6 <= num_host // 2
        assert promised(scheduler, "real") >= 1
        gate.set()  # closing waits for what is being read


def promised(scheduler: Any, name: str) -> int:
    """Return to how many requests that are queued host memory was promised."""
    return sum(scheduler.connector._host.promises.is_looked_up(f"{name}{number}") for number in range(8))


def test_a_request_that_waits_for_the_disk_is_not_looked_up_again(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tokens(1, 100)
    asked: list[object] = []
    look_up = TierManager.leading
    monkeypatch.setattr(
        TierManager, "leading", lambda self, keys, *args: (asked.extend(keys), look_up(self, keys, *args))[1]
    )
    with host_scheduler(NUM_BLOCKS, "1MiB", **stored(tmp_path, words)) as scheduler:
        steps = Steps(scheduler, is_async=False)
        asked.clear()
        waiting = request("waiting", words, 2)
        scheduler.add_request(waiting)
        for _ in range(50):
            steps.step()
        assert len(asked) == 6
        gate.set()
        assert until(lambda: steps.step() and waiting.num_output_tokens > 0, 30.0)
        assert len(asked) == 12
        assert scheduler._controller.counters.num_tokens_by_tier[Tier.DISK] == 96


def profile(path: Path, seconds_per_token: float) -> Path:
    """Write the profile of an engine that computes so fast."""
    cost = PrefillCostModel((0, 2048), (1, 2048), ((seconds_per_token, 2048 * seconds_per_token),) * 2)
    save_profile(Profile("model", "hardware", "2026-01-01T00:00:00", "0.32", "float32", 1, 0.0, cost), path)
    return path


@pytest.mark.parametrize("is_engine_slow", [False, True])
def test_what_is_computed_faster_than_it_was_read_lately_is_a_miss(
    tmp_path: Path, is_engine_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [tokens(number, 100) for number in range(3)]
    settings = {
        **stored(tmp_path / "kv", *prompts),
        "profile": profile(tmp_path / "profile.json", 1.0 if is_engine_slow else 1e-9),
    }
    with host_scheduler(NUM_BLOCKS, "1MiB", **settings) as scheduler:
        steps = Steps(scheduler, is_async=False)

        def ask(number: int) -> int:
            """Return how many tokens came from disk."""
            before: int = scheduler._controller.counters.num_tokens_by_tier[Tier.DISK]
            asked = request(f"r{number}", prompts[number], 2)
            scheduler.add_request(asked)
            assert until(partial(rests, steps), 30.0)
            assert asked.num_output_tokens == 2
            num_read: int = scheduler._controller.counters.num_tokens_by_tier[Tier.DISK] - before
            return num_read

        assert ask(0) == 96, "it is not known yet how fast the disk is"
        assert ask(1) == (96 if is_engine_slow else 0)
        monkeypatch.setattr(async_store, "_RATE_LASTS_S", 0.0)
        assert ask(2) == 96, "it is measured again now and then"


def test_what_cannot_be_read_is_computed_and_many_failed_loads_log_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    prompts = [tokens(number, 100) for number in range(6)]
    tried: list[int] = []

    def fail(_file: SlotFile, slots: list[int], targets: list[memoryview]) -> None:
        tried.extend(slots)
        for target in targets:
            target[:] = b"\xff" * len(target)  # the first block stored is zeros
        raise OSError(errno.EIO, "as the test wants it")

    with host_scheduler(NUM_BLOCKS, "1MiB", **stored(tmp_path, *prompts)) as scheduler:
        steps = Steps(scheduler, is_async=False)
        counters = scheduler._controller.counters
        with monkeypatch.context() as patched:
            patched.setattr(SlotFile, "read", fail)
            asked = [request(f"r{number}", words, 3) for number, words in enumerate(prompts[:5])]
            for each in asked:
                scheduler.add_request(each)
            assert until(partial(rests, steps), 30.0)
        assert len(tried) >= 5
        assert counters.num_tokens_by_tier[Tier.DISK] == 0
        assert [each.num_output_tokens for each in asked] == [3] * 5
        lines = [line for line in plugin_log.messages if line.startswith("RC-DISK-UNREADABLE: ")]
        assert len(lines) == 1
        scheduler.add_request(request("later", prompts[5], 1))
        assert until(partial(rests, steps), 30.0)
        assert counters.num_tokens_by_tier[Tier.DISK] == 96, "the disk is asked again"


@pytest.mark.parametrize(
    ("groups", "is_async"),
    [((FULL,), False), ((LATENT,), True), ((FULL, WINDOW), True), ((STATE, WINDOW, FULL), False)],
    ids=["full attention", "latent attention, two steps in flight", "windows, two steps", "states and windows"],
)
def test_no_request_reads_kv_of_other_tokens_however_long_the_disk_takes(
    tmp_path: Path, groups: tuple[KVCacheSpec, ...], is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SlotFile.read
    pauses = random.Random(1)
    monkeypatch.setattr(
        SlotFile, "read", lambda self, *args: (time.sleep(pauses.choice((0, 0, 0.002, 0.01))), read(self, *args))[1]
    )
    num_from_disk = 0
    documents = [tokens(100 + i, 20 + 9 * i) for i in range(6)]
    for seed, host_bytes in enumerate(("32KiB", "64KiB", "1MiB")):
        dice = random.Random(seed)
        tiers: dict[str, Any] = {"disk_bytes": "256KiB", "directory": tmp_path, "groups": groups}
        with host_scheduler(24 * len(groups), host_bytes, is_async=is_async, **tiers) as scheduler:
            steps = Steps(scheduler, is_async, store_steps=dice.choice((1, 2, 5)))
            for number in range(120):
                words = [*dice.choice(documents), *dice.choice(documents), *tokens(number, 9)]
                guess = {KEY: {"version": 1, "speculation": "s"}} if number % 5 == 2 else None
                scheduler.add_request(request(f"r{number}", words, dice.randrange(1, 30), params=guess))
                if number % 4 == 1:
                    nobodys = [*dice.choice(documents), *dice.choice(documents)]
                    scheduler.prefetch(request(f"p{number}", nobodys, 1))
                for _ in range(dice.randrange(6)):
                    steps.step()
                if number % 7 == 3 and scheduler.requests:
                    end(scheduler, dice.choice(list(scheduler.requests)))
            assert until(partial(rests, steps), 60.0)
            assert not scheduler.requests
            assert not scheduler.connector.copies.num_requests
            host = scheduler.connector._host
            assert not any(host._num_reads[row] for row in host.contents().values())
            assert not scheduler._controller.tree.tiers[Tier.HOST].in_use, "nothing is promised for ever"
            num_from_disk += scheduler._controller.counters.num_tokens_by_tier[Tier.DISK]
    assert num_from_disk > 0
