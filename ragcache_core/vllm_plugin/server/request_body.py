"""Reject invalid request bodies before vLLM reads them.

JSON has halves of surrogate pairs and numbers of any size, MessagePack, by which vLLM sends requests to its engine, has
not: vLLM would answer with status 500, and never forget the request. What is nested hundreds deep in
``kv_transfer_params`` or ``ec_transfer_params`` would end the engine, which pickles it for its workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Annotated, Any

import msgspec
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.vllm_plugin.server.middleware import TENANT
from ragcache_core.vllm_plugin.server.rank_choice import RankChoice, documents_of
from ragcache_core.wire import KEY, MAX_DOCUMENTS, check_depth, check_metadata, check_sendable

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Splits a body into its fields and parses none of them: takes 5 % of the time of parsing the token ids."""
_TOKEN_IDS = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]])
_PER_RECORD = "/v1/ragcache/documents/register"
"""A route that rejects single records of a body, and not all of it."""
_RANK = b"x-data-parallel-rank"
"""The header by which vLLM takes a request to one of several data-parallel engines."""


class RequestBodyCheck:
    """Middleware that rejects such a request with status 400 or 413.

    Where the server's state has a choice among data-parallel engines (``ragcache_rank_choice``), a request goes where
    the documents that it names are.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the body of a POST; pass everything else."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].endswith(_PER_RECORD):
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
            messages.append(await receive())
        parts = [message.get("body", b"") for message in messages]
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if (problem := problem_of(body)) is not None:
            status, kind, message = problem
            error = {"message": message, "type": kind, "param": None, "code": status}
            await JSONResponse({"error": error}, status)(scope, receive, send)
            return
        messages.reverse()

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        choice: RankChoice | None = getattr(scope["app"].state, "ragcache_rank_choice", None)
        documents = [] if choice is None or _RANK in dict(scope["headers"]) else documents_of(body)
        tenant = scope.get(TENANT)
        with choice.sending(documents, tenant) if choice is not None and documents else nullcontext() as rank:
            if rank is not None:
                scope = {**scope, "headers": [*scope["headers"], (_RANK, str(rank).encode())]}
            await self._app(scope, again, send)


def _transfer_params(request: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the transfer parameters of a request with their places.

    Raises:
        ConfigError: one is no object where vLLM does not check that itself.
    """
    sampling = request.get("sampling_params")  # of vLLM's token-in, token-out API
    holders = {
        "": request,
        "vllm_xargs.": request.get("vllm_xargs"),
        "sampling_params.extra_args.": sampling.get("extra_args") if isinstance(sampling, dict) else None,
    }
    for prefix, holder in holders.items():
        for name in ("kv_transfer_params", "ec_transfer_params"):
            given = holder.get(name) if isinstance(holder, dict) else None
            if isinstance(given, dict):
                yield f"{prefix}{name}", given
            elif given is not None and prefix:
                raise ConfigError(f"{prefix}{name} is {quoted(given)}: send an object, as the request's {name}")


def _parse(body: bytes) -> Any:
    """Return the JSON of a body, with an empty list in place of a list of token ids.

    Raises:
        ValueError, RecursionError: Python cannot read it.
    """
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.MsgspecError, RecursionError):  # not UTF-8, no object, NaN, half of a surrogate pair, ...
        return json.loads(body)
    return {name: [] if _is_token_ids(value) else json.loads(bytes(value)) for name, value in fields.items()}


def _is_token_ids(value: msgspec.Raw) -> bool:
    try:
        _TOKEN_IDS.decode(value)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def problem_of(body: bytes) -> tuple[int, str, str] | None:
    """Return why a body is rejected (status, vLLM's error type, message); ``None`` if it is valid.

    None if it is accepted, or is no JSON object, which vLLM reports.
    """
    try:
        request = _parse(body)
    except RecursionError:
        return None
    except ValueError as error:
        if "integer string conversion" not in str(error):
            return None
        message = "the request holds a number of thousands of digits; one must lie within 64 bits: send a smaller one"
        return 400, "BadRequestError", message
    if not isinstance(request, dict):
        return None
    try:
        check_sendable(request, "the request")
        for place, given in _transfer_params(request):
            for name, value in given.items():
                check_depth(value, f"{place}.{name:.80}")
            if isinstance(named := given.get(KEY), dict):
                check_metadata(named)
        params = request.get("kv_transfer_params")
        metadata = params.get(KEY) if isinstance(params, dict) else None
    except ConfigError as error:
        return 400, "BadRequestError", str(error)
    documents = metadata.get("documents") if isinstance(metadata, dict) else None
    if isinstance(documents, list) and len(documents) > MAX_DOCUMENTS:
        message = (
            f"the request lists {len(documents)} documents in kv_transfer_params, the engine reads {MAX_DOCUMENTS}: "
            "list the first of them"
        )
        return 413, "Request Entity Too Large", message
    return None
