"""What the parts of an engine core, which vLLM builds one inside the other, find of one another."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core.vllm_plugin.build_context import building, current_context

CONFIG: Any = object()


def test_engines_that_are_built_after_another_share_nothing() -> None:
    with pytest.raises(RuntimeError, match="no memory"), building(CONFIG, CONFIG, has_room=lambda: True):
        raise RuntimeError("no memory")
    with building(CONFIG, CONFIG) as context:
        assert context.has_room is None
    with pytest.raises(AssertionError, match="set kv_connector"):
        current_context()
