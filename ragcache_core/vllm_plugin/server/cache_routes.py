"""Routes of the cache as a whole: its contents, deletion of unused folders on disk, and deletion of all KV.

::

    GET  /v1/ragcache/cache?sort=bytes|uses|saved|age&limit=50   ->  {"documents": [...], "total": 812}
    POST /v1/ragcache/cache/purge   {"wait_s": 30}                ->  a receipt, as of what is forgotten
    POST /v1/ragcache/cache/gc      {"unused_days": 7}            ->  {"folders": [...], "num_bytes": 123}
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request

from ragcache_core.chunkstore.old_namespaces import delete_unused
from ragcache_core.errors import CacheTierError, quoted
from ragcache_core.log import logger_of
from ragcache_core.stats import MAX_LISTED
from ragcache_core.vllm_plugin.compat import call_cache, call_report
from ragcache_core.vllm_plugin.other_connectors import extra_config
from ragcache_core.vllm_plugin.release import settings_in_force
from ragcache_core.vllm_plugin.server.document_routes import (
    call_engines,
    read_body,
    receipt_of,
    wait_of,
    wait_until_deleted,
)
from ragcache_core.vllm_plugin.server.engine_view import received
from ragcache_core.vllm_plugin.server.several_engines import merged_contents

router = APIRouter(prefix="/v1/ragcache/cache", tags=["ragcache"])

logger = logger_of(__name__)

_DAY_S = 86_400.0
_MAX_DAYS = 100_000


async def enforce_max_age(engine_client: Any, max_age_s: float) -> None:
    """Have engines delete expired KV, also while they have no requests; return when one has failed.

    A series of failures is logged once.
    """
    is_failing = False
    while True:
        await asyncio.sleep(min(max(max_age_s / 20, 0.1), 60.0))
        try:
            received.update(await call_cache(engine_client, "tick", {}))
            is_failing = False
        except Exception as error:
            if engine_client.errored:
                return
            if not is_failing:
                logger.warning("RC-EXPIRY-LATE: expired KV stays in the cache until the next request: %s", error)
            is_failing = True


@router.get("")
async def contents(
    request: Request,
    sort: Literal["bytes", "uses", "saved", "age"] = "bytes",
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 50,
) -> dict[str, Any]:
    """Return the cached documents with most of what they are sorted by; see :class:`CacheContents`."""
    body = {"sort": sort, "limit": limit if received.num_engines == 1 else MAX_LISTED}
    return merged_contents(await call_engines(request, "list", body), sort, limit)


@router.post("/purge")
async def purge(request: Request) -> dict[str, object]:
    """Remove everything from every tier; see :class:`ForgetReceipt`. Requests keep what they have until they end."""
    wait_s = wait_of(await read_body(request, {"wait_s": 30}))
    began_s = time.monotonic()
    gone = await call_engines(request, "purge", {})
    received.update(await call_report(request.app.state.ragcache_engine_client))
    left = await wait_until_deleted(request.app.state.ragcache_engine_client, began_s + wait_s)
    doc_ids = sorted({doc_id for each in gone for doc_id in each["forgotten"]})
    return receipt_of(gone, left, doc_ids, began_s).to_dict()


@router.post("/gc")
async def collect_garbage(request: Request) -> dict[str, object]:
    """Delete the folders of other models, weights and releases in this engine's directory that no engine has open."""
    body = await read_body(request, {"unused_days": 7, "dry_run": False})
    days, dry_run = body.get("unused_days", 7), body.get("dry_run", False)
    if isinstance(days, bool) or not isinstance(days, int | float) or not 0 <= days <= _MAX_DAYS:
        raise HTTPException(400, f"unused_days is {quoted(days)}: send 0 to {_MAX_DAYS}")
    if not isinstance(dry_run, bool):
        raise HTTPException(400, f"dry_run is {quoted(dry_run)}: send true or false")
    if received.engine() is None:
        raise HTTPException(404, "this server runs without RAGCache")
    transfer = request.app.state.ragcache_engine_client.vllm_config.kv_transfer_config
    directory = settings_in_force(extra_config(transfer)).directory
    if directory is None:
        raise HTTPException(409, "this server keeps nothing on disk: start it with disk_bytes, or name a directory")
    try:
        deleted = await asyncio.to_thread(delete_unused, directory, unused_s=days * _DAY_S, dry_run=dry_run)
    except CacheTierError as error:
        raise HTTPException(409, str(error)) from error
    return deleted.to_dict()
