"""Registration of documents: ``POST /v1/ragcache/documents/register``.

::

    {"documents": [{"id": "faq-7", "text": "How do I ...", "acl": ["hr"]}, ...]}
    -> {"num_registered": 1, "num_failed": 0, "documents": [{"id": "faq-7", "registered": true}],
        "epoch": "3f2a..."}

A record that cannot be registered has an ``error``; the others are registered. Repeating the call does no harm. After
another ``epoch``, which the statistics of a request have as well, all documents have to be registered again.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Request

from ragcache_core.errors import quoted
from ragcache_core.vllm_plugin.server.middleware import TENANT
from ragcache_core.vllm_plugin.server.recognition.service import RecognitionService
from ragcache_core.wire import MAX_DOCUMENTS

router = APIRouter(prefix="/v1/ragcache/documents", tags=["ragcache"])

_EXAMPLE = '{"documents": [{"id": "...", "text": "..."}]}'


def recognition_of(request: Request) -> RecognitionService | None:
    """Return the server's registered documents; ``None`` without recognition."""
    service: RecognitionService | None = getattr(request.app.state, "ragcache_recognition", None)
    return service


@router.post("/register")
async def register(request: Request) -> dict[str, Any]:
    """Register documents, so that they are recognised in prompts of any client."""
    service = recognition_of(request)
    if service is None:
        raise HTTPException(404, "this server recognises no documents: its log says why (RC-RECOGNITION-OFF)")
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is no JSON ({error!s:.120}): send {_EXAMPLE}") from error
    records = body.get("documents") if isinstance(body, dict) and set(body) == {"documents"} else None
    if not isinstance(records, list) or not 0 < len(records) <= MAX_DOCUMENTS:
        size = f"{len(records)} documents" if isinstance(records, list) else quoted(body, 80)
        raise HTTPException(400, f"the body is {size}: send {_EXAMPLE} with 1 to {MAX_DOCUMENTS} documents")
    results = await service.register(request.scope.get(TENANT), records)
    num_registered = sum(result.is_registered for result in results)
    return {
        "num_registered": num_registered,
        "num_failed": len(results) - num_registered,
        "documents": [result.to_dict() for result in results],
        "epoch": service.epoch,
    }
