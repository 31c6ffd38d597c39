"""A disk tier that was out of service comes back while the engine runs, with what it held and nothing forgotten."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.chunkstore import ChunkStore, async_store
from ragcache_core.errors import CacheCapacityError, CacheTierError
from ragcache_core.runtime.environment import STARTED_AGAIN_ENV
from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.disk import manager as disk
from ragcache_core.vllm_plugin.disk import reopening
from tests.engine.vllm_plugin.disk_scene import Opening, Scene, failing, payload
from tests.engine.vllm_plugin.test_disk_faults import hanging
from tests.engine.vllm_plugin.test_group_chunks import GROUPS, stored_on_disk
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try to open it again at once, and put it into the tree in many slices."""
    monkeypatch.setattr(reopening, "_FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(reopening, "_LONGEST_WAIT_S", 0.02)
    monkeypatch.setattr(disk, "_REGROWN_A_STEP", 2)


def is_enabled(scene: Scene) -> bool:
    is_in_tier = scene.controller.tiers[Tier.DISK].is_enabled
    assert scene.controller.report()["tiers"][-1]["is_enabled"] is is_in_tier
    return is_in_tier


def is_back(scene: Scene) -> bool:
    """Do a step, as an engine does that has something to do, and return whether the tier is in service."""
    list(scene.tier.take_ended())
    scene.end_step()
    return is_enabled(scene)


def fail_a_read(scene: Scene, keys: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a read hang until the tier is out of service, and end then."""
    with monkeypatch.context() as hung:
        is_reading, go_on = hanging(hung, "read")
        job = scene.submit_load(keys)
        assert is_reading.wait(10)
        hung.setattr(async_store, "READ_TIMEOUT_S", 0.02)
        assert not scene.result(job).loaded
        assert until(lambda: not list(scene.tier.take_ended()) and not is_enabled(scene))  # the read has begun by now
        go_on.set()


def test_a_disk_that_hung_comes_back_with_what_it_held(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    scene = opening()
    keys = scene.store("D") + scene.store("BC")
    fail_a_read(scene, keys[:6], monkeypatch)
    assert scene.hits(keys[:6]) == []
    assert until(lambda: is_back(scene), 30)
    assert scene.hits(keys[:6]) == keys[:6]
    assert scene.load(keys) == set(keys)
    scene.check()
    assert not scene.tier.has_pending_work
    assert "is out of service until the disk answers" in plugin_log.text
    assert "works again, with 11 blocks of KV" in plugin_log.text
    more = scene.store("A")
    assert scene.load(more) == set(more)
    fail_a_read(scene, keys[:6], monkeypatch)
    assert until(lambda: is_back(scene), 30), "as often as it fails"
    assert scene.load(keys) == set(keys)
    scene.check()


def test_a_directory_that_is_deleted_is_made_again(opening: Opening) -> None:
    scene = opening()
    stored = scene.store("B")
    shutil.rmtree(scene.directory)
    scene.store("C")
    assert not is_enabled(scene)
    assert until(lambda: is_back(scene), 30)
    assert scene.hits(stored) == []
    assert scene.store("C") == scene.hits(scene.announce("C"))
    scene.check()


@pytest.mark.parametrize("moment", ["while it is off", "while it grows again"])
@pytest.mark.parametrize("is_all", [False, True])
def test_what_is_forgotten_meanwhile_does_not_come_back(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, moment: str, is_all: bool
) -> None:
    scene = opening()
    keys = scene.store("BD")
    forgetting = scene.controller.forgetting
    fail_a_read(scene, keys, monkeypatch)
    if moment == "while it grows again":
        assert until(lambda: is_back(scene) or scene.tier.has_pending_work, 30)
        assert not is_enabled(scene)
    forgetting.forget_all() if is_all else forgetting.forget({"B"})
    assert until(lambda: is_back(scene), 30)
    assert scene.hits(keys) == []
    assert until(lambda: not scene.tier.num_pending(), 30)
    assert scene.tier.deletion_problem() is None
    data = scene.data_file.read_bytes()
    assert not any(payload(key) in data for key in keys[:3])
    assert scene.store("C") == scene.hits(scene.announce("C"))
    scene.close()
    assert opening().hits(keys) == []


def test_another_disk_in_its_place_is_left_alone(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a mount is gone: what is written there would fill the disk that the mount point is on."""
    scene = opening()
    scene.store("B")
    seen: list[object] = []
    monkeypatch.setattr(reopening, "device_of", lambda directory: seen.append(directory) or -1)
    shutil.rmtree(scene.directory)
    scene.store("C")
    assert until(lambda: len(seen) >= 3, 30)
    assert not is_back(scene)
    assert not scene.directory.exists()


def test_a_disk_that_hangs_on_is_not_opened_twice(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_store, "CLOSE_TIMEOUT_S", 0.02)
    scene = opening()
    keys = scene.store("B")
    is_reading, go_on = hanging(monkeypatch, "read")
    try:
        job = scene.submit_load(keys)
        assert is_reading.wait(10)
        monkeypatch.setattr(async_store, "READ_TIMEOUT_S", 0.02)
        assert not scene.result(job).loaded
        assert not until(lambda: is_back(scene), 0.5)
    finally:
        go_on.set()
    monkeypatch.setattr(async_store, "READ_TIMEOUT_S", 20.0)
    assert until(lambda: is_back(scene), 30)
    assert scene.load(keys) == set(keys)


def test_an_engine_that_ends_meanwhile_leaves_the_disk_to_the_next(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):  # before it is opened again, while that goes on, or after it
        scene = opening()
        keys = scene.store("B")
        fail_a_read(scene, keys, monkeypatch)
        scene.close()
    assert opening().hits(keys) == keys


def test_new_weights_keep_a_disk_off_that_failed_before(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_OUT_OF_SERVICE_TIMEOUT_S", 0.1)
    scene = opening()
    keys = scene.store("B")
    fail_a_read(scene, keys, monkeypatch)
    scene.tier.clear()
    assert not until(lambda: is_back(scene), 0.5)
    assert scene.hits(keys) == []


def test_every_group_of_a_document_comes_back(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opening(groups=GROUPS)
    keys = stored_on_disk(scene, "BC")
    fail_a_read(scene, keys, monkeypatch)
    assert until(lambda: is_back(scene), 30)
    assert scene.load(keys) == set(keys)
    report = scene.controller.report()
    assert [tier["num_blocks"] for tier in report["tiers"] if tier["name"] == "disk"] == [len(keys)]


@pytest.mark.parametrize("what", ["__init__", "entries"])
@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_disk_that_a_restarted_engine_cannot_open_comes_back(
    opening: Opening,
    monkeypatch: pytest.MonkeyPatch,
    plugin_log: pytest.LogCaptureFixture,
    what: str,
    is_forgotten: bool,
) -> None:
    before = opening()
    keys = before.store("D") + before.store("BC")
    before.close()
    with monkeypatch.context() as broken:
        broken.setattr(ChunkStore, what, failing(CacheTierError("the disk does not answer")))
        with pytest.raises(CacheTierError, match="does not answer"):
            opening()  # a first start says what is wrong
        broken.setenv(STARTED_AGAIN_ENV, "1")
        scene = opening()
        assert scene.hits(keys[:6]) == []
        scene.announce("A")
        assert not until(lambda: is_back(scene), 0.2)
        assert "is out of service until the disk answers: the disk does not answer" in plugin_log.text
        if is_forgotten:
            scene.controller.forgetting.forget({"D"})
            assert str(scene.directory) in str(scene.tier.deletion_problem())
    assert until(lambda: is_back(scene), 30)
    assert scene.tier.deletion_problem() is None
    assert scene.tier.path == before.tier.path
    if is_forgotten:
        data = scene.data_file.read_bytes()
        assert not any(payload(key) in data for key in keys[:6])
    else:
        assert scene.load(keys) == set(keys)
    more = scene.store("A")
    assert scene.load(more) == set(more)
    scene.check()


def test_an_engine_that_is_restarted_and_ends_without_its_disk_leaves_it_as_it_was(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opening()
    keys = before.store("D")
    before.close()
    with monkeypatch.context() as broken:
        broken.setenv(STARTED_AGAIN_ENV, "1")
        broken.setattr(ChunkStore, "__init__", failing(CacheTierError("the disk does not answer")))
        scene = opening()
        scene.tier.drain()
        scene.tier.clear()
        scene.close()
    assert opening().load(keys) == set(keys)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    (folder := tmp_path / "cache").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system of a given size cannot be mounted here: that needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_restart_on_a_full_disk_has_the_tier_again_when_there_is_space(
    small_disk: Path, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opening(num_slots=100)
    keys = before.store("D")
    before.close()
    filler = small_disk / "of another program"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    with pytest.raises(CacheCapacityError, match="delete what is not needed"):
        opening(num_slots=100)
    monkeypatch.setenv(STARTED_AGAIN_ENV, "1")
    scene = opening(num_slots=100)
    assert not until(lambda: is_back(scene), 0.2)
    filler.unlink()
    assert until(lambda: is_back(scene), 30)
    assert scene.load(keys) == set(keys)
    scene.check()
    scene.close()
