"""Add headers with the replica and its defaults to completions, for clients that continue a cut answer.

vLLM takes defaults of sampling, and of the answer's length, from the model's generation config and its own arguments.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders

from ragcache_core.wire import DEFAULTS_HEADER, REPLICA_HEADER

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DEPENDING = ("max_tokens", "presence_penalty", "frequency_penalty")
"""Settings with which the rest of an answer depends on where that was cut."""


def request_defaults(model_config: Any) -> str:
    """Return the value of :data:`~ragcache_core.wire.DEFAULTS_HEADER` for vLLM's ``ModelConfig``."""
    defaults = model_config.get_diff_sampling_param()
    added: dict[str, object] = {name: defaults[name] for name in _DEPENDING if name in defaults}
    is_chosen = model_config.generation_config not in ("auto", "vllm")
    most = defaults.get("max_tokens") if is_chosen else model_config.override_generation_config.get("max_new_tokens")
    if most is not None:
        added["most_tokens"] = most
    if model_config.hf_config.model_type == "gpt_oss":  # the channels of harmony
        added["is_parsed"] = True
    return json.dumps(added)


def replica_name(engine_id: str) -> str:
    """Return the server's unique name for clients and proxies, stable over restarts."""
    return hashlib.sha256(engine_id.encode()).hexdigest()[:12]


class DefaultsHeader:
    """Middleware that adds the server's defaults and name, once there is an engine.

    These are ``ragcache_defaults`` and ``ragcache_replica``; plain vLLM has no name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the headers to completions."""
        defaults = getattr(scope["app"].state, "ragcache_defaults", None) if scope["type"] == "http" else None
        if defaults is None or not scope["path"].endswith("/completions"):
            await self._app(scope, receive, send)
            return

        async def send_with_defaults(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[DEFAULTS_HEADER] = defaults
                if (name := getattr(scope["app"].state, "ragcache_replica", None)) is not None:
                    MutableHeaders(scope=message)[REPLICA_HEADER] = name
            await send(message)

        await self._app(scope, receive, send_with_defaults)
