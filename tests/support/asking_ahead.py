"""Requests sent to an engine ahead of their time, as the integrations send them."""

from __future__ import annotations

from collections.abc import Callable

from ragcache_core import Engine, RenderedPrompt
from ragcache_core.client.engine_client import EngineClient
from ragcache_core.client.prompts.bound_prompt import KVScope
from ragcache_core.client.speculation.speculation import Speculation


def speculate(engine: EngineClient, call: Callable[[], object]) -> Speculation:
    """Send the request that ``call`` would send, as a speculation."""
    return engine.integration.speculation.prepare(call)()


def warm(engine: Engine, prompt: RenderedPrompt) -> Speculation:
    """Have ``prompt`` prefilled while the engine is idle."""
    return engine.integration.speculation.prepare_warm(prompt, scope=KVScope())()
