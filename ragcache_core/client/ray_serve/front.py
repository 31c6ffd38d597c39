"""The ingress of replicas on Ray Serve: it takes HTTP requests, and Serve's router sends each to a replica."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import httpx
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from ragcache_core.client.http.affinity import RequestInfo
from ragcache_core.client.http.attempt import engine_died
from ragcache_core.client.ray_serve.known_replicas import BAD_GATEWAY, HOP_BY_HOP_HEADERS, Head, ReplicaRequest
from ragcache_core.client.speculation.request_capture import asks_completion
from ragcache_core.log import logger_of
from ragcache_core.ordering import PATHS_VERSION
from ragcache_core.runtime.api_keys import is_among, shown_digest
from ragcache_core.stats import ForgetReceipt, merged_report
from ragcache_core.wire import REPLICA_HEADER, REQUEST_ROUTE, SPECULATION_ROUTE, max_body_bytes

Bodies = Mapping[str, bytes]
"""Responses of replicas by name."""
_RECEIPT = TypeAdapter(ForgetReceipt)
_OF_ONE = re.compile(r"/v1/ragcache/(cache|cache/gc|drain|documents/(show|pin|unpin|prefetch))")
_MAX_PLACES = 8192
_MAX_LOST = 3
"""Maximum number of replicas that may fail during one request, which may be the cause."""
_PAUSE_S = 0.2
_PROBES = ("/health", "/ready")
_PROBE_S = 4.0
"""Seconds that a probe waits for a replica: after more, its sender takes the engine for one that hangs."""
_UNAVAILABLE = 503
_WITHOUT_KEY = ("GET", "HEAD", "OPTIONS")
"""Methods for which the engine checks the key: health and metrics need none."""
_MAX_BODY_BYTES = max_body_bytes(1 << 20, takes_files=True)
"""More than any engine's door takes: each knows its own limit, and says which."""
logger = logger_of(__name__)


def _report(bodies: Bodies) -> bytes:
    return json.dumps(merged_report([json.loads(body) for body in bodies.values()])).encode()


def _receipt(bodies: Bodies) -> bytes:
    receipts = [_RECEIPT.validate_python({**json.loads(body), "is_complete": None}) for body in bodies.values()]
    return json.dumps(reduce(ForgetReceipt.merge_replicas, receipts).to_dict()).encode()


def _most_read(bodies: Bodies) -> bytes:
    return max(bodies.values(), key=lambda body: int(json.loads(body)["num_read_tokens"]))


def _metrics(bodies: Bodies) -> bytes:
    """Return several Prometheus pages as one, each sample with its replica's name."""
    families: dict[str, Metric] = {}
    for name, body in bodies.items():
        for family in text_string_to_metric_families(body.decode()):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [each._replace(labels={**each.labels, "replica": name}) for each in family.samples]
    page: bytes = generate_latest(SimpleNamespace(collect=families.values))
    return page


def _paths(bodies: Bodies) -> bytes:
    """Return the cached prefixes of all replicas, in the format of one server with several engines."""
    replies: dict[str, dict[str, Any]] = {name: json.loads(bodies[name]) for name in sorted(bodies)}
    whole = {
        "version": PATHS_VERSION,
        "cursor": ",".join(f"{name}~{answer['cursor']}" for name, answer in replies.items()),
        "is_complete": all(answer["is_complete"] for answer in replies.values()),
        "engines": [engine for answer in replies.values() for engine in answer["engines"]],
    }
    return json.dumps(whole, separators=(",", ":")).encode()


PATHS_ROUTE = "/v1/ragcache/cached_paths"
MERGED: Mapping[tuple[str, str], Callable[[Bodies], bytes]] = {
    ("GET", "/metrics"): _metrics,
    ("GET", "/metrics/"): _metrics,
    ("GET", "/v1/ragcache/stats"): _report,
    ("GET", PATHS_ROUTE): _paths,
    ("POST", "/v1/ragcache/documents/forget"): _receipt,
    ("POST", "/v1/ragcache/cache/purge"): _receipt,
    ("POST", "/v1/ragcache/prefetch"): _most_read,
}
"""Routes that all replicas answer, and how their responses are merged."""


def cursors_of(cursor: str) -> dict[str, str]:
    """Return the cursor of each replica in a cursor of :data:`PATHS_ROUTE`."""
    return dict(each.split("~", 1) for each in cursor.split(",") if "~" in each)


