"""What must be alike in all replicas, as their servers tell it."""

from __future__ import annotations

from ragcache_core.client.engine import Engine
from ragcache_core.client.server_info import Handshake


def told_by(engine: Engine) -> dict[str, str | int | None]:
    """Return by name what a replica serves; what differs in another one makes it no replica of the same."""
    offered = Handshake(engine.http_client(), engine.base_url, engine.api_key).tokenizer_offer()
    cache = "plain vLLM" if engine.stats().policy is None else "RAGCache"
    return {"model": engine.model, "max_model_len": engine.max_model_len, "tokenizer": offered, "cache": cache}
