"""A disk tier that was warmed once is what engines begin with, and a part of the warm-up is not asked again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache_core.bench.compare.comparison import Comparison, run_comparison
from ragcache_core.bench.compare.options import BenchOptions, prepare
from ragcache_core.bench.compare.peers import PEERS, Peer
from ragcache_core.bench.compare.prompts import TracedPrompts
from ragcache_core.bench.compare.results import Results
from ragcache_core.bench.compare.sessions import Amounts
from ragcache_core.bench.compare.warm_disks import NUM_AWAKE, WarmDisks, copy_sparse, wait_until_still
from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_core.sim.traces.trace import Trace, TracedRequest
from tests.support.scripted_server import ScriptedServer
from tests.unit.bench.test_compare import Told

NUM_WARM_UP, NUM_REQUESTS = NUM_AWAKE + 10, 2
TRACE = Trace.from_requests(TracedRequest(float(i), (f"d{i % 3}",), (40,), 8, 4) for i in range(70))
PROMPTS = TracedPrompts(TRACE, 1_024, seed=0)


class Engines:
    """Opens engines over a scripted server; each leaves in its folder what it found there and a line of its own."""

    def __init__(self, server: ScriptedServer, tokenizer: str) -> None:
        self._server, self._tokenizer = server, tokenizer
        self.opened: list[tuple[str, list[str]]] = []
        self._num_before: list[int] = []

    def open(self, peer: Peer, host_bytes: int, folder: Path) -> Engine:
        tier = folder / "tier"
        found = tier.read_text().split() if tier.exists() else []
        self.opened.append((peer.name, found))
        tier.write_text(" ".join([*found, f"seen-by-{len(self.opened)}"]))
        self._num_before.append(self._num_seen())
        return Engine.connect(self._server.url, tokenizer=self._tokenizer)

    def num_asked(self) -> list[int]:
        """Return how many requests each engine was asked."""
        ends = [*self._num_before[1:], self._num_seen()]
        return [end - start for start, end in zip(self._num_before, ends, strict=True)]

    def _num_seen(self) -> int:
        return sum("prompt" in seen.body for seen in self._server.requests)


@pytest.fixture
def engines(demo_model: str) -> Iterator[Engines]:
    with ScriptedServer() as server:
        yield Engines(server, demo_model)


def compare(engines: Engines, folder: Path, *names: str, facts: str = "a", host_bytes: tuple[int, ...] = (64,)) -> None:
    peers = tuple(PEERS[name] for name in names)
    amounts = Amounts(NUM_WARM_UP, NUM_REQUESTS)
    comparison = Comparison(peers, host_bytes, (100.0,), False, (0,), amounts)
    results = Results(folder / f"{len(engines.opened)}.json", {}, {})
    disks = WarmDisks(folder / "disks", {"facts": facts})
    run_comparison(comparison, results, lambda _: PROMPTS, engines.open, Told(), disks)


def test_a_disk_is_warmed_once_and_every_engine_of_that_kind_begins_with_it(engines: Engines, tmp_path: Path) -> None:
    compare(engines, tmp_path, "ragcache", host_bytes=(64, 128))
    assert engines.opened == [("ragcache", []), ("ragcache", ["seen-by-1"]), ("ragcache", ["seen-by-1"])]
    assert engines.num_asked() == [10, NUM_AWAKE + NUM_REQUESTS, NUM_AWAKE + NUM_REQUESTS]
    compare(engines, tmp_path, "ragcache")
    assert engines.opened[3:] == [("ragcache", ["seen-by-1"])], "later comparisons have it as well"


@pytest.mark.slow
def test_another_engine_and_other_requests_have_disks_of_their_own(engines: Engines, tmp_path: Path) -> None:
    compare(engines, tmp_path, "ragcache", "vllm-host-lru")
    compare(engines, tmp_path, "ragcache", facts="b")
    assert [found for _, found in engines.opened] == [[], ["seen-by-1"], [], ["seen-by-3"], [], ["seen-by-5"]]


def test_an_engine_without_a_disk_sees_the_whole_warm_up(engines: Engines, tmp_path: Path) -> None:
    compare(engines, tmp_path, "vllm")
    assert engines.opened == [("vllm", [])]
    assert engines.num_asked() == [NUM_WARM_UP + NUM_REQUESTS]
    assert not (tmp_path / "disks").exists()


def test_a_disk_whose_warming_failed_is_not_kept(engines: Engines, tmp_path: Path) -> None:
    disks = WarmDisks(tmp_path / "disks", {})

    def fail(folder: Path) -> None:
        folder.mkdir()
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError):
        disks.copied("ragcache", 0, fail, tmp_path / "to")
    assert list((tmp_path / "disks").iterdir()) == []


def test_a_copy_has_the_same_bytes_and_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.seek(1 << 26)
        file.write(b"in the middle")
        file.truncate(1 << 27)
    copy_sparse(str(source), str(target))
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks <= source.stat().st_blocks + 8
    empty = tmp_path / "empty"
    empty.touch(0o600)
    copy_sparse(str(empty), str(target))
    assert target.read_bytes() == b""
    assert target.stat().st_mode & 0o777 == 0o600


def test_it_is_waited_until_nothing_is_written_any_more(tmp_path: Path) -> None:
    (tmp_path / "tier").touch()
    os.utime(tmp_path / "tier", (0, 0))
    wait_until_still(tmp_path)


def test_warm_disks_need_a_disk(tmp_path: Path, demo_model: str) -> None:
    with pytest.raises(ConfigError, match="no engine has one: give --disk-memory as well"):
        prepare(BenchOptions(model=demo_model, warm_disks=tmp_path, requests=4, warm_up=4, rates=(1.0,), seeds=1))
