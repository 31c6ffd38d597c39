"""The server's process asks engines to delete expired KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ragcache_core.vllm_plugin.server import cache_routes


async def test_a_series_of_failures_is_logged_once_and_ends_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Any] = [TimeoutError("busy"), TimeoutError("busy"), {}, TimeoutError("again"), TimeoutError("again")]
    engine = SimpleNamespace(errored=False)
    warnings: list[str] = []
    told: list[Any] = []

    async def call(client: Any, name: str, body: dict[str, Any]) -> Any:
        outcome = outcomes.pop(0)
        engine.errored = not outcomes
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(cache_routes, "call_cache", call)
    monkeypatch.setattr(cache_routes.logger, "warning", lambda message, error: warnings.append(str(error)))
    monkeypatch.setattr(cache_routes, "received", SimpleNamespace(update=told.append))
    await cache_routes.enforce_max_age(engine, 0.01)
    assert warnings == ["busy", "again"]
    assert told == [{}]
