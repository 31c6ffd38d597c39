"""RAGCache's routes: statistics of requests and engine, cached prefixes, speculation.

They lie under ``/v1``, where the server's API key protects them.
"""

from __future__ import annotations

import asyncio
import json
import os
from argparse import Namespace
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field
from vllm import envs

from ragcache_core.log import logger_of
from ragcache_core.vllm_plugin.compat import (
    call_cached_paths,
    call_confirm,
    call_prefetch,
    call_report,
    require_embeddings,
)
from ragcache_core.vllm_plugin.other_connectors import extra_config
from ragcache_core.vllm_plugin.release import settings_in_force
from ragcache_core.vllm_plugin.server import cache_routes, document_routes
from ragcache_core.vllm_plugin.server.accepted_keys import AcceptedKeys, follow_file
from ragcache_core.vllm_plugin.server.called_tools import CalledTools
from ragcache_core.vllm_plugin.server.engine_view import received
from ragcache_core.vllm_plugin.server.middleware import AuthMiddleware, Work, refusal_of_work
from ragcache_core.vllm_plugin.server.page.routes import router as page_router
from ragcache_core.vllm_plugin.server.progress import EngineProgress, hang_timeout_s
from ragcache_core.vllm_plugin.server.prompt_routes import router as prompt_router
from ragcache_core.vllm_plugin.server.rank_choice import RankChoice
from ragcache_core.vllm_plugin.server.recognition.routes import recognition_of
from ragcache_core.vllm_plugin.server.recognition.routes import router as registration_router
from ragcache_core.vllm_plugin.server.recognition.start import start_recognition
from ragcache_core.vllm_plugin.server.request_body import RequestBodyCheck
from ragcache_core.vllm_plugin.server.request_defaults import DefaultsHeader, replica_name, request_defaults
from ragcache_core.vllm_plugin.server.response_stats import ResponseStatsMiddleware
from ragcache_core.vllm_plugin.server.several_engines import joined_changes
from ragcache_core.vllm_plugin.server.tenant_requests import (
    TenantRequests,
    check_entry,
    check_same,
    own_speculation,
    report_for,
    tenant_of,
    tenants_file,
    tenants_of,
)
from ragcache_core.wire import REPLICA_HEADER, max_body_bytes

logger = logger_of(__name__)

_TIMEOUT_S = 0.5
_CURSOR = r"^([0-9a-f]{1,16}\.[0-9]{1,12}(-[0-9a-f]{1,16}\.[0-9]{1,12}){0,1023})?$"

router = APIRouter(prefix="/v1/ragcache", tags=["ragcache"])
probes = APIRouter(tags=["ragcache"])


@router.get("/requests/{response_id}")
async def request_figures(response_id: str, asked: Request) -> dict[str, Any]:
    """Return the statistics of a recently answered request, by the ``id`` of its response.

    They may arrive a moment after the answer: this waits for them a little, and as long for another tenant's as for
    none. An operator gets a tenant's where no request of operators has this id.
    Where another server is named by the header, because a proxy sent this here, it does not wait.
    """
    named = asked.headers.get(REPLICA_HEADER)
    if named not in (None, getattr(asked.app.state, "ragcache_replica", None)):
        raise HTTPException(404, f"request {response_id!r:.80} was answered by another replica, {named!r:.40}")
    tenant = tenant_of(asked)
    if received.engine() is not None:
        figures = await received.notifier.wait_for(lambda: received.request(response_id, tenant), _TIMEOUT_S)
        if figures is None and tenant is None:
            figures = received.request(response_id, any_tenant=True)
        if figures is not None:
            recognition = recognition_of(asked)
            return figures if recognition is None else {**figures, "epoch": recognition.epoch}
    raise HTTPException(404, f"no request {response_id!r:.80} ended lately")


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """Return a report of the engine's tiers, read between two steps."""
    if received.engine() is not None:
        with suppress(RuntimeError):  # a scheduler of another kind: what came with its steps is all there is
            received.update(await call_report(request.app.state.ragcache_engine_client))
    report = received.engine()
    if report is None:
        raise HTTPException(404, "this server runs without RAGCache")
    tenant = tenant_of(request)
    if tenant is not None:
        return report_for(tenant, report)
    recognition = recognition_of(request)
    return report if recognition is None else {**report, "recognition": recognition.figures()}


