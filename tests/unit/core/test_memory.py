"""How much memory there is where a container or a service has a limit."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ragcache_core.memory import Memory, collect_rarely, freeze_survivors, read_memory

GIB = 1 << 30


class Groups:
    """The files of control groups, in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.membership = folder / "membership"

    def write(self, group: str, limit: object, used: int, inactive: int = 0, active: int = 0) -> None:
        path = self.root / group
        path.mkdir(parents=True, exist_ok=True)
        is_v1 = group.startswith("memory")
        (path / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(f"{limit}\n")
        (path / ("memory.usage_in_bytes" if is_v1 else "memory.current")).write_text(f"{used}\n")
        prefix = "total_" if is_v1 else ""
        (path / "memory.stat").write_text(f"anon 1\n{prefix}inactive_file {inactive}\n{prefix}active_file {active}\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """No groups yet, on a machine of 64 GiB, 32 of them available."""
    groups = Groups(tmp_path)
    monkeypatch.setattr("ragcache_core.memory._CGROUPS", groups.root)
    monkeypatch.setattr("ragcache_core.memory._MEMBERSHIP", groups.membership)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=32 * GIB))
    return groups


def test_without_control_groups_it_is_the_machines(groups: Groups) -> None:
    assert read_memory() == Memory(64 * GIB, 32 * GIB)
    assert read_memory().whose == "this machine has"


@pytest.mark.parametrize(
    ("membership", "group"),
    [
        ("0::/", "."),
        ("0::/system.slice/ragcache.service", "system.slice/ragcache.service"),
        ("0::/system.slice/ragcache.service", "system.slice"),
        ("4:memory:/docker/0a1b", "memory/docker/0a1b"),
        ("4:memory:/docker/0a1b", "memory"),
        ("3:cpu,memory:/", "memory"),
    ],
)
def test_a_limit_of_a_group_or_of_one_above_it_counts(groups: Groups, membership: str, group: str) -> None:
    groups.membership.write_text(f"9:name=systemd:/\n{membership}\n1:cpu:/else\n")
    groups.write(group, 8 * GIB, used=4 * GIB, inactive=GIB, active=2 * GIB)
    assert read_memory() == Memory(8 * GIB, 7 * GIB, is_limited=True)
    assert read_memory().whose == "this container may use"


@pytest.mark.parametrize(("before", "after"), [(700, 10_000), (2000, 10_000), (50_000, 50_000), (0, 0)])
def test_the_collector_threshold_is_raised_unless_it_is_higher_or_off(before: int, after: int) -> None:
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(before, 7, 5)
        collect_rarely()
        assert gc.get_threshold() == (after, 7, 5)
    finally:
        gc.set_threshold(*thresholds)


class Linked:
    """Something that may refer to itself."""

    def __init__(self) -> None:
        self.other: Linked | None = None


def test_surviving_objects_are_frozen_after_collection_of_cycles() -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(100, 10, 1_000)
    gc.collect()
    before = gc.get_freeze_count()
    try:
        kept = [Linked() for _ in range(500)]
        freeze_survivors()
        assert gc.get_freeze_count() == before, "too few for the trouble"
        gone = Linked()
        gone.other, is_alive = gone, weakref.ref(gone)
        kept += [Linked() for _ in range(1_000)]
        del gone
        freeze_survivors()
        assert gc.get_freeze_count() >= before + len(kept)
        assert is_alive() is None
        assert not any(isinstance(found, Linked) for found in gc.get_objects())
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
