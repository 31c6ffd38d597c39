"""Replicas of an engine as an application of Ray Serve: each launches a server on its node, and forwards requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import httpx

from ragcache_core.client.engine import Engine
from ragcache_core.client.fleet.fleet import served_model_identity
from ragcache_core.client.launch.ranks import own_folder, own_log
from ragcache_core.client.launch.settings import VLLMOffload
from ragcache_core.client.ray_serve.known_replicas import BAD_GATEWAY, HOP_BY_HOP_HEADERS, Head, ReplicaRequest
from ragcache_core.config import CacheConfig
from ragcache_core.errors import ConfigError, EngineDiedError, EngineError
from ragcache_core.runtime.api_keys import hashed
from ragcache_core.runtime.environment import API_KEY_ENV
from ragcache_core.runtime.tenants import Tenants

_SERVES = ("cancel", "data_parallel_size", "host", "max_restarts", "port", "progress", "restart_window_s")
"""Settings of a launch that are not the user's here: Serve places replicas, and restarts them."""
_OPTIONS_CURES: Mapping[str, str] = {
    "num_replicas": "give ragcache_deployment's own num_replicas",
    "autoscaling_config": "give ragcache_deployment's own autoscaling_config",
    "name": "leave it out, and name the application in serve.run",
    "request_router_config": "leave it out: the router is what sends a request to its documents",
}
_ROUTER = "ragcache_core.client.ray_serve.router.DocumentRouter"
_TIMEOUT_S = 60.0
_REPLICA: Mapping[str, Any] = {
    "max_ongoing_requests": 1000,  # requests queue in vLLM, whose queue is cache-aware
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 30.0,
    "graceful_shutdown_timeout_s": 60.0,
}
_FRONT: Mapping[str, Any] = {"max_ongoing_requests": 10_000, "ray_actor_options": {"num_cpus": 0}}
_HEALTH_TIMEOUT_S = 10.0
_FIGURES_TIMEOUT_S = 5.0
_ORDER_TIMEOUT_S = 120.0
"""Seconds that the answer of all replicas waits for one: for its figures, and until it has carried out a call."""
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


def ragcache_deployment(
    model: str,
    *,
    api_key: str | None = None,
    num_replicas: int | Literal["auto"] | None = None,
    autoscaling_config: Mapping[str, Any] | None = None,
    cache: CacheConfig | VLLMOffload | None = CacheConfig(),  # noqa: B008 (frozen)
    replica_options: Mapping[str, Any] | None = None,
    front_options: Mapping[str, Any] | None = None,
    **engine_settings: Any,
) -> Any:
    """Return replicas of an engine as an application of Ray Serve, which ``serve.run`` runs.

    ::

        serve.run(ragcache_deployment("org/model", api_key=KEY, num_replicas=2, replica_options={
            "ray_actor_options": {"num_gpus": 1}}))
        engine = Engine.connect("http://127.0.0.1:8000", api_key=KEY)

    Each replica owns an engine's server. A request goes to the replica that has its documents, as in a
    :class:`~ragcache_core.client.fleet.fleet.Fleet`. If that fails before its answer begins, another one answers.

    Args:
        model: a folder in Hugging Face format that every node has, or a name of the hub.
        api_key: API key of all replicas; by default ``RAGCACHE_API_KEY``.
        num_replicas: number of replicas, by default one without ``autoscaling_config``; "auto" for Serve's autoscaling.
        autoscaling_config: Serve's autoscaling settings.
        cache: cache settings of each replica, which has its own folder in ``directory``.
        replica_options: Serve's deployment options of the replicas: ``ray_actor_options`` with the GPUs of each,
            ``max_ongoing_requests``, ``health_check_period_s`` and others.
        front_options: the same for the ingress; more than one may run.
        **engine_settings: settings of ``Engine.launch``, and vLLM's, such as ``max_model_len=8192``.

    Raises:
        ConfigError: Ray Serve is not installed, the key is missing, ``num_replicas`` is invalid, or a setting belongs
            to Serve.
    """
    api_key = api_key or os.environ.get(API_KEY_ENV)
    if not api_key:
        raise ConfigError(f"there is no api_key, and replicas can be reached from other machines: set {API_KEY_ENV}")
    is_number = isinstance(num_replicas, int) and not isinstance(num_replicas, bool) and num_replicas >= 1
    if num_replicas not in (None, "auto") and not is_number:
        raise ConfigError(f'num_replicas is {num_replicas!r:.80}: give 1 or more, "auto", or an autoscaling_config')
    if num_replicas is not None and autoscaling_config is not None:
        raise ConfigError(f"num_replicas is {num_replicas} and there is an autoscaling_config: leave one of them out")
    if taken := sorted(engine_settings.keys() & set(_SERVES)):
        raise ConfigError(
            f"{', '.join(taken)} cannot be set: Ray Serve places replicas and restarts them, num_replicas of them"
        )
    _check_options("replica_options", replica_options, _OPTIONS_CURES)
    _check_options("front_options", front_options, ("name",))
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(
            f"replicas on Ray Serve need ray[serve], which is not installed ({error}): pip install 'ragcache[ray]'"
        ) from error

    from ragcache_core.client.ray_serve.front import Front

    options = {**_REPLICA, **(replica_options or {}), "request_router_config": {"request_router_class": _ROUTER}}
    if autoscaling_config is None:
        options["num_replicas"] = num_replicas or 1
    else:
        options["autoscaling_config"] = dict(autoscaling_config)
    deployment: Any = serve.deployment
    settings = {**engine_settings, "cache": cache, "api_key": api_key}
    replicas = deployment(LaunchedReplica).options(name="ragcache-replica", **options).bind(model, settings)
    front = deployment(Front).options(name="ragcache-front", **{**_FRONT, **(front_options or {})})
    return front.bind(replicas, _TIMEOUT_S, _key_digests(api_key, cache))