@router.get("/cached_paths")
async def cached_paths(request: Request, cursor: Annotated[str, Query(pattern=_CURSOR)] = "") -> Response:
    """Return the changes of cached prefixes since ``cursor``.

    The engine is asked, between two steps; of several data-parallel engines each.
    """
    if received.engine() is None:
        raise HTTPException(404, "this server runs without RAGCache")
    engine = request.app.state.ragcache_engine_client
    changes = joined_changes(await call_cached_paths(engine, cursor, tenant_of(request)))
    return Response(json.dumps(changes, separators=(",", ":")), media_type="application/json")


@router.get("/load")
async def load() -> dict[str, Any]:
    """Return the number of pending prefills, their seconds, and whether a speculation would be admitted.

    It is as of the engine's last step: asking the engine would wait for its running one.
    """
    said = received.load()
    if said is None:
        raise HTTPException(404, "this server runs without RAGCache")
    return said


@router.get("/costs")
async def costs() -> dict[str, Any]:
    """Return prefill times, and the calibration of chunk reuse, for clients with a TTFT SLO."""
    said = await asyncio.to_thread(received.costs)
    if said is None:
        raise HTTPException(404, "this server runs without RAGCache")
    return said


@router.get("/speculations/{speculation_id}")
async def speculation(speculation_id: str, request: Request, after: int = 0) -> dict[str, Any]:
    """Return a speculation's queue time, including preemptions.

    The engine reports it at the start and after each pause. Null until there are more than ``after`` reports, for which
    the route waits briefly.
    """
    if received.engine() is None:
        raise HTTPException(404, "this server runs without RAGCache")
    own, tenant = own_speculation(request, speculation_id), tenant_of(request)
    wait = await received.notifier.wait_for(lambda: received.wait_of(own, tenant, after=after), _TIMEOUT_S)
    if wait is None:
        return {"waited_s": None, "num_reports": after}
    return {"waited_s": wait.waited_s, "num_reports": wait.num_reports}


@router.post("/speculations/{speculation_id}/confirm", status_code=204)
async def confirm(speculation_id: str, request: Request) -> None:
    """Make a speculation's requests real, including later ones; an unknown id is ignored."""
    if received.engine() is None:
        raise HTTPException(404, "this server runs without RAGCache")
    own = own_speculation(request, speculation_id)
    received.update(await call_confirm(request.app.state.ragcache_engine_client, own, tenant_of(request)))


class PrefetchRequest(BaseModel):
    """A prompt of a possible later request, with its salt and model."""

    prompt_token_ids: list[Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]]
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    model: str | None = None


@router.post("/prefetch")
async def prefetch(wanted: PrefetchRequest, request: Request) -> dict[str, int]:
    """Begin to read a prompt's blocks from disk into host memory; return the number of tokens.

    What is read is dropped as ever when something better comes. A quarter of host memory at most is filled so at a
    time; a prompt that takes more is not read.
    """
    if received.engine() is None:
        raise HTTPException(404, "this server runs without RAGCache")
    engine = request.app.state.ragcache_engine_client
    num_tokens, most = len(wanted.prompt_token_ids), engine.model_config.max_model_len
    if num_tokens > most:
        raise HTTPException(400, f"the prompt has {num_tokens} tokens, the context window {most}: name fewer documents")
    if wanted.model is not None and not request.app.state.openai_serving_models.is_base_model(wanted.model):
        return {"num_read_tokens": 0}  # an adapter has nothing on disk
    begun = await call_prefetch(engine, wanted.prompt_token_ids, wanted.cache_salt)
    return {"num_read_tokens": sum(each["num_read_tokens"] for each in begun)}


@router.post("/drain")
async def drain(request: Request) -> dict[str, int]:
    """Accept no more requests; return the number of running ones."""
    if request.app.state.ragcache_has_peers:
        raise HTTPException(409, "several API servers are not drained together: leave --api-server-count out")
    work: Work = request.app.state.ragcache_work
    work.is_draining = True
    return {"num_running": work.num_running}


