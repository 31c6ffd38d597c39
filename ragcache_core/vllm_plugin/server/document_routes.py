"""Routes that act upon the cache by document: ``POST /v1/ragcache/documents/<what to do>`` with ``{"ids": [...]}``.

Ids are in the body, for they may hold anything, a slash as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, HTTPException, Request

from ragcache_core.errors import ConfigError
from ragcache_core.stats import ForgetReceipt
from ragcache_core.vllm_plugin.compat import call_forget, call_left
from ragcache_core.vllm_plugin.server.engine_view import received
from ragcache_core.wire import read_doc_ids

router = APIRouter(prefix="/v1/ragcache/documents", tags=["ragcache"])

_WAIT_S = 30.0
_MAX_WAIT_S = 600.0
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5


@router.post("/forget")
async def forget(request: Request) -> dict[str, object]:
    """Remove the KV of documents from every tier, with what stands behind them; see :class:`ForgetReceipt`.

    Waits up to ``wait_s`` seconds for requests that have some of it, and for the disk. To ask again does no harm, and
    tells what is left. Every data-parallel engine of this server forgets.
    """
    doc_ids, wait_s = await _asked(request)
    if received.engine() is None:
        raise HTTPException(404, "this server runs without RAGCache")
    began_s = time.monotonic()
    client = request.app.state.ragcache_engine_client
    gone = await call_forget(client, doc_ids)
    if refused := next((each["refused"] for each in gone if "refused" in each), None):
        raise HTTPException(409, f"documents cannot be forgotten: {refused}. Start the engine anew instead")
    left = await _wait(client, began_s + wait_s)
    known = {doc_id for each in gone for doc_id in each["forgotten"]}
    receipt = ForgetReceipt(
        forgotten=tuple(doc_id for doc_id in doc_ids if doc_id in known),
        unknown=tuple(doc_id for doc_id in doc_ids if doc_id not in known),
        num_paths=_sum(gone, "num_paths"),
        num_variants=_sum(gone, "num_variants"),
        num_blocks=_sum_by_tier(gone, "num_blocks"),
        num_bytes=_sum_by_tier(gone, "num_bytes"),
        num_requests=_sum(left, "num_requests"),
        num_left=_sum(left, "num_blocks"),
        problems=tuple(dict.fromkeys(problem for each in left for problem in each["problems"])),
        took_s=time.monotonic() - began_s,
    )
    return receipt.to_dict()


async def _asked(request: Request) -> tuple[list[str], float]:
    """Return the ids in a body, and how long to wait."""
    try:
        body = await request.json()
    except ValueError as error:
        raise HTTPException(400, f'the body is no JSON ({error}): send {{"ids": [...]}}') from error
    if not isinstance(body, Mapping) or not body.keys() <= {"ids", "wait_s"}:
        raise HTTPException(400, 'the body is something else than {"ids": [...], "wait_s": 30}: send that')
    wait_s = body.get("wait_s", _WAIT_S)
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= _MAX_WAIT_S:
        raise HTTPException(400, f"wait_s is {wait_s!r:.80}: send 0 to {_MAX_WAIT_S:g} seconds")
    try:
        return read_doc_ids(body.get("ids")), float(wait_s)
    except ConfigError as error:
        raise HTTPException(400, str(error)) from error


async def _wait(client: Any, ends_s: float) -> list[dict[str, Any]]:
    """Return what is left of what was forgotten: nothing, or what there is at the end of our patience."""
    pause_s = _FIRST_PAUSE_S
    while True:
        left = await call_left(client)
        if time.monotonic() >= ends_s or not (_sum(left, "num_requests") or _sum(left, "num_blocks")):
            return left
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _sum(answers: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(answer[name] for answer in answers)


def _sum_by_tier(answers: Sequence[Mapping[str, Any]], name: str) -> dict[str, int]:
    tiers = {tier: None for answer in answers for tier in answer[name]}
    return {tier: sum(answer[name].get(tier, 0) for answer in answers) for tier in tiers}
