"""The configuration of the cache: what it takes, from where, and what this machine makes of it."""

from __future__ import annotations

import os
import re
import stat
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import psutil
import pytest

from ragcache_core.config import CacheConfig, PolicyName
from ragcache_core.errors import ConfigError
from ragcache_core.memory import Memory
from ragcache_core.policy import POLICIES

GIB = 1 << 30
_Usage = namedtuple("_Usage", "total used free")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A machine whose sizes a test sets: 64 GiB of memory, 32 of it available, a disk of 1 TiB."""
    sizes = SimpleNamespace(memory=64 * GIB, available=32 * GIB, disk=1024 * GIB, cache_folder=tmp_path / "cache")
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage(sizes.disk, 0, sizes.disk))
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(total=sizes.memory, available=sizes.available)
    )
    monkeypatch.setattr("ragcache_core.memory._MEMBERSHIP", tmp_path / "no control groups")
    monkeypatch.setattr("ragcache_core.memory._DEVICES", tmp_path / "no GPU")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(sizes.cache_folder / name))
    return sizes


# What is refused when it is made


@pytest.mark.parametrize("field", ["host_bytes", "disk_bytes"])
@pytest.mark.parametrize("zero", [0, "0", "0 B", "0GiB"])
def test_a_tier_of_nothing_is_no_tier(field: str, zero: object) -> None:
    assert getattr(CacheConfig(**{field: zero}), field) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"host_bytes": -1},
        {"host_bytes": "-1GiB"},
        {"host_bytes": "plenty"},
        {"host_bytes": True},
        {"host_bytes": 1.5},
        {"disk_bytes": -1},
        {"disk_bytes": None},
        {"kv_cache_bytes": "0"},
        {"directory": ""},
        {"policy": "mru"},
        {"max_cached_documents": 0},
        {"queue": "lifo"},
        {"queue_window": -1},
        {"queue_window": 1.5},
        {"max_prefill_bs": -1},
        {"max_prefill_bs": True},
        {"host_byte": 1},
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_name(settings: dict[str, object]) -> None:
    [(name, value)] = settings.items()
    with pytest.raises(ConfigError, match=rf"^CacheConfig\.{name} is {re.escape(repr(value))}: \w"):
        CacheConfig(**settings)


@pytest.mark.parametrize(
    "number",
    [2**63, -(10**400), 10**400, 10**5000, -(10**5000)],
    ids=["2**63", "-10**400", "10**400", "10**5000", "-10**5000"],
)
@pytest.mark.parametrize(
    "name",
    [
        *("kv_cache_bytes", "host_bytes", "disk_bytes", "block_size"),
        *("max_cached_documents", "queue_window", "max_prefill_bs", "max_documents", "directory"),
    ],
)
def test_a_number_beyond_any_machine_is_refused_like_any_other(name: str, number: int) -> None:
    with pytest.raises(ConfigError, match=rf"^CacheConfig\.{name} is (-?\d+|a number of thousands of digits): \w"):
        CacheConfig(**{name: number})


def test_a_key_without_disk_space_is_refused() -> None:
    with pytest.raises(ConfigError, match="disk_key_file is '/key' but disk_bytes is 0: set disk_bytes"):
        CacheConfig(disk_key_file="/key")
    assert CacheConfig(disk_key_file="/key", disk_bytes=1).disk_key_file == Path("/key")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shared": "memcached://host"}, r"shared is 'memcached://host': name a store as redis://host:6379/0"),
        ({"shared": "redis://"}, "name a store as redis://host:6379/0"),
        ({"shared": "redis://:pass@host/0"}, "leave it out, and set RAGCACHE_SHARED_PASSWORD"),
        ({"shared": "redis://host/0?password=pass"}, "leave it out, and set RAGCACHE_SHARED_PASSWORD"),
        ({"shared": "s3://id:key@bucket"}, "leave it out, and set AWS_SECRET_ACCESS_KEY"),
        ({"shared": "redis://host", "host_bytes": 0}, "so set host_bytes or leave shared out"),
        ({"shared": "s3://bucket", "shared_ttl": 60.0}, "for a bucket or a folder, set shared_bytes"),
        ({"shared_ttl": 60.0}, "give it with a redis:// store"),
        ({"shared_bytes": "1GiB"}, "but shared is None: name a store, or leave shared_bytes out"),
        ({"shared": "s3://bucket", "shared_bytes": 0}, "shared_bytes is 0"),
        ({"shared_read_only": True}, "but shared is None: name a store, or leave shared_read_only out"),
        (
            {"shared": "s3://b", "shared_read_only": True, "shared_bytes": 2000},
            "but shared_bytes is 2,000, which limits",
        ),
        ({"shared": "redis://b", "shared_read_only": True, "shared_ttl": 60.0}, "but shared_ttl is 60.0, which limits"),
        ({"compression": "zstd"}, "compression is 'zstd' but disk_bytes is 0: set disk_bytes or shared"),
        ({"compression": "gzip", "disk_bytes": 1}, "compression is 'gzip'"),
    ],
)
def test_a_shared_store_that_cannot_work_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CacheConfig(**settings)


def test_a_refused_password_is_in_no_message() -> None:
    with pytest.raises(ConfigError) as refused:
        CacheConfig(shared="redis://:hidden-word@host/0")
    assert "hidden-word" not in str(refused.value)


def test_a_key_file_may_be_for_the_shared_store_alone() -> None:
    assert CacheConfig(disk_key_file="/key", shared="s3://bucket/kv").disk_key_file == Path("/key")


# From a file


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cache.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_reports_what_code_would(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        """
        [server]
        port = 8000
        [cache]
        host_bytes = "64GiB"
        disk_bytes = 1073741824
        directory = "/var/cache/ragcache"
        policy = "pgdsf"
        max_cached_documents = 5
        """,
    )
    said = CacheConfig(
        host_bytes="64GiB", disk_bytes="1GiB", directory="/var/cache/ragcache", policy="pgdsf", max_cached_documents=5
    )
    assert CacheConfig.from_toml(path) == said
    assert CacheConfig.from_toml(str(path), policy="lru").policy == "lru"


@pytest.mark.parametrize("none", [0, "0", "00", "0B", "0 B", " 0GiB ", "0.0 MiB"])
def test_a_disk_tier_of_a_file_is_switched_off_by_nothing_however_it_is_written(tmp_path: Path, none: object) -> None:
    path = toml(tmp_path, '[cache]\ndisk_bytes = "1GiB"\ndirectory = "kv"')
    assert CacheConfig.from_toml(path, disk_bytes=none) == CacheConfig(disk_bytes=0)
    assert CacheConfig.from_toml(path, disk_bytes="2GiB").directory == tmp_path / "kv"
    with pytest.raises(ConfigError, match="disk_bytes is 'none': write a size"):
        CacheConfig.from_toml(path, disk_bytes="none")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host_bytes = 1", r"cache\.toml has no \[cache\] table: begin it"),
        ("cache = 1", r"cache\.toml has no \[cache\] table"),
        ("[cache]\nhost_bytes = lots", r"cache\.toml is not TOML \(.*line 2"),
        ('[cache]\nhost_bytes = "lots"', r"cache\.toml: CacheConfig\.host_bytes is 'lots': write a size"),
        (f"[cache]\ndisk_bytes = {10**400}", r"cache\.toml: CacheConfig\.disk_bytes is 1000+: \w"),
        (f"[cache]\nqueue_window = -1{'0' * 5000}", r"cache\.toml is not TOML \(.*digits"),
        ("[cache]\nhost_byte = 1", r"cache\.toml: CacheConfig\.host_byte is 1: .* use one of"),
        ('[cache]\ndirectory = ""', r"cache\.toml: CacheConfig\.directory is '': name a directory"),
        ('[cache]\ndirectory = "kv"', r"cache\.toml: CacheConfig\.directory is .*: set disk_bytes"),
        ("[cache]\ndirectory = 3", r"cache\.toml: CacheConfig\.directory is 3"),
    ],
)
def test_a_file_that_cannot_work_is_named_with_its_key_and_value(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CacheConfig.from_toml(toml(tmp_path, text))


# On this machine


def test_default_host_memory_is_an_eighth_of_what_is_available(machine: SimpleNamespace) -> None:
    assert CacheConfig().resolved().host_bytes == 4 * GIB
    machine.available = 640 * GIB
    assert CacheConfig().resolved().host_bytes == 8 * GIB
    machine.available = 0
    assert CacheConfig().resolved().host_bytes == 0


def test_what_was_chosen_stays_and_resolving_again_changes_nothing(machine: SimpleNamespace, tmp_path: Path) -> None:
    given = CacheConfig(host_bytes="1GiB", disk_bytes="2GiB", directory=tmp_path / "a" / "b", policy="lfu")
    assert given.resolved() == given
    assert (tmp_path / "a" / "b").is_dir()
    once = CacheConfig(kv_cache_bytes="1GiB", disk_bytes="2GiB", queue_window=7).resolved()
    assert once.resolved() == once
    assert (once.directory, once.kv_cache_bytes, once.queue_window) == (machine.cache_folder / "ragcache/kv", GIB, 7)
    assert list((machine.cache_folder / "ragcache/kv").iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"host_bytes": "33GiB"},
            r"host_bytes is 33\.0GiB, this machine has 64\.0GiB of memory, 32\.0GiB of it free: lower host_bytes",
        ),
        (
            {"kv_cache_bytes": "33GiB"},
            r"kv_cache_bytes is 33\.0GiB, this .* of it free: lower kv_cache_bytes",
        ),
        (
            {"kv_cache_bytes": "20GiB", "host_bytes": "14GiB"},
            r"kv_cache_bytes and host_bytes are 34\.0GiB together, this machine .* 32\.0GiB of it free: lower one of",
        ),
        ({"disk_bytes": "2TiB"}, r"disk_bytes is 2\.0TiB, the disk of \S+ holds 1\.0TiB: lower disk_bytes"),
    ],
)
def test_more_than_the_machine_has_is_refused(machine: SimpleNamespace, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CacheConfig(**settings).resolved()


def test_a_container_with_a_limit_has_no_more_than_that(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = Memory(total=8 * GIB, available=4 * GIB, is_limited=True)
    monkeypatch.setattr("ragcache_core.config.read_memory", lambda: limited)
    assert CacheConfig().resolved().host_bytes == GIB // 2
    assert CacheConfig().most_host_bytes() == GIB
    with pytest.raises(ConfigError, match=r"is 5\.0GiB, this container may use 8\.0GiB of memory, 4\.0GiB of it free"):
        CacheConfig(host_bytes="5GiB").resolved()


@pytest.mark.parametrize("directory", ["{file}", "{file}/below", "/proc/ragcache", "zero\0byte", "~absent-user/kv"])
def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path: Path, directory: str) -> None:
    file = tmp_path / "file"
    file.touch()
    cache = CacheConfig(host_bytes="1MiB", disk_bytes=1, directory=directory.format(file=file))
    with pytest.raises(
        ConfigError, match=r"CacheConfig\.directory is .*cannot be written to .*choose another directory"
    ):
        cache.resolved()


def test_a_directory_that_is_made_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        CacheConfig(directory=tmp_path / "kv", disk_bytes=1 << 20, host_bytes=1 << 20).resolved()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


def test_a_configuration_names_every_policy_that_there_is() -> None:
    assert get_args(PolicyName) == tuple(POLICIES)
