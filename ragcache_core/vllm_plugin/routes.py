"""Two routes beside vLLM's: what a request got from which tier, and how full the tiers are.

They lie under ``/v1`` so that the server's API key protects them.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException

from ragcache_core.vllm_plugin.metrics import received

_PATIENCE_S = 0.5
_POLL_S = 0.005

router = APIRouter(prefix="/v1/ragcache", tags=["ragcache"])


@router.get("/requests/{response_id}")
async def request_figures(response_id: str) -> dict[str, Any]:
    """Return the figures of a request that was answered lately, by the ``id`` of its response.

    They may arrive a moment after the answer: it waits for them a little.
    """
    for _ in range(int(_PATIENCE_S / _POLL_S) if received.engine() is not None else 0):
        if (figures := received.request(response_id)) is not None:
            return figures
        await asyncio.sleep(_POLL_S)
    raise HTTPException(404, f"no request {response_id!r:.80} ended lately")


@router.get("/stats")
async def stats() -> dict[str, Any]:
    """Return the latest report of the engine's tiers."""
    report = received.engine()
    if report is None:
        raise HTTPException(404, "this server runs without RAGCache")
    return report


class RAGCacheEndpoint:
    """Our entry point in ``vllm.endpoint_plugins``."""

    name = "ragcache"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes to vLLM's server."""
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Do nothing: the routes answer from what the engine has sent already."""
