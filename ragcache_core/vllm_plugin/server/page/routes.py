"""The page at ``/ragcache``, which is open, and what it asks for beside the statistics, which needs the key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response

from ragcache_core.vllm_plugin.cache.recent_requests import MAX_REQUESTS
from ragcache_core.vllm_plugin.cache.tree_view import MAX_NODES
from ragcache_core.vllm_plugin.compat import call_recent_requests
from ragcache_core.vllm_plugin.server.document_routes import call_engines
from ragcache_core.vllm_plugin.server.engine_view import received
from ragcache_core.vllm_plugin.server.page.files import FILES, HEADERS, read_page_file
from ragcache_core.vllm_plugin.server.several_engines import joined_requests

router = APIRouter(tags=["ragcache"])


@router.get("/v1/ragcache/tree")
async def tree(request: Request, limit: Annotated[int, Query(ge=1, le=MAX_NODES)] = 300) -> dict[str, Any]:
    """Return the nodes of the knowledge tree that are used most, of each data-parallel engine.

    A node has its ``parent``, null for the first of a path, ``doc_id``, null for what is no document, its tokens, the
    requests that used it and the bytes that it takes in each tier that has it; parents come before their children.
    """
    return {"engines": await call_engines(request, "tree", {"limit": limit})}


@router.get("/v1/ragcache/requests")
async def requests(request: Request, limit: Annotated[int, Query(ge=1, le=MAX_REQUESTS)] = 50) -> dict[str, Any]:
    """Return what becomes of the latest requests, those in the engine before those that ended, and how many are there.

    ``age_s`` is since a request came; the others are seconds from then on: until it was admitted, had what it has of
    lower tiers, its first token, and its end. Null is not yet, or never.
    """
    if received.engine() is None:
        raise HTTPException(404, "this server runs without RAGCache")
    return joined_requests(await call_recent_requests(request.app.state.ragcache_engine_client, limit), limit)


def _answering(name: str) -> Callable[[], Response]:
    def file() -> Response:
        content, media_type = read_page_file(name)
        return Response(content, media_type=media_type, headers=HEADERS)

    return file


for path, name in FILES.items():
    router.add_api_route(path, _answering(name), include_in_schema=False)
