"""Requests with a tenant's key: bodies get the tenant's salt, and responses show only its own data."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi.responses import JSONResponse

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.runtime.tenants import MAX_SALT_CHARS, Tenants, cache_salt_for, speculation_of
from ragcache_core.stats import ENGINE_SERIES
from ragcache_core.vllm_plugin.other_connectors import extra_config
from ragcache_core.vllm_plugin.server.middleware import TENANT
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import KEY

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_WITH_SALT = ("/completions", "/v1/ragcache/prefetch")
_NOT_HIS_HEADERS = (b"content-length", b"transfer-encoding", b"x-vllm-priority")
"""Those of the body that he sent, and vLLM's that would put his request before another tenant's."""
_PARAMS = (KEY, "prompt_token_ids", "max_offload_tokens")
"""Fields of ``kv_transfer_params`` that tenants may send; others are for transfers between engines."""


def tenants_of(args: Namespace, keys: Sequence[str]) -> Tenants | None:
    """Return the tenants of a server; ``None`` without any.

    Raises:
        ConfigError: their file cannot be used, or one of the server's own ``keys`` is a tenant's.
    """
    path = tenants_file(getattr(args, "kv_transfer_config", None))
    if path is None:
        return None
    tenants = Tenants.from_toml(path)
    tenants.check_own_keys(keys)
    return tenants


def check_entry(transfer_config: object, tenants: Tenants | None) -> None:
    """Refuse to serve if the engine has tenants that the server does not know.

    Raises:
        ConfigError: it is so.
    """
    if tenants is None and (path := tenants_file(transfer_config)) is not None:
        raise ConfigError(f"the server does not know the tenants of {path}: start it with 'ragcache serve'")


def check_same(reports: Sequence[Mapping[str, Any] | None], tenants: Tenants | None) -> None:
    """Refuse to serve if an engine's first report shows another file of tenants.

    Raises:
        ConfigError: it is so.
    """
    here = set() if tenants is None else set(tenants.by_name)
    for report in reports:
        if report is not None and (differing := here ^ set(report.get("tenants", ()))):
            raise ConfigError(
                f"the file of tenants has changed during the start: {quoted(sorted(differing), 200)} are known to the "
                "server or to its engine alone: start it again"
            )


def tenants_file(transfer_config: object) -> Path | None:
    """Return the file of tenants in vLLM's ``kv_transfer_config``."""
    return PluginSettings.from_extra_config(extra_config(transfer_config)).tenants


def tenant_of(request: Request) -> str | None:
    """Return the tenant of a request's key; ``None`` for an operator's, or without tenants."""
    tenant: str | None = request.scope.get(TENANT)
    return tenant


def own_speculation(request: Request, speculation: str) -> str:
    """Return the engine's id of a tenant's speculation."""
    tenant = tenant_of(request)
    return speculation if tenant is None else speculation_of(tenant, speculation)


def report_for(tenant: str, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tenant's part of the engine's report, in the same format."""
    own = report.get("tenants", {}).get(tenant, {})
    nothing = {"num_nodes": 0, "tiers": [], "hottest_documents": []}
    return {**dict.fromkeys(ENGINE_SERIES, 0), **nothing, "policy": report["policy"], **own}


class TenantRequests:
    """Middleware that adds the tenant's salt to requests; see :func:`owned_body`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Change the bodies of requests that read or make KV; pass everything else."""
        tenant = scope.get(TENANT)
        if tenant is None or scope["method"] != "POST" or not scope["path"].endswith(_WITH_SALT):
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
            messages.append(await receive())
        if messages[-1]["type"] != "http.request":
            return  # the client has disconnected
        secret = scope["app"].state.ragcache_tenants.secret
        try:
            body = owned_body(b"".join(message.get("body", b"") for message in messages), tenant, secret)
        except ConfigError as error:
            said = {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}
            await JSONResponse({"error": said}, 400)(scope, receive, send)
            return
        headers = [pair for pair in scope["headers"] if pair[0] not in _NOT_HIS_HEADERS]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        again: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def owned() -> Message:
            return again.pop() if again else await receive()

        await self._app(scope, owned, send)


def owned_body(body: bytes, tenant: str, secret: str = "") -> bytes:
    """Return a request's body as a tenant's: with its salt and speculation names, without priority.

    A salt of his own divides his requests further.

    Raises:
        ConfigError: it is no JSON object, or says what could reach another tenant.
    """
    try:
        request: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is no JSON ({error!s:.120}): send a JSON object") from error
    if not isinstance(request, dict):
        raise ConfigError(f"the body is {quoted(request)}: send a JSON object")
    request["cache_salt"] = cache_salt_for(tenant, _checked_salt(request.get("cache_salt")), secret=secret)
    for name in ("ec_transfer_params", "priority"):
        request.pop(name, None)
    if isinstance(params := request.get("kv_transfer_params"), dict):
        request["kv_transfer_params"] = kept = {name: params[name] for name in _PARAMS if name in params}
        metadata = kept.get(KEY)
        if isinstance(metadata, dict) and isinstance(speculation := metadata.get("speculation"), str):
            metadata["speculation"] = speculation_of(tenant, speculation)
    _refuse_shared_media(request.get("messages"))
    return json.dumps(request).encode()


def _checked_salt(salt: object) -> str | None:
    if salt is None or (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_CHARS):
        return salt
    shown = f"{len(salt)} characters long" if isinstance(salt, str) else quoted(salt)
    raise ConfigError(f"cache_salt is {shown}: send a text of 1 to {MAX_SALT_CHARS} characters, or leave it out")


def _refuse_shared_media(messages: object) -> None:
    """Reject images and audio by uuid, with which vLLM finds those of any sender."""
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and "uuid" in part:
                raise ConfigError(
                    f"a part of a message has the uuid {quoted(part['uuid'])}, which another tenant may "
                    "have used: leave uuid out, and send the content"
                )
