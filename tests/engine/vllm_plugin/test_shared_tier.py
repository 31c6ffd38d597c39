"""The shared tier between host memory and a Redis: what one engine stores another loads, and all else is a miss."""

from __future__ import annotations

import base64
import math
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block

from ragcache_core.chunkstore import async_store
from ragcache_core.chunkstore.encryption import KEY_ENV
from ragcache_core.errors import ConfigError
from ragcache_core.policy import PrefillCostModel
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.vllm_plugin.cache.controller import CacheController
from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
from ragcache_core.vllm_plugin.lower.jobs import EndedJob, TierJob
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.vllm_plugin.shared import io as shared_io
from ragcache_core.vllm_plugin.shared import objects as shared_objects
from ragcache_core.vllm_plugin.shared import tier as shared_tier
from ragcache_core.vllm_plugin.shared.tier import SharedTier
from ragcache_core.wire import RequestMetadata
from tests.engine.vllm_plugin.disk_scene import BLOCK, BLOCKS, CHUNK_BYTES, NUM_ROWS, UNTOUCHED, chain, payload
from tests.support.shared_stores import RedisServer, redis_server
from tests.support.waiting import until

BOUND_S = shared_io.LOOKUP_TIMEOUT_S + shared_io.STALL_TIMEOUT_S + 0.5


class Machine:
    """Host memory and the tier of one engine; what a test asks of it, the manager of tiers asks of it."""

    def __init__(
        self,
        url: str,
        *,
        max_age: float | None = None,
        is_profiled: bool = False,
        ttl_s: float | None = None,
        max_bytes: int | None = None,
        is_read_only: bool = False,
        **settings: Any,
    ):
        self.memory = np.full((NUM_ROWS, CHUNK_BYTES), UNTOUCHED, dtype=np.uint8)
        self.controller = CacheController(
            PluginSettings(policy="pgdsf", max_age=max_age, **settings),
            tokens_per_block=BLOCK,
            prefill_cost=PrefillCostModel.default(),
            is_profiled=is_profiled,
            now_s=time.time(),
        )
        spec: Any = SimpleNamespace(controller=self.controller, config=None)
        self.tier = SharedTier(
            spec, memoryview(self.memory), url, ttl_s, max_bytes=max_bytes, is_read_only=is_read_only
        )
        self.num_jobs = 0
        self.results: dict[int, EndedJob] = {}

    @property
    def counters(self) -> Any:
        self.tier.end_step(ScheduleEndContext((), ()))
        return self.controller.counters

    def begin(self, documents: str) -> tuple[list[BlockKey], ReqContext]:
        """Let a request for documents come, and return its keys."""
        self.num_jobs += 1
        name, keys = f"{documents} {self.num_jobs}", chain(documents)
        segments, end = [], 0
        for doc in documents:
            segments.append(PromptSegment(SegmentKind.DOCUMENT, end, end + BLOCKS[doc] * BLOCK, doc))
            end += BLOCKS[doc] * BLOCK
        self.controller.on_new_request(name, RequestMetadata(tuple(segments)), keys, end, 0.0)
        return keys, ReqContext(name)

    def end(self, context: ReqContext) -> None:
        self.controller.on_finished(context.req_id)
        self.tier.end_request(context)

    def submit_store(self, documents: str) -> int:
        keys, context = self.begin(documents)
        for row, key in enumerate(keys):
            self.memory[row] = np.frombuffer(payload(key), dtype=np.uint8)
        self.tier.store(TierJob(self.num_jobs, context, keys, range(len(keys))))
        self.end(context)
        return self.num_jobs

    def store(self, documents: str) -> None:
        """Store a request's chunks, and wait until the threads have nothing more to do with them."""
        self.result(self.submit_store(documents))
        assert until(lambda: not self.tier._io.num_waiting)

    def result(self, job_id: int, timeout_s: float = 15.0) -> EndedJob:
        def has_ended() -> bool:
            self.results.update({ended.number: ended for ended in self.tier.take_ended()})
            return job_id in self.results

        assert until(has_ended, timeout_s)
        return self.results.pop(job_id)

    def found(self, keys: list[BlockKey], context: ReqContext) -> int:
        """Return how many leading chunks a look-up finds, asked again and again as vLLM does."""
        said: list[Sequence[BlockKey] | None] = []

        def is_said() -> bool:
            said[:] = [self.tier.find(key, context) for key in keys]
            return None not in said

        assert until(is_said, BOUND_S)
        return next((i for i, found in enumerate(said) if not found), len(said))

    def submit_load(self, keys: list[BlockKey], context: ReqContext) -> int:
        self.memory[:] = UNTOUCHED
        self.num_jobs += 1
        self.tier.load(TierJob(self.num_jobs, context, keys, range(8, 8 + len(keys))))
        return self.num_jobs

    def read(self, documents: str) -> int:
        """Look a request up and load what is found; return how many leading chunks came, each with its right bytes."""
        keys, context = self.begin(documents)
        keys = keys[: self.found(keys, context)]
        came = set(self.result(self.submit_load(keys, context)).loaded) if keys else set()
        for row, key in enumerate(keys, 8):
            assert key not in came or self.memory[row].tobytes() == payload(key)
        if keys:
            again = self.found(keys, context)
            assert again <= len(keys)
            assert (again == len(keys)) == (len(came) == len(keys)), "what did not come is asked for again and again"
        self.end(context)
        return next((i for i, key in enumerate(keys) if key not in came), len(keys))


