"""Replicas of an engine as an application of Ray Serve."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ragcache_core.client.launch.settings import VLLMOffload
from ragcache_core.config import CacheConfig
from ragcache_core.errors import ConfigError
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
    "max_ongoing_requests": 1000,  # vLLM has the queue, which knows what is cached
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 30.0,
    "graceful_shutdown_timeout_s": 60.0,
}
_FRONT: Mapping[str, Any] = {"max_ongoing_requests": 10_000, "ray_actor_options": {"num_cpus": 0}}


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
    :class:`~ragcache_core.client.fleet.fleet.Fleet`; another one answers what one that fails had not begun to.

    Args:
        model: a folder in Hugging Face format that every node has, or a name of the hub.
        api_key: the key that all replicas ask for; by default that of ``RAGCACHE_API_KEY``.
        num_replicas: how many; by default one, if they do not follow the load; "auto" has them follow it as Serve does.
        autoscaling_config: Serve's, by which their number follows the load.
        cache: what each replica keeps. On disk each has a folder of its own in ``directory``.
        replica_options: options of a deployment of Serve for the replicas: ``ray_actor_options``, which says how many
            GPUs each has, ``max_ongoing_requests``, ``health_check_period_s`` and the like.
        front_options: the same for the ingress before them; more than one may run.
        **engine_settings: those of ``Engine.launch``, and vLLM's: ``max_model_len=8192``.

    Raises:
        ConfigError: Ray Serve is not installed, there is no key, no replica, or a setting that Serve has.
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

    from ragcache_core.client.ray_serve.engine_replica import LaunchedReplica
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
    """Return :func:`ragcache_deployment` of a file of Serve's, whose ``args`` these are.

    ``cache`` is a table of settings.
    """
    cache = args.get("cache")
    return ragcache_deployment(**{**args, "cache": CacheConfig(**cache)} if isinstance(cache, dict) else args)


def _check_options(which: str, options: Mapping[str, Any] | None, refused: Iterable[str]) -> None:
    for name in refused:
        if name in (options or {}):
            raise ConfigError(f"{which} has {name!r}, which is not one of them: {_OPTIONS_CURES[name]}")


def _key_digests(api_key: str, cache: CacheConfig | VLLMOffload | None) -> list[bytes]:
    """Return the hashes of all keys that the engines know.

    Raises:
        ConfigError: the file of tenants cannot be used.
    """
    if not isinstance(cache, CacheConfig) or cache.tenants is None:
        return [hashed(api_key)]
    tenants = Tenants.from_toml(cache.tenants.expanduser())
    return [hashed(api_key), *tenants.operator_digests, *tenants.digests]
