"""RAGCache's connector with others, as a named child of vLLM's MultiConnector with its own settings.

vLLM loads a prompt's KV from the first connector that has tokens of it, and has all of them store. Ours stores the KV
in the engine's blocks, computed or loaded by any connector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragcache_core.config import MULTI_CONNECTOR, OWN_CONNECTORS, check_connectors
from ragcache_core.errors import ConfigError
from ragcache_core.log import join_tree, logger_of

MODULE = "ragcache_core.vllm_plugin.connector"
logger = logger_of(__name__)


def register() -> None:
    """Join vLLM's log, and register RAGCache's connector names, by which MultiConnector separates statistics.

    A general plugin of vLLM: it runs in every process of vLLM, whatever that serves, and so never fails.
    """
    join_tree("vllm")
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        for name in OWN_CONNECTORS:
            try:
                KVConnectorFactory.register_connector(name, MODULE, name)
            except ValueError:  # loaded once more
                logger.debug("%s is known to vLLM", name)
    except Exception as error:  # another vLLM: a configuration with our module needs no name
        logger.debug("RAGCache's connectors have no names here: %s", error)


def children(transfer: Any) -> list[Mapping[str, Any]]:
    """Return the settings of each connector in a MultiConnector; empty for another connector."""
    if getattr(transfer, "kv_connector", None) != MULTI_CONNECTOR:
        return []
    return [each for each in transfer.kv_connector_extra_config.get("connectors") or () if isinstance(each, Mapping)]


def is_own(child: Mapping[str, Any]) -> bool:
    """Return whether a connector in a MultiConnector is RAGCache's."""
    return child.get("kv_connector") in OWN_CONNECTORS and child.get("kv_connector_module_path") in (None, MODULE)


def extra_config(transfer: Any) -> Mapping[str, Any]:
    """Return RAGCache's ``kv_connector_extra_config`` in vLLM's ``kv_transfer_config``, nested or not."""
    own = next(filter(is_own, children(transfer)), None)
    if own is not None:
        return own.get("kv_connector_extra_config") or {}
    return getattr(transfer, "kv_connector_extra_config", None) or {}


def ragcache_connector(connector: Any) -> Any:
    """Return RAGCache's connector in vLLM's scheduler, itself or in a MultiConnector."""
    among = getattr(connector, "sub_connectors", ())
    return next((each for each in among if hasattr(each, "keeping_weights")), connector)


def own_stats(stats: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return RAGCache's part of a step's ``kv_connector_stats``."""
    return next((stats[name] for name in OWN_CONNECTORS if name in stats), stats)


def check_other_connectors(vllm_config: Any, *, approximation: str | None, max_age: float | None) -> None:
    """Reject other connectors with which answers or cache reports would be wrong.

    Raises:
        ConfigError: with what to change.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    among = children(transfer)
    others = [child for child in among if not is_own(child)]
    if len(among) > len(others) + 1:
        raise ConfigError(f"connectors names {len(among) - len(others)} of RAGCache: leave all but one out")
    try:
        check_connectors(others, approximation=approximation, max_age=max_age)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, with which a request fails whose KV is "
            "lost: set it to 'recompute' in the MultiConnector's settings"
        )
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: beside other connectors RAGCache does not "
            "hear what each stage has in host memory, so leave pipeline_parallel_size or connectors out"
        )
    if parallel.nnodes > 1 or parallel.distributed_executor_backend not in ("mp", "uni"):
        raise ConfigError(
            f"distributed_executor_backend is {parallel.distributed_executor_backend!r} on {parallel.nnodes} nodes: "
            "beside other connectors RAGCache does not hear where each worker's host memory is, so keep all workers "
            "on one machine ('mp'), or leave connectors out"
        )