Starting = Callable[..., Machine]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starting]:
    monkeypatch.setattr(shared_tier, "shared_identity", lambda config: {"model": "demo", "weights": "5f3a"})
    machines: list[Machine] = []

    def begin(url: str, **settings: Any) -> Machine:
        machines.append(Machine(url, **settings))
        return machines[-1]

    yield begin
    for machine in machines:
        machine.tier.shutdown()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


def rests_of(server: RedisServer) -> list[bytes]:
    return sorted(server.client().keys())


def test_what_one_engine_stored_another_loads(start: Starting, server: RedisServer) -> None:
    one, other = start(server.url), start(server.url)
    assert one.read("AB") == 0
    one.store("AB")
    assert other.read("ABC") == 4
    assert other.read("B") == 0, "behind nothing it is another KV"
    report = {tier["name"]: tier for tier in other.controller.report()["tiers"]}  # type: ignore[attr-defined]  # JSON
    assert (report["shared"]["num_blocks"], report["shared"]["is_enabled"]) == (4, True)
    assert one.controller.counters.num_shared_failures == 0


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_what_one_engine_stored_compressed_engines_with_other_settings_load(
    start: Starting, server: RedisServer, monkeypatch: pytest.MonkeyPatch, is_encrypted: bool
) -> None:
    pytest.importorskip("blosc2")
    monkeypatch.setattr(sys.modules[__name__], "payload", lambda key: bytes(key[:8]) * (CHUNK_BYTES // 8))
    if is_encrypted:
        monkeypatch.setenv(KEY_ENV, base64.b64encode(os.urandom(32)).decode())
    start(server.url, compression="zstd", disk_bytes=1).store("AB")
    sizes = [server.client().strlen(name) for name in rests_of(server)]
    assert len(sizes) == 4
    assert max(sizes) < CHUNK_BYTES // 2
    for setting in ("off", "auto", "lz4", "zstd"):
        other = start(server.url, compression=setting, disk_bytes=1)
        assert other.read("AB") == 4
        assert other.counters.num_corrupt_blocks == 0


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_objects_from_before_records_had_a_format_are_loaded(
    start: Starting, server: RedisServer, monkeypatch: pytest.MonkeyPatch, is_encrypted: bool
) -> None:
    """``payload | time | XXH3 of these and the name`` is what RAGCache stored before."""
    if is_encrypted:
        monkeypatch.setenv(KEY_ENV, base64.b64encode(os.urandom(32)).decode())
    one, client = start(server.url), server.client()
    for key in chain("AB"):
        name, body = one.tier._name_of(key), payload(key) + struct.pack("<d", time.time())
        digest = xxhash.xxh3_128(body)
        digest.update(name.encode())
        data = body + digest.digest()
        keys = one.tier._objects._keys
        client.set(name, data if keys is None else keys.encrypt(data, name.encode()))
    assert one.read("AB") == 4
    assert one.counters.num_corrupt_blocks == 0


def test_an_object_says_its_format_its_codec_and_its_length_and_another_one_is_a_miss() -> None:
    objects = shared_objects.Objects({"model": "demo"}, 96, None)
    packed = objects.pack("name", bytes(range(96)), 5.0)
    body = packed[:-16]
    assert body[96:] == struct.pack("<dQBB", 5.0, 96, 0, 3)
    row, computed_s = objects.unpack("name", packed) or (np.zeros(0), 0.0)
    assert (row.tobytes(), computed_s) == (bytes(range(96)), 5.0)
    for record in ((5.0, 95, 0, 3), (5.0, 96, 1, 3), (5.0, 96, 0, 4), (math.inf, 96, 0, 3)):
        changed = body[:96] + struct.pack("<dQBB", *record)
        assert objects.unpack("name", changed + shared_objects._digest("name", changed, 3)) is None
    for size in range(len(packed)):
        assert objects.unpack("name", packed[:size]) is None


@pytest.mark.parametrize("damage", ["turned", "cut", "emptied", "swapped"])
def test_a_damaged_object_is_a_miss_and_so_is_what_stands_on_it(
    start: Starting, server: RedisServer, damage: str
) -> None:
    one, other = start(server.url), start(server.url)
    one.store("AB")
    keys = [other.tier._name_of(key) for key in chain("AB")]
    client = server.client()
    match damage:
        case "turned":
            client.setrange(keys[2], 1000, b"\0" * 8)
        case "cut":
            client.set(keys[2], (client.get(keys[2]) or b"")[:-1])
        case "emptied":
            client.set(keys[2], b"")
        case _:
            client.copy(keys[1], keys[2], replace=True)
    assert other.read("AB") == 2
    assert other.counters.num_corrupt_blocks == 1
    other.store("AB")  # recomputed
    assert start(server.url).read("AB") == 4


def test_another_models_objects_are_other_objects(
    start: Starting, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(server.url).store("AB")
    monkeypatch.setattr(shared_tier, "shared_identity", lambda config: {"model": "demo", "weights": "0000"})
    assert start(server.url).read("AB") == 0
    server.client().set("ragcache/foreign", b"x")


def test_encrypted_objects_are_read_only_with_their_key(
    start: Starting, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, new = (base64.b64encode(os.urandom(32)).decode() for _ in range(2))
    monkeypatch.setenv(KEY_ENV, key)
    start(server.url).store("AB")
    for name in rests_of(server):
        data = server.client().get(name) or b""
        assert not any(payload(chunk)[:64] in data for chunk in chain("AB"))
        assert not any(chunk.hex() in name.decode() for chunk in chain("AB")), "a guess is not confirmed"
    assert start(server.url).read("AB") == 4
    monkeypatch.setenv(KEY_ENV, f"{new}\n{key}")
    assert start(server.url).read("AB") == 4
    monkeypatch.setenv(KEY_ENV, new)
    assert start(server.url).read("AB") == 0
    monkeypatch.delenv(KEY_ENV)
    assert start(server.url).read("AB") == 0


def test_a_store_that_is_killed_is_a_miss_at_once_and_is_left_alone(
    start: Starting, server: RedisServer, plugin_log: pytest.LogCaptureFixture
) -> None:
    one = start(server.url)
    one.store("AB")
    keys, context = one.begin("AB")
    assert one.found(keys, context) == 4
    server.close()
    began_s = time.monotonic()
    assert not one.result(one.submit_load(keys, context)).loaded
    assert one.found(keys, context) == 0
    one.end(context)
    assert one.read("AB") == 0
    one.store("ABC")
    assert time.monotonic() - began_s < BOUND_S
    assert one.counters.num_shared_failures >= 1
    assert not one.tier.is_serving
    told = [line for line in plugin_log.messages if "Reading from" in line]
    assert len(told) == 1
    assert "see that it runs" in told[0]


@pytest.mark.parametrize("moment", ["look-up", "load", "store"])
def test_a_hanging_store_delays_no_request_beyond_the_bound(start: Starting, server: RedisServer, moment: str) -> None:
    one = start(server.url)
    one.store("AB")
    keys, context = one.begin("AB")
    if moment != "look-up":
        assert one.found(keys, context) == 4
    server.process.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    if moment == "look-up":
        assert one.found(keys, context) == 0
    elif moment == "load":
        assert not one.result(one.submit_load(keys, context)).loaded
        assert (one.memory == UNTOUCHED).all()
    else:
        one.result(one.submit_store("ABC"))
    assert time.monotonic() - began_s < BOUND_S
    one.tier.drain()
    assert time.monotonic() - began_s < BOUND_S
    server.process.send_signal(signal.SIGCONT)


def test_a_store_that_comes_back_is_used_again(
    start: Starting, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_store, "REST_S", 0.1)
    one = start(server.url)
    one.store("AB")
    server.process.send_signal(signal.SIGSTOP)
    assert one.read("AB") == 0
    server.process.send_signal(signal.SIGCONT)
    assert until(lambda: one.read("AB") == 4, 10.0)
    assert one.tier.is_serving


def test_a_full_store_takes_nothing_and_still_gives(
    start: Starting, server: RedisServer, plugin_log: pytest.LogCaptureFixture
) -> None:
    one = start(server.url)
    one.store("AB")
    server.client().config_set("maxmemory", "1kb")
    one.store("ABCD")
    assert one.read("ABCD") == 4
    assert one.counters.num_dropped_blocks == 8
    report = {tier["name"]: tier for tier in one.controller.report()["tiers"]}  # type: ignore[attr-defined]  # JSON
    assert report["shared"]["num_dropped_blocks"] == 8
    assert "set maxmemory-policy to allkeys-lru" in plugin_log.text


def bytes_in(server: RedisServer) -> int:
    return sum(server.client().memory_usage(name) or 0 for name in rests_of(server))


def let_pass(server: RedisServer, seconds: int = 100) -> None:
    """Have all objects unused for some more seconds, as a server counts them."""
    client = server.client()
    for name in rests_of(server):
        idle_s = seconds + int(client.object("IDLETIME", name) or 0)
        client.restore(name, 0, client.dump(name), replace=True, idletime=idle_s)  # type: ignore[arg-type]  # bytes


LIMIT = 14 * CHUNK_BYTES
ORDERS = ("AB", "CA", "BC", "D", "ABC", "CAB", "BD", "DA", "CD")


def test_engines_keep_a_limit_of_bytes_and_what_was_used_last(start: Starting, server: RedisServer) -> None:
    engines = [start(server.url, max_bytes=LIMIT) for _ in range(2)]
    server.client().set("of another program", bytes(2 * LIMIT))
    limit = LIMIT + (server.client().memory_usage("of another program") or 0)
    for i, documents in enumerate(ORDERS):
        engines[i % 2].read(documents)
        let_pass(server)
        engines[i % 2].store(documents)
        assert bytes_in(server) <= limit
        assert start(server.url).read(documents) == sum(map(BLOCKS.__getitem__, documents)), "what came last is there"
    assert start(server.url).read(ORDERS[0]) == 0
    assert all(one.counters.num_dropped_blocks == 0 for one in engines)
    shared = [tier for one in engines for tier in one.controller.report()["tiers"] if tier["name"] == "shared"]  # type: ignore[attr-defined]  # JSON
    assert [tier["capacity_bytes"] for tier in shared] == [LIMIT, LIMIT]
    assert all(0 < tier["used_bytes"] <= LIMIT for tier in shared)
    assert all(tier["num_evicted_blocks"] for tier in shared)
    assert server.client().exists("of another program")


def test_what_is_loaded_stays_where_the_store_has_a_limit(start: Starting, server: RedisServer) -> None:
    one = start(server.url, max_bytes=LIMIT)
    one.store("AB")
    let_pass(server)
    one.store("D")
    let_pass(server)
    assert start(server.url).read("AB") == 4
    let_pass(server)
    one.store("CA")
    assert start(server.url).read("AB") == 4
    assert start(server.url).read("D") < 6
    let_pass(server)
    assert one.read("D") < 6
    one.store("D")
    assert start(server.url).read("D") == 6, "what was deleted is stored again"


def test_a_store_that_holds_more_than_a_new_limit_shrinks_with_the_next_write(
    start: Starting, server: RedisServer
) -> None:
    one = start(server.url)
    for documents in ORDERS:
        one.store(documents)
    assert bytes_in(server) > 2 * LIMIT
    start(server.url, max_bytes=LIMIT).store("CC")
    assert bytes_in(server) <= LIMIT


def test_writers_that_may_not_list_a_store_with_a_limit_store_nothing_there(
    start: Starting, server: RedisServer, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(async_store, "REST_S", 0.1)
    start(server.url).store("AB")
    server.client().execute_command("ACL", "SETUSER", "default", "-scan")
    one = start(server.url, max_bytes=LIMIT)
    one.store("AC")
    assert one.read("AB") == 4
    assert one.counters.num_dropped_blocks == 3
    assert "with shared_bytes also SCAN, MEMORY and OBJECT" in plugin_log.text
    server.client().execute_command("ACL", "SETUSER", "default", "+scan")

    def is_stored() -> bool:
        one.store("AC")
        return one.read("AC") == 3

    assert until(is_stored, 10.0)


def test_a_limit_that_holds_no_two_blocks_is_refused(start: Starting, server: RedisServer) -> None:
    with pytest.raises(ConfigError, match=r"shared_bytes is 8,191, two blocks .* take 8,192: raise it, or leave"):
        start(server.url, max_bytes=2 * CHUNK_BYTES - 1)
    one = start(server.url, max_bytes=3 * CHUNK_BYTES)
    one.store("D")
    assert bytes_in(server) <= 3 * CHUNK_BYTES


def test_a_read_only_replica_gives_and_reports_what_to_do(
    start: Starting, server: RedisServer, plugin_log: pytest.LogCaptureFixture
) -> None:
    one = start(server.url)
    one.store("AB")
    with redis_server("--replicaof", "127.0.0.1", str(server.port)) as replica:
        assert until(lambda: replica.client().info("replication")["master_link_status"] == "up", 20.0)
        assert len(rests_of(replica)) == 4
        other = start(replica.url)
        assert other.read("AB") == 4
        other.store("ABC")
        only_reads = start(replica.url, is_read_only=True)
        assert only_reads.read("AB") == 4
        only_reads.controller.forget({"B"})
        assert until(lambda: only_reads.tier._io._changes.empty())
        assert only_reads.read("AB") == 1
        assert only_reads.counters.num_shared_failures == 0
    assert other.counters.num_dropped_blocks == 2
    assert "name the primary, not a replica" in plugin_log.text


def test_a_wrong_password_is_a_miss_in_the_engine(start: Starting, plugin_log: pytest.LogCaptureFixture) -> None:
    with redis_server("--requirepass", "right") as server:
        one = start(server.url)
        assert one.read("AB") == 0
        one.store("AB")
    assert "set RAGCACHE_SHARED_PASSWORD" in plugin_log.text
    assert one.counters.num_dropped_blocks == 4


def test_what_the_store_has_evicted_is_a_miss_and_is_stored_again(start: Starting, server: RedisServer) -> None:
    one = start(server.url)
    one.store("AB")
    server.client().flushall()
    assert one.read("AB") == 0
    one.store("AB")
    assert start(server.url).read("AB") == 4


def test_more_than_half_of_host_memory_does_not_wait_for_the_store(start: Starting, server: RedisServer) -> None:
    one = start(server.url)
    server.process.send_signal(signal.SIGSTOP)
    jobs = [one.submit_store(documents) for documents in ("DD", "DCC", "CDD")]
    assert one.counters.num_dropped_blocks >= 10
    for job in jobs:
        one.result(job)
    server.process.send_signal(signal.SIGCONT)


def test_forgotten_documents_are_deleted_behind_what_is_being_stored(start: Starting, server: RedisServer) -> None:
    one = start(server.url)
    one.store("AB")
    one.result(one.submit_store("AC"))
    one.controller.forget({"B"})
    one.result(one.submit_store("AD"))
    one.controller.forget({"D"})
    assert until(lambda: not one.tier.num_pending())
    assert until(lambda: not one.tier._io.num_waiting)
    assert len(rests_of(server)) == 3
    assert one.tier.deletion_problem() is None
    assert (one.read("AB"), one.read("AC")) == (1, 3)


def test_what_cannot_be_deleted_now_is_reported_and_deleted_when_the_store_is_back(
    start: Starting, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_store, "REST_S", 0.2)
    one = start(server.url)
    one.store("AB")
    server.process.send_signal(signal.SIGSTOP)
    one.controller.forget({"B"})
    assert until(lambda: "may have 3 chunks" in (one.tier.deletion_problem() or ""), 10.0)
    server.process.send_signal(signal.SIGCONT)
    assert until(lambda: not one.tier.num_pending(), 20.0)
    assert len(rests_of(server)) == 1


def test_nothing_is_read_that_is_forgotten_while_the_store_does_not_delete_it(
    start: Starting, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_store, "REST_S", 0.2)
    one = start(server.url)
    one.store("AB")
    keys, context = one.begin("AB")
    assert one.found(keys, context) == 4
    one.end(context)
    server.client().execute_command("ACL", "SETUSER", "default", "-unlink")
    one.controller.forget({"B"})
    assert one.read("AB") == 1
    assert start(server.url).read("AB") == 4, "of another engine's deletions an engine knows nothing"
    server.client().execute_command("ACL", "SETUSER", "default", "+unlink")
    assert until(lambda: not one.tier.num_pending(), 20.0)
    assert one.read("AB") == 1
    one.store("AB")
    assert one.read("AB") == 4, "what is recomputed is stored and read"


def test_a_folder_that_is_only_read_stays_as_it_is_and_what_is_forgotten_is_not_loaded(
    start: Starting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_io, "_MAX_UNDELETED", 7)
    writer = start(tmp_path.as_uri())
    writer.store("AB")
    writer.store("D")
    compiled = files_of(tmp_path)
    assert len(compiled) > 10
    one = start(tmp_path.as_uri(), is_read_only=True, max_age=1000.0)
    assert (one.read("AB"), one.read("D")) == (4, 6)
    one.controller.forget({"B"})
    assert one.tier.num_pending() == 0, "no client waits for what is never deleted"
    assert "is only read, and may have 3 chunks" in (one.tier.deletion_problem() or "")
    assert [one.read("AB") for _ in range(2)] == [1, 1]
    assert start(tmp_path.as_uri(), is_read_only=True).read("AB") == 4, "the next start knows nothing of it"
    one.controller.tick(time.time() + 2000)
    assert one.read("D") == 0, "too old"
    one.controller.forget({"D"})
    assert until(lambda: "is used no more" in (one.tier.deletion_problem() or ""), 10.0)
    one.tier.shutdown()
    assert files_of(tmp_path) == compiled
    assert (one.counters.num_dropped_blocks, one.counters.num_shared_failures) == (0, 0)


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what is in a folder, with the times of the last changes."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in (folder, *folder.rglob("*"))}


def test_an_engine_whose_store_is_gone_keeps_each_deletion_once_and_none_of_what_is_too_old(start: Starting) -> None:
    one = start("redis://127.0.0.1:1/0", max_age=100.0)
    for _ in range(20):
        keys, context = one.begin("BD")
        one.end(context)
        one.controller.forget({"B"})
    assert until(lambda: one.tier.num_pending() == len(keys))
    assert until(lambda: one.tier.deletion_problem() is not None)
    one.begin("CD")
    one.controller.tick(time.time() + 1000)
    time.sleep(0.1)
    assert one.tier.num_pending() == len(keys)


def test_a_store_that_owes_too_many_deletions_is_used_no_more(
    start: Starting, server: RedisServer, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(async_store, "REST_S", 0.1)
    monkeypatch.setattr(shared_io, "_MAX_UNDELETED", 3)
    one = start(server.url)
    one.store("ABCD")
    server.client().execute_command("ACL", "SETUSER", "default", "-unlink")
    one.controller.forget({"A"})
    assert until(lambda: "is used no more" in (one.tier.deletion_problem() or ""), 10.0)
    assert one.tier.num_pending() == 0
    server.client().execute_command("ACL", "SETUSER", "default", "+unlink")
    assert one.read("ABCD") == 0, "what could not be deleted is not read"
    one.store("ABCD")
    one.controller.forget({"B"})
    time.sleep(0.3)
    assert one.read("ABCD") == 0
    assert not one.tier.is_serving
    assert plugin_log.text.count("out of service until the next start") == 1
    assert len(rests_of(server)) == 12


def test_kv_keeps_its_age_on_the_way_and_too_old_one_is_a_miss(start: Starting, server: RedisServer) -> None:
    one = start(server.url)
    one.controller.tick(time.time() - 1000)
    one.store("AB")
    assert start(server.url, max_age=2000.0).read("AB") == 4
    assert start(server.url, max_age=500.0).read("AB") == 0


def test_what_is_computed_in_the_place_of_too_old_kv_takes_its_place_in_the_store(
    start: Starting, server: RedisServer
) -> None:
    one = start(server.url)
    one.controller.tick(time.time() - 1000)
    one.store("AB")
    other = start(server.url, max_age=500.0)
    assert other.read("AB") == 0
    other.store("AB")
    assert start(server.url, max_age=500.0).read("AB") == 4


def test_loading_that_is_slower_than_computing_is_a_miss(
    start: Starting, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(server.url).store("AB")
    other = start(server.url, is_profiled=True)
    for bytes_per_s, num_found in ((None, 4), (1e12, 4), (1.0, 0)):
        monkeypatch.setattr(other.tier._io._rate, "bytes_per_s", lambda now_s, rate=bytes_per_s: rate)
        keys, context = other.begin("AB")
        assert other.found(keys, context) == num_found
        other.end(context)


def test_after_new_weights_nothing_is_asked_or_stored(start: Starting, server: RedisServer) -> None:
    one = start(server.url)
    one.store("AB")
    one.tier.clear()
    assert one.read("AB") == 0
    one.store("ABC")
    assert len(rests_of(server)) == 4
    assert start(server.url).read("AB") == 4, "what was stored is right for the weights of before"


def test_a_load_that_takes_longer_than_computing_is_abandoned(
    start: Starting, server: RedisServer, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    start(server.url).store("AB")
    other = start(server.url, is_profiled=True)
    monkeypatch.setattr(other.tier._io._rate, "bytes_per_s", lambda now_s: 1e12)
    keys, context = other.begin("AB")
    assert other.found(keys, context) == 4
    server.process.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    assert not other.result(other.submit_load(keys, context)).loaded
    assert time.monotonic() - began_s < shared_io.STALL_TIMEOUT_S, "it would have been found to stand still"
    assert "a load took longer than 0.2 s" in plugin_log.text
    server.process.send_signal(signal.SIGCONT)


def test_a_store_rests_twice_as_long_each_time_up_to_a_minute_and_says_it_once(
    plugin_log: pytest.LogCaptureFixture,
) -> None:
    now_s = 100.0
    breaker = async_store.Breaker("Reading from it", "It is a miss", now_s=lambda: now_s)
    for rest_s in (5, 10, 20, 40, 60, 60):
        breaker.fail(TimeoutError("late"))
        breaker.fail(TimeoutError("what was under way"))
        now_s += rest_s - 0.1
        assert breaker.is_resting
        now_s += 0.2
        assert not breaker.is_resting
    assert breaker.num_failures == 12
    breaker.succeed()
    breaker.fail(TimeoutError("late"))
    now_s += 5.1
    assert not breaker.is_resting
    assert [line.split(":")[0] for line in plugin_log.messages] == [
        "RC-TIER-FAILED",
        "RC-TIER-WORKS",
        "RC-TIER-FAILED",
    ]


def test_vllms_own_folder_tier_hands_damaged_bytes_over_as_the_docs_say(tmp_path: Path) -> None:
    path, chunk = tmp_path / "chunk", memoryview(bytearray(b"kv" * 2048))
    batch_store_block([str(path)], chunk, [0], len(chunk), use_o_direct=False)
    path.write_bytes(b"XX" * 2048)
    batch_load_block([str(path)], chunk, [0], len(chunk), use_o_direct=False)
    assert bytes(chunk) == b"XX" * 2048
