"""Run code up to its request, which is captured instead of sent; and the scopes of requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

import httpx

from ragcache_core.client.http.buffered_response import RawHeaders
from ragcache_core.errors import ConfigError

_scope: ContextVar[object | None] = ContextVar("ragcache_request_scope", default=None)
_COMPLETIONS = "/completions"
_PROMPTS = ("/v1/ragcache/prompt", "/tokenize")
_SET_AGAIN = frozenset((b"content-length", b"transfer-encoding"))


def current_scope() -> object | None:
    """Return the scope of requests in this context; ``None`` if there is none."""
    return _scope.get()


@contextmanager
def request_scope(scope: object) -> Iterator[None]:
    """Make requests and speculations in ``scope``. Do not yield inside, as the reader would be in it too."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        with suppress(ValueError):  # what never went on is closed in another context, which was not changed
            _scope.reset(token)


@dataclass(frozen=True, slots=True)
class CapturedRequest:
    """A completion request as it would have been sent.

    ``key`` is that of every request that asks the same; it is made in the name of ``scope``.
    """

    method: str
    url: str
    headers: RawHeaders
    body: bytes
    key: bytes
    scope: object | None

    @property
    def authorization(self) -> str | None:
        """The authorization header."""
        return next((value.decode() for name, value in self.headers if name.lower() == b"authorization"), None)

    @classmethod
    def of(cls, request: httpx.Request) -> CapturedRequest:
        """Return the capture of ``request``, whose body was read."""
        headers = [(name, value) for name, value in request.headers.raw if name.lower() not in _SET_AGAIN]
        return cls(request.method, str(request.url), headers, request.content, request_key(request), current_scope())


def asks_completion(request: httpx.Request) -> bool:
    """Return whether ``request`` is for a completion or a chat."""
    return request.method == "POST" and request.url.path.endswith(_COMPLETIONS)


def asks_prompt(request: httpx.Request) -> bool:
    """Return whether ``request`` is for the tokens of a prompt, which an answer needs as a completion does."""
    return request.method == "POST" and request.url.path.endswith(_PROMPTS)


def request_key(request: httpx.Request) -> bytes:
    """Return a digest of ``request``: its URL, its key and every byte of its body."""
    digest = hashlib.blake2b()
    for part in (str(request.url), request.headers.get("Authorization", "")):
        digest.update(part.encode() + b"\0")
    digest.update(request.content)
    return digest.digest()


def capture_request(call: Callable[[], object], owner: object) -> CapturedRequest:
    """Return the completion request that ``call`` would send through a transport of ``owner``.

    ``call`` ends at this request. Requests of another kind, or to another server, are sent as usual.

    Raises:
        ConfigError: it sent none.
        Exception: raised by ``call`` before its request.
    """
    pending = _Capture(owner)
    token = _current.set(pending)
    try:
        call()
    except _Captured:
        pass
    except Exception:  # some code raises its own error for everything that goes wrong below it
        if pending.captured is None:
            raise
    finally:
        _current.reset(token)
    if pending.captured is None:
        raise ConfigError(
            "the captured code sent no completion request to this engine: use the engine's "
            "http_client() and base_url in it, in the thread and context that calls it"
        )
    return pending.captured


def capture(request: httpx.Request, owner: object) -> None:
    """End the capture of this code, if there is one and ``request`` is the awaited one."""
    pending = _current.get()
    if pending is not None and pending.owner is owner and asks_completion(request):
        pending.captured = CapturedRequest.of(request)
        raise _Captured


class _Captured(BaseException):
    """Unwinds captured code. Not an ``Exception``, which clients would wrap or retry."""


@dataclass(slots=True)
class _Capture:
    owner: object
    captured: CapturedRequest | None = None


_current: ContextVar[_Capture | None] = ContextVar("ragcache_capture", default=None)
