"""The contract of stores that engines share: a Redis server, a bucket of S3, a folder, obstore's store in memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragcache_core.chunkstore.remote import RemoteStore, StoredObject, check_reachable, open_remote
from ragcache_core.chunkstore.remote.quota import StoreQuota
from ragcache_core.errors import ConfigError
from tests.support.shared_stores import S3_ENV, redis_server, s3_server
from tests.support.waiting import until

NAMES = [f"ragcache/model/{i:03}" for i in range(60)]


@pytest.fixture(scope="module", params=["redis", "s3", "folder", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteStore]:
    with pytest.MonkeyPatch.context() as patch:
        match request.param:
            case "redis":
                with redis_server() as server:
                    yield open_remote(server.url)
            case "s3":
                with s3_server() as endpoint:
                    for name, value in {**S3_ENV, "AWS_ENDPOINT_URL": endpoint}.items():
                        patch.setenv(name, value)
                    yield open_remote("s3://kv-bucket/some/prefix", timeout_s=20.0)
            case "folder":
                yield open_remote((tmp_path_factory.mktemp("shared") / "kv of all").as_uri())
            case _:
                from obstore.store import MemoryStore

                from ragcache_core.chunkstore.remote.object_store import ObjectStore

                yield ObjectStore(MemoryStore())


@pytest.fixture
def store(opened: RemoteStore) -> Iterator[RemoteStore]:
    yield opened
    opened.delete(NAMES)


def test_what_was_put_is_got_byte_by_byte_and_what_was_not_is_none(store: RemoteStore) -> None:
    store.ping()
    store.put([(NAMES[0], bytes(range(256)) * 4096), (NAMES[2], b"")])
    got = [None if data is None else bytes(data) for data in store.get(NAMES[:3])]
    assert got == [bytes(range(256)) * 4096, None, b""]


def test_what_is_put_again_is_replaced(store: RemoteStore) -> None:
    store.put([(NAMES[0], b"old")])
    store.put([(NAMES[0], b"new")])
    assert [bytes(data or b"") for data in store.get(NAMES[:1])] == [b"new"]


@pytest.mark.parametrize("num_there", [0, 1, 7, 8, 9, 33, 59, 60])
def test_the_leading_blocks_of_a_chain_are_found(store: RemoteStore, num_there: int) -> None:
    store.put([(name, b"x") for name in NAMES[:num_there]])
    assert store.exists(NAMES, is_chain=True) == [i < num_there for i in range(len(NAMES))]


def test_single_names_that_exist_are_found(store: RemoteStore) -> None:
    store.put([(NAMES[i], b"x") for i in (1, 2, 5)])
    assert store.exists(NAMES[:7], is_chain=False) == [False, True, True, False, False, True, False]


def test_what_is_deleted_is_gone_and_deleting_what_is_not_there_is_no_error(store: RemoteStore) -> None:
    store.put([(name, b"x") for name in NAMES[:4]])
    store.delete(NAMES[1:6])
    assert store.exists(NAMES[:4], is_chain=False) == [True, False, False, False]


def listed(store: RemoteStore, prefix: str = "ragcache/model/") -> dict[str, StoredObject]:
    return {each.name: each for page in store.list_objects(prefix) for each in page}


def test_a_list_has_the_objects_below_a_prefix_with_their_sizes(store: RemoteStore) -> None:
    store.put([(name, bytes(1000)) for name in NAMES] + [("ragcache/models", b"x"), ("other/model/0", b"x")])
    found = listed(store)
    assert sorted(found) == NAMES
    assert all(1000 <= each.num_bytes <= 1300 for each in found.values())
    assert listed(store, "ragcache/another/") == {}
    store.delete(["ragcache/models", "other/model/0"])


def test_writers_keep_a_limit_together_and_leave_what_others_store(store: RemoteStore) -> None:
    deleted: list[str] = []
    quotas = [StoreQuota(store, "ragcache/model/", 40_000, deleted.extend) for _ in range(2)]
    store.put([("ragcache/other", bytes(50_000))])
    for i, name in enumerate(NAMES):
        assert quotas[i % 2].admit(1000, lambda: False)
        store.put([(name, bytes(1000))])
        assert sum(each.num_bytes for each in listed(store).values()) <= 40_000
    assert len(deleted) >= 20
    assert sorted([*deleted, *listed(store)]) == NAMES
    assert sum(quota.num_deleted for quota in quotas) == len(deleted)
    assert quotas[1].used_bytes <= 40_000
    assert not quotas[0].admit(40_001, lambda: False), "more than all"
    assert not quotas[0].admit(39_000, lambda: True), "the engine ends"
    assert store.exists(["ragcache/other"], is_chain=False) == [True]
    store.delete(["ragcache/other"])


def test_a_writer_lists_a_64th_of_its_limit_apart(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    num_lists, list_objects = 0, store.list_objects

    def count(prefix: str) -> Iterator[Sequence[StoredObject]]:
        nonlocal num_lists
        num_lists += 1
        return list_objects(prefix)

    monkeypatch.setattr(store, "list_objects", count)
    quota = StoreQuota(store, "ragcache/model/", 64_000, lambda names: None)
    for _ in range(100):
        assert quota.admit(100, lambda: False)
    assert num_lists == 10


def test_redis_reports_the_least_recently_used_and_lookups_are_no_use() -> None:
    with redis_server() as server:
        store, client = open_remote(server.url), server.client()
        store.put([(name, b"x") for name in NAMES[:3]])
        dump = client.dump(NAMES[0])
        for name, idle_s in zip(NAMES[:3], (20, 300, 100), strict=True):
            client.restore(name, 0, dump, replace=True, idletime=idle_s)  # type: ignore[arg-type]  # takes bytes
        for _ in range(2):
            by_use = sorted(listed(store).values(), key=lambda each: each.used_s)
            assert [each.name for each in by_use] == [NAMES[1], NAMES[2], NAMES[0]]
        store.get(NAMES[1:2])
        assert max(listed(store).values(), key=lambda each: each.used_s).name == NAMES[1]
        client.config_set("maxmemory-policy", "allkeys-lfu")
        assert sorted(listed(store)) == NAMES[:3], "where no time is known, the order is any"


def test_a_redis_with_expiry_gets_the_time_to_live() -> None:
    with redis_server() as server:
        open_remote(server.url, ttl_s=100.0).put([("a", b"x")])
        open_remote(server.url).put([("b", b"x")])
        assert 0 < server.client().ttl("a") <= 100
        assert server.client().ttl("b") == -1


def test_a_wrong_password_is_rejected_at_launch_and_the_environment_has_the_right_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with redis_server("--requirepass", "right") as server:
        with pytest.raises(ConfigError, match="set RAGCACHE_SHARED_PASSWORD to its password"):
            check_reachable(server.url)
        monkeypatch.setenv("RAGCACHE_SHARED_PASSWORD", "wrong")
        with pytest.raises(ConfigError, match="set RAGCACHE_SHARED_PASSWORD to its password"):
            check_reachable(server.url)
        monkeypatch.setenv("RAGCACHE_SHARED_PASSWORD", "right")
        assert check_reachable(server.url) is None


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "s3://kv-bucket/x"])
def test_an_unavailable_store_is_no_error_at_the_entry(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**S3_ENV, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    why = check_reachable(url)
    assert why is not None
    assert "\n" not in why
    assert "answer" in why


def test_a_folder_is_private_and_one_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "kv"
    assert check_reachable(folder.as_uri(), is_limited=True) is None
    assert folder.stat().st_mode & 0o077 == 0
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file: name a folder"):
        check_reachable((tmp_path / "file").as_uri())


def test_a_missing_folder_that_is_only_read_is_refused_and_not_created(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with pytest.raises(ConfigError, match="does not exist, and is only read: name one that has KV"):
        check_reachable(folder.as_uri(), is_read_only=True)
    assert not folder.exists()
    folder.mkdir()
    assert check_reachable(folder.as_uri(), is_read_only=True) is None


def test_a_store_that_is_to_be_filled_is_written_at_the_entry_and_nothing_is_left(tmp_path: Path) -> None:
    assert check_reachable(tmp_path.as_uri(), is_written=True) is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with redis_server("--maxmemory", "1", "--maxmemory-policy", "noeviction") as server:
        assert check_reachable(server.url) is None
        assert "memory" in (check_reachable(server.url, is_written=True) or "")
    with redis_server() as server:
        server.client().execute_command(
            "ACL", "SETUSER", "default", "reset", "on", "nopass", "~ragcache*", "+exists", "+mget"
        )
        assert check_reachable(server.url) is None
        with pytest.raises(ConfigError, match="refuses us"):
            check_reachable(server.url, is_written=True)


def test_a_write_that_was_cut_off_in_a_folder_is_no_object(tmp_path: Path) -> None:
    store = open_remote(tmp_path.as_uri())
    store.put([(NAMES[0], b"whole")])
    (tmp_path / f"{NAMES[1]}#1").write_bytes(b"cut o")  # obstore writes there, then renames
    assert store.exists(NAMES[:2], is_chain=False) == [True, False]
    assert list(listed(store)) == NAMES[:1]


def test_what_killed_writers_left_in_a_folder_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left, running = (tmp_path / f"{name}#1" for name in NAMES[1:3])
    open_remote(tmp_path.as_uri()).put([(NAMES[0], b"whole")])
    for path in (left, running):
        path.write_bytes(b"cut o")
    os.utime(left, (0.0, time.time() - 2 * 3600.0))
    store = open_remote(tmp_path.as_uri())
    store.put([(NAMES[2], b"whole")])
    assert until(lambda: not left.exists())
    assert running.exists()  # another process may be writing it
    assert sorted(listed(store)) == [NAMES[0], NAMES[2]]
    store.close()


def test_a_slow_put_delays_no_look_up_and_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.store import MemoryStore

    from ragcache_core.chunkstore.remote.object_store import ObjectStore

    store = ObjectStore(MemoryStore())
    store.put([(NAMES[0], b"x")])
    may_end, put = threading.Event(), obstore.put
    with ThreadPoolExecutor(1) as writer:
        monkeypatch.setattr(obstore, "put", lambda *a, **b: may_end.wait(20.0) and put(*a, **b))
        writing = writer.submit(store.put, [(name, b"y") for name in NAMES[1:]])
        assert store.exists(NAMES[:20], is_chain=True) == [True, *[False] * 19]
        assert bytes(store.get(NAMES[:1])[0] or b"") == b"x"
        assert not writing.done()
        may_end.set()
    assert store.exists(NAMES, is_chain=True) == [True] * len(NAMES)
    store.close()


def test_a_user_needs_the_commands_that_the_hint_names_and_no_others() -> None:
    acl = ["ACL", "SETUSER", "default", "reset", "on", "nopass", "~ragcache/*", "~ragcache"]
    with redis_server() as server:
        server.client().execute_command(*acl, "+exists", "+mget", "+set", "+unlink")
        assert check_reachable(server.url) is None
        store = open_remote(server.url, ttl_s=100.0)
        store.put([(NAMES[0], b"x")])
        assert store.exists(NAMES[:2], is_chain=True) == [True, False]
        assert store.get(NAMES[:2]) == [b"x", None]
        store.delete(NAMES[:2])
        assert store.exists(NAMES[:1], is_chain=False) == [False]
        with pytest.raises(ConfigError, match="with shared_bytes also SCAN, MEMORY and OBJECT"):
            check_reachable(server.url, is_limited=True)
    with redis_server() as server:
        commands = "+exists", "+mget", "+set", "+unlink", "+scan", "+memory|usage", "+object|idletime"
        server.client().execute_command(*acl, *commands)
        assert check_reachable(server.url, is_limited=True) is None
        store = open_remote(server.url)
        store.put([(NAMES[0], b"x")])
        assert list(listed(store)) == NAMES[:1]
