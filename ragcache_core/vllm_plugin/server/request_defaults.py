"""Adds headers to each completion, with the replica and its defaults: clients that continue a cut answer need them.

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
    """Return the value of :data:`~ragcache_core.wire.DEFAULTS_HEADER` for a model, as vLLM's ``ModelConfig`` has it."""
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
    """Return what a server calls itself to clients and proxies: the same after a restart, and unlike all others."""
    return hashlib.sha256(engine_id.encode()).hexdigest()[:12]


class DefaultsHeader:
    """Middleware that adds what the server's state has, once there is an engine: defaults, and the server's name.

    These are ``ragcache_defaults`` and ``ragcache_replica``; plain vLLM has no name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add it to answers to completions."""
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
