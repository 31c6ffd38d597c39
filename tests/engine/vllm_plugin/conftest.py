"""What the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.cache.kv_groups import KVGroups
    from tests.engine.vllm_plugin.disk_scene import Opening, Scene


@pytest.fixture
def opening(tmp_path: Path, identity: None) -> Iterator[Opening]:
    """Start an engine's tier on this test's directory; what is left open is closed."""
    from tests.engine.vllm_plugin.disk_scene import Scene

    opened: list[Scene] = []

    def open_scene(num_slots: int = 24, name: str = "cache", groups: KVGroups | None = None, **settings: Any) -> Scene:
        opened.append(Scene(tmp_path / name, num_slots, groups, **settings))
        return opened[-1]

    yield open_scene
    for scene in opened:
        scene.close()


@pytest.fixture
def identity() -> Iterator[None]:
    """The engine's identity needs an engine; test_tiers_on_the_engine.py has one."""
    from ragcache_core.vllm_plugin.disk import manager as disk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "kv_identity", lambda config: {"model": "demo", "weights": "5f3a"})
        yield
