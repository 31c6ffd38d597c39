"""One server's HTTP routes: how blocking and asynchronous code asks them, and the handshake with the server."""

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
"""What openai needs for its first request, and httpx for its first asynchronous one: 0.2 to 0.4 s."""
_T = TypeVar("_T")


def import_requests() -> None:
    """Import what the first request would import otherwise: packages load parts of themselves at first use."""
    for name in _LAZY:
        importlib.import_module(name)


@contextmanager
def importing_requests() -> Iterator[None]:
    """Do :func:`import_requests` while the body waits for something else; leaving the body waits for its end."""
    thread = threading.Thread(target=import_requests, name="ragcache-imports")
    thread.start()
    try:
        yield
    finally:
        thread.join()


@dataclass(frozen=True, slots=True)
class Call(Generic[_T]):
    """One request to a route, and how its answer is read.

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
    """What a server says of its model: its name there, where it was loaded from, its context window in tokens."""

    name: str
    root: str
    max_model_len: int


class ServerAPI:
    """Asks one server. May be used by any thread and any event loop; the clients stay their owner's.

    Attributes:
        base_url: the root of the OpenAI protocol, which ends in ``/v1``.
        root: the server's own.
        headers: say who asks.
    """

    def __init__(
        self, base_url: str, api_key: str, http: httpx.Client, http_async: httpx.AsyncClient | None = None
    ) -> None:
        """``http_async`` is for :meth:`aask`."""
        self.base_url = base_url
        self.root = base_url.removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {api_key}"}
        self._http = http
        self._http_async = http_async

    def ask(self, call: Call[_T]) -> _T:
        """Return what the server answers.

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
        """Do :meth:`ask`, for code that :func:`~ragcache_core.client.http.network.finish` runs, or :meth:`aask`."""
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
        """Return what the server says of its model.

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
            raise EngineError(f"what answers at {self.base_url} is no vLLM server: it lists no model") from error
        raise EngineError(f"what answers at {self.base_url} is no vLLM server: its model card names no max_model_len")


def json_object(response: httpx.Response) -> dict[str, Any] | None:
    """Return the object that a route answers; ``None`` for any other answer."""
    try:
        answer = response.json() if response.status_code == 200 else None
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def as_it_is(response: httpx.Response) -> httpx.Response:
    """Return an answer, whatever it says."""
    return response
