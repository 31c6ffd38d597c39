"""Routes that act upon the cache by document: ``POST /v1/ragcache/documents/<what to do>`` with ``{"ids": [...]}``.

::

    forget    remove their KV from every tier           show       what is cached of them, path by path
    pin       evict their paths last                    unpin      as any other again
    prefetch  read what is on disk into host memory

All of them act on the documents that they know, name the others as ``unknown``, and answer with status 200. Ids are in
the body, for they may hold anything, a slash as well.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, HTTPException, Request

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.stats import ForgetReceipt
from ragcache_core.vllm_plugin.compat import call_cache, call_forget, call_left, call_report
from ragcache_core.vllm_plugin.server.engine_view import received
from ragcache_core.vllm_plugin.server.recognition.routes import recognition_of
from ragcache_core.vllm_plugin.server.several_engines import merged_contents, merged_pins
from ragcache_core.wire import read_doc_ids

router = APIRouter(prefix="/v1/ragcache/documents", tags=["ragcache"])

_WAIT_S = 30.0
_MAX_WAIT_S = 600.0
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5


@router.post("/forget")
async def forget(request: Request) -> dict[str, object]:
    """Delete the KV of documents, and all KV that depends on it, from every tier; see :class:`ForgetReceipt`.

    Waits up to ``wait_s`` seconds for requests that use some of it, and for the disk. Repeating the call does no harm,
    and returns what is left. Every data-parallel engine of this server deletes.
    """
    doc_ids, wait_s = await _read_ids(request)
    began_s = time.monotonic()
    client = request.app.state.ragcache_engine_client
    recognition = recognition_of(request)
    problems: tuple[str, ...] = ()
    if recognition is not None:  # before the KV: a prompt that is recognised later would store it under the id again
        problems = await recognition.forget(set(doc_ids))
    gone = await call_forget(client, doc_ids)
    if refused := next((each["refused"] for each in gone if "refused" in each), None):
        raise HTTPException(409, f"documents cannot be forgotten: {refused}. Restart the engine instead")
    received.update(await call_report(client))  # an idle engine takes no step, and its last report names the documents
    left = await wait_until_deleted(client, began_s + wait_s)
    if recognition is not None:  # a prompt may have been recognised before, and arrived in the engine after
        gone += await call_forget(client, doc_ids)
        left = await wait_until_deleted(client, began_s + wait_s)
    receipt = receipt_of(gone, left, doc_ids, began_s)
    unsearched = () if recognition is None else recognition.unsearched()
    return replace(receipt, problems=receipt.problems + problems, unsearched=unsearched).to_dict()


def receipt_of(
    gone: Sequence[Mapping[str, Any]], left: Sequence[Mapping[str, Any]], doc_ids: Sequence[str], began_s: float
) -> ForgetReceipt:
    """Return one receipt for what several engines deleted, and still have."""
    known = {doc_id for each in gone for doc_id in each["forgotten"]}
    return ForgetReceipt(
        forgotten=tuple(doc_id for doc_id in doc_ids if doc_id in known),
        unknown=tuple(doc_id for doc_id in doc_ids if doc_id not in known),
        num_paths=_sum(gone, "num_paths"),
        num_variants=_sum(gone, "num_variants"),
        num_blocks=_sum_by_tier(gone, "num_blocks"),
        num_bytes=_sum_by_tier(gone, "num_bytes"),
        num_requests=_sum(left, "num_requests"),
        num_pending=_sum(left, "num_blocks"),
        problems=tuple(dict.fromkeys(problem for each in left for problem in each["problems"])),
        duration_s=time.monotonic() - began_s,
    )


@router.post("/show")
async def show(request: Request) -> dict[str, object]:
    """Return what is cached of documents, with their paths."""
    doc_ids, _ = await _read_ids(request, takes_wait=False)
    found = merged_contents(await call_engines(request, "show", {"ids": doc_ids}), "bytes", len(doc_ids))
    known = {document["id"] for document in found["documents"]}
    return {**found, "unknown": [doc_id for doc_id in doc_ids if doc_id not in known]}


@router.post("/pin")
async def pin(request: Request) -> dict[str, object]:
    """Pin the documents that have cached KV, all of them or none; see :class:`PinReceipt`."""
    doc_ids, _ = await _read_ids(request, takes_wait=False)
    found = merged_pins(await call_engines(request, "pin", {"ids": doc_ids, "dry_run": True}), doc_ids)
    body = {"ids": list(found.changed), "dry_run": False}
    return replace(merged_pins(await call_engines(request, "pin", body), doc_ids), unknown=found.unknown).to_dict()


@router.post("/unpin")
async def unpin(request: Request) -> dict[str, object]:
    """Pin documents no more."""
    doc_ids, _ = await _read_ids(request, takes_wait=False)
    return merged_pins(await call_engines(request, "unpin", {"ids": doc_ids}), doc_ids).to_dict()


@router.post("/prefetch")
async def prefetch(request: Request) -> dict[str, object]:
    """Begin to read what is on disk of documents into host memory, on all their paths; see the route of a prompt."""
    doc_ids, _ = await _read_ids(request, takes_wait=False)
    answers = await call_engines(request, "prefetch", {"ids": doc_ids})
    unknown = [doc_id for doc_id in doc_ids if all(doc_id in answer["unknown"] for answer in answers)]
    return {
        **{name: _sum(answers, name) for name in ("num_read_tokens", "num_paths", "num_left_out")},
        "unknown": unknown,
    }


async def call_engines(request: Request, action: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what every data-parallel engine answers; a refusal of one is the server's.

    One call at a time: an engine keeps few that have not ended, and drops the oldest of more.
    """
    if received.engine() is None:
        raise HTTPException(404, "this server runs without RAGCache")
    async with request.app.state.ragcache_operator_call:
        answers = await call_cache(request.app.state.ragcache_engine_client, action, body)
    if refused := next((each["refused"] for each in answers if "refused" in each), None):
        raise HTTPException(409, refused)
    return answers


async def _read_ids(request: Request, *, takes_wait: bool = True) -> tuple[list[str], float]:
    """Return the ids in a body, and how long to wait."""
    if received.engine() is None:
        raise HTTPException(404, "this server runs without RAGCache")
    fields = {"ids": ["..."], "wait_s": 30} if takes_wait else {"ids": ["..."]}
    body = await read_body(request, fields)
    try:
        return read_doc_ids(body.get("ids")), wait_of(body)
    except ConfigError as error:
        raise HTTPException(400, str(error)) from error


async def read_body(request: Request, fields: Mapping[str, object]) -> Mapping[str, Any]:
    """Return a body with no other fields than those of an example."""
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is no JSON ({error!s:.120}): send {json.dumps(fields)}") from error
    if not isinstance(body, Mapping) or not body.keys() <= fields.keys():
        raise HTTPException(400, f"the body is something else than {json.dumps(fields)}: send that")
    return body


def wait_of(body: Mapping[str, Any]) -> float:
    """Return how long to wait for KV that cannot be deleted at once."""
    wait_s = body.get("wait_s", _WAIT_S)
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= _MAX_WAIT_S:
        raise HTTPException(400, f"wait_s is {quoted(wait_s)}: send 0 to {_MAX_WAIT_S:g} seconds")
    return float(wait_s)


async def wait_until_deleted(client: Any, ends_s: float) -> list[dict[str, Any]]:
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
