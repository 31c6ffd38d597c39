"""The HTTP routes of one server: blocking and asynchronous requests, and the handshake."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx

from ragcache_core.client.http.attempt import NO_RETRY
from ragcache_core.client.http.errors import translate_errors
from ragcache_core.errors import EngineAuthError, EngineError

_LAZY = ("openai.resources", "anyio._backends._asyncio")
"""Modules for openai's first request, and httpx's first asynchronous one: 0.2 to 0.4 s."""
_T = TypeVar("_T")


def import_requests() -> None:
    """Import the packages that the first request would import."""
    for name in _LAZY:
        importlib.import_module(name)


@contextmanager
def importing_requests() -> Iterator[None]:
    """Do :func:`import_requests` in a thread during the body; leaving the body waits for it."""
    thread = threading.Thread(target=import_requests, name="ragcache-imports")
    thread.start()
    try:
        yield
    finally:
        thread.join()


@dataclass(frozen=True, slots=True)
class Call(Generic[_T]):
    """One request to a route, and the reader of its response.

    Attributes:
        path: below the server's root, ``/v1/ragcache/stats``.
        read: returns what an answer says, or raises why it cannot be used.
        method: of HTTP.
        body: sent as JSON.
        params: of the query.
        timeout: seconds, or httpx's own for each part; without one the client's.
        authorization: the request's ``Authorization`` header, if it is not that of the engine's handle.
        is_sent_once: whether it is worth one try only; see ``NO_RETRY``.
    """

    path: str
    read: Callable[[httpx.Response], _T]
    method: str = "GET"
    body: Mapping[str, Any] | None = None
    params: Mapping[str, Any] | None = None
    timeout: httpx.Timeout | float | None = None
    authorization: str | None = None
    is_sent_once: bool = False


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A server's model: its served name, its source, its context window in tokens."""

    name: str
    root: str
    max_model_len: int


class ServerAPI:
    """Sends requests to the routes of one server. Thread-safe, for any event loop; does not close its clients.

    Attributes:
        base_url: the root of the OpenAI protocol, which ends in ``/v1``.
        root: the server's own.
        headers: say who asks.
    """

    def __init__(
        self, base_url: str, api_key: str, http: httpx.Client, http_async: httpx.AsyncClient | None = None
    ) -> None:
        """Take the clients; ``http_async`` is for :meth:`aask`."""
        self.base_url = base_url
        self.root = base_url.removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {api_key}"}
        self._http = http
        self._http_async = http_async

    def ask(self, call: Call[_T]) -> _T:
        """Send a request and return the read response.

        Raises:
            EngineError: it cannot be asked. RAGCacheError: of ``call.read``.
        """
        with translate_errors():
            return call.read(self._http.request(**self._request(call)))

    async def aask(self, call: Call[_T]) -> _T:
        """Do :meth:`ask` without blocking the event loop."""
        assert self._http_async is not None
        with translate_errors():
            return call.read(await self._http_async.request(**self._request(call)))

    async def call_async(self, call: Call[_T], *, is_blocking: bool) -> _T:
        """Do :meth:`aask`, or :meth:`ask` for code that :func:`~ragcache_core.client.http.network.finish` runs."""
        return self.ask(call) if is_blocking else await self.aask(call)

    def _request(self, call: Call[Any]) -> dict[str, Any]:
        return {
            "method": call.method,
            "url": f"{self.root}{call.path}",
            "json": call.body,
            "params": call.params,
            "headers": self.headers if call.authorization is None else {"Authorization": call.authorization},
            **({} if call.timeout is None else {"timeout": call.timeout}),
            **({"extensions": NO_RETRY} if call.is_sent_once else {}),
        }

    # The handshake

    def model_card(self) -> ModelCard:
        """Return the model that the server reports.

        Raises:
            EngineAuthError: the key is wrong or missing. EngineError: what answers is not a vLLM server.
        """
        page = self.ask(Call("/v1/models", as_it_is))
        if page.status_code in (401, 403):
            raise EngineAuthError(f"the engine at {self.base_url} refused the API key: pass the server's api_key")
        try:
            match page.raise_for_status().json()["data"][0]:
                case {"id": str(name), "max_model_len": int(tokens)} as card if tokens > 0:
                    return ModelCard(name, str(card.get("root") or name), tokens)
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise EngineError(
                f"the server at {self.base_url} is not a vLLM server, as /v1/models lists no model: check the address"
            ) from error
        raise EngineError(
            f"the server at {self.base_url} is not a vLLM server, as /v1/models names no "
            "max_model_len: check the address"
        )


def json_object(response: httpx.Response) -> dict[str, Any] | None:
    """Return the JSON object in a response; ``None`` for any other response."""
    try:
        answer = response.json() if response.status_code == 200 else None
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def as_it_is(response: httpx.Response) -> httpx.Response:
    """Return a response unchanged."""
    return response