class Front:
    """The ingress deployment. It resends a request that no replica has begun to answer, up to its time limit.

    A speculation, its confirmation, its end and a request's statistics reach the replica that has them. If another
    front sent that request, all replicas get the call. Statistics and deletions are those of all replicas together.

    A request without a valid key is rejected here, before its body is read. The engine checks the key and its rights
    again.
    """

    def __init__(self, replicas: Any, retry_timeout_s: float, keys: Sequence[bytes]) -> None:
        """Take ``replicas``, Serve's handle of :class:`EngineReplica`, and ``keys``, the hashes of their keys."""
        self._replicas = replicas
        self._retry_timeout_s = retry_timeout_s
        self._keys = tuple(keys)
        self._places: OrderedDict[str, str] = OrderedDict()

    async def __call__(self, request: Request) -> Response:
        """Answer any route of an engine's server."""
        if (path := _path(request)) is None:
            return _refused(404, f"{request.url.path:.200} is not below the application's prefix")
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP_HEADERS]
        has_key = is_among(shown_digest(request.headers.get("authorization", "")), self._keys)
        if not has_key and request.method not in _WITHOUT_KEY:
            return JSONResponse({"error": "Unauthorized"}, 401)  # as vLLM says it
        if (body := await _body(request) if has_key else b"") is None:
            return _refused(
                413, f"the request's body has more than {_MAX_BODY_BYTES} bytes: send fewer prompts at once"
            )
        ask = ReplicaRequest(request.method, path, headers, body)
        route = path.partition("?")[0]
        if _OF_ONE.fullmatch(route):
            return _refused(409, f"{route} is each replica's own, and Ray Serve has no name for one of them")
        if (ask.method, route) in MERGED:
            return await self._of_all(ask, route)
        if (found := SPECULATION_ROUTE.match(route)) is not None:
            ask.replica = self._places.get(found[1])
        elif REQUEST_ROUTE.match(route):
            ask.replica = self._places.get(request.headers.get(REPLICA_HEADER, ""))
        elif route in _PROBES:
            return await self._probe(ask)
        else:
            return await self._of_one(ask)
        return await (self._of_first(ask) if ask.replica is None else self._of_one(ask))

    # One replica answers

    async def _probe(self, ask: ReplicaRequest) -> Response:
        try:
            return await asyncio.wait_for(self._of_one(ask), _PROBE_S)
        except TimeoutError:
            return _unavailable(f"none within {_PROBE_S:g} s")

    async def _of_one(self, ask: ReplicaRequest) -> Response:
        request = httpx.Request(ask.method, f"http://replica{ask.path}", headers=ask.headers, content=ask.body)
        if asks_completion(request):
            read = RequestInfo.of(request)
            ask.prompt = read.prompt
            if read.speculation is not None:  # it may be confirmed before it is answered
                ask.on_chosen = partial(self._remember, read.speculation)
        ends_s, num_lost = time.monotonic() + self._retry_timeout_s, 0
        while True:
            try:
                return await self._begin(ask)
            except _UnansweredError as failure:
                num_lost += failure.was_begun
                is_once = failure.was_begun and ask.prompt is None and ask.method != "GET"
                if is_once or num_lost >= _MAX_LOST:
                    return _refused(
                        500, f"{num_lost} replicas lost this request, and it is sent to no other: send it again"
                    )
                if time.monotonic() >= ends_s:
                    return _unavailable(str(failure))
                logger.warning("RC-REPLICA-FAILED: a request is sent to another replica: %s", failure)
                if ask.sent_to is None or ask.sent_to in ask.tried:  # no replica is there, or no other
                    await asyncio.sleep(_PAUSE_S)
                ask = ask.again()

    async def _begin(self, ask: ReplicaRequest) -> Response:
        """Return the response after its first bytes.

        Raises:
            _UnansweredError: this replica gives none.
        """
        parts = self._replicas.options(stream=True).ask.remote(ask)
        try:
            try:
                status, headers = await anext(parts)
                first = await anext(parts, b"")
            except Exception as error:  # errors of Serve and Ray: the replica is gone, or its server is
                raise _UnansweredError(f"{type(error).__name__}: {error!s:.200}", ask.sent_to is not None) from error
            if status in (BAD_GATEWAY, _UNAVAILABLE) or engine_died(httpx.Response(status, headers=headers), first):
                raise _UnansweredError(f"status {status} {first[:200]!r}", status not in (BAD_GATEWAY, _UNAVAILABLE))
        except BaseException as error:
            parts.cancel()
            if isinstance(error, _UnansweredError):
                ask.failed()
            ask.end()
            raise
        ask.answered()
        if (name := dict(headers).get(REPLICA_HEADER)) is not None and ask.sent_to is not None:
            self._remember(name, ask.sent_to)
        return _Passed(ask, (status, headers), first, parts)

    def _remember(self, name: str, replica: str) -> None:
        self._places.pop(name, None)
        self._places[name] = replica
        if len(self._places) > _MAX_PLACES:
            self._places.popitem(last=False)

    # All replicas answer

    async def _of_all(self, ask: ReplicaRequest, route: str) -> Response:
        answers, failed = await self._call_all(ask)
        if route == PATHS_ROUTE and answers.keys() != (cursors := _cursors(ask)).keys() and cursors:
            answers, failed = await self._call_all(ask, from_start=True)  # others are there than were
        if not answers or (failed and ask.method == "POST"):
            return _unavailable(f"not every replica answers, send the request again: {failed!s:.400}")
        for (status, headers), body in answers.values():
            if status != httpx.codes.OK:
                return Response(body, status, dict(headers))
        whole = MERGED[ask.method, route]({name: body for name, (_, body) in answers.items()})
        return Response(
            whole, media_type="text/plain; version=0.0.4" if route.startswith("/metrics") else "application/json"
        )

    async def _of_first(self, ask: ReplicaRequest) -> Response:
        """Return the response of the one replica that knows a request which another ingress sent."""
        answers, failed = await self._call_all(ask)
        if not answers:
            return _unavailable(str(failed))
        (status, headers), body = min(answers.values(), key=_ignorance)
        return Response(body, status, dict(headers))

    async def _call_all(
        self, ask: ReplicaRequest, *, from_start: bool = False
    ) -> tuple[dict[str, tuple[Head, bytes]], list[Any]]:
        """Return each replica's response by name, and the failures of others."""
        is_about_paths = ask.path.partition("?")[0] == PATHS_ROUTE
        cursors = ({} if from_start else _cursors(ask)) if is_about_paths else None
        calls = self._replicas.broadcast("send_whole", ask, cursors)
        try:
            results = await calls.results_async(return_exceptions=True)
        except Exception as error:  # Serve's own: there are none
            return {}, [error]
        failed = [each for each in results if isinstance(each, BaseException)]
        return {each[0]: each[1:] for each in results if not isinstance(each, BaseException)}, failed


