"""vLLM's own scheduler, with the calls of RAGCache's that the server's process makes."""

from __future__ import annotations

import time
from copy import copy
from typing import Any

from ragcache_core.vllm_plugin.compat import attach_utilities
from ragcache_core.vllm_plugin.other_connectors import ragcache_connector

_NO_CACHE = "this release of vLLM is unknown, and caches without RAGCache"


class _Reporting:
    get_kv_connector: Any

    def confirm(self, speculation: str, tenant: str | None = None) -> dict[str, object] | None:
        """Return a report: every request is real, so there is nothing to confirm."""
        return self.report()

    def report(self) -> dict[str, object]:
        """Return the connector's counts."""
        report: dict[str, object] = ragcache_connector(self.get_kv_connector()).controller.report()
        return report

    def forget(self, doc_ids: list[str]) -> dict[str, object]:
        """Return why nothing is deleted: vLLM's own blocks are in no tree."""
        return {"refused": _NO_CACHE}

    def left(self) -> dict[str, object]:
        """Return that no deletion is open."""
        return {"num_requests": 0, "num_blocks": 0, "problems": []}

    def cached_paths(self, cursor: str, tenant: str | None = None) -> dict[str, object]:
        """Return the tree's cached prefixes: none."""
        changes: dict[str, object] = (
            ragcache_connector(self.get_kv_connector()).controller.paths_of(tenant).changes(cursor)
        )
        return changes

    def act_on_cache(self, action: str, body: dict[str, Any]) -> dict[str, object]:
        """Return an empty tree, or the reason why the call is not supported."""
        if action == "tick":
            return self.report()
        controller = ragcache_connector(self.get_kv_connector()).controller
        if action != "tree":
            return {"refused": _NO_CACHE}
        call = controller.tree_view(body["limit"])
        view: dict[str, object] = controller.operator_calls.advance(
            body["token"], call, keeps_answer=body["keeps_answer"]
        )
        return view

    def recent_requests(self, limit: int) -> dict[str, object]:
        """Return the state of the latest requests, without times of first tokens."""
        controller = ragcache_connector(self.get_kv_connector()).controller
        recent: dict[str, object] = controller.recent_requests(limit, time.monotonic())
        return recent


def own_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Return vLLM's scheduler for settings without ``--scheduler-cls``."""
    attach_utilities()
    config = copy((kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]).scheduler_config)
    config.scheduler_cls = None
    kind = config.get_scheduler_cls()
    scheduler: Any = type(kind.__name__, (_Reporting, kind), {})(*args, **kwargs)
    connector = scheduler.get_kv_connector()
    if (own := ragcache_connector(connector)) is not connector:
        own.stop_reporting()  # MultiConnector would file what it says under a name that its server does not know
    return scheduler
