"""What keeps a request's KV apart from that of other requests, for what is sent ahead of that request."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from ragcache_core.wire import KEY

_logger = logging.getLogger(__name__)

_OURS = (KEY, "prompt_token_ids")
# What RAGCache itself puts into kv_transfer_params. The rest says, for example, that nothing is offloaded.


@dataclass(frozen=True, slots=True)
class KVScope:
    """The fields of a request that separate its KV: model or adapter, salt, KV transfer, and the API key's tenant.

    Documents with access groups add a salt of their own, which depends on the prompt and is no part of the scope.

    Attributes:
        body: the fields of the body as JSON; without the engine's own model, which is the default.
        authorization: the request's own ``Authorization`` header; ``None`` where it is that of the engine's handle.
    """

    body: str = "{}"
    authorization: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the body."""
        fields: dict[str, Any] = json.loads(self.body)
        return fields

    def headers(self) -> dict[str, str]:
        """Return the headers of the request."""
        return {} if self.authorization is None else {"Authorization": self.authorization}

    def settings(self) -> dict[str, Any]:
        """Return the same as settings of a request through the OpenAI SDK."""
        fields, headers = self.fields(), self.headers()
        model = {"model": fields.pop("model")} if "model" in fields else {}
        return {
            **model,
            **({"extra_body": fields} if fields else {}),
            **({"extra_headers": headers} if headers else {}),
        }


class KVScopes:
    """The KV scopes of one engine's requests, as far as they are known. Thread-safe.

    A search does not know which request will show its documents. What is prefilled for it gets the scope of the
    requests so far that showed documents. Where these differ, it is not known, and stays so: a wrong scope would let
    requests of another tenant find the KV. So it is where their scope is not that of a model: the next call may have
    another salt.
    """

    def __init__(self, model: str, api_key: str) -> None:
        """``model`` and ``api_key`` are those of the engine's handle."""
        self._model = model
        self._authorization = f"Bearer {api_key}"
        self._lock = Lock()
        self._expected: set[KVScope] = set()
        self._seen: set[KVScope] = set()
        self._is_warned = False

    def read(self, settings: Mapping[str, Any]) -> KVScope:
        """Return the scope of a request with these settings, vLLM's own of which are in ``extra_body``."""
        given = {**settings, **(settings.get("extra_body") or {})}
        fields = {name: given[name] for name in ("model", "cache_salt") if given.get(name)}
        if fields.get("model") == self._model:
            del fields["model"]
        params = given.get("kv_transfer_params")
        if isinstance(params, Mapping) and (kept := {k: v for k, v in params.items() if k not in _OURS}):
            fields["kv_transfer_params"] = kept
        headers = settings.get("extra_headers") or {}
        sent = next((value for name, value in headers.items() if name.lower() == "authorization"), None)
        own = sent if isinstance(sent, str) and sent != self._authorization else None
        return KVScope(json.dumps(fields, sort_keys=True, default=repr), own)

    def expect(self, settings: Mapping[str, Any]) -> None:
        """Take note of a model that was made: until a request shows documents, its scope is the likely one."""
        self._add(self._expected, self.read(settings))

    def note(self, settings: Mapping[str, Any]) -> None:
        """Take note of a request that shows documents."""
        self._add(self._seen, self.read(settings))

    def of(self, bound: KVScope | None) -> KVScope | None:
        """Return the scope of the requests that will show a prompt; ``None`` where it is not known.

        Args:
            bound: the scope with which the prompt was bound, if it was bound with one.
        """
        if bound is not None:
            return bound
        with self._lock:
            known = self._seen or self._expected or {KVScope()}
            if len(known) == 1 and known <= self._expected | {KVScope()}:
                return next(iter(known))
            is_new, self._is_warned = not self._is_warned, True
        if is_new:
            _logger.warning(
                "No prefill while the search runs: requests of this engine differ in model, cache_salt, "
                "kv_transfer_params or key, and a search does not know which of them follows. %s",
                HINT,
            )
        return None

    def _add(self, scopes: set[KVScope], scope: KVScope) -> None:
        with self._lock:
            if len(scopes) < 2:  # two are enough to know that they differ
                scopes.add(scope)


HINT = (
    "Name them where the prompt is bound, engine.bind_prompt(..., settings={'extra_body': {'cache_salt': ...}}), and "
    "pass that prompt to the retriever"
)
