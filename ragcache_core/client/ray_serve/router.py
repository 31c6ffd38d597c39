"""Ray Serve's router for replicas of an engine, which chooses as a fleet does.

Serve sends a copy of this module to the processes that ask: what they share with others is in modules that it imports.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ragcache_core.client.ray_serve.known_replicas import ReplicaRequest, ReplicaStates


class DocumentRouter(RequestRouter):
    """Sends a :class:`ReplicaRequest` to the replica with the highest score, or to the next if that is full."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Start without replicas. They report their keys themselves, as Ray's dashboard shows a router's settings."""
        self._known = ReplicaStates()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._known.update({_name(replica.replica_id): replica.replica_metadata for replica in replicas})
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or (ask := _ask(pending_request)) is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # between two rounds in which all are full
        by_name = {_name(replica.replica_id): replica for replica in candidate_replicas}
        names = self._known.choose(list(by_name), ask)
        return [[by_name[name] for name in rank] for rank in (names[:1], names[1:])]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (ask := _ask(pending_request)) is not None:
            self._known.sent(_name(replica_id), ask)


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _ask(pending_request: PendingRequest) -> ReplicaRequest | None:
    asked = pending_request.args[0] if pending_request.args else None
    return asked if isinstance(asked, ReplicaRequest) else None
