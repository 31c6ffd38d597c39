"""What the parts of an engine core, which vLLM builds one inside the other, find of one another."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ragcache_core.vllm_plugin.build_context import building, current_context
from tests.unit.vllm_plugin.scene import controller

CONFIG: Any = object()


def test_a_part_that_is_built_inside_another_adds_to_what_both_have() -> None:
    it = controller()
    with building(CONFIG, CONFIG, has_room=lambda: True) as outer:
        with building(CONFIG, CONFIG, chunks=cast("Any", "chunks")):
            current_context().controller = it
        assert current_context() is outer
    assert outer.controller is it
    assert (outer.has_room is not None and outer.has_room(), outer.chunks) == (True, "chunks")


def test_engines_that_are_built_after_another_share_nothing() -> None:
    with pytest.raises(RuntimeError, match="no memory"), building(CONFIG, CONFIG, has_room=lambda: True):
        raise RuntimeError("no memory")
    with building(CONFIG, CONFIG) as context:
        assert context.has_room is None
    with pytest.raises(AssertionError, match="set kv_connector"):
        current_context()