class _Passed(StreamingResponse):
    """A replica's response, forwarded as it arrives. The router learns how it ends."""

    def __init__(self, ask: ReplicaRequest, head: Head, first: bytes, parts: Any) -> None:
        status, headers = head
        super().__init__(self._all(first, parts), status, dict(headers))
        self._ask = ask
        self._parts = parts

    @staticmethod
    async def _all(first: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield first
        async for part in parts:
            yield part

    async def __call__(self, *asgi: Any) -> None:
        try:
            await super().__call__(*asgi)
        finally:
            self._parts.cancel()
            self._ask.end()


class _UnansweredError(Exception):
    """A replica does not answer a request; ``was_begun`` is false if it certainly did not receive it."""

    def __init__(self, why: str, was_begun: bool) -> None:
        super().__init__(why)
        self.was_begun = was_begun


def _path(request: Request) -> str | None:
    """Return the path below the application's prefix with its query; ``None`` if it is not below."""
    typed = request.scope.get("raw_path") or request.scope["path"].encode()
    path = typed.decode("ascii").partition("?")[0].removeprefix(request.scope.get("root_path", ""))
    if not path.startswith("/"):  # "%2F" is a slash to the proxy that chose the application, and none in an address
        return None
    return f"{path}?{request.url.query}" if request.url.query else path


async def _body(request: Request) -> bytes | None:
    """Return a request's body; ``None`` if it is too large."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:19]) > _MAX_BODY_BYTES:
        return None
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            return None
    return bytes(body)


def _ignorance(answer: tuple[Head, bytes]) -> tuple[int, bool]:
    """Return how little a response knows, as a sort key: a replica without the speculation reports no wait."""
    (status, _), body = answer
    return status, b'"waited_s":null' in body.replace(b" ", b"")


def _cursors(ask: ReplicaRequest) -> dict[str, str]:
    return cursors_of(parse_qs(ask.path.partition("?")[2]).get("cursor", [""])[0])


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"error": {"message": why, "type": "ReplicaError", "code": status}}, status)


def _unavailable(why: str) -> Response:
    """Return the response of a proxy whose servers are away, after which clients retry."""
    return PlainTextResponse(f"no replica answers: {why:.400}", _UNAVAILABLE, {"Retry-After": "2"})