@probes.get("/ready")
async def ready(request: Request) -> Response:
    """Return 200 if a request would be answered, 503 if the engine has crashed or the server is draining."""
    state = request.app.state
    if state.ragcache_work.is_draining or state.ragcache_engine_client.errored:
        return refusal_of_work()
    return Response(status_code=200)


class RAGCacheEndpoint:
    """RAGCache's entry point in ``vllm.endpoint_plugins``."""

    name = "ragcache"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes to vLLM's server, the auth middleware before all of them, then the body checks."""
        app.include_router(router)
        app.include_router(probes)
        app.include_router(prompt_router)
        app.include_router(document_routes.router)
        app.include_router(registration_router)
        app.include_router(page_router)
        app.include_router(cache_routes.router)
        keys = [key for key in app.state.args.api_key or [envs.VLLM_API_KEY] if key]
        app.state.ragcache_tenants = tenants = tenants_of(app.state.args, keys)
        app.add_middleware(TenantRequests)
        app.add_middleware(RequestBodyCheck)
        app.add_middleware(DefaultsHeader)
        app.add_middleware(CalledTools)
        app.add_middleware(ResponseStatsMiddleware)
        if tenants is not None and tenants.have_keys:
            app.state.args.api_key = [""]  # vLLM's check knows one kind of key; RAGCache's middleware checks all
        app.state.ragcache_work = Work()
        app.state.ragcache_operator_call = asyncio.Lock()
        app.state.ragcache_has_peers = (app.state.args.api_server_count or 1) > 1
        app.state.ragcache_keys = AcceptedKeys(keys, tenants)
        app.add_middleware(AuthMiddleware, keys=app.state.ragcache_keys, work=app.state.ragcache_work)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keep the engine client for confirmations and cached prefixes; other routes use received reports.

        From now on it is asked whether it makes progress, which :class:`AuthMiddleware` answers on ``/health``.
        The first report is asked for: an engine sends one with a step, and takes none before its first request.
        """
        check_entry(engine_client.vllm_config.kv_transfer_config, getattr(state, "ragcache_tenants", None))
        if (path := tenants_file(engine_client.vllm_config.kv_transfer_config)) is not None:
            state.ragcache_keys_task = asyncio.create_task(follow_file(state.ragcache_keys, path))
        state.ragcache_engine_client = engine_client
        if (transfer := engine_client.vllm_config.kv_transfer_config) is not None:
            state.ragcache_replica = replica_name(str(transfer.engine_id))
        model = engine_client.model_config
        require_embeddings(engine_client, is_enabled=bool(getattr(args, "enable_mm_embeds", False)))
        state.ragcache_defaults = request_defaults(model)
        state.ragcache_max_body_bytes = max_body_bytes(model.max_model_len, takes_files=model.is_multimodal_model)
        if (limit_s := hang_timeout_s(os.environ)) is not None:
            starter_pid = os.getppid() if state.ragcache_has_peers else os.getpid()
            state.ragcache_progress = EngineProgress.of(engine_client, limit_s, starter_pid)
            state.ragcache_progress_task = asyncio.create_task(state.ragcache_progress.watch())
        if received.engine() is not None:
            settings = settings_in_force(extra_config(transfer))
            if settings.max_age is not None:
                state.ragcache_ageing_task = asyncio.create_task(
                    cache_routes.enforce_max_age(engine_client, settings.max_age)
                )
            if received.num_engines > 1:
                state.ragcache_rank_choice = RankChoice(received.num_engines)
            begun = await start_recognition(
                engine_client,
                settings,
                getattr(state, "ragcache_tenants", None),
                getattr(state, "ragcache_rank_choice", None),
            )
            state.ragcache_recognition, state.ragcache_recognition_task = begun.service, begun.following
            state.ragcache_shown_texts, state.ragcache_names_documents = begun.texts, begun.names_documents
            try:
                reports = await call_report(engine_client)
            except Exception as error:  # another scheduler class: its first step reports
                logger.warning(
                    "RC-TIERS-UNREPORTED: the tiers are not in the statistics until the first request: %s", error
                )
            else:
                check_same(reports, getattr(state, "ragcache_tenants", None))
                received.update(reports)