def build(args: dict[str, Any]) -> Any:
    """Return :func:`ragcache_deployment` with ``args`` from a Ray Serve configuration file.

    ``cache`` is a table of settings.
    """
    cache = args.get("cache")
    return ragcache_deployment(**{**args, "cache": CacheConfig(**cache)} if isinstance(cache, dict) else args)


def _check_options(which: str, options: Mapping[str, Any] | None, refused: Iterable[str]) -> None:
    for name in refused:
        if name in (options or {}):
            raise ConfigError(f"{which} has {name!r}, which is not one of them: {_OPTIONS_CURES[name]}")


def _key_digests(api_key: str, cache: CacheConfig | VLLMOffload | None) -> list[bytes]:
    """Return the hashes of all keys of the engines.

    Raises:
        ConfigError: the file of tenants cannot be used.
    """
    if not isinstance(cache, CacheConfig) or cache.tenants is None:
        return [hashed(api_key)]
    tenants = Tenants.from_toml(cache.tenants.expanduser())
    return [hashed(api_key), *tenants.operator_digests, *tenants.digests]


class EngineReplica:
    """An engine as a Ray Serve replica; the engine stops with it."""

    def __init__(self, engine: Engine, name: str) -> None:
        """Take ``name``, Ray Serve's name of this replica."""
        self._name = name
        self._engine = engine
        self._root = httpx.URL(engine.base_url.removesuffix("/v1"))
        # The caller knows how long to wait.
        self._http = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(limits=_LIMITS), timeout=None)  # noqa: S113

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the metadata of this replica: server address, key, and the settings that all replicas must share."""
        return {
            "url": self._engine.base_url,
            "api_key": self._engine.api_key,
            "serves": served_model_identity(self._engine),
        }

    async def ask(self, ask: ReplicaRequest) -> AsyncIterator[Head | bytes]:
        """Yield status and headers of the server's answer, then its body as it arrives.

        Raises:
            EngineDiedError: the answer was cut.
        """
        headers = [(name, value) for name, value in ask.headers if name.lower() not in HOP_BY_HOP_HEADERS]
        url = self._root.copy_with(raw_path=ask.path.encode())  # whatever it says, it names no other server
        request = httpx.Request(ask.method, url, headers=headers, content=ask.body)
        try:
            response = await self._http.send(request, stream=True)
        except httpx.ConnectError:
            yield BAD_GATEWAY, []
            return
        except httpx.HTTPError as error:
            raise EngineDiedError(f"replica {self._name} did not answer: {error}") from None
        try:
            named = [
                (name, value) for name, value in response.headers.items() if name.lower() not in HOP_BY_HOP_HEADERS
            ]
            yield response.status_code, named
            async for part in response.aiter_raw():
                yield part
        except httpx.HTTPError as error:
            raise EngineDiedError(f"the answer of replica {self._name} was cut: {error}") from None
        finally:
            await response.aclose()

    async def send_whole(self, ask: ReplicaRequest, cursors: Mapping[str, str] | None) -> tuple[str, Head, bytes]:
        """Return this replica's name, and the server's whole answer.

        ``cursors``, of a question about the mirror, are where it goes on: from the beginning, where it is in none.

        Raises:
            EngineDiedError: there is none, or it takes too long; the others' are used without it.
        """
        if cursors is not None:
            ask.path = f"{ask.path.partition('?')[0]}?cursor={cursors.get(self._name, '')}"
        timeout_s = _FIGURES_TIMEOUT_S if ask.method == "GET" else _ORDER_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                head, *parts = [part async for part in self.ask(ask)]
        except TimeoutError:
            raise EngineDiedError(f"replica {self._name} did not answer within {timeout_s:g} s") from None
        assert not isinstance(head, bytes)
        return self._name, head, b"".join(part for part in parts if isinstance(part, bytes))

    async def check_health(self) -> None:
        """Raise unless the engine makes progress: Ray Serve then replaces this replica."""
        self._engine.num_restarts()
        try:
            answer = await self._http.get(self._root.copy_with(path="/health"), timeout=_HEALTH_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise EngineError(
                f"the health of replica {self._name} is unknown: {type(error).__name__} {error}"
            ) from None
        if answer.status_code != httpx.codes.OK:
            raise EngineError(f"replica {self._name} is unhealthy: {answer.status_code} {answer.text:.400}")

    def __del__(self) -> None:
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.close()


class LaunchedReplica(EngineReplica):
    """The deployment that Ray Serve runs ``num_replicas`` times. Its server ends with it, also when it is killed.

    The server listens on the node's address, so that the processes that ask follow what it has cached.
    """

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        """Start the server; ``settings`` are the arguments of ``Engine.launch``.

        Raises:
            EngineStartError, ConfigError: it cannot start; Serve tries again, and then says so.
        """
        from ray import serve
        from ray.util import get_node_ip_address

        context = serve.get_replica_context()
        host = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        settings = own_settings(settings, context.rank.rank)
        super().__init__(
            Engine.launch(model, host=host, max_restarts=0, progress=False, **settings), context.replica_tag
        )


def own_settings(settings: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return settings with a disk folder and log that no other replica on this machine uses."""
    name, log = f"replica-{rank}", settings.get("log_path")
    log_path = own_log(None if log is None else Path(log), name)
    return {**settings, "cache": own_folder(settings.get("cache"), name), "log_path": log_path}
